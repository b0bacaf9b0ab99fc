"""Which regions of its image a sample shows, with negatives of them, and their places in a global
batch.

G: samples of a global batch, R: their regions, each with a place 0..R−1, n: negatives, behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from data.batching.draws import phrase_number, region_numbers
from data.index.sources import Source
from data.regions import Region
from data.stored.derived import REGIONS


class Places(NamedTuple):
    """Of some samples [b] int64 each: the place of their first region, and how many they show; the
    same of negatives."""

    region: np.ndarray
    regions: np.ndarray
    negative: np.ndarray
    negatives: np.ndarray

    def of(self, rows: np.ndarray) -> Places:
        return Places(*(each[rows] for each in self))

    def numbers(self) -> dict[tuple[str, str], np.ndarray]:
        """How many rows each sample has, by their name and the branch that makes them."""
        each = self.regions, self.regions + self.negatives
        return dict(zip(zip(REGIONS.rows, REGIONS.of), each))

    def samples(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each region of these samples, whose numbers in the source are `index`: its sample
        there, and which of those that it shows."""
        return np.repeat(index, self.regions), _counted(self.regions)

    def phrases(self, index: np.ndarray, weight: np.ndarray | None) -> PhraseRows:
        """Of all regions and negatives of these samples, whose numbers in the source are
        `index`."""
        rows = np.repeat(np.tile(np.arange(len(index)), 2), [*self.regions, *self.negatives])
        of_regions, of_negatives = map(_counted, (self.regions, self.negatives))
        position = np.concatenate(
            [
                np.repeat(self.region, self.regions) + of_regions,
                np.repeat(self.negative, self.negatives) + of_negatives,
            ]
        )
        number = np.concatenate([of_regions, -1 - of_negatives])
        shown = np.repeat([*self.regions, *self.negatives], [*self.regions, *self.negatives])
        weight = None if weight is None else weight[rows]
        return PhraseRows(index[rows], number, shown, position, weight)


@dataclass(frozen=True, eq=False)
class PhraseRows:
    """Phrases [n]: their samples in the source, their numbers (k: of the k-th region that the
    sample shows; −1 − k: its k-th negative), how many regions, or negatives, the sample shows,
    their places in the global batch, and their weights in millionths (None: all the same)."""

    index: np.ndarray
    number: np.ndarray
    shown: np.ndarray
    position: np.ndarray
    weight: np.ndarray | None

    def of(self, rows: np.ndarray) -> PhraseRows:
        weight = None if self.weight is None else self.weight[rows]
        index, number, shown = self.index[rows], self.number[rows], self.shown[rows]
        return PhraseRows(index, number, shown, self.position[rows], weight)

    def texts(self, source: Source, seed: int, epoch: int, training: bool) -> list[str]:
        """Of each row the negative, or one of the phrases of its region; the first in an
        evaluation."""

        @lru_cache
        def of_sample(i: int, shown: int, negative: bool) -> Sequence[Any]:
            if negative:
                return shown_negatives(source, i, shown, seed, epoch)
            return shown_regions(source, i, shown, seed, epoch, training)

        found = []
        for i, k, shown in zip(self.index.tolist(), self.number.tolist(), self.shown.tolist()):
            text = of_sample(i, shown, k < 0)[k if k >= 0 else -1 - k]
            if isinstance(text, Region):
                number = len(text.phrases) if training else 1
                text = text.phrases[phrase_number(seed, epoch, i, k, number)]
            found.append(text)
        return found


@dataclass(frozen=True)
class ShownRegions:
    """Of each image as many regions as it has, at most `most`, and as many of all their negatives,
    at most `most_negatives`; which, is drawn in each epoch. `candidates`: with those that have no
    phrase, behind the others, for an evaluation."""

    source: Source
    most: int
    most_negatives: int
    candidates: bool = False

    def places(self, indices: np.ndarray, training: bool = True) -> Places:
        """Of the samples [G] of a global batch. An evaluation shows no negatives."""
        regions = np.minimum(self._num_regions(indices), self.most).astype(np.int64)
        negatives = np.zeros_like(regions)
        if training:
            have = self.source.numbers("num_negatives", indices)
            negatives = np.minimum(have, self.most_negatives).astype(np.int64)
        ends = np.cumsum(regions)
        first = regions.sum() + np.cumsum(negatives) - negatives
        return Places(ends - regions, regions, first, negatives)

    def _num_regions(self, indices: np.ndarray) -> np.ndarray:
        numbers = self.source.numbers("num_regions", indices)
        if not self.candidates:
            return numbers
        with_phrases = zip(indices.tolist(), numbers.tolist())
        return np.array([len(self.source.value("region", i)) if n else 0 for i, n in with_phrases])


def shown_regions(
    source: Source, i: int, number: int, seed: int, epoch: int, training: bool
) -> list[Region]:
    """The `number` regions that sample i shows; in an evaluation the first ones, of which those
    with phrases come first."""
    if not number:
        return []
    regions = source.value("region", i)
    if not training:
        return regions[:number]
    regions = [region for region in regions if region.phrases]
    if number == len(regions):
        return regions
    return [regions[k] for k in region_numbers(seed, epoch, i, len(regions), number)]


def shown_negatives(source: Source, i: int, number: int, seed: int, epoch: int) -> list[str]:
    """The `number` negatives that sample i shows, of all of its regions together."""
    if not number:
        return []
    texts = [text for region in source.value("region", i) for text in region.negatives]
    return [texts[k] for k in region_numbers(seed, epoch, i, len(texts), number, negatives=True)]


def _counted(numbers: np.ndarray) -> np.ndarray:
    """[2, 0, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(numbers)
    return np.arange(numbers.sum()) - np.repeat(ends - numbers, numbers)
