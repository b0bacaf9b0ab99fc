"""Charts of numbers over the steps of one or several runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from launch.reporting.columns import Columns
from launch.reporting.parts import Chart, escaped
from launch.terminal.tables import Table

# Okabe and Ito's colours, which the colour-blind can distinguish, in an order and in shades that
# are readable on white and on near-black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#999999")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MOST_POINTS = 800  # of a curve; more are thinned
MOST_CURVES = 64  # of a run in a chart: on thousands of ranks, the first
TABLE_ROWS = 12
FEW = 40  # steps; fewer are drawn as points, and a curve of fewer is its own trend


@dataclass(frozen=True)
class Axis:
    """The vertical axis of a chart. `words`: a value in tables; `layout`: of plotly's axis."""

    title: str
    words: Callable[[float], str] = "{:.4g}".format
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lines:
    """A chart to be drawn of the columns of runs.

    `keys`: the name of a curve and the key of its column. A `*` in both stands for the same text:
    {"*": "idle/*"} draws one curve for each stage. `smooth`: draw a trend over each curve; `scale`:
    factor of all values; `idle`: no chart where every value is this one, which says nothing.
    """

    name: str
    title: str
    axis: Axis
    keys: Mapping[str, str]
    smooth: bool = False
    scale: float = 1.0
    wide: bool = False
    idle: float | None = None
    note: str = ""

    def curves(self, columns: Columns) -> dict[str, np.ndarray]:
        """The values of each curve by its name, where there are any."""
        found: dict[str, np.ndarray] = {}
        for name, pattern in self.keys.items():
            before, star, after = pattern.partition("*")
            for key in columns:
                if key == pattern or star and key.startswith(before) and key.endswith(after):
                    own = key[len(before) : len(key) - len(after)]
                    if np.isfinite(values := columns[key] * self.scale).any():
                        found[name.replace("*", own)] = values
        return dict(list(found.items())[:MOST_CURVES])


def line_charts(
    charts: Iterable[Lines], runs: Mapping[str, Columns], marks: Sequence[tuple[float, str]] = ()
) -> list[Chart]:
    """The charts for which a run has numbers. `runs`: columns by the label of the run; `marks`:
    steps with a vertical line, and its text.

    One run has a colour per curve; of several runs each has a colour, and each curve a dash.
    """
    found = []
    for chart in charts:
        curves = {run: chart.curves(columns) for run, columns in runs.items()}
        values = [y[np.isfinite(y)] for own in curves.values() for y in own.values()]
        if any(chart.idle is None or (y != chart.idle).any() for y in values):
            found.append(_line_chart(chart, runs, curves, marks))
    return found


def new_figure(x_title: str, y_title: str) -> go.Figure:
    """A figure without colours of its own: the page sets those of text, grid and background."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=330,
        margin={"l": 12, "r": 12, "t": 12, "b": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "traceorder": "normal"},
    )
    title = {"standoff": 8}
    figure.update_xaxes(title={"text": x_title, **title}, automargin=True, zeroline=False)
    figure.update_yaxes(title={"text": y_title, **title}, automargin=True, zeroline=False)
    return figure


def thin(y: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Indices, ascending, of at most about `most` of the values [n] that keep the shape of the
    curve: the first and the last, and the smallest and the largest of each bucket. A bucket without
    a finite value keeps one, so that the gap is seen."""
    if len(y) <= most:
        return np.arange(len(y))
    kept = [0, len(y) - 1]
    for bucket in np.array_split(np.arange(len(y)), most // 2):
        finite = bucket[np.isfinite(y[bucket])]
        if len(finite):
            kept += [finite[y[finite].argmin()], finite[y[finite].argmax()]]
        else:
            kept.append(bucket[0])
    return np.unique(kept)


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


def _line_chart(
    chart: Lines,
    runs: Mapping[str, Columns],
    curves: Mapping[str, Mapping[str, np.ndarray]],
    marks: Sequence[tuple[float, str]],
) -> Chart:
    several, axis = len(runs) > 1, chart.axis
    names = list(dict.fromkeys(name for own in curves.values() for name in own))
    colours = dict(zip(runs if several else names, itertools.cycle(COLOURS)))
    dashes = dict(zip(names, itertools.cycle(DASHES if several else ("solid",))))
    figure = new_figure("step", axis.title)
    columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for run, own in curves.items():
        for name, y in own.items():
            label = f"{run}: {name}" if several else name
            columns[label] = x, y = runs[run]["step"], y
            line = {"color": colours[run if several else name], "dash": dashes[name]}
            for values, opacity, width in _layers(y, chart.smooth):
                kept = thin(values)
                figure.add_scatter(
                    x=x[kept],
                    y=values[kept].astype(np.float32),
                    name=escaped(label if opacity == 1 else f"{label}, each step"),
                    legendgroup=escaped(run if several else name),
                    showlegend=opacity == 1 and not several,
                    mode="lines" if len(y) >= FEW else "lines+markers",
                    line={**line, "width": width},
                    opacity=opacity,
                    connectgaps=False,
                )
    if several:
        # the legend has a colour for each run, which hides its curves, and a dash for each name
        legend = [(run, colours[run], "solid") for run in runs if curves[run]]
        legend += [(name, "#888888", dashes[name]) for name in names if len(names) > 1]
        for name, colour, dash in legend:
            figure.add_scatter(
                x=[None],
                y=[None],
                name=escaped(name),
                legendgroup=escaped(name),
                mode="lines",
                line={"color": colour, "dash": dash, "width": 2},
            )
    figure.update_layout(showlegend=several or len(names) > 1)
    figure.update_yaxes(**axis.layout)
    for step, text in marks:
        grey = {"color": "#888888", "width": 1, "dash": "dot"}
        figure.add_vline(x=step, line=grey, annotation_text=text)
    return Chart(
        name=chart.name,
        title=chart.title,
        figure=figure,
        table=_table(chart.title, columns, axis),
        summary=" ".join(_in_words(name, x, y, axis) for name, (x, y) in list(columns.items())[:6]),
        note=chart.note,
        wide=chart.wide,
    )


def _layers(y: np.ndarray, smooth: bool) -> list[tuple[np.ndarray, float, float]]:
    """(values, opacity, width) of what is drawn of a curve: if it is smoothed, its trend on top."""
    return [(y, 0.3, 1.0), (trend(y), 1, 2.2)] if smooth and len(y) >= FEW else [(y, 1, 1.6)]


def _table(title: str, columns: Mapping[str, tuple[np.ndarray, np.ndarray]], axis: Axis) -> Table:
    """Each curve at some steps that the longest of them has."""
    steps = max((x for x, _ in columns.values()), key=len)
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, TABLE_ROWS).round().astype(int))]
    rows = []
    for step in steps.tolist():
        at = [y[x == step][-1:] for x, y in columns.values()]
        cells = [axis.words(float(y[0])) if np.isfinite(y).any() else "–" for y in at]
        rows.append([f"{step:,.0f}", *cells])
    return Table(title, ["step", *columns], rows)


def _in_words(name: str, x: np.ndarray, y: np.ndarray, axis: Axis) -> str:
    first, last = np.flatnonzero(np.isfinite(y))[[0, -1]]
    return (
        f"{name}: {axis.words(float(y[first]))} at step {x[first]:,.0f}, "
        f"{axis.words(float(y[last]))} at step {x[last]:,.0f}."
    )
