"""Modalities that lie on the image of their sample, such as its depth or a mask: a map of values,
of which training and evaluation show the part that they show of the image."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from data.modalities.modality import Loaded, Modality, read_values, shaped_as, with_tensors
from data.modalities.transforms import Size, Views

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.index.sources import Source


class PlacedModality(Modality):
    """The base of one of your own. `views`: those of the images of the run; crop, mirroring and
    size of a sample are drawn from seed, epoch and sample, so they are the image's wherever the map
    has its sides. (A JPEG may be decoded at a reduced scale: its crop then begins within a pixel of
    that scale.)
    """

    def __init__(self, views: Views) -> None:
        self.views = views

    @abstractmethod
    def decode(self, value: Any) -> np.ndarray:
        """The map [h, w, ...] of what the data set holds, upright. Raises BadSample."""

    @abstractmethod
    def encode(self, shown: np.ndarray) -> dict[str, Tensor]:
        """The tensors of one sample, without a batch dimension, of the part that is shown
        [H, W, ...]."""

    @abstractmethod
    def blank(self, size: Size) -> dict[str, Tensor]:
        """Tensors shaped as those of `encode` for a part of `size` [H, W], for a sample without a
        value in a micro-batch that has no other to show."""

    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        transform = self.views.of(request)

        def read(i: int, generator: np.random.Generator) -> dict[str, Tensor]:
            values = self.decode(source.value(self.name, i))
            return self.encode(transform.placed_on(values.shape[:2], generator).nearest(values))

        def blank() -> dict[str, Tensor]:
            return self.blank(transform.size)

        return with_tensors(*read_values(self.name, source, request, seed, read, blank))

    def meta_batch(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        return shaped_as(self.blank(self.views.of(request).size), request)
