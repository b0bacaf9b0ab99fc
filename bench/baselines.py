"""The same towers in plain PyTorch, without the engine: what two-tower models are trained with
today.

`ddp`: DistributedDataParallel. Every rank runs its share of the global batch through both towers in
one forward. Embeddings are gathered over the ranks with gradient, and every rank computes the whole
loss over the global batch: OpenCLIP's `--gather-with-grad` without `--local-loss`. Exact.

`ddp_cached`: the same with cached gradients (Gao et al. 2021, "Scaling Deep Contrastive Learning
Batch Size under Memory Limited Setup"): forwards without gradient, micro-batch by micro-batch;
gather; loss; gradients of the embeddings; then each forward again with its backward from those.
Gradients are averaged once, with the last micro-batch. Exact.

Scales. Every rank has the whole loss L, a mean over the B pairs.

| what | contract |
|---|---|
| `ddp` | gather's backward *adds* the ranks' equal ∂L/∂embeddings: N times too large. DDP *averages* over N ranks what must be added: right |
| `ddp_cached` | a rank takes ∂L/∂(own rows) of its own L, × N, since DDP averages |
| `logit_scale` | has its whole gradient on every rank: averaging leaves it |

B global batch, b = B/N the rank's share, D embedding size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from models.losses import logit_scale_exp
from models.towers.layers import LayerSpec

# image_embeds [b, D], text_embeds [b, D], logit_scale [1]
Embeddings = tuple[Tensor, Tensor, Tensor]


class TwoTowers(nn.Module):
    """Both towers' layers in one module; the weights are the engine's for the same seed."""

    def __init__(self, image: Sequence[LayerSpec], text: Sequence[LayerSpec], seed: int):
        super().__init__()
        self.image, self.text = (
            nn.ModuleList(spec.build(seed) for spec in specs) for specs in (image, text)
        )

    def forward(self, tensors: dict[str, Tensor]) -> Embeddings:
        for layer in chain(self.image, self.text):
            tensors = layer(tensors)
        return tensors["image_embeds"], tensors["text_embeds"], tensors["logit_scale"]

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        layers = chain(self.image, self.text)
        return {
            layer.canonical_names[name]: p
            for layer in layers
            for name, p in layer.named_parameters()
        }


def info_nce(image_embeds: Tensor, text_embeds: Tensor, logit_scale: Tensor) -> Tensor:
    """Symmetric cross entropy over the global batch, both sides [B, D]: the mean over pairs and
    directions."""
    logits = logit_scale_exp(logit_scale) * image_embeds @ text_embeds.T  # [B, B]
    partner = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


class Baseline:
    """Data-parallel training of both towers. `micro_batch_size`: None runs a rank's share at once,
    otherwise gradients are cached."""

    def __init__(
        self,
        towers: TwoTowers,
        lr: float,
        weight_decay: float,
        max_grad_norm: float,
        micro_batch_size: int | None = None,
    ):
        # The choices that are kind to it: no second copy of the gradients, and no broadcast of
        # buffers that never change.
        self.ddp = DistributedDataParallel(
            towers, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        self.micro_batch_size, self.max_grad_norm = micro_batch_size, max_grad_norm
        parameters = towers.canonical_parameters()
        self.optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=weight_decay)
        self.groups = [
            [p for n, p in parameters.items() if n.split(".", 1)[0] == group]
            for group in ("image", "text", "head")
        ]

    def train_batch(self, tensors: dict[str, Tensor]) -> float:
        """One step on this rank's share [b, …] of the global batch. Returns the loss over the
        whole."""
        self.ddp.train()
        # Cached: gradients stay views of DDP's buckets; otherwise no_sync() would make a second
        # copy of all of them.
        self.optimizer.zero_grad(set_to_none=self.micro_batch_size is None)
        loss = self.backward(tensors)
        if self.max_grad_norm > 0:
            for group in self.groups:
                nn.utils.clip_grad_norm_(group, self.max_grad_norm)
        self.optimizer.step()
        return loss

    def backward(self, tensors: dict[str, Tensor]) -> float:
        """Leaves the gradients of the loss over the global batch in the parameters."""
        if self.micro_batch_size is not None:
            return self._cached_backward(tensors)
        image, text, logit_scale = self.ddp(tensors)  # [b, D] each
        loss = info_nce(torch.cat(all_gather(image)), torch.cat(all_gather(text)), logit_scale)
        loss.backward()
        return loss.item()

    def _cached_backward(self, tensors: dict[str, Tensor]) -> float:
        parts = [
            dict(zip(tensors, part))
            for part in zip(*(t.split(self.micro_batch_size) for t in tensors.values()))
        ]
        states, embedded = [], []
        with torch.no_grad():
            for part in parts:
                # the second forward must draw the same dropout
                states.append(torch.get_rng_state())
                embedded.append(self.ddp.module(part))
        own = [torch.cat(rows).requires_grad_() for rows in list(zip(*embedded))[:2]]  # [b, D]
        logit_scale = embedded[0][2].requires_grad_()
        loss = info_nce(*(_gather(rows) for rows in own), logit_scale)
        loss.backward()
        image_grads, text_grads = (
            (dist.get_world_size() * rows.grad).split(self.micro_batch_size) for rows in own
        )
        after = torch.get_rng_state()
        for i, part in enumerate(parts):
            torch.set_rng_state(states[i])
            # the whole gradient goes with the first
            scale_grad = logit_scale.grad if i == 0 else torch.zeros_like(logit_scale)
            with contextlib.nullcontext() if i == len(parts) - 1 else self.ddp.no_sync():
                torch.autograd.backward(self.ddp(part), [image_grads[i], text_grads[i], scale_grad])
        torch.set_rng_state(after)
        return loss.item()

    def sent_bytes(self, global_batch_size: int, embed_dim: int) -> float:
        """What a rank sends per step, collectives counted as rings.

        All-reduce of P fp32 gradients: 2·(N−1)/N · 4P. Gather of both embeddings: 2·(N−1)/N · 4BD;
        with gradient as much again on the way back.
        """
        others = (dist.get_world_size() - 1) / dist.get_world_size()
        gradients = 2 * others * 4 * sum(p.numel() for p in self.ddp.parameters())
        gathers = 2 * others * 4 * global_batch_size * embed_dim
        return gradients + gathers * (1 if self.micro_batch_size else 2)


def _gather(own: Tensor) -> Tensor:
    """All ranks' rows [B, D]; a gradient flows into the own ones only."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.detach())
    everyone[dist.get_rank()] = own
    return torch.cat(everyone)
