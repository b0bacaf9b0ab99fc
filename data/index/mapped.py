"""The index of a data set: one Arrow file with a row per sample, made once and then memory-mapped
by every process.

    index_build.py  makes it
    Index           reads it: whole columns without a copy, single values in microseconds

On disk, in `index/<hash of the spec>/` of the cache folder:

    index.json      what the file was made from, its size and checksum; replaced in one rename, so it names a whole file or the one before
    <build>.arrow   one record batch: the columns of `SCHEMA`; where other modalities than images and texts are compared, one more,
                    and where audio is, those of `AUDIO_COLUMNS`
    lock            held while building: processes that start together build once
"""

import contextlib
import hashlib
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.files import read_json
from data.formats.rows import DEFAULT_PAIRS, Format, Roots
from data.formats.specs import cache_folder
from data.index.bad_samples import CODES

VERSION = 2  # raised when an index of before would say other things of the same data
# images that are files: up to so many, each one's size and time are compared whenever the index
# is opened
RECHECKED_FILES = 100_000
CHECKSUM_BLOCK, CHECKSUM_BLOCKS = 1 << 16, 256
READS_KEPT = (
    32  # after so many reads of single rows, this process lets go of the pages that it has mapped
)
HASH_BYTES = 16
ROWS_AT_ONCE = 1 << 20  # of a column that is looked through

NUMBERS = {
    "part": np.int32,  # which of the files in index.json the row stands in
    "row": np.int64,  # line, table row or entry
    "offset": np.int64,
    "size": np.int64,  # bytes of the encoded image
    "mtime_ns": np.int64,
    "num_captions": np.int16,
    "num_characters": np.int32,  # of the longest caption
    "width": np.int32,  # pixels, as shown (upright)
    "height": np.int32,
    # bytes of the encoded image / pixels: what an entropy coder needs, a cheap measure of detail
    "complexity": np.float32,
    # equal or few bits apart for images that look alike; 0 with check "header"
    "perceptual_hash": np.uint64,
    "bad": np.int8,  # 0: usable, else 1 + position in REASONS
    "key": np.uint64,  # of the image's place, size and time; 0: not read
    "id_hash": np.uint64,
}
TEXTS = ("id", "path", "detail")
LIST = pa.large_list(pa.large_string())
SCHEMA = pa.schema(
    [(name, pa.large_string()) for name in TEXTS]
    + [("captions", LIST), ("content_hash", pa.binary(HASH_BYTES))]
    + [(name, pa.from_numpy_dtype(kind)) for name, kind in NUMBERS.items()]
)

AUDIO_COLUMNS = {
    "audio_path": pa.large_string(),
    "audio_hash": pa.binary(HASH_BYTES),  # of the encoded bytes, as `content_hash` of the image
    "audio_offset": pa.int64(),
    "audio_size": pa.int64(),  # bytes
    "audio_mtime_ns": pa.int64(),
    "audio_place": pa.uint64(),  # of its place, size and time; 0: to be read again
    "audio_key": pa.uint64(),  # equal for equal samples, decoded to one channel, and rate
    "audio_seconds": pa.float32(),
    "audio_rate": pa.int32(),  # Hz
    "audio_channels": pa.int16(),
}
"""Of the sound of each sample; in an index of pairs with the modality audio only."""

ABSENT = "absent"
"""int64 [N], a bit for each of the index's modalities that the sample lacks. Only an index of other
pairs than images and texts has it."""


def schema_of(modalities: Sequence[str]) -> pa.Schema:
    """Of an index for these modalities."""
    if tuple(modalities) == DEFAULT_PAIRS[0]:
        return SCHEMA
    more = AUDIO_COLUMNS if "audio" in modalities else {}
    return pa.schema([*SCHEMA, *more.items(), pa.field(ABSENT, pa.int64())])


UnusedCounts = dict[str, tuple[int, str]]
"""What is no part of a sample -> how many there are, and where the first is."""
UNUSED_KINDS = 50  # told apart; names may be all different


def add_unused(total: UnusedCounts, more: Mapping[str, tuple[int, str]]) -> None:
    for what, (number, where) in more.items():
        known = what if what in total or len(total) < UNUSED_KINDS else "others"
        before, first = total.get(known, (0, where))
        total[known] = (before + number, first)


class IndexDamaged(ValueError):
    """The file is not what its index.json says."""


