"""One training step drawn as a timeline: a track per stage or rank, a bar per instruction, blank
where the rank is idle. The report, `launch.tools.plan`, `launch.tools.timeline` and W&B all show
this figure.

A track is a sequence of spans: an instruction, its micro-batch, start and end in seconds. `WAIT`
spans lie inside of instructions. Predicted and measured steps have the same form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from common.files import read_json, write_text
from data.modules import import_recorded
from engine.batch import BranchBatch, describe_schedule
from engine.planning.costs import CostModel, cost_model_from_json, with_trainable
from engine.planning.simulator import Simulation, simulate
from engine.topology import Stage, StageGraph
from engine.trace import COMPUTE, WAIT, Span
from launch.reporting.parts import escaped
from launch.terminal.tables import Table, duration

# instruction -> label in the legend, colour (Okabe and Ito's: distinguishable by the colour-blind)
COMPUTING = {
    "EmbedPass": ("forward for the embeddings", "#A6D8F0"),
    "ForwardPass": ("forward", "#56B4E9"),
    "ReplayPass": ("forward again", "#0072B2"),
    "BackwardPass": ("backward", "#E69F00"),
    "ComputeLoss": ("loss", "#CC79A7"),
    "ReduceGrads": ("gradients averaged", "#009E73"),
    "OptimizerStep": ("optimizer step", "#6B4C9A"),
}
MOVED, WAITED, IDLE = "send, receive, load", "waits for other ranks", "idle"
# label -> colour, in the order in which bars are stacked
COLOURS = {
    **dict(COMPUTING.values()),
    WAITED: "#C9C9C9",
    MOVED: "#8A8A8A",
    IDLE: "rgba(128,128,128,0.18)",
}
MOST_RANKS = 16  # of a timeline; beyond that the first replica of each stage stands for the others
MOST_BARS = 3000  # of a figure; beyond that neighbours of one kind are merged
TRACK_PIXELS = 38
NARROW = {"narrow": 170}  # pixels more on a phone, where the legend is a column

Spans = Sequence[Span]


@dataclass(frozen=True)
class Timeline:
    """One step, from 0 to `step_s` seconds; `tracks` from top to bottom. `how`: the layout, the
    schedule and the device that it is predicted for."""

    title: str
    tracks: Mapping[str, Spans]
    step_s: float
    how: str = ""

    @property
    def heading(self) -> str:
        """The title with the duration of the step."""
        return "; ".join(filter(None, (f"{self.title}: {duration(self.step_s)} a step", self.how)))


def label_of(instruction: str) -> str:
    """What the legend calls an instruction."""
    if instruction == WAIT:
        return WAITED
    return COMPUTING[instruction][0] if instruction in COMPUTING else MOVED


def busy_s(spans: Spans) -> float:
    """Seconds in which a rank computed; the same sum as `engine.trace.Recorder.busy_s`."""
    found = seconds_by_label(spans)
    return sum(found[label] for label, _ in COMPUTING.values())


def idle_fraction(spans: Spans, step_s: float) -> float:
    """Share of a step in which a rank did not compute."""
    return max(0.0, 1 - busy_s(spans) / step_s) if step_s else 0.0


def seconds_by_label(spans: Spans, step_s: float = 0.0) -> dict[str, float]:
    """Seconds of a step by label; they add up to `step_s`. What a rank waits within an instruction
    is taken from that instruction."""
    found = dict.fromkeys(COLOURS, 0.0)
    computing = sorted((s for s in spans if s.name in COMPUTE), key=lambda s: s.start_s)
    starts = [span.start_s for span in computing]
    for span in spans:
        if span.name != WAIT:
            found[label_of(span.name)] += span.seconds
            continue
        around = computing[max(0, bisect_right(starts, span.start_s) - 1)] if computing else span
        # a wait within a send or a receive is counted as such already
        if around.start_s <= span.start_s and span.end_s <= around.end_s and around is not span:
            found[WAITED] += span.seconds
            found[label_of(around.name)] -= span.seconds
    found = {label: max(0.0, value) for label, value in found.items()}
    return found | {IDLE: max(0.0, step_s - sum(found.values()))}


# -- predicted and measured steps


def measured_step(
    step: int, stages: Mapping[str, Sequence[int]], ranks: Mapping[int, Spans]
) -> Timeline:
    """A traced step: a track per rank, stage by stage; of a large world one rank of each stage.
    `stages`: the ranks of each stage; `ranks`: the spans of each rank."""
    most = None if len(ranks) <= MOST_RANKS else 1
    tracks = {
        f"{name}, rank {rank}": ranks[rank]
        for name, members in stages.items()
        for rank in [rank for rank in members if rank in ranks][:most]
    }
    step_s = max((span.end_s for spans in ranks.values() for span in spans), default=0.0)
    return Timeline(f"Measured, step {step:,}", tracks, step_s)


def predicted_step(
    graph: StageGraph,
    batches: Mapping[str, BranchBatch],
    schedule: str,
    costs: CostModel,
) -> Timeline:
    """What the simulator says of a step: a track per stage."""
    simulation = simulate(graph, batches, schedule, costs, timeline=True)
    how = f"{describe_graph(graph)}, {describe_schedule(schedule, batches)}, {costs.machine.name}"
    names = [f"{stage.name} ×{stage.replicas}" for stage in graph.stages]
    tracks = dict(zip(names, _simulated_spans(graph, simulation)))
    return Timeline("Predicted", tracks, simulation.step_s, how)


def prediction(run_dir: Path, record: Mapping[str, Any]) -> tuple[Timeline | None, str | None]:
    """The prediction for a run's own stages, batches and schedule; or None, and why there is none.
    `record`: the run's config.json. Errors: ValueError for a cost model that cannot be read."""
    file = run_dir / "costs.json"
    if not file.is_file():
        return None, (
            f"{run_dir}: no costs.json, so nothing is predicted; train with "
            '"branches": {"layout": "auto"}, which measures the costs'
        )
    try:
        # modules of the user's own register their schedules when they are imported
        import_recorded(record.get("options", {}).get("import_module"), run_dir)
    except ValueError as error:
        flags_of = f"flags of python -m launch.tools.timeline {run_dir}"
        return None, f"{run_dir}: nothing is predicted: {error} ({flags_of})"
    graph = StageGraph.from_record(record["stage_graph"])
    batches = {branch: BranchBatch(**batch) for branch, batch in record["batches"].items()}
    costs = with_trainable(cost_model_from_json(read_json(file)), record["trainable"])
    return predicted_step(graph, batches, record["schedule"], costs), None


