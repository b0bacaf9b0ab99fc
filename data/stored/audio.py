"""Sounds in data sets."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from data.bad_samples import BadSample, check_sound, refusing
from data.decoding.sounds import decode_audio, describe_audio, missing_audio_decoders
from data.keys import hash64
from data.stored.items import bytes_or_path
from data.stored.record import StoredFile

ENDINGS = ("wav", "flac", "ogg", "opus", "mp3", "m4a", "aac", "aif", "aiff")


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


def encoded_audio(sound: Any) -> bytes:
    """A sound as the bytes of a file: WAV of float32 where it is not encoded yet. Raises
    BadSample."""
    if isinstance(sound, Mapping) and "array" in sound:
        from scipy.io import wavfile  # half a second, which only such data sets wait for

        with refusing():
            samples = np.asarray(sound["array"], np.float32)
        if samples.ndim in (1, 2) and isinstance(rate := sound.get("sampling_rate"), int):
            with refusing(), io.BytesIO() as file:
                check_sound(rate, 1 if samples.ndim == 1 else len(samples))
                wavfile.write(file, rate, samples.T)
                return file.getvalue()
    sound = bytes_or_path(sound, "audio")
    if isinstance(sound, bytes):
        return sound
    raise BadSample(
        "not-audio",
        f"the sound is a {type(sound).__name__}; bytes, a path, {{bytes, path}} or {{array, "
        "sampling_rate}} is needed",
    )


AUDIO = StoredFile(
    "audio",
    several="sounds",
    endings=ENDINGS,
    not_of_its_kind="not-audio",
    measured={
        "audio_key": "u8",  # equal for equal samples, decoded to one channel, and rate
        "audio_seconds": "f4",
        "audio_rate": "i4",  # Hz
        "audio_channels": "i2",
    },
    measure=measured_audio,
    missing_decoders=missing_audio_decoders,
    encode=encoded_audio,
)
