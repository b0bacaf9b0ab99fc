"""Where the time of a step goes: the traced steps of a run, by stage and as timelines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from engine.trace import COMPUTE, WAIT, Span
from launch.reporting.charts import Chart, Table, escaped, new_figure
from launch.reporting.reading import RunData
from launch.run.trace_file import FIRST_STEP, read_trace
from launch.tools.drawing import (
    COLOURS,
    MOVES,
    SpanLike,
    Timeline,
    busy_s,
    idle_fraction,
    seconds,
)
from launch.tools.timeline import measured_tracks, prediction

WAITED, MOVED, IDLE = "waits for other ranks", "send, receive, load", "idle"
EXTRA_COLOURS = {WAITED: "#C9C9C9", MOVED: MOVES[1], IDLE: "rgba(128,128,128,0.18)"}
LABELS = (*(label for label, _ in COLOURS.values()), WAITED, MOVED, IDLE)  # as they are stacked
MOST_BARS = 3000  # of the timelines of a page; neighbours of one kind are merged beyond that
TRACK_PIXELS = 34
NARROW = {"narrow": 170}  # pixels more on a phone, where the legend is a column


@dataclass(frozen=True)
class Traced:
    """step -> rank -> spans, and the ranks of each stage among them."""

    steps: Mapping[int, Mapping[int, Sequence[Span]]]
    stages: Mapping[str, Sequence[int]]


def read_traced(run: RunData) -> tuple[Traced | None, str | None]:
    """(the traced steps, None), or (None, why there are none)."""
    file = run.path / "trace.json"
    if not file.is_file():
        return None, "No step has been traced yet, or the run was started with --trace-every 0."
    try:
        steps = read_trace(file)
    except (ValueError, KeyError, TypeError) as error:
        return None, f"trace.json cannot be read ({error})."
    if not steps:
        return None, "trace.json holds no step yet."
    ranks = steps[max(steps)]
    graph = run.config.get("stage_graph", ())
    stages = {stage["name"]: [r for r in stage["ranks"] if r in ranks] for stage in graph}
    return Traced(steps, {name: members for name, members in stages.items() if members}), None


def time_by_stage(run: RunData, traced: Traced, name: str) -> Chart:
    """A bar per stage of one step: what its ranks do, the mean of the traced steps."""
    # the first traced step still chooses kernels; it counts only where it is the only one
    steps = [step for step in traced.steps if step != FIRST_STEP] or list(traced.steps)
    parts = {
        stage: _mean(
            [
                breakdown(traced.steps[step][rank], _step_s(traced.steps[step]))
                for step in steps
                for rank in members
                if rank in traced.steps[step]
            ]
        )
        for stage, members in traced.stages.items()
    }
    labels = [label for label in LABELS if any(label in own for own in parts.values())]
    figure = new_figure("seconds of a step", "")
    for label in labels:
        colour = _colour(label)
        figure.add_bar(
            y=[escaped(stage) for stage in parts],
            x=[own.get(label, 0.0) for own in parts.values()],
            name=label,
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{x:.4s}s",
        )
    figure.update_layout(
        barmode="stack",
        hovermode="y unified",
        height=150 + TRACK_PIXELS * len(parts),
        meta=NARROW,
    )
    figure.update_xaxes(tickformat="~s", ticksuffix="s")
    figure.update_yaxes(autorange="reversed", title=None)
    table = Table(
        "Seconds of a step by stage",
        ["stage", *labels],
        [
            [stage, *(seconds(own.get(label, 0.0)) for label in labels)]
            for stage, own in parts.items()
        ],
    )
    said = " ".join(
        f"{stage}: idle or waiting {waited_share(own):.0%} of the step."
        for stage, own in parts.items()
    )
    counted = f"Mean of {len(steps)} traced step{'s' * (len(steps) > 1)} and of the replicas of each stage."
    return Chart(
        name=name,
        title="Where the time of a step goes",
        figure=figure,
        summary=said,
        table=table,
        note=counted,
        wide=True,
    )


def waited_share(parts: Mapping[str, float]) -> float:
    """Of what `breakdown` returns: the share in which nothing is computed."""
    waited = sum(parts.get(label, 0.0) for label in (WAITED, MOVED, IDLE))
    return waited / max(1e-12, sum(parts.values()))


def breakdown(spans: Sequence[Span], step_s: float) -> dict[str, float]:
    """Seconds of a step by label; they add up to `step_s`. What a rank waits within an instruction
    is taken from that instruction."""
    computing = sorted((s for s in spans if s.name in COMPUTE), key=lambda s: s.start_s)
    starts = [span.start_s for span in computing]
    found: dict[str, float] = {}
    for span in spans:
        if span.name in COMPUTE:
            label = COLOURS[span.name][0]
        elif span.name != WAIT:
            label = MOVED
        else:
            around = bisect_right(starts, span.start_s) - 1
            if around < 0 or span.end_s > computing[around].end_s:
                continue  # within a send or receive, which is a wait already
            label = WAITED
            of = COLOURS[computing[around].name][0]
            found[of] = found.get(of, 0.0) - span.seconds
        found[label] = found.get(label, 0.0) + span.seconds
    parts = {label: max(0.0, found[label]) for label in LABELS if label in found}
    return {**parts, IDLE: max(0.0, step_s - sum(parts.values()))}


def timeline_chart(run: RunData, traced: Traced, name: str, most_bars: int = MOST_BARS) -> Chart:
    """The newest traced step, with the prediction above it where the run has one. More than
    `most_bars` are merged with their neighbours."""
    step = max(traced.steps)
    ranks = traced.steps[step]
    measured = Timeline(
        f"Measured, step {step:,}", measured_tracks(traced.stages, ranks), _step_s(ranks)
    )
    try:
        predicted, reason = prediction(run.path, run.config)
    except (ValueError, KeyError, TypeError, OSError) as error:
        predicted, reason = None, f"Nothing is predicted: {error}"
    timelines = [measured] if predicted is None else [predicted, measured]
    titles = [
        f"{'Predicted' if each is predicted else each.title}: {seconds(each.step_s)} a step"
        for each in timelines
    ]
    table = Table(
        f"Step {step:,}",
        ["", "track", "busy", "idle"],
        [
            [
                "predicted" if each is predicted else "measured",
                track,
                seconds(busy_s(spans)),
                f"{idle_fraction(spans, each.step_s):.0%}",
            ]
            for each in timelines
            for track, spans in each.tracks.items()
        ],
    )
    title = "One step, predicted above measured" if predicted else "One measured step"
    note = "" if reason is None else reason.replace(f"{run.path}: ", "")
    figure = _timeline_figure(timelines, titles, most_bars)
    return Chart(
        name=name,
        title=title,
        figure=figure,
        summary="; ".join(titles) + ".",
        table=table,
        note=note,
        wide=True,
    )


def _timeline_figure(
    timelines: Sequence[Timeline], titles: Sequence[str], most_bars: int
) -> go.Figure:
    rows = [len(each.tracks) for each in timelines]
    figure = make_subplots(
        rows=len(timelines),
        cols=1,
        shared_xaxes=True,
        row_heights=rows,
        subplot_titles=titles,
        vertical_spacing=min(0.35, 46 / (TRACK_PIXELS * sum(rows) + 100)),
    )
    plain = new_figure("", "").layout
    figure.update_layout(
        template="none",
        height=130 + 50 * len(rows) + TRACK_PIXELS * sum(rows),
        margin={"l": 12, "r": 12, "t": 30, "b": 12},
        paper_bgcolor=plain.paper_bgcolor,
        plot_bgcolor=plain.plot_bgcolor,
        uirevision="kept",
        barmode="overlay",
        meta=NARROW,
        hovermode="closest",
        bargap=0.2,
        legend={"orientation": "h", "yanchor": "bottom", "y": 0, "x": 0, "yref": "container"},
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    shown: set[str] = set()
    for row, timeline in enumerate(timelines, 1):
        for label, bars in _bars(timeline, most_bars).items():
            _add_bars(figure, row, label, bars, label not in shown)
            shown.add(label)
        figure.update_yaxes(autorange="reversed", automargin=True, row=row, col=1)
    end_s = max(timeline.step_s for timeline in timelines)
    figure.update_xaxes(
        range=[0, end_s], tickformat="~s", ticksuffix="s", zeroline=False, automargin=True
    )
    figure.update_xaxes(title={"text": "time since the step began", "standoff": 6}, row=len(rows))
    return figure


def _add_bars(
    figure: go.Figure, row: int, label: str, bars: Sequence[tuple[str, SpanLike]], first: bool
) -> None:
    moves = label == MOVED
    figure.add_bar(
        y=[escaped(track) for track, _ in bars],
        base=[span.start_s for _, span in bars],
        x=[span.end_s - span.start_s for _, span in bars],
        customdata=[
            [span.name if span.micro_batch is None else f"{span.name} {span.micro_batch}"]
            for _, span in bars
        ],
        orientation="h",
        name=label,
        legendgroup=label,
        showlegend=first,
        width=0.24 if moves else 0.8,
        marker={"color": _colour(label), "line": {"width": 0}},
        hovertemplate="%{customdata[0]}: %{x:.4s}s from %{base:.4s}s<extra></extra>",
        row=row,
        col=1,
    )


def _bars(timeline: Timeline, most: int) -> dict[str, list[tuple[str, SpanLike]]]:
    """By label, moves first and waits last, so that these lie below and above the rest."""
    grain_s = timeline.step_s / most
    number = sum(map(len, timeline.tracks.values()))
    found: dict[str, list[tuple[str, SpanLike]]] = {}
    for track, spans in timeline.tracks.items():
        by_label: dict[str, list[SpanLike]] = {}
        for span in sorted(spans, key=lambda each: each.start_s):
            by_label.setdefault(_label(span.name), []).append(span)
        for label, own in by_label.items():
            own = _merged(own, grain_s * len(timeline.tracks)) if number > most else own
            found.setdefault(label, []).extend((track, span) for span in own)
    order = [MOVED, *(label for label, _ in COLOURS.values()), WAITED]
    return {label: found[label] for label in order if label in found}


def _merged(spans: Sequence[SpanLike], gap_s: float) -> list[SpanLike]:
    """Spans of one kind whose gaps cannot be seen become one."""
    merged: list[SpanLike] = []
    for span in spans:
        if merged and span.start_s - merged[-1].end_s < gap_s:
            last = merged.pop()
            span = Span(last.name, None, last.start_s, max(last.end_s, span.end_s))
        merged.append(span)
    return merged


def _label(name: str) -> str:
    return WAITED if name == WAIT else COLOURS[name][0] if name in COLOURS else MOVED


def _colour(label: str) -> str:
    known = {own: colour for own, colour in COLOURS.values()}
    return known.get(label) or EXTRA_COLOURS[label]


def _mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    labels = [label for label in LABELS if any(label in own for own in parts)]
    return {label: mean(own.get(label, 0.0) for own in parts) for label in labels}


def _step_s(ranks: Mapping[int, Sequence[Span]]) -> float:
    return max((span.end_s for spans in ranks.values() for span in spans), default=0.0)
