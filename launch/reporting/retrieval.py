"""Retrieval of the held-out samples: a chart for each set and direction, one table of all, and how
the embeddings lie to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.reporting.charts import Axis, Chart, Curve, Table, line_chart
from launch.reporting.parts import Text
from launch.reporting.reading import RunData
from launch.run.report import asked_of
from models.metrics.retrieval import RECALL_AT

SHARE = Axis("recall", "{:.1%}".format, ".0%", from_zero=True)
GEOMETRY = ("alignment", "modality_gap", "cosine_pairs", "cosine_others")
Runs = Sequence[RunData]


def retrieval_parts(runs: Runs) -> list[Any]:
    sets = list(dict.fromkeys(name for run in runs for name in run.held_out))
    if not sets:
        return [Text("No evaluation has been made, or no samples were held out.")]
    directions = {
        name: list(
            dict.fromkeys(
                key.removesuffix("_R@1")
                for run in runs
                for line in run.held_out.get(name, ())
                for key in line
                if key.endswith("_R@1")
            )
        )
        for name in sets
    }
    charts = [
        _recall_chart(runs, f"recall-{i}-{j}", name, direction)
        for i, name in enumerate(sets)
        for j, direction in enumerate(directions[name])
    ]
    geometry = [
        _geometry_chart(runs, f"geometry-{i}" + (f"-{j}" if j else ""), name, pair)
        for i, name in enumerate(sets)
        for j, pair in enumerate(_pairs(runs, name))
    ]
    return [_table(runs, directions), *filter(None, charts), *filter(None, geometry)]


def in_words(direction: str) -> str:
    return direction.replace("_to_", " → ")


def _recall_chart(runs: Runs, name: str, held_out: str, direction: str) -> Chart | None:
    return line_chart(
        name,
        f"{held_out}: {in_words(direction)}",
        SHARE,
        [
            (run, [_curve(run, held_out, f"{direction}_R@{k}", f"R@{k}") for k in RECALL_AT])
            for run in runs
        ],
    )


def _pairs(runs: Runs, held_out: str) -> list[str]:
    """What the figures of each pair end in: `/image_text`, or nothing where there is one pair."""
    keys = [key for run in runs for line in run.held_out.get(held_out, ()) for key in line]
    names = [key.partition("/") for key in dict.fromkeys(keys)]
    return list(dict.fromkeys(slash + pair for name, slash, pair in names if name in GEOMETRY))


def _geometry_chart(runs: Runs, name: str, held_out: str, pair: str) -> Chart | None:
    of_pair = f", {pair[1:].replace('_', ' and ')}" if pair else ""
    return line_chart(
        name,
        f"{held_out}: how embeddings lie to each other{of_pair}",
        Axis("value", "{:.3f}".format),
        [
            (
                run,
                [
                    _curve(run, held_out, key + pair, key.replace("_", " "))
                    for key in GEOMETRY
                    if any(key + pair in line for line in run.held_out.get(held_out, ()))
                ],
            )
            for run in runs
        ],
        "alignment: mean squared distance of pairs. modality gap: distance of the mean embeddings. "
        "cosine: mean similarity of pairs, and of all others.",
    )


def _curve(run: RunData, held_out: str, key: str, name: str) -> Curve:
    lines = run.held_out.get(held_out, ())
    x = np.array([line["step"] for line in lines], dtype=np.float64)
    return Curve(name, x, np.array([_number(line.get(key)) for line in lines]), marked=True)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _table(runs: Runs, directions: Mapping[str, Sequence[str]]) -> Table:
    """First → last recall of each set and direction; of several runs, a row for each."""
    header = ["held-out set", "query → answer", *(["run"] if len(runs) > 1 else [])]
    several = any(
        key.endswith("_answers")
        for run in runs
        for name in directions
        for line in run.held_out.get(name, ())
        for key in line
    )
    header += ["queries → candidates", "answers"] if several else []
    header += [f"R@{k} %" for k in RECALL_AT] + [f"best R@{RECALL_AT[-1]} %", "chance %"]
    rows = []
    for name, own in directions.items():
        for direction in own:
            for run in runs:
                lines = [line for line in run.held_out.get(name, ()) if f"{direction}_R@1" in line]
                if lines:
                    number = _samples(run, name, lines[-1], direction)
                    asked = asked_of(lines[-1], direction, number or 0)
                    rows.append(
                        [
                            f"{name} ({number:,})" if number else name,
                            in_words(direction),
                            *([run.label] if len(runs) > 1 else []),
                            *(asked.words() if several else ()),
                            *_cells(lines, direction),
                            f"{100 * asked.chance:.1f}" if asked.queries else "–",
                        ]
                    )
    note = "Each cell is the recall at the first → at the last evaluation."
    if several:
        note += (
            " Samples with equal images, sounds or captions are one query and one candidate; "
            "answers: how many candidates are right, on average."
        )
    return Table("Zero-shot retrieval of held-out samples", header, rows, note)


def _cells(lines: Sequence[Mapping[str, Any]], direction: str) -> list[str]:
    ends = lines[:1] if len(lines) == 1 else (lines[0], lines[-1])
    cells = [
        " → ".join(f"{100 * _number(line.get(f'{direction}_R@{k}')):.1f}" for line in ends)
        for k in RECALL_AT
    ]
    last = f"{direction}_R@{RECALL_AT[-1]}"
    best = max(lines, key=lambda line: np.nan_to_num(_number(line.get(last)), nan=-1.0))
    return [*cells, f"{100 * _number(best.get(last)):.1f} (step {best['step']:,})"]


def _samples(run: RunData, held_out: str, line: Mapping[str, Any], direction: str) -> int | None:
    first, _, second = direction.partition("_to_")
    for pair in (f"{first}_{second}", f"{second}_{first}"):
        if f"num_samples/{pair}" in line:
            return int(line[f"num_samples/{pair}"])
    known = run.config.get("data", {}).get("held_out_samples")
    number = known.get(held_out.removeprefix("ema/")) if isinstance(known, Mapping) else None
    return number if isinstance(number, int) else None
