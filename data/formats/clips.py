"""`--data demo:clips`: short films in which emoji do one thing after another, told in order.

A film is MPEG-4 Part 2 in an MP4: every FFmpeg has that encoder, whoever built it.
"""

import io
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data.decoding.sounds import INSTALL
from data.formats.drawn import (
    COMPOSITION,
    KINDS,
    RESAMPLING,
    USUAL,
    DrawnFormat,
    Emoji,
    is_plural,
    kind_of,
    never_together,
    random_background,
    with_article,
)
from data.formats.rows import Media
from data.formats.specs import installed

EVENTS = ":events"
RATE, FRAMES = 8, 64  # frames a second, and in all
SIDES = (64, 80, 96, 112)  # pixels of a frame, which is a square
# number of events -> frames that each takes, from and to; before, between and after them is nothing
LENGTHS = {2: (8, 14), 3: (8, 10)}
SIZES = (0.35, 0.5)  # an emoji's longer side, as a part of the frame's
SMALLEST, FAINTEST = 0.3, 0.2  # parts of its size and of its opacity
# how a caption begins, and what stands between its events
PHRASINGS = (("", ", then "), ("first ", ", after that "))
# A frame depends on no other one, also not by a quality that changes (of 1, the best, to 31): what
# is left of those before it would tell their order. The rest: the same bytes on every processor.
ENCODING = {"g": "0", "qmin": "3", "qmax": "3", "flags": "+bitexact", "dct": "int"}
# brightness 0..255 -> 16..235, and the two colours 0..255 -> 16..240, as decoders expect them
NARROWED = [round(16 + n * width / 255) for width in (219, 224, 224) for n in range(256)]

Pose = tuple[Image.Image, float, float]  # image, and the place that `Event` says


def _scaled(image: Image.Image, scale: float) -> Image.Image:
    return image.resize([max(1, round(scale * side)) for side in image.size], RESAMPLING)


def _grown(image: Image.Image, part: float) -> Image.Image:
    return _scaled(image, SMALLEST + (1 - SMALLEST) * part)


def _faded(image: Image.Image, part: float) -> Image.Image:
    scale = FAINTEST + (1 - FAINTEST) * part
    faded = image.copy()
    faded.putalpha(image.getchannel("A").point([round(scale * n) for n in range(256)]))
    return faded


# What an emoji does -> how it looks at a moment: `t` goes from 0 to 1, and `back` goes the same way
# from 1 to 0, so what moves left shows the frames of what moves right.
ACTIONS: dict[str, Callable[[Image.Image, float, float, float, float], Pose]] = {
    "move left": lambda image, x, y, t, back: (image, back, y),
    "move right": lambda image, x, y, t, back: (image, t, y),
    "move up": lambda image, x, y, t, back: (image, x, back),
    "move down": lambda image, x, y, t, back: (image, x, t),
    "grow": lambda image, x, y, t, back: (_grown(image, t), x, y),
    "shrink": lambda image, x, y, t, back: (_grown(image, back), x, y),
    "turn": lambda image, x, y, t, back: (image.rotate(-360 * t, RESAMPLING, True), x, y),
    "appear": lambda image, x, y, t, back: (_faded(image, t), x, y),
}


class Event(NamedTuple):
    """`start`, `end`: frames. `place`: of the emoji's middle, where it does not move; from 0 to 1
    across and down, of the room that there is."""

    emoji: Emoji
    action: str
    start: int
    end: int
    sprite: Image.Image  # RGBA, as large as it is shown
    place: tuple[float, float]

    @property
    def text(self) -> str:
        verb, *direction = self.action.split()
        if not is_plural(self.emoji.name):
            verb += "s"
        return " ".join((with_article(self.emoji.name), verb, *direction))

    def paint(self, frame: Image.Image, number: int) -> None:
        """What of it is seen in this frame of its film."""
        course = np.linspace(0, 1, self.end - self.start)
        n = number - self.start
        image, *place = ACTIONS[self.action](
            self.sprite, *self.place, float(course[n]), float(course[-1 - n])
        )
        size = self.sprite.size
        room = (np.hypot(*size),) * 2 if self.action == "turn" else size
        corner = [
            round(wide / 2 + part * (frame.width - wide) - side / 2)
            for wide, part, side in zip(room, place, image.size)
        ]
        frame.paste(image, corner, image)


