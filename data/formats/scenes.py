"""`--data demo:scenes`: several emoji in one picture, each with its name and its box.

Nothing is stored. A scene follows from its number alone, and its picture is drawn when it is read.
It is a BMP, for its bytes are the pixels: those of a PNG depend on which zlib packs them.
"""

import io
import os
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image

from data.formats.demo import Concept, DemoFormat
from data.formats.rows import Media
from data.keys import hash64

SCENES = "scenes"  # after "demo:", and before a scene's number in its id
VERSION = 1  # of what a scene shows
USUAL, FEWEST = 2000, 10  # scenes
# Things that are told apart at any size, and by their names: food and plants, toys and music,
# animals, clothing, vehicles, food, animals. Faces, people, flags, clocks and signs are left out.
BLOCKS = (
    *((0x1F32D, 0x1F37F), (0x1F3A0, 0x1F3BE), (0x1F400, 0x1F43E), (0x1F451, 0x1F462)),
    *((0x1F680, 0x1F6A4), (0x1F950, 0x1F96F), (0x1F980, 0x1F9AE)),
)
CANVAS = 224  # pixels a side
EMOJI = (3, 8)  # of a scene
SIDES = (28, 96)  # pixels of an emoji's longer side
FILLED = 0.8  # the largest emoji, all side by side, have at most this part squared of the canvas
COVERED = 0.1  # the most of the smaller of two boxes that the other one takes
TRIES = 100
RESAMPLING = Image.Resampling.BICUBIC
VISIBLE = [0] * 32 + [255] * 224  # opacity -> whether a pixel is one of the emoji
LIGHT, TINT = 176, 40  # channels of the background are 176..255, and 40 apart, so it is never grey
CAPTIONS = 3
# Held out: one emoji of so many, and of the others one pair of so many.
CONCEPT_EVERY, PAIR_EVERY = 5, 10
CONCEPT, COMPOSITION = "concept", "composition"
# last digit of a scene's number -> the held-out set that it is of
KINDS = {8: CONCEPT, 9: COMPOSITION}

Box = tuple[int, int, int, int]  # left, top, width, height: pixels


class Emoji(NamedTuple):
    points: str
    file: str
    name: str
    is_held_out: bool


class Shown(NamedTuple):
    name: str
    image: Image.Image  # RGBA, as large as the box
    box: Box


class Scene(NamedTuple):
    background: tuple[int, ...]  # red, green, blue
    shown: list[Shown]  # each may cover a little of those before it
    captions: list[str]

    def encoded(self) -> bytes:
        canvas = Image.new("RGB", (CANVAS, CANVAS), self.background)
        for _, image, (left, top, *_) in self.shown:
            canvas.paste(image, (left, top), image)
        with io.BytesIO() as file:
            canvas.save(file, "BMP")
            return file.getvalue()


