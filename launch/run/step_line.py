"""The line of metrics.jsonl that a training step leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who reads lines needs none of it
    from data.batching.order import GlobalOrder
    from engine.step_metrics import StepMetrics


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
    """Images and sounds (where the run has such a branch; samples without one count too) and text
    tokens per second, and the shares of the texts' rectangles and of the clips that are padding."""
    found = {
        f"{name}_per_s": line["samples_per_s"]
        for branch, name in (("image", "images"), ("audio", "sounds"))
        if f"grad_norm/{branch}" in line
    }
    found["text_tokens_per_s"] = round(line.get("text_tokens", 0) / line["step_s"], 2)
    for branch, unit in (("text", "text_tokens"), ("audio", "audio_seconds")):
        padded = line.get(f"padded_{unit}", 0)
        if branch == "text" or f"padded_{unit}" in line:
            share = round(1 - line[unit] / padded, 4) if padded else 0.0
            found[f"padding_share/{branch}"] = share
    return found