class Clip(NamedTuple):
    side: int
    background: tuple[int, ...]  # red, green, blue
    events: list[Event]
    phrasing: tuple[str, str]

    def caption(self, step: int = 1) -> str:
        """`step` -1: the events from the last to the first."""
        begin, between = self.phrasing
        return begin + between.join(event.text for event in self.events[::step])

    def frames(self) -> list[Image.Image]:
        frames = []
        for number in range(FRAMES):
            frame = Image.new("RGB", (self.side, self.side), self.background)
            for event in self.events:
                if event.start <= number < event.end:
                    event.paint(frame, number)
            frames.append(frame)
        return frames

    def encoded(self) -> bytes:
        import av  # here, not above: nothing else of the demo needs it

        file = io.BytesIO()
        with av.open(file, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
            stream = container.add_stream("mpeg4", rate=RATE, options=ENCODING)
            stream.width = stream.height = self.side
            stream.pix_fmt = "yuv420p"
            stream.codec_context.thread_count = 1  # of many workers
            for image in self.frames():
                frame = av.VideoFrame.from_ndarray(_planes(image), format="yuv420p")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return file.getvalue()


def _planes(image: Image.Image) -> np.ndarray:
    """uint8 [height * 3 / 2, width]: yuv420p. FFmpeg's own conversion gives other pixels on other
    processors."""
    whole = image.convert("YCbCr").point(NARROWED)
    half = whole.reduce(2)
    planes = (whole.getchannel(0), half.getchannel(1), half.getchannel(2))
    return np.concatenate([np.asarray(each).ravel() for each in planes]).reshape(-1, image.width)


def twin_of(number: int) -> int:
    """The film with the same events in the opposite order; itself where there is none."""
    return number if number % 10 >= min(KINDS) else number ^ 1


class ClipsFormat(DrawnFormat):
    """Films with two or three events, each of another emoji, which is seen only then: what comes
    first can be told from nothing but the order of the frames. Of those that are trained on, each
    second one shows the events of the one before in the opposite order. In one of kind
    `composition` no emoji does what it does in training. With `:events` each event is a sample, a
    clip of its film."""

    called, version = "clips", 1
    holds = ("video", "text")

    def __init__(self, where: str) -> None:
        """`where`: `clips[:N][:events]`. Errors: as of `DrawnFormat`."""
        super().__init__(where.removesuffix(EVENTS))
        self.of_events = where.endswith(EVENTS)
        installed("av", "encodes the films", INSTALL)
        import av

        self.spec += f":{av.ffmpeg_version_info}"  # another FFmpeg may write other bytes
        self.spec += EVENTS * self.of_events

    def values(self, content: int) -> Any:
        clip, identity = self.clip(content), self.identity(content)
        film = self._encoded(content)
        if not self.of_events:
            return {"id": identity, "video": film, "text": [clip.caption()]}
        return [
            {"id": f"{identity}#{k}", "video": film, **event}
            for k, event in enumerate(self.events(content))
        ]

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        return self._encoded(number)

    @cached_property
    def _encoded(self) -> Callable[[int], bytes]:
        """Of a film's number. To encode one takes six times as long as to decode eight frames of
        it; all of the usual ones have 50 MB."""
        return lru_cache(USUAL)(lambda number: self.clip(number).encoded())

    def events(self, number: int) -> list[dict[str, Any]]:
        """What a film shows and when, in order: `start_s`, `end_s`, `text`."""
        return [
            {"start_s": event.start / RATE, "end_s": event.end / RATE, "text": event.text}
            for event in self.clip(number).events
        ]

    def reversed_caption(self, number: int) -> str:
        """The caption of the same events in the opposite order."""
        return self.clip(number).caption(-1)

    def clip(self, number: int) -> Clip:
        """Number -> what is seen when; the same on every machine."""
        is_new, is_twin = kind_of(number) == COMPOSITION, twin_of(number) < number
        rng = np.random.default_rng([self.version, number - is_twin])
        side = int(rng.choice(SIDES))
        pool = self.pool(number)
        count = int(rng.integers(min(LENGTHS), max(LENGTHS) + 1))
        shortest, longest = LENGTHS[count]
        lengths = rng.integers(shortest, longest + 1, count)
        # each event after as much of what is left as is drawn for it
        free = np.sort(rng.integers(0, FRAMES - lengths.sum() + 1, count))
        events: list[Event] = []
        for emoji in (pool[n] for n in rng.permutation(len(pool))):
            known = [each for each in ACTIONS if never_together(emoji.points, each) == is_new]
            if not known:
                continue
            sprite = self.sprite(emoji)
            sprite = _scaled(sprite, side * rng.uniform(*SIZES) / max(sprite.size))
            place = (float(rng.random()), float(rng.random()))
            action = known[int(rng.integers(len(known)))]
            events.append(Event(emoji, action, 0, int(lengths[len(events)]), sprite, place))
            if len(events) == count:
                break
        events = events[::-1] if is_twin else events
        lengths = np.array([event.end for event in events])
        starts = (free + np.cumsum(lengths) - lengths).tolist()
        events = [
            event._replace(start=start, end=start + event.end)
            for start, event in zip(starts, events)
        ]
        phrasing = PHRASINGS[int(rng.integers(len(PHRASINGS)))]
        return Clip(side, random_background(rng), events, phrasing)
