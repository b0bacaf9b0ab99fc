"""transformers' feature extractors, with all frames of a sound transformed at once.

The library's numpy code transforms one frame after the other in Python. Here the same functions run
on an array of frames, in the same order and the same precision, so the values are the same to the
last bit. `feature_extractor` checks that against the installed version of the library, and returns
the library's own extractor where they differ.

T: frames of a sound, F: mel bins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import transformers
from transformers import ASTFeatureExtractor, ClapFeatureExtractor
from transformers.audio_utils import power_to_db, window_function

# of ASTFeatureExtractor, which has no arguments for them: samples of a frame, from one frame to the
# next and of a transform, pre-emphasis (those of Kaldi's filter banks at 16 kHz), least power
AST_WINDOW, AST_HOP, AST_FFT = 400, 160, 512
AST_PREEMPHASIS, AST_FLOOR = 0.97, 1.192092955078125e-07
CLAP_FLOOR = 1e-10  # the default of transformers' spectrogram
PROBE_SAMPLES = 4_000
FRAMES_AT_ONCE = 64  # half a megabyte of 1,024 samples: what a core's own cache holds


class ClapFrames(ClapFeatureExtractor):
    """`ClapFeatureExtractor` with its frames in arrays."""

    def _np_extract_fbank_features(
        self, waveform: np.ndarray, mel_filters: np.ndarray
    ) -> np.ndarray:
        size, half = self.fft_window_size, self.fft_window_size // 2
        window = window_function(size, "hann")
        padded = np.pad(waveform, (half, half), mode="reflect")
        power = power_of(padded, size, self.hop_length, size, lambda frames: frames * window)
        mel = np.maximum(CLAP_FLOOR, np.dot(mel_filters.T, power.T))
        return np.asarray(power_to_db(mel), np.float32).T


class AstFrames(ASTFeatureExtractor):
    """`ASTFeatureExtractor` with its frames in arrays. Where torchaudio is installed the library
    uses that, and so does this."""

    def _extract_fbank_features(self, waveform: np.ndarray, max_length: int) -> np.ndarray:
        if not hasattr(self, "mel_filters"):
            return super()._extract_fbank_features(waveform, max_length)
        power = power_of(np.squeeze(waveform), AST_WINDOW, AST_HOP, AST_FFT, self._windowed)
        mel = np.maximum(AST_FLOOR, np.dot(self.mel_filters.T, power.T))
        made = np.log(mel).astype(np.float32).T[:max_length]
        return np.pad(made, ((0, max_length - len(made)), (0, 0)))

    def _windowed(self, frames: np.ndarray) -> np.ndarray:
        frames = frames - frames.mean(1, keepdims=True)
        frames[:, 1:] -= AST_PREEMPHASIS * frames[:, :-1]
        frames[:, 0] *= 1 - AST_PREEMPHASIS
        return frames * self.window


def power_of(
    samples: np.ndarray, size: int, hop: int, transform: int, windowed: Callable
) -> np.ndarray:
    """float [n] -> float64 [T, transform / 2 + 1], T = 1 + ⌊(n − size) / hop⌋. `windowed`: of
    float64 [t, size], a few frames. The library keeps the spectrum in complex64."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, size)[::hop]
    power = np.empty((len(frames), transform // 2 + 1))
    for start in range(0, len(frames), FRAMES_AT_ONCE):
        few = slice(start, start + FRAMES_AT_ONCE)
        spectrum = np.fft.rfft(windowed(frames[few].astype(np.float64)), transform)
        power[few] = np.abs(spectrum.astype(np.complex64), dtype=np.float64) ** 2.0
    return power


class Extractor(NamedTuple):
    """`axes`: of time and of frequency in what it makes of one sound; `faster`: a class that gives
    the same numbers in less time."""

    axes: tuple[int, int]
    faster: type | None = None


EXTRACTORS = {
    "ASTFeatureExtractor": Extractor((0, 1), AstFrames),
    "ClapFeatureExtractor": Extractor((1, 2), ClapFrames),
    "WhisperFeatureExtractor": Extractor((1, 0)),
}


def feature_extractor(name: str, values: Mapping[str, Any]) -> Any:
    """The class `name` of transformers with the arguments `values`, or what gives the very same
    numbers in less time."""
    theirs, faster = getattr(transformers, name)(**values), EXTRACTORS[name].faster
    if faster is None:
        return theirs
    ours = faster(**values)
    samples = np.random.default_rng(0).standard_normal(PROBE_SAMPLES, np.float32)
    one, other = (extracted(each, samples, len(samples)) for each in (ours, theirs))
    return ours if np.array_equal(one, other) else theirs


def extracted(extractor: Any, clip: np.ndarray, num_samples: int) -> np.ndarray:
    """float32 [at most `num_samples`] -> the spectrogram, float32."""
    more: dict[str, Any] = {}
    if isinstance(extractor, ClapFeatureExtractor):
        # not "fusion": it stacks four spectrograms, and draws from a generator of its own
        more = {"max_length": num_samples, "truncation": "rand_trunc"}
    if isinstance(extractor, ASTFeatureExtractor) and len(clip) < AST_WINDOW:
        clip = np.pad(clip, (0, AST_WINDOW - len(clip)))  # else it finds no frame and fails
    made = extractor(clip, sampling_rate=extractor.sampling_rate, return_tensors="np", **more)
    return np.asarray(made[extractor.model_input_names[0]][0], np.float32)
