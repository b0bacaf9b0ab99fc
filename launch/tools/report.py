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

if __name__ == "__main__":
    # DeepSpeed need not look for a GPU, nor warn that there is none
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from common.command_line import CommandParser
from common.output import outlive_output
from launch.reporting.page import write_report
from launch.terminal.tables import REPORT
from launch.tools.command import run_tool

COMPARISON = "comparison.html"
NO_SERVER = (
    "--live: reports are not served any more; open RUN_DIR/report.html, which a run writes at "
    "evaluations and which refreshes itself while the run goes on"
)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m launch.tools.report",
        description="Write one HTML page about a run: what was trained, curves, queries, times and "
        "memory. Several runs are laid over one another.",
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
    parser.add_argument("--live", nargs="?", const="", help=argparse.SUPPRESS)
    return parser


def main(arguments: argparse.Namespace) -> None:
    run_dirs: list[Path] = arguments.run_dirs
    _refuse(arguments)
    output = arguments.out or run_dirs[0] / (REPORT if len(run_dirs) == 1 else COMPARISON)
    write_report(run_dirs, output)
    print(output)


def _refuse(arguments: argparse.Namespace) -> None:
    """What cannot work, before the runs are read."""
    if arguments.live is not None:
        raise ValueError(NO_SERVER)
    for run_dir in arguments.run_dirs:
        if not run_dir.is_dir():
            raise FileNotFoundError(f"{run_dir}: no such folder; give the folder of a run")
    if len({run_dir.resolve() for run_dir in arguments.run_dirs}) < len(arguments.run_dirs):
        raise ValueError("a run is given twice; give each folder once")
    if arguments.out and (arguments.out.is_dir() or not arguments.out.absolute().parent.is_dir()):
        raise ValueError(f"--out {arguments.out}: give the name of a file in a folder that exists")


def run(arguments: list[str] | None = None) -> int:
    return run_tool(make_parser(), main, arguments)


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
