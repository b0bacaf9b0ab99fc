"""torch's nn.MultiheadAttention, faster where its queries, keys and values are one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from models.towers.derived import with_kinds


class SelfAttention(nn.MultiheadAttention):
    """The same function of the same parameters, without torch's way through [L, N, D]: that copies
    the input and the output of every block, adds the bias in a kernel of its own, and its backward
    fills and adds three gradients of the size of queries, keys and values together.

    Where it is asked for more than self-attention to all positions or to earlier ones, or drops
    out, it is torch's own.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if (
            not (query is key is value and self.batch_first and self._qkv_same_embed_dim)
            or need_weights
            or key_padding_mask is not None
            or (attn_mask is not None and not is_causal)
            or (self.training and self.dropout)
            or self.bias_k is not None
            or self.add_zero_attn
        ):
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        # [N, L, 3 D] → three [N, heads, L, D / heads], whose gradients are joined by one copy
        parts = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out_proj(found.transpose(1, 2).flatten(2)), None


def with_self_attention(model: nn.Module) -> nn.Module:
    """The model, with a `SelfAttention` in the place of each module of exactly that class."""
    return with_kinds(
        model, lambda module: SelfAttention if type(module) is nn.MultiheadAttention else None
    )
