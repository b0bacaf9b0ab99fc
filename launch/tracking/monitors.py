"""TensorBoard, CSV files and Comet.

The blocks `tensorboard`, `csv_monitor` and `comet` of the JSON file mean what DeepSpeed's
documentation says. Its engine would write three numbers to them, from every program that makes one;
here they are taken out of its configuration and get all metrics, at the number of the step. The
block `wandb` is for `wandb_run.py`.
"""

from __future__ import annotations

import csv
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.monitor.comet import CometMonitor, EventsLogScheduler
from deepspeed.monitor.config import (
    CometConfig,
    CSVConfig,
    TensorBoardConfig,
)

from common.files import cut_lines, make_folder, open_own, refuse_links_in, write_text
from launch.tracking.backend import Backend

HEADING = "step,"  # what the first line of a CSV file begins with
COMET_KEY = "comet_experiment_key"  # a file in the run's folder


class TensorBoard(Backend):
    """Where a run goes on after `step`, what was written of later steps is hidden."""

    def __init__(self, config: TensorBoardConfig, step: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = make_folder(Path(config.output_path, config.job_name))
        refuse_links_in(folder)
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, values: Mapping[str, float | None], step: int, samples: int | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def note(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)

    def finish(self, exit_code: int) -> None:
        self._writer.close()


class CsvFiles(Backend):
    """A file per metric. Where a run goes on after `step`, its lines of later steps are dropped,
    and the heading is not written again. What other runs have written before it stays."""

    def __init__(self, config: CSVConfig, step: int):
        self._folder = make_folder(Path(config.output_path, config.job_name))
        self._begun: set[Path] = set()  # files with a heading of this run
        refuse_links_in(self._folder)
        for file in self._folder.glob("*.csv") if step else ():
            with file.open(encoding="utf-8") as rows:
                has_heading = rows.readline().startswith(HEADING)
            if has_heading:  # as each run that began in this file has one
                cut_lines(file, lambda row: not row.startswith(HEADING) and _step_of(row) > step)
                self._begun.add(file)

    def log(self, values: Mapping[str, float | None], step: int, samples: int | None) -> None:
        for name, value in values.items():
            if value is None:
                continue
            file = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with open_own(file) as rows:
                writer = csv.writer(rows, lineterminator="\n")
                if file not in self._begun:
                    self._begun.add(file)
                    writer.writerow([HEADING.rstrip(","), name.rpartition("/")[2]])
                writer.writerow([step, value])


def _step_of(line: str) -> float:
    word = line.split(",", 1)[0]
    return int(word) if word.isdigit() else float("inf")


class Comet(Backend):
    """The experiment keeps its key in the run's folder, so that a run goes on in the same one.
    Without a key for Comet's server it is written below the run's folder."""

    def __init__(self, config: CometConfig, folder: Path):
        import comet_ml

        refuse_links_in(make_folder(folder / "comet", within=folder))
        file = folder / COMET_KEY
        written = file.read_text(encoding="utf-8").strip() if file.is_file() else None
        key = config.experiment_key or written or uuid.uuid4().hex
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
        started = CometMonitor(config.model_copy(update={"experiment_key": key, "online": online}))
        self._experiment: Any = started.experiment
        self._interval = EventsLogScheduler(config.samples_log_interval)
        write_text(file, key + "\n")

    def log(self, values: Mapping[str, float | None], step: int, samples: int | None) -> None:
        for name, value in values.items():
            is_due = samples is None or self._interval.needs_logging(name, samples)
            if value is not None and is_due:
                self._experiment.log_metric(name, value, step=step)

    def note(self, name: str, text: str, step: int) -> None:
        self._experiment.log_text(text, step=step, metadata={"name": name})

    def finish(self, exit_code: int) -> None:
        self._experiment.end()
