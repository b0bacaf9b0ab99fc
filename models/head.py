"""The heads: pooled features to the embeddings in which images and texts are compared.

B micro-batch, W width of the tower's features, D embedding size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.layers import Layer, LayerSpec


class ImageHead(Layer):
    """`image_features` [B, W] -> `image_embeds` [B, D] fp32 of length 1, and the scalars that the loss learns, each [1] fp32.

    `scalars`: their names and first values, the loss's `parameters`. They live here so that exactly one layer owns them. They have
    one dimension because optimizers that flatten parameters mishandle 0-dim ones.
    """

    reads = ("image_features",)
    drops = ("image_features",)

    def __init__(self, width: int, embed_dim: int, scalars: Mapping[str, float]) -> None:
        super().__init__()
        self.scalars = dict(scalars)
        self.makes = ("image_embeds", *scalars)
        self.image_projection = nn.Linear(width, embed_dim, bias=False)
        for name in scalars:
            self.register_parameter(name, nn.Parameter(torch.empty(1)))
        self.canonical_names = {name: f"head.{name}" for name in self.state_dict()}

    def compute(self, image_features: Tensor) -> tuple[Tensor, ...]:
        # * 1: what travels is a result with a gradient, never the parameter itself
        return _embed(self.image_projection, image_features), *(self.get_parameter(name).float() * 1 for name in self.scalars)


class TextHead(Layer):
    """`text_features` [B, W] -> `text_embeds` [B, D] fp32 of length 1."""

    reads = ("text_features",)
    makes = ("text_embeds",)
    drops = ("text_features",)

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.text_projection = nn.Linear(width, embed_dim, bias=False)
        self.canonical_names = {name: f"head.{name}" for name in self.state_dict()}

    def compute(self, text_features: Tensor) -> Tensor:
        return _embed(self.text_projection, text_features)


def _embed(projection: nn.Linear, features: Tensor) -> Tensor:
    """The projection runs in the module's dtype; the length is made 1 in fp32, where squares do not overflow."""
    return F.normalize(projection(features).float(), dim=-1)  # [B, D]


def head_spec(branch: str, width: int, embed_dim: int, scalars: Mapping[str, float]) -> LayerSpec:
    """The head of a branch, as the last recipe of its tower. The image head owns the `scalars`."""
    if embed_dim < 1:
        raise ValueError(f"embed_dim={embed_dim} must be at least 1")
    with torch.device("meta"):
        head = ImageHead(width, embed_dim, scalars) if branch == "image" else TextHead(width, embed_dim)
    return LayerSpec(f"{branch}.head", branch, head, _initialise)


def _initialise(head: Layer) -> None:
    """CLIP's rule for projections (Radford et al. 2021): normal with standard deviation width**-0.5. Scalars as the loss says."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    if isinstance(head, ImageHead):
        for name, value in head.scalars.items():
            nn.init.constant_(head.get_parameter(name), value)
