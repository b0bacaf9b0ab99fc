"""Which annotation of its own sample does a phrase choose, among those that are given for it, such
as the boxes of an image? Exact, in blocks. RefCOCO with given boxes (Yu et al. 2016) is such a
question."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_iou

from models.metrics.retrieval import NUM_SUMS, RECALL_AT, TOLERANCE, hits, similarities

OVERLAP = 0.5  # of a place with that of the phrase, at which it counts as found

Rule = Callable[[slice], Tensor]
"""Rows of phrases -> which annotations [B] are right for each, if they are of the same sample: bool
[block, B]."""


def choice_sums(
    own: Tensor,
    other: Tensor,
    sample: Tensor,
    others_sample: Tensor,
    is_right: Rule,
) -> Tensor:
    """Phrases `own` [b, D] of the samples `sample` [b], among annotations `other` [B, D] of the
    samples `others_sample` [B]: what `query_figures` divides, float64 [7], which ranks add up.

    Of the sample of a phrase at least one annotation `is_right`. Another one that ties with the
    best right one counts as before it.
    """
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=own.device)
    for same, right, ranks in _ranked(own, other, sample, others_sample, is_right):
        candidates, answers = same.sum(1).double(), right.sum(1).double()
        chance = torch.ones_like(candidates)
        for drawn in range(RECALL_AT[-1]):  # each of the first wrong, one after the other
            left = (candidates - drawn).clamp(min=1)
            chance *= ((candidates - answers - drawn) / left).clamp(min=0)
        of_all = torch.stack([answers.sum(), candidates.sum(), (1 - chance).sum()])
        number = torch.tensor([len(ranks)], dtype=torch.float64, device=own.device)
        sums += torch.cat([hits(ranks), number, of_all])
    return sums


class Choice(NamedTuple):
    """How often the annotation that a phrase chooses is right, and how often one drawn by chance
    is, in 0..1; among how many, on average."""

    right: float
    chance: float
    candidates: float


def choice(
    own: Tensor, other: Tensor, sample: Tensor, others_sample: Tensor, is_right: Rule
) -> Choice:
    """As `choice_sums` takes and counts them. Errors: ZeroDivisionError without any phrase."""
    sums = torch.zeros(3, dtype=torch.float64, device=own.device)
    for same, right, ranks in _ranked(own, other, sample, others_sample, is_right):
        candidates = same.sum(1).double()
        chance = (right.sum(1) / candidates).sum()
        sums += torch.stack([(ranks == 0).sum(), chance, candidates.sum()])
    return Choice(*(sum / len(own) for sum in sums.tolist()))


class Said(NamedTuple):
    """Which annotations phrases [n] are said of: their `sample`, a `key` that is equal for equal
    phrases, and the number of their `annotation` among B, each int64 [n]. A phrase that comes
    several times with a sample is said of all these annotations."""

    sample: Tensor
    key: Tensor
    annotation: Tensor

    def pairs(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Of a block of phrases each one [m] with an annotation [m] that it is said of."""
        alike = (self.sample[rows, None] == self.sample) & (self.key[rows, None] == self.key)
        phrase, other = alike.nonzero(as_tuple=True)
        return phrase, self.annotation[other]


def overlapping(box: Tensor, said: Said) -> Rule:
    """Right are annotations whose intersection over union with a place of the phrase is at least
    `OVERLAP`. `box` [B, 4]: x1, y1, x2, y2, in any unit; of spans y1 = 0 and y2 = 1."""

    def is_right(rows: slice) -> Tensor:
        phrase, annotation = said.pairs(rows)
        overlaps = (box_iou(box[annotation], box) >= OVERLAP).to(torch.int32)
        found = torch.zeros(len(said.key[rows]), len(box), dtype=torch.int32, device=box.device)
        return found.index_add_(0, phrase, overlaps) > 0

    return is_right


def said_of(number: int, said: Said) -> Rule:
    """Right are those of the `number` annotations that the phrase is said of."""

    def is_right(rows: slice) -> Tensor:
        block = said.key[rows]
        found = torch.zeros(len(block), number, dtype=torch.bool, device=block.device)
        found[said.pairs(rows)] = True
        return found

    return is_right


def equal(key: Tensor, right_key: Tensor) -> Rule:
    """Right are annotations with the `key` [B] that the phrase has, `right_key` [b]."""
    return lambda rows: right_key[rows, None] == key


def _ranked(
    own: Tensor,
    other: Tensor,
    sample: Tensor,
    others_sample: Tensor,
    is_right: Rule,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of blocks of phrases: which annotations are of the same sample, and which of these are right,
    bool [block, B]; the place of the best right one, from 0, int64 [block]."""
    for rows, similarity in similarities(own, other):
        same = sample[rows, None] == others_sample
        right = same & is_right(rows)
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        # not-a-number is not behind
        yield same, right, (same & ~right & ~(similarity < best - TOLERANCE)).sum(1)
