"""What a sample weighs in the loss: the more there is to see and to read in it, the more.

    weight = a · complexity / mean complexity + b · length / mean length
             + c · seconds / mean seconds

and is then divided by its own mean.

Complexity is bytes of the encoded image per pixel, a column of the index. Length is that of the
longest caption in tokens, counted once: in characters a Chinese caption would weigh a third of an
English one that takes as many tokens. Seconds are those of the sound. So every rank knows all of
every sample, and nothing is decoded for it.

G: samples of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from data.batching.batches import GlobalBatch
from data.index.sources import Source

MILLIONTHS = 1_000_000
LARGEST = 2_000 * MILLIONTHS  # a weight fits 31 bits, whatever the size of the global batch


def sample_weights(terms: Iterable[tuple[float, np.ndarray]]) -> np.ndarray:
    """[n] float64 with mean 1, of n samples that are weighed against each other. `terms`: a and the
    complexity of each, b and the length, c and the seconds; a, b, c >= 0, not all 0."""
    return _of_mean_one(np.sum([factor * _of_mean_one(values) for factor, values in terms], 0))


def _of_mean_one(values: np.ndarray) -> np.ndarray:
    """Values of 0 are of samples that have no such value: they count as the mean of the others."""
    values = np.asarray(values, np.float64)
    mean = values[values > 0].mean() if values.any() else 1.0
    return np.where(values > 0, values / mean, 1.0)


def loss_weights(
    source: Source,
    lengths: Callable[[GlobalBatch], np.ndarray] | None,
    image: float,
    text: float,
    audio: float,
    batch: GlobalBatch,
) -> np.ndarray:
    """[G] int64, millionths: what the samples of a global batch count in its loss, 1,000,000 on
    average.

    `lengths`: [G] of the texts of a global batch; None: there are none. Whole numbers, so that they
    are the same on every machine and travel unchanged in any precision.
    """
    terms = [
        (image, source.numbers("complexity", batch.indices)),
        (text, np.zeros(len(batch.indices)) if lengths is None else lengths(batch)),
        (audio, source.numbers("audio_seconds", batch.indices)),
    ]
    weights = sample_weights(terms)
    return np.minimum(np.rint(weights * MILLIONTHS), LARGEST).astype(np.int64)
