"""Images: from encoded bytes to `pixel_values`, through the cache.

b: samples of a micro-batch, H, W: the tower's input in pixels, K: patches that are kept, n:
regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.boxes import WHOLE
from data.annotations import Annotation
from data.batching.draws import patch_numbers
from data.batching.load_control import kept_number
from data.modalities.annotations import Within, annotation_rows
from data.modalities.boxes import Placed
from data.modalities.modality import Loaded, Modality, read_values
from data.modalities.transforms import ImageTransform, Views, stacked

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.cache import SampleCache
    from data.index.sources import Source

NOWHERE = Placed(0.0, 0.0, 1.0, 1.0, (1, 1))
GREY = 128  # where a micro-batch has no readable image at all


class ImageModality(Modality):
    """pixel_values uint8 [b, 3, H, W], channels-last, of which `normalise`
    (`data/modalities/transforms.py`) makes what the tower reads, on the tower's device; with
    `patch_size` (ViT) and fewer patches asked for kept_patches int64 [b, K], ascending.

    `cache` changes no value. An image that cannot be read shows another one of the micro-batch. Where
    the request asks for c views of an image, its rows are these, each drawn by itself: b·c in all.

    Where a pair has regions also the rows `region`: region_boxes int32 [n, 4] (x1, y1, x2, y2 in
    parts of `WHOLE` of the sides of what the tower sees) and region_row int64 [n], the image of
    each. A region of which the view shows less than half is left out of the loss, as an image that
    cannot be read.
    """

    name = "image"

    def __init__(
        self,
        views: Views,
        cache: SampleCache | None = None,
        patch_size: int | None = None,
    ) -> None:
        self.views, self.cache, self.patch_size = views, cache, patch_size

    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        transform, request = self.views.of(request), request.with_views()

        def read(i: int, generator: np.random.Generator) -> tuple[np.ndarray, Placed]:
            return transform.view(self._stored(source, transform, i), generator)

        def blank() -> tuple[np.ndarray, Placed]:
            return np.full((*transform.size, 3), GREY, np.uint8), NOWHERE

        views, loaded = read_values(self.name, source, request, seed, read, blank)
        return replace(
            loaded,
            further=annotation_rows(
                source, request, seed, self.name, loaded, _in_view([placed for _, placed in views])
            ),
            tensors={
                "pixel_values": stacked([pixels for pixels, _ in views]),
                **self._kept_patches(request, seed, transform.size),
            },
        )

    def meta_batch(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        size, request = self.views.of(request).size, request.with_views()
        shape = (len(request.index), 3, *size)
        tensors = {"pixel_values": torch.empty(shape, dtype=torch.uint8, device="meta")}
        tensors |= self._kept_patches(request, seed, size)
        loaded = Loaded.of(request, tensors)
        further = annotation_rows(source, request, seed, self.name, loaded, None)
        return replace(loaded, further=further)

    def _stored(self, source: Source, transform: ImageTransform, i: int) -> np.ndarray:
        """The image before augmentation. The source knows the bytes by their hash, so what is
        stored under it is made of them."""
        stored = transform.stored
        if self.cache is None:
            return stored(source.value("image", i))
        key = stored.key(source.content_hash("image", i))
        return self.cache.fetch(key, lambda: stored(source.value("image", i)))

    def _kept_patches(
        self, request: MicroBatchRequest, seed: int, size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """`kept_patches`, where some are left out."""
        if request.feed_rates.kept_patches >= 1 or self.patch_size is None:
            return {}
        patches = (size[0] // self.patch_size) * (size[1] // self.patch_size)
        kept = kept_number(patches, request.feed_rates.kept_patches)
        numbers = np.stack(
            [patch_numbers(seed, request.epoch, i, patches, kept, k) for i, k in request.drawn()]
        )
        return {"kept_patches": torch.from_numpy(numbers)}


def _in_view(placed: Sequence[Placed]) -> Within:
    """Boxes of images of which `placed` says what is shown, in parts of `WHOLE` of the views'
    sides."""

    def within(sample: int, regions: Sequence[Annotation]) -> tuple[np.ndarray, np.ndarray]:
        height, width = placed[sample].size
        shown, inside = placed[sample].boxes(np.array([each.extent for each in regions]))
        return np.rint(shown / [width, height, width, height] * WHOLE), inside

    return within
