"""Decoded images and sounds on disk, in one SQLite file that all processes of a machine share.

    python -m data.cache SPEC --image-size N --workers N [--cache DIR] [--limit GIB]

fills it with images before training, and goes on where it was broken off. Without that it fills in
the first epoch: what is not there is decoded as ever, and stored a few at a time. A key is the hash
of the encoded image or sound and the name of what was made of it, so a changed file, another size
or another version of the code never finds old values. Each value has a checksum: one that the disk has
changed is made anew, and stored in its place.

Any number of processes read while one writes. A process that finds another one writing keeps what
it has for later, and drops it when it is too much. A cache never stops a run: whatever fails here
is reported once, and files are decoded. A process may be killed and power may fail at any moment
(SQLite's write-ahead log). The folder must lie on a local disk, as that log does not work over a
network.

Captions are not kept: they are tokenized faster than they could be fetched.
"""

from __future__ import annotations

import sqlite3
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock
from torch import Tensor

from common.files import make_folder, refuse_link
from common.sizes import GIB, sized
from data.bad_samples import BadSample
from data.formats.specs import cache_folder
from data.index.sources import KnownSource
from data.loader import LoadReport, micro_batches
from data.modalities.transforms import Stored
from data.progress import progress_bar

DEFAULT_LIMIT = 50 * GIB
FILE = "samples-2.sqlite"
PAGE_BYTES = 16 << 10  # reads images of 150 KB at 3 GB/s, and wastes half a page of each
READ_S = 10.0  # how long a reader waits for another process that repairs the file
BATCH_BYTES = 4 << 20  # stored at a time
WAITING_BYTES = 64 << 20  # kept at most while another process writes
CLOSE_S = 2.0  # how long a process that ends waits for its turn to store the rest
FILL_S = 60.0  # how long a worker that fills it waits for its turn
CHUNK = 64  # images that a filling worker decodes at a time
MOST_EXAMPLES = 5  # of bad images


def default_folder() -> Path:
    return cache_folder() / "samples"


class SampleCache:
    """Decoded images and sounds by key, in `folder`, up to `limit_bytes`. Small to pickle: each
    process opens the file when it first needs it."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit of the cache: {limit_bytes} bytes; at least 1 is needed")
        self.folder, self.limit_bytes = folder, limit_bytes
        self.is_broken = self.is_full = False
        self._connection: sqlite3.Connection | None = None
        self._waiting: dict[bytes, np.ndarray] = {}
        self._waiting_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleCache, (self.folder, self.limit_bytes)

    def fetch(self, key: bytes, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the stored array, else store and return what `make` returns. Errors: those of
        `make`."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def get(self, key: bytes) -> np.ndarray | None:
        """Return a stored array, which is read-only, or None."""
        row = self._run("SELECT form, content, checksum FROM samples WHERE key = ?", key)
        if row is None or row[2] != _checksum(key, *row[:2]):
            return None
        dtype, *shape = row[0].decode().split()
        return np.frombuffer(row[1], dtype).reshape([int(n) for n in shape])

    def has(self, key: bytes) -> bool:
        return self._run("SELECT 1 FROM samples WHERE key = ?", key) is not None

    def put(self, key: bytes, value: np.ndarray, turn_s: float = 0.0) -> None:
        """Store an array with the next ones, by the batch. It must not be changed afterwards.
        `turn_s`: as in `store`."""
        if self.is_full or self.is_broken:
            return
        self._waiting[key] = value
        self._waiting_bytes += value.nbytes
        if self._waiting_bytes >= BATCH_BYTES:
            self.store(turn_s)

    def store(self, turn_s: float = 0.0) -> None:
        """Store what was put so far, if there is room. Where another process writes for longer than
        `turn_s` it is kept for the next time, but dropped if it is too much, or has waited."""
        connection = self._opened() if self._waiting else None
        if connection is None:
            return
        rows = [_row(key, value) for key, value in self._waiting.items()]
        try:
            connection.execute(f"PRAGMA busy_timeout = {round(1000 * turn_s)}")
            with connection:  # commits, or rolls back
                connection.execute("BEGIN IMMEDIATE")
                used = self.used_bytes()
                if used + self._waiting_bytes > self.limit_bytes:
                    self._stop_writing(
                        f"holds {sized(used)} and would pass its limit of {sized(self.limit_bytes)}"
                    )
                    return
                connection.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", rows)
            self._forget_waiting()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):  # a full disk, no permission
                self._stop_writing(f"cannot be written ({error})")
            elif turn_s or self._waiting_bytes > WAITING_BYTES:
                self._forget_waiting()
        except sqlite3.Error as error:
            self._give_up(error)
        finally:
            connection.execute(f"PRAGMA busy_timeout = {round(1000 * READ_S)}")

    def used_bytes(self) -> int:
        pages = self._run("PRAGMA page_count")
        return pages[0] * PAGE_BYTES if pages else 0

    def is_open(self) -> bool:
        """Open the file. Returns False, with a warning, if it cannot be used."""
        return self._opened() is not None

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Store what is waiting, if this process gets its turn in time, and close the file. The
        next use opens it again."""
        self.store(timeout_s)
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _forget_waiting(self) -> None:
        self._waiting, self._waiting_bytes = {}, 0

    def _run(self, statement: str, *values: bytes) -> Any:
        """The first row of the answer, or None."""
        connection = self._opened()
        if connection is None:
            return None
        try:
            return connection.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None

    def _opened(self) -> sqlite3.Connection | None:
        if self._connection is None and not self.is_broken:
            try:
                self._connection = _open(self.folder)
                # Loader workers run these when they end, but not the functions of atexit.
                Finalize(None, self.close, exitpriority=10)
            except (sqlite3.Error, OSError) as error:
                self._give_up(error)
        return self._connection

    def _give_up(self, error: Exception) -> None:
        if not self.is_broken:
            self._warn(
                f"cannot be used ({error}); images and sounds are decoded instead. If the file is "
                "broken, delete the folder"
            )
        self.is_broken, self._connection = True, None
        self._forget_waiting()

    def _stop_writing(self, why: str) -> None:
        if not self.is_full:
            self._warn(
                f"{why}; what it lacks is decoded each time. Give it more room, or another folder"
            )
        self.is_full = True
        self._forget_waiting()

    def _warn(self, what: str) -> None:
        warnings.warn(f"cache {self.folder}: {what}", RuntimeWarning, stacklevel=2)


