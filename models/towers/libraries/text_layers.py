"""The layers that text encoders of transformers are cut into.

B micro-batch, L tokens, W width, N heads.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig, masking_utils
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from models.towers.layers import Layer
from models.towers.pooling import ADDED, AttentionPool

_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(attention_mask: Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` gives, made once for each mask and `key`; anew where the mask was written to.

    The blocks of a stage are handed one and the same tensor as mask of a micro-batch, and what they
    derive from it is equal.
    """
    made = _made.setdefault(attention_mask, {})
    key = key, 0 if attention_mask.is_inference() else attention_mask._version
    if key not in made:
        made[key] = make()
    return made[key]


# of masked scores, by the implementation of attention whose masks are made here
_ADDED = {"sdpa": lambda dtype: -math.inf, "eager": lambda dtype: torch.finfo(dtype).min}


def bidirectional_mask(
    config: PreTrainedConfig, text_hidden: Tensor, attention_mask: Tensor | None
) -> Tensor | None:
    """transformers' `create_bidirectional_mask` without its question whether anything is padded,
    for which the host would have to wait for the device: [B, 1, L, L], also where nothing is; None
    where no `attention_mask` is given.

    It is what is added to the scores: of a mask of truth values each block would make that anew,
    and keep it.
    """
    added = _ADDED.get(config._attn_implementation)
    if attention_mask is None or added is None:
        if attention_mask is not None and attention_mask.is_meta:  # has nothing to read
            attention_mask = None
        return masking_utils.create_bidirectional_mask(config, text_hidden, attention_mask)
    dtype = text_hidden.dtype
    mask = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device)
    mask = mask.masked_fill_(attention_mask == 0, added(dtype))
    return mask[:, None, None].expand(-1, 1, text_hidden.shape[1], -1)


def window_mask(
    config: PreTrainedConfig, text_hidden: Tensor, attention_mask: Tensor | None
) -> Tensor | None:
    """transformers' `create_bidirectional_sliding_window_mask`, likewise."""
    make = masking_utils.create_bidirectional_sliding_window_mask
    if attention_mask is None or config._attn_implementation != "sdpa":
        return make(config, text_hidden, attention_mask)
    window = make(config, text_hidden, None)  # None: wider than the texts are long
    padding = bidirectional_mask(config, text_hidden, attention_mask)
    if window is None or padding is None:
        return padding
    return padding.masked_fill(~window, -math.inf)


