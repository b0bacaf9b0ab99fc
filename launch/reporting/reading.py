"""What the folder of a run says about the run, read without raising for a part that is missing or
damaged: the report shows what there is, and a notice for the rest."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from launch.run.queries import read_queries
from launch.run.records import read_run
from launch.run.step_line import rates

MOST_SHOWN = 50  # lines of a list such as the bad samples
RATES = ("images_per_s", "sounds_per_s", "text_tokens_per_s", "padding_share/text")


class Columns:
    """Lines of numbers as one array per key: float32, nan where a line lacks the key."""

    def __init__(self) -> None:
        self._columns: dict[str, array] = {}
        self._length = 0

    def add(self, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            number = math.nan if value is None else value
            if not isinstance(number, (int, float)):
                continue
            column = self._columns.get(key)
            if column is None:
                # float32 halves the memory of long runs; step numbers stay exact
                column = self._columns[key] = array("d" if key == "step" else "f")
            column.extend([math.nan] * (self._length - len(column)))
            column.append(number)
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: str) -> bool:
        return key in self._columns

    def __getitem__(self, key: str) -> np.ndarray:
        """[number of lines]; all nan for a key that no line has."""
        column = self._columns.get(key, ())
        kind = np.float64 if key == "step" else np.float32
        values = np.full(self._length, np.nan, kind)
        values[: len(column)] = column
        return values

    def named(self, prefix: str) -> dict[str, str]:
        """{"image 0": "idle/image 0"} of the keys that begin with `prefix`, in their order."""
        return {key[len(prefix) :]: key for key in self._columns if key.startswith(prefix)}


@dataclass(frozen=True)
class RunData:
    """A run as its folder shows it. `label` tells it from the other runs of the report."""

    path: Path
    label: str
    config: Mapping[str, Any]
    steps: Columns
    evaluations: Sequence[Mapping[str, Any]]
    measurements: Sequence[Mapping[str, Any]]  # of balance.jsonl
    loss_weights: Sequence[Mapping[str, Any]]
    bad_samples: Sequence[Mapping[str, Any]]  # the first MOST_SHOWN
    bad_reasons: Mapping[str, int]  # reason -> number of all of them
    bad_steps: Sequence[Mapping[str, Any]]
    queries: Mapping[str, Any] | None
    notices: Sequence[str] = ()

    @property
    def total_steps(self) -> int:
        return int(self.config.get("total_steps", 0))

    @property
    def last_step(self) -> int:
        return int(self.steps["step"][-1]) if len(self.steps) else 0

    @property
    def state(self) -> str:
        """In words: whether the training is done."""
        if (self.path / "done").exists():
            return "done"
        return f"at step {self.last_step:,} of {self.total_steps:,}, not done"

    @property
    def options(self) -> Mapping[str, Any]:
        return self.config.get("options", {})

    @property
    def stages(self) -> list[str]:
        return [stage["name"] for stage in self.config.get("stage_graph", ())]

    @cached_property
    def held_out(self) -> dict[str, list[Mapping[str, Any]]]:
        """The evaluations of each held-out set, by step."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for line in self.evaluations:
            found.setdefault(str(line["held_out"]), []).append(line)
        return found


@dataclass
class _Lines:
    """Reads files of JSON lines, and counts what cannot be read."""

    notices: list[str] = field(default_factory=list)

    def of(self, file: Path) -> Iterator[dict[str, Any]]:
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
            self.notices.append(f"{file.name}: {broken:,} lines cannot be read and are left out.")


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs in `folders`, each with a label of its own. Errors: FileNotFoundError, ValueError
    for a folder that holds no run."""
    return [read_folder(folder, label) for folder, label in zip(folders, labels(folders))]


def labels(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many of its parents as tell it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each[-1:])} ({number})" for number, each in enumerate(parts, 1)]


def read_folder(folder: Path, label: str) -> RunData:
    """One run. Errors: as `read_runs`."""
    config = read_run(folder)
    if config is None or "training" not in config:
        raise FileNotFoundError(
            f"{folder}: holds no config.json of train.py; give the folder of a run, RUN_DIR"
        )
    lines, steps, evaluations = _Lines(), Columns(), []
    for line in lines.of(folder / "metrics.jsonl"):
        if "held_out" in line and "step" in line:
            evaluations.append(line)
        elif "step_s" in line and "step" in line:
            steps.add(_with_rates(line))
    bad: list[dict[str, Any]] = []
    reasons: Counter[str] = Counter()
    for line in lines.of(folder / "bad_samples.jsonl"):
        reasons[str(line.get("reason", "unknown"))] += 1
        if len(bad) < MOST_SHOWN:
            bad.append(line)
    measurements = list(lines.of(folder / "balance.jsonl"))
    weights = list(lines.of(folder / "loss_weights.jsonl"))
    bad_steps = list(lines.of(folder / "bad_steps.jsonl"))
    queries, notice = read_queries(folder)
    return RunData(
        path=folder,
        label=label,
        config=config,
        steps=steps,
        evaluations=evaluations,
        measurements=measurements,
        loss_weights=weights,
        bad_samples=bad,
        bad_reasons=reasons,
        bad_steps=bad_steps,
        queries=queries,
        notices=tuple(filter(None, (*lines.notices, notice))),
    )


def _with_rates(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lines of earlier versions lack what follows from the rest of them."""
    if RATES[-1] in line or not line.get("step_s"):
        return line
    try:
        return {**rates(line), **line}
    except (KeyError, TypeError, ZeroDivisionError):
        return line
