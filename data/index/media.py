"""What an index knows of encoded images, sounds and films: where they are, their hashes, and what
was measured."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data.bad_samples import BadSample
from data.decoding.films import FilmReader, describe_film, even_times, missing_film_decoders
from data.decoding.images import (
    decode_bytes,
    missing_image_decoders,
    orientation,
    read_image_size,
    upright_8bit,
)
from data.decoding.sounds import decode_audio, describe_audio, missing_audio_decoders
from data.keys import HASH_BYTES, content_hash, hash64

DECODED_SIDE = 64  # pixels, for the perceptual hash
HASH_SIDE = 8  # of the perceptual hash, bits; 8 * 8 = 64
KEY_FRAMES = 4  # of a film, by which equal films are found
PIECE = 1 << 20  # bytes

PLACE = {"offset": "i8", "size": "i8", "mtime_ns": "i8", "hash": f"V{HASH_BYTES}", "known_by": "u8"}
"""What all kinds of media have, under the modality's name (`image_offset`): see `rows.Media`; the
hash of the encoded bytes, and by what they are known again (`memo.py`): zeros where nothing could be
measured."""


class Medium(NamedTuple):
    """One kind of media. `columns`: name -> numpy type of what is measured, 0 where it was not."""

    columns: dict[str, str]
    # of content, of a film also the path of its file; whether it is decoded
    measure: Callable[[Any, bool], dict[str, Any]]
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


def measured_film(film: bytes | str, decode: bool) -> dict[str, Any]:
    """Raises BadSample. What is decoded are frames of all of the film that has pictures, its last
    one among them."""
    header = describe_film(film)
    key = hash64(film_hash(film))
    if decode:
        times = np.append(
            even_times(header.first_s, header.seconds, KEY_FRAMES - 1), header.seconds
        )
        with FilmReader() as reader:
            frames = reader.frames(film, times)
        looks = (perceptual_hash(Image.fromarray(frame.transpose(1, 2, 0))) for frame in frames)
        key = hash64(b"".join(look.to_bytes(8, "big") for look in looks))
    return {
        "video_key": key or 1,  # 0 says that there is no film
        "video_seconds": header.seconds,
        "video_first_s": header.first_s,
        "video_rate": header.rate,
        "video_width": header.width,
        "video_height": header.height,
        "video_codec": header.codec,
    }


def film_hash(film: bytes | str) -> bytes:
    """Of a film's bytes; of one in a file of its own, which may be large, of its size and three
    pieces."""
    if isinstance(film, bytes):
        return content_hash(film)
    size = os.path.getsize(film)
    with open(film, "rb") as file:
        pieces = []
        for at in (0, max(0, size // 2 - PIECE // 2), max(0, size - PIECE)):
            file.seek(at)
            pieces.append(file.read(PIECE))
    return content_hash(size.to_bytes(8, "little") + b"".join(pieces))


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
            "orientation": "i1",  # EXIF's, of the file
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
    "video": Medium(
        {
            "video_key": "u8",  # equal for equal films, by some of their frames
            "video_seconds": "f8",  # of the film
            # when its first picture comes; sound may come before it
            "video_first_s": "f8",
            "video_rate": "f4",  # frames/s, on average
            "video_width": "i4",  # square pixels, as shown (upright)
            "video_height": "i4",
            "video_start_s": "f8",  # of the clip
            "video_end_s": "f8",
        },
        measured_film,
        missing_film_decoders,
    ),
}
"""Modality -> its kind of media, of all modalities that are encoded files."""


def media_of(modalities: Sequence[str]) -> list[str]:
    """The modalities that are encoded files."""
    return [modality for modality in MEDIA if modality in modalities]
