"""Timelines as plots: a track per stage, a bar per instruction, blank where it waits.

A track's name maps to its spans. A span has a name (of the instruction), a micro-batch, a start and
an end in seconds; `WAIT` spans lie inside instructions. Both `engine.planning.simulator` and
`engine.trace` make such spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.files import replacing
from engine.planning.costs import CostModel
from engine.planning.planner import Candidate, describe_schedule
from engine.planning.simulator import Simulation, simulate
from engine.topology import StageGraph
from engine.trace import COMPUTE, WAIT, Span

FORMATS = (".png", ".pdf", ".svg")
DOTS_PER_INCH = 120
WIDTH_INCHES = 15
TRACK_INCHES = 0.42
NUMBER_POINTS = 7  # size of the micro-batch numbers
BAR_HEIGHT, LINE_HEIGHT = 0.78, 0.16  # of a track; what moves data is a line at its foot

# instruction -> what the legend calls it, colour (Okabe and Ito's, distinguishable also by the
# colour-blind)
COLOURS = {
    "EmbedPass": ("forward for the embeddings", "#A6D8F0"),
    "ForwardPass": ("forward", "#56B4E9"),
    "ReplayPass": ("forward again", "#0072B2"),
    "BackwardPass": ("backward", "#E69F00"),
    "BackwardInputs": ("gradients of inputs", "#F0E442"),
    "BackwardWeights": ("gradients of weights", "#D55E00"),
    "ComputeLoss": ("loss", "#CC79A7"),
    "ReduceGrads": ("gradients averaged", "#009E73"),
    "OptimizerStep": ("optimizer step", "#6B4C9A"),
}
MOVES = ("send, receive, load, and the wait for it", "#8A8A8A")  # every other instruction
HATCHED = {"facecolors": "white", "edgecolors": "#AAAAAA", "linewidths": 0.3, "hatch": "//////"}
DARK = {"ReplayPass", "BackwardWeights", "ReduceGrads", "OptimizerStep"}  # white numbers on these


class SpanLike(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def micro_batch(self) -> int | None: ...

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


Tracks = Mapping[str, Sequence[SpanLike]]


@dataclass(frozen=True)
class Timeline:
    """One step, from 0 to `step_s` seconds; `tracks` from top to bottom."""

    title: str
    tracks: Tracks
    step_s: float


def busy_s(spans: Sequence[SpanLike]) -> float:
    """Seconds in which a rank computed; the same sum as `engine.trace.Recorder.busy_s`."""
    seconds = dict.fromkeys((*COMPUTE, WAIT), 0.0)
    for span in spans:
        if span.name in seconds:
            seconds[span.name] += span.end_s - span.start_s
    return sum(seconds[name] for name in COMPUTE) - seconds[WAIT]


def idle_fraction(spans: Sequence[SpanLike], step_s: float) -> float:
    return max(0.0, 1 - busy_s(spans) / step_s) if step_s else 0.0


# -- what the simulator says, as tracks


def predicted_timeline(title: str, graph: StageGraph, simulation: Simulation) -> Timeline:
    """A track per stage of a simulation made with `timeline=True`. What a stage waits inside the
    loss and the optimizer step is marked."""
    spans: list[list[Span]] = [[] for _ in graph.stages]
    for span in simulation.spans:
        spans[span.stage_id].append(Span(span.name, span.micro_batch, span.start_s, span.end_s))
    tails = [stage.stage_id for stage in graph.tails]
    for name, members in (("ComputeLoss", tails), ("OptimizerStep", range(len(spans)))):
        for meeting in list(
            zip(*([span for span in spans[stage] if span.name == name] for stage in members))
        ):
            together_s = max(span.start_s for span in meeting)
            for stage, span in zip(members, meeting):
                spans[stage].append(Span(WAIT, span.micro_batch, span.start_s, together_s))
    for own, result in zip(spans, simulation.stages):
        _mark_exchange(own, busy_s(own) - result.busy_s)
    names = [f"{stage.name} ×{stage.replicas}" for stage in graph.stages]
    return Timeline(title, dict(zip(names, spans)), simulation.step_s)


def _mark_exchange(spans: list[Span], exchange_s: float) -> None:
    """Of the loss, the simulator does not count the exchange of embeddings as work: it comes first,
    `exchange_s` in all."""
    losses = [span for span in spans if span.name == "ComputeLoss"]
    meetings = [span for span in spans if span.name == WAIT][: len(losses)]
    for loss, meeting in zip(losses, meetings):
        spans.append(
            Span(
                WAIT,
                loss.micro_batch,
                meeting.end_s,
                min(loss.end_s, meeting.end_s + max(0.0, exchange_s) / len(losses)),
            )
        )


# -- plots


def save_plan_png(path: Path, candidate: Candidate, costs: CostModel) -> None:
    """The timeline of one step of a candidate. Raises OSError when the file cannot be written."""
    simulation = simulate(
        candidate.graph, candidate.batches, candidate.schedule, costs, timeline=True
    )
    schedule = describe_schedule(candidate.schedule, candidate.batches)
    title = f"{shape(candidate.graph)}, {schedule}, {candidate.graph.world_size} ranks, {costs.machine.name}"
    _save(path, [predicted_timeline(f"Predicted: {title}", candidate.graph, simulation)])


def save_comparison_png(path: Path, predicted: Timeline | None, measured: Timeline) -> None:
    """Predicted above measured, with one time axis; without a prediction, measured alone. Raises
    OSError when it cannot be written."""
    _save(path, [measured] if predicted is None else [predicted, measured])


def shape(graph: StageGraph) -> str:
    """Short, for titles: `fork, image 3 × 4 | text 1 × 2 (stages × replicas)`."""
    if graph.layout == "merged":
        lines = f"{len(graph.stages)} × {graph.stages[0].replicas}"
    else:
        own = {
            branch: [stage for stage in graph.stages if branch in stage.layers]
            for branch in graph.branches
        }
        lines = " | ".join(
            f"{branch} {len(stages)} × {stages[0].replicas}" for branch, stages in own.items()
        )
    return f"{graph.layout}, {lines} (stages × replicas)"


def _save(path: Path, timelines: Sequence[Timeline]) -> None:
    heights = [TRACK_INCHES * len(timeline.tracks) + 0.9 for timeline in timelines]
    figure = Figure(
        figsize=(WIDTH_INCHES, sum(heights) + 0.6), dpi=DOTS_PER_INCH, layout="constrained"
    )
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=heights)[
        :, 0
    ]
    end_s = max(timeline.step_s for timeline in timelines)
    for axes, timeline in zip(panels, timelines):
        draw_timeline(
            axes,
            timeline.tracks,
            timeline.step_s,
            timeline.title,
            end_s,
            time_label=axes is panels[-1],
        )
    drawn = {
        span.name for timeline in timelines for spans in timeline.tracks.values() for span in spans
    }
    figure.legend(
        handles=_legend(drawn),
        loc="outside lower center",
        ncols=9,
        fontsize=8,
        frameon=False,
        handlelength=1.4,
    )
    with replacing(path) as beside:
        figure.savefig(beside, format=path.suffix[1:] or "png")


def draw_timeline(
    axes: Axes,
    tracks: Tracks,
    step_s: float,
    title: str = "",
    end_s: float | None = None,
    time_label: bool = True,
) -> None:
    """One horizontal track per entry of `tracks`, the first on top, with the idle share of `step_s`
    at its right.

    `end_s`: where the time axis ends (default: `step_s`); give two drawings the same and they can
    be compared.
    """
    end_s = max(end_s or step_s, 1e-9)
    scale, unit = (1.0, "s") if end_s >= 1 else (1e3, "ms")
    axes.set_xlim(0, end_s * scale)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_yticks(range(len(tracks)), list(tracks), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, labelbottom=time_label)
    axes.set_xlabel(f"time since the step began ({unit})" if time_label else "", fontsize=9)
    axes.set_title(
        f"{title}: {seconds(step_s)} a step" if title else f"{seconds(step_s)} a step",
        fontsize=10,
        loc="left",
    )
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if step_s < 0.995 * end_s:
        axes.axvline(step_s * scale, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)))
    for row, spans in enumerate(tracks.values()):
        _draw_track(axes, row, spans, scale)
        axes.annotate(
            f"{idle_fraction(spans, step_s):.0%} idle",
            (1.0, row),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _draw_track(axes: Axes, row: int, spans: Sequence[SpanLike], scale: float) -> None:
    by_kind: dict[str, list[SpanLike]] = {}
    for span in spans:
        by_kind.setdefault(span.name, []).append(span)
    top = row - BAR_HEIGHT / 2
    moves = [
        span
        for name, own in by_kind.items()
        if name != WAIT and name not in COLOURS
        for span in own
    ]
    _bars(
        axes,
        moves,
        scale,
        row + BAR_HEIGHT / 2 - LINE_HEIGHT,
        LINE_HEIGHT,
        facecolors=MOVES[1],
        edgecolors="none",
    )
    for name in COLOURS.keys() & by_kind.keys():
        points = (
            median(span.end_s - span.start_s for span in by_kind[name])
            * scale
            * _points_per_unit(axes)
        )
        edge = {"edgecolors": "white", "linewidths": 0.5} if points > 4 else {"edgecolors": "none"}
        _bars(axes, by_kind[name], scale, top, BAR_HEIGHT, facecolors=COLOURS[name][1], **edge)
        if name != "ComputeLoss":
            _numbers(
                axes,
                row,
                by_kind[name],
                scale=scale,
                points=points,
                colour="white" if name in DARK else "black",
            )
    _bars(axes, by_kind.get(WAIT, ()), scale, top, BAR_HEIGHT, **HATCHED)


def _bars(
    axes: Axes, spans: Sequence[SpanLike], scale: float, top: float, height: float, **style: Any
) -> None:
    """All spans of one kind of a track as one collection: thousands are drawn at once."""
    corners = [
        [
            (s.start_s * scale, top),
            (s.end_s * scale, top),
            (s.end_s * scale, top + height),
            (s.start_s * scale, top + height),
        ]
        for s in spans
        if s.end_s > s.start_s
    ]
    if corners:
        axes.add_collection(PolyCollection(corners, **style), autolim=False)


def _numbers(
    axes: Axes, row: int, spans: Sequence[SpanLike], scale: float, points: float, colour: str
) -> None:
    """Micro-batch numbers, where the bars are wide enough for the longest: all of a kind, or none.
    `points`: how wide they are."""
    labels = [str(span.micro_batch) for span in spans if span.micro_batch is not None]
    if labels and points > NUMBER_POINTS * (0.3 + 0.6 * max(map(len, labels))):
        for span in spans:
            if span.micro_batch is not None:
                middle = (span.start_s + span.end_s) / 2 * scale
                axes.text(
                    middle,
                    row,
                    str(span.micro_batch),
                    ha="center",
                    va="center",
                    fontsize=NUMBER_POINTS,
                    color=colour,
                    clip_on=True,
                )


def _points_per_unit(axes: Axes) -> float:
    """Of the time axis, 72 to the inch; near enough before the margins are known."""
    low, high = axes.get_xlim()
    return 0.9 * 72 * axes.figure.get_size_inches()[0] / (high - low)


def _legend(drawn: set[str]) -> list[Patch]:
    handles = [
        Patch(facecolor=colour, label=label)
        for name, (label, colour) in COLOURS.items()
        if name in drawn
    ]
    if WAIT in drawn:
        handles.append(
            Patch(
                facecolor="white",
                edgecolor="#AAAAAA",
                hatch="//////",
                label="waits for other ranks",
            )
        )
    if drawn - {WAIT} - COLOURS.keys():
        handles.append(Patch(facecolor=MOVES[1], label=MOVES[0]))
    return handles
