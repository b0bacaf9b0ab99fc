"""Clips: from films to frames, `video_frames`, through the cache.

b: clips of a micro-batch, T: frames of a clip, F: frames of all of them, H, W: the tower's input in
pixels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.annotations import Annotation
from data.bad_samples import Absent, BadSample
from data.decoding.films import FilmReader, even_times
from data.modalities.annotations import Within, annotation_rows
from data.modalities.modality import Loaded, Modality, read_values
from data.modalities.transforms import ImageTransform, stacked
from data.stored.video import clip_spans

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.cache import SampleCache
    from data.index.sources import Source

# Times in training from which one is drawn for each frame. Few, so that a cache can hold them.
CANDIDATES = 2
Span = tuple[float, float]  # seconds of the film
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

    def of(self, source: Source, index: np.ndarray) -> np.ndarray:
        """[n] int64 of the clips of the samples `index` [n]; 1 of one that is missing or bad."""
        spans = clip_spans(source, index)
        return self.numbers(spans[:, 1] - spans[:, 0])

    def candidates(self, span: Span, number: int, training: bool) -> np.ndarray:
        """Seconds of the film, of evaluation `number`, of training CANDIDATES * `number`."""
        return even_times(*span, number * (CANDIDATES if training else 1))


class View(NamedTuple):
    """The frames of a clip uint8 [T, H, W, 3], their times int64 [T], milliseconds since the first,
    and the second of the film when that comes."""

    frames: list[np.ndarray]
    times: np.ndarray
    first_s: float = 0.0

    @classmethod
    def at(cls, seconds: np.ndarray, frames: list[np.ndarray]) -> View:
        """`seconds` [T] of the film."""
        return cls(frames, np.rint(1000 * (seconds - seconds[0])).astype(np.int64), seconds[0])


class VideoModality(Modality):
    """video_frames uint8 [F, 3, H, W], channels-last, of which `normalise`
    (`data/modalities/transforms.py`) makes what the tower reads, clip after clip; video_row int64
    [F], the clip of each; video_clips int64 [b], the frames of each clip; video_time int64 [F],
    milliseconds since the clip's first frame.

    All frames of a clip are augmented alike. `cache` changes no value. A clip that cannot be read
    shows frames of another one of the micro-batch.

    `share`, for evaluation without a cache: a frame of a film that several clips of a micro-batch
    show is decoded and loaded once. video_frames then has U <= F frames, and video_frame_row int64
    [F] says which of them each is.

    Where a pair has moments also the rows `moment`: moment_spans int32 [n, 2] (start and end,
    milliseconds since the clip's first frame) and moment_row int64 [n], the clip of each.
    """

    name = "video"

    def __init__(
        self,
        transform_train: ImageTransform,
        transform_eval: ImageTransform,
        times: FrameTimes,
        cache: SampleCache | None = None,
        share: bool = False,
    ) -> None:
        self.transform_train, self.transform_eval = transform_train, transform_eval
        self.times, self.cache, self.share = times, cache, share

    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        transform = self.transform_train if request.training else self.transform_eval
        spans, numbers = clip_spans(source, request.index), self.times.of(source, request.index)
        index = request.index.tolist()
        number_of = dict(zip(index, numbers.tolist()))
        span_of = {i: (begin, end) for i, (begin, end) in zip(index, spans.tolist())}
        hashes = [source.content_hash("video", i) for i in index]
        sharing = self.share and not request.training
        ready = (
            self._shared(source, dict(zip(index, hashes)), number_of, span_of) if sharing else {}
        )

        def read(i: int, generator: np.random.Generator) -> View:
            number, span, training = number_of[i], span_of[i], request.training
            if span[1] <= span[0]:
                source.value("video", i)  # the source says what is missing
            if i in ready:
                return ready[i]
            times = self.times.candidates(span, number, training)
            first = np.arange(number) * (CANDIDATES if training else 1)
            chosen = first + generator.integers(CANDIDATES, size=number) if training else first
            images = self._stored(transform, source, i, span, times, chosen)
            drawn = int(generator.integers(1 << 62))
            frames = [transform(image, np.random.default_rng(drawn)) for image in images]
            return View.at(times[chosen], frames)

        def blank() -> View:
            return View([np.full((*transform.size, 3), GREY, np.uint8)], np.zeros(1, np.int64))

        views, loaded = read_values(self.name, source, request, seed, read, blank)
        # a stand-in has another number of frames
        shown = [
            [view.frames[k % len(view.frames)] for k in range(number)]
            for view, number in zip(views, numbers.tolist())
        ]
        times = [np.resize(view.times, number) for view, number in zip(views, numbers.tolist())]
        frames = [frame for frames in shown for frame in frames]
        return replace(
            loaded,
            tensors={
                **(_once(frames) if sharing else {"video_frames": stacked(frames)}),
                **_rows(numbers),
                "video_time": torch.from_numpy(np.concatenate(times)),
            },
            further=annotation_rows(source, request, seed, self.name, loaded, _in_clips(views)),
        )

    def meta_batch(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        size = (self.transform_train if request.training else self.transform_eval).size
        numbers = self.times.of(source, request.index)
        count = int(numbers.sum())
        tensors = {
            "video_frames": torch.empty((count, 3, *size), dtype=torch.uint8, device="meta"),
            **_rows(numbers),
            "video_time": torch.empty(count, dtype=torch.int64, device="meta"),
        }
        loaded = Loaded.of(request, tensors)
        further = annotation_rows(source, request, seed, self.name, loaded, None)
        return replace(loaded, further=further)

    def _shared(
        self,
        source: Source,
        film_of: Mapping[int, bytes],
        number_of: Mapping[int, int],
        span_of: Mapping[int, Span],
    ) -> dict[int, View]:
        """The clips of samples, by sample. A frame is one array in all clips that show it: each
        film is decoded once, in its order. Clips of a film that cannot be read throughout are left
        out, to be read one by one, which says what is wrong with them."""
        clips_of: dict[bytes, dict[int, np.ndarray]] = {}
        for i, span in span_of.items():
            if span[1] > span[0]:
                times = self.times.candidates(span, number_of[i], training=False)
                clips_of.setdefault(film_of[i], {})[i] = times
        found: dict[int, View] = {}
        for clips in clips_of.values():
            with contextlib.suppress(Absent, BadSample):
                film = source.value("video", next(iter(clips))).film
                frames = self._decoded(film, np.concatenate([*clips.values()]))
                ends = np.cumsum([*map(len, clips.values())]).tolist()
                for (i, times), end in zip(clips.items(), ends):
                    found[i] = View.at(times, frames[end - len(times) : end])
        return found

    def _decoded(self, film: str | bytes, times: np.ndarray) -> list[np.ndarray]:
        """Of each time the frame that is shown then, one array wherever it is the same frame."""
        every = [np.empty(0)] * len(times)
        for image, rows in self._reader.shown(film, times):
            stored = self.transform_eval.stored.of(Image.fromarray(image.transpose(1, 2, 0)))
            frame = self.transform_eval(stored)
            for row in rows.tolist():
                every[row] = frame
        return every

    def _stored(
        self,
        transform: ImageTransform,
        source: Source,
        i: int,
        span: Span,
        times: np.ndarray,
        chosen: np.ndarray,
    ) -> list[np.ndarray]:
        """Those of the `times` of a clip that are `chosen`, before augmentation. Of a cached one no
        film is read."""
        stored = transform.stored

        def decoded(wanted: np.ndarray) -> list[np.ndarray]:
            frames = self._reader.frames(source.value("video", i).film, wanted)
            return [stored.of(Image.fromarray(frame.transpose(1, 2, 0))) for frame in frames]

        if self.cache is None:
            return decoded(times[chosen])
        key = source.content_hash("video", i)
        key += f"{stored.name}:{span[0]!r}:{span[1]!r}:{len(times)}".encode()
        every = self.cache.fetch(key, lambda: np.stack(decoded(times)))
        return [np.ascontiguousarray(every[k]) for k in chosen.tolist()]

    @cached_property
    def _reader(self) -> FilmReader:
        return FilmReader()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}


def _in_clips(views: Sequence[View]) -> Within:
    """Spans of films, of whose clips `views` says what is shown, in milliseconds since the first
    frame; a clip shows all of them (`data/moments.py`)."""

    def within(sample: int, moments: Sequence[Annotation]) -> tuple[np.ndarray, np.ndarray]:
        spans = np.array([each.extent for each in moments])
        return np.rint(1000 * (spans - views[sample].first_s)), np.ones(len(spans))

    return within


def _once(frames: list[np.ndarray]) -> dict[str, Tensor]:
    """`video_frames` with each array once, and `video_frame_row`."""
    distinct = {id(frame): frame for frame in frames}
    number = {key: row for row, key in enumerate(distinct)}
    rows = np.array([number[id(frame)] for frame in frames])
    return {
        "video_frames": stacked([*distinct.values()]),
        "video_frame_row": torch.from_numpy(rows),
    }


def _rows(numbers: np.ndarray) -> dict[str, Tensor]:
    row = np.repeat(np.arange(len(numbers)), numbers)
    return {"video_row": torch.from_numpy(row), "video_clips": torch.from_numpy(numbers.copy())}
