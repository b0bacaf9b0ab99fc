"""The bytes of an address: a range of them, or all of them in a file.

s3, gs, az and http(s) are asked through obstore, which works outside of Python's lock; other
addresses and local paths through fsspec. What may pass (no connection, a broken answer, a store that
is overloaded or gone) is waited for; what will not is one OSError at once.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import importlib.util
import io
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote, urlsplit

from common.files import open_part, read_json, remove, write_text
from common.secrets import redact
from data.formats.specs import is_remote, local_path
from data.keys import content_hash

WAIT_S = 600.0  # in which no byte came, until an error
FIRST_S, LONGEST_S = 0.2, 30.0  # between two tries, of which a random part is waited
TOLD_S = 10.0  # so long nothing is said
BLOCK = 4 << 20  # bytes that an open file reads at a time
PIECE = 1 << 17  # bytes that are lost at most when a download breaks off
TRIES = 4  # to get the bytes that an etag promises
STORES = 64  # kept open; addresses with a query have one each
OBJECTS = {"s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"}
PASSING = {408, 429, *range(500, 600)} - {501}  # of HTTP; 501: it does not know how
STATUS = re.compile(r"status code: (\d{3})")
# by which clouds give a machine its credentials, and where there are none: no cloud's machine
OF_MACHINES = ("169.254.169.254", "metadata.google.internal")
SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")
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
_process = 0  # that uses obstore
_lock = threading.Lock()


@dataclass(frozen=True)
class Stored:
    """What is at an address. `etag`: changes with it; of a store that has none the time of its last
    change."""

    size: int
    etag: str


def size_of(address: str, limit_s: float = WAIT_S) -> Stored:
    """Errors: OSError, as all here; FileNotFoundError, PermissionError."""
    return _asked(address, limit_s, lambda opened: opened.stored())


def read_range(address: str, start: int, stop: int, limit_s: float = WAIT_S) -> bytes:
    """The bytes from `start` to before `stop`, fewer where they end earlier."""
    if start >= stop:
        return b""
    return _asked(address, limit_s, lambda opened: opened.read(start, stop))


def read_all(address: str, limit_s: float = WAIT_S) -> bytes:
    """Of what is small."""
    return _asked(address, limit_s, lambda opened: b"".join(opened.pieces(0)[1]))


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
    address: str, stored: Stored | None = None, block: int = BLOCK, limit_s: float = WAIT_S
) -> BinaryIO:
    """To read from any place, `block` bytes at a time. `stored`: where it is known. Errors, also of
    reading: OSError."""
    if not is_remote(address):
        return open(local_path(address), "rb")
    reader = _Reader(address, (stored or size_of(address, limit_s)).size, limit_s)
    return cast(BinaryIO, io.BufferedReader(reader, block))


def fetch(address: str, part: Path, limit_s: float = WAIT_S) -> Stored:
    """Download into `part`, after the bytes that it has where they are of what is there now, which
    a file beside it says meanwhile."""
    patience = _Patience(address, limit_s)
    beside = part.with_name(f"{part.name}.of")
    seen = ""
    for _ in range(TRIES):
        stored = _fetched(address, part, beside, patience)
        promised, root = stored.etag.strip('"'), _root(address)
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


def _fetched(address: str, part: Path, beside: Path, patience: _Patience) -> Stored:
    while True:
        known = _recorded(beside)
        start = min(part.stat().st_size, max(known.size - 1, 0)) if known and part.exists() else 0
        try:
            stored, pieces = _opened(address).pieces(start)
            with open_part(part) as file:
                file.seek(file.truncate(start if stored == known else 0))
                if stored != known:
                    write_text(beside, json.dumps(asdict(stored)))
                    if start:  # the store has something else by now
                        continue
                for piece in pieces:
                    file.write(piece)
                    patience.moved()
                size = file.tell()
            if size == stored.size:
                return stored
            raise ConnectionError(f"{size} bytes came of {stored.size}")
        except Exception as error:
            if start and _status(error) in (416, 501):  # shorter by now; or it answers no ranges
                remove(beside, part.parent)
                continue
            patience.wait(error)


def _recorded(beside: Path) -> Stored | None:
    """What a part is of; None where that is not known."""
    try:
        return Stored(**read_json(beside))
    except (OSError, ValueError, TypeError):
        return None


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _asked(address: str, limit_s: float, ask: Callable[[_Object | _File], T]) -> T:
    patience = _Patience(address, limit_s)
    while True:
        try:
            found = ask(_opened(address))
            _answered.add(_root(address))
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
        _answered.add(_root(self._address))

    def wait(self, error: Exception) -> None:
        """Errors: OSError, where waiting would change nothing or was long enough."""
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
    status, words, reason = _status(error), str(error), _reason(error)
    new = _root(address) not in _answered
    kind: type[OSError] = OSError
    advice = "check the address and its settings"
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        kind, advice = FileNotFoundError, "check the address, and whether it is there"
    elif new and any(name in words for name in OF_MACHINES):
        kind, reason, advice = PermissionError, "there are no credentials", _advice(address)
    elif isinstance(error, PermissionError) or status in (401, 403):
        kind, advice = PermissionError, _advice(address)
    elif status in (301, 307, 400) and address.startswith("s3"):
        advice = "check the address, and that AWS_REGION is the region of its bucket"
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


def _status(error: Exception) -> int | None:
    """Of HTTP."""
    name = type(error).__name__
    of_kind = {"PermissionDeniedError": 403, "UnauthenticatedError": 401, "NotSupportedError": 501}
    if name in of_kind:
        return of_kind[name]
    if found := STATUS.search(str(error)):
        return int(found[1])
    status = getattr(
        error, "status", getattr(getattr(error, "response", None), "status_code", None)
    )
    return status if isinstance(status, int) else None


def _reason(error: Exception) -> str:
    said, _, inner = str(error).partition("\n\nDebug source:")
    causes = re.findall(r'(?:message|error): "([^"]+)"', inner)
    words = " ".join([said, *(f"({cause})" for cause in causes[-1:])]).split()
    return redact(f"{type(error).__name__}: {' '.join(words)}")[:400]


def _advice(address: str) -> str:
    """How a store is given credentials, or does without."""
    scheme = address.partition("://")[0]
    known = (words for begin, words in CREDENTIALS.items() if scheme.startswith(begin))
    return next(known, "check the credentials, and that they may read it")


class _Object:
    """An address of obstore."""

    def __init__(self, root: str, path: str) -> None:
        if _process not in (0, os.getpid()):
            raise RuntimeError(
                "this process was forked from one that had asked a store, whose threads it lacks; "
                "begin processes by spawn or a fork server"
            )
        self._root, self._path = root, path
        settings = (each for each in os.environ.items() if each[0].startswith(SETTINGS))
        with _lock:  # threads that begin together would make one each
            self._store = _store(root, tuple(sorted(settings)))

    def stored(self) -> Stored:
        import obstore

        try:
            return _of_meta(obstore.head(self._store, self._path))
        except Exception as error:
            # addresses that are signed for one method; others know no second one
            if not self._root.startswith("http") or _status(error) not in (403, 405, 501):
                raise
        return _of_meta(obstore.get(self._store, self._path, options={"range": (0, 1)}).meta)

    def read(self, start: int, stop: int) -> bytes:
        import obstore

        return bytes(obstore.get_range(self._store, self._path, start=start, end=stop))

    def pieces(self, start: int) -> tuple[Stored, Iterator[bytes]]:
        import obstore

        options = {"range": {"offset": start}} if start else None
        found = obstore.get(self._store, self._path, options=options)
        return _of_meta(found.meta), iter(found.stream(PIECE))

    def like(self) -> list[str]:
        import obstore

        if self._root.startswith("http"):
            raise ValueError("what is on a web server cannot be listed; write {000..012}")
        folder = self._path[: re.search("[*?]|$", self._path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        if re.search("[*?]", os.path.dirname(self._path)):
            found = (meta for some in obstore.list(self._store, folder) for meta in some)
        else:
            found = iter(obstore.list_with_delimiter(self._store, folder)["objects"])
        words = re.escape(self._path).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
        named = re.compile(words, re.DOTALL)
        return [f"{self._root}/{m['path']}" for m in found if named.fullmatch(m["path"])]


class _File:
    """An address of fsspec."""

    def __init__(self, address: str) -> None:
        import fsspec

        self._files, self._path = fsspec.core.url_to_fs(address)

    def stored(self) -> Stored:
        found = self._files.info(self._path)
        if found["type"] != "file":
            raise FileNotFoundError("is no file")
        etag = found.get("etag") or found.get("ETag") or content_hash(str(found).encode()).hex()
        return Stored(found["size"], etag)

    def read(self, start: int, stop: int) -> bytes:
        return self._files.cat_file(self._path, start, stop)

    def pieces(self, start: int) -> tuple[Stored, Iterator[bytes]]:
        stored = self.stored()
        return stored, self._read(start)

    def _read(self, start: int) -> Iterator[bytes]:
        with self._files.open(self._path, "rb") as file:
            file.seek(start)
            while piece := file.read(PIECE):
                yield piece

    def like(self) -> list[str]:
        return [self._files.unstrip_protocol(path) for path in self._files.glob(self._path)]


class _Reader(io.RawIOBase):
    def __init__(self, address: str, size: int, limit_s: float) -> None:
        self._address, self._size, self._limit_s, self._place = address, size, limit_s, 0

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
        found = read_range(self._address, self._place, stop, self._limit_s)
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)


def _of_meta(meta: Any) -> Stored:
    return Stored(meta["size"], meta["e_tag"] or meta["last_modified"].isoformat())


def _opened(address: str) -> _Object | _File:
    root = _root(address)
    if not root:
        return _File(address)
    if address.startswith("http"):
        return _Object(root, unquote(urlsplit(address).path).lstrip("/"))
    return _Object(root, address[len(root) + 1 :])


def _root(address: str) -> str:
    """Of the store of obstore: scheme and bucket, or host; a query, which may hold a signature,
    belongs to it."""
    scheme, _, rest = address.partition("://")
    if scheme not in OBJECTS:
        return ""
    if scheme in ("http", "https"):
        parts = urlsplit(address)
        return f"{scheme}://{parts.netloc}" + (f"?{parts.query}" if parts.query else "")
    return f"{scheme}://{rest.partition('/')[0]}"


@lru_cache(STORES)
def _store(root: str, settings: tuple[tuple[str, str], ...]) -> Any:
    """`settings`: of the environment, which obstore reads here."""
    from obstore.store import HTTPStore, from_url

    global _process
    _process = os.getpid()
    # a whole download may take any time, a piece of it may not
    client: dict[str, Any] = {"allow_http": True, "timeout": "30 days", "read_timeout": "30s"}
    how = {"client_options": client, "retry_config": {"max_retries": 0}}  # `_Patience` does that
    if not root.startswith("http"):
        return from_url(root, **how, **(_of_profile(dict(settings)) if root[:2] == "s3" else {}))
    parts = urlsplit(root)
    user, _, host = parts.netloc.rpartition("@")
    if user:  # which obstore does not send
        coded = base64.b64encode(unquote(user).encode()).decode()
        client["default_headers"] = {"authorization": f"Basic {coded}"}
    return HTTPStore(parts._replace(netloc=host).geturl(), **how)


def _of_profile(settings: dict[str, str]) -> dict[str, Any]:
    """What ~/.aws says, as boto3 and s3fs find it: obstore reads the AWS_ variables and asks the
    machine (EC2, ECS, EKS), but it knows no files of profiles."""
    given = {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE"}
    if given & settings.keys() or not importlib.util.find_spec("boto3"):
        return {}
    import boto3
    import botocore.session
    from obstore.auth.boto3 import Boto3CredentialProvider

    profile = botocore.session.Session()
    session = boto3.Session(botocore_session=profile)
    if session.get_credentials() is None:
        return {}
    found: dict[str, Any] = {"credential_provider": Boto3CredentialProvider(session)}
    endpoint = profile.get_scoped_config().get("endpoint_url")
    if (
        endpoint
        and not {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"} & settings.keys()
    ):
        found["config"] = {"endpoint": endpoint}
    return found
