"""Makes the index of a data set: checks its rows, reads every image and sound, writes columns. A
shard, an image, a sound or a film that has not changed is not read again."""

import contextlib
import json
import math
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock

from common.cpus import usable_cpus
from common.files import make_folder, move, remove, remove_folder, write_text
from common.output import brief
from data.bad_samples import ABSENCES, CODES, BadSample, refusing
from data.clips import is_cut
from data.formats.rows import CAPTION_LINES, Format, Media, Part, Sample, Unused
from data.identity import fingerprint
from data.index.mapped import (
    ABSENT,
    META,
    NUMBERS,
    REPEATS,
    TEXTS,
    Index,
    UnusedCounts,
    add_unused,
    checksum,
    index_folder,
    kept_index,
    numbers_of,
    open_index,
    texts_of,
)
from data.index.memo import Memo, memo_key
from data.keys import HASH_BYTES, content_hash, hash64
from data.modules import own_code
from data.processes import end_with_parent, start_method
from data.progress import progress_bar
from data.stored.audio import refuse_too_long
from data.stored.kinds import Registered, annotations_of, files_of, is_own
from data.stored.record import StoredFile

CHECKS = ("decode", "header")
ROWS_AT_ONCE = 4096
POOL_AFTER_S = 3.0  # starting processes takes about that long; a smaller data set is done by then
MAX_WORKERS = 16
PARTS_AHEAD = 4  # per worker
KEPT_BUILDS = 2  # the newest one and that of runs which started before it was made
MOST_CAPTIONS = np.iinfo(np.int16).max  # that are counted
DETAIL_LIMIT = 1000  # characters: several long paths, and what to do about them
BEHIND_FILMS = "ends of clips behind their films"  # which are cut to them, and counted
DUPLICATE = CODES["duplicate-id"]
# rows whose id may not be their own
UNNAMED = [CODES[reason] for reason in ("invalid-row", "invalid-utf8", "nul-character")]


def load_index(
    format: Format,
    folder: Path | None = None,
    workers: int | None = None,
    progress: bool = False,
    check: str = "decode",
    refresh: bool = False,
    max_audio_seconds: float | None = None,
) -> Index:
    """The data set's index, open; made first, or made anew where the data changed, in its folder
    (see `index_folder`).

    workers: processes that read images; None: a core each, at most 16. check: "decode" decodes
    every image, so that all who open the index agree on which are bad; "header" reads sizes only,
    and leaves the rest to be found in training. refresh: list all parts, and read again what has
    another size or time; else that is done only where the data set's own files, or one of up to
    100,000 images or sounds, are seen to have changed.
    max_audio_seconds: longer sounds are bad; None: as far as they are read at all. Errors:
    ValueError, OSError.
    """
    if check not in CHECKS:
        raise ValueError(f"check '{check}': one of {', '.join(CHECKS)} is needed")
    target = index_folder(format, check, folder, max_audio_seconds)
    if not refresh and (index := open_index(format, target)):
        return index
    with contextlib.ExitStack() as stack:
        try:
            make_folder(target)
            stack.enter_context(FileLock(target / "lock"))
        except OSError as error:
            raise OSError(
                f"cannot write the index of {format.spec} to {target}: {error}; name another "
                "folder in WYE_CACHE"
            ) from error
        if not refresh and (index := open_index(format, target)):
            return index  # made by another process while this one waited
        for left in target.glob("build-*"):  # by a process that was killed
            remove_folder(left, target)
        _build(
            _Work(format, check, max_audio_seconds, files_of(format.modalities)),
            target,
            workers,
            progress,
        )
    index = kept_index(target)
    if index is None:
        raise OSError(
            f"{target}: the index that was just written cannot be read; is the disk full or faulty?"
        )
    return index


@dataclass(frozen=True)
class _Work:
    """What every process needs to index parts."""

    format: Format
    check: str
    max_audio_seconds: float | None
    kinds: Sequence[StoredFile]  # of the modalities
    known: frozenset[str] = frozenset()  # stamps of the parts that the index of before has
    memo: Memo | None = None  # what that index has measured


@dataclass
class _Indexed:
    """The rows of a part; None where its stamp is known."""

    stamp: str
    batches: list[tuple[pa.RecordBatch, np.ndarray]] | None = None
    unused: UnusedCounts = field(default_factory=dict)


