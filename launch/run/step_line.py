"""The line of metrics.jsonl that a training step leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from data.stored.kinds import files_of, text_of
from data.stored.text import TEXT

if TYPE_CHECKING:  # who reads lines needs none of it
    from data.batching.order import GlobalOrder
    from engine.step_metrics import StepMetrics

PADDED, NORM, TOKENS = "padded_", "grad_norm/", "text_tokens"


def step_line(
    metrics: StepMetrics,
    step: int,
    step_s: float,
    order: GlobalOrder,
    feed_rates: dict[str, float],
    sources: Sequence[str],
) -> dict[str, float]:
    """The line of the `step`-th step, from 1, which took `step_s` seconds. Beside what the engine
    measured: `_rates`, the `feed_rates` that may change, and for each of several `sources`
    `loss/<source>`, see `mean_losses`, and `epochs/<source>`, how often its samples have been
    visited so far."""
    line = metrics.record(step, order.epochs_before(step), order.global_batch_size / step_s, step_s)
    losses = {f"loss/{name}": source.loss for name, source in zip(sources, metrics.sources)}
    visited = order.visits(step)
    visits = {
        f"epochs/{name}": round(number, 4)
        for name, number in zip(sources, visited)
        if not math.isnan(number)
    }
    return line | _rates(line) | feed_rates | losses | visits


def _rates(line: Mapping[str, float]) -> dict[str, float]:
    """Values of each modality of files that the run has (samples without one count too) and, where
    it has texts, text tokens per second, and the share of padding in what is padded, by branch:
    `padded_text_tokens` is of `text`."""
    named = {key.removeprefix(NORM) for key in line if key.startswith(NORM)}
    found = {kind.rate: line["samples_per_s"] for kind in files_of() if kind.name in named}
    shares: dict[str, float] = {}
    if TOKENS in line or text_of(named):
        found[f"{TOKENS}_per_s"] = round(line.get(TOKENS, 0) / line["step_s"], 2)
        shares[TEXT.name] = 0.0
    for key, padded in line.items():
        unit = key.removeprefix(PADDED)
        if unit != key and unit in line:
            shares[unit.partition("_")[0]] = round(1 - line[unit] / padded, 4) if padded else 0.0
    return found | {f"padding_share/{branch}": share for branch, share in shares.items()}
