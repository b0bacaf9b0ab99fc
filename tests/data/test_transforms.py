"""Images of every mode become the same kind of tensor."""

import io
import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from data.decoding.images import decode_bytes
from data.modalities.preprocessing import CLIP, NORMALIZATIONS, RESIZE_MODES, Preprocessing
from data.modalities.transforms import (
    COLOUR_JITTER,
    KEPT,
    SHRUNK,
    EvalTransform,
    Stored,
    TrainTransform,
    augmented,
    normalise,
    stacked,
)


def to_rgb(tensor):
    """[3, H, W] normalised -> uint8-like 0..255"""
    return (
        tensor * torch.tensor(CLIP.std)[:, None, None] + torch.tensor(CLIP.mean)[:, None, None]
    ) * 255


def made(transform, image, seed=0):
    """Both phases, and the normalisation: float32 [3, H, W]."""
    return normalise(stacked([transform(transform.stored.of(image), np.random.default_rng(seed))]))[
        0
    ]


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def smooth(width, height):
    """An image without fine detail, as scales can be compared on it."""
    corners = np.random.default_rng(3).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def grey_16bit():
    # about half of 65535; its lower byte is 32
    return Image.fromarray(np.full((8, 8), 32800, dtype=np.uint16))


def palette_with_transparency():
    image = Image.new("P", (8, 8), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.info["transparency"] = 0
    return image


MODES = [
    ("1", Image.new("1", (8, 8), 1), (255, 255, 255)),
    ("L", Image.new("L", (8, 8), 100), (100, 100, 100)),
    ("LA", Image.new("LA", (8, 8), (0, 0)), (255, 255, 255)),
    ("P", Image.new("RGB", (8, 8), (0, 0, 255)).quantize(), (0, 0, 255)),
    ("P transparent", palette_with_transparency(), (255, 255, 255)),
    ("RGB", Image.new("RGB", (8, 8), (10, 20, 30)), (10, 20, 30)),
    ("RGBA half", Image.new("RGBA", (8, 8), (0, 0, 0, 128)), (127, 127, 127)),
    ("CMYK", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), (255, 0, 0)),
    ("YCbCr", Image.new("RGB", (8, 8), (0, 128, 0)).convert("YCbCr"), (0, 128, 0)),
    ("I;16", grey_16bit(), (128, 128, 128)),
    ("I", Image.fromarray(np.full((8, 8), 32800, dtype=np.int32)), (128, 128, 128)),
    ("F 0..1", Image.new("F", (8, 8), 0.5), (127, 127, 127)),
    ("F 0..255", Image.new("F", (8, 8), 200.0), (200, 200, 200)),
]


def test_every_mode_becomes_normalised_rgb():
    for mode, image, colour in MODES:
        tensor = made(EvalTransform((4, 4)), image)
        assert tensor.shape == (3, 4, 4) and tensor.dtype == torch.float32
        expected = torch.tensor(colour, dtype=torch.float32)[:, None, None].expand(3, 4, 4)
        # 8 bits and colour spaces round
        assert torch.allclose(to_rgb(tensor), expected, atol=2.0), mode
        tensor = made(TrainTransform((4, 4)), image)
        assert tensor.shape == (3, 4, 4) and tensor.dtype == torch.float32, mode
        assert tensor.isfinite().all(), mode


def test_normalise_is_torchvision_s_arithmetic():
    images = [
        np.random.default_rng(n).integers(0, 256, (5, 7, 3)).astype(np.uint8) for n in range(3)
    ]
    pixels = stacked(images)
    assert pixels.shape == (3, 3, 5, 7)
    assert torch.equal(pixels[1], torch.from_numpy(images[1]).permute(2, 0, 1))
    values = normalise(pixels)
    assert values.shape == (3, 3, 5, 7) and values.is_contiguous(memory_format=torch.channels_last)
    expected = [
        v2.functional.normalize(
            torch.from_numpy(p).permute(2, 0, 1) / 255, list(CLIP.mean), list(CLIP.std)
        )
        for p in images
    ]
    # one multiplication and one addition instead of four steps
    assert torch.allclose(values, torch.stack(expected), atol=1e-5)
    # whatever the images came together with, and in whatever order the bytes lie
    assert torch.equal(values[1:2], normalise(stacked(images[1:2])))
    assert torch.equal(values, normalise(pixels.contiguous()))
    for dtype in (torch.bfloat16, torch.float16):  # rounded once, from float32
        half = normalise(pixels, dtype)
        assert torch.equal(half, values.to(dtype))
        assert half.is_contiguous(memory_format=torch.channels_last)
    outline = normalise(pixels.to("meta"), torch.bfloat16)
    assert outline.is_meta and (outline.dtype, outline.shape) == (torch.bfloat16, values.shape)


def test_not_square_is_cropped_in_the_middle():
    image = Image.new("RGB", (30, 10))
    image.paste((255, 255, 255), (10, 0, 20, 10))
    assert torch.allclose(
        to_rgb(made(EvalTransform((10, 10)), image)), torch.tensor(255.0), atol=1.0
    )


