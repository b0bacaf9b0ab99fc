"""Buckets lose little of the images, and shares of a global batch are as pure as they can be."""

from itertools import combinations

import numpy as np
import pytest

from data.batching.buckets import (
    Buckets,
    _candidates,
    choose_sizes,
    kept_area,
    nearest_sizes,
    pack_by_bucket,
)

PHOTOS = (
    np.array([640, 480, 500, 375, 1024, 300, 640, 333]),
    np.array([480, 640, 375, 500, 768, 300, 360, 500]),
)


def drawn(seed, n=400):
    generator = np.random.default_rng(seed)
    return generator.integers(40, 900, n), generator.integers(40, 900, n)


def mean_kept(buckets, width, height):
    return kept_area(width / height, np.array(buckets)).max(axis=1).mean()


@pytest.mark.parametrize("image_size", [64, 224, 384])
@pytest.mark.parametrize("multiple", [8, 32])
def test_sizes_are_multiples_of_about_the_same_area(image_size, multiple):
    for seed in range(3):
        buckets = choose_sizes(*drawn(seed), image_size, multiple)
        assert 1 <= len(buckets) <= 5 and len(set(buckets)) == len(buckets)
        for height, width in buckets:
            assert height % multiple == width % multiple == 0
            assert (
                abs(height * width / image_size**2 - 1)
                <= multiple / 2 * max(height, width) / image_size**2 + 1e-9
            )  # rounding


def test_no_other_choice_of_as_many_sizes_keeps_more():
    for seed in range(3):
        width, height = drawn(seed, 60)
        buckets = choose_sizes(width, height, 160, 32, max_buckets=3)
        kept = kept_area(width / height, _candidates(160, 32))
        best = max(
            kept[:, list(three)].max(axis=1).mean()
            for three in combinations(range(kept.shape[1]), 3)
        )
        assert (
            mean_kept(buckets, width, height) > best - 2e-3
        )  # shapes are summed up in classes, 0.8 % apart


def test_more_buckets_keep_more_and_one_is_the_square_for_images_of_every_shape():
    width, height = drawn(0)
    width, height = np.concatenate([width, height]), np.concatenate([height, width])
    kept = [
        mean_kept(choose_sizes(width, height, 224, 32, n), width, height) for n in (1, 2, 3, 5, 8)
    ]
    assert kept == sorted(kept) and kept[3] > kept[0] + 0.1
    assert choose_sizes(width, height, 224, 32, 1) == ((224, 224),)


def test_an_image_goes_to_the_size_that_crops_least():
    buckets = choose_sizes(*PHOTOS, 224)
    number = nearest_sizes(*PHOTOS, buckets)
    assert number.dtype == np.int8
    for w, h, k in zip(*PHOTOS, number):
        kept = [min(w / h * H / W, W / H * h / w) for H, W in buckets]
        assert kept[k] == pytest.approx(max(kept))
    assert set(number) == set(range(len(buckets)))  # none is without an image
    tall, wide = nearest_sizes(np.array([10, 9000]), np.array([9000, 10]), buckets)
    assert buckets[tall][0] >= buckets[tall][1] and buckets[wide][0] <= buckets[wide][1]


def test_choosing_depends_on_the_images_alone_not_on_their_order():
    width, height = drawn(1)
    order = np.random.default_rng(0).permutation(len(width))
    assert choose_sizes(width, height, 224) == choose_sizes(width[order], height[order], 224)


def pure(buckets, order, shares):
    return sum(np.bincount(buckets[share]).max() for share in np.split(order, shares))


def every_packing(positions, shares):
    """All ways to divide `positions` into `shares` equal sets."""
    if shares == 1:
        yield [list(positions)]
        return
    for share in combinations(positions, len(positions) // shares):
        for others in every_packing([p for p in positions if p not in share], shares - 1):
            yield [list(share), *others]


@pytest.mark.parametrize(("size", "shares"), [(3, 3), (4, 2), (5, 2), (6, 2), (1, 4), (6, 1)])
def test_no_other_packing_is_purer(size, shares):
    generator = np.random.default_rng(0)
    for _ in range(12):
        buckets = generator.integers(0, 5, size * shares)
        order, _ = pack_by_bucket(buckets, [size] * shares)
        best = max(
            pure(buckets, np.concatenate(other), shares)
            for other in every_packing(range(size * shares), shares)
        )
        assert pure(buckets, order, shares) == best


def test_packing_moves_every_position_once_and_names_the_most_common_bucket():
    for seed in range(30):
        generator = np.random.default_rng(seed)
        shares, size = generator.integers(1, 9), generator.integers(1, 17)
        more = generator.integers(0, 2, shares) if seed % 2 else np.zeros(shares, int)
        sizes = (size + more).tolist()
        buckets = generator.integers(0, 5, sum(sizes)).astype(np.int8)
        order, bucket = pack_by_bucket(buckets, sizes)
        assert order.dtype == np.int64 and sorted(order) == list(range(len(buckets)))
        assert bucket.dtype == np.int8 and len(bucket) == shares
        for share, name in zip(np.split(buckets[order], np.cumsum(sizes)[:-1]), bucket):
            assert np.bincount(share)[name] == np.bincount(share).max()
        again, _ = pack_by_bucket(buckets, sizes)
        assert np.array_equal(order, again)
    order, bucket = pack_by_bucket(np.zeros(6, np.int8), [2, 2, 2])
    assert order.tolist() == list(range(6)) and bucket.tolist() == [
        0,
        0,
        0,
    ]  # one bucket: nothing moves


def test_a_sample_without_an_image_changes_no_other_s_bucket():
    width, height = drawn(0)
    whole = Buckets.choose(width, height, 224, 32, 4)
    gaps = Buckets.choose(np.append(width, 0), np.append(height, 0), 224, 32, 4)
    assert gaps.sizes == whole.sizes and gaps.number[:-1].tolist() == whole.number.tolist()
    assert 0 <= gaps.number[-1] < len(gaps.sizes)


def test_refusals():
    width, height = drawn(0)
    with pytest.raises(ValueError, match="1 <= multiple <= image_size"):
        choose_sizes(width, height, 16, 32)
    with pytest.raises(ValueError, match="at least one image"):
        choose_sizes(width[:0], height[:0], 224)
