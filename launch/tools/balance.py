"""How the balance of a run began and ended, and every decision with its reason. The run's report
draws the same over the steps.

    python -m launch.tools.balance RUN_DIR
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
from launch.reporting.balance import balance_tables
from launch.reporting.reading import read_folder
from launch.terminal.tables import REPORT, show
from launch.tools.command import run_tool


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m launch.tools.balance",
        description="Print how the balance of a run began, how it ended, and what was decided on "
        f"the way. RUN_DIR/{REPORT} draws it over the steps.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    parser.add_argument("--output", help=argparse.SUPPRESS)
    return parser


def main(arguments: argparse.Namespace) -> None:
    run_dir: Path = arguments.run_dir
    if arguments.output is not None:
        raise ValueError(
            f"--output {arguments.output}: the balance is not drawn apart any more; its curves are "
            f"in the report: python -m launch.tools.report {run_dir} --out FILE.html"
        )
    run = read_folder(run_dir, run_dir.name)
    if not run.steps:
        raise ValueError(f"{run_dir / 'metrics.jsonl'}: has no step yet; train on")
    for table in balance_tables(run):
        show(table.for_terminal())
    for notice in run.notices:
        show(notice)
    print(f"over the steps: {run_dir / REPORT}, python -m launch.tools.report {run_dir} writes it")


def run(arguments: list[str] | None = None) -> int:
    return run_tool(make_parser(), main, arguments)


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
