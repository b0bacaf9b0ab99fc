"""Stores of files on 127.0.0.1: an S3 server (moto) and an HTTP server that answers ranges, each
behind faults that are put in by number.

    with s3_server() as variables:                            # AWS_ENDPOINT_URL and others
        put(variables, "bucket/folder/0.tar", content)
    with http_server(folder, Faults(latency_s=0.1)) as url:
        ...                                                   # url + "/0.tar" is folder/0.tar

The servers run in threads of the process that asks for them, moto in a process of its own, which
ends with this one however that ends.
"""

from __future__ import annotations

import io
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import lru_cache
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from struct import pack
from typing import IO, Any
from urllib.parse import unquote, urlsplit

PIECE = 1 << 14  # bytes that are sent at a time
KEYS = {
    "AWS_ACCESS_KEY_ID": "of-tests",
    "AWS_SECRET_ACCESS_KEY": "of-tests",
    "AWS_REGION": "us-east-1",
}
MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Faults:
    """What a server does wrong, from its start on or from when it is set, and what it was asked.

    `resets`, `cuts`, `flips` and `refusals` are shares of the requests, drawn in their order by `seed`.
    """

    def __init__(
        self,
        seed: int = 0,
        latency_s: float = 0.0,  # before each answer
        bytes_per_s: float = 0.0,  # of all answers together; 0: no limit
        answer_bytes_per_s: float = 0.0,  # of each; 0: no limit
        resets: float = 0.0,  # answers whose connection is reset at a byte within
        cuts: float = 0.0,  # answers whose connection ends at a byte within
        flips: float = 0.0,  # answers with a wrong byte
        refusals: float = 0.0,  # requests that are answered with `status`
        status: int = 503,
        most: int | None = None,  # faults; None: without end
        ranges: bool = True,  # False: each answer has the whole file
        missing: int = 404,  # the status of a file that is not there
        user: str = "",  # "name:password" that is asked for
        etag: str | None = None,  # of each file, instead of its own; "": none
        page: str = "",  # what an answer says where there is no file
        no_head: bool = False,  # HEAD is not known
        more: int = 0,  # bytes that are sent beyond what HEAD and ranges announce
    ) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.answer_bytes_per_s = answer_bytes_per_s
        self.resets, self.cuts, self.refusals, self.status = resets, cuts, refusals, status
        self.flips, self.most, self.ranges, self.etag = flips, most, ranges, etag
        self.more = more
        self.user, self.missing, self.page, self.no_head = user, missing, page, no_head
        self.requests: list[str] = []  # "GET /0.tar 100-", in order
        self.sent = 0  # bytes of bodies
        self.done = 0  # faults
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._free = 0.0  # when the line has sent what was given to it
        self._server: _Server | None = None

    def asked(self, what: str) -> tuple[str, float]:
        """Count a request. What goes wrong with it, and at which share of the body."""
        with self._lock:
            self.requests.append(what)
            drawn, place = self._random.random(), self._random.random()
            if self.most is not None and self.done >= self.most:
                return "", place
            for name in ("resets", "cuts", "flips", "refusals"):
                drawn -= getattr(self, name)
                if drawn < 0:
                    self.done += 1
                    return name, place
            return "", place

    def pass_on(self, size: int) -> None:
        """Count bytes that are sent, and wait for their turn on the line."""
        wait = size / self.answer_bytes_per_s if self.answer_bytes_per_s else 0.0
        with self._lock:
            self.sent += size
            if self.bytes_per_s:
                self._free = max(self._free, time.monotonic()) + size / self.bytes_per_s
                wait = max(wait, self._free - time.monotonic())
        time.sleep(max(wait, 0))

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Meanwhile the port is closed, and all connections have ended."""
        assert self._server is not None, "no server has these faults"
        self._server.close_port()
        try:
            yield
        finally:
            self._server.open_port()


@contextmanager
def http_server(folder: Path, faults: Faults | None = None) -> Iterator[str]:
    """The address of a folder."""
    with _serving(faults, lambda request: _file(folder, request)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def s3_server(faults: Faults | None = None) -> Iterator[dict[str, str]]:
    """The environment variables that name an empty store."""
    process = subprocess.Popen(
        [sys.executable, "-c", MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        upstream = int(process.stdout.readline())
        with _serving(faults, lambda request: _passed(upstream, request)) as port:
            yield {
                **KEYS,
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "WYE_TESTS_S3": f"http://127.0.0.1:{upstream}",  # without faults
            }
    finally:
        process.kill()
        process.communicate()


@contextmanager
def plain_server(folder: Path) -> Iterator[str]:
    """The address of a folder that Python's own server shows: it answers no ranges, has no etags, and
    tells times in seconds."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "-d", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().split()[5]}"
    finally:
        process.kill()
        process.communicate()


def put(variables: dict[str, str], name: str, content: bytes) -> None:
    """Store `BUCKET/KEY`, without faults; a bucket is made by its first object."""
    bucket, _, key = name.partition("/")
    client = _client(variables["WYE_TESTS_S3"])
    client.create_bucket(Bucket=bucket)  # also where it is there
    client.put_object(Bucket=bucket, Key=key, Body=content)


