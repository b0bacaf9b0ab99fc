"""Sounds: from encoded bytes to the spectrogram that the tower reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from data.decoding.sounds import decode_audio, resampled
from data.modalities.audio.features import AudioFeatures
from data.modalities.modality import Loaded, ValueModality

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.cache import SampleCache
    from data.index.sources import Source

# of decoded samples: raise it whenever they change, so that caches do not answer with old ones
VERSION = "1"
HUM_HZ = 440.0  # of what is heard where a micro-batch has no readable sound at all


class AudioModality(ValueModality):
    """input_features float32 [b, ...], shaped as `AudioFeatures` says. A sound that cannot be read
    shows another one of the micro-batch.

    `cache` changes no value. Where chance does not touch the spectrogram (in evaluation, and in
    training of sounds that are not longer than a clip) it keeps that, else the samples at the rate
    of the tower.
    """

    name = "audio"
    count_names = ("audio_seconds", "padded_audio_seconds")

    def __init__(self, features: AudioFeatures, cache: SampleCache | None = None) -> None:
        self.features, self.cache = features, cache

    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        loaded = super().load(source, request, seed)
        if not request.training:  # no seconds are counted, and a source may have no index
            return loaded
        seconds = source.numbers("audio_seconds", request.index)  # 0 without a sound
        clip = self.features.num_samples / self.features.rate
        counts = {
            "audio_seconds": float(np.minimum(seconds, clip).sum()),
            "padded_audio_seconds": clip * int((seconds > 0).sum()),
        }
        return replace(loaded, counts=counts)

    def encode(self, value: bytes, generator: np.random.Generator | None) -> dict[str, Tensor]:
        """`value`: an encoded sound. Raises BadSample as `decode_audio` does."""
        return {"input_features": self.features(self._samples(value), generator)}

    def row(
        self, source: Source, i: int, generator: np.random.Generator | None
    ) -> dict[str, Tensor]:
        # without a length the sound is missing or bad, and the source says which
        if self.cache is None or not source.numbers("audio_seconds", np.array([i]))[0] > 0:
            return super().row(source, i, generator)
        made = self._spectrogram(self.cache, source, i, generator)
        return {"input_features": self.features.finished(made, generator)}

    def _samples(self, value: bytes) -> np.ndarray:
        sound = decode_audio(value)
        return resampled(sound.samples, sound.rate, self.features.rate)

    def _spectrogram(
        self, cache: SampleCache, source: Source, i: int, generator: np.random.Generator | None
    ) -> np.ndarray:
        features, content = self.features, source.content_hash("audio", i)
        # of a sound that is longer than a clip, and of one that is not
        keys = {cut: content + f"{features.name}:{cut:d}".encode() for cut in (False, True)}
        fixed = [cut for cut in keys if features.is_fixed(generator, cut)]
        for cut in fixed:
            if (found := cache.get(keys[cut])) is not None:
                return found
        of_samples = content + f"{VERSION}:{features.rate} Hz".encode()
        stored = cache.get(of_samples)
        samples = self._samples(source.value(self.name, i)) if stored is None else stored
        made = features.spectrogram(features.clipped(samples, generator))
        cut = len(samples) > features.num_samples
        if cut in fixed:
            cache.put(keys[cut], made)
        elif stored is None:
            cache.put(of_samples, samples)
        return made

    def blank(self) -> dict[str, Tensor]:
        time = np.arange(self.features.num_samples, dtype=np.float32) / self.features.rate
        return {"input_features": self.features(0.1 * np.sin(2 * np.pi * HUM_HZ * time), None)}
