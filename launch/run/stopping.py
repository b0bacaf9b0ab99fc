"""Asked to end early: by a signal, by a file, or because the hours are over. The step under way is
finished and a checkpoint saved."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

from common.files import remove

# EX_TEMPFAIL of sysexits.h: not done, and the same command goes on. Schedulers and supervise.sh
# tell it from a failure.
STOPPED = 75
# Ctrl-C, a scheduler's end, Slurm's warning before it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# a terminal gives Ctrl-C to every process, and the launcher may pass it on: that is one Ctrl-C
SOON_S = 1.0


class StopRequest:
    """True once an end was asked for. Signals set it from now on; a second Ctrl-C ends this process
    at once. `clock`: seconds."""

    def __init__(self, max_hours: float | None = None, clock: Callable[[], float] = time.monotonic):
        self.reason: str | None = None
        self._max_hours, self._clock = max_hours, clock
        self._file: Path | None = None
        # from the start of the process: imports take a while
        self._started_at_s = psutil.Process().create_time()
        self._started_s = clock() - max(0.0, time.time() - self._started_at_s)
        self._interrupted_s: float | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)

    def watch(self, file: Path) -> None:
        """Also when `file` appears. One that was there before this process is left from another
        run."""
        self._file = file

    def forget(self) -> None:
        """The end has come: the next run is not asked by the same file."""
        if self._file is not None:
            remove(self._file, self._file.parent)

    def __bool__(self) -> bool:
        if (
            self.reason is None
            and self._max_hours is not None
            and self._clock() - self._started_s >= 3600 * self._max_hours
        ):
            self.reason = f"--max-hours {self._max_hours:g}"
        if self.reason is None and self._file is not None and self._asks(self._file):
            self.reason = str(self._file)
        return self.reason is not None

    def _asks(self, file: Path) -> bool:
        try:
            return file.stat().st_mtime >= self._started_at_s
        except OSError:
            return False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = self._clock()
            if self._interrupted_s is not None and now - self._interrupted_s > SOON_S:
                os._exit(128 + signal.SIGINT)
            self._interrupted_s = self._interrupted_s or now
        self.reason = self.reason or signal.Signals(number).name