def _build(work: _Work, target: Path, workers: int | None, progress: bool) -> None:
    format = work.format
    old, made_of = kept_index(target), fingerprint(format.fingerprint())
    known: dict[str, tuple[range, UnusedCounts]] = {}  # the batches of each part
    first = 0
    for stamp, _, batches, unused in old.meta["parts"] if old else ():
        if stamp:
            known[stamp] = (range(first, first + len(batches)), unused)
        first += len(batches)
    build = make_folder(target / f"build-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        memo = Memo(old, make_folder(build / "orders")) if old else None
        work = replace(work, known=frozenset(known), memo=memo)
        with IndexWriter(build, format.modalities) as writer:
            for part, found in _indexed(work, workers, progress):
                if old is not None and found.batches is None:
                    numbers, found.unused = known[found.stamp]
                    found.batches = [*map(old.batch, numbers)]
                writer.append(found.stamp, part.file, found.batches or [], found.unused)
        if not writer.rows:
            raise ValueError(f"{format.spec} holds no sample")
        remove_folder(build / "orders", build)
        writer.publish(target, made_of)
    finally:
        remove_folder(build, target)


class IndexWriter(contextlib.ExitStack):
    """Writes the files of an index, part after part: memory does not grow with the rows."""

    def __init__(self, folder: Path, modalities: tuple[str, ...]) -> None:
        super().__init__()
        self._folder, self._modalities = folder, modalities
        schema = texts_of(modalities)
        self._texts = self.enter_context(pa.ipc.new_file(str(folder / TEXTS), schema))
        self._columns = {
            name: self.enter_context(open(folder / name, "xb"))
            for name in numbers_of(modalities).names or ()
        }
        self._parts: list[tuple[str, str, list[int], UnusedCounts]] = []
        self.rows = 0

    def append(
        self,
        stamp: str,
        file: str,
        batches: list[tuple[pa.RecordBatch, np.ndarray]],
        unused: UnusedCounts,
    ) -> None:
        for texts, numbers in batches:
            # Which ids come twice depends on all rows, so a part does not know.
            bad = numbers["bad"]
            bad[bad == DUPLICATE] = 0
            self._texts.write_batch(texts)
            for name, column in self._columns.items():
                column.write(numbers[name].tobytes())
        sizes = [len(numbers) for _, numbers in batches]
        self.rows += sum(sizes)
        self._parts.append((stamp, file, sizes, unused))

    def publish(self, target: Path, made_of: str) -> None:
        """Move the files into the folder of the index, and then name them: others find them whole,
        or the ones before."""
        np.save(self._folder / REPEATS, self._mark_repeats())
        begins = self._join_columns()
        files = [self._folder / name for name in (NUMBERS, TEXTS, REPEATS)]
        meta = {
            "modalities": self._modalities,
            "columns": begins,
            "fingerprint": made_of,
            "parts": self._parts,
            "files": {file.name: (os.path.getsize(file), checksum(file)) for file in files},
        }
        write_text(self._folder / META, json.dumps(meta))
        name = uuid.uuid4().hex
        move(self._folder, target / name)
        write_text(target / "index.json", json.dumps({"build": name}))
        builds = [folder for folder in target.iterdir() if folder.is_dir() and folder.name != name]
        builds.sort(key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        for folder in builds[KEPT_BUILDS - 1 :]:
            remove_folder(folder, target)

    def _join_columns(self) -> dict[str, int]:
        """Put the columns one after the other into one file, since each file that is mapped costs
        every process a descriptor; the first byte of each."""
        begins = {}
        with open(self._folder / NUMBERS, "xb") as joined:
            for name in self._columns:
                begins[name] = joined.tell()
                with open(self._folder / name, "rb") as column:
                    shutil.copyfileobj(column, joined)
                remove(self._folder / name, self._folder)
        return begins

    def _mark_repeats(self) -> np.ndarray:
        """Mark the usable rows whose id an earlier row has; int64 [n, 2] of each, ascending, and
        the first row with that id."""
        kinds = numbers_of(self._modalities)
        hashes, bad = (
            np.memmap(self._folder / name, kinds[name], "r+") for name in ("id_hash", "bad")
        )
        named = np.flatnonzero(~np.isin(bad, UNNAMED))
        _, first, of = np.unique(hashes[named], return_index=True, return_inverse=True)
        repeats = np.stack([named, named[first[of.reshape(-1)]]], 1)
        repeats = repeats[(repeats[:, 0] != repeats[:, 1]) & (bad[named] == 0)]
        bad[repeats[:, 0]] = DUPLICATE
        bad.flush()
        return repeats


# -- parts, in processes


def _indexed(work: _Work, workers: int | None, progress: bool) -> Iterator[tuple[Part, _Indexed]]:
    """All parts, in order: at first in this process, and in several when that is not done after
    some seconds."""
    format = work.format
    workers = min(usable_cpus(), MAX_WORKERS) if workers is None else workers
    bar = progress_bar(
        None, "reading the data", format.unit, format.total(), shown=progress, scaled=True
    )
    with bar, contextlib.ExitStack() as stack:
        began, pool = time.monotonic(), None
        pending: deque[tuple[Part, Callable[[], _Indexed]]] = deque()

        def take() -> tuple[Part, _Indexed]:
            part, result = pending.popleft()
            try:
                found = result()
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"{format.spec}: a process that read images ended without a message; "
                    "where dmesg says that memory ran out, use fewer workers"
                ) from error
            bar.update(part.weight)
            return part, found

        for part in format.parts():
            if pool is None and workers > 1 and time.monotonic() - began > POOL_AFTER_S:
                pool = ProcessPoolExecutor(
                    workers,
                    start_method(),
                    initializer=_start_worker,
                    initargs=(Registered(), work),
                )
                stack.callback(pool.shutdown, cancel_futures=True)
            if pool is None or fingerprint(part.stamp) in work.known:
                pending.append((part, partial(_index_part, work, part)))
            else:
                pending.append((part, pool.submit(_index_part_in_worker, part).result))
            while len(pending) > (PARTS_AHEAD * workers if pool else 0):
                yield take()
        while pending:
            yield take()


_work: _Work  # of a worker process


def _start_worker(kinds: Registered, work: _Work) -> None:
    global _work
    end_with_parent()
    _work = work


def _index_part_in_worker(part: Part) -> _Indexed:
    return _index_part(_work, part)


def _index_part(work: _Work, part: Part) -> _Indexed:
    """Check the rows of a part and read its images and sounds, unless its stamp is known."""
    stamp = fingerprint(part.stamp) if part.stamp else ""
    if stamp in work.known:
        return _Indexed(stamp)
    found, rows, may_pass = _Indexed(stamp), [], False
    batches = found.batches = []
    for sample in work.format.samples(part):
        add_unused(found.unused, _unused_of(work.format, part, sample))
        if isinstance(sample, Unused):
            continue
        row, passing = _row(work, part, sample)
        add_unused(found.unused, _notes_of(work.format, part, sample, row))
        may_pass = may_pass or passing
        rows.append(row)
        if len(rows) == ROWS_AT_ONCE:
            batches.append(_as_batch(work.format, rows))
            rows = []
    if rows:
        batches.append(_as_batch(work.format, rows))
    if may_pass:
        found.stamp = ""
    return found


def _as_batch(format: Format, rows: list[dict[str, Any]]) -> tuple[pa.RecordBatch, np.ndarray]:
    texts, kinds = texts_of(format.modalities), numbers_of(format.modalities)
    numbers = np.zeros(len(rows), kinds)
    for name in kinds.names or ():
        values = [row.get(name, 0) for row in rows]
        try:
            numbers[name] = np.array(values, kinds[name])
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"the column {name!r} of an index is of numbers ({kinds[name]}), and its measure "
                f"made {brief(values)}: {error}"
            ) from error
    return pa.RecordBatch.from_pylist(rows, texts), numbers


