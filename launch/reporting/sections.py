"""The sections of a report: which charts and tables it has, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

from launch.records import AVERAGED
from launch.reporting.balance import balance_tables, decisions, measured_columns
from launch.reporting.charts import Lines, line_charts, new_figure
from launch.reporting.columns import columns_of
from launch.reporting.panels import (
    BALANCE,
    GEOMETRIC,
    GEOMETRY,
    GEOMETRY_NOTE,
    GRADIENTS,
    LOSSES,
    MEASURED,
    MEMORY,
    RECALL,
    TIMES,
)
from launch.reporting.parts import Chart, Section, escaped
from launch.reporting.reading import RunData
from launch.reporting.tables import bad, differences, environment, queries, summary
from launch.reporting.timelines import (
    COLOURS,
    MOST_BARS,
    NARROW,
    TRACK_PIXELS,
    Timeline,
    measured_step,
    prediction,
    seconds_by_label,
    timeline_figure,
    timeline_table,
)
from launch.run.trace_file import FIRST_STEP, read_trace
from launch.terminal.tables import Table, duration, retrieval_rows
from models.metrics.retrieval import RECALL_AT

MOST_MARKS = 20  # decisions that are drawn in a chart

Runs = Sequence[RunData]


def build_sections(runs: Runs) -> list[Section]:
    """Those that have something to show."""
    steps = {run.label: run.steps for run in runs}
    share = 1 / len(runs)
    # decisions of one run are marked in its charts by their number in the table
    made = decisions(runs[0].measurements) if len(runs) == 1 else []
    marks = [(d.holds_from, str(number)) for number, d in enumerate(made[:MOST_MARKS], 1)]
    traced = partial(_traced_steps, most_bars=int(share * MOST_BARS))
    measured = {run.label: measured_columns(run) for run in runs}
    parts: dict[tuple[str, str], list[Any]] = {
        ("summary", "What was trained"): [
            *_guarded("config.json or metrics.jsonl", map, summary, runs),
            *_of_each(runs, lambda run: run.notices),
        ],
        ("differences", "How the runs differ"): _guarded("config.json", differences, runs),
        ("loss", "Loss"): line_charts(LOSSES, steps),
        ("retrieval", "Retrieval of held-out samples"): [
            *_guarded("metrics.jsonl", _of_each, runs, _retrieval_table),
            *_guarded("metrics.jsonl", _held_out_charts, runs),
        ],
        ("queries", "Queries and their answers"): _guarded(
            "queries.json", _of_each, runs, partial(queries, share=share)
        ),
        ("time", "Time"): [
            *_guarded("trace.json", _of_each, runs, traced),
            *line_charts(TIMES, steps),
        ],
        ("balance", "Balance and padding"): [
            *line_charts(BALANCE, steps, marks),
            *line_charts(MEASURED, measured),
            *_guarded("balance.jsonl", _of_each, runs, balance_tables),
        ],
        ("memory", "Memory"): line_charts([MEMORY], steps),
        ("gradients", "Gradients"): line_charts(GRADIENTS, steps),
        ("bad-samples", "Bad samples"): _guarded("bad_steps.jsonl", _of_each, runs, bad),
        ("environment", "Environment"): _guarded("config.json", _of_each, runs, environment),
    }
    return [Section(name, title, own) for (name, title), own in parts.items() if own]


def charts_of(sections: Sequence[Section]) -> list[Chart]:
    return [part for section in sections for part in section.parts if isinstance(part, Chart)]


def _guarded(file: str, make: Callable[..., Iterable[Any]], *given: Any) -> list[Any]:
    """The parts that `make` returns for what is `given`; or one sentence, where what the runs wrote
    into `file` is not what it needs: the rest of the page is still drawn."""
    try:
        return list(make(*given))
    except Exception as error:  # a damaged record may hold anything
        reason = f"{type(error).__name__}: {error}"
        return [f"This cannot be shown, because {file} is damaged or lacks something ({reason})."]


def _of_each(runs: Runs, make: Callable[[RunData], Sequence[Any]]) -> list[Any]:
    """The parts of each run; of several runs, with its label before their titles."""
    found: list[Any] = []
    for place, run in enumerate(runs):
        label = f"{run.label}: " if len(runs) > 1 else ""
        for part in make(run):
            if isinstance(part, str):
                part = label + part
            else:
                own = {"name": f"{part.name}-{place}"} if isinstance(part, Chart) else {}
                part = replace(part, title=label + part.title, **own)
            found.append(part)
    return found


# -- held-out samples


def _retrieval_table(run: RunData) -> list[Table | str]:
    """First → last recall of each set and direction."""
    sizes = run.config.get("data", {}).get("held_out_samples") or {}
    rows = []
    for name, lines in run.held_out.items():
        evaluations = [{f"{name}/{key}": value for key, value in line.items()} for line in lines]
        rows += retrieval_rows(evaluations, {name: sizes.get(name.removeprefix(AVERAGED), 0)})
    if not rows:
        return ["No evaluation has been made, or no samples were held out."]
    note = "Each cell is the value at the first → at the last evaluation."
    if any("answers" in row for row in rows):
        note += (
            " Samples with equal images, sounds or captions are one query and one candidate; "
            "answers: how many candidates are right, on average."
        )
    return [Table.of("Zero-shot retrieval of held-out samples", rows, note)]


def _held_out_charts(runs: Runs) -> list[Chart]:
    """Of each set the recalls of each direction, and how the embeddings of each pair lie."""
    charts: list[Chart] = []
    geometry: list[Chart] = []
    for i, name in enumerate(dict.fromkeys(name for run in runs for name in run.held_out)):
        columns = {run.label: columns_of(run.held_out.get(name, ())) for run in runs}
        keys = list(dict.fromkeys(key for own in columns.values() for key in own))
        for j, key in enumerate(key for key in keys if key.endswith("_R@1")):
            direction = key.removesuffix("_R@1")
            title = f"{name}: {direction.replace('_to_', ' → ')}"
            recalls = {f"R@{k}": f"{direction}_R@{k}" for k in RECALL_AT}
            charts += line_charts([Lines(f"recall-{i}-{j}", title, RECALL, recalls)], columns)
        # with several pairs, the names of their figures end in `/image_text`
        pairs = dict.fromkeys(
            key[len(GEOMETRY[0]) :] for key in keys if key.startswith(GEOMETRY[0])
        )
        for j, pair in enumerate(pairs):
            of_pair = f", {pair[1:].replace('_', ' and ')}" if pair else ""
            chart = Lines(
                f"geometry-{i}-{j}",
                f"{name}: how embeddings lie to each other{of_pair}",
                GEOMETRIC,
                {key.replace("_", " "): key + pair for key in GEOMETRY},
                note=GEOMETRY_NOTE,
            )
            geometry += line_charts([chart], columns)
    return [*charts, *geometry]


# -- traced steps


def _traced_steps(run: RunData, most_bars: int) -> list[Chart | str]:
    """Where the time of a step goes, by stage and as a timeline."""
    try:
        steps = read_trace(run.path / "trace.json")
    except (ValueError, OSError) as error:
        return [f"No traced step: {error}.".replace(f"{run.path}/", "")]
    stages = {stage["name"]: stage["ranks"] for stage in run.config["stage_graph"]}
    # the first traced step still chooses kernels; it counts only where it is the only one
    counted = [step for step in steps if step != FIRST_STEP] or list(steps)
    by_stage: dict[str, list[dict[str, float]]] = {name: [] for name in stages}
    for step in counted:
        step_s = measured_step(step, stages, steps[step]).step_s
        for name, ranks in stages.items():
            own = [seconds_by_label(steps[step][r], step_s) for r in ranks if r in steps[step]]
            by_stage[name] += own
    newest = max(steps)
    return [
        _time_by_stage({name: own for name, own in by_stage.items() if own}, len(counted)),
        _timeline(run, measured_step(newest, stages, steps[newest]), most_bars),
    ]


def _time_by_stage(by_stage: dict[str, list[dict[str, float]]], number: int) -> Chart:
    """A bar per stage: what its ranks do in a step, the mean of `number` traced steps."""
    means = {
        stage: {label: mean(each[label] for each in own) for label in COLOURS}
        for stage, own in by_stage.items()
    }
    labels = [label for label in COLOURS if any(own[label] for own in means.values())]
    figure = new_figure("seconds of a step", "")
    for label in labels:
        figure.add_bar(
            y=[escaped(stage) for stage in means],
            x=[own[label] for own in means.values()],
            name=label,
            orientation="h",
            marker={"color": COLOURS[label], "line": {"width": 0}},
            hovertemplate="%{x:.4s}s",
        )
    height = 150 + TRACK_PIXELS * len(means)
    figure.update_layout(barmode="stack", hovermode="y unified", height=height, meta=NARROW)
    figure.update_xaxes(tickformat="~s", ticksuffix="s")
    figure.update_yaxes(autorange="reversed", title=None)
    rows = [[stage, *(duration(own[label]) for label in labels)] for stage, own in means.items()]
    title = "Where the time of a step goes"
    traced = f"{number} traced step{'s' * (number > 1)}"
    said = " ".join(f"{stage}: {_not_computing(own):.0%} idle." for stage, own in means.items())
    return Chart(
        "stages",
        title,
        figure,
        Table(title, ["stage", *labels], rows),
        said,
        note=f"Mean of {traced} and of the replicas of each stage.",
        wide=True,
    )


def _not_computing(seconds: dict[str, float]) -> float:
    """Share of a step, from its seconds by label, in which nothing is computed: the last three."""
    return sum(list(seconds.values())[-3:]) / max(1e-12, sum(seconds.values()))


def _timeline(run: RunData, measured: Timeline, most_bars: int) -> Chart:
    """A traced step, below its prediction where the run has one. More than `most_bars` are merged
    with their neighbours."""
    try:
        predicted, reason = prediction(run.path, run.config)
    except (ValueError, KeyError, TypeError, OSError) as error:
        predicted, reason = None, f"Nothing is predicted: {error}"
    timelines = [each for each in (predicted, measured) if each is not None]
    return Chart(
        "timeline",
        "One step, predicted above measured" if predicted else "One measured step",
        timeline_figure(timelines, most_bars),
        timeline_table(timelines),
        "; ".join(each.heading for each in timelines) + ".",
        note="" if reason is None else reason.replace(f"{run.path}: ", ""),
        wide=True,
    )
