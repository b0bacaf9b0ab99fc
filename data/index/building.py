"""Makes the index of a data set: lists its rows, reads every image, writes one Arrow file;
what has not changed is not read again."""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from PIL import Image

from common.files import make_folder, move, remove, remove_folder, write_text
from data.formats.rows import DEFAULT_PAIRS, Format, Part, Row, Unused
from data.index.bad_samples import ABSENCES, CODES, REASON_OF_CODE, BadSample
from data.index.hearing import KnownSounds, hear, too_long, write_keys
from data.index.keys import hash64
from data.index.mapped import (
    ABSENT,
    HASH_BYTES,
    VERSION,
    Index,
    UnusedCounts,
    add_unused,
    checksum,
    fingerprint_of,
    index_folder,
    kept_index,
    open_index,
    schema_of,
)
from data.modalities.decoding import decode_bytes, read_image_size, upright_8bit
from data.processes import end_with_parent, start_method
from data.progress import progress_bar

CHECKS = ("decode", "header")
ROWS_AT_ONCE = 4096
POOL_AFTER_S = 3.0  # starting processes takes about that long; a smaller data set is done by then
MAX_WORKERS = 16
PARTS_AHEAD = 4  # per worker
KEPT_BUILDS = 2  # the newest one and that of runs which started before it was made
DETAIL_LIMIT = 1000  # characters: several long paths, and what to do behind them
DECODED_SIDE = 64  # pixels, for the perceptual hash
HASH_SIDE = 8  # of the perceptual hash, bits; 8 * 8 = 64
DUPLICATE = CODES["duplicate-id"]
DIFFER = "; ids must differ"
UNNAMED = (
    CODES["invalid-row"],
    CODES["invalid-utf8"],
    CODES["nul-character"],
)  # rows whose id may not be their own
MAY_PASS = (CODES["missing-file"], CODES["unreadable"])  # read again by every build


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
    and leaves the rest to be found in training. refresh: compare every file, however many there
    are. max_audio_seconds: longer sounds are bad; None: as far as they are read at all. Errors:
    ValueError, OSError.
    """
    if check not in CHECKS:
        raise ValueError(f"check '{check}': one of {', '.join(CHECKS)} is needed")
    target = index_folder(format, check, folder, max_audio_seconds)
    if not refresh and (index := open_index(format, target)):
        return index
    try:
        make_folder(target)
        lock = FileLock(target / "lock")
        lock.acquire()
    except OSError as error:
        raise OSError(
            f"cannot write the index of {format.spec} to {target}: {error}; name another folder in "
            "WYE_CACHE"
        ) from error
    try:
        if not refresh and (index := open_index(format, target)):
            return index  # made by another process while this one waited
        for left in target.glob("build-*"):  # by a process that was killed
            remove_folder(left, target)
        _build(
            format,
            target,
            workers,
            progress=progress,
            check=check,
            max_audio_seconds=max_audio_seconds,
        )
    finally:
        lock.release()
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
    build: Path
    old: Index | None
    max_audio_seconds: float | None = None


@dataclass(frozen=True)
class _Done:
    """A listed part: its rows are in the file `PART.arrow`, or from `start` on in the index of
    before."""

    number: int
    file: str
    stamp: str
    rows: int
    unused: UnusedCounts
    start: int = -1


def _build(
    format: Format,
    target: Path,
    workers: int | None,
    progress: bool,
    check: str,
    max_audio_seconds: float | None,
) -> None:
    old = kept_index(target)
    fingerprint = fingerprint_of(format)
    build = target / f"build-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    build.mkdir()
    try:
        if old is not None:
            keys = old.column("key")
            order = np.argsort(keys, kind="stable")
            np.save(build / "keys.npy", keys[order])
            np.save(build / "rows.npy", order)
            write_keys(build, old)
        work = _Work(format, check, build, old, max_audio_seconds)
        done = list(_listed(work, workers, progress))
        if not sum(part.rows for part in done):
            raise ValueError(f"{format.spec} holds no sample")
        files = list(dict.fromkeys(part.file for part in done))
        unused = UnusedCounts()
        for part in done:
            add_unused(unused, part.unused)
        _write(build, done, old, format, files)
        publish(
            target,
            build / "index.arrow",
            format.spec,
            check=check,
            fingerprint=fingerprint,
            files=files,
            parts=_starts(done),
            modalities=format.modalities,
            unused=unused,
        )
    finally:
        remove_folder(build, target)


def publish(
    target: Path,
    written: Path,
    spec: str,
    check: str,
    fingerprint: str,
    files: list[str],
    parts: dict[str, tuple[int, int, UnusedCounts]],
    modalities: Sequence[str] = DEFAULT_PAIRS[0],
    unused: UnusedCounts | None = None,
) -> None:
    """Move the Arrow file `written` into the folder of the index, and then name it: others find it
    whole, or the one before."""
    name = f"{uuid.uuid4().hex}.arrow"
    meta = {
        "version": VERSION,
        "spec": spec,
        "check": check,
        "file": name,
        "bytes": os.path.getsize(written),
        "checksum": checksum(written),
        "fingerprint": fingerprint,
        "files": files,
        "parts": parts,
        "unused": unused or {},
        **({} if tuple(modalities) == DEFAULT_PAIRS[0] else {"modalities": list(modalities)}),
    }
    unfinished = written.with_name("index.json")
    write_text(unfinished, json.dumps(meta))
    move(written, target / name)
    move(unfinished, target / "index.json")
    by_age = sorted(target.glob("*.arrow"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in [file for file in by_age if file.name != name][KEPT_BUILDS - 1 :]:
        remove(file, target)


def _starts(done: list[_Done]) -> dict[str, tuple[int, int, UnusedCounts]]:
    """Stamp -> first row, number of rows and what is unused, of the parts that have a stamp."""
    starts, start = {}, 0
    for part in done:
        if part.stamp:
            starts[part.stamp] = (start, part.rows, part.unused)
        start += part.rows
    return starts


def _listed(work: _Work, workers: int | None, progress: bool) -> Iterator[_Done]:
    """All parts, in order: at first in this process, and in several when that is not done after
    some seconds."""
    format, known = work.format, work.old.meta.get("parts", {}) if work.old is not None else {}
    workers = workers if workers is not None else min(_cores(), MAX_WORKERS)
    bar = progress_bar(
        None, "reading the data", format.unit, format.total(), shown=progress, scaled=True
    )
    with bar, contextlib.ExitStack() as stack:
        began, pool = time.monotonic(), None
        pending: deque[tuple[Part, int, Future | None]] = deque()

        def take() -> _Done:
            part, number, future = pending.popleft()
            if future is None:
                start, rows, unused = known[part.stamp]
                result = _Done(number, part.file, part.stamp, rows, unused, start)
            else:
                try:
                    result = _Done(number, part.file, part.stamp, *future.result())
                except BrokenProcessPool as error:
                    raise RuntimeError(
                        f"{format.spec}: a process that read images ended without a message; "
                        "where dmesg says that memory ran out, use fewer workers"
                    ) from error
            bar.update(part.weight)
            return result

        for number, part in enumerate(format.parts()):
            if part.stamp and part.stamp in known:
                pending.append((part, number, None))
            else:
                if pool is None and workers > 1 and time.monotonic() - began > POOL_AFTER_S:
                    pool = ProcessPoolExecutor(
                        workers,
                        mp_context=start_method(),
                        initializer=_start_worker,
                        initargs=(work,),
                    )
                    stack.callback(pool.shutdown, cancel_futures=True)
                pending.append(
                    (
                        part,
                        number,
                        pool.submit(_index_part_in_worker, part, number)
                        if pool
                        else _now(work, part, number),
                    )
                )
            while len(pending) > (PARTS_AHEAD * workers if pool else 0):
                yield take()
        while pending:
            yield take()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _now(work: _Work, part: Part, number: int) -> Future:
    future: Future = Future()
    future.set_result(_index_part(work, part, number))
    return future


_work: _Work  # of a worker process


def _start_worker(work: _Work) -> None:
    global _work
    end_with_parent()
    _work = work


def _index_part_in_worker(part: Part, number: int) -> tuple[int, UnusedCounts]:
    return _index_part(_work, part, number)


def _index_part(work: _Work, part: Part, number: int) -> tuple[int, UnusedCounts]:
    """List one part, read its images, write its rows to `PART.arrow`; the number of rows, and what
    is unused."""
    known, count, schema = _KnownImages(work), 0, schema_of(work.format.modalities)
    sounds, unused = KnownSounds(work.build, work.old), UnusedCounts()
    with pa.ipc.new_file(str(work.build / f"{number}.arrow"), schema) as writer:
        records: list[dict[str, Any]] = []
        for row in work.format.rows(part):
            add_unused(unused, _unused_of(work.format, part, row))
            if isinstance(row, Unused):
                continue
            records.append(_record(work, part, row, known, sounds))
            count += 1
            if len(records) == ROWS_AT_ONCE:
                writer.write_batch(_as_batch(records, schema))
                records = []
        if records:
            writer.write_batch(_as_batch(records, schema))
    return count, unused


def _as_batch(records: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([record[field.name] for record in records], field.type) for field in schema],
        schema=schema,
    )


# -- one row

_UNSEEN = {
    "width": 0,
    "height": 0,
    "complexity": 0.0,
    "perceptual_hash": 0,
    "content_hash": bytes(HASH_BYTES),
}


def _record(
    work: _Work, part: Part, row: Row, known: "_KnownImages", sounds: KnownSounds
) -> dict[str, Any]:
    problem, seen, key, lacks = row.problem, dict(_UNSEEN), 0, dict(row.lacks)
    heard: dict[str, Any] = {}
    if "audio" in work.format.modalities:
        listened = problem is None and "audio" not in lacks
        heard, wrong = hear(work.format, part, row, work.check, sounds if listened else None)
        if wrong is None and work.max_audio_seconds is not None:
            wrong = too_long(heard["audio_seconds"], work.max_audio_seconds)
        if wrong is not None:
            lacks["audio"] = wrong
    if problem is None and "image" in work.format.modalities and "image" not in lacks:
        key = _image_key(part, row)
        seen, image_problem = known.find(key, row) or _see(work, part, row)
        if image_problem is not None:
            lacks["image"] = image_problem
            key = 0 if CODES[image_problem.reason] in MAY_PASS else key
    absent = sum(1 << bit for bit, name in enumerate(work.format.modalities) if name in lacks)
    if problem is None and not any(
        first not in lacks and second not in lacks for first, second in work.format.pairs
    ):
        problems = [lacks[name] for name in work.format.modalities if name in lacks]
        # a file that is broken says more than one that was never there
        problem = min(problems, key=lambda each: each.reason == "no-value")
    if problem is not lacks.get("image"):
        key = 0  # the row does not tell what is wrong with the image, so it is read again
    return {
        "id": _clean(row.id),
        "path": _clean(row.path),
        "detail": _clean(problem.detail)[:DETAIL_LIMIT] if problem else _noted(row, lacks),
        "captions": row.captions,
        "part": 0,  # known when all parts are
        "row": row.number,
        "offset": row.offset,
        "size": row.size,
        "mtime_ns": row.mtime_ns,
        "num_captions": min(len(row.captions), np.iinfo(np.int16).max),
        "num_characters": max(map(len, row.captions), default=0),
        "bad": CODES[problem.reason] if problem else 0,
        "key": key,
        "id_hash": hash64(_clean(row.id)),
        ABSENT: absent,
        **seen,
        **heard,
    }


def _noted(row: Row, lacks: Mapping[str, BadSample]) -> str:
    """What is broken of a sample that is used without it, as `Index.broken` reads it: a line for
    each modality, and one for captions beside good ones."""
    noted = [(name, each) for name, each in lacks.items() if each.reason not in ABSENCES]
    broken = [each for each in row.dropped if each.reason not in ABSENCES]
    if broken:
        of = f"{len(broken)} of {len(row.captions) + len(row.dropped)} captions"
        noted.append(("text", BadSample(broken[0].reason, f"{of}: {broken[0].detail}")))
    lines = []
    for modality, problem in noted:
        detail = " ".join(_clean(problem.detail).split())
        lines.append(f"{modality}: {problem.reason}: {detail}"[:DETAIL_LIMIT])
    return "\n".join(lines)


def _unused_of(format: Format, part: Part, found: Row | Unused) -> UnusedCounts:
    if isinstance(found, Unused):
        return {found.what: (1, _clean(format.where(part.file, found.path, 0)))}
    empty = sum(each.reason in ABSENCES for each in found.dropped)
    where = _clean(format.where(part.file, found.path, found.number)) if empty else ""
    return {"captions without text": (empty, where)} if empty else {}


def _see(work: _Work, part: Part, row: Row) -> tuple[dict[str, Any], BadSample | None]:
    """What the index says of an image; and what is wrong with it, if anything."""
    seen = dict(_UNSEEN)
    try:
        image = row.image
        if image is None:
            image = work.format.image_bytes(part.file, row.path, row.offset, row.size)
        seen["content_hash"] = content_hash(image)
        width, height = read_image_size(image)
        if work.check == "decode":
            # A JPEG is read to its last byte at any scale, and small ones take a third of the time.
            shown = upright_8bit(decode_bytes(image, at_least=DECODED_SIDE))
            if (width > height) != (
                shown.width > shown.height
            ):  # some formats tell after the pixels how to turn them
                width, height = height, width
            seen["perceptual_hash"] = perceptual_hash(shown)
        seen["width"], seen["height"], seen["complexity"] = (
            width,
            height,
            len(image) / (width * height),
        )
        return seen, None
    except BadSample as problem:
        return seen, problem


def content_hash(image: bytes) -> bytes:
    """16 bytes, equal for equal bytes."""
    return hashlib.blake2b(image, digest_size=HASH_BYTES).digest()


def perceptual_hash(image: Image.Image) -> int:
    """64 bits: of an 8 x 8 grid, whether each field is darker than its right neighbour (dHash);
    transparency counts as white."""
    image = upright_8bit(image)
    if image.mode == "RGBA":
        background = Image.new("RGB", image.size, (255, 255, 255))
        background.paste(image, mask=image.getchannel("A"))
        image = background
    grey = np.asarray(
        image.convert("L").resize((HASH_SIDE + 1, HASH_SIDE), Image.Resampling.BOX)
    )  # [8, 9]
    return int.from_bytes(np.packbits(grey[:, :-1] < grey[:, 1:]).tobytes(), "big")


class _KnownImages:
    """What the index of before says of images that have not changed."""

    def __init__(self, work: _Work) -> None:
        self._old = work.old
        if self._old is not None:
            self._keys = np.load(work.build / "keys.npy", mmap_mode="r")
            self._rows = np.load(work.build / "rows.npy", mmap_mode="r")

    def find(self, key: int, row: Row) -> tuple[dict[str, Any], BadSample | None] | None:
        if self._old is None:
            return None
        at = int(np.searchsorted(self._keys, np.uint64(key)))
        if at == len(self._keys) or int(self._keys[at]) != key:
            return None
        i, old = int(self._rows[at]), self._old
        if row.image is not None and content_hash(row.image) != old.content_hash(i):
            return None
        same = (
            int(old.column("size")[i]),
            int(old.column("mtime_ns")[i]),
            int(old.column("offset")[i]),
        ) == (
            row.size,
            row.mtime_ns,
            row.offset,
        )
        if not same or old.text("path", i) != row.path:
            return None  # the same hash of something else
        seen = {name: old.column(name)[i].item() for name in _UNSEEN if name != "content_hash"}
        seen["content_hash"] = old.content_hash(i)
        code = int(old.column("bad")[i])
        problem = (
            BadSample(REASON_OF_CODE[code], old.text("detail", i))
            if code not in (0, DUPLICATE)
            else None
        )
        return seen, problem


def _image_key(part: Part, row: Row) -> int:
    container = row.root or part.file
    return hash64(f"{container}\0{row.path}\0{row.offset}\0{row.size}\0{row.mtime_ns}") or 1


def _clean(text: str) -> str:
    """Text that is UTF-8, whatever a file's name was."""
    return text.encode("utf-8", "backslashreplace").decode()


