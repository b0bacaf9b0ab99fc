"""MIL-NCE: a clip and several captions near it in time, of which it is not known which one says
what is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.losses.blocks import (
    Part,
    Sides,
    asking_weights,
    belonging,
    logit_scale_exp,
    other_of,
    similarity_blocks,
)
from models.losses.infonce import InfoNCE


@dataclass(frozen=True)
class MILNCE(InfoNCE):
    """L = weighted mean over samples i of Dᵢ − Nᵢ (Miech et al. 2020, equation 1, as their code has
    it): Nᵢ the log-sum-exp of the similarities s of i's clip to its own captions, Dᵢ that of its
    clip to all captions and of its captions to all clips.

    With equal rows masked, and none of them positives. Scale and blocks are those of `InfoNCE`.
    """

    has_positives: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.label_smoothing:
            raise ValueError("label smoothing is for loss 'infonce'; leave it at 0")
        if self.targets.duplicates == "positives":
            raise ValueError(
                "duplicates 'positives' are not for loss 'milnce', whose positives are the "
                "captions of a clip; give masked or negatives"
            )

    def _part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        both: bool = False,
    ) -> Part:
        other_branch, scale = other_of(sides, branch), logit_scale_exp(parameters["logit_scale"])
        own, other = sides[branch], sides[other_branch]
        every = self._every(sides, statistics)
        matched = self._matched(sides, scale)
        weight = _weights(sides)
        own_label, other_label = own.label[mine], other.label
        embeds = own.embeds[mine]
        d_own = torch.empty_like(embeds)
        d_other = torch.zeros_like(other.embeds) if both else None
        for rows, scaled, logits in similarity_blocks(sides, branch, mine, scale, self.work_bytes):
            self._mask(logits, sides, branch, mine[rows])
            label = own_label[rows]
            belongs = belonging(sides, branch, mine[rows])
            d_logits = weight[label, None] * (logits - every[label, None]).exp()
            d_logits += weight[other_label] * (logits - every[other_label]).exp()
            positive = weight[label, None] * (logits - matched[label, None]).exp()
            d_logits -= torch.where(belongs, positive, 0)
            torch.mm(d_logits, other.embeds, out=d_own[rows])
            if d_other is not None:
                d_other.addmm_(d_logits.T, scaled)
        d_own *= scale
        gradients, shares = {branch: d_own}, {branch: embeds.new_zeros(len(mine))}
        asks = _clips(sides)
        if d_other is not None:
            gradients[other_branch] = d_other
            shares[other_branch] = d_other.new_zeros(len(d_other))
        if asks in shares:
            label = own_label if asks == branch else other_label
            shares[asks] = torch.where(label >= 0, (weight * (every - matched))[label], 0)
        return Part(shares, gradients, {"logit_scale": (embeds * d_own).sum().reshape(1)})

    def _every(self, sides: Sides, statistics: Mapping[str, Tensor]) -> Tensor:
        """Dᵢ [labels + 1], see `_by_label`."""
        labels = torch.cat([side.label for side in sides.values()])
        return _by_label(torch.cat([statistics[branch] for branch in sides]), labels)

    def _matched(self, sides: Sides, scale: Tensor) -> Tensor:
        """Nᵢ [labels + 1], see `_by_label`."""
        clips = sides[_clips(sides)]
        captions = sides[other_of(sides, _clips(sides))]
        if not len(clips.label):  # then all captions are nobody's
            return _by_label(captions.embeds.new_zeros(len(captions.label)), captions.label)
        order = clips.label.argsort()
        at = torch.searchsorted(clips.label[order], captions.label).clamp(max=len(order) - 1)
        # of what is nobody's any
        similarity = scale * (clips.embeds[order[at]] * captions.embeds).sum(1)
        return _by_label(similarity, captions.label)


def _by_label(values: Tensor, label: Tensor) -> Tensor:
    """[n] -> [labels + 1]: the log-sum-exp of those with each label; the last entry, which −1
    finds, is infinite, so that what is nobody's asks nothing."""
    number = int(label.max()) + 1 if len(label) else 0
    slot = torch.where(label < 0, number, label)
    most = values.new_full((number + 1,), -torch.inf).scatter_reduce(0, slot, values, "amax")
    most = most.masked_fill(most == -torch.inf, 0)
    sums = values.new_zeros(number + 1).index_add_(0, slot, (values - most[slot]).exp())
    found = most + sums.log()
    found[number] = torch.inf
    return found


def _weights(sides: Sides) -> Tensor:
    """[labels + 1], of each sample in the mean; the last one, which −1 finds, is 0."""
    side = sides[_clips(sides)]
    found = side.embeds.new_zeros(int(side.label.max()) + 2 if len(side.label) else 1)
    found[side.label] = asking_weights(side)
    return found


def _clips(sides: Sides) -> str:
    """The branch that has one row for each sample; the other one has as many or more."""
    return min(sides, key=lambda branch: len(sides[branch].label))
