"""What the drawn data sets of the demo share: which emoji they show, and what training never sees.

Nothing of such a set is stored. A sample follows from its number alone, and is drawn when it is
read.
"""

import os
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image

from data.formats.demo import Concept, DemoFormat
from data.keys import hash64

FEWEST = 10  # samples
# Things that are told apart at any size, and by their names: food and plants, toys and music,
# animals, clothing, vehicles, food, animals. Faces, people, flags, clocks and signs are left out.
BLOCKS = (
    *((0x1F32D, 0x1F37F), (0x1F3A0, 0x1F3BE), (0x1F400, 0x1F43E), (0x1F451, 0x1F462)),
    *((0x1F680, 0x1F6A4), (0x1F950, 0x1F96F), (0x1F980, 0x1F9AE)),
)
RESAMPLING = Image.Resampling.BICUBIC
VISIBLE = [0] * 32 + [255] * 224  # opacity -> whether a pixel is one of the emoji
LIGHT, TINT = 176, 40  # channels of the background are 176..255, and 40 apart, so it is never grey
# Held out: one emoji of so many, and of the others one pair of so many.
CONCEPT_EVERY, PAIR_EVERY = 5, 10
CONCEPT, COMPOSITION = "concept", "composition"
# last digit of a sample's number -> the held-out set that it is of
KINDS = {8: CONCEPT, 9: COMPOSITION}


class Emoji(NamedTuple):
    points: str
    file: str
    name: str
    is_held_out: bool


class DrawnFormat(DemoFormat):
    """Two samples of ten are never trained on: one of kind `concept`, only of emoji that no other
    sample has, and one of kind `composition`, whose emoji are trained on, but in pairs that are
    nowhere trained on. An id is `CALLED/NNNNN`, or `CALLED/KIND/NNNNN`."""

    called: str  # after "demo:", and before a sample's number in its id
    version: int  # of what a sample shows
    usual = 2000  # samples
    drawn_sets = ()

    def __init__(self, where: str) -> None:
        """`where`: `CALLED[:N]`. Errors: ValueError, FileNotFoundError for a package that is not
        installed."""
        super().__init__("")
        _, colon, number = where.partition(":")
        if colon and not (number.isdecimal() and int(number) >= FEWEST):
            raise ValueError(
                f"data spec 'demo:{where}': '{number}' is no number of {self.called}; write "
                f"demo:{self.called}:N with N from {FEWEST}"
            )
        self.count = int(number) if colon else self.usual
        # another Pillow may scale to other pixels
        versions = f"{self.version}:{PIL.__version__}"
        self.spec = f"demo:{self.called}:{self.count}:{versions}:{self.roots.own}"

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        # none where the packages have none of the emoji, which `total` refuses
        return (((number, number), 1) for number in range(self.count if self._emoji else 0))

    def where(self, file: str, path: str, number: int) -> str:
        return f"demo:{self.called}#{number}"

    def concept(self, identity: str) -> Concept:
        return Concept("", identity.split("/")[1] if identity.count("/") > 1 else None)

    def identity(self, number: int) -> str:
        return "/".join(filter(None, (self.called, kind_of(number), f"{number:05}")))

    def pool(self, number: int) -> list[Emoji]:
        """Those that a sample may show."""
        return [each for each in self._emoji if each.is_held_out == (kind_of(number) == CONCEPT)]

    def sprite(self, emoji: Emoji) -> Image.Image:
        """RGBA, cut to the pixels that can be seen."""
        return _sprite(os.path.join(self.roots.own, emoji.file))

    @cached_property
    def _emoji(self) -> list[Emoji]:
        return [
            Emoji(points, file, captions[0], hash64(points) % CONCEPT_EVERY == 0)
            for points, file, captions in self._entries()
            if "-" not in points and any(a <= int(points, 16) <= b for a, b in BLOCKS)
        ]


def kind_of(number: int) -> str | None:
    return KINDS.get(number % 10)


def never_together(one: str, other: str) -> bool:
    """Whether no sample of training may have both."""
    return hash64("+".join(sorted((one, other)))) % PAIR_EVERY == 0


def is_plural(name: str) -> bool:
    return name.endswith("s") and not name.endswith(("ss", "us", "os"))


def with_article(name: str) -> str:
    """`cat` -> `a cat`, `cherries` -> `cherries`."""
    if is_plural(name):
        return name
    is_an = name[0] in "aeiouAEIOU" and not name.startswith(("un", "ew"))
    return f"{'an' if is_an else 'a'} {name}"


def random_background(rng: np.random.Generator) -> tuple[int, ...]:
    """Red, green, blue."""
    background = rng.integers(LIGHT, 256, 3)
    while np.ptp(background) < TINT:
        background = rng.integers(LIGHT, 256, 3)
    return tuple(background.tolist())


@lru_cache(512)
def _sprite(file: str) -> Image.Image:
    with Image.open(file) as image:
        return visible(image.convert("RGBA"))


def visible(image: Image.Image) -> Image.Image:
    """RGBA, cut to the pixels that can be seen."""
    return image.crop(image.getchannel("A").point(VISIBLE).getbbox())
