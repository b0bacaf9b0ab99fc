"""Pictures of every mode become the same kind of tensor."""

import numpy as np
import pytest
import torch
from PIL import Image

from data.pictures import pixel_key, upright_8bit
from data.transforms import CLIP_MEAN, CLIP_STD, eval_transform, train_transform


def to_rgb(tensor):
    """[3, H, W] normalised -> uint8-like 0..255"""
    return (tensor * torch.tensor(CLIP_STD)[:, None, None] + torch.tensor(CLIP_MEAN)[:, None, None]) * 255


def grey_16bit():
    return Image.fromarray(np.full((8, 8), 32800, dtype=np.uint16))  # about half of 65535; its lower byte is 32


def palette_with_transparency():
    image = Image.new("P", (8, 8), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.info["transparency"] = 0
    return image


MODES = [
    ("1", Image.new("1", (8, 8), 1), (255, 255, 255)),
    ("L", Image.new("L", (8, 8), 100), (100, 100, 100)),
    ("LA", Image.new("LA", (8, 8), (0, 0)), (255, 255, 255)),
    ("P", Image.new("RGB", (8, 8), (0, 0, 255)).convert("P", palette=Image.Palette.ADAPTIVE), (0, 0, 255)),
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


@pytest.mark.parametrize(("image", "colour"), [mode[1:] for mode in MODES], ids=[mode[0] for mode in MODES])
def test_every_mode_becomes_normalised_rgb(image, colour):
    tensor = eval_transform(4)(image)
    assert tensor.shape == (3, 4, 4) and tensor.dtype == torch.float32
    expected = torch.tensor(colour, dtype=torch.float32)[:, None, None].expand(3, 4, 4)
    assert torch.allclose(to_rgb(tensor), expected, atol=2.0)  # 8 bits and colour spaces round
    tensor = train_transform(4)(image)
    assert tensor.shape == (3, 4, 4) and tensor.dtype == torch.float32 and tensor.isfinite().all()


def test_exif_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (20, 10))
    image.paste((255, 255, 255), (0, 0, 10, 10))  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise: the left half is then on top
    image.save(tmp_path / "turned.png", exif=exif)
    shown = upright_8bit(Image.open(tmp_path / "turned.png"))
    assert shown.size == (10, 20) and shown.getpixel((5, 2)) == (255, 255, 255) and shown.getpixel((5, 17)) == (0, 0, 0)


def test_pixel_key_sees_what_the_eye_sees():
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    assert pixel_key(red) == pixel_key(red.convert("RGBA")) == pixel_key(red.convert("P", palette=Image.Palette.ADAPTIVE))
    assert pixel_key(Image.new("RGBA", (4, 4), (255, 0, 0, 0))) == pixel_key(Image.new("RGBA", (4, 4), (0, 9, 0, 0)))
    assert pixel_key(Image.new("RGB", (2, 8))) != pixel_key(Image.new("RGB", (4, 4))) != pixel_key(red)


def test_not_square_is_cropped_in_the_middle():
    image = Image.new("RGB", (30, 10))
    image.paste((255, 255, 255), (10, 0, 20, 10))
    assert torch.allclose(to_rgb(eval_transform(10)(image)), torch.tensor(255.0), atol=1.0)


def test_training_background_is_light_and_random_and_evaluation_is_white(demo):
    corner = [to_rgb(train_transform(32)(demo.image(100)))[:, 0, 0] for _ in range(20)]
    assert torch.stack(corner).min() > 170 and torch.stack(corner).std() > 5
    assert torch.allclose(to_rgb(eval_transform(32)(demo.image(100)))[:, 0, 0], torch.tensor(255.0), atol=1.0)


def test_no_flip():
    image = Image.new("RGB", (40, 40))
    image.paste((255, 255, 255), (0, 0, 20, 40))
    for _ in range(30):
        tensor = train_transform(8)(image)
        assert tensor[:, :, 0].mean() > tensor[:, :, -1].mean()


def test_jitter_changes_brightness_when_asked():
    image = Image.new("RGB", (16, 16), (100, 100, 100))
    assert len({round(train_transform(8, colour_jitter=0.3)(image).mean().item(), 2) for _ in range(10)}) > 3
    assert len({round(train_transform(8)(image).mean().item(), 2) for _ in range(10)}) == 1


@pytest.mark.parametrize("transform", [train_transform, eval_transform])
def test_size_refused(transform):
    with pytest.raises(ValueError, match="image_size 0: a whole number of pixels >= 1"):
        transform(0)
