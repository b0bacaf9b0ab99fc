"""How many of the samples to evaluate a run was trained on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.index.leaks import count_leaks, find_leaks
from data.options import DataOptions
from data.prepare import prepare_data
from data.prepared import HeldOut, PreparedData
from data.streams.opening import is_stream
from launch.inference.trained import Trained, import_of_data


@dataclass(frozen=True)
class Seen:
    """`number` of the samples `of` were trained on; None: that could not be checked, and `why`.
    `kinds`: how many by each kind of `data.index.leaks.Leak`."""

    number: int | None
    of: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def words(self) -> str:
        """For the head of a table; empty where none was trained on."""
        if self.number is None:
            return f"; whether samples were trained on could not be checked: {self.why}"
        return f"; {self.number:,} of {self.of:,} samples were trained on" if self.number else ""

    def record(self) -> dict[str, Any]:
        """For the JSON of an evaluation."""
        more = {"why": self.why} if self.number is None else {"by": dict(self.kinds)}
        return {"trained_on": {"samples": self.number, "of": self.of, **more}}


def seen_in_training(part: HeldOut, trained: Trained, folder: Path) -> Seen:
    """Compare samples with those that the run in `folder` was trained on, as train.py compares its
    held-out samples (`find_leaks`)."""
    number = len(part.subset)
    try:
        data = _training_data(trained, folder)
    except (ValueError, OSError) as error:
        return Seen(None, number, why=str(error).partition("\n")[0])
    bits = trained.options.get("leak_bits")
    leaks = find_leaks(part.source, part.subset, data.known, data.train[:], bits)
    kinds = count_leaks(leaks)
    return Seen(sum(kinds.values()), number, kinds)


def _training_data(trained: Trained, folder: Path) -> PreparedData:
    """What the run was trained on. Errors: ValueError and OSError where that is not known or not
    there any more."""
    if "data" not in trained.options:
        raise ValueError(f"{folder} does not say what it was trained on; give the run's folder")
    if any(map(is_stream, trained.options["data"])):
        raise ValueError("samples of streams are not compared")
    import_of_data(trained.options, folder)
    options = DataOptions.from_record(trained.options)
    return prepare_data(options, trained.record["tokenizer"], folder, progress=True)


def seen_of(arguments: argparse.Namespace, trained: Trained, part: HeldOut) -> Seen | None:
    """Of the samples that the command line names; None for those that the run itself held out, and
    for a public model, which does not say what it was trained on."""
    if arguments.imported or not (arguments.val_data or arguments.classify):
        return None
    return seen_in_training(part, trained, arguments.run_dir)