class TextEmbeddings(Layer):
    """`input_ids` [B, L] -> `text_hidden` [B, L, W]: the library's embeddings and what is `behind`
    them, if anything is."""

    reads: tuple[str, ...] = ("input_ids",)
    makes: tuple[str, ...] = ("text_hidden",)
    drops: tuple[str, ...] = ("input_ids",)

    # Any: a module of the library
    def __init__(self, embeddings: Any, behind: nn.Module | None = None) -> None:
        super().__init__()
        self.embeddings, self.behind = embeddings, nn.Identity() if behind is None else behind

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.behind(self.embeddings(input_ids))

    def compute(self, input_ids: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.embedded(input_ids)


class FullLengthEmbeddings(TextEmbeddings):
    """Texts of `length` tokens whatever they hold, `text_hidden` [B, `length`, W], with an
    `attention_mask` of ones: the padding is read as any other token.

    So SigLIP was trained, whose pooled token is the last of the padding.
    """

    reads, makes = ("input_ids", "attention_mask"), ("text_hidden", "attention_mask")

    def __init__(self, embeddings: nn.Module, length: int, pad_token_id: int) -> None:
        super().__init__(embeddings)
        self.length, self.pad_token_id = length, pad_token_id

    def compute(self, input_ids: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        (attention_mask,) = more
        input_ids = input_ids.masked_fill(attention_mask == 0, self.pad_token_id)
        missing = self.length - input_ids.shape[1]
        input_ids = F.pad(input_ids, (0, missing), value=self.pad_token_id)  # [B, length]
        return self.embedded(input_ids), torch.ones_like(input_ids)


class BiasedEmbeddings(TextEmbeddings):
    """MPNet's: also makes `text_position_bias` [B, N, L, L], which all of its blocks add to their
    attention scores."""

    makes = ("text_hidden", "text_position_bias")
    relative_position_bucket = staticmethod(MPNetEncoder.relative_position_bucket)

    def __init__(self, embeddings: nn.Module, relative_attention_bias: nn.Embedding) -> None:
        super().__init__(embeddings)
        self.relative_attention_bias = relative_attention_bias

    def compute(self, input_ids: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embedded(input_ids)
        # the library's method, which asks its object for the two names above and no more
        return hidden, MPNetEncoder.compute_position_bias(self, hidden)


class XLMEmbeddings(Layer):
    """XLM's, whose parts the library keeps in the model itself. For a model that knows several
    languages, `language_ids` [B] name that of each text; without them it is the `lang_id` of the
    configuration."""

    reads, makes = ("input_ids", "attention_mask"), ("text_hidden",)
    drops: tuple[str, ...] = ("input_ids",)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings, self.position_embeddings = model.embeddings, model.position_embeddings
        self.layer_norm_emb, self.dropout = model.layer_norm_emb, nn.Dropout(model.dropout)
        self.lang_embeddings = getattr(model, "lang_embeddings", None)
        self.lang_id = model.config.lang_id
        if self.lang_embeddings is not None:
            self.reads_if_given, self.drops = ("language_ids",), ("input_ids", "language_ids")

    def compute(
        self, input_ids: Tensor, attention_mask: Tensor, language_ids: Tensor | None = None
    ) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embeddings(input_ids)
        hidden = hidden + self.position_embeddings(positions[None]).expand_as(hidden)
        if self.lang_embeddings is not None:
            languages = (
                torch.full_like(input_ids, self.lang_id)
                if language_ids is None
                else language_ids[:, None].expand_as(input_ids)
            )
            hidden = hidden + self.lang_embeddings(languages)
        hidden = self.dropout(self.layer_norm_emb(hidden))
        return hidden * attention_mask.unsqueeze(-1).to(hidden.dtype)


class EotEmbeddings(Layer):
    """Also makes `text_pool_position` [B] int64, where the text ends: the ids do not travel to the
    layer that pools there. `start`: the first layer of the tower, which this one stands for.

    `eos_token_id` None: the place of the highest id, which is the rule of CLIP's first release and
    of every configuration with `eos_token_id` 2 in transformers (it was wrong in the published
    files).
    """

    def __init__(self, start: Layer, eos_token_id: int | None) -> None:
        super().__init__()
        self.start, self.eos_token_id = start, eos_token_id
        self.reads, self.reads_if_given, self.drops = (
            start.reads,
            start.reads_if_given,
            start.drops,
        )
        self.makes = (*start.makes, "text_pool_position")

    def compute(self, input_ids: Tensor, *others: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        marks = input_ids if self.eos_token_id is None else (input_ids == self.eos_token_id).int()
        made = self.start.compute(input_ids, *others, **given)
        made = (made,) if isinstance(made, Tensor) else made
        return *made, marks.argmax(dim=-1)  # [B, L, W], ..., [B]


class Block(Layer):
    """What blocks have in common: `attention_mask` [B, L] becomes what the library's block wants of
    it. `padded` False: nothing is padded, or no token that is kept sees any padding; the mask is
    not looked at."""

    padded = True

    reads: tuple[str, ...] = ("text_hidden", "attention_mask")
    makes: tuple[str, ...] = ("text_hidden",)

    # Any: a module of the library
    def __init__(self, block: Any, config: PreTrainedConfig) -> None:
        super().__init__()
        self.block, self.config = block, config

    @torch.compiler.disable  # to remember is the host's affair
    def _mask(
        self, make: Callable[..., Any], text_hidden: Tensor, attention_mask: Tensor, *more: Any
    ) -> Any:
        padding = attention_mask if self.padded else None
        return once(
            attention_mask,
            (make, text_hidden.shape[:2], text_hidden.dtype, self.config._attn_implementation),
            # by place: the names of what follows differ between versions of the library
            lambda: make(self.config, text_hidden, padding, *more),
        )


class TextBlock(Block):
    """`text_hidden` [B, L, W] -> `text_hidden`."""

    def compute(self, text_hidden: Tensor, attention_mask: Tensor) -> Tensor:
        mask = self._mask(bidirectional_mask, text_hidden, attention_mask)
        return self.block(text_hidden, mask)


class CausalBlock(Block):
    """`text_hidden` [B, L, W] -> `text_hidden`, where a token sees those before it.

    Padding is on the right, so no token that is kept sees any of it. Attention needs no mask, which
    the fastest kernels of a GPU do not take.
    """

    padded = False

    def compute(self, text_hidden: Tensor, attention_mask: Tensor) -> Tensor:
        mask = self._mask(masking_utils.create_causal_mask, text_hidden, attention_mask, None)
        return self.block(text_hidden, mask, is_causal=True)


class BiasedBlock(Block):
    """A block of MPNet or T5: adds `text_position_bias` [B or 1, N, L, L] to its attention scores.
    T5's first block `makes_bias` for those behind it; the `last` block drops it."""

    def __init__(
        self, block: Any, config: PreTrainedConfig, last: bool, makes_bias: bool = False
    ) -> None:
        super().__init__(block, config)
        bias = "text_position_bias"
        if makes_bias:
            self.makes = ("text_hidden",) if last else ("text_hidden", bias)
        else:
            self.reads = ("text_hidden", "attention_mask", bias)
            self.drops = (bias,) if last else ()

    def compute(self, text_hidden: Tensor, attention_mask: Tensor, *bias: Tensor) -> Any:
        mask = self._mask(bidirectional_mask, text_hidden, attention_mask)
        return tuple(self.block(text_hidden, mask, *bias)[: len(self.makes)])


class RotaryBlock(Block):
    """A block of ModernBERT, of which some attend to a window and the others to all tokens. Where a
    token stands turns its queries and keys; `rotary` says by how much."""

    def __init__(self, block: Any, config: PreTrainedConfig, rotary: nn.Module) -> None:
        super().__init__(block, config)
        self.rotary = rotary

    def compute(self, text_hidden: Tensor, attention_mask: Tensor) -> Tensor:
        kind = self.block.attention_type
        mask = self._mask(
            window_mask if kind == "sliding_attention" else bidirectional_mask,
            text_hidden,
            attention_mask,
        )
        turned = self._turned(kind, text_hidden, attention_mask)
        return self.block(text_hidden, attention_mask=mask, position_embeddings=turned)

    @torch.compiler.disable  # as `_mask`
    def _turned(self, kind: str, text_hidden: Tensor, attention_mask: Tensor) -> Any:
        length = text_hidden.shape[1]
        positions = torch.arange(length, device=text_hidden.device)[None]
        return once(
            attention_mask,
            (kind, length, text_hidden.dtype),
            lambda: self.rotary(text_hidden, positions, kind),
        )


class XLMBlock(Layer):
    """A block of XLM, whose four parts the library keeps in lists of their own."""

    reads, makes = ("text_hidden", "attention_mask"), ("text_hidden",)

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        self.attention, self.ffn = model.attentions[number], model.ffns[number]
        self.norm1, self.norm2 = model.layer_norm1[number], model.layer_norm2[number]
        self.dropout = nn.Dropout(model.dropout)

    def compute(self, text_hidden: Tensor, attention_mask: Tensor) -> Tensor:
        found = self.attention(text_hidden, attention_mask)[0]
        hidden = self.norm1(text_hidden + self.dropout(found))
        hidden = self.norm2(hidden + self.ffn(hidden))
        return hidden * attention_mask.unsqueeze(-1).to(hidden.dtype)


class TextPool(Layer):
    """`text_hidden` [B, L, W] -> `text_features` [B, W]: `pool` of the tokens that `attention_mask`
    [B, L] keeps, behind the final norm if there is one."""

    reads: tuple[str, ...] = ("text_hidden", "attention_mask")
    drops: tuple[str, ...] = reads
    makes = ("text_features",)

    def __init__(self, pool: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.pool, self.norm = pool, nn.Identity() if norm is None else norm
        self.added = ADDED if isinstance(pool, AttentionPool) else None

    def compute(self, text_hidden: Tensor, attention_mask: Tensor, *more: Tensor) -> Tensor:
        return self.pool(self.norm(text_hidden), attention_mask)


class EotPool(TextPool):
    """The token at `text_pool_position` [B], behind the final norm if there is one."""

    reads = drops = ("text_hidden", "attention_mask", "text_pool_position")

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__(nn.Identity(), norm)

    def compute(self, text_hidden: Tensor, attention_mask: Tensor, *more: Tensor) -> Tensor:
        (text_pool_position,) = more
        rows = torch.arange(text_hidden.shape[0], device=text_hidden.device)
        return self.norm(text_hidden)[rows, text_pool_position]


class TwoLayers(Layer):
    """`text_features` [B, W] -> [B, D], as OpenCLIP's HFTextEncoder projects them with
    `hf_proj_type=mlp`: two matrices without biases, GELU between them."""

    reads = drops = makes = ("text_features",)

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        inner = (width + out) // 2
        self.proj = nn.Sequential(
            nn.Linear(width, inner, bias=False), nn.GELU(), nn.Linear(inner, out, bias=False)
        )
        self.canonical_names = {name: f"text.{name}" for name in self.state_dict()}

    def compute(self, text_features: Tensor) -> Tensor:
        return self.proj(text_features)
