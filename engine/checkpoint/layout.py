"""What a checkpoint's folder holds, and whether it is whole. Files only: nothing here needs a
process group, and nothing is unpickled.

    checkpoints/step-00000100/rank-00000.safetensors    what this rank had of the state: flat fragments of named tensors
                              rank-00000.frozen.safetensors   what does not learn: a file of several checkpoints
                              rank-00001.safetensors
                              manifest.json             which fragments are where, sizes and checksums, counters, topology, the caller's state
    checkpoints/latest                                  the name of the one written last; for people and scripts, reading does not need it
    checkpoints/owner                                   the process that writes here; the one before it stops when it sees another

    checkpoints/step-00000200.writing/                  is being written, or was when its process died
    checkpoints/step-00000050.deleting/                 likewise
    checkpoints/step-00000300.set-aside/                of steps that were undone: the run went on from an older checkpoint

A folder named `step-NNNNNNNN` came by that name through one rename, after all its files were
written, flushed and read again, and loses it by another before they are deleted.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from common.files import replacing

FORMAT = "wye-checkpoint"
VERSIONS = 1, 2  # the second has files of parameters that do not learn
MANIFEST, LATEST, OWNER, SEAL = "manifest.json", "latest", "owner", "seal"
WRITING, DELETING, SET_ASIDE = ".writing", ".deleting", ".set-aside"
# kinds; the last is followed by the state's own name, and 0.1.0 also wrote "random"
PARAMETER, AVERAGE, BUFFER, OPTIMIZER = "parameter", "average", "buffer", "optimizer."
STEP_FOLDER = r"step-(\d{8,})"
CHUNK_BYTES = 1 << 20


class BrokenCheckpoint(ValueError):
    """A checkpoint that must not be used, and why."""


@dataclass(frozen=True)
class Fragment:
    """Elements offset..offset+numel of the flattened tensor `name`, whose whole shape is `shape`.
    In the rank's file under `key`."""

    kind: str
    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    def __post_init__(self):
        if not (isinstance(self.kind, str) and isinstance(self.name, str)):
            raise ValueError(f"fragment {self.kind!r} of {self.name!r}: both must be words")
        sizes = (*self.shape, self.offset, self.numel)
        if not all(
            type(size) is int and size >= 0 for size in sizes
        ) or self.offset + self.numel > math.prod(self.shape):
            raise ValueError(
                f"fragment {self.key}: {self.numel} elements from {self.offset} on do not lie in "
                f"shape {list(self.shape)}"
            )

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class FileRecord:
    """A file of tensors."""

    num_bytes: int
    checksum: str  # xxh3_128 of the file
    fragments: tuple[Fragment, ...]

    @staticmethod
    def fragments_of(record: Mapping[str, Any]) -> tuple[Fragment, ...]:
        """As they stand in JSON."""
        return tuple(
            Fragment(**{**fragment, "shape": tuple(fragment["shape"])})
            for fragment in record["fragments"]
        )


