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
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    # DeepSpeed need not look for a GPU, nor warn that there is none
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.files import replacing
from common.output import outlive_output, run_program
from data.batching.load_control import BRANCH_OF
from launch.run.report import duration as seconds
from launch.run.report import show
from launch.run.step_line import rates
from launch.tools.plan import OneLineParser, figure_path

WIDTH_INCHES, PANEL_INCHES, LINE_INCHES, DOTS_PER_INCH = 13, 1.5, 0.19, 120
MOST_POINTS = 100  # of a curve; of more steps, medians
MOST_LISTED = 12  # decisions under the panels
LETTERS_PER_LINE = 180
# Colour (Okabe and Ito's), kind of line and mark: curves differ in all three, so that a black and
# white print can be read.
STYLES = [
    ("#000000", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#0072B2", ":", "^"),
    ("#009E73", "-.", "D"),
]
DECIDED = {"color": "#555555", "linewidth": 0.9, "linestyle": (0, (1, 2)), "zorder": 0}
REFITTED = {"linestyle": "", "marker": "|", "markersize": 8, "color": "black"}

Line = Mapping[str, Any]  # of metrics.jsonl or balance.jsonl
Points = tuple[Sequence[float], Sequence[float]]  # steps, values


@dataclass(frozen=True)
class Decision:
    """What a measurement led to: after `step` steps it was decided, from step `holds_from` on it
    holds."""

    step: int
    holds_from: int
    reason: str


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m launch.tools.balance",
        description="Draw what the balance of a run did, step by step, and print how it began, how "
        "it ended, and what was decided on the way.",
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
    if measurements:
        show(decision_table(made) if made else "nothing was moved")
        refits = [str(record["step"]) for record in measurements if _refitted(record)]
        steps = f", after steps {', '.join(refits)}" if refits else ""
        print(f"costs refitted in {len(refits)} of {len(measurements)} measurements{steps}")
    else:
        print(
            f"{run_dir}: no balance.jsonl, so nothing is known of predictions and decisions; train "
            'with "balance": {"strategy": "deal"} or "feed" and an "interval" above 0 '
            "(ds_configs/README.md)"
        )
    output = arguments.output or run_dir / "balance.png"
    steps = f"steps {lines[0]['step']} to {lines[-1]['step']}"
    save_plot(output, f"{run_dir.resolve().name}: the balance over {steps}", lines, measurements)
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
    return list(_json_lines(file)) if file.is_file() else []


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """A last line without its end is being written, and passed over."""
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{file}:{number}: not valid JSON: {error}; remove the line"
            ) from error


def decisions(measurements: Sequence[Line]) -> list[Decision]:
    """Feed rates and weights of data sets that were moved, and what was said of feed rates
    otherwise; that holds from the next step on."""
    made = []
    for record in measurements:
        step, reason, following = record["step"], record["reason"], record["next"]
        if reason:
            moved = following is not None and following["reason"].startswith(reason)
            made.append(Decision(step, (following["from_step"] if moved else step) + 1, reason))
        if "mix" in record:
            mix = record["mix"]
            made.append(Decision(step, mix["from_step"] + 1, mix["reason"]))
    return made


def _refitted(record: Line) -> bool:
    return record["next"] is not None and "costs refitted" in record["next"]["reason"]


