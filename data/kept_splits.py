"""How a run's samples were divided, kept in its folder: every process finds the same, and so does a
run that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from common.files import read_json, replacing_folder, write_text
from common.secrets import redacted
from data.bad_tables import write_bad_samples
from data.index.sources import KnownSource, Source
from data.index.splits import Splits
from data.options import DataOptions, compared
from data.streams.source import StreamSource

TRAIN = "train"
STREAM_ORDER = 2  # that runs have which begin now; those of version 0.1 have none, or 1
# options that do not say which samples there are, but how often they come and how many may be bad
NOT_OF_SAMPLES = {
    "data_weights",
    "data_temperature",
    "data_floors",
    "data_adapt",
    "max_bad_fraction",
    "stream_cache",
    "on_bad_shard",
}


def kept_splits(
    folder: Path, options: DataOptions, sources: Sequence[Source], divide: Callable[[], Splits]
) -> Splits:
    """The division that `folder` keeps, else the one that is made and kept there. `sources`: all
    that it follows from. Errors: ValueError for a folder with that of other options or data."""
    samples, made_of = folder / "samples", _made_of(options, sources)
    splits = _read(samples, made_of)
    if splits is None:
        write_bad_samples(folder / "bad_samples.jsonl", sources)
        _write(samples, made_of, divide())
        splits = _read(samples, made_of)
        assert splits is not None
    return splits


def _made_of(options: DataOptions, sources: Sequence[Source]) -> dict[str, Any]:
    """The options and sizes that a division is made by, as JSON gives them back."""
    sizes = [[len(source), _usable(source)] for source in sources]
    return {"options": redacted(json.loads(json.dumps(vars(options)))), "sizes": sizes}


def _usable(source: Source) -> int:
    """Another number where other samples are trained on."""
    if isinstance(source, StreamSource):
        return source.fingerprint()
    return len(cast(KnownSource, source).usable())


def _of_samples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a division depends on; of the pairs, their modalities without the weights."""
    asked = {name: value for name, value in options.items() if name not in NOT_OF_SAMPLES}
    return asked | {"pairs": compared(options["pairs"])}


def _read(folder: Path, made_of: Mapping[str, Any]) -> Splits | None:
    """The division that `_write` kept, as arrays that every process maps; None where there
    is none. Raises ValueError for that of other options or data."""
    try:
        record = read_json(folder / "made_of.json")
    except FileNotFoundError:
        return None
    there, asked = _of_samples(record["options"]), _of_samples(made_of["options"])
    changed = [name for name in there | asked if there.get(name) != asked.get(name)]
    if changed:
        raise ValueError(
            f"{folder}: holds other samples than are asked for ({', '.join(changed)} changed: "
            f"there { {name: there.get(name) for name in changed} }); give another --run-dir"
        )
    if record["sizes"] != made_of["sizes"]:
        raise ValueError(
            f"{folder}: made of {record['sizes']} samples (all, usable), but now there are "
            f"{made_of['sizes']}; the data changed under the run: give another --run-dir, or the "
            "data of before"
        )
    names = (TRAIN, *record["held_out"])
    train, *held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
    return Splits(train, dict(zip(record["held_out"], held_out)), record["leaks"])


def stream_order_of(folder: Path) -> int:
    """In which the samples of streams come, of a run that began in `folder` or begins there."""
    try:
        return read_json(folder / "samples" / "made_of.json").get("stream_order", 1)
    except FileNotFoundError:
        return STREAM_ORDER


def _write(folder: Path, made_of: Mapping[str, Any], splits: Splits) -> None:
    record = {**made_of, "held_out": list(splits.held_out), "leaks": dict(splits.leaks)}
    record["stream_order"] = STREAM_ORDER
    with replacing_folder(folder) as beside:
        for name, subset in {TRAIN: splits.train, **splits.held_out}.items():
            np.save(beside / f"{name}.npy", subset)
        write_text(beside / "made_of.json", json.dumps(record, ensure_ascii=False))
