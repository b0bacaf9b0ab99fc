"""How the programs of this folder end."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run_tool(name: str, work: Callable[[], None]) -> int:
    """The exit status of `python -m launch.tools.NAME`. A ValueError or OSError, which says what is
    missing and what to do, is one line on stderr and status 2."""
    try:
        work()
    except (ValueError, OSError) as error:
        print(f"python -m launch.tools.{name}: error: {error}", file=sys.stderr)
        return 2
    return 0
