"""How the processes of data/ start and end: those that load, those that fill the cache and those that
build an index share one fork server."""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from common.output import shown

GRACE_S = 20.0  # of the 30 that DeepSpeed's launcher leaves between asking and killing
WATCH_S = 1.0  # between two looks at the calls that have a limit


def start_method() -> multiprocessing.context.BaseContext:
    """Workers start from a fork server, or where there is none afresh; not by forking this process.

    In a rank run the threads of CUDA, NCCL and the tokenizer; a lock that one of them holds stays
    shut for ever in a fork.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server instead of once by each worker; "__main__" is Python's own
    # default.
    context.set_forkserver_preload(["data.fork_server", "__main__", "data.loader"])
    return context


def start_early() -> None:
    """Start the fork server, without waiting for it: what workers import takes some seconds, in
    which this process can do other things."""
    if start_method().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def end_with_parent() -> None:
    """In a worker, once: from now on it ends at once when the process that asked for it is gone,
    however that ended, and on signals, which its fork server ignores.

    Else it would stay for ever: its parent by number is the fork server, and that waits for the
    last of its workers.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(
            target=_wait_and_end, args=(parent.sentinel,), name="end-with-parent", daemon=True
        ).start()


def _wait_and_end(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@contextlib.contextmanager
def ending_after(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """End this process with an error when the block takes more processor time than this: for calls
    into a library that lets other threads run, and that nothing ends but the end of the process."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="ending-after", daemon=True)
        _watcher.start()
    call = _Call(seconds, message, time.monotonic(), time.process_time())
    _watched.append(call)
    try:
        yield
    finally:
        _watched.remove(call)


@dataclass(frozen=True, eq=False)
class _Call:
    limit_s: float
    message: Callable[[], str]
    clock: float
    processor: float


_watched: list[_Call] = []
_watcher: threading.Thread | None = None


def _watch() -> None:
    while True:
        time.sleep(WATCH_S)
        clock, processor = time.monotonic(), time.process_time()
        for call in list(_watched):
            # other threads take processor time too, and a busy machine takes time
            if min(clock - call.clock, processor - call.processor) > call.limit_s:
                os.write(2, f"error: {shown(call.message())}\n".encode(errors="backslashreplace"))
                os._exit(2)


def outlast_signals() -> None:
    """In a worker, once: what asks all processes of a run to end lets it load on for `GRACE_S`, so
    that its rank can finish the step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


def _end_later(number: int, frame: FrameType | None) -> None:
    timer = threading.Timer(GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
