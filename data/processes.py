"""Start and end of the processes of data/. Those that load, fill the cache and build an index share
one fork server."""

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
from types import FrameType

from common.output import shown

GRACE_S = 20.0  # of the 30 that DeepSpeed's launcher leaves between asking and killing
WATCH_S = 1.0  # between two looks at a call that has a limit


def start_method() -> multiprocessing.context.BaseContext:
    """Workers start from a fork server, or where there is none afresh; not by forking this process.

    In a rank run the threads of CUDA, NCCL and the tokenizer; a lock that one of them holds stays
    shut for ever in a fork.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # imported once by the server, not once by each worker; "__main__" is Python's own default
    context.set_forkserver_preload(["data.fork_server", "__main__", "data.loader"])
    return context


def start_early() -> None:
    """Start the fork server, without waiting for it: what workers import takes some seconds, in
    which this process can do other things."""
    if start_method().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def end_with_parent() -> None:
    """Make this worker end at once when the process that asked for it is gone, however that ended,
    and on signals, which its fork server ignores.

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
    is_over = threading.Event()

    def watch() -> None:
        clock, processor = time.monotonic(), time.process_time()
        while not is_over.wait(WATCH_S):
            # other threads take processor time too, and a busy machine takes time
            if min(time.monotonic() - clock, time.process_time() - processor) > seconds:
                os.write(2, f"error: {shown(message())}\n".encode(errors="backslashreplace"))
                os._exit(2)

    threading.Thread(target=watch, name="ending-after", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def outlast_signals() -> None:
    """Let this worker load on for `GRACE_S` when all processes of a run are asked to end, so that
    its rank can finish the step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


def _end_later(number: int, frame: FrameType | None) -> None:
    timer = threading.Timer(GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