class ScenesFormat(DemoFormat):
    """Scenes of three to eight different emoji. Two of ten are never trained on: one of kind
    `concept`, only of emoji that no other scene has, and one of kind `composition`, whose emoji are
    trained on, but in which each makes a pair that is nowhere trained on. An id is `scenes/NNNNN`,
    or `scenes/KIND/NNNNN`."""

    holds = ("image", "text", "region")
    drawn_sets = ()

    def __init__(self, where: str) -> None:
        """`where`: `scenes[:N]`. Errors: ValueError, FileNotFoundError for a package that is not
        installed."""
        super().__init__("")
        _, colon, number = where.partition(":")
        if colon and not (number.isdecimal() and int(number) >= FEWEST):
            raise ValueError(
                f"data spec 'demo:{where}': '{number}' is no number of scenes; write "
                f"demo:{SCENES}:N with N from {FEWEST}"
            )
        self.count = int(number) if colon else USUAL
        # another Pillow may scale to other pixels
        self.spec = f"demo:{SCENES}:{self.count}:{VERSION}:{PIL.__version__}:{self.roots.own}"

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        # none where the packages have none of the emoji, which `total` refuses
        return (((number, number), 1) for number in range(self.count if self._emoji else 0))

    def values(self, content: int) -> dict[str, Any]:
        scene, kind = self.scene(content), kind_of(content)
        return {
            "id": "/".join(filter(None, (SCENES, kind, f"{content:05}"))),
            "image": scene.encoded(),
            "text": scene.captions,
            "region": [{"box": [*each.box], "text": each.name} for each in scene.shown],
        }

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        return self.scene(number).encoded()

    def where(self, file: str, path: str, number: int) -> str:
        return f"demo:{SCENES}#{number}"

    def concept(self, identity: str) -> Concept:
        return Concept("", identity.split("/")[1] if identity.count("/") > 1 else None)

    @cached_property
    def _emoji(self) -> list[Emoji]:
        return [
            Emoji(points, file, captions[0], hash64(points) % CONCEPT_EVERY == 0)
            for points, file, captions in self._entries()
            if "-" not in points and any(a <= int(points, 16) <= b for a, b in BLOCKS)
        ]

    def scene(self, number: int) -> Scene:
        """Number -> what is where; the same on every machine."""
        rng, kind = np.random.default_rng([VERSION, number]), kind_of(number)
        wanted = int(rng.integers(EMOJI[0], EMOJI[1] + 1))
        pool = [emoji for emoji in self._emoji if emoji.is_held_out == (kind == CONCEPT)]
        chosen: list[Emoji] = []
        for emoji in (pool[n] for n in rng.permutation(len(pool))):
            is_new = any(never_together(emoji, other) for other in chosen)
            if not chosen or is_new == (kind == COMPOSITION):
                chosen.append(emoji)
            if len(chosen) == wanted:
                break
        names = [emoji.name for emoji in chosen]
        captions = [listed(rng.permutation(names).tolist()) for _ in range(CAPTIONS)]
        background = rng.integers(LIGHT, 256, 3)
        while np.ptp(background) < TINT:
            background = rng.integers(LIGHT, 256, 3)
        sprites = [_sprite(os.path.join(self.roots.own, emoji.file)) for emoji in chosen]
        shown = [Shown(name, *placed) for name, placed in zip(names, _places(sprites, rng))]
        return Scene(tuple(background.tolist()), shown, [*dict.fromkeys(captions)])


def demo_format(where: str) -> DemoFormat:
    """What follows `demo:` -> its format."""
    return (ScenesFormat if where.partition(":")[0] == SCENES else DemoFormat)(where)


def kind_of(number: int) -> str | None:
    return KINDS.get(number % 10)


def never_together(one: Emoji, other: Emoji) -> bool:
    """Whether no scene of training may have both."""
    return hash64("+".join(sorted((one.points, other.points)))) % PAIR_EVERY == 0


def listed(names: list[str]) -> str:
    """`cat`, `ant`, `cherries` -> `a cat, an ant and cherries`."""
    named = [f"{_article(name)}{name}" for name in names]
    return f"{', '.join(named[:-1])} and {named[-1]}"


def _article(name: str) -> str:
    if name.endswith("s") and not name.endswith(("ss", "us", "os")):
        return ""
    return "an " if name[0] in "aeiouAEIOU" and not name.startswith(("un", "ew")) else "a "


def _places(
    sprites: list[Image.Image], rng: np.random.Generator
) -> Iterator[tuple[Image.Image, Box]]:
    """Each sprite at a random size, and a random place for it."""
    largest = min(SIDES[1], int(FILLED * CANVAS / len(sprites) ** 0.5))
    boxes: list[Box] = []
    while len(boxes) < len(sprites):
        boxes = []
        scales = [rng.integers(SIDES[0], largest + 1) / max(each.size) for each in sprites]
        # what is thin may fade at the ends as it shrinks
        images = [
            _visible(each.resize([max(1, round(scale * side)) for side in each.size], RESAMPLING))
            for each, scale in zip(sprites, scales)
        ]
        for image in images:
            for _ in range(TRIES):
                left, top = (int(rng.integers(CANVAS - side + 1)) for side in image.size)
                box = (left, top, *image.size)
                if all(covered(box, other) <= COVERED for other in boxes):
                    boxes.append(box)
                    break
    return zip(images, boxes)


def covered(one: Box, other: Box) -> float:
    """What two boxes share, as a part of the smaller one's area."""
    (x, y, w, h), (u, v, k, m) = one, other
    shared = max(0, min(x + w, u + k) - max(x, u)) * max(0, min(y + h, v + m) - max(y, v))
    return shared / min(w * h, k * m)


@lru_cache(512)
def _sprite(file: str) -> Image.Image:
    with Image.open(file) as image:
        return _visible(image.convert("RGBA"))


def _visible(image: Image.Image) -> Image.Image:
    """RGBA, cut to the pixels that can be seen."""
    return image.crop(image.getchannel("A").point(VISIBLE).getbbox())
