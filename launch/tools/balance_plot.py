"""What the balance of a run did, as a plot: panels over one axis of steps, what was decided
marked in all of them.

Stages and branches differ in the kind of line and in its marks as well as in colour, so that a
black and white print can be read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from common.files import replacing
from data.batching.load_control import BRANCH_OF

DOTS_PER_INCH = 120
WIDTH_INCHES, PANEL_INCHES, LINE_INCHES = 13, 1.5, 0.19
MOST_POINTS = 100  # of a curve; of more steps, medians
MOST_LISTED = 12  # decisions under the panels
LETTERS_PER_LINE = 180
# colour (Okabe and Ito's), kind of line, mark
STYLES = [
    ("#000000", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#0072B2", ":", "^"),
    ("#009E73", "-.", "D"),
]
BESIDE = {
    "loc": "center left",
    "bbox_to_anchor": (1.0, 0.5),
    "fontsize": 8,
    "frameon": False,
    "handlelength": 3.5,
}
MARKED = {"color": "#555555", "linewidth": 0.9, "linestyle": (0, (1, 2)), "zorder": 0}

Line = Mapping[str, Any]  # of metrics.jsonl or balance.jsonl
Points = tuple[Sequence[float], Sequence[float]]  # steps, values


@dataclass(frozen=True)
class Decision:
    """What a measurement led to: after `step` steps it was decided, from step `holds_from` on it
    holds."""

    step: int
    holds_from: int
    reason: str


def save_balance_plot(
    path: Path,
    title: str,
    lines: Sequence[Line],
    measurements: Sequence[Line],
    decisions: Sequence[Decision],
) -> None:
    """`lines`: of steps, at least one. Without `measurements` there is no panel of predicted
    seconds. Raises OSError when it cannot be written."""
    panels = panels_of(lines, measurements)
    words = listed(decisions)
    heights = [PANEL_INCHES] * len(panels) + ([LINE_INCHES * (len(words) + 1)] if words else [])
    figure = Figure(
        figsize=(WIDTH_INCHES, sum(heights) + 0.7), dpi=DOTS_PER_INCH, layout="constrained"
    )
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    rows = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    shown = rows[: len(panels)]
    for axes, (name, draw) in zip(shown, panels.items()):
        axes.set_title(name, fontsize=9, loc="left")
        draw(axes)
        _finish(axes, lines, last=axes is shown[-1])
    for number, decision in enumerate(decisions, 1):
        for axes in shown:
            axes.axvline(decision.holds_from, **MARKED)
        shown[0].annotate(
            str(number),
            (decision.holds_from, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, -1),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            bbox={
                "boxstyle": "round,pad=0.15",
                "facecolor": "white",
                "edgecolor": "#555555",
                "linewidth": 0.6,
            },
        )
    for axes in rows[len(panels) :]:
        axes.axis("off")
        axes.text(0, 1, "\n".join(words), va="top", ha="left", fontsize=8, transform=axes.transAxes)
    with replacing(path) as beside:
        figure.savefig(beside, format=path.suffix[1:] or "png")


def panels_of(
    lines: Sequence[Line], measurements: Sequence[Line]
) -> dict[str, Callable[[Axes], None]]:
    """Title -> what draws it, from top to bottom."""
    idle = {
        key.removeprefix("idle/"): curve(lines, key) for key in lines[-1] if key.startswith("idle/")
    }
    panels: dict[str, Callable[[Axes], None]] = {
        "idle share of a step, by stage": lambda axes: _curves(axes, idle, share=True)
    }
    for branch in dict.fromkeys(
        branch for record in measurements for branch in record["measured_s"]
    ):
        panels[
            f"{branch}: seconds of the micro-batches of a measurement, predicted and measured"
        ] = _predictions(measurements, branch)
    for name, key in (
        ("padding share of the texts", "padding_share/text"),
        ("images per second", "images_per_s"),
        ("text tokens per second", "text_tokens_per_s"),
    ):
        if key in lines[-1]:
            panels[name] = _single(lines, key, share=key.startswith("padding"))
    for rate in BRANCH_OF:
        if rate in lines[-1]:
            panels[f"{rate}, a feed rate"] = _feed_rate(lines, rate)
    return panels


def curve(lines: Sequence[Line], key: str) -> Points:
    """At most `MOST_POINTS` points: of each so many steps in a row, the step in their middle and
    the median of the values."""
    known = [line for line in lines if line.get(key) is not None]
    size = -(-len(known) // MOST_POINTS)
    groups = [known[start : start + size] for start in range(0, len(known), size)] if size else []
    return [median(line["step"] for line in group) for group in groups], [
        median(line[key] for line in group) for group in groups
    ]


def listed(decisions: Sequence[Decision]) -> list[str]:
    """Lines of text that say what the numbers in the plot mean."""
    words: list[str] = []
    for number, decision in enumerate(decisions[:MOST_LISTED], 1):
        text = f"{number}   step {decision.holds_from}: {decision.reason}"
        words += textwrap.wrap(text, LETTERS_PER_LINE, subsequent_indent="       ")
    return words + (
        [f"… and {len(decisions) - MOST_LISTED} more, in the table"]
        if len(decisions) > MOST_LISTED
        else []
    )


# -- what is in a panel


def _curves(axes: Axes, curves: Mapping[str, Points], share: bool = False) -> None:
    for number, (name, (steps, values)) in enumerate(curves.items()):
        colour, line, mark = STYLES[number % len(STYLES)]
        hollow = "white" if number >= len(STYLES) else colour  # a second round of kinds of line
        axes.plot(
            steps,
            values,
            color=colour,
            linestyle=line,
            linewidth=1.2,
            marker=mark,
            markersize=4,
            markevery=_every(steps),
            markerfacecolor=hollow,
            label=name,
        )
    axes.set_ylim(
        0, 1.08 * max((value for _, values in curves.values() for value in values), default=0) or 1
    )
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(curves) > 1:
        axes.legend(**BESIDE)


def _single(lines: Sequence[Line], key: str, share: bool) -> Callable[[Axes], None]:
    return lambda axes: _curves(axes, {"": curve(lines, key)}, share)


def _predictions(measurements: Sequence[Line], branch: str) -> Callable[[Axes], None]:
    seen = [record for record in measurements if branch in record["measured_s"]]
    refitted = [
        record["step"]
        for record in seen
        if record["next"] and "costs refitted" in record["next"]["reason"]
    ]

    def draw(axes: Axes) -> None:
        of = {
            kind: curve(
                [{"step": record["step"], "s": record[f"{kind}_s"][branch]} for record in seen],
                "s",
            )
            for kind in ("measured", "predicted")
        }
        _curves(axes, of)
        if refitted:
            axes.plot(
                refitted,
                [0.04] * len(refitted),
                linestyle="",
                marker="|",
                markersize=8,
                color="black",
                transform=axes.get_xaxis_transform(),
                label="costs refitted",
            )
            axes.legend(**BESIDE)

    return draw


def _feed_rate(lines: Sequence[Line], rate: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        known = [line for line in lines if rate in line]
        axes.step(
            [line["step"] for line in known],
            [line[rate] for line in known],
            where="mid",
            color="black",
            linewidth=1.6,
        )
        axes.yaxis.set_major_locator(
            MaxNLocator(nbins=4, integer=all(isinstance(line[rate], int) for line in known))
        )

    return draw


def _every(steps: Sequence[float]) -> int:
    """Marks on every so many points: about twelve along a curve."""
    return max(1, len(steps) // 12)


def _finish(axes: Axes, lines: Sequence[Line], last: bool) -> None:
    axes.set_xlim(lines[0]["step"] - 0.5, lines[-1]["step"] + 0.5)
    axes.tick_params(labelsize=8, labelbottom=last)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if last:
        axes.set_xlabel("step", fontsize=9)
