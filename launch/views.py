"""How the values of a modality are read, drawn and heard, for evaluation, reports and trackers: a
record each, which `launch/modalities.py` registers with the modality."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from data.formats.rows import AUDIO_ENDINGS, IMAGE_ENDINGS
from data.modalities.audio.decoding import Sound, decode_audio
from data.modalities.audio.picture import playable, spectrogram_of
from data.modalities.decoding import decode_bytes, upright_8bit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from data.index.sources import Source

SPECTROGRAM_INCHES, DOTS_PER_INCH = (1.8, 1.2), 100  # of a small picture of a sound
MOST_KEPT = 400  # pictures, and files to play, of 90 kB at most
MOST_PLAYED_S, MOST_PLAYED_BYTES = 10.0, 24_000  # else a sound is only drawn


@dataclass(frozen=True)
class View:
    """Of one modality. `several`: its values, in messages. `read`: the encoded value of a sample; raises
    BadSample. `content`: equal for samples with the same value. `decode`: raises BadSample, with
    one of `others` where the content is of another kind of file. Of what `decode` returns: `draw`
    puts it into axes; `picture` is a picture of it, and a small one is `side` pixels wide and high
    at most; `play` is a small MP3 file, if it can be heard."""

    several: str
    endings: tuple[str, ...]
    read: Callable[[Source, int], bytes]
    content: Callable[[Source, int], str]
    decode: Callable[[bytes], Any]
    others: frozenset[str]
    draw: Callable[[Axes, Any], None]
    picture: Callable[[Any], Image.Image]
    side: int
    play: Callable[[Any], bytes | None]


# -- images


def on_white(data: bytes) -> np.ndarray:
    """[h, w, 3] uint8 of an encoded image."""
    image = np.asarray(upright_8bit(decode_bytes(data, at_least=160)))
    if image.shape[-1] == 3:
        return image
    # what is transparent is shown on white, as the towers see it
    alpha = image[..., 3:].astype(np.float32) / 255
    return (alpha * image[..., :3] + (1 - alpha) * 255).round().astype(np.uint8)


def _draw_image(axes: Axes, pixels: np.ndarray) -> None:
    axes.imshow(pixels)
    axes.set(xticks=[], yticks=[])


# -- sounds

_KEPT: dict[tuple[bytes, Callable], Any] = {}


def _draw_sound(axes: Axes, sound: Sound) -> None:
    """Its mel spectrogram, with seconds and Hz at the axes."""
    found = spectrogram_of(sound)
    axes.imshow(
        found.decibels,
        origin="lower",
        aspect="auto",
        extent=(0, found.seconds, 0, 1),
        cmap="magma",
        interpolation="nearest",
    )
    axes.set_yticks([at for at, _ in found.ticks], [f"{hz:,}" for _, hz in found.ticks])
    axes.locator_params(axis="x", nbins=4)
    axes.tick_params(labelsize=5.5, length=2, pad=1.5, width=0.5)
    axes.set_xlabel("seconds", fontsize=5.5, labelpad=1)
    axes.set_ylabel("Hz (mel scale)", fontsize=5.5, labelpad=1)


def _kept(make: Callable[[Sound], Any], sound: Sound) -> Any:
    """What `make` returns, made once: evaluations of a run show the same queries again."""
    # by content, since each evaluation decodes the sound again
    key = hashlib.blake2b(sound.samples.tobytes(), digest_size=16).digest(), make
    if key not in _KEPT:
        while len(_KEPT) >= MOST_KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = make(sound)
    return _KEPT[key]


def _mp3(sound: Sound) -> bytes | None:
    return playable(sound, MOST_PLAYED_S, MOST_PLAYED_BYTES)


def _drawn(sound: Sound) -> Image.Image:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(SPECTROGRAM_INCHES, dpi=DOTS_PER_INCH)
    _draw_sound(figure.add_axes((0.22, 0.22, 0.74, 0.74)), sound)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])


IMAGE = View(
    several="images",
    endings=IMAGE_ENDINGS,
    read=lambda source, i: source.image_bytes(i),
    content=lambda source, i: source.content_hash(i).hex(),
    decode=on_white,
    others=frozenset({"not-an-image"}),
    draw=_draw_image,
    picture=Image.fromarray,
    side=96,
    play=lambda pixels: None,
)
AUDIO = View(
    several="sounds",
    endings=AUDIO_ENDINGS,
    read=lambda source, i: source.value("audio", i),
    content=lambda source, i: f"{int(source.keys('audio')[i]):016x}",
    decode=decode_audio,
    others=frozenset({"not-audio", "no-sound"}),
    draw=_draw_sound,
    picture=partial(_kept, _drawn),
    side=180,
    play=partial(_kept, _mp3),
)
