"""One message per failure, from one rank, and no process left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Callable

from engine.watchdog import Watchdog

# What a user can mend and a message explains. Anything else is a fault of ours, and shows its traceback.
EXPLAINED = (ValueError, OSError)
LOST_CONNECTION_WAIT_S = 10.0


class StopRequest:
    """Ctrl-C and SIGTERM ask for an end after the current step; a second Ctrl-C ends at once."""

    def __init__(self):
        self.signal: str | None = None
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._note)

    def _interrupt(self, number: int, frame) -> None:
        if self.signal == "SIGINT":
            os._exit(128 + signal.SIGINT)
        self._note(number, frame)

    def _note(self, number: int, frame) -> None:
        self.signal = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal is not None


def report_and_exit(program: str, error: BaseException, watchdog: Watchdog | None, run_folder: Path | None) -> None:
    """Say once what went wrong, keep the traceback in the run's folder, and end this process."""
    rank = int(os.environ.get("RANK", "0"))
    details = "".join(traceback.format_exception(error))
    message, first = _explain(error, details), rank == 0
    if watchdog is not None:
        message, first = _agree(watchdog, error, message)
    if first:
        kept = _keep(details, run_folder, rank)
        print(f"\n{program}: error: {message}{kept}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if watchdog is not None:
        watchdog.linger()
    os._exit(1)  # not sys.exit: the collectives of other ranks must not hold this one


def _explain(error: BaseException, details: str) -> str:
    return str(error) if isinstance(error, EXPLAINED) else f"unexpected {type(error).__name__}\n{details}"


def _agree(watchdog: Watchdog, error: BaseException, message: str) -> tuple[str, bool]:
    """The message to give and whether this rank gives it. A lost connection is the echo of a failure elsewhere: look for that."""
    if not isinstance(error, EXPLAINED):
        cause, already_told = watchdog.cause_elsewhere(LOST_CONNECTION_WAIT_S if _from_a_collective(error) else 0.0)
        if already_told:
            return message, False
        message = cause or message
    return message, watchdog.claim_failure(message)


def _from_a_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(
        "distributed" in frame.filename or "deepspeed/comm" in frame.filename for frame in traceback.extract_tb(error.__traceback__)
    )


def _keep(details: str, run_folder: Path | None, rank: int) -> str:
    if run_folder is None or not run_folder.is_dir():
        return ""
    path = run_folder / f"error-rank{rank}.txt"
    path.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{details}", encoding="utf-8")
    return f"\n(traceback: {path})"