class Index:
    """An open index. Pickled it is a path; where it is unpickled the same file is mapped again.

    Errors: IndexDamaged, OSError.
    """

    def __init__(self, file: str | Path, meta: dict[str, Any]) -> None:
        self.file, self.meta = Path(file), meta
        self._map, self._batch = _mapped(self.file, meta)
        self._reads = 0
        self._captions, self._ids = self._batch.column("captions"), self._batch.column("id")
        self.modalities = modalities_of(meta)
        numbers = [
            field.name
            for field in self._batch.schema
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        ]
        self._columns = {
            name: self._batch.column(name).to_numpy(zero_copy_only=True) for name in numbers
        }

    def __len__(self) -> int:
        return self._batch.num_rows

    def __reduce__(self):
        return Index, (
            self.file,
            {name: value for name, value in self.meta.items() if name != "parts"},
        )

    def column(self, name: str) -> np.ndarray:
        """[N], one of `NUMBERS` or a number of `AUDIO_COLUMNS`, without a copy and not to be written
        to. Of an index without audio the latter are 0."""
        if name not in self._columns and name in AUDIO_COLUMNS:
            return np.zeros(len(self), AUDIO_COLUMNS[name].to_pandas_dtype())
        return self._columns[name]

    def id(self, i: int) -> str:
        return self._read(self._ids, i)

    def captions(self, i: int) -> list[str]:
        return self._read(self._captions, i)

    def text(self, name: str, i: int) -> str:
        return self._read(self._batch.column(name), i)

    def content_hash(self, i: int) -> bytes:
        return self._read(self._batch.column("content_hash"), i)

    def audio_hash(self, i: int) -> bytes:
        return self._read(self._batch.column("audio_hash"), i)

    def _read(self, column: pa.Array, i: int) -> Any:
        """Rows are read in any order, and each maps far more than itself: without letting go, in an
        epoch all of the file.

        What is let go of stays in the system's memory, where every process finds it again without
        reading the disk.
        """
        self._reads += 1
        if self._reads % READS_KEPT == 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        return column[i].as_py()

    def lacks(self, modality: str, i: int) -> bool:
        """Does usable sample i have nothing of a modality?"""
        if ABSENT not in self._columns:
            return modality not in self.modalities
        return modality not in self.modalities or bool(
            self._columns[ABSENT][i] >> self.modalities.index(modality) & 1
        )

    def lacking(self, modality: str) -> np.ndarray:
        """[N] bool: which usable samples have nothing of a modality."""
        if modality not in self.modalities or ABSENT not in self._columns:
            return np.full(len(self), modality not in self.modalities)
        return (self._columns[ABSENT] >> self.modalities.index(modality) & 1).astype(bool)

    def broken(self) -> Iterator[tuple[int, str, str, str]]:
        """(i, modality, reason, detail) of what cannot be used of usable samples, which are used
        without it."""
        for i in self.filled("detail"):
            if self._columns["bad"][i] == 0:
                for line in self.text("detail", i).split("\n"):
                    modality, reason, detail = line.split(": ", 2)
                    yield i, modality, reason, detail

    def filled(self, name: str) -> Iterator[int]:
        """The rows where one of `TEXTS` is not empty."""
        column = self._batch.column(name)
        for start in range(0, len(self), ROWS_AT_ONCE):
            lengths = pc.binary_length(column.slice(start, ROWS_AT_ONCE))
            yield from (start + np.flatnonzero(lengths.to_numpy(zero_copy_only=False))).tolist()

    def content_keys(self) -> np.ndarray:
        """[N] uint64: the first half of each content hash, not copied."""
        column = self._batch.column("content_hash")
        halves = np.frombuffer(column.buffers()[1], np.uint64).reshape(-1, 2)
        return halves[column.offset : column.offset + len(column), 0]

    def container(self, i: int) -> str:
        """The file or folder that the row stands in."""
        return self.meta["files"][self._columns["part"][i]]

    def slice(self, start: int, length: int) -> pa.RecordBatch:
        return self._batch.slice(start, length)

    def usable(self) -> np.ndarray:
        """[n] int64, ascending."""
        return np.flatnonzero(self._columns["bad"] == 0).astype(np.int64, copy=False)


def _mapped(file: Path, meta: dict[str, Any]) -> tuple[mmap.mmap, pa.RecordBatch]:
    try:
        if os.path.getsize(file) != meta["bytes"] or checksum(file) != meta["checksum"]:
            raise IndexDamaged(f"{file} is not the file that was written")
        with open(file, "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        reader = pa.ipc.open_file(pa.py_buffer(mapped))
        if reader.num_record_batches != 1 or not reader.schema.equals(
            schema_of(modalities_of(meta))
        ):
            raise IndexDamaged(f"{file} has other columns")
        return mapped, reader.get_batch(0)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file}: this index was replaced, because the data changed; start the run again"
        ) from None
    except (pa.ArrowException, KeyError, TypeError) as error:
        raise IndexDamaged(f"{file}: {error}") from error


