"""The index of a data set: a row per sample, made once and then memory-mapped by every process.

    building.py   makes it
    memo.py       what the one before knows, for the next
    Index         reads it: whole columns without a copy, single values in microseconds

On disk, in `index/<hash of the spec>/` of the cache folder:

    index.json     which of the folders beside it is the index; replaced in one rename
    <build>/       numbers, texts.arrow, repeats.npy, meta.json: see `Index`
    lock           held while building: processes that start together build once
"""

import contextlib
import mmap
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.files import OWN_LIMIT, read_json
from data.box_checks import DOUBTS
from data.concat import Concat
from data.formats.rows import CAPTION_LINES, DEFAULT_PAIRS, Format
from data.formats.specs import cache_folder
from data.identity import MISSING, Identity, fingerprint
from data.keys import content_hash
from data.stored.audio import AUDIO
from data.stored.kinds import STORED, Registered, files_of, is_own, stored
from data.stored.record import FORMS, StoredFile

VERSION = 10  # raised when an index of before would say other things of the same data
NUMBERS, TEXTS, REPEATS, META = "numbers", "texts.arrow", "repeats.npy", "meta.json"
# Images that are files: up to so many, each one's size and time are compared whenever the index is
# opened.
RECHECKED_FILES = 100_000
CHECKSUM_BLOCK, CHECKSUM_BLOCKS = 1 << 16, 256
# after so many reads of single rows, this process lets go of the pages that it has mapped
READS_KEPT = 32
UNUSED_KINDS = 50  # counted by themselves; names may be all different
NOTES = (*DOUBTS, CAPTION_LINES)
"""What is counted beside that, of samples that are used."""

ABSENT = "absent"
"""int64, a bit for each of the index's modalities that the sample lacks. Only an index of other
pairs than images and texts has it."""


def numbers_of(modalities: Sequence[str]) -> np.dtype:
    """The columns of numbers of an index for these modalities."""
    columns = {
        "row": "i8",  # line, table row or entry
        "num_captions": "i2",
        "num_characters": "i4",  # of the longest caption
        "bad": "i1",  # 0: usable, else 1 + position in REASONS
        "id_hash": "u8",
    }
    for name in modalities:
        columns |= stored(name).numbers()
    if tuple(modalities) != DEFAULT_PAIRS[0]:
        columns[ABSENT] = "i8"
    # The widest first: one after the other in a file, each is aligned.
    return np.dtype(sorted(columns.items(), key=lambda column: -np.dtype(column[1]).itemsize))


def texts_of(modalities: Sequence[str]) -> pa.Schema:
    """The columns of texts: class (`label`), id, what is wrong with the sample or was dropped of it,
    the texts' language as JSON, paths as the data set gives them, regions as JSON, and captions."""
    names = ["id", "detail", "language"]
    names += [column for name in modalities for column in stored(name).texts()]
    captions = pa.large_list(pa.large_string())
    return pa.schema([*((name, pa.large_string()) for name in names), ("captions", captions)])


UnusedCounts = dict[str, tuple[int, str]]
"""What is no part of a sample -> how many there are, and where the first is."""


def add_unused(total: UnusedCounts, more: Mapping[str, Sequence[Any]]) -> None:
    for what, (number, where) in more.items():
        known = what if what in NOTES or what in total or len(total) < UNUSED_KINDS else "others"
        before, first = total.get(known, (0, where))
        total[known] = (before + number, first)


