"""Few sizes are chosen, and together they keep most of the images."""

from itertools import combinations

import numpy as np
import pytest

from data.batching.buckets import Buckets, _candidates, choose_sizes, kept_area, nearest_sizes

PHOTOS = (
    np.array([640, 480, 500, 375, 1024, 300, 640, 333]),
    np.array([480, 640, 375, 500, 768, 300, 360, 500]),
)


def drawn(seed, n=400):
    generator = np.random.default_rng(seed)
    return generator.integers(40, 900, n), generator.integers(40, 900, n)


def mean_kept(sizes, width, height):
    return kept_area(width / height, np.array(sizes)).max(axis=1).mean()


def test_sizes_are_multiples_of_about_the_same_area():
    for image_size, multiple in ((64, 8), (64, 32), (224, 32), (384, 8), (384, 32)):
        for seed in range(3):
            sizes = choose_sizes(*drawn(seed), image_size, multiple)
            assert 1 <= len(sizes) <= 5 and len(set(sizes)) == len(sizes)
            for height, width in sizes:
                assert height % multiple == width % multiple == 0
                rounding = multiple / 2 * max(height, width) / image_size**2 + 1e-9
                assert abs(height * width / image_size**2 - 1) <= rounding


def test_hardly_any_choice_of_as_many_sizes_keeps_more():
    for seed in range(3):
        width, height = drawn(seed, 60)
        kept = kept_area(width / height, _candidates(160, 32))
        chosen = choose_sizes(width, height, 160, 32, max_buckets=3)
        choices = combinations(range(kept.shape[1]), 3)
        best = max(kept[:, list(three)].max(axis=1).mean() for three in choices)
        assert mean_kept(chosen, width, height) > best - 0.005


def test_more_sizes_keep_more_and_one_is_the_square_for_images_of_every_shape():
    width, height = drawn(0)
    width, height = np.concatenate([width, height]), np.concatenate([height, width])
    chosen = [choose_sizes(width, height, 224, 32, n) for n in (1, 2, 3, 5, 8)]
    kept = [mean_kept(sizes, width, height) for sizes in chosen]
    assert kept == sorted(kept) and kept[3] > kept[0] + 0.1
    assert chosen[0] == ((224, 224),)


def test_an_image_goes_to_the_size_that_crops_least():
    sizes = choose_sizes(*PHOTOS, 224)
    order = np.random.default_rng(0).permutation(8)
    assert choose_sizes(*(values[order] for values in PHOTOS), 224) == sizes
    number = nearest_sizes(*PHOTOS, sizes)
    assert number.dtype == np.int8
    for w, h, k in zip(*PHOTOS, number):
        kept = [min(w / h * H / W, W / H * h / w) for H, W in sizes]
        assert kept[k] == pytest.approx(max(kept))
    assert set(number) == set(range(len(sizes)))  # none is without an image
    tall, wide = nearest_sizes(np.array([10, 9000]), np.array([9000, 10]), sizes)
    assert sizes[tall][0] >= sizes[tall][1] and sizes[wide][0] <= sizes[wide][1]


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
