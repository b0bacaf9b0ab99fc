"""How the values of a modality are read, drawn and heard, for evaluation, reports and trackers: a
class each, which `launch/modalities.py` registers with the modality."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from data.clips import Clip
from data.decoding.films import describe_film, strip_of
from data.decoding.images import decode_bytes, upright_8bit
from data.decoding.sounds import Sound, decode_audio
from data.modalities.audio.picture import playable, spectrogram_of
from data.stored.audio import AUDIO
from data.stored.image import IMAGE
from data.stored.video import VIDEO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from typing_extensions import Self  # in typing from Python 3.11 on

    from data.index.sources import KnownSource

STRIP = 4  # frames of a clip that are shown
SPECTROGRAM_INCHES, DOTS_PER_INCH = (1.8, 1.2), 100  # of a small picture of a sound
MOST_KEPT = 400  # pictures, and files to play, of 90 kB at most
MOST_PLAYED_S, MOST_PLAYED_BYTES = 10.0, 24_000  # else a sound is only drawn
_KEPT: dict[tuple[bytes, Callable], Any] = {}


@dataclass(frozen=True)
class View(ABC):
    """A value as a file has it. Its methods raise BadSample.

    `endings`: of the files. `others`: the reasons of `decode` for a file of another kind. `side`:
    pixels of a small picture, at most. `in_windows`: whether values are spans of time among which a
    text is looked for, as it is among those of films.
    """

    data: bytes
    endings: ClassVar[tuple[str, ...]]
    others: ClassVar[frozenset[str]]
    side: ClassVar[int]
    in_windows: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, source: KnownSource, i: int) -> Self:
        """The value of a sample. Raises Absent, too."""

    @staticmethod
    @abstractmethod
    def content(source: KnownSource, i: int) -> str:
        """Equal for samples with the same value."""

    @abstractmethod
    def decode(self) -> Any:
        """The value itself."""

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw it into axes."""

    @abstractmethod
    def picture(self) -> Image.Image:
        """A picture of it."""

    def small_picture(self) -> Image.Image:
        picture = self.picture().copy()
        picture.thumbnail((self.side, self.side))
        return picture

    def played(self) -> bytes | None:
        """A small MP3 file, where the value can be heard and is short."""
        return None

    @staticmethod
    def part_seen(options: Mapping[str, Any]) -> str:
        """How much of a value a model sees whose run has these options; "": all of it."""
        return ""


class ImageView(View):
    endings, others, side = IMAGE.endings, frozenset({"not-an-image"}), 96

    @classmethod
    def of(cls, source: KnownSource, i: int) -> Self:
        return cls(source.value("image", i))

    @staticmethod
    def content(source: KnownSource, i: int) -> str:
        return source.content_hash("image", i).hex()

    def decode(self) -> np.ndarray:
        """[h, w, 3] uint8"""
        image = np.asarray(upright_8bit(decode_bytes(self.data, at_least=160)))
        if image.shape[-1] == 3:
            return image
        # what is transparent is shown on white, as the towers see it
        alpha = image[..., 3:].astype(np.float32) / 255
        return (alpha * image[..., :3] + (1 - alpha) * 255).round().astype(np.uint8)

    def draw(self, axes: Axes) -> None:
        axes.imshow(self.decode())
        axes.set(xticks=[], yticks=[])

    def picture(self) -> Image.Image:
        return Image.fromarray(self.decode())


class SoundView(View):
    endings, others, side = AUDIO.endings, frozenset({"not-audio", "no-sound"}), 180

    @classmethod
    def of(cls, source: KnownSource, i: int) -> Self:
        return cls(source.value("audio", i))

    @staticmethod
    def content(source: KnownSource, i: int) -> str:
        return f"{int(source.keys('audio')[i]):016x}"

    def decode(self) -> Sound:
        return decode_audio(self.data)

    def draw(self, axes: Axes) -> None:
        """Its mel spectrogram, with seconds and Hz at the axes."""
        found = spectrogram_of(self.decode())
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

    def picture(self) -> Image.Image:
        return self._kept(SoundView._drawn)

    def played(self) -> bytes | None:
        return self._kept(SoundView._mp3)

    def _kept(self, make: Callable[[SoundView], Any]) -> Any:
        """What `make` returns, made once: evaluations of a run show the same queries again."""
        key = hashlib.blake2b(self.data, digest_size=16).digest(), make
        if key not in _KEPT:
            while len(_KEPT) >= MOST_KEPT:
                _KEPT.pop(next(iter(_KEPT)))
            _KEPT[key] = make(self)
        return _KEPT[key]

    def _drawn(self) -> Image.Image:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(SPECTROGRAM_INCHES, dpi=DOTS_PER_INCH)
        self.draw(figure.add_axes((0.22, 0.22, 0.74, 0.74)))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])

    def _mp3(self) -> bytes | None:
        return playable(self.decode(), MOST_PLAYED_S, MOST_PLAYED_BYTES)


class FilmView(View):
    """Of a clip, or of a whole film, as bytes or as the path of its file."""

    data: bytes | Clip  # type: ignore[assignment]
    in_windows = True
    endings, others, side = VIDEO.endings, frozenset({"not-a-film"}), 240

    @classmethod
    def of(cls, source: KnownSource, i: int) -> Self:
        return cls(source.value("video", i))

    @staticmethod
    def content(source: KnownSource, i: int) -> str:
        return f"{int(source.keys('video')[i]):016x}"

    @staticmethod
    def part_seen(options: Mapping[str, Any]) -> str:
        rate = options.get("video_rate")
        most = f" at {rate:g}/s at most" if rate else ""
        return f"{options['video_frames']} frames a clip{most}"

    @property
    def clip(self) -> Clip:
        if isinstance(self.data, Clip):
            return self.data
        return Clip(self.data, 0.0, describe_film(self.data).seconds)

    def decode(self) -> np.ndarray:
        """[h, STRIP * w, 3] uint8: frames side by side."""
        return strip_of(self.clip, STRIP)

    def draw(self, axes: Axes) -> None:
        axes.imshow(self.decode())
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(f"{self.clip.start_s:.1f} – {self.clip.end_s:.1f} s", fontsize=5.5)

    def picture(self) -> Image.Image:
        return Image.fromarray(self.decode())
