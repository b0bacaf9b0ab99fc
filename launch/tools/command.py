"""The command line of a tool: what is wrong is one line on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common.output import run_program


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help says the rest."""

    def __init__(self, **how: Any):
        how.setdefault(
            "formatter_class",
            lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
        )
        super().__init__(**how)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def page_path(text: str) -> Path:
    """For argparse: a page with a timeline that can be written there."""
    path = Path(text)
    if path.suffix.lower() != ".html":
        raise argparse.ArgumentTypeError(
            f"{text!r}: a timeline is a page that can be zoomed; give a name that ends in .html "
            "(the page's camera button saves a PNG)"
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path


def run_tool(
    parser: argparse.ArgumentParser,
    main: Callable[[argparse.Namespace], int | None],
    arguments: list[str] | None,
) -> int:
    """The exit status of `main`; what is missing, and what to do, is one line on stderr."""
    parsed = parser.parse_args(arguments)
    return run_program(parser.prog, lambda: main(parsed))