def _measured_branches(measurements: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(b for record in measurements for b in record["measured_s"]))


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
        if values:  # else of a branch that the run does not have
            tenth = max(1, len(values) // 10)
            table.add_row(name, words(median(values[:tenth])), words(median(values[-tenth:])))

    def column(key: str) -> list[float]:
        return [line[key] for line in lines if key in line]

    for stage in _stages(lines):
        row(f"{stage}, idle", column(f"idle/{stage}"), "{:.0%}".format)
        row(f"{stage}, busy", column(f"busy_s/{stage}"), seconds)
    table.add_section()
    row("step", column("step_s"), seconds)
    row("images per second", column("images_per_s"), "{:,.0f}".format)
    row("text tokens per second", column("text_tokens_per_s"), "{:,.0f}".format)
    row("padding share of the texts", column("padding_share/text"), "{:.0%}".format)
    for rate in BRANCH_OF:
        row(rate, column(rate), "{:g}".format)
    for branch in _measured_branches(measurements):
        ratios = [
            record["predicted_s"][branch] / record["measured_s"][branch]
            for record in measurements
            if record["measured_s"].get(branch)
        ]
        row(f"{branch}, predicted / measured", ratios, "{:.2f}".format)
    return table


def decision_table(made: Sequence[Decision]) -> Table:
    table = Table(title="Decisions", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "after step", "from step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what, and why")
    for number, decision in enumerate(made, 1):
        table.add_row(str(number), str(decision.step), str(decision.holds_from), decision.reason)
    return table


def _stages(lines: Sequence[Line]) -> list[str]:
    return [key.removeprefix("idle/") for key in lines[-1] if key.startswith("idle/")]


# -- the plot


@dataclass(frozen=True)
class Panel:
    """`curves` by name. `share`: values are shares; `stepped`: they change at once; `marked`: steps
    after which costs were refitted."""

    title: str
    curves: Mapping[str, Points]
    share: bool = False
    stepped: bool = False
    marked: Sequence[int] = ()


def save_plot(path: Path, title: str, lines: Sequence[Line], measurements: Sequence[Line]) -> None:
    """`lines`: of steps, at least one. Without `measurements` there is no panel of predicted
    seconds. Raises OSError when it cannot be written."""
    panels, made = panels_of(lines, measurements), decisions(measurements)
    words = listed(made)
    heights = [PANEL_INCHES] * len(panels) + [LINE_INCHES * (len(words) + 1)] * bool(words)
    figure = Figure((WIDTH_INCHES, sum(heights) + 0.7), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    rows = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(rows, panels):
        draw(axes, panel, last=panel is panels[-1])
        axes.set_xlim(lines[0]["step"] - 0.5, lines[-1]["step"] + 0.5)
        for decision in made:
            axes.axvline(decision.holds_from, **DECIDED)
    for number, decision in enumerate(made, 1):
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "#555555"}
        rows[0].text(
            decision.holds_from,
            0.98,
            str(number),
            transform=rows[0].get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
            bbox=box,
        )
    if words:
        rows[-1].axis("off")
        rows[-1].text(0, 1, "\n".join(words), va="top", fontsize=8, transform=rows[-1].transAxes)
    with replacing(path) as beside:
        figure.savefig(beside, format=path.suffix[1:] or "png")


def panels_of(lines: Sequence[Line], measurements: Sequence[Line]) -> list[Panel]:
    """From top to bottom."""
    idle = {stage: curve(lines, f"idle/{stage}") for stage in _stages(lines)}
    panels = [Panel("idle share of a step, by stage", idle, share=True)]
    for branch in _measured_branches(measurements):
        title = f"{branch}: seconds of the micro-batches of a measurement, predicted and measured"
        seen = [record for record in measurements if branch in record["measured_s"]]
        of = {
            kind: curve([{"step": r["step"], "s": r[f"{kind}_s"][branch]} for r in seen], "s")
            for kind in ("measured", "predicted")
        }
        panels.append(Panel(title, of, marked=[r["step"] for r in seen if _refitted(r)]))
    for title, key in (
        ("padding share of the texts", "padding_share/text"),
        ("images per second", "images_per_s"),
        ("text tokens per second", "text_tokens_per_s"),
    ):
        if key in lines[-1]:
            panels.append(Panel(title, {"": curve(lines, key)}, share=key.startswith("padding")))
    for rate in BRANCH_OF:
        known = [line for line in lines if rate in line]
        if known:
            points = [line["step"] for line in known], [line[rate] for line in known]
            panels.append(Panel(f"{rate}, a feed rate", {"": points}, stepped=True))
    return panels


def curve(lines: Sequence[Line], key: str) -> Points:
    """At most `MOST_POINTS` points: of each so many steps in a row, the step in their middle and
    the median of the values."""
    known = [line for line in lines if line.get(key) is not None]
    size = max(1, -(-len(known) // MOST_POINTS))
    starts = [*range(0, len(known), size), len(known)]
    groups = [known[start:stop] for start, stop in pairwise(starts)]
    return [median(line["step"] for line in group) for group in groups], [
        median(line[key] for line in group) for group in groups
    ]


def listed(made: Sequence[Decision]) -> list[str]:
    """Lines of text that say what the numbers in the plot mean."""
    words: list[str] = []
    for number, decision in enumerate(made[:MOST_LISTED], 1):
        text = f"{number}   step {decision.holds_from}: {decision.reason}"
        words += textwrap.wrap(text, LETTERS_PER_LINE, subsequent_indent="       ")
    if len(made) > MOST_LISTED:
        words.append(f"… and {len(made) - MOST_LISTED} more, in the table")
    return words


def draw(axes: Axes, panel: Panel, last: bool) -> None:
    """`last`: the axis of the steps is labelled."""
    for number, (name, (steps, values)) in enumerate(panel.curves.items()):
        colour, line, mark = STYLES[number % len(STYLES)]
        style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.2}
        if panel.stepped:
            axes.step(steps, values, where="mid", **style)
            whole = all(isinstance(value, int) for value in values)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=whole))
            continue
        # a second round of styles has hollow marks, about twelve along a curve
        style["markerfacecolor"] = colour if number < len(STYLES) else "white"
        every = max(1, len(steps) // 12)
        axes.plot(steps, values, label=name, marker=mark, markersize=4, markevery=every, **style)
    if panel.marked:
        foot = [0.04] * len(panel.marked)
        across = axes.get_xaxis_transform()
        axes.plot(panel.marked, foot, transform=across, label="costs refitted", **REFITTED)
    if not panel.stepped:
        most = max((value for _, values in panel.curves.values() for value in values), default=0)
        axes.set_ylim(0, 1.08 * most or 1)
    if panel.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(panel.curves) > 1:
        axes.legend(
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            fontsize=8,
            frameon=False,
            handlelength=3.5,
        )
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8, labelbottom=last)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if last:
        axes.set_xlabel("step", fontsize=9)


def run(arguments: list[str] | None = None) -> int:
    """The exit status; what is missing, and what to do, is one line on stderr."""
    return run_program(
        "python -m launch.tools.balance", lambda: main(make_parser().parse_args(arguments))
    )


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
