"""Modalities of one's own, which a loader's worker can import."""

import numpy as np
import torch

from data.modalities.modality import Loaded, ValueModality


class Numbers(ValueModality):
    """A small tensor that is made by hand."""

    name = "number"

    def load(self, source, request, seed):
        values = torch.from_numpy(request.index.astype(np.float32))
        return Loaded({"numbers": values[:, None]}, request.position, request.index)

    def encode(self, value, generator):
        raise NotImplementedError

    blank = encode


class Long(Numbers):
    """Values that travel in shared memory, too."""

    name = "long"
    load = ValueModality.load

    def row(self, source, i, generator):
        return {"values": torch.full((9, 9_000), i / 7), "count": torch.tensor(i)}

    def blank(self):
        return self.row(None, 0, None)
