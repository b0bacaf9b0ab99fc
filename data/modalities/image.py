"""Images: from encoded bytes to `pixel_values`, through the cache.

b: samples of a micro-batch, H, W: the tower's input in pixels, K: patches that are kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data.batching.draws import AUGMENTATION, patch_numbers
from data.batching.feed import kept_number, scaled_size
from data.index.bad_samples import Absent, BadSample
from data.index.keys import keys_of
from data.modalities.modality import Loaded, Memory, Modality, shown
from data.modalities.transforms import ImageTransform, stacked

if TYPE_CHECKING:
    from data.batching.sampler import MicroBatchRequest
    from data.cache import SampleCache
    from data.index.sources import Source

GREY = 128  # where a micro-batch has no readable image at all


class ImageModality(Modality):
    """pixel_values uint8 [b, 3, H, W], channels-last, of which `normalise`
    (`data/modalities/transforms.py`) makes what the tower reads, on the tower's device; with
    `patch_size` (ViT) and fewer patches asked for kept_patches int64 [b, K], ascending.

    `side_multiple`: of the sides that the tower takes. `cache` changes no value. An image that
    cannot be read shows another one of the micro-batch.
    """

    name = "image"
    count_names = ("unreadable_pictures",)  # a metric: its name stays as earlier runs wrote it
    in_shared_memory = True

    def __init__(
        self,
        transform_train: ImageTransform,
        transform_eval: ImageTransform,
        cache: SampleCache | None = None,
        side_multiple: int = 1,
        patch_size: int | None = None,
    ) -> None:
        self.transform_train, self.transform_eval, self.cache = (
            transform_train,
            transform_eval,
            cache,
        )
        self.side_multiple, self.patch_size = side_multiple, patch_size

    def load(
        self, source: Source, request: MicroBatchRequest, seed: int, memory: Memory | None = None
    ) -> Loaded:
        transform = self._transform(request)
        images: list[np.ndarray | None] = []
        bad, absent = [], []
        for i in request.index.tolist():
            # a transform of evaluation draws nothing
            generator = np.random.default_rng([seed, request.epoch, i, AUGMENTATION])
            try:
                images.append(transform(self._stored(source, transform, i), generator))
            except Absent:
                images.append(None)
                absent.append(i)
            except BadSample as error:
                images.append(None)
                bad.append((i, error.reason, f"{source.where(i)}: {error.detail}"))
        # b times uint8 [H, W, 3]
        pixels = shown(images, lambda: np.full((*transform.size, 3), GREY, np.uint8))
        out = memory(sum(image.size for image in pixels)) if memory else None
        tensors = {"pixel_values": stacked(pixels, out)}
        tensors |= self._kept_patches(request, seed, transform.size)
        counts = {"unreadable_pictures": len(bad)}
        key = keys_of(map(source.content_hash, request.index.tolist()))
        return Loaded.of(request, tensors, bad=bad, absent=absent, counts=counts, key=key)

    def outline(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        size = self._transform(request).size
        shape = (len(request.index), 3, *size)
        tensors = {"pixel_values": torch.empty(shape, dtype=torch.uint8, device="meta")}
        tensors |= self._kept_patches(request, seed, size)
        return Loaded.of(request, tensors)

    def _transform(self, request: MicroBatchRequest) -> ImageTransform:
        transform = self.transform_train if request.training else self.transform_eval
        size = request.size or transform.size
        if request.training and request.feed_rates.image_size:
            size = scaled_size(
                size, request.feed_rates.image_size, max(transform.size), self.side_multiple
            )
        return replace(transform, size=size)

    def _stored(self, source: Source, transform: ImageTransform, i: int) -> np.ndarray:
        """The image before augmentation."""
        if self.cache is None:
            return transform.stored(source.image_bytes(i))
        return self.cache.image(
            source.content_hash(i), transform.stored, lambda: source.image_bytes(i)
        )

    def _kept_patches(
        self, request: MicroBatchRequest, seed: int, size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """`kept_patches`, where some are left out."""
        if request.feed_rates.kept_patches >= 1 or self.patch_size is None:
            return {}
        patches = (size[0] // self.patch_size) * (size[1] // self.patch_size)
        kept = kept_number(patches, request.feed_rates.kept_patches)
        numbers = np.stack(
            [patch_numbers(seed, request.epoch, i, patches, kept) for i in request.index.tolist()]
        )
        return {"kept_patches": torch.from_numpy(numbers)}
