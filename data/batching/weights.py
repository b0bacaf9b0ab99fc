"""What a sample weighs in the loss: the more there is to see and to read in it, the more.

    weight = a · complexity / mean complexity + b · length / mean length
             + c · seconds / mean seconds

and is then divided by its own mean.

Complexity is bytes of the encoded image per pixel, a column of the index. Length is that of the
longest caption in tokens, counted once: in characters a Chinese caption would weigh a third of an
English one that takes as many tokens. Seconds are those of the sound. So every rank knows all of
every sample, and nothing is decoded for it.

G: samples of a global batch, N: training samples.
"""

from __future__ import annotations

import numpy as np

from data.batching.batches import GlobalBatch
from data.index.sources import Source

MILLIONTHS = 1_000_000
LARGEST = 2_000 * MILLIONTHS  # a weight fits 31 bits, whatever the size of the global batch


def sample_weights(
    complexity: np.ndarray,
    length: np.ndarray,
    image: float,
    text: float,
    seconds: np.ndarray | None = None,
    audio: float = 0.0,
) -> np.ndarray:
    """[n] float64 with mean 1, of n samples that are weighed against each other. `image`, `text`,
    `audio`: a, b and c, >= 0; with `audio` > 0 the `seconds` are needed."""
    total = image * _of_mean_one(complexity) + text * _of_mean_one(length)
    if audio:
        if seconds is None:
            raise ValueError("sounds cannot be weighed without their seconds")
        total = total + audio * _of_mean_one(seconds)
    return _of_mean_one(total)


def _of_mean_one(values: np.ndarray) -> np.ndarray:
    """Values of 0 are of samples that have no such value: they count as the mean of the others."""
    values = np.asarray(values, np.float64)
    mean = values[values > 0].mean() if values.any() else 1.0
    return np.where(values > 0, values / mean, 1.0)


def loss_weights(
    source: Source,
    lengths: np.ndarray,
    image: float,
    text: float,
    audio: float,
    batch: GlobalBatch,
) -> np.ndarray:
    """[G] int64, millionths: what the samples of a global batch count in its loss, 1,000,000 on
    average.

    `lengths` [N] of the training samples' texts. Whole numbers, so that they are the same on every
    machine and travel unchanged in any precision.
    """
    weights = sample_weights(
        source.column("complexity")[batch.indices],
        lengths[batch.visited],
        image,
        text,
        seconds=source.column("audio_seconds")[batch.indices] if audio else None,
        audio=audio,
    )
    return np.minimum(np.rint(weights * MILLIONTHS), LARGEST).astype(np.int64)
