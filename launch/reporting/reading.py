"""Reads what the folder of a run says about the run. A part that is missing or damaged raises
nothing: the report shows what there is, and a notice for the rest."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.run.queries import read_queries
from launch.run.records import read_run

MOST_SHOWN = 50  # bad samples that are listed


class Columns:
    """Lines of numbers as an array per key: float32, nan where a line lacks the key."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: dict[str, array] = {}
        self._length = 0
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            if value is None or isinstance(value, (int, float)):
                # float32 halves the memory of long runs; step numbers stay exact
                column = self._columns.setdefault(key, array("d" if key == "step" else "f"))
                column.extend([math.nan] * (self._length - len(column)))
                column.append(math.nan if value is None else value)
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, key: str) -> bool:
        return key in self._columns

    def __getitem__(self, key: str) -> np.ndarray:
        """[number of lines]"""
        column = self._columns[key]
        missing = [math.nan] * (self._length - len(column))
        return np.array([*column, *missing], np.float64 if key == "step" else np.float32)


@dataclass(frozen=True)
class RunData:
    """A run as its folder shows it. `label` distinguishes it from the other runs of a report."""

    path: Path
    label: str
    config: Mapping[str, Any]
    steps: Columns = field(default_factory=Columns)
    held_out: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by set, by step
    measurements: list[dict[str, Any]] = field(default_factory=list)  # of balance.jsonl
    loss_weights: list[dict[str, Any]] = field(default_factory=list)
    bad_samples: list[dict[str, Any]] = field(default_factory=list)  # the first MOST_SHOWN
    bad_reasons: Counter[str] = field(default_factory=Counter)  # of all bad samples
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    queries: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return int(self.steps["step"][-1]) if len(self.steps) else 0

    @property
    def state(self) -> str:
        """In words: whether the training is done."""
        if (self.path / "done").exists():
            return "done"
        return f"at step {self.last_step:,} of {self.config.get('total_steps', 0):,}, not done"


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs in `folders`, each with a label of its own. Errors: FileNotFoundError, ValueError
    for a folder that holds no run."""
    return [read_folder(folder, label) for folder, label in zip(folders, labels(folders))]


def labels(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many of its parents as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def read_folder(folder: Path, label: str) -> RunData:
    """One run. Errors: as `read_runs`."""
    config = read_run(folder)
    if config is None or "training" not in config:
        raise FileNotFoundError(
            f"{folder}: holds no config.json of train.py; give the folder of a run, RUN_DIR"
        )
    queries, notice = read_queries(folder)
    notices = [notice] if notice else []
    run = RunData(folder, label, config, queries=queries, notices=notices)
    for line in _lines(folder / "metrics.jsonl", notices):
        if "held_out" in line and "step" in line:
            run.held_out.setdefault(str(line["held_out"]), []).append(line)
        elif "step_s" in line and "step" in line:
            run.steps.add(line)
    for line in _lines(folder / "bad_samples.jsonl", notices):
        run.bad_reasons[str(line.get("reason", "unknown"))] += 1
        run.bad_samples.extend([line] if len(run.bad_samples) < MOST_SHOWN else [])
    for name, found in (
        ("balance", run.measurements),
        ("loss_weights", run.loss_weights),
        ("bad_steps", run.bad_steps),
    ):
        found.extend(_lines(folder / f"{name}.jsonl", notices))
    return run


def _lines(file: Path, notices: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; `notices` gets one if some cannot be read."""
    if not file.is_file():
        return
    broken = 0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            if not text.endswith("\n"):
                break  # it is being written
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict):
                yield line
            else:
                broken += 1
    if broken:
        notices.append(f"{file.name}: {broken:,} lines cannot be read and are left out.")
