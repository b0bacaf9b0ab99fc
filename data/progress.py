"""Progress of work that takes long: a bar in a terminal, a plain line every 20 s in a log file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from tqdm import tqdm

DELAY_S = 2.0  # what is done sooner shows nothing
TERMINAL_S, LOG_S = 0.2, 20.0  # between two updates


def interval_s(file: TextIO | None = None) -> float:
    """Seconds between two updates: often for a person, seldom for a log file. `file`: where they
    go (default: stderr)."""
    return TERMINAL_S if (file or sys.stderr).isatty() else LOG_S


class Bar(tqdm):
    """tqdm's bar, which in a log file writes lines instead of overwriting one line."""

    # tqdm's own is a semaphore of the system, which a worker that is ended leaves behind, and
    # Python warns of. Bars of several processes do not share a terminal here.
    _lock = threading.RLock()

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        if file.isatty():
            return tqdm.status_printer(file)

        def write_line(text: str) -> None:
            if text.strip():
                file.write(f"{text.strip()}\n")
                file.flush()

        return write_line

    def moveto(self, n: int) -> None:
        """Move to the line of another bar, which a log file has no way to."""
        if self.fp.isatty():
            super().moveto(n)


def progress_bar(
    items: Iterable[Any] | None = None,
    what: str = "",
    unit: str = "it",
    total: float | None = None,
    shown: bool = True,
    scaled: bool = False,
) -> Bar:
    """A bar over `items`, or one that is moved by `update`. It says `what` is done, how much of
    `total` is left in `unit`s, and how long that takes. `scaled`: numbers as 12.3k.
    `shown`: False on all ranks but one."""
    return Bar(
        items,
        desc=what,
        unit=unit,
        unit_scale=scaled,
        total=total,
        delay=DELAY_S,
        mininterval=interval_s(),
        dynamic_ncols=True,
        leave=False,
        disable=not shown,
    )
