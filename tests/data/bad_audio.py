"""Sounds, good and of everything that can be wrong with one, as bytes."""

import io
import struct

import numpy as np
from scipy.io import wavfile

RATE = 8_000


def tone(seconds: float = 0.5, pitch: float = 440.0, rate: int = RATE) -> np.ndarray:
    """float32 [n], with harmonics, so that no encoder finds it easy."""
    time = np.arange(round(seconds * rate)) / rate
    waves = [np.sin(2 * np.pi * pitch * k * time) / k for k in (1, 2, 3)]
    return (0.3 * np.sum(waves, 0)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """float32 [n] or [n, channels] as a WAV file, with the library that the project has anyway."""
    with io.BytesIO() as file:
        wavfile.write(file, rate, samples)
        return file.getvalue()


def with_rate(sound: bytes, rate: int) -> bytes:
    at = sound.index(b"fmt ") + 12
    return sound[:at] + struct.pack("<I", rate) + sound[at + 4 :]


def _not_a_number() -> np.ndarray:
    samples = tone()
    samples[100] = np.nan
    return samples


_GOOD = wav(tone())
BAD_AUDIO = {  # name: (reason, content)
    "empty": ("empty-file", b""),
    "page": ("not-audio", b"<html>404 Not Found</html>"),
    "cut": ("truncated-audio", _GOOD[: len(_GOOD) // 2]),
    "no-samples": ("empty-audio", wav(tone(0))),
    "silent": ("silent-audio", wav(np.zeros(800, np.float32))),
    # left and right are each other's negative: their mean is 0
    "silent-mixed": ("silent-audio", wav(np.stack([tone(), -tone()], 1))),
    "hours": ("huge-audio", wav(np.full(1_201 * 1_000, 9, np.uint8), 1_000)),
    "no-rate": ("impossible-audio", with_rate(_GOOD, 0)),
    "absurd-rate": ("impossible-audio", with_rate(_GOOD, 4_000_000_000)),
    "channels": ("impossible-audio", wav(np.repeat(tone(0.1)[:, None], 30, 1))),
    "nan": ("not-finite-audio", wav(_not_a_number())),
    "infinite": ("not-finite-audio", wav(np.full(800, np.inf, np.float32))),
}
"""Each can be made without an optional package. "no-sound", of films, needs one to be made."""


def film() -> bytes:
    """An mp4 without a sound track."""
    import av

    with io.BytesIO() as file:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width = stream.height = 32
            stream.pix_fmt = "yuv420p"
            for _ in range(5):
                frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return file.getvalue()


def m4a(samples: np.ndarray, rate: int) -> bytes:
    """A format that libsndfile does not know."""
    import av

    with io.BytesIO() as file:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("aac", rate=rate, layout="mono")
            frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
            frame.rate = rate
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return file.getvalue()
