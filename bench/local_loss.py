"""The loss of regions as public code has it, for `bench/regions.py learn`: each of eight ranks
among its own boxes alone, where equal phrases are each other's negatives.

    python train.py --import-module bench.local_loss --loss image:text=infonce,region:text=local
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses import LOSSES, InfoNCE, PlainLoss

RANKS = 8


def local(first: Tensor, second: Tensor, scalars: Mapping[str, Tensor]) -> Tensor:
    """`first`, `second` [R, D] in the order of the samples, which ranks share evenly."""
    scale, losses = scalars["logit_scale"].exp().clamp(max=100), []
    for own, other in zip(first.tensor_split(RANKS), second.tensor_split(RANKS)):
        logits, labels = scale * own @ other.T, torch.arange(len(own), device=own.device)
        both = [F.cross_entropy(each, labels, reduction="sum") for each in (logits, logits.T)]
        losses.append(sum(both) / 2)
    return torch.stack(losses).sum() / len(first)


LOSSES["local"] = lambda: PlainLoss(local, InfoNCE.parameters)
