"""The command line of a tool: what is wrong is one line on stderr."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from common.output import run_program


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
