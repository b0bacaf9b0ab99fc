"""Pooling: the tokens of a text, or the places of an image, become one vector.

Each takes `tokens` [B, N, W] and `kept` [B, N] (1 = keep; None: all are), and gives [B, W]. Where a
tower has a final norm, it comes before, except in ConvNeXt, whose norm comes behind the mean and
the maximum as in the library.

| pool | of | source |
|---|---|---|
| `mean`, `avg` | all tokens, all places | Reimers & Gurevych 2019 (Sentence-BERT) |
| `first`, `cls` | the first token, the class token | Devlin et al. 2018; Dosovitskiy et al. 2020 |
| `pooler` | the first token through a linear and a tanh | Devlin et al. 2018 |
| `last` | the last token that is kept | SigLIP (Zhai et al. 2023) for texts |
| `eos` | the token that ends the text | CLIP (Radford et al. 2021) |
| `max` | the largest value of each channel | |
| `attention` | attention of a learned query, then two layers | Lee et al. 2018; SigLIP's images |
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# `Layer.added` of a layer that holds an `AttentionPool` as `pool`
ADDED = ("pool.", "attention_pool.")


class MeanPool(nn.Module):
    """Added up in fp32, where many tokens do not drown a small one."""

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is None:
            return tokens.mean(1)
        kept = kept.unsqueeze(-1).to(tokens.dtype)  # [B, N, 1]
        total = (tokens * kept).sum(1, dtype=torch.float32)
        return (total / kept.sum(1, dtype=torch.float32).clamp(min=1)).to(tokens.dtype)


class MaxPool(nn.Module):
    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is not None:
            tokens = tokens.masked_fill(kept.unsqueeze(-1) == 0, -math.inf)
        return tokens.amax(1)


class FirstPool(nn.Module):
    """The first token, through `pooler` if there is one (which takes all tokens, as the library's
    does)."""

    def __init__(self, pooler: nn.Module | None = None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        return tokens[:, 0] if self.pooler is None else self.pooler(tokens)


class LastPool(nn.Module):
    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is None:
            return tokens[:, -1]
        behind = kept.flip(1).int().argmax(1)  # [B], how many are not kept at the end
        return tokens[torch.arange(len(tokens), device=tokens.device), tokens.shape[1] - 1 - behind]


def num_heads(width: int) -> int:
    """Of an attention pool: each 64 wide, or wider where that does not divide `width`."""
    return math.gcd(width, max(1, width // 64))


class AttentionPool(nn.Module):
    """A learned query attends to all tokens, and a two-layer network adds to what it found.

    Modules and names are those of transformers' `SiglipMultiheadAttentionPoolingHead`, so its
    weights load as they are. First values are those of big_vision's `MAPHead`.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.attention = nn.MultiheadAttention(width, num_heads(width), batch_first=True)
        self.layernorm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}
        )

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.probe)
        nn.init.xavier_uniform_(self.attention.in_proj_weight)
        nn.init.zeros_(self.attention.in_proj_bias)
        nn.init.xavier_uniform_(self.attention.out_proj.weight)
        nn.init.zeros_(self.attention.out_proj.bias)
        self.layernorm.reset_parameters()
        for linear in self.mlp.values():
            nn.init.xavier_uniform_(linear.get_parameter("weight"))
            nn.init.normal_(linear.get_parameter("bias"), std=1e-6)

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        padded = None if kept is None else kept == 0
        query = self.probe.expand(len(tokens), -1, -1)
        # [B, 1, W]
        found, _ = self.attention(
            query, tokens, tokens, key_padding_mask=padded, need_weights=False
        )
        inner = self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.layernorm(found)), approximate="tanh"))
        return (found + inner)[:, 0]


def pooling(name: str, width: int, **own: Callable[[], nn.Module]) -> nn.Module:
    """By a name of the table; `own`: what makes those that a library has of its own."""
    known: dict[str, Callable[[], nn.Module]] = {
        **dict.fromkeys(("mean", "avg"), MeanPool),
        **dict.fromkeys(("first", "cls"), FirstPool),
        "last": LastPool,
        "max": MaxPool,
        "attention": partial(AttentionPool, width),
        **own,
    }
    return known[name]()
