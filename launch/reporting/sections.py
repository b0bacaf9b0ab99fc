"""The sections of a report: which charts and tables it has, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from launch.reporting.charts import Axis, Chart, Curve, Table, curves_of, line_chart
from launch.reporting.parts import Section, Text, beside
from launch.reporting.reading import RunData
from launch.reporting.retrieval import retrieval_parts
from launch.reporting.tables import bad, differences, environment, notices, queries, summaries
from launch.reporting.timelines import MOST_BARS, read_traced, time_by_stage, timeline_chart
from launch.tools.balance import decisions
from launch.tools.balance_plot import Decision
from launch.tools.drawing import seconds

GIB = 2**30
MOST_MARKS = 20  # decisions that are drawn in a chart


Runs = Sequence[RunData]
Keys = Callable[[RunData], Mapping[str, str]]


def build_sections(runs: Runs) -> list[Section]:
    """Those that have something to show."""
    built = [
        Section("summary", "What was trained", [*summaries(runs), *notices(runs)]),
        Section("differences", "How the runs differ", differences(runs)),
        Section("loss", "Loss", _losses(runs)),
        Section("retrieval", "Retrieval of held-out samples", retrieval_parts(runs)),
        Section("queries", "Queries and their answers", queries(runs)),
        Section("time", "Time", _times(runs)),
        Section("balance", "Balance and padding", _balance(runs)),
        Section("memory", "Memory", _memory(runs)),
        Section("gradients", "Gradients", _gradients(runs)),
        Section("bad-samples", "Bad samples", bad(runs)),
        Section("environment", "Environment", environment(runs)),
    ]
    return [section for section in built if section.parts]


def charts_of(sections: Sequence[Section]) -> list[Chart]:
    return [part for section in sections for part in section.parts if isinstance(part, Chart)]


# -- charts over the steps


def over_steps(
    runs: Runs, name: str, title: str, axis: Axis, keys: Keys, **how: Any
) -> list[Chart]:
    """No chart where no run has the numbers. `keys`: {name of the curve: key} of a run."""
    look = {"smooth": how.pop("smooth", False), "scale": how.pop("scale", 1.0)}
    chart = line_chart(
        name, title, axis, [(run, curves_of(run, keys(run), **look)) for run in runs], **how
    )
    return [] if chart is None else [chart]


def _named(prefix: str) -> Keys:
    return lambda run: run.steps.named(prefix)


def _losses(runs: Runs) -> list[Chart]:
    def parts(run: RunData) -> dict[str, str]:
        found: dict[str, str] = {}
        for key in ("contrastive_loss", "matching_loss"):
            found |= {key.replace("_", " "): key}
            found |= {f"{key.split('_')[0]} {k}": v for k, v in run.steps.named(f"{key}/").items()}
        return {name: key for name, key in found.items() if key in run.steps}

    loss = Axis("loss")
    weights = _named("loss_weight/")
    return [
        *over_steps(
            runs, "loss", "Loss", loss, lambda run: {"loss": "loss"}, smooth=True, wide=True
        ),
        *over_steps(runs, "loss-parts", "Losses of the objective", loss, parts, smooth=True),
        *over_steps(runs, "loss-sets", "Loss by data set", loss, _named("loss/"), smooth=True),
        *over_steps(runs, "loss-weights", "Weights of the losses", Axis("weight"), weights),
        *over_steps(
            runs,
            "rate",
            "Learning rate",
            Axis("learning rate", "{:.3g}".format, "~e"),
            lambda run: {"schedule": "lr", **run.steps.named("lr/")},
        ),
        *over_steps(
            runs,
            "scalars",
            "Learned scale of the similarities",
            Axis("logit_scale_exp"),
            lambda run: {
                key: key
                for key in run.steps.named("")
                if key.endswith(("logit_scale_exp", "logit_bias"))
            },
        ),
    ]


def _times(runs: Runs) -> list[Any]:
    parts: list[Any] = []
    for place, run in enumerate(runs):
        traced, reason = read_traced(run)
        if traced is None:
            parts.append(Text(f"{beside(run, runs)}{reason}"))
            continue
        for chart in (
            time_by_stage(run, traced, f"stages-{place}"),
            timeline_chart(run, traced, f"timeline-{place}", MOST_BARS // len(runs)),
        ):
            parts.append(replace(chart, title=f"{beside(run, runs)}{chart.title}"))
    share = Axis("share of the step", "{:.1%}".format, ".0%", from_zero=True)
    per_second = Axis("samples/s", "{:,.1f}".format, from_zero=True)
    time = Axis("seconds", seconds, from_zero=True)
    return [
        *parts,
        *over_steps(
            runs,
            "throughput",
            "Throughput",
            per_second,
            lambda r: {"samples/s": "samples_per_s"},
            smooth=True,
        ),
        *over_steps(runs, "idle", "Idle time by stage", share, _named("idle/"), smooth=True),
        *over_steps(
            runs, "busy", "Computing time of a step by stage", time, _named("busy_s/"), smooth=True
        ),
        *over_steps(
            runs,
            "data-wait",
            "Time spent waiting for data",
            time,
            _named("data_wait_s/"),
            smooth=True,
        ),
    ]


def _balance(runs: Runs) -> list[Any]:
    # of one run, decisions are marked by their number in the table
    marks = [(d.holds_from, str(i)) for i, d in enumerate(_decisions(runs[0]), 1)]
    marks = marks[:MOST_MARKS] if len(runs) == 1 else []
    share = Axis("padding share", "{:.2%}".format, "~p", from_zero=True, lines=marks)
    tokens = Axis("tokens/s", "{:,.0f}".format, from_zero=True, lines=marks)
    parts: list[Any] = [
        *over_steps(runs, "padding", "Padding of the texts", share, _named("padding_share/")),
        *over_steps(
            runs,
            "tokens",
            "Text tokens per second",
            tokens,
            lambda r: {"tokens/s": "text_tokens_per_s"},
            smooth=True,
        ),
    ]
    chart = line_chart(
        "predicted",
        "Predicted ÷ measured time of a branch",
        Axis("predicted ÷ measured", "{:.2f}".format),
        [(run, _predictions(run)) for run in runs],
        "Measured every balance.interval steps.",
    )
    parts += [] if chart is None else [chart]
    for run in runs:
        if made := _decisions(run):
            rows = [
                [str(number), f"{d.step:,}", f"{d.holds_from:,}", d.reason]
                for number, d in enumerate(made, 1)
            ]
            header = ["", "after step", "from step", "what, and why"]
            parts.append(Table(f"{beside(run, runs)}Decisions", header, rows))
        if run.loss_weights:
            rows = [[f"{w.get('step')}", str(w.get("reason"))] for w in run.loss_weights]
            parts.append(Table(f"Changes of loss weights, {run.label}", ["step", "reason"], rows))
    return parts


def _decisions(run: RunData) -> list[Decision]:
    try:
        return decisions(run.measurements)
    except (KeyError, TypeError):  # lines of another version
        return []


def _predictions(run: RunData) -> list[Curve]:
    branches = dict.fromkeys(b for m in run.measurements for b in m.get("measured_s", {}))
    found = []
    for branch in branches:
        ratios = [
            (m["step"], m["predicted_s"][branch] / m["measured_s"][branch])
            for m in run.measurements
            if m.get("measured_s", {}).get(branch) and branch in m.get("predicted_s", {})
        ]
        x, y = np.array(ratios, dtype=np.float64).reshape(-1, 2).T
        found.append(Curve(branch, x, y, marked=True))
    return found


def _memory(runs: Runs) -> list[Chart]:
    def keys(run: RunData) -> dict[str, str]:
        by_rank = run.steps.named("peak_memory_bytes/")
        return by_rank or {"rank that held most": "peak_memory_bytes"}

    axis = Axis("GiB", "{:.2f} GiB".format, from_zero=True)
    note = "The most that a rank has held so far: tensors on a GPU; on a CPU the whole process."
    return over_steps(runs, "memory", "Peak memory by rank", axis, keys, note=note, scale=1 / GIB)


def _gradients(runs: Runs) -> list[Chart]:
    norm = Axis("norm before clipping", log=True, words="{:.3g}".format)
    share = Axis("norm after ÷ before", "{:.3f}".format, range=[0, 1.05])
    clipped = Axis("share of steps", "{:.1%}".format, ".0%", from_zero=True)
    clipping = _named("clip_coefficient/") if any(_clips(run) for run in runs) else lambda run: {}
    often = _named("clipped_share/") if any(_clips(run) for run in runs) else lambda run: {}
    return [
        *over_steps(runs, "norms", "Gradient norms", norm, _named("grad_norm/"), smooth=True),
        *over_steps(runs, "clipping", "Clipping", share, clipping),
        *over_steps(runs, "clipped", "Share of steps that were clipped so far", clipped, often),
        *over_steps(
            runs,
            "loss-scale",
            "Loss scale (fp16)",
            Axis("loss scale", log=True),
            lambda r: {"scale": "loss_scale"},
        ),
        *over_steps(
            runs,
            "skipped",
            "Skipped steps so far",
            Axis("steps"),
            lambda r: {"skipped": "skipped_steps"} if np.nansum(r.steps["skipped_steps"]) else {},
        ),
    ]


def _clips(run: RunData) -> bool:
    return any(
        np.nanmax(run.steps[k], initial=0) > 0 for k in run.steps.named("clipped_share/").values()
    )