def test_evaluation_is_torchvision_s_resize_and_centre_crop():
    """To the last bit on the same decoded pixels, whichever way sizes and margins have to be
    rounded."""
    shapes = [(90, 60), (61, 47), (40, 53), (47, 44), (41, 150)]
    for shape, how, resize in itertools.product(shapes, ["bicubic", "bilinear"], [40, 44]):
        usual = v2.Compose([v2.Resize(resize, InterpolationMode(how)), v2.CenterCrop(40)])
        preprocessing = Preprocessing(interpolation=how, crop_pct=40 / resize)
        ours = EvalTransform((40, 40), preprocessing)(np.array(smooth(*shape)))
        assert np.array_equal(ours, np.array(usual(smooth(*shape)))), (shape, how, resize)


def test_evaluation_resizes_files_once_from_their_full_size():
    """To what OpenCLIP's transform makes of them."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    coarse = np.random.default_rng(5).integers(0, 256, (23, 31, 3)).astype(np.uint8)
    shapes = [(333, 217), (100, 301), (40, 57)]
    for shape, mode in itertools.product([*shapes, (400, 100), (20, 61)], RESIZE_MODES):
        image = Image.fromarray(coarse).resize(shape, Image.Resampling.BICUBIC)
        theirs = image_transform_v2(PreprocessCfg(size=32, resize_mode=mode), is_train=False)
        transform = EvalTransform((32, 32), Preprocessing(resize_mode=mode))
        ours = normalise(stacked([transform(transform.stored(encoded(image, "PNG")))]))[0]
        # a level of 255 is 0.015; fp32 at values of about 2 rounds by 2e-7
        torch.testing.assert_close(ours, theirs(image), rtol=0, atol=1e-5)


def test_preprocessing_that_makes_no_sense_is_refused():
    for values, words in (
        ({"std": (0.2, 0.0, 0.2)}, "must be above 0"),
        ({"mean": (0.5, 0.5)}, "three numbers"),
        ({"interpolation": "nearest"}, "use one of bicubic, bilinear"),
        ({"crop_pct": 1.1}, "from 0.25 to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Preprocessing(**values)


def test_any_image_fills_any_target():
    for size in ((24, 48), (48, 24), (33, 32)):
        for shape in ((100, 30), (30, 100), (20, 20), (1, 90), (64, 64)):
            for transform in (TrainTransform(size), EvalTransform(size)):
                assert made(transform, smooth(*shape)).shape == (3, *size), (shape, transform)


def test_training_crops_80_to_100_percent_anywhere_in_the_image():
    ramp = np.zeros((120, 160, 3), np.uint8)
    # a pixel's colour says where it was
    ramp[..., 0], ramp[..., 1] = (np.arange(160)[None, :], np.arange(120)[:, None])
    transform, lefts, areas, shapes = TrainTransform((60, 60)), [], [], []
    for seed in range(300):
        crop = transform(ramp, np.random.default_rng(seed)).astype(float)
        inner = crop[5:-5, 5:-5]
        width, height = (
            60 / 50 * (50 / 49) * (inner[..., c].max() - inner[..., c].min()) for c in (0, 1)
        )
        lefts.append(crop[30, 30, 0] - width / 2)
        areas.append(width * height / 120**2)
        shapes.append(width / height)
    # of the largest square; colours round
    assert 0.75 < min(areas) < 0.84 and 0.93 < max(areas) < 1.05
    assert 0.86 < min(shapes) < 0.93 and 1.07 < max(shapes) < 1.14
    assert min(lefts) < 5 and max(lefts) > 40  # a 4:3 image is not always cropped in its middle


def test_a_squashed_or_filled_view_of_training_shows_the_whole_image_but_for_its_crop():
    """Also of 4 : 1 images, of which a crop of the target's shape shows a quarter at most."""
    image = np.full((60, 240, 3), 200, np.uint8)
    for mode, least in (("shortest", 0.15), ("longest", 0.79), ("squash", 0.79)):
        for seed in range(20):
            how = Preprocessing(train_resize_mode=mode)
            view, placed = TrainTransform((64, 64), how).view(image, np.random.default_rng(seed))
            seen = placed.boxes(np.array([[0.0, 0.0, 1.0, 1.0]]))[1].item()
            assert least < seen < (0.27 if mode == "shortest" else 1.01), (mode, seen)
            black = float((view == 0).mean())
            assert (0.6 < black < 0.8) if mode == "longest" else black == 0, mode


def test_square_images_train_alike_in_every_mode():
    """So the default of regions changes nothing for them."""
    image = np.random.default_rng(0).integers(0, 256, (80, 80, 3)).astype(np.uint8)
    shortest, squash = (
        TrainTransform((48, 48), Preprocessing(train_resize_mode=mode))
        for mode in ("shortest", "squash")
    )
    for seed in range(5):
        one, other = (t.view(image, np.random.default_rng(seed)) for t in (shortest, squash))
        assert np.array_equal(one[0], other[0]) and one[1] == other[1]


