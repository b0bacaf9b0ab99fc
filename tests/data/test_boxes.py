"""Boxes stay where their pixels are, in every view of an image."""

import io
import itertools

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from data.modalities.boxes import Placed
from data.modalities.preprocessing import RESIZE_MODES, Preprocessing
from data.modalities.transforms import EvalTransform, TrainTransform

RED, BLUE = (230, 20, 20), (20, 20, 230)
FILES = [(500, 333), (301, 411), (641, 640), (97, 60), (64, 64), (45, 180)]  # W, H
SIZES = [(64, 64), (48, 80), (33, 29)]


def drawn(file, box):
    image = Image.new("RGB", file, BLUE)
    image.paste(RED, box)
    return image


def encoded(image, kind, **options):
    file = io.BytesIO()
    exact = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    image.save(file, kind, **exact, **options)
    return file.getvalue()


def found(view):
    """x1, y1, x2, y2 of the pixels that are more red than blue."""
    red = (view[..., 0] / 255 - view[..., 2] / 255 + 1) / 2  # 1 is red, 0 is blue
    spans = [np.flatnonzero(red.max(axis) > 0.5) for axis in (0, 1)]
    return None if len(spans[0]) == 0 else [each[end] - end for end in (0, -1) for each in spans]


def some_box(rng, file):
    """Not small, and of whole pixels."""
    ends = []
    for side in file:
        length = int(rng.integers(side // 4, side // 2))
        start = int(rng.integers(0, side - length + 1))
        ends.append((start, start + length))
    (x1, x2), (y1, y2) = ends
    return x1, y1, x2, y2


def transforms(size):
    yield TrainTransform(size)
    yield TrainTransform(size, flip=1.0, colour_jitter=0.2)
    yield TrainTransform(size, Preprocessing(crop_pct=0.875, interpolation="bilinear"), flip=0.5)
    yield TrainTransform(size, Preprocessing(train_resize_mode="squash"), flip=0.5)
    yield TrainTransform(size, Preprocessing(train_resize_mode="longest"), flip=0.5)
    for mode, crop_pct, whole in itertools.product(RESIZE_MODES, (1.0, 0.875), (True, False)):
        yield EvalTransform(size, Preprocessing(resize_mode=mode, crop_pct=crop_pct), whole)


def test_boxes_are_where_their_pixels_are_in_every_view():
    rng, shown = np.random.default_rng(0), 0
    for file, size in itertools.product(FILES, SIZES):
        for transform, kind in itertools.product(transforms(size), ("PNG", "JPEG")):
            box = some_box(rng, file)
            data = encoded(drawn(file, box), kind)
            seed = int(rng.integers(1000))
            stored = transform.stored(data)
            view, placed = transform.view(stored, np.random.default_rng(seed))
            assert np.array_equal(view, transform(stored, np.random.default_rng(seed)))
            if isinstance(transform, EvalTransform):
                assert transform.placed(stored.shape[:2]) == placed
            boxes, inside = placed.boxes(np.array([box]) / np.tile(file, 2))
            assert (boxes.dtype, boxes.shape, inside.shape) == (np.float32, (1, 4), (1,))
            case = (file, size, transform, kind, box, boxes)
            pixels = found(view)
            if pixels is None or (boxes[0, 2:] - boxes[0, :2]).min() < 1.5:
                assert (boxes[0, 2:] - boxes[0, :2]).min() < 1.5, case
                continue
            # a JPEG's reduced scale rounds its sides up, by up to 7/8 of a pixel
            limit = 1 if kind == "PNG" or min(file) < 2 * max(size) else 2
            assert np.abs(boxes[0] - pixels).max() <= limit, (case, pixels)
            shown += 1
    assert shown > 300


def test_boxes_hold_for_turned_files():
    """They are fractions of the image as it is shown."""
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    box, file = (30, 40, 90, 70), (200, 120)
    lying = drawn(file, box).transpose(Image.Transpose.ROTATE_90)
    for transform in (EvalTransform((50, 50)), TrainTransform((50, 50))):
        stored = transform.stored(encoded(lying, "JPEG", exif=turned))
        view, placed = transform.view(stored, np.random.default_rng(1))
        boxes, _ = placed.boxes(np.array([box]) / np.tile(file, 2))
        assert np.abs(boxes[0] - found(view)).max() <= 1


def test_a_view_of_training_is_the_rectangle_that_it_says():
    image = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    mirrored = set()
    for seed in range(20):
        transform = TrainTransform((40, 48), flip=0.5)
        view, placed = transform.view(image, np.random.default_rng(seed))
        left, right = (round(part * 90) for part in (placed.left, placed.right))
        top, bottom = (round(part * 70) for part in (placed.top, placed.bottom))
        crop = torch.from_numpy(image[top:bottom, left:right].copy()).permute(2, 0, 1)
        again = functional.resize(crop, [40, 48], InterpolationMode.BICUBIC, antialias=True)
        again = again.flip(2) if placed.mirrored else again
        assert np.array_equal(view, again.permute(1, 2, 0).numpy())
        mirrored.add(placed.mirrored)
    assert mirrored == {True, False}


def test_how_much_of_a_box_a_view_shows():
    placed = Placed(0.25, 0.0, 0.75, 0.5, (20, 40))
    asked = [[0.3, 0.1, 0.5, 0.2], [0, 0, 0.5, 0.5], [0.5, 0.25, 1, 1], [0.8, 0.1, 0.9, 0.2]]
    boxes, inside = placed.boxes(np.array([*asked, [0.3, 0.3, 0.3, 0.4]]))
    assert inside.tolist() == pytest.approx([1, 0.5, 1 / 6, 0, 0])  # a line has no area
    assert boxes[0].tolist() == pytest.approx([4, 4, 20, 8])
    assert boxes[1].tolist() == [0, 0, 20, 20] and boxes[2].tolist() == [20, 10, 40, 20]
    mirrored, same = placed._replace(mirrored=True).boxes(np.array(asked))
    assert mirrored[0].tolist() == pytest.approx([20, 4, 36, 8]) and np.allclose(same, inside[:4])
    assert mirrored[1].tolist() == [20, 0, 40, 20]
    none, of_none = placed.boxes(np.empty((0, 4)))
    assert none.shape == (0, 4) and of_none.shape == (0,)
