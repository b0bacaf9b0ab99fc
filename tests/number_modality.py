"""Modalities of one's own, which a loader's worker can import."""

import numpy as np
import torch

from data.modalities import memory
from data.modalities.modality import Loaded, Modality, ValueModality


class Numbers(ValueModality):
    """A small tensor that is made by hand."""

    name = "number"

    def load(self, source, request, seed):
        values = torch.from_numpy(request.index.astype(np.float32))
        return Loaded({"numbers": values[:, None]}, request.position, request.index)

    def encode(self, value, generator):
        raise NotImplementedError

    def blank(self):
        return {"numbers": torch.zeros(1)}


class Long(Numbers):
    """Values that travel in shared memory, too."""

    name = "long"
    load = ValueModality.load

    def row(self, source, i, generator):
        return {"values": torch.full((9, 9_000), i / 7), "count": torch.tensor(i)}

    def blank(self):
        return self.row(None, 0, None)


class Made(Modality):
    """Tensors that are made of shared memory: `of` takes it, and gives what is sent."""

    def __init__(self, of):
        self.of, self.name = of, of.__name__

    def load(self, source, request, seed):
        values = memory.empty((len(request.index), 9_000), torch.int32)
        values[:] = torch.from_numpy(request.index)[:, None]
        return Loaded.of(
            request, {f"{self.name}_{n}": each for n, each in enumerate(self.of(values))}
        )


def whole(tensor):
    return [tensor]


def calculated(tensor):
    return [tensor + 1]


def parts(tensor):
    return [tensor[1:], tensor[:1, 3:], tensor[:, 5:99]]
