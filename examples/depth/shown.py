"""A modality in three files: the depth of each pixel of an image.

    deepspeed --num_gpus 3 train.py --import-module examples.depth.shown \
        --data jsonl:FILE --pairs image:text,depth:text,image:depth

Every data format reads it (`stored.py`), it has a tower (`tower.py`), and here the two are joined:
what enters the tower, and how a value is shown.
"""

import numpy as np
import torch
from PIL import Image

from data.modalities.placed import PlacedModality
from examples.depth.stored import DEPTH, depth_of
from examples.depth.tower import depth_tower
from launch.modalities import MODALITIES, ModalityEntry, views_of
from launch.views import View

FARTHEST = 65_535


class Depth(PlacedModality):
    """depth_values float32 [b, 1, H, W], 0..1, of the part of the image that is shown."""

    name = "depth"

    def decode(self, value):
        return depth_of(value)

    def encode(self, shown):
        return {"depth_values": torch.from_numpy(shown.astype(np.float32))[None] / FARTHEST}

    def blank(self, size):
        return {"depth_values": torch.zeros(1, *size)}


class DepthView(View):
    """Near is dark."""

    endings, others, side = DEPTH.endings, frozenset({"not-an-image", "unreadable"}), 96

    @classmethod
    def of(cls, source, i):
        return cls(source.value("depth", i))

    @staticmethod
    def content(source, i):
        return source.content_hash("depth", i).hex()

    def decode(self):
        return depth_of(self.data)

    def draw(self, axes):
        axes.imshow(self.decode(), cmap="viridis")
        axes.set(xticks=[], yticks=[])

    def picture(self):
        depth = self.decode().astype(np.float32)
        return Image.fromarray((255 * depth / max(1, depth.max())).astype(np.uint8))


MODALITIES["depth"] = ModalityEntry(lambda inputs: Depth(views_of(inputs)), depth_tower, DepthView)