def open_cache(folder: Path | None = None, limit_bytes: int = DEFAULT_LIMIT) -> SampleCache | None:
    """The cache in `folder` (default: below WYE_CACHE, else ~/.cache/wye), or None, with a warning,
    if it cannot be used."""
    cache = SampleCache(folder or default_folder(), limit_bytes)
    return cache if cache.is_open() else None


def _row(key: bytes, value: np.ndarray) -> tuple[bytes, bytes, memoryview, bytes]:
    form = " ".join(map(str, (value.dtype.str, *value.shape))).encode()
    content = np.ascontiguousarray(value).data
    return key, form, content, _checksum(key, form, content)


def _checksum(*parts: Any) -> bytes:
    """Of values of a row that may be of any kind where the disk has changed it."""
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part if isinstance(part, (bytes, memoryview)) else repr(part).encode())
    return checksum.digest()


def _open(folder: Path) -> sqlite3.Connection:
    make_folder(folder)
    for name in (FILE, f"{FILE}-wal", f"{FILE}-shm", "lock"):
        refuse_link(folder / name)
    with FileLock(folder / "lock", timeout=READ_S):  # two that make the file at once would fail
        connection = sqlite3.connect(
            folder / FILE, READ_S, isolation_level=None, check_same_thread=False
        )
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS samples"
            "(key BLOB PRIMARY KEY, form BLOB, content BLOB, checksum BLOB)"
        )
    return connection


# -- filling it beforehand


def fill(
    source: KnownSource,
    stored: Stored,
    cache: SampleCache,
    workers: int = 0,
    progress: bool = False,
) -> tuple[Counter[str], list[str]]:
    """Put every usable image of `source` into `cache`, in `workers` processes (0: here).

    Returns how many images are "stored" now, were "present", were "refused" by a cache that is full
    or broken, or are bad, by their reason; and a few examples of bad ones. Errors: ValueError,
    ChildProcessError when a worker dies.
    """
    indices = source.usable()
    indices = indices[~source.lacking("image")[indices]]
    chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
    total: Counter[str] = Counter()
    examples: list[str] = []

    def note(report: LoadReport) -> None:
        bad = Counter(reason for _, reason, _ in report.bad)
        done = Counter({name: int(n) for name, n in report.counts.items()}) + bad
        bar.update(done.total())
        total.update(done)
        examples.extend(where for _, _, where in report.bad[: MOST_EXAMPLES - len(examples)])

    workers = min(workers, len(chunks))
    with progress_bar(None, "filling the cache", "image", len(indices), shown=progress) as bar:
        for _ in micro_batches(_Filling(source, stored, cache), chunks, workers, on_load=note):
            pass  # there is nothing in it
    return total, examples


@dataclass(frozen=True)
class _Filling:
    """What the loader's workers do to fill a cache: their "micro-batches" are empty, and only their
    reports count."""

    source: KnownSource
    stored: Stored
    cache: SampleCache

    def load(self, chunk: np.ndarray) -> tuple[dict[str, Tensor], LoadReport]:
        if self.cache.is_full or not self.cache.is_open():
            return {}, LoadReport(counts={"refused": len(chunk)})
        done, bad = Counter[str](), []
        made: list[bytes] = []
        for i in chunk.tolist():
            key = self.stored.key(self.source.content_hash("image", i))
            if self.cache.has(key):
                done["present"] += 1
                continue
            try:
                self.cache.put(key, self.stored(self.source.value("image", i)), FILL_S)
                made.append(key)
            except BadSample as error:
                bad.append((i, error.reason, f"{self.source.where(i)}: {error}"))
        self.cache.store(FILL_S)
        done["stored"] = sum(map(self.cache.has, made))
        done["refused"] = len(made) - done["stored"]
        return {}, LoadReport(bad, done)
