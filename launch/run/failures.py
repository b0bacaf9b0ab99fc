"""One message per failure, from one rank, and no process left behind."""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from common.files import write_text
from common.output import plain
from common.secrets import redact
from engine.checkpoint.layout import LATEST
from engine.processes.determinism import refused_in_words
from engine.processes.out_of_memory import OutOfMemory, in_words
from engine.processes.places import RefusedByFirstRank
from engine.processes.watchdog import Watchdog
from launch.run.folder import RunFolder
from launch.terminal.last_words import say_last

# What a user can mend and a message explains. Anything else is a fault of ours, and shows its
# traceback.
EXPLAINED = (ValueError, OSError, OutOfMemory)
LOST_CONNECTION_WAIT_S = 10.0
# Exit status of what a second start would meet again, and of what it may not.
BAD_INPUT, FAILED = 2, 1
# What a wrong name of a file is answered with, by Python's class or by number.
WRONG_NAME: tuple[type[OSError], ...] = (FileNotFoundError, FileExistsError, NotADirectoryError)
WRONG_NAME += (IsADirectoryError, PermissionError)
WRONG_NAME_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)
NOT_ON_THE_HUB = (401, 403, 404)  # of HTTP


@dataclass
class Run:
    """What main has made so far, for whoever must report a failure."""

    watchdog: Watchdog | None = None
    folder: RunFolder | None = None


def report_and_exit(program: str, error: BaseException, run: Run) -> NoReturn:
    """Say once what went wrong, keep the traceback in the run's folder, and end this process.

    Before there is a process group the ranks cannot agree on who speaks: then the first of each
    node does.
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    details = "".join(traceback.format_exception(error))
    error = refused_in_words(in_words(error, f"rank {rank}"))
    first = local_rank == 0 and not isinstance(error, RefusedByFirstRank)
    message, status = _explain(error, details), _status(error, run.folder)
    if run.watchdog is not None:
        message, status, first = _agree(run.watchdog, error, message, status)
    if first:
        kept = _keep(details, run.folder.path if run.folder else None, rank)
        say_last(f"\n{program}: error: {message}{kept}")
    sys.stdout.flush()
    if run.watchdog is not None:
        run.watchdog.linger()
    elif not first:
        # the launcher ends all when one ends: leave the first the time to speak
        time.sleep(LOST_CONNECTION_WAIT_S)
    # not sys.exit: the collectives of other ranks must not hold this one
    os._exit(status)


def _status(error: BaseException, folder: RunFolder | None) -> int:
    """The exit status, which says whether the same start may succeed later."""
    if isinstance(error, OutOfMemory):
        return BAD_INPUT if error.repeats else FAILED
    # a run that has trained had the right names: a file system may be gone for a while
    has_trained = folder is not None and (folder.checkpoints / LATEST).exists()
    wrong = isinstance(error, ValueError) or (_is_wrong_name(error) and not has_trained)
    return BAD_INPUT if wrong else FAILED


def _is_wrong_name(error: BaseException) -> bool:
    """Is it the name of a file, or of a model on the hub? A download that failed is raised from its
    error, and may succeed later."""
    if not (isinstance(error, WRONG_NAME) or getattr(error, "errno", None) in WRONG_NAME_ERRNOS):
        return False
    answer = getattr(getattr(error.__cause__, "response", None), "status_code", None)
    return error.__cause__ is None or answer in NOT_ON_THE_HUB


def _explain(error: BaseException, details: str) -> str:
    explained = isinstance(error, EXPLAINED)
    return plain(str(error) if explained else f"unexpected {type(error).__name__}\n{details}")


def _agree(
    watchdog: Watchdog, error: BaseException, message: str, status: int
) -> tuple[str, int, bool]:
    """What to say, the exit status, and whether this rank says it. A lost connection is the echo of
    a failure elsewhere: look for that."""
    if not isinstance(error, EXPLAINED):
        wait_s = LOST_CONNECTION_WAIT_S if _from_a_collective(error) else 0.0
        cause, other_status = watchdog.cause_elsewhere(wait_s)
        if other_status is not None:
            return message, other_status, False
        message = cause or message
    return message, status, watchdog.claim_failure(message, status)


def _from_a_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(
        "distributed" in frame.filename or "deepspeed/comm" in frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
    )


def _keep(details: str, run_folder: Path | None, rank: int) -> str:
    if run_folder is None or not run_folder.is_dir():
        return ""
    path = run_folder / f"error-rank{rank}.txt"
    try:
        write_text(path, redact(plain(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{details}")))
    except OSError:  # a full disk may be what went wrong
        return ""
    return f"\n(traceback: {path})"
