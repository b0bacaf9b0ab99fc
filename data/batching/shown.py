"""Which annotations a sample shows, such as regions of its image, with negatives of them, and their
places in a global batch.

G: samples of a global batch, A: their annotations, each with a place 0..A−1, n: negatives, behind
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from data.annotations import Annotation
from data.batching.draws import annotation_numbers, phrase_number
from data.stored.annotations import StoredAnnotations
from data.stored.kinds import annotations_of

if TYPE_CHECKING:
    from data.index.sources import Source
    from data.stored.derived import Derived


@dataclass(frozen=True, eq=False)
class Places:
    """Of some samples [b] int64 each: the place of their `first` annotation, and the `number` that
    they show; the same of negatives. `kind`: of the annotations."""

    kind: Derived
    first: np.ndarray
    number: np.ndarray
    first_negative: np.ndarray
    negatives: np.ndarray

    def of(self, rows: np.ndarray) -> Places:
        each = (self.first, self.number, self.first_negative, self.negatives)
        return Places(self.kind, *(values[rows] for values in each))

    def numbers(self) -> dict[tuple[str, str], np.ndarray]:
        """How many rows each sample has, by their name and the branch that makes them."""
        each = self.number, self.number + self.negatives
        return dict(zip(zip(self.kind.rows, self.kind.of), each))

    @property
    def num_phrases(self) -> int:
        """With the negatives."""
        return int(self.number.sum() + self.negatives.sum())

    def samples(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each annotation of these samples, whose numbers in the source are `index`: its sample
        there, and which of those that it shows."""
        return np.repeat(index, self.number), counted(self.number)

    def phrases(self, index: np.ndarray, weight: np.ndarray | None) -> PhraseRows:
        """Of all annotations and negatives of these samples, whose numbers in the source are
        `index`."""
        rows = np.repeat(np.tile(np.arange(len(index)), 2), [*self.number, *self.negatives])
        of_annotations, of_negatives = map(counted, (self.number, self.negatives))
        position = np.concatenate(
            [
                np.repeat(self.first, self.number) + of_annotations,
                np.repeat(self.first_negative, self.negatives) + of_negatives,
            ]
        )
        number = np.concatenate([of_annotations, -1 - of_negatives])
        shown = np.repeat([*self.number, *self.negatives], [*self.number, *self.negatives])
        weight = None if weight is None else weight[rows]
        return PhraseRows(self.kind, index[rows], number, shown, position, weight)


@dataclass(frozen=True, eq=False)
class PhraseRows:
    """Phrases [n]: their samples in the source, their numbers (k: of the k-th annotation that the
    sample shows; −1 − k: its k-th negative), how many annotations, or negatives, the sample shows,
    their places in the global batch, and their weights in millionths (None: all the same). `kind`:
    of the annotations."""

    kind: Derived
    index: np.ndarray
    number: np.ndarray
    shown: np.ndarray
    position: np.ndarray
    weight: np.ndarray | None

    def of(self, rows: np.ndarray) -> PhraseRows:
        weight = None if self.weight is None else self.weight[rows]
        index, number, shown = self.index[rows], self.number[rows], self.shown[rows]
        return PhraseRows(self.kind, index, number, shown, self.position[rows], weight)

    def texts(self, source: Source, seed: int, epoch: int, training: bool) -> list[str]:
        """Of each row the negative, or one of the phrases of its annotation; the first in an
        evaluation."""

        @lru_cache
        def of_sample(i: int, shown: int, negative: bool) -> Sequence[Any]:
            if negative:
                return shown_negatives(source, self.kind, i, shown, seed, epoch)
            return shown_annotations(source, self.kind, i, shown, seed, epoch, training)

        found = []
        for i, k, shown in zip(self.index.tolist(), self.number.tolist(), self.shown.tolist()):
            text = of_sample(i, shown, k < 0)[k if k >= 0 else -1 - k]
            if isinstance(text, Annotation):
                number = len(text.phrases) if training else 1
                text = text.phrases[phrase_number(seed, epoch, i, k, number)]
            found.append(text)
        return found


@dataclass(frozen=True)
class ShownAnnotations:
    """Of each sample as many annotations of a kind as it has, at most `most`, and as many of all
    their negatives, at most `most_negatives`; which, is drawn in each epoch. `candidates`: with
    those that have no phrase, behind the others, for an evaluation."""

    source: Source
    kind: Derived
    most: int
    most_negatives: int
    candidates: bool = False

    def places(self, indices: np.ndarray, training: bool = True) -> Places:
        """Of the samples [G] of a global batch. An evaluation shows no negatives."""
        number = np.minimum(self._numbers(indices), self.most).astype(np.int64)
        negatives = np.zeros_like(number)
        if training:
            have = self.source.numbers(self._stored.negatives, indices)
            negatives = np.minimum(have, self.most_negatives).astype(np.int64)
        ends = np.cumsum(number)
        first = number.sum() + np.cumsum(negatives) - negatives
        return Places(self.kind, ends - number, number, first, negatives)

    @property
    def _stored(self) -> StoredAnnotations:
        return annotations_of((self.kind.name,))[0]

    def in_all(self, indices: np.ndarray) -> int:
        """How many with phrases these samples have, whatever is shown of them."""
        return self.source.numbers(self._stored.count, indices).sum(dtype=int)

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        numbers = self.source.numbers(self._stored.count, indices)
        if not self.candidates:
            return numbers
        with_phrases, name = zip(indices.tolist(), numbers.tolist()), self.kind.name
        return np.array([len(self.source.value(name, i)) if n else 0 for i, n in with_phrases])


def shown_annotations(
    source: Source, kind: Derived, i: int, number: int, seed: int, epoch: int, training: bool
) -> list[Annotation]:
    """The `number` annotations that sample i shows; in an evaluation the first ones, of which those
    with phrases come first."""
    if not number:
        return []
    found = source.value(kind.name, i)
    if not training:
        return found[:number]
    found = [each for each in found if each.phrases]
    if number == len(found):
        return found
    return [found[k] for k in annotation_numbers(seed, epoch, i, len(found), number)]


def shown_negatives(
    source: Source, kind: Derived, i: int, number: int, seed: int, epoch: int
) -> list[str]:
    """The `number` negatives that sample i shows, of all of its annotations together."""
    if not number:
        return []
    texts = [text for each in source.value(kind.name, i) for text in each.negatives]
    return [
        texts[k] for k in annotation_numbers(seed, epoch, i, len(texts), number, negatives=True)
    ]


def counted(numbers: np.ndarray) -> np.ndarray:
    """[2, 0, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(numbers)
    return np.arange(numbers.sum()) - np.repeat(ends - numbers, numbers)