def describe_graph(graph: StageGraph) -> str:
    """Short, for titles: `fork, image 3 × 4 | text 1 × 2 (stages × replicas)`."""
    lines: dict[str, Sequence[Stage]] = {"": graph.stages}
    if graph.layout != "merged":
        lines = {b: [s for s in graph.stages if b in s.layers] for b in graph.branches}
    words = [f"{b} {len(own)} × {own[0].replicas}".strip() for b, own in lines.items()]
    return f"{graph.layout}, {' | '.join(words)} (stages × replicas)"


def _simulated_spans(graph: StageGraph, simulation: Simulation) -> list[list[Span]]:
    """The spans of each stage, with what it waits inside of the loss and the optimizer step."""
    spans: list[list[Span]] = [[] for _ in graph.stages]
    for span in simulation.spans:
        spans[span.stage_id].append(Span(span.name, span.micro_batch, span.start_s, span.end_s))
    last = [stage.stage_id for stage in graph.last_stages]
    for name, members in (("ComputeLoss", last), ("OptimizerStep", range(len(spans)))):
        # the n-th such instruction of all members begins when the last of them is there
        for together in list(zip(*([s for s in spans[m] if s.name == name] for m in members))):
            begins_s = max(span.start_s for span in together)
            for member, span in zip(members, together):
                spans[member].append(Span(WAIT, span.micro_batch, span.start_s, begins_s))
    for own, stage in zip(spans, simulation.stages):
        # the simulator does not count the exchange of embeddings, with which a loss begins, as work
        losses = [span for span in own if span.name == "ComputeLoss"]
        waits = [span for span in own if span.name == WAIT]
        exchange_s = max(0.0, busy_s(own) - stage.busy_s) / max(1, len(losses))
        for loss, wait in zip(losses, waits):
            end_s = min(loss.end_s, wait.end_s + exchange_s)
            own.append(Span(WAIT, loss.micro_batch, wait.end_s, end_s))
    return spans


# -- the table and the figure


def timeline_table(timelines: Sequence[Timeline]) -> Table:
    """What each track computes and how long it is idle."""
    rows = [
        [f"{each.title}, {track}", duration(busy_s(spans)), f"{share:.0%}"]
        for each in timelines
        for track, spans in each.tracks.items()
        for share in [idle_fraction(spans, each.step_s)]
    ]
    return Table("; ".join(each.heading for each in timelines), ["", "busy", "idle"], rows)


