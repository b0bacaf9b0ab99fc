"""Buckets: a few input sizes (H, W) instead of one square, for towers that accept various sizes;
numpy only.

An image goes to the bucket whose shape is nearest to its own and loses least of its area to the
crop. All buckets have about the same area, so that micro-batches of any bucket cost about the same.
N: images, K: buckets, G: samples of a global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from data.batching.rows import Rows
    from data.index.sources import Source

MAX_RATIO = 4.0  # no bucket is longer than four times its other side
CONV_STRIDE = 32  # of ResNets and ConvNeXts, in pixels
ROUNDS = 10  # of improvements, of which a few are enough
SHAPES = 512  # quantiles, which stand for the shapes of all images


@dataclass(frozen=True, eq=False)
class Buckets:
    """`sizes`: K pairs (H, W) in pixels, from the widest to the tallest. `number` [N] int8: the
    bucket of each training sample; or what gives those of some by their numbers."""

    sizes: tuple[tuple[int, int], ...]
    number: np.ndarray | NearestSizes

    @classmethod
    def choose(
        cls, width: np.ndarray, height: np.ndarray, image_size: int, multiple: int, max_buckets: int
    ) -> Buckets:
        """For samples of these widths and heights [N], as the index has them: 0 of samples without
        an image, which any bucket will do for. Errors: ValueError."""
        shown = np.minimum(width, height) > 0
        sizes = choose_sizes(width[shown], height[shown], image_size, multiple, max_buckets)
        number = np.zeros(len(shown), np.int8)
        number[shown] = nearest_sizes(width[shown], height[shown], sizes)
        return cls(sizes, number)


class NearestSizes:
    """The buckets of training samples whose sizes are not known before they are read. `train`: the
    source's indices of the training samples."""

    def __init__(self, source: Source, train: Rows, sizes: Sequence[tuple[int, int]]) -> None:
        self._source, self._train, self._sizes = source, train, sizes

    def __getitem__(self, visited: np.ndarray) -> np.ndarray:
        """[G] int8 of the training samples `visited` [G]; 0 of those without an image."""
        index = self._train[visited]
        width, height = (self._source.numbers(name, index) for name in ("width", "height"))
        shown = np.minimum(width, height) > 0
        number = np.zeros(len(visited), np.int8)
        number[shown] = nearest_sizes(width[shown], height[shown], self._sizes)
        return number


def choose_sizes(
    width: np.ndarray, height: np.ndarray, image_size: int, multiple: int = 32, max_buckets: int = 5
) -> tuple[tuple[int, int], ...]:
    """At most `max_buckets` sizes (H, W) for the images `width`, `height` [N] (pixels, as shown), a
    pure function of them.

    Candidates: for each height that is a multiple of `multiple`, the width, also a multiple, whose
    area comes nearest to image_size². Chosen are those that together keep most of the images' area.
    Sizes that no image would use are left out. Errors: ValueError.
    """
    if not len(width):
        raise ValueError("image buckets are chosen for images: at least one image is needed")
    if not (1 <= multiple <= image_size and 1 <= max_buckets <= np.iinfo(np.int8).max):
        raise ValueError(
            f"image_size {image_size}, multiple {multiple}, max_buckets {max_buckets}: 1 <= "
            "multiple <= image_size and 1 <= max_buckets <= 127 are needed"
        )
    sizes = _candidates(image_size, multiple)
    ratio = np.quantile(width / height, (np.arange(SHAPES) + 0.5) / SHAPES)
    chosen = sizes[_best(kept_area(ratio, sizes), max_buckets)]
    used = np.unique(np.argmax(kept_area(ratio, chosen), axis=1))
    return tuple((int(h), int(w)) for h, w in chosen[used])


def nearest_sizes(
    width: np.ndarray, height: np.ndarray, sizes: Sequence[tuple[int, int]]
) -> np.ndarray:
    """[N] int8: the number of the size that crops least away; of equally good ones the first."""
    return np.argmax(kept_area(width / height, np.array(sizes)), axis=1).astype(np.int8)


def kept_area(ratio: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[N, K]: the share of its area that an image of shape `ratio` [N] = w / h keeps in a crop of
    shape `sizes` [K, 2] = (H, W)."""
    shape = sizes[:, 1] / sizes[:, 0]  # [K]
    return np.minimum(ratio[:, None] / shape, shape / ratio[:, None])


def _candidates(image_size: int, multiple: int) -> np.ndarray:
    """[K, 2] (H, W), from the widest to the tallest."""
    sizes = set()
    for side in range(multiple, int(image_size * MAX_RATIO) + 1, multiple):
        other = max(multiple, round(image_size**2 / side / multiple) * multiple)
        if max(side, other) <= MAX_RATIO * min(side, other):
            sizes |= {(side, other), (other, side)}
    return np.array(sorted(sizes, key=lambda size: (size[0] / size[1], size)))


def _best(kept: np.ndarray, number: int) -> list[int]:
    """Up to `number` columns of `kept` [shapes, candidates], ascending, that together keep most:
    begun evenly spaced, each in turn becomes the best one beside the others."""
    chosen = np.linspace(0, kept.shape[1] - 1, number).astype(int).tolist()
    for k in [*range(number)] * ROUNDS:
        others = kept[:, chosen[:k] + chosen[k + 1 :]].max(axis=1, initial=0)
        chosen[k] = int(np.argmax(np.maximum(others[:, None], kept).sum(axis=0)))
    return sorted(set(chosen))


def side_multiple(patch_size: int | None) -> int:
    """Pixels that the sides of an image are multiples of. `patch_size` of a ViT; None:
    convolutions."""
    return patch_size or CONV_STRIDE
