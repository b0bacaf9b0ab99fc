"""What a process that `launched.start` forks does: lead the ranks of a script, each a fork of
it."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent


def lead(
    commands: list[list[str]], environments: list[dict[str, str]], output: Path, folder: Path
) -> NoReturn:
    """A rank for each command and environment, in a session of their own and in this folder. Nobody
    ends them, as a launcher does: each has to leave by itself.

    Ends with the first status that is not 0.
    """
    os.setsid()
    os.chdir(folder)
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for argv, environment in zip(commands, environments):
        if os.fork() == 0:
            _become(argv, environment)
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in environments]
    os._exit(next(filter(None, statuses), 0) % 256)


def _become(argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the script as Python would, and what Python does behind it."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = argv
    sys.path[0] = str(ROOT)
    sys.stdout.reconfigure(write_through=True)  # as under the launcher
    status: Any = 1
    try:
        runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):  # sys.exit(message)
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(status)
