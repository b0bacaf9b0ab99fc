"""Features of a sound, as a tower reads them: a clip of a fixed length, and its log-mel spectrogram
by transformers' feature extractors.

n samples at the extractor's rate, T frames, F mel bins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.utils import is_speech_available

from data.modalities.audio.extractors import EXTRACTORS, extracted, feature_extractor

# of what is made of a clip: raise it whenever that changes, so that caches do not answer with what
# was made before
VERSION = "1"
SIGNAL_TO_NOISE_DB = (5.0, 30.0)  # mixed in so loud
MASKS = 2  # of time and of frequency
# at most, of all mel bins and of all frames (Park et al. 2019, LibriSpeech double: F = 27 of 80
# bins, T = 100 of about 1,000 frames)
MASKED_BINS, MASKED_FRAMES = 27 / 80, 0.1


@dataclass(frozen=True)
class AudioFeatures:
    """`values`: the arguments of the feature extractor, a class of transformers; `num_samples`: of
    a clip, at `rate` Hz. A longer sound is cut to that; a shorter one is repeated or padded as the
    extractor says (CLAP: whole repetitions, then zeros)."""

    extractor: str
    values: Mapping[str, Any]
    num_samples: int
    augmentation: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.extractor not in EXTRACTORS:
            raise ValueError(
                f"feature extractor {self.extractor!r}: one of {', '.join(EXTRACTORS)} is needed"
            )
        if self.num_samples < 1:
            raise ValueError(f"a clip of {self.num_samples} samples: at least 1 is needed")

    @property
    def rate(self) -> int:
        """The rate of the samples, Hz."""
        return self._made.sampling_rate

    def __call__(self, samples: np.ndarray, generator: np.random.Generator | None) -> Tensor:
        """float32 [n] -> float32 [1, T, F] (CLAP), [T, F] (AST) or [F, T] (Whisper).

        `generator`: the clip is cut at random and augmented; None: cut from the middle."""
        return self.finished(self.spectrogram(self.clipped(samples, generator)), generator)

    def clipped(self, samples: np.ndarray, generator: np.random.Generator | None) -> np.ndarray:
        """float32 [n] -> float32 of at most `num_samples`, with noise where that is asked for."""
        asked, spare = self._asked(generator), len(samples) - self.num_samples
        if spare > 0:
            start = spare // 2
            if generator is not None and "crop" in asked:
                start = int(generator.integers(spare + 1))
            samples = samples[start : start + self.num_samples]
        return with_noise(samples, generator) if "noise" in asked else samples

    def finished(self, spectrogram: np.ndarray, generator: np.random.Generator | None) -> Tensor:
        """Make of a spectrogram what the tower reads: with SpecAugment where that is asked for."""
        if "spec" in self._asked(generator):
            spectrogram = masked(spectrogram, EXTRACTORS[self.extractor].axes, generator)
        return torch.from_numpy(np.array(spectrogram))  # its own: what a cache gives is read-only

    def is_fixed(self, generator: np.random.Generator | None, cut: bool) -> bool:
        """Whether chance leaves the spectrogram alone. `cut`: of a sound longer than a clip."""
        asked = self._asked(generator)
        return "noise" not in asked and not (cut and "crop" in asked)

    @cached_property
    def name(self) -> str:
        """A name, equal for two that make equal spectrograms of equal clips."""
        settings = (self.extractor, sorted(self.values.items()), self.num_samples)
        # AST's extractor uses torchaudio where that is installed, and gives other numbers with it
        library = (transformers.__version__, is_speech_available())
        words = repr((VERSION, settings, library))
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def _asked(self, generator: np.random.Generator | None) -> tuple[str, ...]:
        return () if generator is None else self.augmentation

    def spectrogram(self, clip: np.ndarray) -> np.ndarray:
        """float32 [at most `num_samples`] -> float32, shaped as what `__call__` gives."""
        return extracted(self._made, clip, self.num_samples)

    @cached_property
    def _made(self) -> Any:
        return feature_extractor(self.extractor, self.values)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_made"}


def with_noise(samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """float32 [n], with Gaussian noise that is `SIGNAL_TO_NOISE_DB` quieter, drawn evenly."""
    decibel = generator.uniform(*SIGNAL_TO_NOISE_DB)
    loudness = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
    noise = generator.standard_normal(len(samples), np.float32)
    return samples + np.float32(loudness * 10 ** (-decibel / 20)) * noise


def masked(
    spectrogram: np.ndarray, axes: tuple[int, int], generator: np.random.Generator
) -> np.ndarray:
    """A copy with `MASKS` stripes of frames and of mel bins set to its mean (SpecAugment, Park et
    al. 2019). `axes`: of time and frequency."""
    made = spectrogram.copy()
    mean = spectrogram.mean()
    for axis, share in zip(axes, (MASKED_FRAMES, MASKED_BINS)):
        size = made.shape[axis]
        for _ in range(MASKS):
            width = int(generator.integers(int(share * size) + 1))
            start = int(generator.integers(size - width + 1))
            stripe = [slice(None)] * made.ndim
            stripe[axis] = slice(start, start + width)
            made[tuple(stripe)] = mean
    return made
