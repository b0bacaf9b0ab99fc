"""Images in data sets."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from data.bad_samples import BadSample, refusing
from data.decoding.images import (
    decode_bytes,
    may_turn_late,
    missing_image_decoders,
    orientation,
    read_image_size,
    upright_8bit,
)
from data.stored.items import bytes_or_path
from data.stored.record import JSON, PARQUET, TABLE, UNREADABLE, StoredFile

if TYPE_CHECKING:
    from data.formats.rows import Sample

ENDINGS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff"),
    *("ppm", "pgm", "pbm", "pnm"),
)
DECODED_SIDE = 64  # pixels, for the perceptual hash
HASH_SIDE = 8  # of the perceptual hash, bits; 8 * 8 = 64
# that a PNG file can hold; of others, such as CMYK, it holds what a viewer would show
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")


def measured_image(content: bytes, decode: bool) -> dict[str, Any]:
    """What the columns need, and EXIF's orientation. Raises BadSample."""
    width, height, turned = read_image_size(content)
    measured: dict[str, Any] = {}
    if decode:
        # A JPEG is read to its last byte at any scale, and small ones take a third of the time.
        image = decode_bytes(content, at_least=DECODED_SIDE)
        shown = upright_8bit(image)
        if image.format == "PNG":
            turned = orientation(image)
        # some formats tell after the pixels how to turn them
        if (width > height) != (shown.width > shown.height):
            width, height = height, width
        measured["perceptual_hash"] = perceptual_hash(shown)
    complexity = len(content) / (width * height)
    sizes = {"width": width, "height": height, "orientation": turned}
    return measured | sizes | {"complexity": complexity}


def perceptual_hash(image: Image.Image) -> int:
    """64 bits: of an 8 x 8 grid, whether each field is darker than its right neighbour (dHash);
    transparency counts as white."""
    image = upright_8bit(image)
    if image.mode == "RGBA":
        background = Image.new("RGB", image.size, (255, 255, 255))
        background.paste(image, mask=image.getchannel("A"))
        image = background
    grid = image.convert("L").resize((HASH_SIDE + 1, HASH_SIDE), Image.Resampling.BOX)
    grey = np.asarray(grid)  # [8, 9]
    return int.from_bytes(np.packbits(grey[:, :-1] < grey[:, 1:]).tobytes(), "big")


def encoded(image: Any) -> bytes:
    """An image as the bytes of a file: PNG where it is not encoded yet. Raises BadSample."""
    image = bytes_or_path(image, "image")
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        with refusing():
            image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        what = f"a {type(image).__name__}" + (
            f" of {image.dtype}, shape {image.shape}" if isinstance(image, np.ndarray) else ""
        )
        raise BadSample(
            "not-an-image",
            f"the image is {what}; bytes, a path, {{bytes, path}}, a PIL image or a uint8 array "
            "[H, W, 3] is needed",
        )
    held = image if image.mode in PNG_MODES else upright_8bit(image)
    with refusing(), io.BytesIO() as file:
        held.save(file, "PNG", compress_level=1)  # whatever the level, the pixels stay
        return file.getvalue()


class StoredImage(StoredFile):
    @property
    def unreadable(self) -> str:
        return f"{UNREADABLE}pictures"  # as it has been called since version 0.1

    def may_decode(self, sample: Sample) -> bool:
        # boxes need to know how an image is turned, which may stand behind its pixels
        return bool(sample.annotations)

    def must_decode(self, value: bytes) -> bool:
        return may_turn_late(value)


IMAGE = StoredImage(
    "image",
    # Hugging Face's metadata.jsonl has `file_name`, OpenCLIP's tables `filepath`
    {
        JSON: ("image_path", "file_name"),
        TABLE: ("filepath",),
        PARQUET: ("image", "image_path", "filepath"),
    },
    several="images",
    endings=ENDINGS,
    not_of_its_kind="not-an-image",
    measured={
        "width": "i4",  # pixels, as shown (upright)
        "height": "i4",
        "orientation": "i1",  # EXIF's, of the file
        # bytes of the encoded image / pixels: what an entropy coder needs, a cheap measure of
        # detail
        "complexity": "f4",
        # equal or few bits apart for images that look alike; 0 with check "header"
        "perceptual_hash": "u8",
    },
    measure=measured_image,
    missing_decoders=missing_image_decoders,
    encode=encoded,
)
