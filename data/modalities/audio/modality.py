"""Sounds: from encoded bytes to the spectrogram that the tower reads."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from data.modalities.audio.decoding import decode_audio, resampled
from data.modalities.audio.features import AudioFeatures
from data.modalities.modality import ValueModality

HUM_HZ = 440.0  # of what is heard where a micro-batch has no readable sound at all


class AudioModality(ValueModality):
    """input_features float32 [b, ...], shaped as `AudioFeatures` says. A sound that cannot be read
    shows another one of the micro-batch."""

    name = "audio"

    def __init__(self, features: AudioFeatures) -> None:
        self.features = features

    def encode(self, value: bytes, generator: np.random.Generator | None) -> dict[str, Tensor]:
        """`value`: an encoded sound. Raises BadSample as `decode_audio` does."""
        sound = decode_audio(value)
        samples = resampled(sound.samples, sound.rate, self.features.rate)
        return {"input_features": self.features(samples, generator)}

    def blank(self) -> dict[str, Tensor]:
        time = np.arange(self.features.num_samples, dtype=np.float32) / self.features.rate
        return {"input_features": self.features(0.1 * np.sin(2 * np.pi * HUM_HZ * time), None)}
