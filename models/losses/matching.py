"""Image-text matching: does this text belong to this image? Asked of every pair, and of the
hardest that do not belong together.

The negatives are drawn from the batch (ALBEF: Li et al. 2021, section 3.2): for each row of a side
one row of the other that is a negative of it, with probability softmax of the scaled similarities.
The draw is a function of (seed, place, place) alone, so it is the same however the batch is split:
with Gumbel noise gᵢⱼ = −log(−log uᵢⱼ), argmaxⱼ (sᵢⱼ + gᵢⱼ) has that distribution (Gumbel 1954), and
uᵢⱼ is a hash of the two places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses.blocks import (
    Sides,
    Targets,
    first_of,
    logit_scale_exp,
    mean_weights,
    other_of,
    similarity_blocks,
)

BYTES_OF_DRAWING = 8  # times what a block of similarities takes otherwise: hashes are int64


@dataclass(frozen=True)
class Matching:
    """L = ⅓ (Σⱼ qⱼ ℓ(positive of text j) + Σⱼ qⱼ ℓ(drawn image for text j) + Σᵢ pᵢ ℓ(drawn text for
    image i)), ℓ the binary cross entropy of a pair's score, p and q the weights of images and
    texts, which add up to 1. A row of which nothing could be drawn asks nothing there."""

    work_bytes: int | None = None
    targets: Targets = Targets()

    def negatives(
        self, sides: Sides, branch: str, mine: Tensor, parameters: Mapping[str, Tensor], seed: int
    ) -> Tensor:
        """[b] int64, a place of the other side for each of the rows `mine` [b]; −1 where no other
        row is a negative."""
        drawn, scale = torch.full_like(mine, -1), logit_scale_exp(parameters["logit_scale"])
        if not len(sides[other_of(sides, branch)].label):
            return drawn
        for rows, _, logits in similarity_blocks(
            sides, branch, mine, scale, self.work_bytes, BYTES_OF_DRAWING
        ):
            logits += gumbel_noise(
                seed if branch == first_of(sides) else ~seed, mine[rows], logits.shape[1]
            ).to(logits.dtype)
            logits.masked_fill_(self._not_drawn(sides, branch, mine[rows]), -torch.inf)
            best = logits.max(1)
            drawn[rows] = torch.where(best.values == -torch.inf, -1, best.indices)
        return drawn

    def _not_drawn(self, sides: Sides, branch: str, rows: Tensor) -> Tensor:
        positive = self.targets.positives(sides, branch, rows)
        masked = self.targets.masked(sides, branch, rows)
        return positive if masked is None else positive | masked

    def weights(self, sides: Sides) -> dict[str, Tensor]:
        """What each row counts, [B], as text j in both of its sums, and as image i."""
        return {branch: mean_weights(sides[branch]) / 3 for branch in sides}

    def losses(self, scores: Tensor, belong: Tensor) -> Tensor:
        """[P] of pairs that `belong` together or not, bool [P]."""
        return F.binary_cross_entropy_with_logits(scores, belong.to(scores.dtype), reduction="none")


def gumbel_noise(seed: int, rows: Tensor, number: int) -> Tensor:
    """[len(rows), number] float32, the same for a row wherever it stands: of the hash (splitmix64,
    Steele et al. 2014) of seed, row and column."""
    columns = torch.arange(number, device=rows.device)
    # int64, which wraps
    state = (rows[:, None] * 0x632BE59BD9B4E019 + (columns + 1) * -0x61C8864680B583EB) + seed
    state = (state ^ _shifted(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _shifted(state, 27)) * -0x6B2FB644ECCEEE15
    # of the upper 23 bits: exact, and never 0 or 1
    uniform = (_shifted(state ^ _shifted(state, 31), 41).float() + 0.5) / 2**23
    return -(-uniform.log()).log()


def _shifted(state: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left; torch's own shift copies the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
