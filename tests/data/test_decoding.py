"""Images come out of bytes as a viewer shows them, or with the reason why not."""

import io
import struct
import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from data.bad_samples import BadSample
from data.decoding.images import FORMATS, decode_bytes, pixel_key, read_image_size, upright_8bit
from data.modalities.transforms import EvalTransform, TrainTransform

sys.path.insert(0, str(Path(__file__).parent))
from bad_sets import png_claiming  # noqa: E402

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (120, 200, 3)).astype(np.uint8))


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def reason(data, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of broken TIFF
        with pytest.raises(BadSample) as error:
            decode_bytes(data, **options)
    assert error.value.detail
    return error.value.reason


def shown(data):
    return upright_8bit(decode_bytes(data))


def halves(left=(255, 255, 255), right=(0, 0, 0)):
    image = Image.new("RGB", (40, 20), right)
    image.paste(left, (0, 0, 20, 20))
    return image


def test_formats_that_are_read_and_those_that_are_not_opened_at_all():
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO"):
        assert shown(encoded(NOISE, kind)).size == NOISE.size, kind
    for kind in ("EPS", "PDF", "ICO", "TGA", "PCX", "SGI", "ICNS", "DDS", "JPEG2000"):
        assert reason(encoded(NOISE.resize((32, 32)), kind)) == "not-an-image", kind


def test_not_an_image():
    pages = (b"<html>not found</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n", "caf\u00e9".encode())
    for data in (*pages, b"\0" * 100, b"G"):
        assert reason(data) == "not-an-image"
    assert reason(b"") == "empty-file"


def test_truncated():
    for kind in FORMATS:
        data = encoded(NOISE, kind)
        for part in (0.02, 0.3, 0.9, 0.99):
            assert reason(data[: int(len(data) * part)]) == "truncated-image", (kind, part)


def test_a_broken_inside_is_unreadable():
    data = bytearray(encoded(NOISE, "PNG"))
    data[20_000:20_100] = bytes(100)
    assert reason(bytes(data)) == "unreadable"
    webp = bytearray(encoded(NOISE, "WEBP"))
    webp[16:40] = bytes(24)
    assert reason(bytes(webp)) == "unreadable"


def test_size_is_refused_from_the_header_alone():
    """The data holds no such image: decoding would have said truncated."""
    for size in ((30_000, 30_000), (10_001, 10_000)):
        assert reason(png_claiming(*size)) == "too-many-pixels"
    for size in ((70_000, 1_000), (1_010, 10), (10, 1_010)):
        assert reason(png_claiming(*size)) == "impossible-size"


def test_the_limit_of_pixels_is_our_own_and_pillow_s_stays_as_it_is(monkeypatch):
    # Pillow alone would warn above 50 pixels and refuse above 100
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_bytes(encoded(NOISE, "JPEG")).size == NOISE.size
    assert Image.MAX_IMAGE_PIXELS == 50
    png, pixels = encoded(NOISE, "PNG"), NOISE.width * NOISE.height
    assert reason(png, pixel_limit=pixels - 1) == "too-many-pixels"
    assert decode_bytes(png, pixel_limit=pixels).size == NOISE.size


def test_jpeg_is_decoded_at_the_smallest_scale_that_is_large_enough():
    smooth = NOISE.resize((10, 6)).resize(NOISE.size, Image.Resampling.BICUBIC)
    data = encoded(smooth, "JPEG", quality=95)
    whole = (200, 120)
    sizes = {None: whole, 121: whole, 61: whole, 60: (100, 60), 30: (50, 30), 2: (25, 15)}
    for at_least, size in sizes.items():
        decoded = decode_bytes(data, at_least=at_least)
        assert decoded.size == size
        shrunk = decode_bytes(data).resize(size, Image.Resampling.BOX)
        assert np.abs(np.asarray(decoded).astype(int) - np.asarray(shrunk)).mean() < 2
        assert decode_bytes(encoded(NOISE, "PNG"), at_least=at_least).size == whole


def test_a_pair_of_sizes_is_that_of_the_upright_image():
    exif = Image.Exif()
    exif[0x0112] = 6
    lying, upright = encoded(NOISE, "JPEG", exif=exif), encoded(NOISE, "JPEG")
    assert decode_bytes(lying, at_least=(100, 60)).size == (100, 60)  # shown, 60 wide and 100 high
    assert decode_bytes(lying, at_least=(60, 100)).size == (200, 120)
    assert decode_bytes(upright, at_least=(60, 100)).size == (100, 60)


def test_exif_orientation_is_applied_once():
    bright = "left right right left top top bottom bottom".split()  # of the halves, by orientation
    at = {"left": (0.2, 0.5), "right": (0.8, 0.5), "top": (0.5, 0.2), "bottom": (0.5, 0.8)}
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        for orientation, white in enumerate(bright, 1):
            exif = Image.Exif()
            exif[0x0112] = orientation
            image = shown(encoded(halves(), kind, exif=exif))
            assert image.size == ((20, 40) if orientation >= 5 else (40, 20))
            for side in ("left", "right") if orientation < 5 else ("top", "bottom"):
                x, y = at[side]
                pixel = image.getpixel((int(x * image.width), int(y * image.height)))
                assert (min(pixel) > 240) == (side == white), (kind, orientation, side)
            again = upright_8bit(image)
            assert again.size == image.size and again.tobytes() == image.tobytes()


def test_exif_that_cannot_be_read_counts_as_none():
    assert shown(encoded(halves(), "JPEG", exif=b"Exif\0\0II*\0garbage")).size == (40, 20)


def test_cmyk_jpeg_as_adobe_stores_it():
    """Photoshop stores CMYK inverted, as Pillow does when it writes one."""
    for colour, ink in ((RED, (0, 255, 255, 0)), (BLUE, (255, 255, 0, 0))):
        data = encoded(Image.new("CMYK", (16, 16), ink), "JPEG", quality=95)
        assert b"Adobe" in data
        assert np.abs(np.array(shown(data).getpixel((8, 8))) - colour).max() < 6


def test_grey_of_16_bits_keeps_its_upper_half():
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        image = shown(encoded(Image.fromarray(ramp), kind))
        assert np.abs(np.asarray(image)[..., 0].astype(int) - ramp // 256).max() == 0


def test_grey_of_16_bits_with_a_transparent_value():
    values = np.full((4, 4), 60_000, np.uint16)
    values[0, 0] = 1_000
    image = Image.fromarray(values)
    image.info["transparency"] = 1_000
    image = upright_8bit(image)
    assert image.mode == "RGBA" and image.getpixel((0, 0))[3] == 0
    assert image.getpixel((3, 3)) == (234, 234, 234, 255)


def test_transparency_of_a_palette_and_of_grey():
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([200, 0, 0, 0, 0, 200])
    palette.putpixel((5, 5), 1)
    for kind in ("PNG", "GIF"):
        image = shown(encoded(palette, kind, transparency=0))
        assert image.mode == "RGBA" and image.getpixel((0, 0))[3] == 0
        assert image.getpixel((5, 5)) == (0, 0, 200, 255)
    image = shown(encoded(palette, "PNG", transparency=bytes([128, 255])))  # one opacity per colour
    assert image.getpixel((0, 0)) == (200, 0, 0, 128)
    grey = shown(encoded(Image.new("LA", (8, 8), (90, 40)), "PNG"))
    assert grey.mode == "RGBA" and grey.getpixel((0, 0)) == (90, 90, 90, 40)


def test_an_animation_shows_its_first_frame():
    first, *others = (Image.new("RGB", (12, 12), colour) for colour in (RED, GREEN, BLUE))
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(first, kind, save_all=True, append_images=others, duration=50, **options)
        assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == 3
        assert shown(data).convert("RGB").getpixel((6, 6)) == RED


def test_pixel_key_sees_what_the_eye_sees():
    red = Image.new("RGB", (4, 4), RED)
    others = red.convert("RGBA"), red.convert("P", palette=Image.Palette.ADAPTIVE)
    assert {pixel_key(image) for image in others} == {pixel_key(red)}
    clear = (Image.new("RGBA", (4, 4), (*colour, 0)) for colour in (RED, GREEN))
    assert len({pixel_key(image) for image in clear}) == 1
    different = red, Image.new("RGB", (4, 4)), Image.new("RGB", (2, 8))
    assert len({pixel_key(image) for image in different}) == 3


def premultiplied_tiff(grey, alpha):
    """A TIFF of Pillow's mode La, as microscopes and image editors write them (Pillow#6706)."""
    tag = [struct.pack("<HHIHH", 338, 3, 1, kind, 0) for kind in (2, 1)]  # straight, multiplied in
    image = Image.merge("LA", [Image.fromarray(part.astype(np.uint8)) for part in (grey, alpha)])
    return encoded(image, "TIFF").replace(*tag)


def test_grey_that_is_stored_multiplied_by_its_opacity():
    alpha = np.array([[255, 128, 0]])
    data = premultiplied_tiff(np.array([[200, 60, 0]]), alpha)
    assert decode_bytes(data).mode == "La"
    pixels = np.asarray(shown(data))
    assert (pixels[..., 3] == alpha).all()
    assert np.abs(pixels[0, :2, 0].astype(int) - [200, 60 * 255 / 128]).max() <= 1


MODES = "1 L LA La P PA RGB RGBA RGBa RGBX CMYK YCbCr LAB HSV I I;16 I;16B I;16L F".split()


def of_mode(mode):
    size, random = (17, 12), np.random.default_rng(0)
    length = len(Image.new(mode, size).tobytes())
    return Image.frombytes(mode, size, random.integers(0, 256, length, np.uint8).tobytes())


def test_every_mode_is_shown_whichever_way_it_lies():
    for mode, transparency, orientation in product(MODES, (None, 0), range(1, 9)):
        image = of_mode(mode)
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.info["exif"] = exif.tobytes()
        if transparency is not None:
            image.info["transparency"] = transparency
        for stored in (TrainTransform((8, 8)).stored, EvalTransform((8, 8)).stored):
            assert stored.of(image).dtype == np.uint8, (mode, transparency, orientation)
        assert upright_8bit(image).mode in ("RGB", "RGBA") and pixel_key(image)


@pytest.mark.parametrize("kind", FORMATS)
def test_whatever_the_bytes_an_image_comes_out_or_a_reason(kind):
    """Cut off at every kind of place, and with bytes changed at random."""
    random, seen = np.random.default_rng(0), {"read": 0, "refused": 0}
    for mode in MODES:
        try:
            whole = encoded(of_mode(mode), kind)
        except (OSError, ValueError):  # the format has no such mode
            continue
        cuts = {*range(60), *range(60, len(whole), 23), *range(len(whole) - 4, len(whole) + 1)}
        broken = [whole[:cut] for cut in sorted(cuts)]
        for n in range(40):
            data = bytearray(whole)
            for place in random.integers(0, min(len(data), 200) if n % 2 else len(data), 2):
                data[place] = random.integers(0, 256)
            broken.append(bytes(data))
        for data in broken:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    read_image_size(data)
                    upright_8bit(decode_bytes(data, at_least=8))
                seen["read"] += 1
            except BadSample as problem:
                assert problem.detail
                seen["refused"] += 1
    assert min(seen.values()) > 20, seen