def timeline_figure(timelines: Sequence[Timeline], most_bars: int = MOST_BARS) -> go.Figure:
    """The steps below one another, with one time axis."""
    rows = [len(each.tracks) for each in timelines]
    figure = make_subplots(
        rows=len(timelines),
        cols=1,
        shared_xaxes=True,
        row_heights=rows,
        subplot_titles=[escaped(each.heading) for each in timelines],
        vertical_spacing=min(0.35, 46 / (TRACK_PIXELS * sum(rows) + 100)),
    )
    figure.update_layout(
        template="none",
        height=130 + 50 * len(rows) + TRACK_PIXELS * sum(rows),
        margin={"l": 12, "r": 12, "t": 30, "b": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        barmode="overlay",
        bargap=0.2,
        hovermode="closest",
        # a micro-batch's number is shown where its bar has room for it
        uniformtext={"minsize": 8, "mode": "hide"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 0, "x": 0, "yref": "container"},
        meta=NARROW,
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    for row, timeline in enumerate(timelines, 1):
        for label, bars in _bars_by_label(timeline, most_bars).items():
            known = any(trace.name == label for trace in figure.data)
            figure.add_trace(_bars(label, bars, in_legend=not known), row=row, col=1)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(
        range=[0, max(each.step_s for each in timelines)],
        tickformat="~s",
        ticksuffix="s",
        zeroline=False,
        automargin=True,
    )
    figure.update_xaxes(title={"text": "time since the step began", "standoff": 6}, row=len(rows))
    return figure


def save_timelines(path: Path, timelines: Sequence[Timeline]) -> None:
    """A page of its own that needs no network; its camera button saves an image. Raises OSError
    where it cannot be written."""
    figure = timeline_figure(timelines)
    figure.update_layout(template="plotly_white", paper_bgcolor="white")
    image = {"toImageButtonOptions": {"format": "png", "scale": 2, "filename": path.stem}}
    write_text(path, figure.to_html(config={"displaylogo": False, **image}))


def _bars(label: str, bars: Sequence[tuple[str, Span]], in_legend: bool) -> go.Bar:
    """All bars of one kind. `bars`: their tracks and spans."""
    numbers = ["" if span.micro_batch is None else escaped(span.micro_batch) for _, span in bars]
    return go.Bar(
        y=[track for track, _ in bars],
        base=[span.start_s for _, span in bars],
        x=[span.seconds for _, span in bars],
        orientation="h",
        name=label,
        legendgroup=label,
        showlegend=in_legend,
        # what moves data is a line in the middle of the track
        width=0.24 if label == MOVED else 0.8,
        marker={"color": COLOURS[label], "line": {"width": 0}},
        text=None if label in (MOVED, WAITED) else numbers,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        customdata=[[f"{escaped(span.name)} {number}"] for (_, span), number in zip(bars, numbers)],
        hovertemplate="%{customdata[0]}: %{x:.4s}s from %{base:.4s}s<extra></extra>",
    )


def _bars_by_label(timeline: Timeline, most: int) -> dict[str, list[tuple[str, Span]]]:
    """(track, span) by label: moves first and waits last, so that they lie below and above the
    rest."""
    # what is merged cannot be seen apart on a screen
    crowded = sum(map(len, timeline.tracks.values())) > most
    gap_s = timeline.step_s / most * len(timeline.tracks) if crowded else -1.0
    found: dict[str, list[tuple[str, Span]]] = {label: [] for label in (MOVED, *COLOURS)}
    for name, spans in timeline.tracks.items():
        track = f"{escaped(name)}<br>{idle_fraction(spans, timeline.step_s):.0%} idle"
        for label in found:
            own = [span for span in spans if label_of(span.name) == label]
            found[label] += [(track, span) for span in _merged(own, gap_s)]
    order = [MOVED, *dict(COMPUTING.values()), WAITED]
    return {label: found[label] for label in order if found[label]}


def _merged(spans: Spans, gap_s: float) -> Iterator[Span]:
    """Spans of one kind, those with smaller gaps than `gap_s` as one."""
    last: Span | None = None
    for span in sorted(spans, key=lambda each: each.start_s):
        if last is not None and span.start_s - last.end_s < gap_s:
            last = Span(last.name, None, last.start_s, max(last.end_s, span.end_s))
        else:
            yield from () if last is None else (last,)
            last = span
    yield from () if last is None else (last,)
