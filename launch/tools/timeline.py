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
from statistics import mean
from typing import Any

if __name__ == "__main__":
    # DeepSpeed need not look for a GPU, nor warn that there is none
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.files import read_json
from common.output import outlive_output, run_program
from data.modules import add_trust_flags, import_named
from engine.trace import Span
from launch.reporting.timelines import (
    Timeline,
    busy_s,
    idle_fraction,
    measured_step,
    prediction,
    save_timelines,
)
from launch.run.report import duration, show
from launch.run.trace_file import read_trace
from launch.tools.plan import OneLineParser, page_path

Ranks = Mapping[int, Sequence[Span]]  # the spans of each rank


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m launch.tools.timeline",
        description="Draw a traced step of a run, predicted above measured on one time axis, and "
        "print both step times.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    parser.add_argument(
        "--step", type=int, metavar="N", help="one of those in trace.json (default: the newest)"
    )
    parser.add_argument(
        "--output",
        type=page_path,
        metavar="FILE",
        help="the page (default: RUN_DIR/timeline.html)",
    )
    add_trust_flags(parser)
    return parser


def main(arguments: argparse.Namespace) -> None:
    import_named(arguments)
    run_dir: Path = arguments.run_dir
    record = _record(run_dir / "config.json")
    step, ranks = choose_step(run_dir / "trace.json", arguments.step)
    stages = {stage["name"]: stage["ranks"] for stage in record["stage_graph"]}
    measured = measured_step(step, stages, ranks)
    predicted, reason = prediction(run_dir, record)
    show(step_table(step, stages, ranks, measured.step_s, predicted))
    if reason:
        print(reason)
    output = arguments.output or run_dir / "timeline.html"
    save_timelines(output, [each for each in (predicted, measured) if each is not None])
    print(output)


def choose_step(trace: Path, wish: int | None) -> tuple[int, Ranks]:
    """The step asked for, or the newest, and its spans by rank."""
    if not trace.is_file():
        raise FileNotFoundError(
            f"{trace}: no such file; the run has traced no step yet, or was started with "
            "--trace-every 0"
        )
    try:
        steps = read_trace(trace)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{trace}: not a trace of train.py: {error}") from error
    if not steps:
        raise ValueError(f"{trace}: holds no step; train on, or with a smaller --trace-every")
    step = max(steps) if wish is None else wish
    if step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise ValueError(f"--step {wish}: not in {trace}; there are: {known}")
    return step, steps[step]


def step_table(
    step: int,
    stages: Mapping[str, Sequence[int]],
    ranks: Ranks,
    step_s: float,
    predicted: Timeline | None,
) -> Table:
    """The step and each stage, predicted and measured; a stage's measured numbers are the mean of
    its replicas."""
    table = Table(title=f"Step {step}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("busy, predicted", "busy, measured", "idle, predicted", "idle, measured"):
        table.add_column(name, justify="right", no_wrap=True)
    of_stages = list(predicted.tracks.values()) if predicted else []
    for place, (name, members) in enumerate(stages.items()):
        busy, idle = ["–", "–"], ["–", "–"]
        if predicted:
            busy[0] = duration(busy_s(of_stages[place]))
            idle[0] = f"{idle_fraction(of_stages[place], predicted.step_s):.0%}"
        if own := [ranks[rank] for rank in members if rank in ranks]:
            busy[1] = duration(mean(map(busy_s, own)))
            idle[1] = f"{mean(idle_fraction(spans, step_s) for spans in own):.0%}"
        table.add_row(name, *busy, *idle)
    table.add_section()
    expected = duration(predicted.step_s) if predicted else "–"
    table.add_row("step, all of it", expected, duration(step_s), "", "", style="bold")
    return table


def _record(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the folder of a run of train.py")
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}; give the folder of a run") from error


def run(arguments: list[str] | None = None) -> int:
    """The exit status; what is missing, and what to do, is one line on stderr."""
    parsed = make_parser().parse_args(arguments)
    return run_program("python -m launch.tools.timeline", lambda: main(parsed))


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
