r"""A third modality: the palette of an emoji, compared with its name. A third of the emoji come without one.

    deepspeed --num_gpus 3 train.py --import-module examples.modality \
        --data python:examples.dataset:Palettes --pairs image:text,palette:text
"""

import torch
from torch import Tensor, nn

from data.modalities.modality import ValueModality
from examples.dataset import GRID
from launch.modalities import MODALITIES, ModalityEntry, Wanted
from models.towers.layers import Layer, Tower, cut, reset

COLOURS = 3 * GRID * GRID


class Palette(ValueModality):
    """From what the data set holds to the tensors that enter the tower."""

    name = "palette"

    def encode(self, value, generator):
        return {"palette_values": torch.from_numpy(value.copy()).float().flatten() / 255}  # [48]

    def blank(self):
        return {"palette_values": torch.zeros(COLOURS)}


class Mix(Layer):
    """`palette_values` [B, 48] -> `palette_features` [B, width]. A tower of several layers can be
    cut into as many stages."""

    reads = drops = ("palette_values",)
    makes = ("palette_features",)

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(COLOURS, width), nn.GELU(), nn.Linear(width, width))

    def compute(self, palette_values: Tensor) -> Tensor:
        return self.net(palette_values)


def palette_tower(wanted: Wanted) -> Tower:
    """`wanted.name`: of --tower palette=NAME; here the width."""
    width = int(wanted.name or 128)
    with torch.device("meta"):
        layer = Mix(width)
    specs = cut("palette", layer, [("mix", layer)], reset)
    return Tower("palette", f"mix{width}", width, specs=specs, config={}, example=example)


def example(samples: int) -> dict[str, Tensor]:
    return {"palette_values": torch.empty(samples, COLOURS, device="meta")}


MODALITIES["palette"] = ModalityEntry(lambda inputs: Palette(), palette_tower)
