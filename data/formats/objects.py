"""Objects: what answers an address. s3, gs, az and http(s) are asked through obstore, which works
outside of Python's lock; other addresses and local paths through fsspec. Each answers once; who
waits for what may pass is `store.py`."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from common.files import first_bytes
from common.secrets import redact
from data.formats.s3_names import can_list, listed_keys
from data.identity import Identity
from data.keys import content_hash

PIECE = 1 << 17  # bytes that are lost at most when a download breaks off
STORES = 64  # kept open; addresses with a query have one each
SCHEMES = {"s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"}  # of obstore
STATUS = re.compile(r"status code: (\d{3})")
SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")
BY_SECONDS = re.compile(r'(W/)?"[0-9a-f]{8}-[0-9a-f]+"')  # nginx makes its etags of time and size
SETTLES_S = 2.0  # in which what was written may be written again, at the same time in seconds

_process = 0  # that uses obstore
_lock = threading.Lock()


class UnaskableName(OSError):
    """A name that obstore reads as another one, or not at all."""


class Object:
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

    def identity(self) -> Identity:
        meta = self._head()
        age_s = time.time() - meta["last_modified"].timestamp()
        by_seconds = not meta["e_tag"] or BY_SECONDS.fullmatch(meta["e_tag"])
        # Sizes tell little, since a tar is filled up to a multiple of 10,240 bytes.
        if by_seconds and abs(age_s) < SETTLES_S:
            time.sleep(SETTLES_S)
            meta = self._head()
        return _of_meta(meta)

    def _head(self) -> Any:
        import obstore

        try:
            return obstore.head(self._store, self._path)
        except Exception as error:
            # addresses that are signed for one method; others know no second one
            if not self._root.startswith("http") or status_of(error) not in (403, 405, 501):
                raise
        try:
            found = obstore.get(self._store, self._path, options={"range": (0, 1)})
        except obstore.exceptions.NotSupportedError:  # no ranges
            found = obstore.get(self._store, self._path)
        return found.meta

    def read(self, start: int, stop: int) -> bytes:
        """The bytes, and some behind them where more come than were asked for."""
        import obstore

        found = obstore.get(self._store, self._path, options={"range": (start, stop)})
        return first_bytes(map(bytes, found.stream(stop - start)), stop - start)

    def pieces(self, start: int) -> tuple[Identity, Iterator[bytes]]:
        import obstore

        options = {"range": {"offset": start}} if start else None
        found = obstore.get(self._store, self._path, options=options)
        return _of_meta(found.meta), iter(found.stream(PIECE))

    def like(self) -> list[str]:
        import obstore

        if self._root.startswith("http"):
            raise ValueError("what is on a web server cannot be listed; write {000..012}")
        folder = self._path[: re.search("[*?]|$", self._path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        deep = re.search("[*?]", os.path.dirname(self._path)) is not None
        try:
            if deep:
                found = [m["path"] for some in obstore.list(self._store, folder) for m in some]
            else:
                objects = obstore.list_with_delimiter(self._store, folder)["objects"]
                found = [m["path"] for m in objects]
        except obstore.exceptions.InvalidPathError:
            if not can_list(self._root):
                raise
            found = listed_keys(self._root, folder, deep)
        words = re.escape(self._path).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
        named = re.compile(words, re.DOTALL)
        return [f"{self._root}/{path}" for path in found if named.fullmatch(path)]


class File:
    """An address of fsspec."""

    def __init__(self, address: str) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self._files, self._path = fsspec.core.url_to_fs(address)
        self._is_local = isinstance(self._files, LocalFileSystem)

    def identity(self) -> Identity:
        found = self._files.info(self._path)
        if found["type"] != "file":
            raise FileNotFoundError("is no file")
        if self._is_local:
            return Identity.of(os.stat(self._path))
        etag = found.get("etag") or found.get("ETag") or content_hash(str(found).encode()).hex()
        return Identity(found["size"], etag=etag)

    def read(self, start: int, stop: int) -> bytes:
        return self._files.cat_file(self._path, start, stop)

    def pieces(self, start: int) -> tuple[Identity, Iterator[bytes]]:
        return self.identity(), self._read(start)

    def _read(self, start: int) -> Iterator[bytes]:
        with self._files.open(self._path, "rb") as file:
            file.seek(start)
            while piece := file.read(PIECE):
                yield piece

    def like(self) -> list[str]:
        return [self._files.unstrip_protocol(path) for path in self._files.glob(self._path)]


def _of_meta(meta: Any) -> Identity:
    # W/: the same content, though maybe packed otherwise on the way
    etag = (meta["e_tag"] or meta["last_modified"].isoformat()).removeprefix("W/")
    return Identity(meta["size"], etag=etag)


def object_at(address: str) -> Object | File:
    root = root_of(address)
    if not root:
        return File(address)
    if address.startswith("http"):
        path = unquote(urlsplit(address).path).lstrip("/")
    else:
        path = address[len(root) + 1 :]
    if path and {"", ".", ".."} & {*path.split("/")}:
        raise UnaskableName(
            f"{redact(address)}: a name with an empty part, '.' or '..' cannot be asked for; rename "
            "the object, or leave it out of the pattern"
        )
    return Object(root, path)


def root_of(address: str) -> str:
    """Of the store of obstore: scheme and bucket, or host; a query, which may hold a signature,
    belongs to it."""
    scheme, _, rest = address.partition("://")
    if scheme not in SCHEMES:
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
    client: dict[str, Any] = {"timeout": "30 days", "read_timeout": "30s"}
    # redirects are followed, and none of an encrypted address leads to what is asked without
    # encryption, as services of this machine and of its network are
    client["allow_http"] = not root.startswith("https:")
    # `_Patience` does that. obstore would try again what never passes (a name that is not known, a
    # 501), say nothing meanwhile and let no Ctrl-C through; and where a server without ranges breaks
    # off, it asks for one, and ends the download.
    how = {"client_options": client, "retry_config": {"max_retries": 0}}
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


def status_of(error: Exception) -> int | None:
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
