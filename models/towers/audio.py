"""Audio towers by name: those of transformers, and any image tower over a spectrogram.

| name | tower |
|---|---|
| `hf:NAME` | transformers' AST, CLAP's HTSAT, Whisper's encoder |
| any name of an image tower | that tower; it sees the log-mel spectrogram as a grey image |
| a name in `OWN` | one of your own |
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from models.towers.image import image_tower
from models.towers.layers import Tower
from models.towers.libraries import transformers_audio
from models.towers.libraries.transformers_audio import READS
from models.towers.names import HF, split_name
from models.towers.of_image import OfImage, renamed_specs

OWN: dict[str, Callable[[str, float | None, int], Tower]] = {}
"""Towers of one's own: how names begin -> from a whole name, the seconds of a clip and the size of
a spectrogram to a tower without a head. Its `config["audio_input"]` says what it reads."""

# of a spectrogram for an image tower
SECONDS = 4.0
RATE = 16_000  # Hz: what speech and most sounds of the field's data sets need
WINDOW = 1024  # samples
# of decibels of power, so that a quiet and a loud sound are about -1 and 1
QUIET_DB, SPREAD_DB = -30.0, 30.0


def audio_tower(name: str, seconds: float | None = None, size: int = 64) -> Tower:
    """The tower of `name` for clips of `seconds` (None: as its library says, else 4); it has no
    head yet. `size`: mel bins and frames of the spectrogram that an image tower sees. Errors:
    ValueError, FileNotFoundError."""
    base = split_name(name)[0]
    if base in OWN:
        return OWN[base](name, seconds, size)
    if _is_audio(base):
        return transformers_audio.audio_tower(name, seconds)
    return _of_image(image_tower(name, size), _spectrogram(seconds, size))


def spectrogram_tower(name: str) -> str | None:
    """The name of the image tower that the audio tower `name` shows a spectrogram; None: it reads
    sounds in its own way."""
    base = split_name(name)[0]
    return None if base in OWN or _is_audio(base) else name


def audio_input(name: str, seconds: float | None = None, size: int = 64) -> dict[str, Any]:
    """The `config["audio_input"]` of the tower that `audio_tower` makes of the same arguments: the
    fields of `AudioInput`. It follows from the configuration, so no tower is built; only one of
    your own is. Errors: as there, but an image tower's name is not looked up."""
    base = split_name(name)[0]
    if base in OWN:
        return OWN[base](name, seconds, size).config["audio_input"]
    if _is_audio(base):
        return transformers_audio.audio_input(name, seconds)
    return _spectrogram(seconds, size)


def _is_audio(base: str) -> bool:
    """Is it one of transformers' audio models, and no image tower?"""
    if not base.startswith(HF):
        return False
    try:
        return transformers_audio.is_audio(base)
    except ValueError as error:
        from models.towers.libraries import transformers_image  # presets of images

        if transformers_image.hub_id_of(base):
            return False
        raise error


def _spectrogram(seconds: float | None, size: int) -> dict[str, Any]:
    """What an image tower reads of a clip: a log-mel spectrogram of `size` bins and frames."""
    seconds = SECONDS if seconds is None else seconds
    hop = round(seconds * RATE / (size - 1)) if size > 1 else 0
    if not 0 < hop:
        raise ValueError(
            f"--audio-seconds {seconds:g} with --audio-size {size}: fewer samples than frames"
        )
    values = {
        "feature_size": size,
        "sampling_rate": RATE,
        "hop_length": hop,
        # a window at least as long as the step between two, of a length that transforms fast
        "fft_window_size": max(WINDOW, 1 << (hop - 1).bit_length()),
        "frequency_max": RATE / 2,
        "truncation": "rand_trunc",
    }
    # one frame more than there are steps
    return {
        "extractor": "ClapFeatureExtractor",
        "values": values,
        "num_samples": (size - 1) * hop,
        "shape": [1, size, size],
    }


def _of_image(tower: Tower, reads: dict[str, Any]) -> Tower:
    return Tower(
        branch="audio",
        name=tower.name,
        width=tower.width,
        specs=renamed_specs(tower, "audio", Spectrogram),
        config={**tower.config, "audio_input": reads},
        example=partial(transformers_audio.example, reads["shape"]),
    )


class Spectrogram(OfImage):
    """The first layer: `input_features` [B, 1, T, F], decibels, as the image [B, 3, F, T] whose
    three channels are equal."""

    given = (READS,)

    def pixels(self, decibels: Tensor) -> Tensor:
        grey = (decibels.transpose(2, 3) - QUIET_DB) / SPREAD_DB  # [B, 1, F, T]
        return grey.expand(-1, 3, -1, -1)
