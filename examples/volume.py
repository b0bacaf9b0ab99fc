"""A loss over three branches at once: the volume that the vectors of a sample span is small, and that
of a text with images and sounds of others is large.

    python train.py --import-module examples.volume --data demo:voices \
        --pairs image:text,audio:text --terms text+image+audio=volume:0.5

Cicchetti et al. 2025, "Gramian multimodal representation learning and alignment", equation 5 and 6.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses import LOSSES, PlainLoss

LEAST = 1e-6  # of a determinant, whose root has no gradient at 0


def volumes(anchor: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """[B, B]: of each anchor with the second and the third vector of each sample, rows of length 1
    [B, D]: the root of the determinant of their inner products."""
    a, b = anchor @ second.T, anchor @ third.T
    c = (second * third).sum(1)
    return (1 + 2 * a * b * c - a.square() - b.square() - c.square()).clamp(min=LEAST).sqrt()


def volume(anchor: Tensor, second: Tensor, third: Tensor, scalars: Mapping[str, Tensor]) -> Tensor:
    """The mean cross entropy of both directions, with −volume as similarity."""
    logits = -scalars["logit_scale"].exp() * volumes(anchor, second, third)
    target = torch.arange(len(anchor), device=anchor.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


LOSSES["volume"] = lambda: PlainLoss(volume, {"logit_scale": 2.0})
