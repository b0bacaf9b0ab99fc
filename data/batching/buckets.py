"""Buckets: a few input sizes (H, W) instead of one square, for towers that accept various sizes;
numpy only.

An image goes to the bucket whose shape is nearest to its own and loses least of its area to the
crop. All buckets have about the same area, so that micro-batches of any bucket cost about the same.
N: images, K: buckets, G: samples of a global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_RATIO = 4.0  # no bucket is longer than four times its other side
CONV_STRIDE = 32  # of ResNets and ConvNeXts, in pixels
SHAPES = 512  # the data is summed up in so many classes of shape


@dataclass(frozen=True, eq=False)
class Buckets:
    """`sizes`: K pairs (H, W) in pixels, from the widest to the tallest. `number` [N] int8: the
    bucket of each training sample."""

    sizes: tuple[tuple[int, int], ...]
    number: np.ndarray

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
    ratio, weight = _shapes(width / height)
    chosen = sizes[_best(ratio, weight, sizes, min(max_buckets, len(sizes)))]
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


def pack_by_bucket(
    bucket_of_position: np.ndarray, sizes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Orders a global batch so that its contiguous shares are as pure as possible.

    `bucket_of_position` [G]; `sizes`: of the shares, which differ by at most one -> (positions [G]
    int64 in their new order, bucket [number of shares] int8 of each share: the most common in it,
    of equally common ones the lowest). Each bucket fills as many whole shares as it can; of what is
    left over, the largest remainders lead a share each, and the others fill them up, in the order
    of their numbers. Where all sizes are equal no other order has more positions in a share of
    their own bucket. A pure function.
    """
    bucket_of_position = np.asarray(bucket_of_position)
    left = sorted(sizes, reverse=True)  # of shares that are not filled yet
    shares: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for bucket in np.unique(bucket_of_position):
        positions = np.flatnonzero(bucket_of_position == bucket)
        while left and len(positions) >= left[-1]:
            size = left.pop(0 if len(positions) >= left[0] else -1)
            shares.append(positions[:size])
            positions = positions[size:]
        rest.append(positions)
    leading = sorted(sorted(range(len(rest)), key=lambda k: -len(rest[k]))[: len(left)])
    filling = np.concatenate(
        [positions for k, positions in enumerate(rest) if k not in leading]
        or [np.empty(0, np.int64)]
    )
    for k, size in zip(leading, left):
        missing = size - len(rest[k])
        shares.append(np.concatenate([rest[k], filling[:missing]]))
        filling = filling[missing:]
    # a share stands where one of its size is asked for
    of_size = {size: iter([own for own in shares if len(own) == size]) for size in set(sizes)}
    shares = [next(of_size[size]) for size in sizes]
    common = [np.argmax(np.bincount(bucket_of_position[share])) for share in shares]
    return np.concatenate(shares).astype(np.int64), np.array(common, dtype=np.int8)


def _candidates(image_size: int, multiple: int) -> np.ndarray:
    """[K, 2] (H, W), from the widest to the tallest."""
    sizes = set()
    for side in range(multiple, int(image_size * MAX_RATIO) + 1, multiple):
        other = max(multiple, round(image_size**2 / side / multiple) * multiple)
        if max(side, other) <= MAX_RATIO * min(side, other):
            sizes |= {(side, other), (other, side)}
    return np.array(sorted(sizes, key=lambda size: (size[0] / size[1], size)))


def _shapes(ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shapes of all images in at most SHAPES classes, evenly spaced in their logarithm:
    (middle, number of images)."""
    limit = np.log(2 * MAX_RATIO)
    edges = np.linspace(-limit, limit, SHAPES)
    nearest = np.rint(
        (np.log(ratio).clip(-limit, limit) + limit) / (2 * limit) * (SHAPES - 1)
    ).astype(np.int64)
    number = np.bincount(nearest, minlength=SHAPES)
    return np.exp(edges[number > 0]), number[number > 0].astype(np.float64)


def _best(ratio: np.ndarray, weight: np.ndarray, sizes: np.ndarray, number: int) -> list[int]:
    """The `number` of `sizes` [candidates, 2] that together keep most of images of shapes `ratio`
    with `weight` [shapes], ascending. Dynamic programming: an image between two neighbours among
    the chosen goes to one of them."""
    kept = kept_area(ratio, sizes)  # [shapes, candidates]
    # from the widest candidate to the tallest: the shapes at least as wide as each
    wider = ratio[:, None] >= sizes[:, 1] / sizes[:, 0]
    total, came_from = weight @ (kept * wider), []  # [candidates] the best that end with each one
    for _ in range(number - 1):
        reached = np.full((len(sizes), len(sizes)), -np.inf)
        for column in range(len(sizes) - 1):
            nearer = np.maximum(kept[:, column : column + 1], kept[:, column + 1 :])
            between = wider[:, column + 1 :] & ~wider[:, column : column + 1]
            reached[column, column + 1 :] = total[column] + weight @ (nearer * between)
        came_from.append(reached.argmax(axis=0))
        total = reached.max(axis=0)
    chosen = [int(np.argmax(total + weight @ (kept * ~wider)))]
    for before in reversed(came_from):
        chosen.append(int(before[chosen[-1]]))
    return chosen[::-1]


def side_multiple(patch_size: int | None) -> int:
    """Pixels that the sides of an image are multiples of. `patch_size` of a ViT; None:
    convolutions."""
    return patch_size or CONV_STRIDE