# -- one file of all parts


def _write(
    build: Path, done: list[_Done], old: Index | None, format: Format, files: list[str]
) -> None:
    """`index.arrow` of all parts, in order, through a file per buffer: memory does not grow with
    the number of rows."""
    first_of = _duplicates(build, done, old, format)
    number_of = {file: number for number, file in enumerate(files)}
    buffers = _Buffers(build, schema_of(format.modalities))
    for part in done:
        for batch in _batches(build, part, old):
            buffers.append(_joined(batch, buffers.rows, number_of[part.file], first_of))
    batch = buffers.as_batch()
    with (
        pa.OSFile(str(build / "index.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)


def _batches(build: Path, part: _Done, old: Index | None) -> Iterator[pa.RecordBatch]:
    if part.start >= 0 and old is not None:
        for start in range(part.start, part.start + part.rows, ROWS_AT_ONCE):
            yield _without_duplicates(
                old.slice(start, min(ROWS_AT_ONCE, part.start + part.rows - start))
            )
        return
    with pa.memory_map(str(build / f"{part.number}.arrow")) as mapped:
        reader = pa.ipc.open_file(mapped)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _without_duplicates(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Which ids come twice depends on all other rows, so a copied row does not know."""
    bad = batch.column("bad").to_numpy()
    if not (bad == DUPLICATE).any():
        return batch
    details = batch.column("detail").to_pylist()
    batch = _with(
        batch,
        "detail",
        pa.array(
            [
                text.partition(DIFFER)[2].lstrip() if code == DUPLICATE else text
                for code, text in zip(bad, details)
            ],
            pa.large_string(),
        ),
    )
    return _with(batch, "bad", pa.array(np.where(bad == DUPLICATE, 0, bad).astype(np.int8)))


def _joined(
    batch: pa.RecordBatch, start: int, part: int, first_of: tuple[np.ndarray, list[str]]
) -> pa.RecordBatch:
    """The batch with its file's number, and the rows marked whose id an earlier row has."""
    batch = _with(batch, "part", pa.array(np.full(batch.num_rows, part, np.int32)))
    rows, wheres = first_of
    low, high = np.searchsorted(rows, [start, start + batch.num_rows])
    if low == high:
        return batch
    bad, details = batch.column("bad").to_numpy().copy(), batch.column("detail").to_pylist()
    for row, where in zip(rows[low:high] - start, wheres[low:high]):
        if bad[row] == 0:
            # What was noted of the sample stays behind it: the other one may go.
            said = f"id '{batch.column('id')[row]}' is already that of {where}"[:DETAIL_LIMIT]
            details[row] = f"{said}{DIFFER}\n{details[row]}".rstrip()
            bad[row] = DUPLICATE
    return _with(_with(batch, "bad", pa.array(bad)), "detail", pa.array(details, pa.large_string()))


def _with(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    columns = [column if field.name == name else batch.column(field.name) for field in batch.schema]
    return pa.record_batch(columns, schema=batch.schema)


def _duplicates(
    build: Path, done: list[_Done], old: Index | None, format: Format
) -> tuple[np.ndarray, list[str]]:
    """Rows [d] int64, ascending, whose id an earlier row has, and where the first row with that id
    stands."""
    total = sum(part.rows for part in done)
    hashes, named = np.empty(total, np.uint64), np.empty(total, bool)
    at = 0
    for part in done:
        for batch in _batches(build, part, old):
            stop = at + batch.num_rows
            hashes[at:stop] = batch.column("id_hash").to_numpy()
            named[at:stop] = ~np.isin(batch.column("bad").to_numpy(), UNNAMED)
            at = stop
    candidates = np.flatnonzero(named)
    candidates = candidates[np.argsort(hashes[candidates], kind="stable")]
    again = (
        hashes[candidates][1:] == hashes[candidates][:-1]
    )  # [n - 1]: the same id as the one before it
    if not again.any():
        return np.empty(0, np.int64), []
    run = np.cumsum(np.concatenate([[True], ~again]))  # which group of equal ids
    starts = np.flatnonzero(np.concatenate([[True], ~again]))
    later = np.flatnonzero(again) + 1
    rows, firsts = candidates[later], candidates[starts[run[later] - 1]]
    order = np.argsort(rows)
    wheres = _wheres(build, done, old, format, np.unique(firsts))
    return rows[order], [wheres[first] for first in firsts[order].tolist()]


def _wheres(
    build: Path, done: list[_Done], old: Index | None, format: Format, rows: np.ndarray
) -> dict[int, str]:
    wheres, at = {}, 0
    for part in done:
        for batch in _batches(build, part, old):
            for row in rows[slice(*np.searchsorted(rows, [at, at + batch.num_rows]))].tolist():
                path, number = (
                    batch.column("path")[row - at].as_py(),
                    batch.column("row")[row - at].as_py(),
                )
                wheres[row] = format.where(part.file, path, number)
            at += batch.num_rows
    return wheres


class _Buffers:
    """The buffers of one record batch as files that batches are appended to."""

    def __init__(self, build: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._folder = build / "buffers"
        self._folder.mkdir()
        self._files: dict[str, Any] = {}
        self._ends: dict[str, int] = {}
        self.rows = 0

    def append(self, batch: pa.RecordBatch) -> None:
        for field in self._schema:
            self._append(field.name, batch.column(field.name))
        self.rows += batch.num_rows

    def _append(self, name: str, array: pa.Array) -> None:
        first, last = array.offset, array.offset + len(array)
        if pa.types.is_large_string(array.type):
            _, offsets, content = array.buffers()
            start, stop = self._append_offsets(name, offsets, first, last)
            self._put(f"{name}.content", content[start:stop] if content is not None else b"")
        elif pa.types.is_large_list(array.type):
            start, stop = self._append_offsets(name, array.buffers()[1], first, last)
            self._append(f"{name}.item", array.values[start:stop])
        else:
            width = array.type.byte_width
            self._put(name, array.buffers()[1][first * width : last * width])

    def _append_offsets(
        self, name: str, buffer: pa.Buffer | None, first: int, last: int
    ) -> tuple[int, int]:
        """Where the content of rows first..last-1 starts and stops in the batch's own buffer."""
        if name not in self._ends:
            self._ends[name] = 0
            self._put(f"{name}.offsets", np.zeros(1, np.int64))
        if first == last or buffer is None:
            return 0, 0
        offsets = np.frombuffer(buffer, np.int64)[first : last + 1]
        self._put(f"{name}.offsets", offsets[1:] - offsets[0] + self._ends[name])
        self._ends[name] += int(offsets[-1] - offsets[0])
        return int(offsets[0]), int(offsets[-1])

    def _put(self, name: str, content: Any) -> None:
        if name not in self._files:
            self._files[name] = open(self._folder / name, "xb")
        self._files[name].write(memoryview(content).cast("B") if len(content) else b"")

    def as_batch(self) -> pa.RecordBatch:
        """On memory maps of the files."""
        for file in self._files.values():
            file.close()
        return pa.record_batch(
            [self._array(field.name, field.type, self.rows) for field in self._schema],
            schema=self._schema,
        )

    def _array(self, name: str, kind: pa.DataType, length: int) -> pa.Array:
        if pa.types.is_large_string(kind):
            return pa.Array.from_buffers(
                kind, length, [None, self._get(f"{name}.offsets"), self._get(f"{name}.content")]
            )
        if pa.types.is_large_list(kind):
            items = self._array(f"{name}.item", kind.value_type, self._ends[name])
            return pa.Array.from_buffers(
                kind, length, [None, self._get(f"{name}.offsets")], children=[items]
            )
        return pa.Array.from_buffers(kind, length, [None, self._get(name)])

    def _get(self, name: str) -> pa.Buffer:
        path = self._folder / name
        return (
            pa.py_buffer(b"")
            if not path.stat().st_size
            else pa.py_buffer(np.memmap(path, np.uint8, mode="r"))
        )