# -- one row


def _row(work: _Work, part: Part, sample: Sample) -> tuple[dict[str, Any], bool]:
    """The columns of a sample, and whether what is wrong with it may pass by itself."""
    format, lacks = work.format, sample.lacks
    row: dict[str, Any] = {}
    may_pass = _is_of_the_system(sample.problem)
    for kind in work.kinds:
        modality = kind.name
        media = sample.media.get(modality, Media())
        row |= {
            f"{modality}_path": _clean(media.path),
            f"{modality}_offset": media.offset,
            f"{modality}_size": media.size,
            f"{modality}_mtime_ns": media.mtime_ns,
            f"{modality}_hash": bytes(HASH_BYTES),
        }
        if modality in lacks or format.problem(sample) is not None:
            continue
        content = media.content
        try:
            if content is None and not media.true_path:
                content = format.read(modality, part.file, sample.number, media)
            row |= _measured(work, part, sample, kind, content)
        except BadSample as wrong:
            lacks[modality] = wrong
            # FFmpeg gives what is wrong with the content the numbers of the system's errors
            may_pass = may_pass or content is None and _is_of_the_system(wrong)
    for annotations in annotations_of(format.modalities):
        row |= annotations.columns(sample, row, format)
    problem = format.problem(sample)
    row |= {
        "id": _clean(sample.id),
        "detail": _clean(problem.detail)[:DETAIL_LIMIT] if problem else _noted(sample),
        "language": "" if sample.language is None else json.dumps(sample.language),
        "label": _clean(sample.label),
        "captions": sample.captions,
        "row": sample.number,
        "num_captions": min(len(sample.captions), MOST_CAPTIONS),
        "num_characters": max(map(len, sample.captions), default=0),
        "bad": CODES[problem.reason] if problem else 0,
        "id_hash": hash64(_clean(sample.id)),
        ABSENT: sum(1 << bit for bit, name in enumerate(format.modalities) if name in lacks),
    }
    return row, may_pass


