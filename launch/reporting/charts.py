"""Charts of numbers over the steps of one or several runs: a plotly figure, a table with the same
numbers, and a sentence for who cannot see it."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from launch.reporting.reading import RunData

# Okabe and Ito's, distinguishable also by the colour-blind, in an order and in shades that are
# readable on white and on near-black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#999999")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MOST_POINTS = 800  # of a curve; more are thinned
MOST_CURVES = 64  # of a chart: of a run on thousands of ranks, the first
TABLE_ROWS = 12
SMOOTHED_FROM = 40  # steps; below, a curve is its own trend


@dataclass(frozen=True)
class Table:
    """Cells are text; `caption` says what they are."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """`name` is unique on the page; `summary` says in words what the figure shows."""

    name: str
    title: str
    figure: go.Figure
    summary: str
    table: Table
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Curve:
    """One line of a chart: `name` within its run; x and y [n], nan where nothing was measured."""

    name: str
    x: np.ndarray
    y: np.ndarray
    smooth: bool = False  # draw a trend over it
    marked: bool = False  # few points, each drawn


@dataclass(frozen=True)
class Axis:
    """Of what is drawn upwards."""

    title: str
    words: Callable[[float], str] = "{:.4g}".format
    tick_format: str | None = None
    log: bool = False
    from_zero: bool = False
    range: Sequence[float] | None = None
    lines: Sequence[tuple[float, str]] = field(default_factory=tuple)  # steps that are marked


def curves_of(
    run: RunData, keys: Mapping[str, str], smooth: bool = False, scale: float = 1.0
) -> list[Curve]:
    """A curve for each of {name: key} of the steps' lines that the run has, times `scale`."""
    x = run.steps["step"]
    return [
        Curve(name, x, run.steps[key] * scale, smooth)
        for name, key in list(keys.items())[:MOST_CURVES]
        if key in run.steps
    ]


def line_chart(
    name: str,
    title: str,
    axis: Axis,
    by_run: Sequence[tuple[RunData, Sequence[Curve]]],
    note: str = "",
    wide: bool = False,
) -> Chart | None:
    """Curves over steps. One run: a colour per curve; several: a colour per run, and a kind of line
    per curve. None where no run has a number."""
    number = len(by_run)
    known = [(run, [c for c in curves if np.isfinite(c.y).any()]) for run, curves in by_run]
    drawn = [(i, run, curves) for i, (run, curves) in enumerate(known) if curves]
    if not drawn:
        return None
    names = list(dict.fromkeys(curve.name for _, _, curves in drawn for curve in curves))
    figure = new_figure("step", axis.title)
    for place, run, curves in drawn:
        for curve in curves:
            style = _style(names.index(curve.name), place, number)
            in_legend = number == 1 or len(names) == 1
            _add_curve(figure, curve, style, in_legend, run.label if number > 1 else None)
    if number > 1 and len(names) > 1:
        _explain(figure, [(place, run.label) for place, run, _ in drawn], names)
    figure.update_layout(showlegend=number > 1 or len(names) > 1)
    _finish_axis(figure, axis)
    table = _table(title, [(run, c) for _, run, curves in drawn for c in curves], number, axis)
    return Chart(
        name=name,
        title=title,
        figure=figure,
        summary=_summary(drawn, number, axis),
        table=table,
        note=note,
        wide=wide,
    )


