"""Decoded images and sounds, kept on disk in LMDB, shared by all processes of a machine: of images
what phase A of the transforms gives, of sounds what `data/modalities/audio/modality.py` says.

    python -m data.cache SPEC --image-size N --workers N [--cache DIR] [--limit GB]      fill it beforehand; can be broken off and called again

Without that it fills in the first epoch: a miss is decoded as ever and handed to a thread that
writes by the batch. The key is the hash of the encoded image or sound with the name of what was made
of it, so a changed file, another size or rate, or another version of the code never finds old
values. A value is a header with a CRC-32 and the raw array (`data/cache/packing.py`); one that does
not fit its header is a miss.

A cache never stops a run: whatever fails here is reported once, and files are decoded. Nor does it
keep one waiting: writers take turns by a lock file, and one that does not get its turn in time
drops what it has. Nothing is flushed to disk after a write (LMDB's sync is off): a process may die
at any moment without harm, but after a power failure the file may be broken; then delete the
folder. The folder must lie on a local disk, as LMDB's locks do not work over a network.

Captions are not kept: they are tokenized faster than they could be fetched.
"""

import hashlib
import os
import queue
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from filelock import FileLock, Timeout

from common.files import make_folder, refuse_link
from data.cache.packing import ARRAY_HEADER, packed, unpacked
from data.formats.specs import cache_folder
from data.index.bad_samples import BadSample
from data.index.sources import Source
from data.modalities.transforms import Stored
from data.processes import end_with_parent, start_method
from data.progress import progress_bar

GIB = 1 << 30
DEFAULT_LIMIT = 50 * GIB
ADDRESSES = (
    1 << 40
)  # of address space, neither of memory nor of disk: large, so that processes with different limits agree
MAX_READERS = 4096
QUEUE_BYTES = 64 << 20  # waiting to be written, per process
BATCH_BYTES = 16 << 20  # written in one transaction
BATCH_S = 0.5  # how long a batch waits to grow
TURN_S = 5.0  # how long a writer waits for its turn
CLOSE_S = 2.0  # how long a process that ends waits for what is still to be written
CHUNK = 32  # images that a filling worker decodes at a time


def default_folder() -> Path:
    return (
        cache_folder() / "pictures"
    )  # the name of earlier versions, so that their caches are found


