"""The report of runs that go on, on the loopback address: the page asks for what is new."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from launch.reporting.page import render_page, render_update
from launch.reporting.reading import read_runs

LOOPBACK = "127.0.0.1"
SOURCES = (
    "config.json",
    "metrics.jsonl",
    "trace.json",
    "balance.jsonl",
    "queries.json",
    "bad_samples.jsonl",
    "bad_steps.jsonl",
    "done",
)


class ReportServer(ThreadingHTTPServer):
    """Serves `/` and `/update.json` of the runs in `folders` until it is shut down. Errors: OSError
    for a port that is taken or may not be used."""

    daemon_threads = True  # a browser that holds its connection does not hold the end
    allow_reuse_address = True

    def __init__(self, folders: Sequence[Path], port: int):
        self.folders = folders
        self._lock = threading.Lock()
        self._made: dict[str, tuple[object, bytes]] = {}
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            reason = "is in use by another program" if in_use else f"cannot be used ({error})"
            raise OSError(f"--live {port}: the port {reason}; give another one") from error

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def page(self) -> bytes:
        return self._of("page", lambda: render_page(read_runs(self.folders), live=True))

    def update(self) -> bytes:
        return self._of("update", lambda: render_update(read_runs(self.folders)))

    def _of(self, name: str, make: Callable[[], str]) -> bytes:
        """Made anew where a file of the runs has changed. One request at a time makes it."""
        with self._lock:
            now = [_stamp(folder / source) for folder in self.folders for source in SOURCES]
            if name not in self._made or self._made[name][0] != now:
                self._made[name] = now, make().encode()
            return self._made[name][1]


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        # A page of another site may ask this address by a name of its own: it must not be answered.
        if self.headers.get("Host", "").split(":")[0] not in (LOOPBACK, "localhost"):
            self._answer(403, "text/plain; charset=utf-8", b"only for this machine\n")
            return
        kinds = {
            "/": ("text/html; charset=utf-8", self.server.page),
            "/update.json": ("application/json", self.server.update),
        }
        kind, make = kinds.get(self.path, ("", None))
        if make is None:
            self._answer(404, "text/plain; charset=utf-8", b"there is / and /update.json\n")
            return
        try:
            self._answer(200, kind, make())
        except (ValueError, OSError) as error:  # a file that is just being replaced
            text = json.dumps({"error": str(error)}).encode()
            self._answer(500, "application/json", text)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: a line for each refresh would hide everything else."""


def serve(folders: Sequence[Path], port: int) -> None:
    """Until Ctrl-C. Errors: as `ReportServer`, and as `read_runs` before anything is served."""
    read_runs(folders)
    with ReportServer(folders, port) as server:
        print(f"{server.address}   (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
