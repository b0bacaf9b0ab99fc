"""What the balance of a run did: how it began and ended, and every decision with its reason. The
report and `launch.tools.balance` show the same tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from launch.reporting.charts import Lines
from launch.reporting.columns import Columns, columns_of
from launch.reporting.panels import BALANCE, MEASURED, SECONDS, TIMES
from launch.terminal.tables import Table

if TYPE_CHECKING:
    from launch.reporting.reading import RunData

STEP = Lines("step", "Duration of a step", SECONDS, {"step": "step_s"})
NOT_MEASURED = (
    'There is no balance.jsonl, so no predictions and decisions are known; train with "balance": '
    '{"strategy": "deal"} or "feed" and an "interval" above 0 (ds_configs/README.md).'
)


class Decision(NamedTuple):
    """What a measurement led to: after `step` steps it was decided, from step `holds_from` on it
    holds."""

    step: int
    holds_from: int
    reason: str


def decisions(measurements: Sequence[Mapping[str, Any]]) -> list[Decision]:
    """Feed rates and weights of data sets that were moved, and what was said of feed rates
    otherwise; that holds from the next step on."""
    made = []
    for record in measurements:
        step, reason, following = record["step"], record["reason"], record["next"]
        if reason:
            moved = following is not None and following["reason"].startswith(reason)
            made.append(Decision(step, (following["from_step"] if moved else step) + 1, reason))
        if "mix" in record:
            mix = record["mix"]
            made.append(Decision(step, mix["from_step"] + 1, mix["reason"]))
    return made


def measured_columns(run: RunData) -> Columns:
    """Of each measurement the seconds of each branch, measured, predicted and their ratio."""
    return columns_of(map(_seconds, run.measurements))


def _seconds(measurement: Mapping[str, Any]) -> dict[str, float]:
    line = {"step": measurement["step"]}
    for branch, measured_s in measurement["measured_s"].items():
        if measured_s:
            predicted_s = measurement["predicted_s"][branch]
            line |= {f"measured_s/{branch}": measured_s, f"predicted_s/{branch}": predicted_s}
            line[f"ratio/{branch}"] = predicted_s / measured_s
    return line


def balance_tables(run: RunData) -> list[Table]:
    """Those that have rows."""
    made = [
        [str(number), f"{d.step:,}", f"{d.holds_from:,}", d.reason]
        for number, d in enumerate(decisions(run.measurements), 1)
    ]
    tables = [
        _began_and_ended(run),
        Table("Decisions", ["", "after step", "from step", "what, and why"], made),
        Table(
            "Changes of loss weights",
            ["step", "reason"],
            [*map(use_loss_weights, run.loss_weights)],
        ),
    ]
    return [table for table in tables if table.rows]


def use_measurement(record: Mapping[str, Any]) -> None:
    """Do what the tables and charts do with a line of balance.jsonl. Errors: any, where it lacks
    what they show."""
    decisions([record])
    _seconds(record)["step"] + 0
    _refits([record])


def use_loss_weights(record: Mapping[str, Any]) -> list[str]:
    """The row of a line of loss_weights.jsonl. Errors: any."""
    return [f"{record['step']:,}", record["reason"]]


def _began_and_ended(run: RunData) -> Table:
    """Medians over the first and the last tenth of the steps and of the measurements."""
    rows = []
    for chart in (*TIMES, STEP, *BALANCE, *MEASURED):
        columns = measured_columns(run) if chart in MEASURED else run.steps
        for name, values in chart.curves(columns).items():
            known = values[np.isfinite(values)]
            tenth = max(1, len(known) // 10)
            ends = [float(np.median(part)) for part in (known[:tenth], known[-tenth:])]
            rows.append([f"{chart.title}: {name}", *map(chart.axis.words, ends)])
    header = ["median of the", "first tenth", "last tenth"]
    return Table("How the balance began and ended", header, rows, _refits(run.measurements))


def _refits(measurements: Sequence[Mapping[str, Any]]) -> str:
    if not measurements:
        return NOT_MEASURED
    steps = [
        str(record["step"])
        for record in measurements
        if record["next"] is not None and "costs refitted" in record["next"]["reason"]
    ]
    after = f", after steps {', '.join(steps)}" if steps else ""
    return f"Costs refitted in {len(steps)} of {len(measurements)} measurements{after}."
