"""A data set of one's own: anything with `__len__` and `__getitem__`.

    python train.py --data python:examples.dataset:Palettes

The emoji, their names, and of two thirds of them a palette: the mean colours of a grid of fields.
`examples/modality.py` compares palettes with names; without it they are not read.
"""

import io

import numpy as np
from PIL import Image

from data.index.sources import open_source

GRID = 4  # fields a side


class Palettes:
    """Item i is the same whenever it is asked for. A key that is missing, or None: the sample lacks
    that modality."""

    def __init__(self):
        self.emoji = open_source("demo")

    def __len__(self):
        return len(self.emoji)

    def __getitem__(self, i):
        # encoded; a path, a PIL image or an array [H, W, 3] will do too
        image = self.emoji.value("image", i)
        item = {"id": self.emoji.identity(i), "image": image, "text": self.emoji.captions(i)}
        if i % 3:
            colours = Image.open(io.BytesIO(image)).convert("RGBA").convert("RGB")
            # uint8 [4, 4, 3]
            item["palette"] = np.asarray(colours.resize((GRID, GRID), Image.Resampling.BOX))
        return item
