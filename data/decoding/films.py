"""Films as they come out of files: what the header says, and the frames that are shown at times.

FFmpeg (`av`) reads the container and decodes. Times are presentation times, in seconds since the
film begins, as ffmpeg and players count: with the first of its streams, which may be the sound. The
first picture may come later. Frames are never counted, so a variable rate is honoured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from data.bad_samples import (
    FILM_SECONDS_LIMIT,
    HIGHEST_FPS,
    LOWEST_FPS,
    PIXEL_LIMIT,
    Allowance,
    BadSample,
    check_size,
    refusing,
)
from data.clips import Clip
from data.decoding.containers import film_status, open_container
from data.decoding.display import as_shown, display_matrix, quarter_turns, shown_width

SWITCH = "WYE_FILM_DECODER"  # "torchcodec": frames of mp4 and mkv by it, the same ones
TORCHCODEC_FRAMES = 16  # at a time
TICK_S = 0.001  # Matroska rounds times to it
LAST_TICK = 1 << 60  # which FFmpeg can still seek to
TOLERANCE_S = 0.1  # of a film's length, which a container rounds to its own ticks
FIRST_PACKETS = 64  # by which a rate in a header is checked
RATES_AGREE = (0.5, 2.0)  # their rate / the header's; a variable one may begin slowly
USUAL_FPS = 25.0
STEP_S = 1.0  # how much earlier to seek where a key frame came too late
FRAMES_LIMIT = 10_000  # decoded to reach one: 5 minutes at 30 frames/s between two key frames
# Formats that have a table of key frames, and times that are the same wherever one begins to read;
# AVI, MPEG and others are read from their beginning.
SEEKABLE = ("mov", "matroska")


@dataclass(frozen=True)
class Film:
    """`seconds` from the film's beginning to the end of its last frame; `rate`, frames/s on average;
    `width` and `height` in pixels, as shown; `num_frames`, 0 where the header does not say;
    `first_s`, when the first frame comes: later than 0 where sound comes before it."""

    seconds: float
    rate: float
    width: int
    height: int
    codec: str
    num_frames: int
    first_s: float = 0.0


class _Shown(NamedTuple):
    """When a frame begins to be shown, in ticks of the stream or as torchcodec has it, in seconds;
    the frame, or what was wrong."""

    pts: float
    frame: Any


def even_times(start_s: float, end_s: float, number: int) -> np.ndarray:
    """float64 [number]: the middles of as many equal parts of a segment. Raises BadSample:
    empty-segment."""
    if not (math.isfinite(end_s) and 0 <= start_s < end_s):
        raise BadSample("empty-segment", f"from {start_s:g} to {end_s:g} seconds")
    return start_s + (np.arange(number) + 0.5) * ((end_s - start_s) / number)


def describe_film(file: str | bytes) -> Film:
    """What the header of a film, by its path or as bytes, and its last packets say. Raises
    BadSample: missing-file, empty-file, not-a-film, no-frames, truncated-film, impossible-film,
    huge-film, unreadable; ImportError where PyAV is missing."""
    with FilmReader() as reader, reader.opened(file) as film:
        return film.described()


class FilmReader:
    """Frames of films. The film that was asked for last stays open, so that its clips, one after
    another, cost no new opening."""

    def __init__(self) -> None:
        given = os.environ.get(SWITCH) or "av"
        if given not in ("av", "torchcodec"):
            raise ValueError(f"{SWITCH}={given}; it may be av or torchcodec")
        self._film: _OpenFilm | None = None
        self._key: Any = None

    def frames(self, file: str | bytes, times_s: Sequence[float] | np.ndarray) -> np.ndarray:
        """uint8 [T, 3, h, w]: of each time the frame that is shown then, upright and with
        square pixels; before the first one, that one. Times that ascend within a group of pictures
        are decoded in one pass. Raises BadSample as `describe_film`, and outside-film and
        too-slow."""
        times = _checked_times(times_s)
        with self.opened(file) as film:
            return film.frames(times)

    def shown(
        self, file: str | bytes, times_s: Sequence[float] | np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each frame that is shown at one of the times [T], once, in the order of the film: uint8
        [3, h, w] as in `frames`, and int64 [n], which of the times it is shown at. Raises as
        `frames`, which may be behind some frames."""
        times = _checked_times(times_s)
        with self.opened(file) as film:
            yield from film.shown(times)

    def close(self) -> None:
        if self._film is not None:
            self._film.close()
        self._film = self._key = None

    def __reduce__(self) -> tuple[type[FilmReader], tuple[()]]:
        return FilmReader, ()  # what is open stays in this process

    def __enter__(self) -> FilmReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def opened(self, file: str | bytes) -> Iterator[_OpenFilm]:
        try:
            with refusing(but=(ImportError,)):
                mtime_ns = 0 if isinstance(file, bytes) else film_status(file).st_mtime_ns
                key = (file, mtime_ns, os.getpid())  # a forked process has the place in common
                if self._film is None or key != self._key:
                    self.close()
                    self._film, self._key = _OpenFilm(file), key
                yield self._film
        except BaseException:
            self.close()  # where the decoder stands is not known
            raise


