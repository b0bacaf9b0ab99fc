"""Reads what the folder of a run says about the run. A part that is missing or damaged raises
nothing: the report shows what there is, and a notice for the rest."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.records import record_of_run
from launch.reporting.balance import use_loss_weights, use_measurement
from launch.reporting.columns import Columns, columns_of

MOST_SHOWN = 50  # bad samples that are listed


@dataclass(frozen=True)
class RunData:
    """A run as its folder shows it. `label` distinguishes it from the other runs of a report."""

    path: Path
    label: str
    config: Mapping[str, Any]
    steps: Columns
    held_out: Mapping[str, Sequence[Mapping[str, Any]]]  # by set, by step
    measurements: Sequence[Mapping[str, Any]]  # of balance.jsonl
    loss_weights: Sequence[Mapping[str, Any]]
    bad_steps: Sequence[Mapping[str, Any]]
    notices: list[str]
    bad_samples: list[dict[str, Any]] = field(default_factory=list)  # the first MOST_SHOWN
    bad_reasons: Counter[str] = field(default_factory=Counter)  # of all bad samples

    @property
    def last_step(self) -> int:
        return int(self.steps["step"][-1]) if self.steps else 0

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
    config = record_of_run(folder)
    notices: list[str] = []
    held_out: dict[str, list[dict[str, Any]]] = {}

    def steps() -> Iterator[dict[str, Any]]:
        for line in _lines(folder / "metrics.jsonl", notices, lambda line: line["step"] + 0):
            if "held_out" in line:
                # what is not finite was written as null
                values = {key: math.nan if v is None else v for key, v in line.items()}
                held_out.setdefault(str(line["held_out"]), []).append(values)
            elif "step_s" in line:
                yield line

    run = RunData(
        path=folder,
        label=label,
        config=config,
        steps=columns_of(steps()),
        held_out=held_out,
        measurements=list(_lines(folder / "balance.jsonl", notices, use_measurement)),
        loss_weights=list(_lines(folder / "loss_weights.jsonl", notices, use_loss_weights)),
        bad_steps=list(_lines(folder / "bad_steps.jsonl", notices)),
        notices=notices,
    )
    alerts = _lines(folder / "alerts.jsonl", notices, lambda line: (line["title"], line["text"]))
    notices += [f"Step {each['step']}: {each['title']}. {each['text']}" for each in [*alerts]]
    for line in _lines(folder / "bad_samples.jsonl", notices):
        run.bad_reasons[str(line.get("reason", "unknown"))] += 1
        run.bad_samples.extend([line] if len(run.bad_samples) < MOST_SHOWN else [])
    return run


def _lines(
    file: Path, notices: list[str], use: Callable[[dict[str, Any]], object] = dict.items
) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines with which `use`, what the report does with one, does not
    fail; `notices` gets one for the others."""
    if not file.is_file():
        return
    broken: list[str] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, 1):
            if not text.endswith("\n"):
                break  # it is being written
            try:
                line = json.loads(text)
                use(line)
            except Exception as error:  # a line may hold anything
                broken.append(f"line {number:,} ({type(error).__name__}: {error})")
            else:
                yield line
    if broken:
        notices.append(
            f"{file.name}: {len(broken):,} lines cannot be read and are left out, first {broken[0]}."
        )
