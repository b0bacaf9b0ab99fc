"""The fusion branch: tokens of both towers, and cross-attention that says whether an image and a
text belong together.

    image_map_0, image_map_1, ... ──project──> image_tokens ─┐
                                                             ├─ attend, attend, ... ── mean ── score
    text_states ──────────────────project──> text_tokens ────┘

Image tokens ask, text tokens answer. The maps leave their tower where it goes on to a smaller
image, so they have several scales. The projections belong to the heads, and the attention to the
text head: both towers' tokens meet where the text branch ends.

B micro-batch, P pairs, T image tokens, L text tokens, C channels, F `width`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.towers.layers import Layer, LayerSpec, Tower, reset


@dataclass(frozen=True)
class FusionSizes:
    """`layers` of cross-attention of `width` with `heads`, over the last `scales` maps of the image
    tower; None: two, or one where it has no more."""

    layers: int
    width: int = 512
    heads: int = 8
    scales: int | None = None

    def __post_init__(self) -> None:
        if (
            min(self.layers, self.width, self.heads, 1 if self.scales is None else self.scales) < 1
            or self.width % self.heads
        ):
            raise ValueError(
                f"fusion of {self.layers} layers, width {self.width}, {self.heads} heads and "
                f"{self.scales} scales: all must be at least 1, and the width a multiple of the "
                "heads"
            )


def fusion_sizes(options: Mapping[str, Any]) -> FusionSizes | None:
    """From train.py's options by name; None without `fusion`."""
    if not options["fusion"]:
        return None
    return FusionSizes(
        options["fusion"],
        options["fusion_width"],
        options["fusion_heads"],
        options["fusion_scales"],
    )


class ImageTap(Layer):
    """`image_hidden` [B, C, H, W], [B, H, W, C] (`channels_last`) or [B, N, C] -> a copy of it as
    tokens [B, T, C] under another name, for the head."""

    reads = ("image_hidden",)

    def __init__(self, name: str, channels_last: bool = False) -> None:
        super().__init__()
        self.makes, self.channels_last = (name,), channels_last

    def compute(self, image_hidden: Tensor) -> Tensor:
        # * 1: what is sent on under two names must not share its memory
        if image_hidden.dim() == 3:
            return image_hidden * 1
        if self.channels_last:
            return image_hidden.flatten(1, 2) * 1
        return image_hidden.flatten(2).transpose(1, 2) * 1


class TextTap(Layer):
    """`text_hidden` [B, L, C], `attention_mask` [B, L] -> `text_states` [B, L, C] and `text_mask`
    [B, L] int8, which pass the pooler."""

    reads, makes = ("text_hidden", "attention_mask"), ("text_states", "text_mask")

    def compute(self, text_hidden: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return text_hidden * 1, attention_mask.to(torch.int8)


def token_projection(channels: int, width: int) -> nn.Module:
    """[..., C] -> [..., F]. Its bias says which scale, or which modality, a token is of."""
    return nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, width))


