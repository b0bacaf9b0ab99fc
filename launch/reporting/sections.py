"""The sections of a report: which charts and tables it has, and in which order. A new metric gets
its chart by a line in one of the tables below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

from launch.reporting.charts import Axis, Lines, line_charts, new_figure
from launch.reporting.parts import Chart, Section, Table, escaped
from launch.reporting.reading import Columns, RunData
from launch.reporting.tables import bad, differences, environment, queries, summary
from launch.reporting.timelines import (
    COLOURS,
    MOST_BARS,
    NARROW,
    TRACK_PIXELS,
    Timeline,
    busy_s,
    idle_fraction,
    measured_step,
    prediction,
    seconds_by_label,
    timeline_figure,
)
from launch.run.report import duration, retrieval_rows
from launch.run.trace_file import FIRST_STEP, read_trace
from launch.tools.balance import decisions
from models.metrics.retrieval import RECALL_AT

MOST_MARKS = 20  # decisions that are drawn in a chart

LOSS, WEIGHT, SCALE = Axis("loss"), Axis("weight"), Axis("logit_scale_exp")
RATE = Axis("learning rate", "{:.3g}".format, "~e")
RECALL = Axis("recall", "{:.1%}".format, "~p", from_zero=True)
GEOMETRIC = Axis("value", "{:.3f}".format)
SHARE = Axis("share of the step", "{:.1%}".format, ".0%", from_zero=True)
SECONDS = Axis("seconds", duration, from_zero=True)
SAMPLES = Axis("samples/s", "{:,.1f}".format, from_zero=True)
TOKENS = Axis("tokens/s", "{:,.0f}".format, from_zero=True)
PADDING = Axis("padding share", "{:.2%}".format, "~p", from_zero=True)
RATIO = Axis("predicted ÷ measured", "{:.2f}".format)
GIB = Axis("GiB", "{:.2f} GiB".format, from_zero=True)
NORM = Axis("norm before clipping", "{:.3g}".format, log=True)
CLIPPED = Axis("norm after ÷ before", "{:.3f}".format, range=[0, 1.05])
SHARE_OF_STEPS = Axis("share of steps", "{:.1%}".format, ".0%", from_zero=True)
FP16, STEPS = Axis("loss scale", log=True), Axis("steps")

OBJECTIVE = {"contrastive loss": "contrastive_loss", "contrastive *": "contrastive_loss/*"}
OBJECTIVE |= {"matching loss": "matching_loss", "matching *": "matching_loss/*"}
SCALARS = {"*logit_scale_exp": "*logit_scale_exp", "*logit_bias": "*logit_bias"}

LOSSES = (
    Lines("loss", "Loss", LOSS, {"loss": "loss"}, smooth=True, wide=True),
    Lines("loss-parts", "Losses of the objective", LOSS, OBJECTIVE, smooth=True),
    Lines("loss-sets", "Loss by data set", LOSS, {"*": "loss/*"}, smooth=True),
    Lines("loss-weights", "Weights of the losses", WEIGHT, {"*": "loss_weight/*"}),
    Lines("rate", "Learning rate", RATE, {"schedule": "lr", "*": "lr/*"}),
    Lines("scalars", "Learned scale of the similarities", SCALE, SCALARS),
)
TIMES = (
    Lines("throughput", "Throughput", SAMPLES, {"samples/s": "samples_per_s"}, smooth=True),
    Lines("idle", "Idle time by stage", SHARE, {"*": "idle/*"}, smooth=True),
    Lines("busy", "Computing time of a step by stage", SECONDS, {"*": "busy_s/*"}, smooth=True),
    Lines("data-wait", "Time spent waiting for data", SECONDS, {"*": "data_wait_s/*"}, smooth=True),
)
BALANCE = (
    Lines("padding", "Padding of texts and sounds", PADDING, {"*": "padding_share/*"}),
    Lines(
        "tokens", "Text tokens per second", TOKENS, {"tokens/s": "text_tokens_per_s"}, smooth=True
    ),
)
PREDICTED = Lines(
    "predicted",
    "Predicted ÷ measured time of a branch",
    RATIO,
    {"*": "ratio/*"},
    note="Measured every balance.interval steps.",
)
MEMORY = Lines(
    "memory",
    "Peak memory by rank",
    GIB,
    {"rank that held most": "peak_memory_bytes", "rank *": "peak_memory_bytes/rank *"},
    scale=1 / 2**30,
    note="The most that a rank has held so far: tensors on a GPU; on a CPU the whole process.",
)
CLIPPED_SHARE = "Share of steps that were clipped so far"
GRADIENTS = (
    Lines("norms", "Gradient norms", NORM, {"*": "grad_norm/*"}, smooth=True),
    Lines("clipping", "Clipping", CLIPPED, {"*": "clip_coefficient/*"}, if_moves=True),
    Lines("clipped", CLIPPED_SHARE, SHARE_OF_STEPS, {"*": "clipped_share/*"}, if_moves=True),
    Lines("loss-scale", "Loss scale (fp16)", FP16, {"scale": "loss_scale"}),
    Lines("skipped", "Skipped steps so far", STEPS, {"skipped": "skipped_steps"}, if_moves=True),
)
GEOMETRY = ("alignment", "modality_gap", "cosine_pairs", "cosine_others")
GEOMETRY_NOTE = (
    "alignment: mean squared distance of pairs. modality gap: distance of the mean embeddings. "
    "cosine: mean similarity of pairs, and of all others."
)

Runs = Sequence[RunData]


def build_sections(runs: Runs) -> list[Section]:
    """Those that have something to show."""
    steps = {run.label: run.steps for run in runs}
    share = 1 / len(runs)
    # decisions of one run are marked in its charts by their number in the table
    made = decisions(runs[0].measurements) if len(runs) == 1 else []
    marks = [(d.holds_from, str(number)) for number, d in enumerate(made[:MOST_MARKS], 1)]
    ratios = {run.label: Columns(map(_ratios, run.measurements)) for run in runs}
    parts: dict[tuple[str, str], list[Any]] = {
        ("summary", "What was trained"): [
            *map(summary, runs),
            *_of_each(runs, lambda run: run.notices),
        ],
        ("differences", "How the runs differ"): differences(runs),
        ("loss", "Loss"): line_charts(LOSSES, steps),
        ("retrieval", "Retrieval of held-out samples"): [
            *_of_each(runs, _retrieval_table),
            *_held_out_charts(runs),
        ],
        ("queries", "Queries and their answers"): _of_each(runs, partial(queries, share=share)),
        ("time", "Time"): [
            *_of_each(runs, partial(_traced_steps, most_bars=int(share * MOST_BARS))),
            *line_charts(TIMES, steps),
        ],
        ("balance", "Balance and padding"): [
            *line_charts(BALANCE, steps, marks),
            *line_charts([PREDICTED], ratios),
            *_of_each(runs, _decisions),
        ],
        ("memory", "Memory"): line_charts([MEMORY], steps),
        ("gradients", "Gradients"): line_charts(GRADIENTS, steps),
        ("bad-samples", "Bad samples"): _of_each(runs, bad),
        ("environment", "Environment"): _of_each(runs, environment),
    }
    return [Section(name, title, own) for (name, title), own in parts.items() if own]


def charts_of(sections: Sequence[Section]) -> list[Chart]:
    return [part for section in sections for part in section.parts if isinstance(part, Chart)]


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
        rows += retrieval_rows(evaluations, {name: sizes.get(name.removeprefix("ema/"), 0)})
    if not rows:
        return ["No evaluation has been made, or no samples were held out."]
    header = list(dict.fromkeys(column for row in rows for column in row))
    note = "Each cell is the value at the first → at the last evaluation."
    if "answers" in header:
        note += (
            " Samples with equal images, sounds or captions are one query and one candidate; "
            "answers: how many candidates are right, on average."
        )
    cells = [[row.get(column, "–") for column in header] for row in rows]
    return [Table("Zero-shot retrieval of held-out samples", header, cells, note)]


def _held_out_charts(runs: Runs) -> list[Chart]:
    """Of each set the recalls of each direction, and how the embeddings of each pair lie."""
    charts: list[Chart] = []
    geometry: list[Chart] = []
    for i, name in enumerate(dict.fromkeys(name for run in runs for name in run.held_out)):
        columns = {run.label: Columns(run.held_out.get(name, ())) for run in runs}
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
    file = run.path / "trace.json"
    if not file.is_file():
        return ["No step has been traced yet, or the run was started with --trace-every 0."]
    try:
        steps = read_trace(file)
    except (ValueError, KeyError, TypeError) as error:
        return [f"trace.json cannot be read ({error})."]
    if not steps:
        return ["trace.json holds no step yet."]
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
    rows = [
        [
            "measured" if each is measured else "predicted",
            track,
            duration(busy_s(spans)),
            f"{idle_fraction(spans, each.step_s):.0%}",
        ]
        for each in timelines
        for track, spans in each.tracks.items()
    ]
    return Chart(
        "timeline",
        "One step, predicted above measured" if predicted else "One measured step",
        timeline_figure(timelines, most_bars),
        Table(measured.title, ["", "track", "busy", "idle"], rows),
        "; ".join(each.heading for each in timelines) + ".",
        note="" if reason is None else reason.replace(f"{run.path}: ", ""),
        wide=True,
    )


# -- the balance


def _ratios(measurement: dict[str, Any]) -> dict[str, float]:
    """Predicted ÷ measured seconds of each branch, by `ratio/<branch>`."""
    seen = {b: s for b, s in measurement["measured_s"].items() if s}
    ratios = {f"ratio/{b}": measurement["predicted_s"][b] / s for b, s in seen.items()}
    return {"step": measurement["step"], **ratios}


def _decisions(run: RunData) -> list[Table]:
    made = [
        [str(number), f"{d.step:,}", f"{d.holds_from:,}", d.reason]
        for number, d in enumerate(decisions(run.measurements), 1)
    ]
    weights = [[f"{each['step']:,}", each["reason"]] for each in run.loss_weights]
    tables = [
        Table("Decisions", ["", "after step", "from step", "what, and why"], made),
        Table("Changes of loss weights", ["step", "reason"], weights),
    ]
    return [table for table in tables if table.rows]
