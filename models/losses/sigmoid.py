"""The sigmoid loss: does this text belong to this image? Each pair alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses.blocks import (
    Part,
    Sides,
    Targets,
    first_of,
    logit_scale_exp,
    mean_weights,
    other_of,
    shown_scale,
    similarity_blocks,
    stop_outward,
)

EXACT_BELOW = 40.0  # log(1 + exp(x)) is x above it, to the last bit of float64


@dataclass(frozen=True)
class Sigmoid:
    """Binary cross entropy over all pairs of an image and a text (SigLIP: Zhai et al. 2023, section
    3.2).

    L = −1/M Σᵢⱼ ωᵢⱼ log σ(zᵢⱼ (scale · uᵢ·vⱼ + bias)), z = 1 for positives and −1 for all others
    that are not masked, M images. ωᵢⱼ is the mean of the two rows' weights, each divided by the
    mean weight of its side: 1 where weights are equal. As in InfoNCE, a row without weight is still
    compared with the others: it asks nothing, but answers.

    `logit_scale` [1] is in log space; the scale is its exponential, at most 100 as in InfoNCE. A
    pair needs nothing of any other, so there are no statistics to exchange. `work_bytes` as in
    InfoNCE.
    """

    work_bytes: int | None = None
    targets: Targets = Targets()
    parameters: ClassVar[Mapping[str, float]] = {"logit_scale": math.log(10.0), "logit_bias": -10.0}
    constrained = staticmethod(stop_outward)
    reported = staticmethod(shown_scale)

    def statistics(
        self, sides: Sides, branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> None:
        return None

    def part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> Part:
        """What the rows `mine` [b] of a side contribute."""
        return self._part(sides, branch, mine, parameters)

    def whole(self, sides: Sides, parameters: Mapping[str, Tensor]) -> Part:
        """The whole loss and all gradients: each block serves both sides."""
        first = first_of(sides)
        everyone = torch.arange(len(sides[first].label), device=sides[first].label.device)
        return self._part(sides, first, everyone, parameters, both=True)

    def _part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        parameters: Mapping[str, Tensor],
        both: bool = False,
    ) -> Part:
        """`both`: `mine` are all rows of the side, and the other side's part is wanted, too."""
        other_branch = other_of(sides, branch)
        other, scale = sides[other_branch].embeds, logit_scale_exp(parameters["logit_scale"])
        # [b], [B]; their sums: ω / M
        along, across = (_half_weights(sides, branch)[mine], _half_weights(sides, other_branch))
        embeds = sides[branch].embeds[mine]
        d_own = torch.empty_like(embeds)
        d_other = torch.zeros_like(other) if both else None
        d_bias = embeds.new_zeros(1)
        shares = {
            branch: torch.empty_like(along),
            **({other_branch: torch.zeros_like(across)} if both else {}),
        }
        for rows, scaled, logits in similarity_blocks(sides, branch, mine, scale, self.work_bytes):
            positive = self.targets.positives(sides, branch, mine[rows])
            masked = self.targets.masked(sides, branch, mine[rows])
            logits += parameters["logit_bias"]
            if masked is not None:
                logits.masked_fill_(masked, -torch.inf)  # log σ(∞) = 0, and so is its gradient
            wrong = torch.where(positive, -logits, logits)  # −z · logit
            losses = F.softplus(wrong, threshold=EXACT_BELOW)
            shares[branch][rows] = along[rows] * losses.sum(1)
            if both:
                shares[other_branch] += across * losses.sum(0)
            wrong.sigmoid_().mul_(torch.add(along[rows, None], across, out=losses))
            d_logits = torch.where(positive, torch.neg(wrong, out=losses), wrong, out=logits)
            d_bias += d_logits.sum()
            torch.mm(d_logits, other, out=d_own[rows])
            if d_other is not None:
                d_other.addmm_(d_logits.T, scaled)
            del positive, wrong, losses, d_logits  # before the next block's are made
        d_own *= scale
        gradients = {branch: d_own, **({} if d_other is None else {other_branch: d_other})}
        # ∂/∂log scale = Σᵢⱼ ∂L/∂sᵢⱼ · sᵢⱼ, without bias
        scalars = {"logit_scale": (embeds * d_own).sum().reshape(1), "logit_bias": d_bias}
        return Part(shares, gradients, scalars)


def _half_weights(sides: Sides, branch: str) -> Tensor:
    """Half of each row's weight over the mean weight of its side, divided by the number of rows of
    the first branch (images): [B]."""
    return (
        mean_weights(sides[branch])
        * len(sides[branch].label)
        / (2 * max(1, len(sides[first_of(sides)].label)))
    )
