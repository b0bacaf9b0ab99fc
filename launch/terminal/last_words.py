"""The message of a failure, as the last thing on the screen.

DeepSpeed's launcher writes lines of its own when a rank has failed, after everything that the rank
can say. In a terminal the message therefore comes twice: at once, and again by a small process that
waits until the launcher has ended. In a log file it stands once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from common.shell import is_launcher

MOST_LINES = 12  # of a message that comes again
# Forks, so that it is no descendant of the rank: the launcher would wait for it, and then kill it.
# argv: the launcher's process, seconds to wait at most, the message.
REPEAT = """
import os, select, sys
if os.fork():
    os._exit(0)
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [], float(sys.argv[2]))
except OSError:
    pass  # it has ended already
os.write(2, os.fsencode(sys.argv[3]))
"""
LONGEST_S = 120.0  # the launcher waits up to 30 s for each process that does not end


def say_last(message: str) -> None:
    """To stderr now and, in a terminal under DeepSpeed's launcher, again when that has ended."""
    print(message, file=sys.stderr, flush=True)
    launcher = os.getppid()
    if sys.stderr.isatty() and hasattr(os, "pidfd_open") and is_launcher(launcher):
        # no memory for a process, or a word that no command line can hold: it has been said
        with contextlib.suppress(OSError, ValueError):
            words = [str(launcher), str(LONGEST_S), f"\n{shortened(message.strip())}\n"]
            # -I -S: nothing is imported that takes time
            starting = [sys.executable, "-I", "-S", "-c", REPEAT, *words]
            subprocess.run(starting, start_new_session=True, stdin=subprocess.DEVNULL, check=False)


def shortened(message: str) -> str:
    lines = message.splitlines()
    if len(lines) <= MOST_LINES:
        return message
    # the last line says where the traceback is kept
    return "\n".join([*lines[: MOST_LINES - 2], "… (in full above)", lines[-1]])
