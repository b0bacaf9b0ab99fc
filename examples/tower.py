"""An image tower of one's own: patches, and blocks that mix their channels.

python train.py --import-module examples.tower --image-tower mixer:width=64,depth=4
"""

import torch
from torch import Tensor, nn

from models.towers.image import OWN
from models.towers.layers import Layer, Tower, cut, reset
from models.towers.names import parse_overrides, split_name

PATCH = 8  # pixels a side


class Patches(Layer):
    reads = drops = ("pixel_values",)  # [B, 3, H, W]
    makes = ("image_hidden",)  # [B, N, width]

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(3, width, PATCH, PATCH)

    def compute(self, pixel_values: Tensor) -> Tensor:
        return self.conv(pixel_values).flatten(2).transpose(1, 2)


class Block(Layer):
    reads = makes = ("image_hidden",)

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def compute(self, image_hidden: Tensor) -> Tensor:
        return image_hidden + self.net(image_hidden)


class Pool(Layer):
    reads = drops = ("image_hidden",)
    makes = ("image_features",)  # [B, width], which the head projects

    def compute(self, image_hidden: Tensor) -> Tensor:
        return image_hidden.mean(1)


def mixer(name: str, image_size: int) -> Tower:
    given = parse_overrides(name, split_name(name)[1], {"width": int, "depth": int})
    width, depth = given.get("width", 64), given.get("depth", 2)
    with torch.device("meta"):
        layers: list[Layer] = [Patches(width), *(Block(width) for _ in range(depth)), Pool()]
    named = [(f"layer{i}", layer) for i, layer in enumerate(layers)]
    specs = cut("image", nn.Sequential(*layers), named, reset)
    return Tower("image", name, width, specs, {"image_size": image_size, "depth": depth})


OWN["mixer"] = mixer