@dataclass(frozen=True)
class RankRecord(FileRecord):
    """What one rank wrote. `scalars[name][key]`: numbers that the optimizer keeps for a parameter;
    `stateless`: parameters for which it keeps nothing (yet); `progress`: see
    `ForkEngine.progress`; `frozen`: its second file, of parameters that do not learn."""

    scalars: Mapping[str, Mapping[str, Any]]
    stateless: tuple[str, ...]
    progress: Mapping[str, Any]
    frozen: FileRecord | None = None

    def files(self, rank: int) -> dict[str, FileRecord]:
        """By name."""
        frozen = {} if self.frozen is None else {frozen_file(rank): self.frozen}
        return {tensors_file(rank): self, **frozen}

    def to_json(self) -> dict[str, Any]:
        """Without what is not there, so that 0.1 reads what it could have written."""
        record = asdict(self)
        return record if self.frozen else {k: v for k, v in record.items() if k != "frozen"}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankRecord:
        values = {**record, "fragments": cls.fragments_of(record)}
        if frozen := record.get("frozen"):
            fragments = cls.fragments_of(frozen)
            values["frozen"] = FileRecord(frozen["num_bytes"], frozen["checksum"], fragments)
        return cls(**{**values, "stateless": tuple(record["stateless"])})


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint. `topology`: what wrote it (`engine_state.topology_of`); `state`: the
    caller's; `configuration`: the run's as resolved. Raises ValueError unless every element of
    every tensor is in one fragment."""

    step: int
    written: str  # time of day, ISO 8601
    topology: Mapping[str, Any]
    state: Mapping[str, Any]
    configuration: Mapping[str, Any]
    ranks: tuple[RankRecord, ...]

    def __post_init__(self):
        if not self.ranks:
            raise ValueError("lists no ranks")
        for (kind, name), found in self.fragments().items():
            shape, end = found[0][1].shape, 0
            for _, fragment in found:
                if fragment.shape != shape or fragment.offset != end:
                    raise ValueError(
                        f"does not have the elements of {kind} {name!r} from {end} on, or not once"
                    )
                end += fragment.numel
            if end != math.prod(shape):
                raise ValueError(f"does not have the elements of {kind} {name!r} from {end} on")

    def files(self, part: int = 0, parts: int = 1) -> dict[str, FileRecord]:
        """By name; of every `parts`-th rank from `part` on."""
        return {
            name: file
            for rank in range(part, len(self.ranks), parts)
            for name, file in self.ranks[rank].files(rank).items()
        }

    def fragments(self) -> dict[tuple[str, str], list[tuple[str, Fragment]]]:
        """(kind, name) -> (file, fragment), by offset."""
        found: dict[tuple[str, str], list[tuple[str, Fragment]]] = {}
        for file, record in self.files().items():
            for fragment in record.fragments:
                found.setdefault((fragment.kind, fragment.name), []).append((file, fragment))
        return {
            key: sorted(parts, key=lambda part: (part[1].offset, part[1].numel))
            for key, parts in found.items()
        }

    @property
    def progress(self) -> dict[str, Any]:
        """What all ranks report, put together: a rank reports what is equal everywhere, and of its
        own."""
        united: dict[str, Any] = {}
        for record in self.ranks:
            united = _united(united, record.progress)
        return united

    def to_text(self) -> str:
        ranks = [record.to_json() for record in self.ranks]
        version = VERSIONS[any(record.frozen for record in self.ranks)]
        return sealed({"format": FORMAT, "version": version, **vars(self), "ranks": ranks})

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        record = unsealed(text)
        if record.pop("format", None) != FORMAT:
            raise ValueError("is not that of a checkpoint")
        if (version := record.pop("version", None)) not in VERSIONS:
            raise ValueError(
                f"has format version {version}, and this program reads versions "
                f"{' and '.join(map(str, VERSIONS))}; use the program that wrote it"
            )
        return cls(**{**record, "ranks": tuple(map(RankRecord.from_json, record["ranks"]))})


def _united(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of both, dictionaries inside likewise; what both have otherwise is the first's."""
    inside = {
        key
        for key in first.keys() & second.keys()
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping)
    }
    return {**second, **first, **{key: _united(first[key], second[key]) for key in inside}}


def sealed(record: Mapping[str, Any]) -> str:
    """JSON with a checksum of itself, under `SEAL`."""
    return json.dumps({**record, SEAL: _checksum_of_json(record)}) + "\n"


def unsealed(text: str) -> dict[str, Any]:
    """What `sealed` was given. Raises ValueError when a character has changed."""
    record = json.loads(text)
    if not isinstance(record, dict) or record.pop(SEAL, None) != _checksum_of_json(record):
        raise ValueError("does not have the checksum that it was written with")
    return record


def _checksum_of_json(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())


def checksum_of_file(file: Path) -> str:
    """xxh3_128, 32 hexadecimal digits: against accidents, at the speed of the memory (8 GB/s where
    SHA-256 does 1.2)."""
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


# -- names


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    match = re.fullmatch(STEP_FOLDER, checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint}: a checkpoint's folder is named step-NNNNNNNN")
    return int(match.group(1))


def tensors_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def frozen_file(rank: int) -> str:
    return f"rank-{rank:05d}.frozen.safetensors"


