"""What a sample weighs: the more there is to see and to read in it, the more. For the loss, or for
an order from easy to hard.

    weight = a · complexity / mean complexity + b · length / mean length + c · seconds / mean seconds

and is then divided by its own mean.

Complexity is bytes of the encoded image per pixel, a column of the index. Length is that of the
longest caption in tokens, counted once: in characters a Chinese caption would weigh a third of an
English one that takes as many tokens. Seconds are those of the sound. So every rank knows all of every sample, and nothing is
decoded for it.

G: samples of a global batch, N: of the training subset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.index.sources import Source

MILLIONTHS = 1_000_000
LARGEST = 2_000 * MILLIONTHS  # a weight fits 31 bits, whatever the size of the global batch
SPREAD = 0.25  # part of the plain shuffle in the first epoch of a curriculum


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
    subset: np.ndarray,
    lengths: np.ndarray,
    image: float,
    text: float,
    indices: np.ndarray,
    audio: float = 0.0,
) -> np.ndarray:
    """[G] int64, millionths: what the samples `indices` [G] of a global batch count in its loss,
    1,000,000 on average.

    `subset` [N], ascending: the training samples, whose texts have `lengths` [N]. Whole numbers, so
    that they are the same on every machine and travel unchanged in any precision.
    """
    weights = sample_weights(
        source.column("complexity")[indices],
        lengths[np.searchsorted(subset, indices)],
        image,
        text=text,
        seconds=source.column("audio_seconds")[indices] if audio else None,
        audio=audio,
    )
    return np.minimum(np.rint(weights * MILLIONTHS), LARGEST).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Curriculum:
    """From easy to hard in the first `epochs` epochs. `difficulty` [N]: of the samples of the
    training subset; only its order counts.

    Of the n visits of epoch e < E, let u be their places 0..n-1 in the plain shuffle and r their
    ranks 0..n-1 by difficulty. They are visited in the order of

        (1 − m) · r + m · u,      m = SPREAD + (1 − SPREAD) · e / E

    which shows each of them once. With m = 1, which epoch E would have, it is the plain shuffle;
    with m = 1/4 in the first epoch a global batch in the middle of it has samples from a third of
    all ranks, so that its negatives are not all alike.
    """

    difficulty: np.ndarray
    epochs: int

    def arranged(self, visits: np.ndarray, epoch: int) -> np.ndarray:
        """[n] numbers 0..N-1 in the order of the plain shuffle -> the same in the order of this
        epoch."""
        if epoch >= self.epochs:
            return visits
        mixed = SPREAD + (1 - SPREAD) * epoch / self.epochs
        place = np.arange(len(visits))
        rank = np.empty(len(visits))
        rank[np.argsort(self.difficulty[visits], kind="stable")] = place
        return visits[np.argsort((1 - mixed) * rank + mixed * place, kind="stable")]
