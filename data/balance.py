"""Which positions of a global batch make which micro-batch: in order, by the shape of the picture, or by what they cost.

The loss is over the whole global batch, so a deal changes the speed and nothing else. Every rank works it out by itself: it is a pure
function of seed, step and the costs, which are the same everywhere.

G: samples of a global batch, R: replicas of the branch, M: micro-batches of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data.branch_cost import BranchCost
from data.buckets import BucketedSamples, deal_by_bucket
from data.dealing import BranchWork, Deal, DealBounds, deal_balanced, padded_lengths
from data.lengths import TokenCounts

Size = tuple[int, int]  # H, W in pixels
Share = tuple[np.ndarray, Size | None]  # positions [b] int64, size of their pictures (None: the transform's)


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """`visited` [G]: numbers in the training subset; `indices` [G]: the same samples in the source."""

    step: int
    epoch: int
    visited: np.ndarray
    indices: np.ndarray


class Dealer(Protocol):
    """Deals global batches to the micro-batches of one branch, or of branches that share a line."""

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        """R · M of them, those of replica 0 first; every position 0..G-1 once."""


class InOrder:
    """Contiguous and equal."""

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        parts = np.arange(len(batch.visited), dtype=np.int64).reshape(replicas * num_micro_batches, -1)
        return [(part, None) for part in parts]


@dataclass(frozen=True, eq=False)
class ByShape:
    """Equal sizes, one bucket each as far as that is possible."""

    buckets: BucketedSamples

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        number = replicas * num_micro_batches
        positions, bucket = deal_by_bucket(self.buckets.number[batch.visited], number)
        return [(part, self.buckets.sizes[b]) for part, b in zip(positions.reshape(number, -1), bucket)]


@dataclass(frozen=True, eq=False)
class ByCost:
    """Sizes by what the samples cost, texts of similar lengths together: equal work, little padding.

    `costs`: of the branches that share the deal: the text's in a fork, both in a line. `num_stages` of the line; `same_stages`: each stage
    has both branches (merged). `largest`: samples times the text's limit that a micro-batch may be padded to at most.
    """

    tokens: TokenCounts
    max_text_tokens: int
    seed: int
    costs: Mapping[str, BranchCost]
    bounds: DealBounds
    largest: int | None = None
    num_stages: int = 1
    same_stages: bool = False

    def shares(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> list[Share]:
        deal = self.deal(batch, replicas, num_micro_batches)
        return [(part, None) for line in deal for part in line]

    def deal(self, batch: GlobalBatch, replicas: int, num_micro_batches: int) -> Deal:
        bounds = DealBounds(self.bounds.min_size, self.bounds.max_size, num_micro_batches, num_micro_batches)
        return deal_balanced(self.works(batch), replicas, bounds, self.num_stages, self.same_stages)

    def works(self, batch: GlobalBatch) -> list[BranchWork]:
        counts = self.tokens.of(batch.visited, batch.indices, self.seed, batch.epoch)
        texts = padded_lengths(counts, self.max_text_tokens)
        works = [BranchWork(texts, self.costs["text"], self.largest)]
        return [BranchWork(np.ones_like(texts), self.costs["image"]), *works] if "image" in self.costs else works
