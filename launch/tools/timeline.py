"""What a run did in one step beside what the simulator predicted for it: a table and a page with
the timelines.

    python -m launch.tools.timeline RUN_DIR                   the newest step of RUN_DIR/trace.json
    python -m launch.tools.timeline RUN_DIR --step 300 --output step.html
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    # DeepSpeed need not look for a GPU, nor warn that there is none
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from common.command_line import CommandParser
from common.output import outlive_output
from data.modules import add_trust_flags, import_named
from engine.trace import Span
from launch.records import record_of_run
from launch.reporting.timelines import measured_step, prediction, save_timelines, timeline_table
from launch.run.trace_file import read_trace
from launch.terminal.tables import show
from launch.tools.command import page_path, run_tool

Ranks = Mapping[int, Sequence[Span]]  # the spans of each rank


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m launch.tools.timeline",
        description="Draw a traced step of a run, predicted above measured on one time axis, and "
        "print both step times.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    parser.add_argument(
        "--step", type=int, metavar="N", help="one of those in trace.json (default: the newest)"
    )
    parser.add_argument(
        "--output", type=page_path, metavar="FILE", help="the page (default: RUN_DIR/timeline.html)"
    )
    add_trust_flags(parser)
    return parser


def main(arguments: argparse.Namespace) -> None:
    import_named(arguments)
    run_dir: Path = arguments.run_dir
    record = record_of_run(run_dir)
    step, ranks = choose_step(run_dir / "trace.json", arguments.step)
    stages = {stage["name"]: stage["ranks"] for stage in record["stage_graph"]}
    measured = measured_step(step, stages, ranks)
    predicted, reason = prediction(run_dir, record)
    timelines = [each for each in (predicted, measured) if each is not None]
    show(timeline_table(timelines).for_terminal())
    if reason:
        print(reason)
    output = arguments.output or run_dir / "timeline.html"
    save_timelines(output, timelines)
    print(output)


def choose_step(trace: Path, wish: int | None) -> tuple[int, Ranks]:
    """The step asked for, or the newest, and its spans by rank."""
    steps = read_trace(trace)
    step = max(steps) if wish is None else wish
    if step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise ValueError(f"--step {wish}: not in {trace}; there are: {known}")
    return step, steps[step]


def run(arguments: list[str] | None = None) -> int:
    return run_tool(make_parser(), main, arguments)


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
