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
    measured: `rates`, the `feed_rates` that may change, and for each of several `sources`
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
    return line | rates(line) | feed_rates | losses | visits


def rates(line: Mapping[str, float]) -> dict[str, float]:
    """Images and sounds (where the run has such a branch; samples without one count too) and text
    tokens per second, and the shares of the texts' rectangles and of the clips that are padding."""
    tokens, padded = line.get("text_tokens", 0), line.get("padded_text_tokens", 0)
    groups = [key for key in line if key.startswith("grad_norm/")]
    has_images = not groups or "grad_norm/image" in groups
    images = {"images_per_s": line["samples_per_s"]} if has_images else {}
    sounds = {"sounds_per_s": line["samples_per_s"]} if "grad_norm/audio" in groups else {}
    return {
        **images,
        **sounds,
        "text_tokens_per_s": round(tokens / line["step_s"], 2),
        "padding_share/text": round(1 - tokens / padded, 4) if padded else 0.0,
        **_padding_of_audio(line),
    }


def _padding_of_audio(line: Mapping[str, float]) -> dict[str, float]:
    if "padded_audio_seconds" not in line:
        return {}
    heard, padded = line["audio_seconds"], line["padded_audio_seconds"]
    return {"padding_share/audio": round(1 - heard / padded, 4) if padded else 0.0}
