"""InfoNCE: which of all texts belongs to this image, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from models.losses.blocks import (
    Part,
    Sides,
    Targets,
    asking_weights,
    first_of,
    logit_scale_exp,
    other_of,
    shown_scale,
    similarity_blocks,
    stop_outward,
)


class _Terms(NamedTuple):
    """What each row of a side puts into ∂L/∂s, s the scaled similarities: softmax · half −
    [positive] · positive − anyone."""

    log_sum_exp: Tensor
    half: Tensor  # half of the row's weight in its side's mean: each side is half of the loss
    positive: Tensor
    anyone: Tensor


@dataclass(frozen=True)
class InfoNCE:
    """Symmetric cross entropy over similarities, the mean of both directions (CLIP: Radford et al.
    2021, section 2.3).

    L = ½ (weighted mean over images of −Σⱼ tᵢⱼ log softmaxⱼ(sᵢⱼ) + the same over texts). The target
    t of a row is even over its positives (SupCon: Khosla et al. 2020, their L_out) with 1 −
    `label_smoothing` of its mass, and even over all with the rest. A masked row is in no softmax.

    `logit_scale` [1] is in log space; the scale used is its exponential, at most 100 as in CLIP, at
    first 1 / 0.07 (section 2.5). `work_bytes`: what a block of similarities takes at most, with all
    that is made of it; None: `block_bytes` of the device.
    """

    label_smoothing: float = 0.0
    work_bytes: int | None = None
    targets: Targets = Targets()
    has_positives: ClassVar[bool] = True
    """Whether duplicates can be each other's positives."""
    parameters: ClassVar[Mapping[str, float]] = {"logit_scale": math.log(1 / 0.07)}
    constrained = staticmethod(stop_outward)
    reported = staticmethod(shown_scale)

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label smoothing {self.label_smoothing} is not in 0 <= F < 1")

    def statistics(
        self, sides: Sides, branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Log-sum-exp of each of the rows `mine` [b] of a side: [b]."""
        log_sum_exp = sides[branch].embeds.new_empty(len(mine))
        for rows, _, logits in similarity_blocks(
            sides, branch, mine, logit_scale_exp(parameters["logit_scale"]), self.work_bytes
        ):
            self._mask(logits, sides, branch, mine[rows])
            log_sum_exp[rows] = logits.logsumexp(1)
        return log_sum_exp

    def part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> Part:
        """What the rows `mine` [b] of a side contribute. `statistics`: of all rows of both
        sides."""
        return _settled(sides, self._part(sides, branch, mine, statistics, parameters))

    def whole(self, sides: Sides, parameters: Mapping[str, Tensor]) -> Part:
        """The whole loss and all gradients: each block serves both sides."""
        first = first_of(sides)
        everyone = torch.arange(len(sides[first].label), device=sides[first].label.device)
        statistics = self._both_statistics(sides, everyone, parameters)
        return _settled(
            sides, self._part(sides, first, everyone, statistics, parameters, both=True)
        )

    def _both_statistics(
        self, sides: Sides, everyone: Tensor, parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Of the rows as in `statistics`, and online of the columns."""
        first, second = sides
        rows_log_sum_exp = sides[first].embeds.new_empty(len(everyone))
        columns_log_sum_exp = sides[second].embeds.new_full((len(sides[second].label),), -math.inf)
        for rows, _, logits in similarity_blocks(
            sides, first, everyone, logit_scale_exp(parameters["logit_scale"]), self.work_bytes
        ):
            self._mask(logits, sides, first, everyone[rows])
            rows_log_sum_exp[rows] = logits.logsumexp(1)
            columns_log_sum_exp = torch.logaddexp(columns_log_sum_exp, logits.logsumexp(0))
        return {first: rows_log_sum_exp, second: columns_log_sum_exp}

    def _part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        both: bool = False,
    ) -> Part:
        """`both`: `mine` are all rows of the side, and the other side's part is wanted, too."""
        other_branch = other_of(sides, branch)
        own, other, scale = (
            sides[branch],
            sides[other_branch],
            logit_scale_exp(parameters["logit_scale"]),
        )
        across = self._terms(sides, other_branch, statistics)
        along = _Terms(*(values[mine] for values in self._terms(sides, branch, statistics)))
        embeds = own.embeds[mine]
        # matched: sum over the positives of a row of s
        d_own, matched_own = (torch.empty_like(embeds), embeds.new_empty(len(mine)))
        if both:
            d_other, matched_other = torch.zeros_like(other.embeds), torch.zeros_like(across.half)
        for rows, scaled, logits in similarity_blocks(sides, branch, mine, scale, self.work_bytes):
            self._mask(logits, sides, branch, mine[rows])
            positive = self.targets.positives(sides, branch, mine[rows])
            matched = torch.where(positive, logits, 0)
            matched_own[rows] = matched.sum(1)
            if both:
                matched_other += matched.sum(0)
            d_logits = torch.sub(-along.positive[rows, None], across.positive, out=matched).mul_(
                positive
            )
            d_logits.addcmul_(torch.sub(logits, across.log_sum_exp).exp_(), across.half)
            d_logits.addcmul_(
                logits.sub_(along.log_sum_exp[rows, None]).exp_(), along.half[rows, None]
            )
            torch.mm(d_logits, other.embeds, out=d_own[rows])
            if both:
                d_other.addmm_(d_logits.T, scaled)
            del positive, matched, d_logits  # before the next block's are made
        d_own = scale * (d_own - _toward_all(along, across, other.embeds))
        gradients = {branch: d_own}
        shares = {branch: self._shares(along, matched_own, scale * (embeds @ _mean(other.embeds)))}
        if both:
            gradients[other_branch] = d_other.sub_(scale * _toward_all(across, along, embeds))
            shares[other_branch] = self._shares(
                across, matched_other, scale * (other.embeds @ _mean(embeds))
            )
        # ∂/∂log scale = Σᵢⱼ ∂L/∂sᵢⱼ · sᵢⱼ
        return Part(shares, gradients, {"logit_scale": (embeds * d_own).sum().reshape(1)})

    def _mask(self, logits: Tensor, sides: Sides, branch: str, rows: Tensor) -> None:
        masked = self.targets.masked(sides, branch, rows)
        if masked is not None:
            logits.masked_fill_(masked, -torch.inf)

    def _terms(self, sides: Sides, branch: str, statistics: Mapping[str, Tensor]) -> _Terms:
        other = sides[other_of(sides, branch)]
        half = asking_weights(sides[branch]) / 2
        # rows that are nobody's may have none, and no weight
        positives = self.targets.num_positives(sides, branch) + (sides[branch].label < 0)
        # of a row without an answer that is masked everywhere, −inf: it asks nothing, and −inf − −inf
        # would be not a number
        log_sum_exp = statistics[branch].masked_fill(statistics[branch] == -math.inf, 0)
        return _Terms(
            log_sum_exp,
            half,
            half * (1 - self.label_smoothing) / positives,
            half * self.label_smoothing / max(1, len(other.label)),
        )

    def _shares(self, terms: _Terms, matched: Tensor, mean_similarity: Tensor) -> Tensor:
        """[b], what each row adds to half of the weighted mean of log-sum-exp − Σⱼ tᵢⱼ sᵢⱼ."""
        target = terms.positive * matched + terms.half * self.label_smoothing * mean_similarity
        return terms.half * terms.log_sum_exp - target


def _mean(embeds: Tensor) -> Tensor:
    """[B, D] -> [D]; of no rows 0."""
    return embeds.mean(0) if len(embeds) else embeds.sum(0)


def _settled(sides: Sides, part: Part) -> Part:
    """A row whose partner is the only candidate has a constant loss, so its gradient is 0. What is
    computed for it is rounding, since ranks add up in different orders, and AdamW would make whole
    steps of that."""
    if any(len(side.label) > 1 for side in sides.values()):
        return part
    embeds = {branch: torch.zeros_like(gradient) for branch, gradient in part.embeds.items()}
    scalars = {name: torch.zeros_like(gradient) for name, gradient in part.parameters.items()}
    return part._replace(embeds=embeds, parameters=scalars)


def _toward_all(own: _Terms, other: _Terms, other_embeds: Tensor) -> Tensor:
    """Σⱼ (anyoneᵢ + anyoneⱼ) · otherⱼ, for each own row: [b, D]."""
    return torch.outer(own.anyone, other_embeds.sum(0)) + other.anyone @ other_embeds