class CrossAttention(nn.Module):
    """Image tokens [P, T, F] attend to text tokens [P, L, F], then each passes through a
    two-layer network; both add to them (Vaswani et al. 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.image_norm, self.text_norm, self.inner_norm = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, image_tokens: Tensor, text_tokens: Tensor, padded: Tensor) -> Tensor:
        """`padded` [P, L] bool: these text tokens are not attended to."""
        keys = self.text_norm(text_tokens)
        seen, _ = self.attention(
            self.image_norm(image_tokens), keys, keys, key_padding_mask=padded, need_weights=False
        )
        image_tokens = image_tokens + seen
        return image_tokens + self.inner(self.inner_norm(image_tokens))


class Fusion(nn.Module):
    """Pairs to scores. It draws no random numbers: which pairs are scored together is an affair of
    the split, and changes nothing."""

    def __init__(self, sizes: FusionSizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            CrossAttention(sizes.width, sizes.heads) for _ in range(sizes.layers)
        )
        self.norm, self.score = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, 1)

    def forward(self, image_tokens: Tensor, text_tokens: Tensor, text_mask: Tensor) -> Tensor:
        """[P, T, F], [P, L, F] and [P, L] (1 = keep) -> [P] fp32: above 0, they belong together."""
        padded = text_mask == 0
        for block in self.blocks:
            image_tokens = block(image_tokens, text_tokens, padded)
        return self.score(self.norm(image_tokens.mean(1))).squeeze(1).float()


def map_ends(tower: Tower, pixel_values: Tensor) -> list[tuple[int, tuple[int, ...]]]:
    """The last layer with `image_hidden` of each size, and its shape without the samples, in a
    tower without a head. `pixel_values`: as in `models.towers.building.meta_inputs`."""
    shapes: list[tuple[int, ...] | None] = []
    tensors = {"pixel_values": pixel_values}
    for spec in tower.specs:
        tensors = spec.template(tensors)
        there = "image_hidden" in tensors
        shapes.append(tuple(tensors["image_hidden"].shape[1:]) if there else None)
    places = [None if shape is None else _places(shape) for shape in shapes]
    return [
        (i, shape)
        for i, shape in enumerate(shapes)
        if shape is not None and places[i] != places[i + 1]
    ]


def tap_image(
    tower: Tower, pixel_values: Tensor, scales: int | None
) -> tuple[Tower, dict[str, int], int]:
    """Taps behind the last layers of the last `scales` sizes of `image_hidden`, in a tower without
    a head.

    `pixel_values`: as in `models.towers.building.meta_inputs`. Returns the tower, the channels C of
    each map by its name, and T for such images. Errors: ValueError where it has fewer.
    """
    ends = map_ends(tower, pixel_values)
    scales = min(2, len(ends)) if scales is None else scales
    if len(ends) < scales:
        raise ValueError(
            f"--fusion-scales {scales}: image tower {tower.name!r} has maps of {len(ends)} sizes; "
            f"give at most {len(ends)}"
        )
    specs, maps, num_tokens = list(tower.specs), {}, 0
    for scale, (end, shape) in enumerate(ends[-scales:]):
        name = f"image_map_{scale}"
        last = channels_last(shape)
        specs.insert(end + 1 + scale, tap(f"image.map_{scale}", "image", ImageTap(name, last)))
        maps[name] = shape[-1] if last or len(shape) == 2 else shape[0]
        num_tokens += math.prod(_places(shape))
    return replace(tower, specs=tuple(specs)), maps, num_tokens


def tap_text(tower: Tower) -> Tower:
    """A tap before the layer that pools; a tower without a head."""
    pool = next(i for i, spec in enumerate(tower.specs) if "text_hidden" in spec.template.drops)
    return replace(
        tower,
        specs=(*tower.specs[:pool], tap("text.states", "text", TextTap()), *tower.specs[pool:]),
    )


def _places(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its channels: (H, W) of a map [C, H, W] or [H, W, C], (N,) of tokens
    [N, C]."""
    return tuple(shape[1:]) if len(shape) == 3 and not channels_last(shape) else tuple(shape[:-1])


def channels_last(shape: Sequence[int]) -> bool:
    """Of a map of a square image: is it [H, W, C], as in timm's and torchvision's Swin?"""
    return len(shape) == 3 and shape[0] == shape[1] != shape[2]


def tap(name: str, branch: str, layer: Layer) -> LayerSpec:
    """The recipe of a layer without parameters."""
    return LayerSpec(name, branch, layer, lambda _: None)


PAIRS_OF_A_TEXT = 3  # its own image, one drawn for it, and on average one that it was drawn for


class PairScores(Layer):
    """What the matching loss asks of a fusion, as a layer by itself: to be priced, not trained."""

    reads, makes = ("image_tokens", "text_tokens", "text_mask"), ("scores",)
    drops = reads

    def __init__(self, sizes: FusionSizes) -> None:
        super().__init__()
        self.fusion = Fusion(sizes)

    def compute(self, image_tokens: Tensor, text_tokens: Tensor, text_mask: Tensor) -> Tensor:
        return self.fusion(image_tokens, text_tokens, text_mask)


def pair_scores(sizes: FusionSizes) -> LayerSpec:
    with torch.device("meta"):
        return LayerSpec("text.pairs", "text", PairScores(sizes), reset)


def pair_inputs(
    image: Tower, text: Tower, num_texts: int, num_tokens: int | None = None
) -> dict[str, Tensor]:
    """What `pair_scores` reads for the pairs of so many texts of `num_tokens` (default: the most
    there can be), without data."""
    number, width = PAIRS_OF_A_TEXT * num_texts, image.config["fusion"]["width"]
    length = text.config["max_text_tokens"] if num_tokens is None else num_tokens
    return {
        "image_tokens": torch.empty(number, image.config["num_image_tokens"], width, device="meta"),
        "text_tokens": torch.empty(number, length, width, device="meta"),
        "text_mask": torch.empty(number, length, dtype=torch.int8, device="meta"),
    }
