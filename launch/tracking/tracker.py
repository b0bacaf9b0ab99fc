"""One tracker for a run: W&B and DeepSpeed's monitors get the same metrics under the same names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.config import DeepSpeedMonitorConfig, WandbConfig

from launch.config.groups import TrackingOptions
from launch.run.queries import Answers
from launch.tracking.alerts import Alarms
from launch.tracking.login import choose_mode
from launch.tracking.monitors import Monitors
from launch.tracking.names import branch_names, evaluation_names, rank_names, step_names
from launch.tracking.queries import table_of
from launch.tracking.timelines import Timelines
from launch.tracking.wandb_run import WandbRun

if TYPE_CHECKING:
    from engine.planning.planner import RunPlan
    from engine.step_metrics import StepMetrics

PROJECT = "wye"


class Tracker:
    """On the first rank only. `monitors`: the JSON's blocks; `step`: at which the run begins or
    goes on; `config`: what W&B shows of the run, and `plan`, as a sentence and as a picture of one
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
        self.wandb = WandbRun(mode, folder, where(options.wandb_project, monitors.wandb), config)
        self.monitors = Monitors(monitors, folder, step)
        self.alarms, self.timelines = Alarms(), Timelines(plan, folder)
        self.wandb.summarize({"plan": plan.describe()})
        self.wandb.draw(step, "timeline/plan", self.timelines.draw_plan)

    def step(self, line: Mapping[str, Any], metrics: StepMetrics, samples: int) -> None:
        """The line of metrics.jsonl that a step has left. `samples`: of all steps so far."""
        own = rank_names(metrics.rank_memory_bytes, metrics.rank_busy_s, metrics.slowest_step_s)
        self._log({**step_names(line), **branch_names(line), **own}, line["step"], samples)
        for alert in self.alarms.after_step(line, metrics.bad_step is not None):
            self.wandb.alert(alert)
            self.monitors.note(f"alerts/{alert.title}", alert.text, line["step"])

    def evaluation(self, step: int, held_out: str, values: Mapping[str, float]) -> None:
        self._log(evaluation_names(held_out, values), step, None)

    def decision(self, step: int, reason: str) -> None:
        """Why the balance, or the weights of the losses, were changed after `step` steps."""
        self.wandb.note(step, "balance/decisions", reason)
        self.monitors.note("balance/decisions", reason, step)

    def queries(self, step: int, by_set: Mapping[str, Sequence[Answers]]) -> None:
        """What the model finds for some queries of each held-out set."""
        for name, of_set in by_set.items():
            for answers in of_set:
                for direction in answers.found:
                    make = partial(table_of, direction, answers)
                    self.wandb.table(step, f"queries/{name}/{direction}", make)

    def timeline(self, step: int) -> None:
        """The newest step of trace.json, below the prediction where there is one."""
        self.wandb.draw(step, "timeline/step", partial(self.timelines.draw_step, step))

    def _log(self, values: Mapping[str, float], step: int, samples: int | None) -> None:
        self.wandb.log(values, step)
        # W&B draws what is not a number as a gap; the others cannot, or do not take null
        events = [(name, value, step) for name, value in values.items() if value is not None]
        self.monitors.write_events(events, samples)

    def finish(self, exit_code: int) -> None:
        self.wandb.finish(exit_code)
        self.monitors.finish()


def where(given: str | None, block: WandbConfig) -> dict[str, str | None]:
    """Of `wandb.init`: project, group and entity. The project is --wandb-project, that of the JSON
    file, WANDB_PROJECT or `wye`; the first that is given."""
    own = block.project if "project" in block.model_fields_set else None
    project = given or own or os.environ.get("WANDB_PROJECT") or PROJECT
    return {"project": project, "group": block.group, "entity": block.team}
