"""DeepSpeed's monitors, TensorBoard, CSV files and Comet, fed with the metrics of a run.

The blocks `tensorboard`, `csv_monitor` and `comet` of the JSON file mean what DeepSpeed's
documentation says. Its engine would write three numbers to them, from every program that makes one;
here they are taken out of its configuration and get all metrics, at the number of the step. The
block `wandb` is for `wandb_run.py`.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.config import (
    CometConfig,
    CSVConfig,
    DeepSpeedMonitorConfig,
    TensorBoardConfig,
    get_monitor_config,
)
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import Monitor, MonitorMaster
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.utils import check_comet_availability

from common.files import make_folder, refuse_links_in, write_text
from common.output import plain

BLOCKS = ("wandb", "tensorboard", "csv_monitor", "comet")
# block -> the module that it needs, and what installs it
PACKAGES = {
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "comet": ("comet_ml", 'pip install "comet_ml>=3.41.0"'),
}
COMET_KEY = "comet_experiment_key"  # a file in the run's folder
Event = tuple[str, float, int]  # name, value, step


def split_monitors(config: Mapping[str, Any]) -> tuple[dict[str, Any], DeepSpeedMonitorConfig]:
    """The JSON's keys without the blocks of monitors, and these blocks. Errors: ValueError where an
    enabled one needs a package that is not installed."""
    monitors = get_monitor_config(dict(config))
    for name, (module, command) in PACKAGES.items():
        if getattr(monitors, name).enabled:
            # looked for and not imported, because only the first rank uses it
            if find_spec(module) is None:
                raise ValueError(
                    f"{name}.enabled: the package {module} is not installed; run `{command}`, or "
                    "set it to false"
                )
    return {key: value for key, value in config.items() if key not in BLOCKS}, monitors


class Monitors(MonitorMaster):
    """Those that are enabled. On the first rank only. A monitor that fails is left out from there
    on, with one line, and the run goes on."""

    def __init__(self, config: DeepSpeedMonitorConfig, folder: Path, step: int):
        # not MonitorMaster's own: it would start a second W&B run, and parts that do not know that
        # a run may go on
        Monitor.__init__(self, config)
        self.enabled = config.enabled
        self.wandb_monitor = None
        self.tb_monitor = _started(config.tensorboard, lambda c: TensorBoard(c, step))
        self.csv_monitor = _started(config.csv_monitor, lambda c: CsvFiles(c, step))
        self.comet_monitor = _started(config.comet, lambda c: Comet(c, folder))

    @property
    def parts(self) -> list[Monitor]:
        return [part for part in (self.tb_monitor, self.csv_monitor, self.comet_monitor) if part]

    def write_events(self, event_list: Sequence[Event], samples: int | None = None) -> None:
        """`samples`: that have been seen in training so far, by which Comet counts its interval;
        None: written in any case."""
        for part in self.parts:
            try:
                if isinstance(part, Comet):
                    part.write_events(event_list, samples)
                else:
                    part.write_events(event_list)
            except Exception as error:
                self._leave_out(part, error)

    def note(self, name: str, text: str, step: int) -> None:
        """A sentence beside the charts, where there is a place for it."""
        for part in self.parts:
            try:
                if isinstance(part, TensorBoard):
                    part.summary_writer.add_text(name, text, step)
                elif isinstance(part, Comet):
                    part.experiment.log_text(text, step=step, metadata={"name": name})
            except Exception as error:
                self._leave_out(part, error)

    def finish(self) -> None:
        for part in self.parts:
            try:
                if isinstance(part, TensorBoard):
                    part.summary_writer.close()
                elif isinstance(part, Comet):
                    part.experiment.end()
            except Exception as error:
                self._leave_out(part, error)

    def _leave_out(self, part: Monitor, error: Exception) -> None:
        for name in ("tb_monitor", "csv_monitor", "comet_monitor"):
            if getattr(self, name) is part:
                setattr(self, name, None)
        _warn(type(part).__name__, error)


def _started(config: Any, make: Callable[[Any], Monitor]) -> Any:
    """None where it is not enabled, or does not start."""
    if not config.enabled:
        return None
    try:
        return make(config)
    except Exception as error:
        _warn(type(config).__name__.removesuffix("Config"), error)
        return None


def _warn(name: str, error: Exception) -> None:
    logging.getLogger("wye").warning(
        "%s failed (%s: %s): its tracking ends, metrics.jsonl goes on",
        name,
        type(error).__name__,
        plain(str(error)),
    )


class TensorBoard(TensorBoardMonitor):
    """Where a run goes on after `step`, what was written of later steps is hidden."""

    def __init__(self, config: TensorBoardConfig, step: int):
        self.first_step = step + 1
        super().__init__(config)

    def get_summary_writer(self, base: str = "") -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(self.output_path, self.job_name)
        refuse_links_in(make_folder(Path(folder)))
        self.summary_writer = SummaryWriter(
            log_dir=folder, purge_step=self.first_step if self.first_step > 1 else None
        )
        return self.summary_writer


class CsvFiles(csvMonitor):
    """A file per metric. Where a run goes on after `step`, its lines of later steps are dropped,
    and the heading is not written again. What other runs have written before it stays."""

    def __init__(self, config: CSVConfig, step: int):
        super().__init__(config)
        refuse_links_in(Path(self.log_dir))
        if step == 0:
            return
        for file in Path(self.log_dir).glob("*.csv"):
            lines = file.read_text(encoding="utf-8").splitlines()
            # each run that began in this file has a heading
            headings = [i for i, line in enumerate(lines) if line.startswith("step,")]
            if headings:
                own = headings[-1] + 1
                kept = [*lines[:own], *(line for line in lines[own:] if _step_of(line) <= step)]
                write_text(file, "\n".join(kept) + "\n")
                self.filenames.append(file.stem)


def _step_of(line: str) -> float:
    word = line.split(",", 1)[0]
    return int(word) if word.isdigit() else float("inf")


class Comet(CometMonitor):
    """The experiment keeps its key in the run's folder, so that a run goes on in the same one.
    Without a key for Comet's server it is written below the run's folder."""

    def __init__(self, config: CometConfig, folder: Path):
        check_comet_availability()
        import comet_ml

        refuse_links_in(make_folder(folder / "comet", within=folder))
        file = folder / COMET_KEY
        given = config.experiment_key or (
            file.read_text(encoding="utf-8").strip() if file.is_file() else uuid.uuid4().hex
        )
        online = config.online
        if online is not False and not (
            config.api_key or comet_ml.config.get_config("comet.api_key")
        ):
            online = False
            logging.getLogger("wye").warning(
                "Comet: no API key was found (COMET_API_KEY): tracking goes on offline; "
                "`comet upload` uploads it later"
            )
        os.environ.setdefault("COMET_OFFLINE_DIRECTORY", str(folder / "comet"))
        super().__init__(config.model_copy(update={"experiment_key": given, "online": online}))
        write_text(file, given + "\n")

    def write_events(self, event_list: Sequence[Event], samples: int | None = None) -> None:
        for name, value, step in event_list:
            if samples is None or self._events_log_scheduler.needs_logging(name, samples):
                self.experiment.log_metric(name, value, step=step)
