"""One message per failure, from one rank, and no process left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engine.watchdog import Watchdog
from launch.run_folder import RunFolder

# What a user can mend and a message explains. Anything else is a fault of ours, and shows its traceback.
EXPLAINED = (ValueError, OSError)
LOST_CONNECTION_WAIT_S = 10.0


@dataclass
class Run:
    """What main has made so far, for whoever must report a failure."""

    watchdog: Watchdog | None = None
    folder: RunFolder | None = None


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

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that ended on this signal; of a rank that followed another one's, Ctrl-C's."""
        return 128 + (signal.SIGTERM if self.signal == "SIGTERM" else signal.SIGINT)

    def __bool__(self) -> bool:
        return self.signal is not None


def report_and_exit(program: str, error: BaseException, run: Run) -> NoReturn:
    """Say once what went wrong, keep the traceback in the run's folder, and end this process."""
    rank = int(os.environ.get("RANK", "0"))
    details = "".join(traceback.format_exception(error))
    message, first = _explain(error, details), rank == 0
    if run.watchdog is not None:
        message, first = _agree(run.watchdog, error, message)
    if first:
        kept = _keep(details, run.folder.path if run.folder else None, rank)
        print(f"\n{program}: error: {message}{kept}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if run.watchdog is not None:
        run.watchdog.linger()
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
