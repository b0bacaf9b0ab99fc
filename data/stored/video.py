"""Films in data sets, and the clips of them that samples are of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from data.bad_samples import BadSample
from data.clips import KEYS, Clip, checked_span, placed_span
from data.decoding.films import FilmReader, describe_film, even_times, missing_film_decoders
from data.keys import content_hash, hash64, keys_of
from data.stored.image import perceptual_hash
from data.stored.items import bytes_or_path
from data.stored.record import JSON, TABLE, Media, StoredFile

if TYPE_CHECKING:
    from data.formats.rows import Format, Sample
    from data.index.sources import Source

ENDINGS = ("mp4", "webm", "mkv", "mov", "m4v", "avi", "mpg", "mpeg", "ts", "flv", "wmv")
KEY_FRAMES = 4  # of a film, by which equal films are found
PIECE = 1 << 20  # bytes


class StoredFilm(StoredFile):
    """A sample may be a part of a film, and a film may be long."""

    def check(self, value: Any, sample: Sample, row: Mapping[str, Any], format: Format) -> None:
        super().check(value, sample, row, format)
        sample.span = checked_span(*(row.get(key) for key in KEYS))

    def find(self, path: Any, media: Media, format: Format) -> None:
        super().find(format.roots.with_ending(path, self.endings), media, format)

    def stays(self, media: Media) -> bool:
        return media.mtime_ns > 0  # in a file of its own

    def look(
        self, value: bytes | str, decode: bool, media: Media, hashed: bytes = b""
    ) -> dict[str, Any]:
        own = (media.size, media.mtime_ns) if isinstance(value, str) else ()
        return {**_looked_at(value, decode, own, hashed)}

    def of_sample(self, sample: Sample, found: Mapping[str, Any]) -> dict[str, Any]:
        lengths = (found[f"video_{name}"] for name in ("seconds", "first_s"))
        start_s, end_s = placed_span(sample.span, *lengths)
        return {"video_start_s": start_s, "video_end_s": end_s}

    def equal_rows(self, source: Source, index: np.ndarray) -> np.ndarray:
        films = (source.content_hash("video", i) for i in index.tolist())
        return keys_of(
            content_hash(film + span.tobytes())
            for film, span in zip(films, clip_spans(source, index))
        )

    def of_index(self, value: bytes | str, number: Callable[[str], Any]) -> Clip:
        return Clip(value, *(float(number(f"video_{key}")) for key in KEYS))


@lru_cache(1)  # the clips of a film are often neighbours
def _looked_at(
    film: bytes | str, decode: bool, _: Sequence[int], hashed: bytes
) -> Mapping[str, Any]:
    found = hashed or film_hash(film)
    return {"video_hash": found, "video_key": hash64(found) or 1, **measured_film(film, decode)}


def measured_film(film: bytes | str, decode: bool) -> dict[str, Any]:
    """Raises BadSample. What is decoded are frames of all of the film that has pictures, its last
    one among them: equal films are then found by what they show."""
    header = describe_film(film)
    key = {}
    if decode:
        times = np.append(
            even_times(header.first_s, header.seconds, KEY_FRAMES - 1), header.seconds
        )
        with FilmReader() as reader:
            frames = reader.frames(film, times)
        looks = (perceptual_hash(Image.fromarray(frame.transpose(1, 2, 0))) for frame in frames)
        shown = hash64(b"".join(look.to_bytes(8, "big") for look in looks))
        key = {"video_key": shown or 1}  # 0 says that there is no film
    return {
        **key,
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


def clip_spans(source: Source, index: np.ndarray) -> np.ndarray:
    """float64 [n, 2]: where the clip of each sample `index` [n] begins and ends, seconds; of one
    that is missing or bad 0 and 0."""
    names = ("video_start_s", "video_end_s")
    return np.stack([source.numbers(name, index) for name in names], 1).astype(np.float64)


def encoded_film(film: Any) -> bytes:
    """Raises BadSample."""
    film = bytes_or_path(film, "video")
    if isinstance(film, bytes):
        return film
    raise BadSample(
        "not-a-film",
        f"the film is a {type(film).__name__}; bytes, a path or {{bytes, path}} is needed",
    )


NAMES = ("video_path", "video", "video_id")
VIDEO = StoredFilm(
    "video",
    {JSON: NAMES, TABLE: NAMES},
    beside=KEYS,
    several="films",
    parts="image",
    endings=ENDINGS,
    not_of_its_kind="not-a-film",
    measured={
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
    said=("video_codec",),
    measure=measured_film,
    missing_decoders=missing_film_decoders,
    encode=encoded_film,
)