def _measured(
    work: _Work, part: Part, sample: Sample, kind: StoredFile, content: bytes | None
) -> dict[str, Any]:
    """The columns of a value, which is read unless it is known. `content`: None where it is a file
    of its own. Raises BadSample."""
    media, hashed = sample.media[kind.name], b"" if content is None else content_hash(content)
    decodes = work.check == "decode"
    may_decode = decodes or kind.may_decode(sample)
    key = memo_key(media, hashed, may_decode)
    found = work.memo.find(kind, key) if work.memo else {}
    if not found:
        value: Any = content
        if content is None and kind.stays(media):
            value = media.true_path
        elif content is None:
            value = work.format.read(kind.name, part.file, sample.number, media)
        decodes = decodes or may_decode and kind.must_decode(value)
        found = _looked_at(kind, value, decodes, media, hashed)
        refuse_too_long(found.get("audio_seconds", 0), work.max_audio_seconds)
    return found | kind.of_sample(sample, found) | {f"{kind.name}_known_by": key}


def _looked_at(
    kind: StoredFile, value: Any, decodes: bool, media: Media, hashed: bytes
) -> dict[str, Any]:
    """`kind.look`. What a measure of one's own raises is its value's fault, but for a module that
    is not installed; what it returns has to be its columns. Raises BadSample, ValueError."""
    if not is_own(kind):
        return kind.look(value, decodes, media, hashed)
    with own_code(f"{kind.name}: its measure", but=(OSError, BadSample)):
        with refusing(but=(OSError, ImportError)):
            found = kind.look(value, decodes, media, hashed)
    if others := found.keys() - {*kind.numbers(), *kind.texts()}:
        raise kind.wrong(
            f"measure made the column {min(others)!r}; its columns are "
            f"{', '.join([*kind.measured, *kind.said]) or 'none'}, of measured and said"
        )
    return found


def _is_of_the_system(problem: BadSample | None) -> bool:
    """Whether it follows from something such as a faulty disk or a missing right."""
    return getattr(problem and problem.__cause__, "errno", None) is not None


def _noted(sample: Sample) -> str:
    """What is broken of a sample that is used without it, as `IndexedSource.broken_values` reads
    it: a line for each modality, and one for captions and for annotations beside good ones."""
    noted = [(name, each) for name, each in sample.lacks.items() if each.reason not in ABSENCES]
    broken = [each for each in sample.dropped if each.reason not in ABSENCES]
    if broken:
        of = f"{len(broken)} of {len(sample.captions) + len(sample.dropped)} captions"
        noted.append(("text", BadSample(broken[0].reason, f"{of}: {broken[0].detail}")))
    for kind in annotations_of(sample.annotations):
        if found := kind.noted(sample):
            noted.append((kind.name, found))
    lines = []
    for modality, problem in noted:
        detail = " ".join(_clean(problem.detail).split())
        lines.append(f"{modality}: {problem.reason}: {detail}"[:DETAIL_LIMIT])
    return "\n".join(lines)


def _unused_of(format: Format, part: Part, found: Sample | Unused) -> UnusedCounts:
    if isinstance(found, Unused):
        return {found.what: (1, _clean(format.where(part.file, found.path, found.number)))}
    phrases = [each for own in found.annotations.values() for each in own.phrases]
    dropped = {"captions": found.dropped, "phrases": phrases}
    empty = {
        of: sum(each.reason in ABSENCES for each in each_of) for of, each_of in dropped.items()
    }
    if not any(empty.values()):
        return {}
    path = next((media.path for media in found.media.values() if media.path), found.id)
    where = _clean(format.where(part.file, path, found.number))
    return {f"{of} without text": (number, where) for of, number in empty.items() if number}


def _notes_of(format: Format, part: Part, sample: Sample, row: dict[str, Any]) -> UnusedCounts:
    """What is read otherwise than it may be meant."""
    doubts = [each.doubts for each in sample.annotations.values()]
    notes = {what: (number, "") for own in doubts for what, number in own.items() if number}
    if row["bad"] == 0 and any("\n" in text.strip() for text in sample.captions):
        notes[CAPTION_LINES] = (1, "")
    if row["bad"] == 0 and is_cut(sample.span, row.get("video_end_s", math.inf)):
        where = format.where(part.file, sample.media["video"].path, sample.number)
        notes[BEHIND_FILMS] = (1, _clean(where))
    return notes


def _clean(text: str) -> str:
    """Text that is UTF-8, whatever a file's name was."""
    return text.encode("utf-8", "backslashreplace").decode()