class _OpenFilm:
    """A film and where its decoder stands: `_shown` is the frame taken last, `_next` follows it."""

    _container: Any = None
    _decoded: Any = None
    _shown: Any = None
    _next: Any = None
    _torchcodec: Any = None
    _first: int  # pts of the first frame
    _zero: float  # where the film begins, in ticks of the stream
    _rate: float  # frames/s, 0 where the header says what cannot be
    _promised_s: float  # length, by the header
    _is_seekable = False
    _frame_ticks = 0  # how long a frame is shown where nothing says it

    def __init__(self, file: str | bytes) -> None:
        self._file = file
        self._allowance = Allowance()
        try:
            self._read_from(None)
            if self._shown is None:
                is_promised = self._stream.frames or self._promised_s
                reason = "truncated-film" if is_promised else "no-frames"
                raise BadSample(reason, "no frame comes out of it")
            self._first = self._shown.pts
            self._zero = self._beginning()
            self._refuse_broken(self._shown)
            self._matrix = display_matrix(self._shown.frame)
            if not self._rate and self._next is not None:
                self._set_frame_length(max(1, round(self._next.pts - self._first)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """In order: what decodes, the frames, the container."""
        self._decoded = self._shown = self._next = self._torchcodec = None
        if self._container is not None:
            self._container.close()

    def frames(self, times_s: np.ndarray) -> np.ndarray:
        made = np.empty(0, np.uint8)
        for image, rows in self.shown(times_s):
            if not made.size:
                made = np.empty((len(times_s), *image.shape), np.uint8)
            made[rows] = image  # refused where the size changes
        return made

    def shown(self, times_s: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.argsort(times_s, kind="stable")
        every: Iterator[_Shown] = map(self._at, times_s[order].tolist())
        convert: Callable[[Any], np.ndarray] = self._converted
        if self._is_seekable and os.environ.get(SWITCH) == "torchcodec":
            every, convert = self._by_torchcodec(times_s[order]), self._as_shown
        for _, alike in groupby(zip(order.tolist(), every), lambda each: each[1].pts):
            rows, (shown, *_) = zip(*alike)
            yield convert(shown.frame), np.array(rows)

    def _by_torchcodec(self, times_s: np.ndarray) -> Iterator[_Shown]:
        """As `_at` of each: torchcodec reads all packets first, and then finds the same frames."""
        try:
            from torchcodec.decoders import VideoDecoder
        except (ImportError, OSError, RuntimeError) as error:
            found = "torchcodec or the FFmpeg that it needs is not here"
            raise ImportError(f"{SWITCH}=torchcodec, and {found}: {error}") from error
        if self._torchcodec is None:
            self._torchcodec = VideoDecoder(
                self._file, stream_index=self._stream.index, num_ffmpeg_threads=1
            )
        end_s = self._torchcodec.metadata.end_stream_seconds_from_content
        self._refuse_behind(float(times_s.max()), end_s - self._zero * self._tick)
        # between two ticks, so that rounding changes nothing, and before the last frame's end
        seconds = [(self._wanted(time_s) + 0.25) * self._tick for time_s in times_s.tolist()]
        seconds = [min(time_s, end_s - self._tick / 2) for time_s in seconds]
        # not one by one by get_frame_played_at, which takes the next frame within a long one
        for start in range(0, len(seconds), TORCHCODEC_FRAMES):
            part = seconds[start : start + TORCHCODEC_FRAMES]
            found = self._torchcodec.get_frames_played_at(part)
            # torchcodec turns frames, and leaves out mirrors and pixels that are not square
            turned = quarter_turns(self._shown.frame)
            for pts, frame in zip(found.pts_seconds.tolist(), found.data.numpy()):
                yield _Shown(pts, np.rot90(frame.transpose(1, 2, 0), -turned))

    def described(self) -> Film:
        _, height, width = self._converted(self._shown.frame).shape
        rate = self._checked_rate()
        seconds, end_s, is_cut = self._lengths()
        if seconds > FILM_SECONDS_LIMIT:
            raise BadSample("huge-film", f"{seconds / 3600:,.1f} hours; cut it into films")
        if self._promised_s > FILM_SECONDS_LIMIT:
            self._promised_s = 0.0  # a placeholder: the packets say how long it is
        if is_cut or end_s < self._first_s + self._promised_s - self._tolerance_s:
            found = f"{seconds:.2f} seconds of {self._promised_s:.2f}"
            raise BadSample("truncated-film", found)
        if self._is_avi:  # its packets have no presentation times
            seconds = self._promised_s
        codec, number = self._stream.codec_context.name, self._stream.frames
        first_s = (self._first - self._zero) * self._tick
        return Film(seconds, rate, width, height, codec, number, first_s)

    def _read_header(self) -> None:
        """Choose the stream, and check what is promised before anything is decoded."""
        container, name = self._container, self._container.format.name
        cover = self._av.stream.Disposition.attached_pic
        films = [stream for stream in container.streams.video if not stream.disposition & cover]
        if not films:
            found = ", ".join(stream.type for stream in container.streams) or "nothing"
            reason = "not-a-film" if container.streams else "no-frames"
            raise BadSample(reason, f"{name} with {found}, and no film")
        stream = self._stream = films[0]
        if stream.codec_context is None:
            reason = "unreadable" if stream.frames else "truncated-film"  # within its header
            raise BadSample(reason, "its codec is cut off, or unknown to FFmpeg")
        self._pixel_aspect = stream.sample_aspect_ratio
        if stream.width or stream.height:  # MPEG says it with the first frame
            _check_film_size(shown_width(stream.width, self._pixel_aspect), stream.height)
        self._is_seekable, self._is_avi = name.startswith(SEEKABLE), name == "avi"
        self._tick = float(stream.time_base)
        self._first_s = (stream.start_time or 0) * self._tick
        if stream.duration:
            self._promised_s = stream.duration * self._tick
        else:  # Matroska counts from 0 to the end of the longest stream
            self._promised_s = (container.duration or 0) / 1e6 - self._first_s
        rate = float(stream.average_rate or 0)
        # of what cannot be, such as the ticks of a browser's WebM, the packets say it
        self._rate = rate if LOWEST_FPS <= rate <= HIGHEST_FPS else 0.0
        if self._rate or not self._frame_ticks:
            usual = self._rate or USUAL_FPS  # until the first two frames tell
            self._set_frame_length(max(1, round(1 / usual / self._tick)))
        # A worker keeps to its own core. No frame may be larger than an image.
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"max_pixels": str(PIXEL_LIMIT)}

    def _set_frame_length(self, ticks: int) -> None:
        self._frame_ticks = ticks
        self._tolerance_s = max(TOLERANCE_S, 2 * ticks * self._tick)

    def _beginning(self) -> float:
        """With the first of all streams. Sound before 0 is what its decoder needs to start (Opus,
        AAC), and is not heard."""
        whole = self._container.start_time  # microseconds
        if whole is None or self._is_avi:
            return self._first
        ticks = max(whole, 0) / 1e6 / self._tick
        is_own = self._first - ticks <= max(0.5, 1e-6 / self._tick)  # but for rounding
        return self._first if is_own else ticks

    def _checked_rate(self) -> float:
        """Frames/s, as the header has it where its table has every frame, or where its packets
        agree; else by all packets. Raises BadSample: impossible-film."""
        if self._stream.frames and self._rate:
            return self._rate
        times: list[int] = []
        allowance, rate = Allowance(), self._rate
        with open_container(self._file)[1] as container:
            for packet in container.demux(container.streams[self._stream.index]):
                allowance.check()
                if (begin := packet.dts if packet.pts is None else packet.pts) is not None:
                    times.append(begin)
                if len(times) == FIRST_PACKETS and rate:
                    least, most = RATES_AGREE
                    if least * rate < _rate_of(times, self._tick) < most * rate:
                        return rate
        if len(times) > 1:
            rate = _rate_of(times, self._tick)
        rate = rate or 1 / max(self._promised_s, 1)
        if not LOWEST_FPS <= rate <= HIGHEST_FPS:
            raise BadSample("impossible-film", f"{rate:g} frames/s")
        return rate

    def _lengths(self) -> tuple[float, float, bool]:
        """By the packets from the last key frame on, in seconds: from the beginning to the end of
        the last frame, when the last of all that the header counts ends, and whether it is cut off."""
        own = whole = self._first
        is_cut, allowance = False, Allowance()
        with contextlib.suppress(self._av.FFmpegError), contextlib.ExitStack() as stack:
            # where FFmpeg refuses something, too little is found
            if self._is_seekable:
                self._container.seek(int(own + self._promised_s / self._tick), stream=self._stream)
            packets = stack.enter_context(contextlib.closing(self._container.demux()))
            for packet in packets:
                allowance.check()
                begin = packet.dts if packet.pts is None else packet.pts
                if begin is None:
                    continue
                end = (begin + (packet.duration or 0)) * float(packet.time_base) / self._tick
                if packet.stream is self._stream:
                    is_cut = packet.is_corrupt  # the last one; broadcasts have gaps before
                    own = max(own, end if packet.duration else end + self._frame_ticks)
                elif not self._stream.duration:
                    whole = max(whole, end)
        return (own - self._zero) * self._tick, max(own, whole) * self._tick, is_cut

    def _at(self, time_s: float) -> _Shown:
        """The frame that is shown at a time."""
        self._allowance = Allowance()
        wanted = self._wanted(time_s)
        if self._is_elsewhere(wanted):
            self._seek(wanted)
        for _ in range(FRAMES_LIMIT):
            following = self._next
            if following is None:
                shown = self._shown.pts + (self._shown.frame.duration or 0)
                self._refuse_behind(time_s, (shown - self._zero) * self._tick)
            if following is None or following.pts > wanted:
                return self._shown
            self._refuse_broken(following)
            self._shown, self._next = following, next(self._decoded, None)
        found = f"over {FRAMES_LIMIT:,} frames from a key frame to {time_s:g} s; more key frames"
        raise BadSample("too-slow", f"{found}, or mp4 or mkv in place of another format, help")

    def _wanted(self, time_s: float) -> int:
        """The tick of a time, of the first frame at the earliest; one that was rounded is not before
        what it was rounded from."""
        after = min(0.5, TICK_S / 2 / self._tick)
        ticks = math.floor(self._zero + time_s / self._tick + after)
        return min(max(self._first, ticks), self._first + LAST_TICK)

    def _is_elsewhere(self, wanted: int) -> bool:
        """Whether the frame is an earlier one, or lies behind a later key frame."""
        shown, following = self._shown.pts, self._next
        if wanted < shown or not self._is_seekable or following is None or following.pts > wanted:
            return wanted < shown
        # FFmpeg's table also has the key frame behind the one that was sought, at least
        here, there = map(self._stream.index_entries.search_timestamp, (shown, wanted))
        return there > here

    def _seek(self, wanted: int) -> None:
        """Go to the last key frame that is shown at `wanted` or before."""
        back = 0
        while (start := wanted - back) > self._first and self._is_seekable:
            self._read_from(start)
            if self._shown is not None and self._shown.pts <= wanted:
                return self._refuse_broken(self._shown)
            back = 4 * back or round(STEP_S / self._tick)
        self._read_from(None)
        if self._shown is None or self._shown.pts != self._first:
            raise BadSample("unreadable", "FFmpeg does not find its beginning a second time")

    def _read_from(self, start: int | None) -> None:
        """Decode from the key frame before a time on, or from the beginning."""
        if start is None and not self._is_seekable:
            self.close()
            self._av, self._container = open_container(self._file)
            self._reformatter = self._av.video.reformatter.VideoReformatter()
            self._read_header()
        if self._is_seekable:  # also in a new one: Matroska then reads its table of key frames
            beginning = self._stream.start_time or 0
            with contextlib.suppress(self._av.FFmpegError):  # nothing is there, as one will see
                self._container.seek(beginning if start is None else start, stream=self._stream)
        self._shown = self._next = None
        self._decoded = self._decode()
        self._shown = next(self._decoded, None)
        self._next = next(self._decoded, None)

    def _decode(self) -> Iterator[_Shown]:
        """Frames in the order in which they are shown, and behind them what FFmpeg refuses, if it
        does."""
        # PyAV keeps the memory of what is left before its end, unless it is closed
        with contextlib.closing(self._container.demux(self._stream)) as packets:
            yield from self._frames_of(packets)

    def _frames_of(self, packets: Iterator[Any]) -> Iterator[_Shown]:
        last, end, until, error = 0, 0, math.inf, None
        while error is None:
            self._allowance.check()
            packet = None
            try:
                packet = next(packets)
                frames = self._stream.decode(packet)
            except StopIteration:
                return
            except self._av.FFmpegError as refused:
                error, pts = refused, getattr(packet, "pts", None)
                until = end if pts is None else pts
                frames = self._stream.decode(None)  # what is shown before
            for frame in frames:
                # AVI has no presentation times: those that FFmpeg guesses go back and forth
                pts = frame.dts if self._is_avi else frame.pts
                last = end if pts is None else pts
                if last < until:
                    end = last + (frame.duration or self._frame_ticks)
                    yield _Shown(last, frame)
        # others may have to be shown before the frame that is refused, and follow it in the file
        yield _Shown(min(end, until), error)

    def _refuse_broken(self, shown: _Shown) -> None:
        if isinstance(shown.frame, Exception):
            seconds = (shown.pts - self._zero) * self._tick
            raise BadSample("unreadable", f"the frame at {seconds:.3f} s: {shown.frame}")

    def _refuse_behind(self, time_s: float, end_s: float) -> None:
        if time_s > end_s + self._tolerance_s:
            raise BadSample("outside-film", f"no frame at {time_s:g} s; it ends at {end_s:.2f}")

    def _converted(self, frame: Any) -> np.ndarray:
        """uint8 [3, h, w], as shown."""
        _check_film_size(shown_width(frame.width, self._pixel_aspect), frame.height)
        return self._as_shown(
            self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        )

    def _as_shown(self, stored: np.ndarray) -> np.ndarray:
        return as_shown(stored, self._pixel_aspect, self._matrix).transpose(2, 0, 1)


def _checked_times(given: Sequence[float] | np.ndarray) -> np.ndarray:
    times = np.asarray(given, np.float64)
    if times.ndim != 1 or not len(times) or not np.isfinite(times).all():
        raise ValueError(f"times are {times}; needed: one or more finite numbers")
    return times


def _rate_of(times: Sequence[int], tick: float) -> float:
    """Frames/s, of frames that begin at these ticks; 0: all at once."""
    ticks = max(times) - min(times)
    return (len(times) - 1) / (ticks * tick) if ticks else 0.0


def _check_film_size(width: int, height: int) -> None:
    try:
        check_size(width, height)
    except BadSample as error:
        raise BadSample("impossible-film", error.detail) from None


def strip_of(clip: Clip, number: int) -> np.ndarray:
    """uint8 [h, number * w, 3]: frames of a clip from the middles of equal parts, side by side.
    Raises BadSample."""
    with FilmReader() as reader:
        frames = reader.frames(clip.film, even_times(clip.start_s, clip.end_s, number))
    return np.concatenate(list(frames.transpose(0, 2, 3, 1)), 1)


def missing_film_decoders() -> list[str]:
    return [] if importlib.util.find_spec("av") else ["av"]