def new_figure(x_title: str, y_title: str) -> go.Figure:
    """Without colours of its own: the page sets those of text, grid and background by its theme."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=330,
        margin={"l": 12, "r": 12, "t": 12, "b": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified",
        uirevision="kept",  # a refreshed figure keeps its zoom
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
    )
    title = {"standoff": 8}
    figure.update_xaxes(title={"text": x_title, **title}, automargin=True, zeroline=False)
    figure.update_yaxes(title={"text": y_title, **title}, automargin=True, zeroline=False)
    return figure


def escaped(text: Any) -> str:
    """For labels, of which plotly would take tags such as <b> as markup."""
    return html.escape(str(text), quote=False)


def thin(y: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Indices, ascending, of at most about `most` of the values [n] that keep the shape of the
    curve: of each bucket the smallest and the largest, of all the first and the last. A bucket
    without a finite value keeps one, so that the gap is seen."""
    if len(y) <= most:
        return np.arange(len(y))
    kept = [0, len(y) - 1]
    for bucket in np.array_split(np.arange(len(y)), most // 2):
        values = y[bucket]
        finite = np.isfinite(values)
        if not finite.any():
            kept.append(int(bucket[0]))
            continue
        kept.append(int(bucket[np.where(finite, values, np.inf).argmin()]))
        kept.append(int(bucket[np.where(finite, values, -np.inf).argmax()]))
    return np.unique(kept)


def thin_curves(figure: go.Figure, most: int) -> None:
    """`thin` each curve of a figure."""
    for trace in figure.data:
        if trace.type == "scatter" and len(trace.y) > most:
            kept = thin(np.asarray(trace.y), most)
            trace.update(x=np.asarray(trace.x)[kept], y=np.asarray(trace.y)[kept])


def trend(y: np.ndarray) -> np.ndarray:
    """[n]: an exponential mean that forgets half within a fiftieth of the curve, without the bias
    of its start (Kingma & Ba 2015, section 3). nan values are passed over."""
    decay = 0.5 ** (1 / max(2.0, len(y) / 50))
    mean = weight = 0.0
    found = np.full(len(y), np.nan)
    for i, value in enumerate(y.tolist()):
        if math.isfinite(value):
            mean = decay * mean + (1 - decay) * value
            weight = decay * weight + (1 - decay)
            found[i] = mean / weight
    return found


# -- parts of a line chart


def _style(of_name: int, of_run: int, number: int) -> dict[str, Any]:
    if number == 1:
        return {"color": COLOURS[of_name % len(COLOURS)], "dash": "solid"}
    return {"color": COLOURS[of_run % len(COLOURS)], "dash": DASHES[of_name % len(DASHES)]}


def _add_curve(
    figure: go.Figure, curve: Curve, style: Mapping[str, Any], in_legend: bool, run: str | None
) -> None:
    label = escaped(f"{run}: {curve.name}" if run and not in_legend else run or curve.name)
    group = escaped(run or curve.name)
    smooth = curve.smooth and len(curve.y) >= SMOOTHED_FROM
    drawn = [(False, 0.3, 1.0), (True, 1.0, 2.2)] if smooth else [(False, 1.0, 1.6)]
    for is_trend, opacity, width in drawn:
        values = trend(curve.y) if is_trend else curve.y
        kept = thin(values)
        figure.add_scatter(
            x=curve.x[kept],
            y=values[kept].astype(np.float32),
            name=f"{label}, smoothed" if is_trend else label,
            legendgroup=group,
            showlegend=in_legend and opacity == 1.0,
            mode="lines+markers" if curve.marked or len(kept) == 1 else "lines",
            line={**style, "width": width},
            marker={"size": 6},
            opacity=opacity,
            connectgaps=False,
        )
    if smooth:  # the legend's word for the curve, not for its trend
        figure.data[-1].name = label
        figure.data[-2].name = f"{label}, each step"


def _explain(figure: go.Figure, runs: Sequence[tuple[int, str]], names: Sequence[str]) -> None:
    """In the legend a colour for each run, which hides its curves, and a kind of line for each
    name."""
    entries: list[tuple[str, str, str, str | None]] = [
        (label, COLOURS[place % len(COLOURS)], "solid", escaped(label)) for place, label in runs
    ]
    entries += [(name, "#888888", dash, None) for name, dash in zip(names, DASHES)]
    for label, colour, dash, group in entries:
        line = {"color": colour, "dash": dash, "width": 2}
        figure.add_scatter(
            x=[None], y=[None], name=escaped(label), legendgroup=group, mode="lines", line=line
        )


def _finish_axis(figure: go.Figure, axis: Axis) -> None:
    figure.update_yaxes(tickformat=axis.tick_format, range=axis.range)
    if axis.from_zero:
        figure.update_yaxes(rangemode="tozero")
    if axis.log:
        figure.update_yaxes(type="log", dtick=1 if axis.tick_format is None else None)
    for step, text in axis.lines:
        figure.add_vline(
            x=step, line={"color": "#888888", "width": 1, "dash": "dot"}, annotation_text=text
        )


def _table(title: str, curves: Sequence[tuple[RunData, Curve]], number: int, axis: Axis) -> Table:
    """Each curve at some steps that the longest of them has."""
    longest = max((curve for _, curve in curves), key=lambda curve: len(curve.x))
    picked = np.unique(np.linspace(0, len(longest.x) - 1, TABLE_ROWS).round().astype(int))
    steps = longest.x[picked]
    header = ["step", *(f"{r.label}: {c.name}" if number > 1 else c.name for r, c in curves)]
    return Table(
        title,
        header,
        [
            [f"{step:,.0f}", *(_at(curve, step, axis) for _, curve in curves)]
            for step in steps.tolist()
        ],
    )


def _at(curve: Curve, step: float, axis: Axis) -> str:
    found = np.flatnonzero(curve.x == step)
    value = float(curve.y[found[0]]) if len(found) else math.nan
    return axis.words(value) if math.isfinite(value) else "–"


def _summary(
    by_run: Sequence[tuple[int, RunData, Sequence[Curve]]], number: int, axis: Axis
) -> str:
    """A sentence per curve, the first six: from where to where."""
    said = []
    for _, run, curves in by_run:
        for curve in curves:
            finite = np.flatnonzero(np.isfinite(curve.y))
            first, last = finite[0], finite[-1]
            name = f"{run.label}, {curve.name}" if number > 1 else curve.name
            said.append(
                f"{name}: {axis.words(float(curve.y[first]))} at step {curve.x[first]:,.0f}, "
                f"{axis.words(float(curve.y[last]))} at step {curve.x[last]:,.0f}."
            )
    return " ".join(said[:6])
