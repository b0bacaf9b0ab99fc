"""Reads what W&B's client has recorded offline: a log of LevelDB's format whose entries are W&B's
own protobuf records (wandb/proto). The client of Python writes such files and has no reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES, BLOCK_BYTES = 7, 32768  # of the file and of each chunk; of LevelDB's blocks
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Any]:
    """wandb_internal_pb2.Record, in the order in which they were written."""
    from wandb.proto.wandb_internal_pb2 import Record

    for entry in _entries(file.read_bytes()):
        record = Record()
        record.ParseFromString(entry)
        yield record


def _entries(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B", "not a file of W&B"
    place, entry = HEADER_BYTES, b""
    while place + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < HEADER_BYTES:  # the rest of a block that no header fits into
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER_BYTES])
        chunk = data[place + HEADER_BYTES : place + HEADER_BYTES + length]
        place += HEADER_BYTES + length
        entry = chunk if kind in (FULL, FIRST) else entry + chunk
        if kind in (FULL, LAST):
            yield entry


class Piece:
    """A run recorded offline, from its `wandb/offline-run-*` folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        (file,) = folder.glob("run-*.wandb")
        self.run_id = file.stem.removeprefix("run-")
        self.history: list[dict[str, Any]] = []
        self.alerts, self.artifacts, self.metrics, self.summary = [], [], [], {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.history.append(_items(record.history.item))
            elif kind == "summary":
                self.summary |= _items(record.summary.update)
            elif kind == "alert":
                self.alerts.append((record.alert.title, record.alert.text, record.alert.level))
            elif kind == "artifact":
                self.artifacts.append(record.artifact)
            elif kind == "metric":
                self.metrics.append(record.metric)
            elif kind == "run":
                self.run = record.run

    def keys(self) -> set[str]:
        return {key for line in self.history for key in line}

    def logged(self, key: str) -> list[Any]:
        """The values of `key`, in order."""
        return [line[key] for line in self.history if key in line]

    def table(self, media: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
        """A table, and the files of its artifact by the paths that its cells have."""
        own, path = media["artifact_path"].removeprefix("wandb-client-artifact://").split("/", 1)
        artifact = next(each for each in self.artifacts if each.client_id == own)
        files = {each.path: Path(each.local_path) for each in artifact.manifest.contents}
        return json.loads(files[path].read_text()), files

    def file(self, media: dict[str, Any]) -> Path:
        """Of a value that W&B keeps as a file."""
        return self.folder / "files" / media["path"]


def _items(items: Any) -> dict[str, Any]:
    """What W&B keeps as a file is an object, whose keys are items of their own."""
    found: dict[str, Any] = {}
    for item in items:
        first, *below = [item.key] if item.key else item.nested_key
        place, name = found, first
        for inner in below:
            place, name = place.setdefault(name, {}), inner
        place[name] = json.loads(item.value_json)
    return found


def pieces(run_dir: Path) -> list[Piece]:
    """In the order in which they were made."""
    return [Piece(folder) for folder in sorted(run_dir.glob("wandb/offline-run-*"))]
