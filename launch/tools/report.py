"""One HTML page about a run, or about several laid over one another. It needs no network.

python -m launch.tools.report RUN_DIR                  writes RUN_DIR/report.html
python -m launch.tools.report RUN_DIR RUN_DIR2 …       compares, writes RUN_DIR/comparison.html
python -m launch.tools.report RUN_DIR --out FILE       writes FILE
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # DeepSpeed need not look for a GPU, nor warn that there is none

from common.output import only_shows, outlive_output, run_program
from launch.tools.plan import OneLineParser

INSTALL = "the report needs plotly; install it with: pip install 'plotly>=6'"
REPORT, COMPARISON = "report.html", "comparison.html"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m launch.tools.report",
        description="Write one HTML page about a run: what was trained, curves, queries, times and "
        "memory. Several runs are laid over one another.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
    )
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="folders of runs of train.py"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page (default: RUN_DIR/{REPORT}; of several runs, {COMPARISON} in the first)",
    )
    parser.add_argument(
        "--live",
        type=int,
        metavar="PORT",
        help="instead: serve the page on 127.0.0.1, refreshed while the runs go on; Ctrl-C ends it",
    )
    return parser


def main(arguments: argparse.Namespace) -> None:
    refuse(arguments)
    page = imported()
    if arguments.live is not None:
        from launch.reporting.serving import serve

        serve(arguments.run_dirs, arguments.live)
        return
    output = arguments.out or default_output(arguments.run_dirs)
    page.write_report(arguments.run_dirs, output)
    print(output)


def default_output(run_dirs: list[Path]) -> Path:
    return run_dirs[0] / (REPORT if len(run_dirs) == 1 else COMPARISON)


def refuse(arguments: argparse.Namespace) -> None:
    """What cannot work, before the runs are read."""
    for run_dir in arguments.run_dirs:
        if not run_dir.is_dir():
            raise FileNotFoundError(f"{run_dir}: no such folder; give the folder of a run")
    if len({run_dir.resolve() for run_dir in arguments.run_dirs}) < len(arguments.run_dirs):
        raise ValueError("a run is given twice; give each folder once")
    if arguments.live is not None and not 0 <= arguments.live < 2**16:
        raise ValueError(f"--live {arguments.live}: give a port from 1 to 65535, or 0 for any")
    if arguments.live is not None and arguments.out:
        raise ValueError("--live writes no file; give --out without it")
    if arguments.out and (arguments.out.is_dir() or not arguments.out.absolute().parent.is_dir()):
        raise ValueError(f"--out {arguments.out}: give the name of a file in a folder that exists")


def write_at_end(run_dir: Path) -> Path | None:
    """The report of a run that ends, or None: its training does not depend on it, so that a failure
    is one warning."""
    output = default_output([run_dir])
    with only_shows(f"{output} was not written"):
        imported().write_report([run_dir], output)
        return output
    return None


def imported() -> ModuleType:
    """`launch.reporting.page`. Errors: ValueError where plotly is not installed."""
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise ValueError(INSTALL) from error
    from launch.reporting import page

    return page


def run(arguments: list[str] | None = None) -> int:
    """The exit status; what is missing, and what to do, is one line on stderr."""
    return run_program(
        "python -m launch.tools.report", lambda: main(make_parser().parse_args(arguments))
    )


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
