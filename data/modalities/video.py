"""Clips: from films to frames, `video_frames`, through the cache.

b: clips of a micro-batch, T: frames of a clip, F: frames of all of them, H, W: the tower's input in
pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.decoding.films import FilmReader, even_times
from data.keys import content_hash, keys_of
from data.modalities.modality import Loaded, Modality, read_values
from data.modalities.transforms import ImageTransform, stacked

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.cache import SampleCache
    from data.clips import Clip
    from data.index.sources import Source

# Times in training from which one is drawn for each frame. Few, so that a cache can hold them.
CANDIDATES = 2
GREY = 128  # where a micro-batch has no readable clip at all


@dataclass(frozen=True)
class FrameTimes:
    """Which frames a tower sees of a clip: `most`, each from the middle of an equal part of it, or
    with `rate`, frames/s, as many fewer as a short clip needs. Training draws each from one of
    `CANDIDATES` places of its part."""

    most: int
    rate: float | None = None

    def numbers(self, seconds: np.ndarray) -> np.ndarray:
        """[n] seconds -> [n] int64, 1..most."""
        if self.rate is None:
            return np.full(len(seconds), self.most)
        return np.clip(np.rint(seconds * self.rate), 1, self.most).astype(np.int64)

    def candidates(self, clip: Clip, number: int, training: bool) -> np.ndarray:
        """Seconds of the film, of evaluation `number`, of training CANDIDATES * `number`."""
        return even_times(clip.start_s, clip.end_s, number * (CANDIDATES if training else 1))


class View(NamedTuple):
    """The frames of a clip uint8 [T, H, W, 3] and their times int64 [T], milliseconds since the
    first."""

    frames: list[np.ndarray]
    times: np.ndarray


class VideoModality(Modality):
    """video_frames uint8 [F, 3, H, W], channels-last, of which `normalise`
    (`data/modalities/transforms.py`) makes what the tower reads, clip after clip; video_row int64
    [F], the clip of each; video_clips int64 [b], the frames of each clip; video_time int64 [F],
    milliseconds since the clip's first frame.

    All frames of a clip are augmented alike. `cache` changes no value. A clip that cannot be read
    shows frames of another one of the micro-batch.
    """

    name = "video"
    count_names = ("unreadable_films",)

    def __init__(
        self,
        transform_train: ImageTransform,
        transform_eval: ImageTransform,
        times: FrameTimes,
        cache: SampleCache | None = None,
    ) -> None:
        self.transform_train, self.transform_eval = transform_train, transform_eval
        self.times, self.cache = times, cache

    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        transform = self.transform_train if request.training else self.transform_eval
        numbers = self._numbers(source, request)
        number_of = dict(zip(request.index.tolist(), numbers.tolist()))

        def read(i: int, generator: np.random.Generator) -> View:
            clip: Clip = source.value("video", i)
            number, training = number_of[i], request.training
            times = self.times.candidates(clip, number, training)
            first = np.arange(number) * (CANDIDATES if training else 1)
            chosen = first + generator.integers(CANDIDATES, size=number) if training else first
            key = source.content_hash("video", i)
            images = self._stored(transform, clip, key, times, chosen)
            drawn = int(generator.integers(1 << 62))
            frames = [transform(image, np.random.default_rng(drawn)) for image in images]
            since_first = times[chosen] - times[chosen[0]]
            return View(frames, np.rint(1000 * since_first).astype(np.int64))

        def blank() -> View:
            return View([np.full((*transform.size, 3), GREY, np.uint8)], np.zeros(1, np.int64))

        views, loaded = read_values(self.name, source, request, seed, read, blank)
        # a stand-in has another number of frames
        shown = [
            [view.frames[k % len(view.frames)] for k in range(number)]
            for view, number in zip(views, numbers.tolist())
        ]
        times = [np.resize(view.times, number) for view, number in zip(views, numbers.tolist())]
        return replace(
            loaded,
            tensors={
                "video_frames": stacked([frame for frames in shown for frame in frames]),
                **_rows(numbers),
                "video_time": torch.from_numpy(np.concatenate(times)),
            },
            key=keys_of(self._clip_keys(source, request)),
            counts={"unreadable_films": len(loaded.bad)},
        )

    def meta_batch(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        size = (self.transform_train if request.training else self.transform_eval).size
        numbers = self._numbers(source, request)
        count = int(numbers.sum())
        tensors = {
            "video_frames": torch.empty((count, 3, *size), dtype=torch.uint8, device="meta"),
            **_rows(numbers),
            "video_time": torch.empty(count, dtype=torch.int64, device="meta"),
        }
        return Loaded.of(request, tensors)

    def _numbers(self, source: Source, request: MicroBatchRequest) -> np.ndarray:
        start, end = (source.numbers(f"video_{key}", request.index) for key in ("start_s", "end_s"))
        return self.times.numbers(end - start)

    def _clip_keys(self, source: Source, request: MicroBatchRequest) -> list[bytes]:
        spans = [source.numbers(f"video_{key}", request.index) for key in ("start_s", "end_s")]
        return [
            content_hash(source.content_hash("video", i) + span.tobytes())
            for i, span in zip(request.index.tolist(), np.stack(spans, 1))
        ]

    def _stored(
        self,
        transform: ImageTransform,
        clip: Clip,
        content: bytes,
        times: np.ndarray,
        chosen: np.ndarray,
    ) -> list[np.ndarray]:
        """Those of the `times` of a clip that are `chosen`, before augmentation."""
        stored = transform.stored

        def decoded(wanted: np.ndarray) -> list[np.ndarray]:
            frames = self._reader.frames(clip.film, wanted)
            return [stored.of(Image.fromarray(frame.transpose(1, 2, 0))) for frame in frames]

        if self.cache is None:
            return decoded(times[chosen])
        key = content + f"{stored.name}:{clip.start_s!r}:{clip.end_s!r}:{len(times)}".encode()
        every = self.cache.fetch(key, lambda: np.stack(decoded(times)))
        return [np.ascontiguousarray(every[k]) for k in chosen.tolist()]

    @cached_property
    def _reader(self) -> FilmReader:
        return FilmReader()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}


def _rows(numbers: np.ndarray) -> dict[str, Tensor]:
    row = np.repeat(np.arange(len(numbers)), numbers)
    return {"video_row": torch.from_numpy(row), "video_clips": torch.from_numpy(numbers.copy())}