@lru_cache
def _client(endpoint: str) -> Any:
    import boto3

    known = {"aws_access_key_id": "of-tests", "aws_secret_access_key": "of-tests"}
    return boto3.client("s3", region_name="us-east-1", endpoint_url=endpoint, **known)


class _Server:
    """Answers connections in threads. Its port stays taken while it is closed."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._handler, self._open = handler, set[socket.socket]()
        self.port = 0
        self._bind()
        self.open_port()

    def _bind(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", self.port))
        self.port = self._socket.getsockname()[1]

    def open_port(self) -> None:
        self._socket.listen(256)
        self._thread = threading.Thread(target=self._accept, args=(self._socket,), daemon=True)
        self._thread.start()

    def close_port(self) -> None:
        self.end()
        self._bind()  # and does not listen: who asks is refused

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # which ends a waiting accept
        self._thread.join()
        self._socket.close()
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # which ends a waiting read

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, address = listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(connection)
                threading.Thread(
                    target=self._answer, args=(connection, address), daemon=True
                ).start()

    def _answer(self, connection: socket.socket, address: Any) -> None:
        with suppress(OSError):
            self._handler(connection, address, self)  # type: ignore[arg-type]
        self._open.discard(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


@contextmanager
def _serving(faults: Faults | None, answer: Any) -> Iterator[int]:
    faults = faults or Faults()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do(self) -> None:
            assert faults is not None
            self.faults = faults
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            span = self.headers.get("Range", "").removeprefix("bytes=")
            fault, place = faults.asked(f"{self.command} {self.path} {span}".strip())
            time.sleep(faults.latency_s)
            known = f"Basic {b64encode(faults.user.encode()).decode()}"
            stranger = faults.user and self.headers.get("Authorization") != known
            unknown = faults.no_head and self.command == "HEAD"
            if fault == "refusals" or stranger or unknown:
                self.send_response(501 if unknown else 401 if stranger else faults.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status, headers, content, size = answer(self)
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            left = int(size * place) if fault in ("resets", "cuts") else size
            wrong = int(size * place) if fault == "flips" else -1  # another byte each time
            with content:
                while left > 0 and (piece := content.read(min(PIECE, left))):
                    if 0 <= wrong - (at := size - left) < len(piece):
                        piece = bytearray(piece)
                        piece[wrong - at] ^= 1
                    faults.pass_on(len(piece))
                    self.wfile.write(piece)
                    left -= len(piece)
            if fault in ("resets", "cuts"):
                self.close_connection = True
                if fault == "resets":
                    time.sleep(0.01)  # or what was sent would be lost as well
                    linger = pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    os.close(self.connection.detach())  # at once, though rfile is open

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    server = _Server(Handler)
    faults._server = server
    try:
        yield server.port
    finally:
        server.end()


def _passed(port: int, request: Any) -> tuple[int, dict[str, str], IO[bytes], int]:
    """What another server answers."""
    upstream = HTTPConnection("127.0.0.1", port)
    headers = {k: v for k, v in request.headers.items() if k.lower() != "connection"}
    upstream.request(request.command, request.path, request.body, headers)
    answer = upstream.getresponse()
    kept = {
        name: value
        for name, value in answer.getheaders()
        if name.lower() not in ("connection", "transfer-encoding")
    }
    if request.command == "HEAD":
        return answer.status, kept, answer, 0
    if answer.length is None:
        raise OSError("moto said no length")
    return answer.status, kept, answer, answer.length


def _file(folder: Path, request: Any) -> tuple[int, dict[str, str], IO[bytes], int]:
    """A file of a folder, or the range of it that is asked for."""
    path = (folder / unquote(urlsplit(request.path).path).lstrip("/")).resolve()
    none = open(os.devnull, "rb")
    if not (path.is_relative_to(folder.resolve()) and path.is_file()):
        page = request.faults.page.encode()
        length = {"Content-Length": str(len(page))}
        return request.faults.missing, length, io.BytesIO(page), len(page)
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    headers = {"Last-Modified": formatdate(changed / 1e9, usegmt=True), "Accept-Ranges": "bytes"}
    if (etag := request.faults.etag) != "":
        headers["ETag"] = etag or f'"{changed:x}-{size:x}"'
    status, start, stop = 200, 0, size
    given = request.headers.get("Range", "")
    if given.startswith("bytes=") and request.faults.ranges:
        first, _, last = given.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= stop:
            return 416, {"Content-Length": "0", "Content-Range": f"bytes */{size}"}, none, 0
        status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    if request.command == "HEAD":
        return status, headers, none, 0
    none.close()
    file = path.open("rb")
    file.seek(start)
    if more := request.faults.more:
        longer = tempfile.TemporaryFile()
        longer.write(file.read(stop - start))
        longer.truncate(stop - start + more)
        longer.seek(0)
        file.close()
        headers["Content-Length"] = str(stop - start + more)
        return status, headers, longer, stop - start + more
    return status, headers, file, stop - start
