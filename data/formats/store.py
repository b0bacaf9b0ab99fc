"""The bytes of an address: a range of them, or all of them in a file.

s3, gs, az and http(s) are asked through obstore, which works outside of Python's lock; other
addresses and local paths through fsspec. What may pass (no connection, a broken answer, a store that
is overloaded or gone) is waited for; what will not is one OSError at once.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from common.files import (
    first_bytes,
    make_folder,
    open_part,
    read_json,
    refuse_longer,
    remove,
    write_text,
)
from common.secrets import redact
from data.formats.objects import File, Object, UnaskableName, object_at, root_of, status_of
from data.formats.specs import cache_folder, is_remote, local_path
from data.identity import Identity

WAIT_S = 600.0  # in which no byte came, until an error
FIRST_S, LONGEST_S = 0.2, 30.0  # between two tries, of which a random part is waited
TOLD_S = 10.0  # so long nothing is said
BLOCK = 4 << 20  # bytes that an open file reads at a time
TRIES = 4  # to get the bytes that an etag promises
COPIES_AT_ONCE = 4  # of files whose store answers no ranges
PASSING = {408, 429, *range(500, 600)} - {501}  # of HTTP; 501: it does not know how
# by which clouds give a machine its credentials, and where there are none: no cloud's machine
OF_MACHINES = ("169.254.169.254", "metadata.google.internal")
# what an address or a setting may have caused, where its store never answered
LASTING = ("Name or service not known", "invalid peer certificate", "builder error", "offline mode")
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public "
    "bucket; profiles of ~/.aws are read where boto3 is installed",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "a": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true "
    "for a public container",
}
NETWORKS = {
    "asyncio",
    "aiohttp",
    "requests",
    "httpx",
    "httpcore",
    "urllib3",
}  # whose errors are fsspec's, too
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
T = TypeVar("T")

_chance = random.SystemRandom()  # the same in no two forked processes
_answered: set[str] = set()  # stores that did, so that nothing is wrong with their names
_not_md5: set[str] = set()  # stores whose etags look like one and are none
_told: set[str] = set()  # stores of which it was said that they answer no ranges
_copies = threading.BoundedSemaphore(COPIES_AT_ONCE)


class Unexpected(OSError):
    """A store gives something else than it announced, and waiting would change nothing."""


class NoRanges(OSError):
    """A server that gives files as a whole only."""


def identity_of(address: str, limit_s: float = WAIT_S) -> Identity:
    """Errors: OSError, as all here; FileNotFoundError, PermissionError."""
    return _asked(address, limit_s, lambda opened: opened.identity())


def read_range(address: str, start: int, stop: int, limit_s: float = WAIT_S) -> bytes:
    """The bytes from `start` to before `stop`, fewer where they end earlier."""
    try:
        return _ranged(address, start, stop, limit_s)
    except NoRanges:
        with _copied(address, limit_s) as copy:
            copy.seek(start)
            return copy.read(max(0, stop - start))


def _ranged(address: str, start: int, stop: int, limit_s: float) -> bytes:
    """Errors: also NoRanges."""
    if start >= stop:
        return b""
    found = _asked(address, limit_s, lambda opened: opened.read(start, stop))
    _refuse_more(address, len(found), stop - start)
    return found


@contextmanager
def _copied(address: str, limit_s: float) -> Iterator[BinaryIO]:
    """All of a file, on the disk of the cache until it is closed."""
    root = root_of(address)
    with _copies:
        if root not in _told:
            _told.add(root)
            logging.getLogger("wye").warning(
                "%s answers no ranges, so files are fetched whole where a part is needed: to be "
                "counted, each shard; a sizes.json beside the shards saves that",
                redact(root),
            )
        with tempfile.TemporaryDirectory(dir=make_folder(cache_folder())) as folder:
            fetch(address, part := Path(folder) / "part", limit_s)
            opened = part.open("rb")
        with opened:
            yield opened


def read_small(address: str, most: int, limit_s: float = WAIT_S) -> bytes:
    """All of a file. Errors: also ValueError where it has over `most` bytes, or no end."""
    found = _asked(address, limit_s, lambda opened: first_bytes(opened.pieces(0)[1], most))
    refuse_longer(len(found), most, redact(address))
    return found


def listed(pattern: str, limit_s: float = WAIT_S) -> list[str]:
    """The addresses that are named like `pattern`, sorted. `*` and `?` do not stand for `/`."""
    found = _asked(pattern, limit_s, lambda opened: opened.like())
    if not found:
        raise FileNotFoundError(
            f"{redact(pattern)}: nothing is named like this; check the pattern, and whether the "
            "credentials are those of its owner"
        )
    return sorted(found)


def open_file(
    address: str,
    known: Identity | None = None,
    block: int = BLOCK,
    limit_s: float = WAIT_S,
    count: Callable[[int], object] = lambda fetched: None,
) -> BinaryIO:
    """To read from any place, `block` bytes at a time. `known`: its identity; `count`: called with
    the number of bytes of each piece that is fetched. Errors, also of reading: OSError."""
    if not is_remote(address):
        return open(local_path(address), "rb")
    reader = _Reader(address, (known or identity_of(address, limit_s)).size, limit_s, count)
    return cast(BinaryIO, io.BufferedReader(reader, block))


def fetch(
    address: str,
    part: Path,
    limit_s: float = WAIT_S,
    check: Callable[[Identity], object] = lambda stored: None,
) -> Identity:
    """Download into `part`, after the bytes that it has where they are of what is there now, which
    a file beside it says meanwhile. `check` may refuse that, by Unexpected, before a byte is
    written. Errors: also Unexpected for a body that is longer than announced."""
    patience = _Patience(address, limit_s)
    beside = part.with_name(f"{part.name}.of")
    seen = ""
    for _ in range(TRIES):
        stored = _fetched(address, part, beside, patience, check)
        promised, root = stored.etag.strip('"'), root_of(address)
        if not root or root in _not_md5 or not re.fullmatch("[0-9a-f]{32}", promised):
            break
        if (digest := _md5(part)) == promised:
            break
        if digest == seen:  # such as with a key of one's own
            _not_md5.add(root)
            break
        seen = digest
        remove(beside, part.parent)
    else:
        raise OSError(
            f"{redact(address)}: its bytes are others each time, and not what the store's etag "
            "says; check the network and this machine's memory"
        )
    remove(beside, part.parent)
    return stored


def _fetched(
    address: str,
    part: Path,
    beside: Path,
    patience: _Patience,
    check: Callable[[Identity], object],
) -> Identity:
    while True:
        known = _recorded(beside)
        start = min(part.stat().st_size, max(known.size - 1, 0)) if known and part.exists() else 0
        try:
            stored, pieces = object_at(address).pieces(start)
            check(stored)
            with open_part(part) as file:
                file.seek(file.truncate(start if stored == known else 0))
                if stored != known:
                    write_text(beside, json.dumps(asdict(stored)))
                    if start:  # the store has something else by now
                        continue
                for piece in pieces:
                    _refuse_more(address, file.tell() + len(piece), stored.size)
                    file.write(piece)
                    patience.moved()
                size = file.tell()
            if size == stored.size:
                return stored
            raise ConnectionError(f"{size} bytes came of {stored.size}")
        except Exception as error:
            if start and status_of(error) in (416, 501):  # shorter by now; or it answers no ranges
                remove(beside, part.parent)
                continue
            patience.wait(error)


def _refuse_more(address: str, size: int, announced: int) -> None:
    if size > announced:
        raise Unexpected(
            f"{redact(address)}: sends more than the {announced:,} bytes that it announced; no more "
            "are read: check its server, and whether somebody else answers for it"
        )


def _recorded(beside: Path) -> Identity | None:
    """What a part is of; None where that is not known."""
    try:
        return Identity(**read_json(beside))
    except (OSError, ValueError, TypeError):
        return None


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _asked(address: str, limit_s: float, ask: Callable[[Object | File], T]) -> T:
    patience = _Patience(address, limit_s)
    while True:
        try:
            found = ask(object_at(address))
            _answered.add(root_of(address))
            return found
        except Exception as error:  # each kind of address raises its own
            patience.wait(error)


class _Patience:
    """Waits between tries, up to a limit in which no byte comes."""

    def __init__(self, address: str, limit_s: float) -> None:
        self._address, self._limit_s = address, limit_s
        self._tries, self._since, self._told = 0, time.monotonic(), False

    def moved(self) -> None:
        if self._tries:
            self._tries, self._told = 0, False
        self._since = time.monotonic()
        _answered.add(root_of(self._address))

    def wait(self, error: Exception) -> None:
        """Errors: OSError, where waiting would change nothing or was long enough."""
        if isinstance(error, (Unexpected, UnaskableName)):
            raise error
        if refusal := _refusal(self._address, error):
            raise refusal from None  # the libraries' own words may hold credentials
        waited, name = time.monotonic() - self._since, redact(self._address)
        reason = _reason(error)
        if waited >= self._limit_s:
            raise OSError(
                f"{name}: no answer in {waited:.0f} s: {reason}; check the network and the store, "
                "then go on"
            ) from None
        if waited > TOLD_S and not self._told:
            self._told = True
            logging.getLogger("wye").warning(
                "%s: %s; trying again for %.0f s", name, reason, self._limit_s
            )
        pause = min(LONGEST_S, FIRST_S * 2 ** min(self._tries, 30)) * _chance.uniform(0.5, 1)
        time.sleep(min(pause, self._limit_s - waited))
        self._tries += 1


def _refusal(address: str, error: Exception) -> OSError | None:
    """What is raised at once; None for what may pass."""
    if isinstance(error, OSError) and error.errno in DISK:
        return error
    status, words, reason = status_of(error), str(error), _reason(error)
    new = root_of(address) not in _answered
    kind: type[OSError] = OSError
    advice = "check the address and its settings"
    if type(error).__name__ == "NotSupportedError" or status == 501:
        kind, advice = NoRanges, "give a server that answers ranges, or the files on a disk"
    elif type(error).__name__ == "InvalidPathError":
        advice = "rename that object, install boto3 (s3), or write the names out: {000..012}"
    elif isinstance(error, FileNotFoundError) or status in (404, 410):
        kind, advice = FileNotFoundError, "check the address, and whether it is there"
    elif new and any(name in words for name in OF_MACHINES):
        kind, reason, advice = PermissionError, "there are no credentials", _advice(address)
    elif isinstance(error, PermissionError) or status in (401, 403):
        kind, advice = PermissionError, _advice(address)
    elif status in (301, 307, 400) and address.startswith("s3"):
        advice = "check the address, and that AWS_REGION is the region of its bucket"
    elif "following redirect" in words:
        advice = "it leads in a circle, or from https to http; give the address of the file itself"
    elif status is None and new and any(name in words for name in LASTING):
        pass
    elif status in PASSING if status else _of_network(error):
        return None
    return kind(f"{redact(address)}: {reason}; {advice}")


def _of_network(error: Exception) -> bool:
    package = type(error).__module__.partition(".")[0]
    if package == "obstore":
        return "HttpError" in str(error)
    return package in NETWORKS or isinstance(error, (ConnectionError, TimeoutError, EOFError))


def _reason(error: Exception) -> str:
    said, _, inner = str(error).partition("\n\nDebug source:")
    causes = re.findall(r'(?:message|error): "([^"]+)"', inner)
    said, *page = re.split(r"(?=<[!?A-Za-z])", said, maxsplit=1)
    # what a store or a server says in its page
    causes = re.findall(r"<(?:Message|title)>([^<]+)<", "".join(page))[:1] or causes[-1:]
    words = " ".join([said, *(f"({cause.strip()})" for cause in causes)]).split()
    return redact(f"{type(error).__name__}: {' '.join(words)}")[:400]


def _advice(address: str) -> str:
    """How a store is given credentials, or does without."""
    scheme = address.partition("://")[0]
    known = (words for begin, words in CREDENTIALS.items() if scheme.startswith(begin))
    return next(known, "check the credentials, and that they may read it")


class _Reader(io.RawIOBase):
    def __init__(
        self, address: str, size: int, limit_s: float, count: Callable[[int], object]
    ) -> None:
        self._address, self._size, self._limit_s, self._place = address, size, limit_s, 0
        self._count = count
        self._copies, self._copy = ExitStack(), cast("BinaryIO | None", None)

    def close(self) -> None:
        self._copies.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._place + len(buffer))
        found = self._read(self._place, stop)
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)

    def _read(self, start: int, stop: int) -> bytes:
        if self._copy is None:
            with suppress(NoRanges):
                found = _ranged(self._address, start, stop, self._limit_s)
                self._count(len(found))
                return found
            self._copy = self._copies.enter_context(_copied(self._address, self._limit_s))
            self._count(self._size)
        self._copy.seek(start)
        return self._copy.read(stop - start)