@dataclass(frozen=True)
class SampleCache:
    """Decoded images and sounds by key, in `folder`, up to `limit_bytes`. Small to pickle; each
    process opens the file when it first needs it."""

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise ValueError(f"limit of the cache: {self.limit_bytes} bytes; at least 1 is needed")

    def image(self, content_hash: bytes, stored: Stored, read: Callable[[], bytes]) -> np.ndarray:
        """What `stored` makes of the bytes that `read` gives; from the cache if it is there.
        Errors: those of `read` and BadSample."""
        key = key_of(content_hash, stored)
        image = self.get(key)
        if image is None:
            data = read()
            image = stored(data)
            # The source's hash may be of an older state of the file.
            if hashlib.blake2b(data, digest_size=len(content_hash)).digest() == content_hash:
                self.put(key, image)
        return image

    def get(self, key: bytes) -> np.ndarray | None:
        """uint8 [h, w, 3 or 4] of an image, float32 of a sound, the caller's own; None where there is
        none, or none that is whole."""
        return _file(self).get(key)

    def put(self, key: bytes, value: np.ndarray) -> None:
        """Soon, in the background; dropped when too much is waiting or the limit is reached.
        `value` must not be changed afterwards."""
        _file(self).put(key, value)

    def write(self, images: Sequence[tuple[bytes, np.ndarray]], turn_s: float = TURN_S) -> bool:
        """At once, in one transaction. False if they could not be written: full, broken, or no turn
        within `turn_s`."""
        return _file(self).write(images, turn_s)

    def has(self, key: bytes) -> bool:
        return _file(self).get(key, only_check=True) is not None

    def is_open(self) -> bool:
        """Opens it. False, with a warning, if it cannot be used."""
        return _file(self).is_open()

    def is_full(self) -> bool:
        return _file(self).refuses_writes

    def used_bytes(self) -> int:
        return _file(self).used_bytes()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is waiting, for as long as `timeout_s`, and close the file in this process;
        the next use opens it again."""
        file = _FILES.pop(_place(self), None)
        if file is not None:
            file.close(timeout_s)


def key_of(content_hash: bytes, stored: Stored) -> bytes:
    return content_hash + stored.name.encode()


def open_cache(folder: Path | None = None, limit_bytes: int = DEFAULT_LIMIT) -> SampleCache | None:
    """The cache in `folder` (default: below WYE_CACHE, else ~/.cache/wye), or None, with a warning,
    if it cannot be used."""
    cache = SampleCache(folder or default_folder(), limit_bytes)
    return cache if cache.is_open() else None


class _File:
    """The open file of one process. All errors end in `_give_up`, which warns once."""

    def __init__(self, cache: SampleCache) -> None:
        self.folder, self.limit_bytes = cache.folder, cache.limit_bytes
        self.environment: lmdb.Environment | None = None
        self.is_broken = self.refuses_writes = False
        self._opening, self._counting = threading.Lock(), threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[bytes, np.ndarray] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._writer: threading.Thread | None = None

    def is_open(self) -> bool:
        return self._opened() is not None

    def get(self, key: bytes, only_check: bool = False) -> np.ndarray | None:
        environment = self._opened()
        if environment is None:
            return None
        try:
            with environment.begin(buffers=True) as transaction:
                value = transaction.get(key)
                return None if value is None else unpacked(value, copy=not only_check)
        except (lmdb.Error, OSError) as error:
            self._give_up(error)
            return None

    def put(self, key: bytes, image: np.ndarray) -> None:
        if (
            self.refuses_writes
            or self.is_broken
            or self._waiting_bytes + image.nbytes > QUEUE_BYTES
        ):
            return
        with self._counting:
            self._waiting_bytes += image.nbytes
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._write_what_waits, name="image-cache", daemon=True
                )
                self._writer.start()
        self._waiting.put((key, image))

    def write(self, images: Sequence[tuple[bytes, np.ndarray]], turn_s: float) -> bool:
        environment = self._opened()
        if environment is None or self.refuses_writes:
            return False
        try:
            # A lock of our own before LMDB's, which can only be waited for without limit.
            with FileLock(self.folder / "writer.lock", timeout=turn_s, thread_local=False):
                if self.used_bytes() + sum(map(_bytes_on_disk, images)) > self.limit_bytes:
                    self._stop_writing(
                        f"holds {self.used_bytes() / GIB:.1f} GiB and would pass its limit of "
                        f"{self.limit_bytes / GIB:.1f} GiB"
                    )
                    return False
                with environment.begin(write=True) as transaction:
                    for key, image in images:
                        value = packed(image)
                        if transaction.get(key) != value:  # another process was quicker
                            transaction.put(key, value)
            return True
        except Timeout:
            return False
        except (
            lmdb.CorruptedError,
            lmdb.PageNotFoundError,
            lmdb.InvalidError,
            lmdb.PanicError,
        ) as error:
            self._give_up(error)
        except (lmdb.Error, OSError) as error:  # full disk, no permission
            self._stop_writing(f"cannot be written ({error})")
        return False

    def used_bytes(self) -> int:
        environment = self._opened()
        return _extent(environment) if environment is not None else 0

    def close(self, timeout_s: float) -> None:
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join(timeout_s)
            if (
                self._writer.is_alive()
            ):  # it holds the environment; the end of the process ends both
                return
        if self.environment is not None:
            self.environment.close()
        self.environment, self.is_broken = None, True

    def _write_what_waits(self) -> None:
        ended = False
        while not ended:
            batch, size, deadline = [], 0, None
            while size < BATCH_BYTES:
                try:
                    item = self._waiting.get(
                        timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
                    )
                except queue.Empty:
                    break
                if item is None:
                    ended = True
                    break
                batch.append(item)
                size += item[1].nbytes
                deadline = deadline or time.monotonic() + BATCH_S
            if batch:
                self.write(batch, TURN_S)
                with self._counting:
                    self._waiting_bytes -= size

    def _opened(self) -> lmdb.Environment | None:
        if self.environment is not None or self.is_broken:
            return self.environment
        with self._opening:
            if self.environment is None and not self.is_broken:
                try:
                    self.environment = _open(self.folder, self.limit_bytes)
                except (lmdb.Error, OSError) as error:
                    self._give_up(error)
        return self.environment

    def _give_up(self, error: Exception) -> None:
        if not self.is_broken:
            self._warn(
                f"cannot be used ({error}); images and sounds are decoded instead. If the file is "
                "broken, delete the folder"
            )
        self.is_broken, self.environment = True, None  # not closed: another thread may be reading

    def _stop_writing(self, why: str) -> None:
        if not self.refuses_writes:
            self._warn(
                f"{why}; what it lacks is decoded each time. Give it more room, or another folder"
            )
        self.refuses_writes = True

    def _warn(self, what: str) -> None:
        warnings.warn(f"cache {self.folder}: {what}", RuntimeWarning, stacklevel=2)


_FILES: dict[tuple[int, str], _File] = {}  # LMDB allows a process to open a file once
_OPENING = threading.Lock()


def _place(cache: SampleCache) -> tuple[int, str]:
    return os.getpid(), _real_path(cache.folder)


@lru_cache  # looked up for every image
def _real_path(folder: Path) -> str:
    return os.path.realpath(folder)


def _file(cache: SampleCache) -> _File:
    place = _place(cache)
    file = _FILES.get(place)
    if file is None:
        with _OPENING:
            if not _FILES:
                # Loader workers run multiprocessing's finalizers when they end, but not those of
                # atexit; a main process runs both.
                Finalize(None, _close_all, exitpriority=10)
            file = _FILES.setdefault(place, _File(cache))
    return file


def _close_all() -> None:
    deadline = time.monotonic() + CLOSE_S
    for place in [place for place in _FILES if place[0] == os.getpid()]:
        _FILES.pop(place).close(max(0.0, deadline - time.monotonic()))


def _open(folder: Path, limit_bytes: int) -> lmdb.Environment:
    make_folder(folder)
    for name in ("data.mdb", "lock.mdb"):
        refuse_link(folder / name)
    environment = lmdb.open(
        str(folder),
        map_size=max(ADDRESSES, limit_bytes),
        sync=False,
        metasync=False,
        writemap=False,  # with it, a full disk would kill the process that writes
        meminit=True,  # no stray memory of this process in the file
        readahead=True,  # a value is read whole, and spans many pages
        max_readers=MAX_READERS,
        max_spare_txns=1,
    )
    environment.reader_check()  # gives back the places of readers that were killed
    extent = _extent(environment)  # before the size: a writer extends the file before it says so
    size = (folder / "data.mdb").stat().st_size
    if size < extent:
        environment.close()
        raise OSError(
            f"data.mdb has {size:,} bytes of {extent:,}"
        )  # to read what is missing would kill the process
    return environment


def _extent(environment: lmdb.Environment) -> int:
    return (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]


def _bytes_on_disk(item: tuple[bytes, np.ndarray]) -> int:
    return -(-(item[1].nbytes + ARRAY_HEADER.size + 64) // 4096) * 4096  # 64: its entry in the tree


# Filling it beforehand


@dataclass
class Filled:
    """What filling did, in images."""

    stored: int = 0
    present: int = 0
    refused: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # by reason
    examples: list[str] = field(default_factory=list)  # of bad ones, a few

    def __iadd__(self, other: "Filled") -> "Filled":
        self.stored, self.present, self.refused = (
            self.stored + other.stored,
            self.present + other.present,
            self.refused + other.refused,
        )
        self.bad += other.bad
        self.examples = (self.examples + other.examples)[:5]
        return self


def fill(
    source: Source, stored: Stored, cache: SampleCache, workers: int = 0, progress: bool = False
) -> Filled:
    """Put every usable image of `source` into `cache`, in `workers` processes (0: here); those
    that are there are skipped.

    Stops at the limit. Errors: ValueError, ChildProcessError when a worker dies.
    """
    indices = source.usable()
    indices = indices[~source.lacking("image")[indices]]
    chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
    total = Filled()
    with progress_bar(None, "filling the cache", "image", len(indices), shown=progress) as bar:
        for done, size in _filled_chunks(chunks, source, stored, cache, workers):
            total += done
            bar.update(size)
    return total


def _filled_chunks(
    chunks: Sequence[np.ndarray], source: Source, stored: Stored, cache: SampleCache, workers: int
) -> Iterator[tuple[Filled, int]]:
    if workers == 0:
        yield from ((_fill(source, stored, cache, chunk), len(chunk)) for chunk in chunks)
        return
    with ProcessPoolExecutor(
        workers, start_method(), _start_filling, (source, stored, cache)
    ) as pool:
        pending: dict[Future, int] = {}
        left = iter(chunks)
        try:
            while True:
                for chunk in _up_to(left, 4 * workers - len(pending)):
                    pending[pool.submit(_fill_here, chunk)] = len(chunk)
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield future.result(), pending.pop(future)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a process that fills the image cache ended without a message; where dmesg says "
                "that memory ran out, give fewer --workers. What is stored stays"
            ) from error


def _up_to(items: Iterator, number: int) -> Iterable:
    return [item for _, item in zip(range(number), items)]


_FILLING: tuple[Source, Stored, SampleCache]  # of a worker process


def _start_filling(*what: Any) -> None:
    global _FILLING
    end_with_parent()
    _FILLING = what


def _fill_here(chunk: np.ndarray) -> Filled:
    return _fill(*_FILLING, chunk)


def _fill(source: Source, stored: Stored, cache: SampleCache, chunk: np.ndarray) -> Filled:
    done, images = Filled(), []
    if cache.is_full() or not cache.is_open():
        done.refused = len(chunk)
        return done
    for i in chunk.tolist():
        try:
            key = key_of(source.content_hash(i), stored)
            if cache.has(key):
                done.present += 1
                continue
            data = source.image_bytes(i)
            images.append(
                (key_of(hashlib.blake2b(data, digest_size=16).digest(), stored), stored(data))
            )
        except BadSample as error:
            done.bad[error.reason] += 1
            done.examples.append(f"{source.where(i)}: {error}")
    if images:
        written = cache.write(images, turn_s=60.0)
        done.stored, done.refused = (len(images), 0) if written else (0, len(images))
    return done
