"""A bounded folder of fetched shards that all processes of a machine share.

An entry is a folder, named by the hash of its address. While it is filled it is called `HASH.part`,
and stays where its filler was stopped, so that the next one goes on; a rename makes it the entry.
What is evicted is called `HASH.gone` before it is removed. In each lies a small file with its name,
the bytes that it may come to have, and of an entry those that it had when it was filled, so that
one which lost some when power failed is known and filled anew.

All locks are flocks of folders, which end with their process, however it ends: an entry is held by
a shared one, a part is filled under an exclusive one, and under that of the cache's own folder the
others are tried, and entries are counted, renamed and removed. Who has that waits for nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from common.files import make_folder, move, open_folder, read_json, remove_folder, write_text
from common.secrets import redact

DONE_S = 10 * 365 * 86_400.0  # as if an entry had not been used for so long
WAIT_S = 600.0  # how long room is waited for: others hold their shards for minutes at most
PAUSES_S = (0.02, 1.0)  # between two looks whether there is room: the first, the longest
ABOUT = ".about.json"
ABOUTS_KEPT = 1 << 14  # in memory
NAMES = re.compile(r"[0-9a-f]{32}(\.part|\.gone)?")
FULL = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


class Held:
    """An entry that stays where it is until this is closed. A forked child holds nothing."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor: int | None = descriptor
        _OPEN.add(self)

    def close(self, done: bool = False) -> None:
        """Let it go. It was used now, or is `done` with: then it goes before all others whose next
        use nobody knows, such as what was fetched ahead; of several the one that was done first."""
        if self._descriptor is not None:
            used = time.time() - DONE_S * done
            with contextlib.suppress(OSError):
                os.utime(self._descriptor, (used, used))
        self._release()

    __del__ = close

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self, unlock: bool = True) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if unlock:  # for whoever has a copy of the descriptor, too
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _is_there(self) -> bool:
        assert self._descriptor is not None
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), self.folder.stat())
        return False

    def _becomes(self, folder: Path) -> None:
        """Rename the folder, and share it from now on."""
        assert self._descriptor is not None
        move(self.folder, folder)
        self.folder = folder
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)


_OPEN: weakref.WeakSet[Held] = weakref.WeakSet()


def _close_in_child() -> None:
    """A lock lasts as long as any copy of its descriptor, and a worker may outlive its parent."""
    for held in list(_OPEN):
        held._release(unlock=False)


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True)
class _Found:
    """An entry, a part, or the rest of an eviction. `folder`: its name in that of the cache."""

    folder: str
    name: str
    bytes: int  # towards the limit
    used: float


Order = Callable[[_Found], "tuple[bool, float, float] | None"]  # the least goes first, None stays