def test_training_background_is_light_and_random_and_evaluation_is_white(demo):
    image = decode_bytes(demo.value("image", 100))

    def corner(transform, seed=0):
        return to_rgb(made(transform, image, seed))[:, 0, 0]

    corners = torch.stack([corner(TrainTransform((32, 32)), seed) for seed in range(20)])
    assert corners.min() > 170 and corners.std() > 5
    for transform in (TrainTransform((32, 32), white=True), EvalTransform((32, 32))):
        assert torch.allclose(corner(transform, 3), torch.tensor(255.0), atol=1.0)


def left_is_brighter(tensor):
    return bool(tensor[:, :, 0].mean() > tensor[:, :, -1].mean())


def test_augmentation_does_what_its_words_say():
    assert augmented((8, 8), ()) == EvalTransform((8, 8), whole=False)
    assert augmented((8, 8), ("crop",)) == TrainTransform((8, 8))
    assert augmented((8, 8), ("crop", "white")) == TrainTransform((8, 8), white=True)
    assert augmented((8, 12), ("crop", "colour", "flip")) == TrainTransform(
        (8, 12), colour_jitter=COLOUR_JITTER, flip=0.5
    )


def test_no_flip_unless_asked_for():
    image = Image.new("RGB", (40, 40))
    image.paste((255, 255, 255), (0, 0, 20, 40))
    assert all(left_is_brighter(made(TrainTransform((8, 8)), image, seed)) for seed in range(30))
    flipped = [
        left_is_brighter(made(TrainTransform((8, 8), flip=0.5), image, seed)) for seed in range(60)
    ]
    assert 15 < sum(flipped) < 45


def test_jitter_changes_brightness_when_asked():
    image = Image.new("RGB", (16, 16), (100, 100, 100))
    for jitter, least, most in ((0.3, 4, 10), (0.0, 1, 1)):
        transform = TrainTransform((8, 8), colour_jitter=jitter)
        means = {round(made(transform, image, seed).mean().item(), 2) for seed in range(10)}
        assert least <= len(means) <= most


def test_an_option_does_not_shift_the_draws_of_another():
    image = smooth(50, 40)
    plain, flipped = (
        transform(np.array(image), np.random.default_rng(5))
        for transform in (TrainTransform((16, 16)), TrainTransform((16, 16), flip=1.0))
    )
    assert np.array_equal(plain, flipped[:, ::-1])


def test_what_is_stored_is_a_little_larger_than_what_is_read():
    for file, size, stored in (
        ((640, 480), (224, 224), (240, 320)),  # half, by the JPEG decoder
        # 375 is more than 1.25 x 224, and half of it is less than 224: 1.15 x
        ((500, 375), (224, 224), (258, 343)),
        ((280, 280), (224, 224), (280, 280)),  # just 1.25 x
        ((100, 60), (224, 224), (60, 100)),  # smaller than needed: as it is
        ((640, 480), (192, 256), (240, 320)),  # height is what limits
        ((480, 640), (192, 256), (393, 294)),  # the width is what limits: 1.15 x 256
    ):
        array = Stored(size)(encoded(smooth(*file), "JPEG", quality=95))
        assert array.shape[:2] == stored and array.dtype == np.uint8
        shrunk = smooth(*file).resize(stored[::-1], Image.Resampling.BOX)
        # the same image, whatever way it was shrunk
        assert np.abs(array - np.asarray(shrunk).astype(int)).mean() < 3


def test_stored_has_four_channels_only_where_something_is_transparent():
    clear, side = Image.new("RGBA", (300, 300), (10, 200, 30, 255)), round(64 * SHRUNK)
    assert Stored((64, 64))(encoded(clear, "PNG")).shape == (side, side, 3)
    clear.paste((255, 0, 0, 0), (0, 0, 150, 300))
    stored = Stored((64, 64))(encoded(clear, "PNG"))
    # the invisible red does not seep into the green
    assert stored.shape[2] == 4 and stored[stored[..., 3] > 0][:, 0].max() < 20
    assert KEPT * 64 < 300


def test_stored_is_the_same_for_the_same_bytes_and_named_by_what_makes_it_differ(demo):
    data = demo.value("image", 7)
    assert np.array_equal(Stored((32, 32))(data), Stored((32, 32))(data))
    larger, bilinear = Preprocessing(crop_pct=32 / 36), Preprocessing(interpolation="bilinear")
    squashed = Preprocessing(resize_mode="squash")
    plain = TrainTransform((32, 32)).stored
    different = [
        plain,
        Stored((32, 64)),
        TrainTransform((32, 32), larger).stored,
        TrainTransform((32, 32), bilinear).stored,
        EvalTransform((32, 32)).stored,
        EvalTransform((32, 32), squashed).stored,
    ]
    assert len({stored.name for stored in different}) == len(different)
    assert plain.name == Stored((32, 32)).name and different[2] == Stored((36, 36))
    applied_later = Preprocessing(*NORMALIZATIONS["imagenet"])
    assert TrainTransform((32, 32), applied_later).stored.name == plain.name


def test_size_refused():
    for transform in (TrainTransform, EvalTransform):
        for size in ((0, 0), (32, -1)):
            with pytest.raises(ValueError, match="whole numbers of pixels >= 1"):
                transform(size)
