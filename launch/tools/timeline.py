"""What a run did in one step beside what the simulator predicted for it: a plot and a small
table.

    python -m launch.tools.timeline RUN_DIR                              the newest step of RUN_DIR/trace.json
    python -m launch.tools.timeline RUN_DIR --step 300 --output step.png
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
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # DeepSpeed need not look for a GPU, nor warn that there is none

from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.files import read_json
from common.output import outlive_output, run_program
from data.modules import add_trust_flags, import_named, import_recorded
from engine.optimizer.locking import lock_costs
from engine.planning.costs import cost_model_from_json
from engine.planning.planner import BranchBatch, describe_schedule
from engine.planning.simulator import simulate
from engine.topology import StageGraph
from engine.trace import Span
from launch.run.report import show
from launch.run.trace_file import read_trace
from launch.tools.drawing import (
    SpanLike,
    Timeline,
    busy_s,
    idle_fraction,
    predicted_timeline,
    save_comparison_png,
    seconds,
    shape,
)
from launch.tools.plan import OneLineParser, figure_path

MOST_RANKS = 16  # a track each; beyond that the first replica of each stage stands for the others


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m launch.tools.timeline",
        description="Draw a traced step of a run, predicted above measured on one time axis, and print both step times.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    parser.add_argument(
        "--step", type=int, metavar="N", help="one of those in trace.json (default: the newest)"
    )
    parser.add_argument(
        "--output",
        type=figure_path,
        metavar="FILE",
        help="the plot (default: RUN_DIR/timeline.png)",
    )
    add_trust_flags(parser)
    return parser


def main(arguments: argparse.Namespace) -> None:
    import_named(arguments)
    run_dir: Path = arguments.run_dir
    record = _read(run_dir / "config.json", "give the folder of a run of train.py")
    step, ranks = choose_step(run_dir / "trace.json", arguments.step)
    stages = {
        stage["name"]: [rank for rank in stage["ranks"] if rank in ranks]
        for stage in record["stage_graph"]
    }
    measured = Timeline(
        f"Measured: step {step}",
        measured_tracks(stages, ranks),
        max(s.end_s for spans in ranks.values() for s in spans),
    )
    predicted, reason = prediction(run_dir, record)
    show(step_table(step, stages, ranks, measured.step_s, predicted))
    if reason:
        print(reason)
    output = arguments.output or run_dir / "timeline.png"
    save_comparison_png(output, predicted, measured)
    print(output)


def choose_step(trace: Path, wish: int | None) -> tuple[int, dict[int, list[Span]]]:
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
        raise ValueError(
            f"--step {wish}: not in {trace}; there are: {', '.join(map(str, sorted(steps)))}"
        )
    return step, steps[step]


def measured_tracks(
    stages: Mapping[str, Sequence[int]], ranks: Mapping[int, Sequence[Span]]
) -> dict[str, Sequence[Span]]:
    """A track per rank, stage by stage; of a large world one rank of each stage."""
    most = None if len(ranks) <= MOST_RANKS else 1
    return {
        f"{name}, rank {rank}": ranks[rank]
        for name, members in stages.items()
        for rank in members[:most]
    }


def prediction(run_dir: Path, record: Mapping[str, Any]) -> tuple[Timeline | None, str | None]:
    """What the simulator says of the run's own stages, batches and schedule; or None, and in one
    line why not."""
    if not (run_dir / "costs.json").is_file():
        return (
            None,
            f'{run_dir}: no costs.json, so nothing is predicted; train with "branches": {{"layout": "auto"}}, which measures the costs',
        )
    if "schedule" not in record:
        return (
            None,
            f"{run_dir}: config.json names no schedule, so nothing is predicted; an older version "
            "wrote it, train again",
        )
    try:
        # which register its schedule
        import_recorded(record.get("options", {}).get("import_module"), run_dir)
    except ValueError as error:
        return None, f"{run_dir}: nothing is predicted: {error}"
    costs = cost_model_from_json(_read(run_dir / "costs.json", "train again"))
    graph = StageGraph.from_record(record["stage_graph"])
    costs = lock_costs(costs, record["trainable"])
    batches = {branch: BranchBatch(**batch) for branch, batch in record["batches"].items()}
    title = f"Predicted: {shape(graph)}, {describe_schedule(record['schedule'], batches)}, {costs.machine.name}"
    return predicted_timeline(
        title, graph, simulate(graph, batches, record["schedule"], costs, timeline=True)
    ), None


def step_table(
    step: int,
    stages: Mapping[str, Sequence[int]],
    ranks: Mapping[int, Sequence[Span]],
    step_s: float,
    predicted: Timeline | None,
) -> Table:
    """The step and each stage, predicted and measured; a stage's measured numbers are the mean of
    its replicas."""
    table = Table(title=f"Step {step}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("busy, predicted", "busy, measured", "idle, predicted", "idle, measured"):
        table.add_column(name, justify="right", no_wrap=True)
    expected: Sequence[Sequence[SpanLike] | None] = (
        list(predicted.tracks.values()) if predicted else [None] * len(stages)
    )
    for (name, members), spans in zip(stages.items(), expected):
        own = [ranks[rank] for rank in members]
        table.add_row(
            name,
            "–" if spans is None else seconds(busy_s(spans)),
            seconds(mean(map(busy_s, own))) if own else "–",
            "–"
            if predicted is None or spans is None
            else f"{idle_fraction(spans, predicted.step_s):.0%}",
            f"{mean(idle_fraction(spans, step_s) for spans in own):.0%}" if own else "–",
        )
    table.add_section()
    table.add_row(
        "step, all of it",
        seconds(predicted.step_s) if predicted else "–",
        seconds(step_s),
        "",
        "",
        style="bold",
    )
    return table


def _read(path: Path, remedy: str) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {remedy}")
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}; {remedy}") from error


def run(arguments: list[str] | None = None) -> int:
    """The exit status; what is missing, and what to do, is one line on stderr."""
    return run_program(
        "python -m launch.tools.timeline", lambda: main(make_parser().parse_args(arguments))
    )


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