@dataclass(frozen=True)
class ShardCache:
    """Entries in `folder`, on a local disk, that take `limit_bytes` at most, together with all that
    is on its way to become one. Small to pickle: nothing is open but what is held."""

    folder: Path
    limit_bytes: int

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise ValueError(f"--stream-cache: {self.limit_bytes} bytes; at least 1 is needed")

    def hold(
        self,
        name: str,
        size: int,
        fill: Callable[[Path], None],
        needed: bool = True,
        next_use: Callable[[str], float] | None = None,
        wait_s: float = WAIT_S,
    ) -> Held | None:
        """The entry of `name`, an address, filled first if it is not there.

        `fill` writes into a folder, where an earlier try may have left files, at most `size` bytes
        in all: what lies beside the shard counts too, also what is put there later. If another
        process fills this entry, it is waited for, and where it ends early this one goes on.

        Room is made by removing what nobody holds: rests first, then what `next_use` gives the
        largest number (when it is needed next, `inf` for never; a KeyError is as `inf`), then what
        was not used for longest. `next_use` is given names as `redact` leaves them.

        What is not `needed` is fetched ahead: None if its room could only be made by removing what
        is used before it, or if all else is held. What is needed waits for room, up to `wait_s`.
        Errors: those of `fill`, whose files stay; OSError where there is no room in the limit or
        on the disk.
        """
        shown = redact(name)
        if size > self.limit_bytes:
            raise OSError(
                f"{shown}: takes {size} bytes, and --stream-cache allows {self.limit_bytes} for "
                "all shards of this machine; give more there, or make smaller shards"
            )
        whole = self._whole(name)
        order = _order(next_use, None if needed else shown)
        until, pause = time.monotonic() + wait_s, PAUSES_S[0]
        while True:
            if held := _complete(whole):
                return held
            part: Held | None = None
            try:
                part, missing = self._begin(whole, shown, size, order)
                if part is not None:
                    fill(part.folder)
                    if self._finish(part, whole, shown, size, _order(next_use)):
                        return part
                elif not missing:
                    other = _lock(_part_of(whole), fcntl.LOCK_SH)
                    if other is not None:
                        other._release()
                elif not needed:
                    return None
                elif time.monotonic() >= until:
                    raise self._no_room(shown, missing, wait_s)
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, PAUSES_S[1])
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not self._make_disk_room(part, whole, size, order):
                    if not needed:
                        return None
                    raise OSError(
                        error.errno,
                        f"{self.folder}: the disk is full ({shutil.disk_usage(self.folder).free} "
                        f"bytes are free) and no more shards can be removed to fetch {shown}, "
                        f"{size} bytes; give a smaller --stream-cache, or set WYE_CACHE to a "
                        "folder on a larger disk",
                    ) from error
            finally:
                if part is not None and part.folder != whole:
                    part._release()

    def find(self, name: str) -> Held | None:
        """The entry of `name` if it is there."""
        return _complete(self._whole(name))

    def _whole(self, name: str) -> Path:
        return self.folder / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()

    def usage(self) -> int:
        """The bytes that count towards the limit: those that entries and parts may come to have."""
        with self._alone():
            return sum(each.bytes for each in self._found())

    def count_anew(self, held: Held) -> None:
        """Count an entry in which more was written by what is there now."""
        with self._alone():
            about, there = _about(held.folder), _bytes_in(held.folder)
            if about is not None and there > max(about[1:]):
                _describe(held.folder, about[0], there, about[2])
                self._keep_to_limit(_order(None), held.folder)

    def write_beside(self, held: Held, write: Callable[[], T]) -> T:
        """What `write` returns, which writes into an entry. Where the disk is full, others are
        removed for it, as for what is needed. Errors: those of `write`."""
        while True:
            try:
                return write()
            except OSError as error:
                own = (held.folder, 1, _order(None))
                if error.errno not in FULL or not self._make_disk_room(None, *own):
                    raise

    def _alone(self) -> Held:
        while True:
            if lock := _lock(make_folder(self.folder), fcntl.LOCK_EX):
                return lock

    def _begin(self, whole: Path, name: str, size: int, order: Order) -> tuple[Held | None, int]:
        """The part to fill, for which there is room. Otherwise None, and the bytes for which there
        is none; 0 where another process fills it, or has done so."""
        part = _part_of(whole)
        with self._alone(), contextlib.ExitStack() as stack:
            if whole.exists() and not (_is_complete(whole) or self._drop(whole)):
                return None, size  # others read what is left of it
            lock = _lock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                stack.callback(lock._release)
            if whole.exists() or (lock is None and part.exists()):
                return None, 0
            found = self._found()
            others = sum(each.bytes for each in found if each.folder != part.name)
            missing = others + size - self.limit_bytes
            if missing > 0:
                missing -= self._evict(found, missing, order, whole)
            if missing > 0:
                return None, missing
            _describe(make_folder(part, within=self.folder), name, size)
            stack.pop_all()
            return lock or _lock(part, fcntl.LOCK_EX | fcntl.LOCK_NB), 0

    def _finish(self, part: Held, whole: Path, name: str, size: int, order: Order) -> bool:
        """Whether the part was still there, which is the entry now."""
        with self._alone():
            if not part._is_there():
                return False
            written = _bytes_in(part.folder)
            _describe(part.folder, name, size, written)
            part._becomes(whole)
            if written > size:  # else it counts as much as the part did
                self._keep_to_limit(order, whole)
            return True

    def _make_disk_room(self, part: Held | None, whole: Path, size: int, order: Order) -> bool:
        """Whether anything was removed; else the part is."""
        with self._alone():
            rest = size - _bytes_in(_part_of(whole))
            if self._evict(self._found(), max(rest, 1), order, whole, partly=True):
                return True
            if part is not None:
                part._release()
            self._drop(_part_of(whole))
            return False

    def _keep_to_limit(self, order: Order, own: Path) -> None:
        found = self._found()
        over = sum(each.bytes for each in found) - self.limit_bytes
        if over > 0:
            self._evict(found, over, order, own, partly=True)

    def _evict(
        self, found: list[_Found], missing: int, order: Order, own: Path, partly: bool = False
    ) -> int:
        """Remove what goes first until `missing` bytes are free, and nothing if that cannot be,
        unless `partly`. Returns how many are, or would be."""
        stay = (own.name, _part_of(own).name)
        going = [
            (place, each)
            for each in found
            if each.folder not in stay and (place := order(each)) is not None
        ]
        with contextlib.ExitStack() as stack:
            free, chosen = 0, []
            for _, each in sorted(going, key=lambda pair: pair[0]):
                if free < missing and (
                    lock := _lock(self.folder / each.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ):
                    stack.callback(lock._release)
                    chosen.append(each)
                    free += each.bytes
            if free >= missing or partly:
                free -= sum(self._remove(self.folder / each.folder) for each in chosen)
            return free

    def _drop(self, path: Path) -> bool:
        """Remove it unless it is in use. Returns whether it is not there."""
        if lock := _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            self._remove(path)
            lock._release()
        return not path.exists()

    def _remove(self, path: Path) -> int:
        """Under another name, since what is half removed is no entry. Returns bytes that stay."""
        gone = path.with_suffix(".gone")
        if path != gone:
            remove_folder(gone, self.folder)
            move(path, gone)
        remove_folder(gone, self.folder)
        return _bytes_in(gone)

    def _found(self) -> list[_Found]:
        """Under the lock that all wait for, of thousands of entries: two questions to the system of
        each. A walk through the files of all entries would take longer than most fills."""
        found = []
        with os.scandir(self.folder) as entries:
            for each in entries:
                if not NAMES.fullmatch(each.name):
                    continue
                about = _about(each.path)
                name, room, written = about or ("", 0, 0)
                if about is None or "." in each.name:
                    written = _bytes_in(each.path)
                used = each.stat(follow_symlinks=False).st_mtime
                found.append(_Found(each.name, name, max(room, written), used))
        return found

    def _no_room(self, name: str, missing: int, wait_s: float) -> OSError:
        with self._alone():
            used = []
            for each in self._found():
                if lock := _lock(self.folder / each.folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    lock._release()
                else:
                    used.append(each)
        return OSError(
            f"{self.folder}: no room for {name} within {wait_s:.0f} s: processes read or fetch "
            f"{len(used)} shards of {sum(each.bytes for each in used)} bytes "
            f"({', '.join(each.name for each in used[:3])}, …), and --stream-cache "
            f"({self.limit_bytes} bytes) is too small by {missing}; give more there, or let fewer "
            "workers read (--workers)"
        )


def _order(next_use: Callable[[str], float] | None, ahead: str | None = None) -> Order:
    """`ahead`: the name of what is fetched ahead, for which nothing goes that is used before it."""

    def when(name: str) -> float:
        with contextlib.suppress(KeyError):
            return next_use(name) if next_use and name else math.inf
        return math.inf

    least = -math.inf if ahead is None else when(ahead)

    def order(each: _Found) -> tuple[bool, float, float] | None:
        if "." in each.folder:
            return False, 0.0, each.used
        use = when(each.name)
        return None if use < least else (True, -use, each.used)

    return order


def _lock(folder: Path, how: int) -> Held | None:
    """None where there is no such folder, or with LOCK_NB where others have it. Errors: OSError."""
    while True:
        try:
            held = Held(folder, open_folder(folder))
        except FileNotFoundError:
            return None
        try:
            assert held._descriptor is not None
            fcntl.flock(held._descriptor, how)
            if held._is_there():  # and was not renamed meanwhile
                return held
        except BlockingIOError:
            held._release()
            return None
        except OSError as error:
            held._release()
            raise OSError(
                error.errno,
                f"{folder}: its file system locks no folders ({error.strerror}); set WYE_CACHE to "
                "a folder on a local disk",
            ) from error
        except BaseException:
            held._release()
            raise
        held._release()


def _complete(whole: Path) -> Held | None:
    """The entry, held; None where it is not there or not whole."""
    held = _lock(whole, fcntl.LOCK_SH)
    if held is None or _is_complete(whole):
        return held
    held._release()
    return None


def _part_of(whole: Path) -> Path:
    return whole.with_suffix(".part")


def _describe(folder: Path, name: str, room: int, written: int = 0) -> None:
    about = {"name": name, "room": room, "bytes": written}
    write_text(folder / ABOUT, json.dumps(about, ensure_ascii=False))


def _about(folder: Path | str) -> tuple[str, int, int] | None:
    """Name, bytes that it may come to have, and those that were written when it was filled."""
    with contextlib.suppress(OSError):
        status = os.stat(file := f"{folder}/{ABOUT}")
        return _read_about(file, status.st_mtime_ns, status.st_ino)
    return None


@lru_cache(ABOUTS_KEPT)
def _read_about(file: str, mtime_ns: int, inode: int) -> tuple[str, int, int] | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError):
        about = read_json(Path(file))
        return str(about["name"]), int(about["room"]), int(about["bytes"])
    return None


def _is_complete(folder: Path) -> bool:
    about = _about(folder)
    return about is not None and _bytes_in(folder) >= about[2]


def _bytes_in(folder: Path | str) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            if ABOUT not in name:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(parent, name)).st_size
    return total
