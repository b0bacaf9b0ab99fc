"""What the index says of sounds: length, rate, channels, equal samples, and what is wrong with
them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from data.formats.rows import AudioFile, Format, Part, Row
from data.index.bad_samples import BadSample
from data.index.keys import hash64
from data.index.mapped import HASH_BYTES, Index
from data.modalities.audio.decoding import decode_audio, describe_audio

_UNHEARD = {
    "audio_path": "",
    "audio_hash": bytes(HASH_BYTES),
    "audio_offset": 0,
    "audio_size": -1,
    "audio_mtime_ns": 0,
    "audio_place": 0,
    "audio_key": 0,
    "audio_seconds": 0.0,
    "audio_rate": 0,
    "audio_channels": 0,
}
_MEASURED = ("audio_key", "audio_seconds", "audio_rate", "audio_channels")
KEYS, ROWS = "audio_keys.npy", "audio_rows.npy"  # of the index of before, in the build's folder


def hear(
    format: Format, part: Part, row: Row, check: str, known: KnownSounds | None
) -> tuple[dict[str, Any], BadSample | None]:
    """The columns of a row's sound; and what is wrong with it, if anything. `check`: as
    `load_index` has it. `known`: sounds that were read before; None: the row has none that may be
    read."""
    heard = dict(_UNHEARD)
    if row.audio is None:
        return heard, None
    file = row.audio
    heard |= {
        "audio_path": file.path.encode("utf-8", "backslashreplace").decode(),
        "audio_offset": file.offset,
        "audio_size": file.size,
        "audio_mtime_ns": file.mtime_ns,
    }
    if known is None:
        return heard, None
    place = _place(part, file)
    if (found := known.find(place, file)) is not None:
        return heard | found, None
    try:
        content = file.content
        if content is None:
            content = format.audio_bytes(part.file, file.path, file.offset, file.size, row.number)
        heard["audio_hash"] = hash_of(content)
        if check == "decode":
            sound = decode_audio(content, strict=True)
            seconds, rate, channels = sound.seconds, sound.rate, sound.channels
            heard["audio_key"] = _key(sound.samples.tobytes() + rate.to_bytes(4, "little"))
        else:
            seconds, rate, channels = describe_audio(content)
            heard["audio_key"] = _key(content)
    except BadSample as problem:
        return heard, problem
    heard |= {"audio_seconds": seconds, "audio_rate": rate, "audio_channels": channels}
    return heard | {"audio_place": place}, None


def too_long(seconds: float, limit: float) -> BadSample | None:
    """What is wrong with a sound of this length, if anything."""
    if seconds <= limit:
        return None
    return BadSample(
        "huge-audio",
        f"{seconds:,.2f} seconds; --max-audio-seconds is {limit:,g}: cut it into clips",
    )


def hash_of(content: bytes) -> bytes:
    """16 bytes, equal for equal bytes."""
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def _key(value: str | bytes) -> int:
    return hash64(value) or 1  # 0 says that there is no sound


def _place(part: Part, file: AudioFile) -> int:
    container = file.root or part.file
    words = f"{container}\0{file.path}\0{file.offset}\0{file.size}\0{file.mtime_ns}"
    return _key(words)


def write_keys(build: Path, old: Index) -> None:
    """For `KnownSounds`, of the index of before."""
    keys = old.column("audio_place")
    order = np.argsort(keys, kind="stable")
    np.save(build / KEYS, keys[order])
    np.save(build / ROWS, order)


class KnownSounds:
    """What the index of before says of good sounds that have not changed. Broken ones are read
    again."""

    def __init__(self, build: Path, old: Index | None) -> None:
        self._old = old if old is not None and "audio" in old.modalities else None
        if self._old is not None:
            self._keys = np.load(build / KEYS, mmap_mode="r")
            self._rows = np.load(build / ROWS, mmap_mode="r")

    def find(self, place: int, file: AudioFile) -> dict[str, Any] | None:
        if self._old is None:
            return None
        at = int(np.searchsorted(self._keys, np.uint64(place)))
        if at == len(self._keys) or int(self._keys[at]) != place:
            return None
        i = int(self._rows[at])
        stored = self._old.audio_hash(i)
        if file.content is not None and hash_of(file.content) != stored:
            return None
        measured = {name: self._old.column(name)[i].item() for name in _MEASURED}
        return {"audio_hash": stored, "audio_place": place, **measured}
