"""What the balance of a run did: a plot over its steps, a table of how it began and how it
ended, and every decision with its reason.

    python -m launch.tools.balance RUN_DIR                        the plot is RUN_DIR/balance.png
    python -m launch.tools.balance RUN_DIR --output balance.svg
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # DeepSpeed need not look for a GPU, nor warn that there is none

from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.output import outlive_output, run_program
from data.batching.load_control import BRANCH_OF
from launch.run.report import duration as seconds
from launch.run.report import show
from launch.run.step_line import rates
from launch.tools.balance_plot import Decision, Line, save_balance_plot
from launch.tools.plan import OneLineParser, figure_path


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m launch.tools.balance",
        description="Draw what the balance of a run did, step by step, and print how it began, how it ended, and what was decided on the way.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run of train.py")
    parser.add_argument(
        "--output", type=figure_path, metavar="FILE", help="the plot (default: RUN_DIR/balance.png)"
    )
    return parser


def main(arguments: argparse.Namespace) -> None:
    run_dir: Path = arguments.run_dir
    lines, measurements = read_steps(run_dir), read_measurements(run_dir)
    made = decisions(measurements)
    show(balance_table(lines, measurements))
    if not measurements:
        print(
            f"{run_dir}: no balance.jsonl, so nothing is known of predictions and decisions; train "
            "with "
            '"balance": {"strategy": "deal"} or "feed" and an "interval" above 0 (ds_configs/README.md)'
        )
    else:
        show(decision_table(made) if made else "nothing was moved")
        refits = [
            str(record["step"])
            for record in measurements
            if record["next"] and "costs refitted" in record["next"]["reason"]
        ]
        print(
            f"costs refitted in {len(refits)} of {len(measurements)} "
            f"measurements{', after steps ' * bool(refits)}{', '.join(refits)}"
        )
    output = arguments.output or run_dir / "balance.png"
    title = f"{run_dir.resolve().name}: the balance over steps {lines[0]['step']} to {lines[-1]['step']}"
    save_balance_plot(output, title, lines, measurements, made)
    print(output)


# -- what the run wrote down


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of steps of metrics.jsonl, with the rates that follow from them. Errors:
    FileNotFoundError, ValueError."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; give the folder of a run of train.py")
    lines = [line | rates(line) for line in _json_lines(file) if "step_s" in line]
    if not lines:
        raise ValueError(f"{file}: has no step yet; train on")
    return lines


def read_measurements(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of balance.jsonl; none where there is no such file."""
    file = run_dir / "balance.jsonl"
    return _json_lines(file) if file.is_file() else []


def _json_lines(file: Path) -> list[dict[str, Any]]:
    """A last line without its end is being written, and passed over."""
    found = []
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{file}:{number}: not valid JSON: {error}; remove the line"
            ) from error
    return found


def decisions(measurements: Sequence[Line]) -> list[Decision]:
    """Feed rates and weights of data sets that were moved, and what was said of feed rates
    otherwise; that holds from the next step on."""
    made = []
    for record in measurements:
        if record["reason"]:
            moved = record["next"] is not None and record["next"]["reason"].startswith(
                record["reason"]
            )
            made.append(
                Decision(
                    record["step"],
                    (record["next"]["from_step"] if moved else record["step"]) + 1,
                    record["reason"],
                )
            )
        if "mix" in record:
            made.append(
                Decision(
                    record["step"],
                    record["mix"]["from_step"] + 1,
                    record["mix"]["reason"],
                )
            )
    return made


# -- the tables


def balance_table(lines: Sequence[Line], measurements: Sequence[Line]) -> Table:
    """Medians over the first and the last tenth of the steps, and of the measurements."""
    table = Table(
        title=f"Balance, steps {lines[0]['step']} to {lines[-1]['step']}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for name in ("first tenth", "last tenth"):
        table.add_column(name, justify="right", no_wrap=True)

    def row(name: str, values: Sequence[float], words: Callable[[float], str]) -> None:
        if not values:  # of a branch that the run does not have
            return
        tenth = max(1, len(values) // 10)
        table.add_row(name, words(median(values[:tenth])), words(median(values[-tenth:])))

    def column(key: str) -> list[float]:
        return [line[key] for line in lines if key in line]

    for stage in [key.removeprefix("idle/") for key in lines[-1] if key.startswith("idle/")]:
        row(f"{stage}, idle", column(f"idle/{stage}"), "{:.0%}".format)
        row(f"{stage}, busy", column(f"busy_s/{stage}"), seconds)
    table.add_section()
    row("step", column("step_s"), seconds)
    row("images per second", column("images_per_s"), "{:,.0f}".format)
    row("text tokens per second", column("text_tokens_per_s"), "{:,.0f}".format)
    row("padding share of the texts", column("padding_share/text"), "{:.0%}".format)
    for rate in BRANCH_OF:
        if rate in lines[-1]:
            row(rate, column(rate), "{:g}".format)
    for branch in dict.fromkeys(
        branch for record in measurements for branch in record["measured_s"]
    ):
        seen = [
            (record["predicted_s"][branch], record["measured_s"][branch])
            for record in measurements
            if record["measured_s"].get(branch)
        ]
        row(
            f"{branch}, predicted / measured",
            [predicted / measured for predicted, measured in seen],
            "{:.2f}".format,
        )
    return table


def decision_table(made: Sequence[Decision]) -> Table:
    table = Table(title="Decisions", title_justify="left", box=SIMPLE_HEAD)
    for name, justify in (
        ("", "right"),
        ("after step", "right"),
        ("from step", "right"),
        ("what, and why", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=justify == "right")
    for number, decision in enumerate(made, 1):
        table.add_row(str(number), str(decision.step), str(decision.holds_from), decision.reason)
    return table


def run(arguments: list[str] | None = None) -> int:
    """The exit status; what is missing, and what to do, is one line on stderr."""
    return run_program(
        "python -m launch.tools.balance", lambda: main(make_parser().parse_args(arguments))
    )


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
