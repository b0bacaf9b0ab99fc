"""`--data demo:clips`: short films in which emoji do one thing after another, and then in the
opposite order.

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
    RESAMPLING,
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
from data.keys import hash64

RATE, FRAMES = 8, 96  # frames a second, and in all
SIDES = (64, 80, 96, 112)  # pixels of a frame, which is a square
# number of events -> frames that each takes, from and to
LENGTHS = {2: (10, 14), 3: (8, 11)}
GAP = 2  # frames with nothing between two events, at most
PAUSE = 4  # at least, between the events and the same ones in the opposite order
SIZES = (0.45, 0.65)  # an emoji's longer side, as a part of the frame's
ONE_OF = 7  # emoji: few, so that each comes often enough to be learned in some minutes
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
    halves: tuple[list[Event], list[Event]]
    phrasing: tuple[str, str]

    @property
    def events(self) -> list[Event]:
        return [event for half in self.halves for event in half]

    def caption(self, half: int) -> str:
        """Of the first half or of the second, 0 or 1."""
        begin, between = self.phrasing
        return begin + between.join(event.text for event in self.halves[half])

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


def _span(first: Event, last: Event) -> dict[str, float]:
    return {"start_s": first.start / RATE, "end_s": last.end / RATE}


class ClipsFormat(DrawnFormat):
    """Films of two halves: two or three events, each of another emoji, which is seen only then,
    and the same events in the opposite order; which half is which can be told from nothing but the
    order of the frames. In a film of kind `composition` no emoji does what it does in training. A
    film has a sample of each half, with a caption that names the events in order and a moment for each
    of them, and one of each event: clips of it."""

    called, version, usual = "clips", 2, 1000
    holds = ("video", "text", "moment")

    def __init__(self, where: str) -> None:
        """`where`: `clips[:N]`. Errors: as of `DrawnFormat`."""
        super().__init__(where)
        installed("av", "encodes the films", INSTALL)
        import av

        self.spec += f":{av.ffmpeg_version_info}"  # another FFmpeg may write other bytes

    def values(self, content: int) -> Any:
        film, clip = self._encoded(content), self.clip(content)
        told = [(clip.caption(k), half) for k, half in enumerate(clip.halves)]
        told += [(event.text, [event]) for event in clip.events]
        return [
            {
                "id": f"{self.identity(content)}#{k}",
                "video": film,
                **_span(of[0], of[-1]),
                "text": text,
                "moment": [{**_span(each, each), "text": each.text} for each in of]
                if k < 2
                else None,
            }
            for k, (text, of) in enumerate(told)
        ]

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        return self._encoded(number)

    @cached_property
    def _emoji(self) -> list[Emoji]:
        return [each for each in super()._emoji if hash64(self.called + each.points) % ONE_OF == 0]

    @cached_property
    def _encoded(self) -> Callable[[int], bytes]:
        """Of a film's number. To encode one takes six times as long as to decode eight frames of
        it; all of the usual ones have 50 MB."""
        return lru_cache(self.usual)(lambda number: self.clip(number).encoded())

    def reversed_caption(self, identity: str) -> str | None:
        """The caption of the other half of the film; None: the sample is of a single event."""
        number, _, k = identity.rpartition("/")[2].partition("#")
        return self.clip(int(number)).caption(1 - int(k)) if int(k) < 2 else None

    def clip(self, number: int) -> Clip:
        """Number -> what is seen when; the same on every machine."""
        is_new = kind_of(number) == COMPOSITION
        rng = np.random.default_rng([self.version, number])
        side = int(rng.choice(SIDES))
        pool = self.pool(number)
        count = int(rng.integers(min(LENGTHS), max(LENGTHS) + 1))
        shortest, longest = LENGTHS[count]
        lengths = rng.integers(shortest, longest + 1, count)
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
        order = [*events, *reversed(events)]
        # frames with nothing before each
        gaps = rng.integers(0, GAP + 1, 2 * count)
        gaps[[0, count]] = 0, PAUSE
        free = FRAMES - sum(event.end for event in order) - gaps.sum()
        before, middle = np.sort(rng.integers(0, free + 1, 2))
        gaps[[0, count]] += before, middle - before
        ends = np.cumsum([gap + event.end for gap, event in zip(gaps, order)]).tolist()
        shown = [event._replace(start=end - event.end, end=end) for event, end in zip(order, ends)]
        phrasing = PHRASINGS[int(rng.integers(len(PHRASINGS)))]
        halves = shown[:count], shown[count:]
        return Clip(side, random_background(rng), halves, phrasing)
