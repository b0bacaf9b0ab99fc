"""Sounds for people: a spectrogram to draw, and a short file to play."""

from __future__ import annotations

import importlib
import io
import math
from dataclasses import dataclass

import numpy as np

from data.decoding.sounds import Sound, resampled

HIGHEST_RATE = 16_000  # Hz; what is drawn and played has nothing above half of it
FRAME_S, FRAMES, MEL_BINS = 0.025, 400, 64
FFT_LENGTH = 1024  # samples; fewer would leave the lowest mel bins empty
DECIBELS = 80.0  # below the loudest, what is drawn at all
TICKS_HZ = (250, 500, 1000, 2000, 4000)


@dataclass(frozen=True, eq=False)
class Spectrogram:
    """`decibels` float32 [F, T], of mel bins from low to high and frames from first to last.
    `ticks`: (part of the axis from 0 to 1, Hz)."""

    decibels: np.ndarray
    seconds: float
    ticks: tuple[tuple[float, int], ...]


def spectrogram_of(sound: Sound) -> Spectrogram:
    """The spectrogram of a whole sound, in about `FRAMES` frames, or fewer where it is short."""
    # reads torch, which what merely decodes sounds does without
    from transformers.audio_utils import hertz_to_mel, mel_filter_bank, spectrogram, window_function

    rate = min(sound.rate, HIGHEST_RATE)
    samples = resampled(sound.samples, sound.rate, rate)
    frame = min(FFT_LENGTH, round(FRAME_S * rate))
    filters = mel_filter_bank(FFT_LENGTH // 2 + 1, MEL_BINS, 0.0, rate / 2, rate, mel_scale="htk")
    made = spectrogram(
        np.pad(samples, (0, max(0, frame - len(samples)))).astype(np.float64),
        window_function(frame, "hann"),
        frame,
        max(frame // 4, math.ceil(len(samples) / FRAMES)),
        fft_length=FFT_LENGTH,
        power=2.0,
        pad_mode="constant",
        mel_filters=filters,
        log_mel="dB",
        db_range=DECIBELS,
    )
    top = hertz_to_mel(rate / 2, "htk")
    ticks = tuple((hertz_to_mel(hz, "htk") / top, hz) for hz in TICKS_HZ if hz < rate / 2)
    return Spectrogram(made.astype(np.float32), sound.seconds, ticks)


def playable(sound: Sound, most_seconds: float, most_bytes: int) -> bytes | None:
    """The sound as MP3, which every browser plays; None where it is longer or would be larger, or
    where the installed libsndfile writes none."""
    library = importlib.import_module("soundfile")
    if sound.seconds > most_seconds or "MP3" not in library.available_formats():
        return None
    encoded = io.BytesIO()
    # MP3 knows a few rates only; this one is among them
    samples = resampled(sound.samples, sound.rate, HIGHEST_RATE).clip(-1, 1)
    library.write(encoded, samples, HIGHEST_RATE, format="MP3")
    return encoded.getvalue() if encoded.tell() <= most_bytes else None
