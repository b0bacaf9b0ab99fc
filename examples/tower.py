"""An image tower of one's own: patches, and blocks that mix them (after Tolstikhin et al. 2021,
MLP-Mixer, with channels alone).

python train.py --import-module examples.tower --image-tower mixer:width=64,depth=4
"""

import torch
from torch import Tensor, nn

from models.towers.image import OWN
from models.towers.layers import Layer, Tower, cut, reset
from models.towers.names import parse_overrides, split_name

PATCH = 8  # pixels a side


class Patches(Layer):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, N, width]."""

    reads = drops = ("pixel_values",)
    makes = ("image_hidden",)

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(3, width, PATCH, PATCH)

    def compute(self, pixel_values: Tensor) -> Tensor:
        return self.conv(pixel_values).flatten(2).transpose(1, 2)


class Block(Layer):
    reads = makes = ("image_hidden",)

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def compute(self, image_hidden: Tensor) -> Tensor:
        return image_hidden + self.net(image_hidden)


class Pool(Layer):
    """The mean over the patches: `image_features` [B, width], which the head projects."""

    reads = drops = ("image_hidden",)
    makes = ("image_features",)

    def compute(self, image_hidden: Tensor) -> Tensor:
        return image_hidden.mean(1)


def mixer(name: str, image_size: int) -> Tower:
    sizes = {"width": 64, "depth": 2} | parse_overrides(
        name, split_name(name)[1], {"width": int, "depth": int}
    )
    with torch.device("meta"):
        model = nn.Sequential(
            Patches(sizes["width"]), *(Block(sizes["width"]) for _ in range(sizes["depth"])), Pool()
        )
    layers = [(f"layer{i}", layer) for i, layer in enumerate(model)]
    return Tower(
        "image",
        name,
        sizes["width"],
        cut("image", model, layers, reset),
        {"image_size": image_size, **sizes},
    )


OWN["mixer"] = mixer
