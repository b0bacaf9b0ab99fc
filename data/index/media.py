"""What an index knows of encoded images and sounds: where they are, their hashes, and what was
measured."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data.bad_samples import BadSample
from data.decoding.images import (
    decode_bytes,
    missing_image_decoders,
    orientation,
    read_image_size,
    upright_8bit,
)
from data.decoding.sounds import decode_audio, describe_audio, missing_audio_decoders
from data.keys import HASH_BYTES, hash64

DECODED_SIDE = 64  # pixels, for the perceptual hash
HASH_SIDE = 8  # of the perceptual hash, bits; 8 * 8 = 64

PLACE = {"offset": "i8", "size": "i8", "mtime_ns": "i8", "hash": f"V{HASH_BYTES}"}
"""What both kinds of media have, under the modality's name (`image_offset`): see `rows.Media`; and
the hash of the encoded bytes, zeros where they were not read."""


class Medium(NamedTuple):
    """One kind of media. `columns`: name -> numpy type of what is measured, 0 where it was not."""

    columns: dict[str, str]
    measure: Callable[[bytes, bool], dict[str, Any]]  # of content; whether it is decoded
    missing_decoders: Callable[[], list[str]]


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


def measured_audio(content: bytes, decode: bool) -> dict[str, Any]:
    """Raises BadSample."""
    if decode:
        sound = decode_audio(content, strict=True)
        seconds, rate, channels = sound.seconds, sound.rate, sound.channels
        content = sound.samples.tobytes() + rate.to_bytes(4, "little")
    else:
        seconds, rate, channels = describe_audio(content)
    return {
        "audio_key": hash64(content) or 1,  # 0 says that there is no sound
        "audio_seconds": seconds,
        "audio_rate": rate,
        "audio_channels": channels,
    }


def refuse_too_long(seconds: float, limit: float | None) -> None:
    """Raises BadSample: huge-audio."""
    if limit is not None and seconds > limit:
        raise BadSample(
            "huge-audio",
            f"{seconds:,.2f} seconds; --max-audio-seconds is {limit:,g}: cut it into clips",
        )


MEDIA = {
    "image": Medium(
        {
            "width": "i4",  # pixels, as shown (upright)
            "height": "i4",
            # bytes of the encoded image / pixels: what an entropy coder needs, a cheap measure of
            # detail
            "complexity": "f4",
            # equal or few bits apart for images that look alike; 0 with check "header"
            "perceptual_hash": "u8",
        },
        measured_image,
        missing_image_decoders,
    ),
    "audio": Medium(
        {
            "audio_key": "u8",  # equal for equal samples, decoded to one channel, and rate
            "audio_seconds": "f4",
            "audio_rate": "i4",  # Hz
            "audio_channels": "i2",
        },
        measured_audio,
        missing_audio_decoders,
    ),
}
"""Modality -> its kind of media, of all modalities that are encoded files."""


def media_of(modalities: Sequence[str]) -> list[str]:
    """The modalities that are encoded files."""
    return [modality for modality in MEDIA if modality in modalities]
