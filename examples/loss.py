"""A loss of one's own: a differentiable function of all embeddings of a pair. It is exact in every
layout and schedule.

    python train.py --import-module examples.loss --loss alignment+uniformity

Wang & Isola 2020, "Understanding contrastive representation learning through alignment and
uniformity on the hypersphere".
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from models.losses import LOSSES, PlainLoss


def alignment_and_uniformity(
    first: Tensor, second: Tensor, scalars: Mapping[str, Tensor]
) -> Tensor:
    """`first`, `second` [B, D], rows of length 1, row i of one belongs to row i of the other;
    `scalars`: what the loss learns, none here. Each rank that holds embeddings of the pair computes
    the whole of it, B × B distances."""
    alignment = (first - second).square().sum(1).mean()
    uniformity = sum(
        torch.pdist(side).square().mul(-2).exp().mean().log() for side in (first, second)
    )
    return alignment + uniformity / 2


LOSSES["alignment+uniformity"] = lambda: PlainLoss(alignment_and_uniformity)
