"""The two sides of the claim that the baselines are exact: DDP on each rank, and the same batch in
one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from bench.baselines import Baseline, TwoTowers
from bench.towers import Setup, samples

SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=16,num_heads=2,num_layers=2,mlp_dim=32,patch_size=16",
    image_size=32,
    text_tower="bert-tiny:hidden_size=16,intermediate_size=32,num_hidden_layers=2,num_attention_heads=2,hidden_dropout_prob=0,"
    "attention_probs_dropout_prob=0",
    num_tokens=8,
    vocab_size=64,
    embed_dim=8,
    global_batch_size=12,
    micro_batch_size=2,
    lr=0.01,
    weight_decay=0.1,
    max_grad_norm=0.05,  # below all three norms, so that clipping does something
)


def share(rank: int, world_size: int) -> dict[str, Tensor]:
    positions = torch.arange(SETUP.global_batch_size).view(world_size, -1)[rank]
    return samples(SETUP, "image", 0, positions) | samples(SETUP, "text", 0, positions)


def towers() -> TwoTowers:
    return TwoTowers(SETUP.towers["image"].specs, SETUP.towers["text"].specs, SETUP.seed)


def train_baseline(micro_batch_size: int | None) -> dict[str, Any]:
    """On each rank: the loss, the gradients before clipping, and the weights after one clipped
    step."""
    model = towers()
    baseline = Baseline(model, SETUP.lr, SETUP.weight_decay, SETUP.max_grad_norm, micro_batch_size)
    mine = share(dist.get_rank(), dist.get_world_size())
    loss = baseline.backward(mine)
    gradients = {name: p.grad.clone() for name, p in model.canonical_parameters().items()}
    baseline.train_batch(mine)
    return {
        "loss": loss,
        "gradients": gradients,
        "weights": {n: p.detach() for n, p in model.canonical_parameters().items()},
    }


def train_whole() -> dict[str, Any]:
    """The reference: the whole batch at once, the loss written out."""
    parameters = (model := towers()).canonical_parameters()
    image, text, logit_scale = model(share(0, 1))
    logits = logit_scale.exp() * image @ text.T
    partner = torch.arange(SETUP.global_batch_size)
    loss = (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in parameters.items()}
    for group in ("image", "text", "head"):
        torch.nn.utils.clip_grad_norm_(
            [p for name, p in parameters.items() if name.startswith(group + ".")],
            SETUP.max_grad_norm,
        )
    torch.optim.AdamW(parameters.values(), lr=SETUP.lr, weight_decay=SETUP.weight_decay).step()
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "weights": {n: p.detach() for n, p in parameters.items()},
    }
