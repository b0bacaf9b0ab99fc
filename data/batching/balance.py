"""Which positions of a global batch make which micro-batch: in order, by the shape of the image,
or by what they cost.

The loss is over the whole global batch, so a deal changes the speed and nothing else. Every rank
works it out by itself: it is a pure function of seed, step and the costs, which are the same
everywhere.

G: samples of a global batch, R: replicas of the branch, M: micro-batches of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from data.batching.buckets import BucketedSamples, deal_by_bucket
from data.batching.dealing import BranchWork, Deal, DealBounds, deal_balanced, padded_lengths
from data.batching.settings import Setting
from data.modalities.lengths import TokenCounts

Size = tuple[int, int]  # H, W in pixels
Share = tuple[
    np.ndarray, Size | None
]  # positions [b] int64, size of their images (None: the transform's)


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """`visited` [G]: numbers in the training subset; `indices` [G]: the same samples in the source;
    `setting`: what holds in this step."""

    step: int
    epoch: int
    visited: np.ndarray
    indices: np.ndarray
    setting: Setting = field(default_factory=lambda: Setting(0, {}))


class Dealer(Protocol):
    """Deals global batches to the micro-batches of one branch.

    `deals_texts`: it deals texts, c · G of them where an image has c captions in the setting, and
    not samples; those of the image at p have the positions c · p .. c · p + c − 1. `equal_shares`:
    all micro-batches have equally many samples, where the global batch divides evenly.
    """

    deals_texts: bool
    equal_shares: bool

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        """R · M of them, those of replica 0 first; every position once."""


def contiguous(global_batch_size: int, replicas: int, num_micro_batches: int) -> list[np.ndarray]:
    """The positions of each micro-batch, R · M of them: the shares of replicas differ by at most
    one sample, and so do the micro-batches of a replica."""
    shares = np.array_split(np.arange(global_batch_size, dtype=np.int64), replicas)
    return [part for share in shares for part in np.array_split(share, num_micro_batches)]


class InOrder:
    """Contiguous, and as equal as the global batch allows."""

    deals_texts, equal_shares = False, True

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        parts = contiguous(len(batch.visited), replicas, num_micro_batches)
        return [(part, None) for part in parts]


@dataclass(frozen=True, eq=False)
class ByShape:
    """As equal as the global batch allows, one bucket each as far as that is possible."""

    buckets: BucketedSamples
    deals_texts, equal_shares = False, True

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        sizes = [len(part) for part in contiguous(len(batch.visited), replicas, num_micro_batches)]
        positions, bucket = deal_by_bucket(self.buckets.number[batch.visited], sizes)
        parts = np.split(positions, np.cumsum(sizes)[:-1])
        return [(part, self.buckets.sizes[b]) for part, b in zip(parts, bucket)]


@dataclass(frozen=True, eq=False)
class ByCost:
    """Texts, by what they cost: those of similar lengths together, so equal work and little
    padding. Costs are those of the setting.

    Texts alone, also where images share the line: batch normalisation sees the images of a
    micro-batch, and a caption's length says what is in the image. `num_stages` of the line.
    `length_multiple`: to which lengths are rounded up. `largest`: texts times the length they are
    padded to, at most, in one micro-batch; a batch that does not fit exceeds it by as little as
    goes.
    """

    tokens: TokenCounts
    max_text_tokens: int
    seed: int
    bounds: DealBounds
    largest: int | None = None
    num_stages: int = 1
    length_multiple: int = 1
    deals_texts, equal_shares = True, False

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        deal = self.deal(batch, replicas, num_micro_batches, num_micro_batches)
        return [(part, None) for line in deal for part in line]

    def deal(self, batch: GlobalBatch, replicas: int, least: int, most: int) -> Deal:
        """With as many micro-batches from `least` to `most` as take least time."""
        work = self.work(batch)
        bounds = DealBounds(self.bounds.min_size, self.bounds.max_size, least, most)
        while True:
            try:
                return deal_balanced(work, replicas, bounds, self.num_stages)
            except ValueError:
                if (
                    not work.most_padded
                    or work.most_padded > work.lengths.max() * work.lengths.size
                ):
                    raise  # not for want of memory
                work = replace(work, most_padded=work.most_padded * 9 // 8 + 1)

    def work(self, batch: GlobalBatch) -> BranchWork:
        captions = batch.setting.feed_rates.captions_per_image
        counts = self.tokens.of(
            batch.visited, batch.indices, self.seed, batch.epoch, captions
        )  # [G, captions]
        lengths = padded_lengths(counts, self.max_text_tokens, self.length_multiple).ravel()
        return BranchWork(lengths, batch.setting.costs["text"], self.largest)
