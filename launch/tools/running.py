"""How programs that do not train end."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run_program(name: str, work: Callable[[], object]) -> int:
    """The exit status of the program `name`. A ValueError or OSError, which says what is missing
    and what to do, is one line on stderr and status 2; Ctrl-C is status 130."""
    try:
        work()
    except (ValueError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 0