class Index:
    """An open index. Pickled it is a path; where it is unpickled the same files are mapped again.

    `numbers` holds the columns of `numbers_of` one after the other, `texts.arrow` those of
    `texts_of` in several batches, `repeats.npy` [n, 2] the rows whose id is not the first of its
    kind, each with the first. meta.json names the first byte of each of the `columns`, and the
    `parts` that the rows were read from, in order: [stamp, file or folder, rows of each of its
    batches, what is unused in it]. Errors: ValueError where a file is not what was written,
    OSError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.meta = read_json(folder / META, OWN_LIMIT)
            for name, (size, crc) in self.meta["files"].items():
                if os.path.getsize(folder / name) != size or checksum(folder / name) != crc:
                    raise ValueError(f"{folder / name} is not the file that was written")
            numbers, texts = self._maps = _map(folder / NUMBERS), _map(folder / TEXTS)
            self.repeats = np.load(folder / REPEATS)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder}: this index was replaced, because the data changed; start the run again"
            ) from None
        self.modalities: tuple[str, ...] = tuple(self.meta["modalities"])
        self._batches = pa.ipc.open_file(pa.py_buffer(texts))
        sizes = [(rows, file) for _, file, batches, _ in self.meta["parts"] for rows in batches]
        self._rows = Concat(rows for rows, _ in sizes)
        self._files = [file for _, file in sizes]  # of each batch
        kinds = numbers_of(self.modalities)
        self._columns = {
            name: np.frombuffer(numbers, kinds[name], len(self), begin)
            for name, begin in self.meta["columns"].items()
        }
        self._reads = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self):
        return _opened, (Registered(), self.folder)

    def column(self, name: str) -> np.ndarray:
        """[N], one of `numbers_of`, without a copy and not to be written to; zeros for media that
        the index has not."""
        if name not in self._columns:
            return np.zeros(len(self), numbers_of(tuple(STORED))[name])
        return self._columns[name]

    def text(self, name: str, i: int) -> Any:
        """One of `texts_of` of row i; empty for media that the index has not."""
        # Rows are read in any order, and each maps far more than itself, also of the numbers that
        # are read beside a text: without letting go, in an epoch all of both files. They stay in
        # the system's memory, where every process finds them again without reading the disk.
        self._reads += 1
        if self._reads % READS_KEPT == 0:
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)
        if name not in self._batches.schema.names:
            return ""
        number, row = self._rows.part(i)
        return self._batches.get_batch(number).column(name)[row].as_py()

    def container(self, i: int) -> str:
        """The file or folder that the row stands in."""
        return self._files[self._rows.part(i)[0]]

    def unused(self) -> UnusedCounts:
        """What is no part of a sample, of all parts."""
        return {what: each for what, each in self._counted().items() if what not in NOTES}

    def notes(self) -> dict[str, int]:
        """How many there are of each of `NOTES`."""
        return {what: number for what, (number, _) in self._counted().items() if what in NOTES}

    def _counted(self) -> UnusedCounts:
        total = UnusedCounts()
        for *_, counts in self.meta["parts"]:
            add_unused(total, counts)
        return total

    def filled(self, name: str) -> Iterator[tuple[int, str]]:
        """Row and text of all rows where a text is not empty."""
        for number, start in enumerate(self._rows.starts[:-1].tolist()):
            column = self._batches.get_batch(number).column(name)
            lengths = pc.binary_length(column).to_numpy(zero_copy_only=False)
            for place in np.flatnonzero(lengths).tolist():
                yield start + place, column[place].as_py()

    def batch(self, number: int) -> tuple[pa.RecordBatch, np.ndarray]:
        """Texts and numbers [n] of a batch."""
        rows = slice(*self._rows.starts[number : number + 2])
        numbers = np.empty(rows.stop - rows.start, numbers_of(self.modalities))
        for name, column in self._columns.items():
            numbers[name] = column[rows]
        return self._batches.get_batch(number), numbers


def _opened(kinds: Registered, folder: Path) -> Index:
    return Index(folder)


def _map(file: Path) -> mmap.mmap:
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return mapped


def checksum(file: Path) -> int:
    """CRC-32 of the file up to 16 MiB; of a larger one of so much of it, spread evenly: reading
    all would take longer than opening may."""
    size = os.path.getsize(file)
    starts = range(0, size, CHECKSUM_BLOCK)
    if len(starts) > CHECKSUM_BLOCKS:
        starts = np.linspace(0, size - CHECKSUM_BLOCK, CHECKSUM_BLOCKS).astype(int).tolist()
    value = 0
    with open(file, "rb", buffering=0) as opened:
        for start in starts:
            value = zlib.crc32(os.pread(opened.fileno(), CHECKSUM_BLOCK, start), value)
    return value


# -- finding one


def index_folder(
    format: Format,
    check: str = "decode",
    folder: Path | None = None,
    max_audio_seconds: float | None = None,
) -> Path:
    """Where the index of a data set lies; `folder` instead of the cache folder's `index`. The rest
    as `load_index` has it."""
    words: list[Any] = [VERSION, check, format.spec, format.pairs]
    # what one decoder refuses, another may read once it is installed
    words += [kind.missing_decoders() for kind in files_of(format.modalities)]
    # of a modality that has an entry now and had none before, the index says more
    words += [name for name in format.modalities if name in STORED]
    # and where values of one's own stand and what is measured of them may change with their module
    words += [_record_of(kind) for kind in files_of(format.modalities) if is_own(kind)]
    if AUDIO.name in format.modalities:
        words.append(max_audio_seconds)
    return (folder or cache_folder() / "index") / fingerprint(words)


def _record_of(kind: StoredFile) -> tuple[Any, ...]:
    names = [kind.names_in(form) for form in FORMS]
    columns = [*kind.measured.items(), *kind.said]
    return kind.endings, names, kind.beside, columns, _code_of(kind)


def _code_of(kind: StoredFile) -> str:
    """What tells the file of a measure from an earlier one; empty where there is no file."""
    file = getattr(sys.modules.get(getattr(kind.measure, "__module__", "")), "__file__", None)
    return content_hash(Path(file).read_bytes()).hex() if file and os.path.isfile(file) else ""


def open_index(format: Format, folder: Path) -> Index | None:
    """The index in `folder` if it is whole and made from the files as they are now, else None.

    Up to 100,000 images and sounds that are files of their own are compared by size and time.
    """
    index = kept_index(folder)
    if index is None or index.meta["fingerprint"] != fingerprint(format.fingerprint()):
        return None
    return None if _files_changed(format, index) else index


def kept_index(folder: Path) -> Index | None:
    """The index in `folder` as it was made; None: there is none, or it is damaged."""
    try:
        return Index(folder / read_json(folder / "index.json")["build"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def _files_changed(format: Format, index: Index) -> bool:
    for modality in (kind.name for kind in files_of(index.modalities)):
        # a time of 0: no file of its own
        sizes, times = (index.column(f"{modality}_{name}") for name in ("size", "mtime_ns"))
        if not 0 < np.count_nonzero(times) <= RECHECKED_FILES:
            continue
        for i, path in index.filled(f"{modality}_path"):
            known = Identity(int(sizes[i]), int(times[i]))
            if times[i] and _identity(format.roots.folders, path) != known:
                return True
    return False


def _identity(folders: Sequence[str], path: str) -> Identity:
    """Of the file that a path leads to, without the checks of `Roots.find`."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            return Identity.of(os.stat(os.path.join(folder, path)))
    return MISSING
