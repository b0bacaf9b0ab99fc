"""What one model finds alike, another is to find alike: the similarities of a batch, distilled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.losses.blocks import (
    Part,
    Sides,
    asking_weights,
    logit_scale_exp,
    shown_scale,
    similarity_blocks,
    stop_outward,
    whole_by_parts,
)


@dataclass(frozen=True)
class SimilarityKL:
    """Over four branches: images and texts of a student, then those of its teacher.

    L = ½ (weighted mean over images of KL(softmaxⱼ tᵢⱼ ‖ softmaxⱼ sᵢⱼ) + the same over texts), s the
    student's similarities times its learned scale, t the teacher's times `teacher_scale` (MobileCLIP:
    Vasu et al. 2024, equation 2; CLIP-KD: Yang et al. 2024, their contrastive relational
    distillation). Weights are those of the student's rows. The teacher has no gradient.

    A branch has as many rows as the same of the other model; their widths may differ. `logit_scale`
    and `work_bytes` as in `InfoNCE`.
    """

    teacher_scale: float = 100.0
    work_bytes: int | None = None
    parameters: ClassVar[Mapping[str, float]] = {"logit_scale": math.log(1 / 0.07)}
    constrained = staticmethod(stop_outward)
    reported = staticmethod(shown_scale)

    def statistics(
        self, sides: Sides, branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Log-sum-exp of each of the rows `mine` [b] of a side against the other of its model:
        [b]."""
        student = branch in [*sides][:2]
        found = sides[branch].embeds.new_empty(len(mine))
        for rows, logits in self._blocks(sides, branch, mine, parameters, student):
            found[rows] = logits.logsumexp(1)
        return found

    def part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> Part:
        """What the rows `mine` [b] of a side contribute. `statistics`: of all rows of all four."""
        embeds = sides[branch].embeds[mine]
        names = [*sides]
        if branch in names[2:]:
            nothing = {"logit_scale": embeds.new_zeros(1)}
            return Part({branch: embeds.new_zeros(len(mine))}, {branch: embeds * 0}, nothing)
        of_two = names.index(branch)
        other, taught, other_taught = names[1 - of_two], names[2 + of_two], names[3 - of_two]
        if len(sides[branch].label) != len(sides[taught].label):
            raise ValueError(
                f"{len(sides[branch].label)} rows of {branch} and {len(sides[taught].label)} of "
                f"{taught}: a teacher needs a row for each of the student's"
            )
        along, across = (asking_weights(sides[name]) / 2 for name in (branch, other))
        along, gradient = along[mine], torch.empty_like(embeds)
        shares = torch.empty_like(along)
        for (rows, own), (_, target) in zip(
            self._blocks(sides, branch, mine, parameters, True),
            self._blocks(sides, taught, mine, parameters, False),
        ):
            here = mine[rows]
            log_own = own - statistics[branch][here, None]
            log_target = target - statistics[taught][here, None]
            wanted = log_target.exp()
            shares[rows] = along[rows] * (wanted * (log_target - log_own)).sum(1)
            d_logits = log_own.exp_().sub_(wanted).mul_(along[rows, None])
            toward = (
                own.sub_(statistics[other]).exp_() - target.sub_(statistics[other_taught]).exp_()
            )
            gradient[rows] = d_logits.addcmul_(toward, across) @ sides[other].embeds
        gradient *= logit_scale_exp(parameters["logit_scale"])
        # ∂/∂log scale = Σᵢⱼ ∂L/∂sᵢⱼ · sᵢⱼ
        learned = {"logit_scale": (embeds * gradient).sum().reshape(1)}
        return Part({branch: shares}, {branch: gradient}, learned)

    def whole(self, sides: Sides, parameters: Mapping[str, Tensor]) -> Part:
        """The whole loss and all gradients."""
        return whole_by_parts(self, sides, parameters)

    def _blocks(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        parameters: Mapping[str, Tensor],
        student: bool,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Of rows of a side all scaled similarities [t, B] to the other of its model."""
        names = [*sides][:2] if student else [*sides][2:]
        two = {name: sides[name] for name in names}
        learned = logit_scale_exp(parameters["logit_scale"])
        scale = learned if student else torch.full_like(learned, self.teacher_scale)
        for rows, _, logits in similarity_blocks(two, branch, mine, scale, self.work_bytes, 2):
            yield rows, logits