def marker_file(rank: int) -> str:
    """A rank's record while the checkpoint is written: that it is there means that the rank is
    done. The manifest takes it up."""
    return f"rank-{rank:05d}.json"


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders that are named as checkpoints, newest first. Links are none."""
    named = [
        path
        for path in folder.glob("step-*")
        if re.fullmatch(STEP_FOLDER, path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(named, key=step_of, reverse=True)


# -- onto the disk


def replace_text(file: Path, text: str) -> None:
    """Put a text file in place by a rename, so that it is there whole or not at all, also after a
    power cut."""
    with replacing(file) as beside:
        beside.write_text(text, encoding="utf-8")
        flush(beside)
    flush(file.parent)


def flush(path: Path, forget: bool = False) -> None:
    """Wait until a file or a folder is on the disk. `forget`: drop it from the kernel's memory, so
    that reading it asks the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# -- is it whole?


def read_manifest(checkpoint: Path, part: int = 0, parts: int = 1) -> Manifest:
    """The manifest of a checkpoint whose files are all there and have their sizes; what is in them
    is not checked.

    Of the files every `parts`-th from `part` on, so that ranks can share the looking. Raises
    BrokenCheckpoint.
    """
    manifest = manifest_of(checkpoint)
    for name, file in manifest.files(part, parts).items():
        _check_size(checkpoint / name, file.num_bytes)
    return manifest


def manifest_of(checkpoint: Path) -> Manifest:
    """The manifest; no other file is looked at. Raises BrokenCheckpoint."""
    try:
        if not (checkpoint / MANIFEST).is_file():
            what = f"has no {MANIFEST}: it was not written to the end, or is of another format"
            raise BrokenCheckpoint(
                f"{checkpoint}: {what if checkpoint.is_dir() else 'no such folder'}"
            )
        manifest = Manifest.from_text((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        if re.fullmatch(STEP_FOLDER, checkpoint.name) and step_of(checkpoint) != manifest.step:
            raise ValueError(f"is that of step {manifest.step}")
    except BrokenCheckpoint:
        raise
    except KeyError as error:
        raise BrokenCheckpoint(f"{checkpoint}: {MANIFEST} lacks {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise _passing(error) or BrokenCheckpoint(f"{checkpoint}: {MANIFEST} {error}") from error
    return manifest


def _check_size(file: Path, num_bytes: int) -> None:
    try:
        found = file.lstat()
    except OSError as error:
        raise _passing(error) or BrokenCheckpoint(
            f"{file.parent}: {file.name} is missing ({error.strerror})"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise BrokenCheckpoint(f"{file.parent}: {file.name} is a link or a folder, not a file")
    if found.st_size != num_bytes:
        raise BrokenCheckpoint(
            f"{file.parent}: {file.name} has {found.st_size:,} bytes, and was written with "
            f"{num_bytes:,}"
        )


PASSING = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.EHOSTDOWN}
PASSING |= {errno.ENOMEM, errno.EMFILE, errno.ENFILE}


def _passing(error: Exception) -> OSError | None:
    """Storage that does not answer now is no broken checkpoint: older ones must not be taken for
    the newest."""
    if not isinstance(error, OSError) or error.errno not in PASSING:
        return None
    return OSError(
        error.errno, f"{error.strerror}; start again when the storage answers", error.filename
    )


def verify(checkpoint: Path, part: int = 0, parts: int = 1) -> Manifest:
    """The manifest of a checkpoint that is as it was written. Raises BrokenCheckpoint with what is
    wrong.

    Of the files every `parts`-th from `part` on, so that ranks can share the reading.
    """
    manifest = read_manifest(checkpoint, part, parts)
    for name, file in manifest.files(part, parts).items():
        check_content(checkpoint / name, file.checksum)
    return manifest


def check_content(file: Path, checksum: str) -> None:
    """Raise BrokenCheckpoint unless the file reads as it was written."""
    try:
        found = checksum_of_file(file)
    except OSError as error:
        raise _passing(error) or BrokenCheckpoint(
            f"{file.parent}: {file.name} cannot be read: {error}"
        ) from error
    if found != checksum:
        raise BrokenCheckpoint(
            f"{file.parent}: {file.name} does not have the checksum that it was written with"
        )


def newest_of(
    candidates: list[Path], check: Callable[[Path], Any] = verify
) -> tuple[Path | None, list[str]]:
    """The first of `candidates` that `check` finds nothing wrong with, and what is wrong with those
    before it."""
    passed_over: list[str] = []
    for checkpoint in candidates:
        try:
            check(checkpoint)
            return checkpoint, passed_over
        except BrokenCheckpoint as error:
            passed_over.append(str(error))
    return None, passed_over
