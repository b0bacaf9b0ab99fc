"""`--data demo:scenes`: several emoji in one picture, each with its name and its box.

A picture is a BMP, for its bytes are the pixels: those of a PNG depend on which zlib packs them.
"""

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data.formats.clips import ClipsFormat
from data.formats.demo import DemoFormat
from data.formats.drawn import (
    COMPOSITION,
    RESAMPLING,
    DrawnFormat,
    Emoji,
    kind_of,
    never_together,
    random_background,
    visible,
    with_article,
)
from data.formats.rows import Media

CANVAS = 224  # pixels a side
EMOJI = (3, 8)  # of a scene
SIDES = (28, 96)  # pixels of an emoji's longer side
FILLED = 0.8  # the largest emoji, all side by side, have at most this part squared of the canvas
COVERED = 0.1  # the most of the smaller of two boxes that the other one takes
TRIES = 100
CAPTIONS = 3

Box = tuple[int, int, int, int]  # left, top, width, height: pixels


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


class ScenesFormat(DrawnFormat):
    """Scenes of three to eight different emoji. In one of kind `composition` each emoji after the
    first makes a pair with another that is nowhere trained on."""

    called, version = "scenes", 1
    holds = ("image", "text", "region")

    def values(self, content: int) -> dict[str, Any]:
        scene = self.scene(content)
        return {
            "id": self.identity(content),
            "image": scene.encoded(),
            "text": scene.captions,
            "region": [{"box": [*each.box], "text": each.name} for each in scene.shown],
        }

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        return self.scene(number).encoded()

    def scene(self, number: int) -> Scene:
        """Number -> what is where; the same on every machine."""
        rng, kind = np.random.default_rng([self.version, number]), kind_of(number)
        wanted = int(rng.integers(EMOJI[0], EMOJI[1] + 1))
        pool = self.pool(number)
        chosen: list[Emoji] = []
        for emoji in (pool[n] for n in rng.permutation(len(pool))):
            is_new = any(never_together(emoji.points, other.points) for other in chosen)
            if not chosen or is_new == (kind == COMPOSITION):
                chosen.append(emoji)
            if len(chosen) == wanted:
                break
        names = [emoji.name for emoji in chosen]
        captions = [listed(rng.permutation(names).tolist()) for _ in range(CAPTIONS)]
        background = random_background(rng)
        sprites = [self.sprite(emoji) for emoji in chosen]
        shown = [Shown(name, *placed) for name, placed in zip(names, _places(sprites, rng))]
        return Scene(background, shown, [*dict.fromkeys(captions)])


def demo_format(where: str) -> DemoFormat:
    """What follows `demo:` -> its format."""
    called = where.partition(":")[0]
    drawn = {each.called: each for each in (ScenesFormat, ClipsFormat)}
    return drawn.get(called, DemoFormat)(where)


def listed(names: list[str]) -> str:
    """`cat`, `ant`, `cherries` -> `a cat, an ant and cherries`."""
    named = [with_article(name) for name in names]
    return f"{', '.join(named[:-1])} and {named[-1]}"


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
            visible(each.resize([max(1, round(scale * side)) for side in each.size], RESAMPLING))
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