def modalities_of(meta: dict[str, Any]) -> tuple[str, ...]:
    """Those that an index tells apart; one of images and texts does not say so."""
    return tuple(meta.get("modalities", DEFAULT_PAIRS[0]))


def checksum(file: Path) -> int:
    """Of the whole file up to 16 MiB; of a larger one of so much of it, spread evenly: reading all
    would take longer than opening may."""
    size = os.path.getsize(file)
    starts = range(0, size, CHECKSUM_BLOCK)
    if len(starts) > CHECKSUM_BLOCKS:
        starts = np.linspace(0, size - CHECKSUM_BLOCK, CHECKSUM_BLOCKS).astype(int).tolist()
    value = 0
    with open(file, "rb", buffering=0) as opened:
        for start in starts:
            value = zlib.crc32(os.pread(opened.fileno(), CHECKSUM_BLOCK, start), value)
    return value


def index_folder(
    format: Format,
    check: str = "decode",
    folder: Path | None = None,
    max_audio_seconds: float | None = None,
) -> Path:
    """Where the index of a data set lies; `folder` instead of the cache folder's `index`. The rest
    as `load_index` has it."""
    words = f"{VERSION}\0{check}\0{format.index_name()}"
    if max_audio_seconds is not None and "audio" in format.modalities:
        words += f"\0{max_audio_seconds}"
    name = hashlib.blake2b(words.encode(errors="backslashreplace"), digest_size=12).hexdigest()
    return (folder or cache_folder() / "index") / name


def open_index(format: Format, folder: Path, recheck: bool = True) -> Index | None:
    """The index in `folder` if it is whole and made from the files as they are now, else None.

    `recheck` also compares the size and time of every image that is a file of its own, up to
    100,000 of them.
    """
    index = kept_index(folder)
    if index is None or index.meta["fingerprint"] != fingerprint_of(format):
        return None
    if (
        recheck
        and format.images_are_files
        and len(index) <= RECHECKED_FILES
        and _images_changed(format, index)
    ):
        return None
    if (
        recheck
        and format.audio_is_files
        and "audio" in index.modalities
        and len(index) <= RECHECKED_FILES
        and _sounds_changed(format, index)
    ):
        return None
    return index


def kept_index(folder: Path) -> Index | None:
    try:
        meta = read_json(folder / "index.json")
        return Index(folder / meta["file"], meta) if meta["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError):  # none there, another version, damaged
        return None


def fingerprint_of(format: Format) -> str:
    """Equal as long as everything that lists the rows is what it was."""
    return hashlib.blake2b(
        repr([format.spec, format.fingerprint()]).encode(errors="backslashreplace"), digest_size=16
    ).hexdigest()


def _images_changed(format: Format, index: Index) -> bool:
    sizes, times, bad = (index.column(name) for name in ("size", "mtime_ns", "bad"))
    missing, outside = CODES["missing-file"], CODES["outside-root"]
    passed_over = _missing(index, "image")  # their samples are used without them
    for i in index.filled("path"):
        lost = bad[i] == missing or i in passed_over
        if bad[i] == outside or (sizes[i] < 0 and not lost):
            continue  # nothing that may be read
        found = _status(format.roots, index.text("path", i))
        if (found is None) != lost or (
            found and (found.st_size != sizes[i] or found.st_mtime_ns != times[i])
        ):
            return True
    return False


def _sounds_changed(format: Format, index: Index) -> bool:
    sizes, times = index.column("audio_size"), index.column("audio_mtime_ns")
    for i in index.filled("audio_path"):
        if sizes[i] < 0:
            continue
        found = _status(format.roots, index.text("audio_path", i))
        if not found or found.st_size != sizes[i] or found.st_mtime_ns != times[i]:
            return True
    # one that was not there may have come since
    lost = np.flatnonzero((sizes < 0) & (index.column("bad") == CODES["missing-file"]))
    return any(
        _status(format.roots, index.text("audio_path", i)) is not None
        for i in (*lost.tolist(), *_missing(index, "audio"))
        if index.text("audio_path", i)
    )


def _missing(index: Index, modality: str) -> set[int]:
    """The usable samples of which the file of this modality was not there."""
    return {
        i for i, name, reason, _ in index.broken() if (name, reason) == (modality, "missing-file")
    }


def _status(roots: Roots, path: str) -> os.stat_result | None:
    """Of the file that a path leads to, without the checks of `locate`."""
    for folder in roots.folders:
        with contextlib.suppress(OSError, ValueError):
            return os.stat(os.path.join(folder, path))
    return None
