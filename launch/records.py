"""What the folder of a run, of export.py or of a published model says about the model in it.
Imports neither torch nor transformers, but for published models: the command line reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import __version__
from common.files import read_json

RUN_RECORD = "config.json"
# of a run's metrics: before the name of a set that the averaged weights were measured on
AVERAGED = "ema/"
# kinds of an export that are no model of transformers
OPEN_CLIP, STATE_DICT = "open_clip", "state dict"
FORMAT = 1  # of an export's record
FORMS = ("auto", "transformers", "open_clip", "state_dict")  # that export.py can be asked for
RECORD, WEIGHTS = "wye.json", "model.safetensors"


def read_run(folder: Path) -> dict[str, Any] | None:
    """What was decided when the run in `folder` began; None where there is none. Errors: ValueError
    for a damaged record, for that of another program, and for one of a version whose runs cannot be
    read."""
    record = _read(folder / RUN_RECORD, "delete it, and the same command writes it again")
    if record is None:
        return None
    if "training" not in record and "options" not in record:
        raise ValueError(
            f"{folder}: its {RUN_RECORD} is of another program; give the folder of a run of "
            "train.py, or for --run-dir another folder"
        )
    made_by, ours = record.get("version", "before 0.1.0"), __version__.rsplit(".", 1)[0]
    if made_by.rsplit(".", 1)[0] != ours:
        raise ValueError(
            f"{folder / RUN_RECORD}: the run was made by version {made_by}, and this is "
            f"{__version__}, which reads runs of {ours}; use that version, or begin another run"
        )
    return record


def record_of_run(folder: Path) -> dict[str, Any]:
    """As `read_run`. Errors: also FileNotFoundError where there is none."""
    record = read_run(folder)
    if record is None:
        raise FileNotFoundError(
            f"{folder}: holds no {RUN_RECORD}; give the folder of a run of train.py, or of an "
            "export where that will do"
        )
    return record


def read_export(folder: Path) -> dict[str, Any] | None:
    """Its record, or None where `folder` is no folder that export.py made. Errors: ValueError for a
    damaged record, and for one of another version."""
    record = _read(folder.expanduser() / RECORD, "export again")
    if record is not None and record.get("format") != FORMAT:
        raise ValueError(
            f"{folder / RECORD}: is of another version of Wye (format {record.get('format')}, and "
            f"this one reads {FORMAT}); export again, or use the version that wrote it"
        )
    return record


def flat(record: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{path}{key}.") if nested else {f"{path}{key}": value}
    return found


def _read(file: Path, remedy: str) -> dict[str, Any] | None:
    try:
        record = read_json(file) if file.is_file() else None
        if not isinstance(record, dict | None):
            raise ValueError(f"holds a {type(record).__name__}, and no object")
    except ValueError as error:
        raise ValueError(f"{file}: is damaged ({error}); {remedy}") from error
    return record
