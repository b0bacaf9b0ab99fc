"""The tower: `depth_values` [B, 1, H, W] to `depth_features` [B, width], in layers that may be on
stages of their own."""

import torch
from torch import Tensor, nn

from launch.modalities import Wanted
from models.towers.layers import Layer, Tower, cut, reset

PATCH = 8  # pixels a side


class Patches(Layer):
    reads = drops = ("depth_values",)
    makes = ("depth_hidden",)  # [B, N, width]

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(1, width, PATCH, PATCH)

    def compute(self, depth_values: Tensor) -> Tensor:
        return self.conv(depth_values).flatten(2).transpose(1, 2)


class Pool(Layer):
    reads = drops = ("depth_hidden",)
    makes = ("depth_features",)

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def compute(self, depth_hidden: Tensor) -> Tensor:
        return self.net(depth_hidden).mean(1)


def depth_tower(wanted: Wanted) -> Tower:
    """`wanted.name`: of --tower depth=NAME; here the width."""
    width, size = int(wanted.name or 64), wanted.options["image_size"]
    with torch.device("meta"):
        layers: list[Layer] = [Patches(width), Pool(width)]
    named = dict(zip(("patches", "pool"), layers))
    specs = cut("depth", nn.ModuleDict(named), [*named.items()], reset)

    def example(samples: int) -> dict[str, Tensor]:
        return {"depth_values": torch.empty(samples, 1, size, size, device="meta")}

    return Tower("depth", f"depth{width}", width, specs=specs, config={}, example=example)
