"""One tracker for a run: W&B, TensorBoard, CSV files and Comet get the same metrics under the same
names. One that fails is left out from there on, with one line, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.config import DeepSpeedMonitorConfig

from common.output import plain
from launch.config.groups import TrackingOptions
from launch.tracking.alerts import Alert
from launch.tracking.backend import Backend
from launch.tracking.destination import where
from launch.tracking.login import choose_mode
from launch.tracking.monitors import Comet, CsvFiles, TensorBoard
from launch.tracking.names import branch_names, evaluation_names, rank_names, step_names
from launch.tracking.queries import table_of
from launch.tracking.wandb_run import WandbRun

if TYPE_CHECKING:
    from engine.planning.planner import RunPlan
    from engine.step_metrics import StepMetrics
    from engine.trace import Span


class Tracker:
    """On the first rank only. `monitors`: the JSON's blocks; `step`: at which the run begins or
    goes on; `config`: what W&B shows of the run, and `plan`, as a sentence and as a timeline of one
    step as the simulator predicts it. `notice`: a line for the user, or an empty one."""

    def __init__(
        self,
        options: TrackingOptions,
        monitors: DeepSpeedMonitorConfig,
        folder: Path,
        config: Mapping[str, Any],
        step: int,
        plan: RunPlan,
    ):
        mode, self.notice = choose_mode(options.wandb, monitors.wandb)
        project = where(options.wandb_project, monitors.wandb)
        starts: dict[str, tuple[bool, Callable[[], Backend]]] = {
            "W&B": (mode != "disabled", lambda: WandbRun(mode, folder, project, config)),
            "TensorBoard": (
                monitors.tensorboard.enabled,
                lambda: TensorBoard(monitors.tensorboard, step),
            ),
            "CSV": (monitors.csv_monitor.enabled, lambda: CsvFiles(monitors.csv_monitor, step)),
            "Comet": (monitors.comet.enabled, lambda: Comet(monitors.comet, folder)),
        }
        self.backends: dict[str, Backend] = {}
        for name, (enabled, start) in starts.items():
            with self._left_out_if_it_fails(name):
                if enabled:
                    self.backends[name] = start()
        self.plan = plan
        self._each(lambda backend: backend.summarize("plan", plan.describe()))
        self._each(lambda backend: backend.media("timeline/plan", self._timeline, step))

    def step(self, line: Mapping[str, Any], metrics: StepMetrics, samples: int) -> None:
        """The line of metrics.jsonl that a step has left. `samples`: of all steps so far."""
        step = line["step"]
        values = step_names(line) | branch_names(line)
        values |= rank_names(metrics.rank_memory_bytes, metrics.rank_busy_s, metrics.slowest_step_s)
        self._each(lambda backend: backend.log(values, step, samples))

    def alert(self, alert: Alert, step: int) -> None:
        """What a person who is not looking should know of."""
        self._each(lambda backend: backend.alert(alert, step))

    def evaluation(self, step: int, held_out: str, values: Mapping[str, float]) -> None:
        """The figures of a held-out set."""
        named = evaluation_names(held_out, values)
        self._each(lambda backend: backend.log(named, step, None))

    def decision(self, step: int, reason: str) -> None:
        """Why the balance, or the weights of the losses, were changed after `step` steps."""
        self._each(lambda backend: backend.note("balance/decisions", reason, step))

    def queries(self, record: Mapping[str, Any]) -> None:
        """What the model finds for some queries of each held-out set, as in queries.json."""
        for name, of_set in record["sets"].items():
            for direction in (key for key in of_set if key != "samples"):
                make = partial(table_of, direction, of_set[direction], of_set["samples"])
                title = f"queries/{name}/{direction}"
                self._each(lambda backend: backend.media(title, make, record["step"]))

    def timeline(self, step: int, ranks: Sequence[tuple[str, Sequence[Span]]]) -> None:
        """A traced step, below the prediction. `ranks`: the name and the spans of each rank."""
        spans = {rank: spans for rank, (_, spans) in enumerate(ranks)}
        make = partial(self._timeline, step, spans)
        self._each(lambda backend: backend.media("timeline/step", make, step))

    def finish(self, exit_code: int) -> None:
        self._each(lambda backend: backend.finish(exit_code))

    def _timeline(
        self, step: int | None = None, ranks: Mapping[int, Sequence[Span]] | None = None
    ) -> Any:
        """The prediction of the plan, with a traced step below it; a figure of W&B."""
        # imports plotly, which a run without W&B does not need here
        import wandb

        from launch.reporting.timelines import measured_step, predicted_step, timeline_figure

        plan = self.plan
        timelines = [predicted_step(plan.graph, plan.batches, plan.schedule, plan.costs)]
        if step is not None and ranks is not None:
            stages = {stage.name: stage.ranks for stage in plan.graph.stages}
            timelines.append(measured_step(step, stages, ranks))
        return wandb.Plotly(timeline_figure(timelines))

    def _each(self, tell: Callable[[Backend], None]) -> None:
        for name, backend in list(self.backends.items()):
            with self._left_out_if_it_fails(name):
                tell(backend)

    @contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.backends.pop(name, None)
            logging.getLogger("wye").warning(
                "%s failed (%s: %s): its tracking ends, metrics.jsonl goes on",
                name,
                type(error).__name__,
                plain(str(error)),
            )
