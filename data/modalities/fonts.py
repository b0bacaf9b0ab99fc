"""Which fonts of this machine have the characters of some texts, and texts in lines: for what is
drawn by Pillow or matplotlib.

One font rarely has all scripts. `fonts_for` takes matplotlib's own first and adds fonts of the
machine until every character has one; what none has is drawn as "?", and `Fonts.notice` says which
font to install.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

BASE = "DejaVu Sans"  # comes with matplotlib
PLACEHOLDERS = (
    "last resort",
    "lastresort",
)  # fonts whose glyphs only say to which block of Unicode a character belongs
CJK = (
    "CJK",
    "HIRAGANA",
    "KATAKANA",
    "HANGUL",
    "BOPOMOFO",
    "IDEOGRAPHIC",
    "FULLWIDTH",
    "HALFWIDTH",
)  # first words of Unicode's names


@dataclass(frozen=True)
class Font:
    """`family`: the name by which matplotlib finds it. `index`: of the face in a collection
    (.ttc)."""

    family: str
    path: str
    index: int = 0


@dataclass(frozen=True)
class Fonts:
    """The fonts that draw some texts, the first that has a character draws it; at least one.
    `missing`: the characters that none has."""

    fonts: tuple[Font, ...]
    missing: frozenset[str]

    @property
    def families(self) -> list[str]:
        """For matplotlib's `font.family`."""
        return [font.family for font in self.fonts]

    def drawable(self, text: str) -> str:
        """The text with "?" for each character that no font has. Those without a shape, such as
        joiners, are left out where no font has them."""
        return "".join(
            "?" if c in self.missing else c
            for c in text
            if c in self.missing or c.isspace() or self._font_of(c)
        )

    def runs(self, text: str) -> list[tuple[str, Font]]:
        """The drawable text in pieces of one font each."""
        pieces: list[tuple[str, Font]] = []
        for c in self.drawable(text):
            font = self._font_of(c) or self.fonts[0]
            if pieces and pieces[-1][1] == font:
                pieces[-1] = (pieces[-1][0] + c, font)
            else:
                pieces.append((c, font))
        return pieces

    def notice(self) -> str | None:
        """One line for the terminal, where something is missing; the same line for any Chinese,
        Japanese or Korean texts."""
        if not self.missing:
            return None
        cjk = any(_is_cjk(c) for c in self.missing)
        what = (
            "Chinese, Japanese or Korean characters"
            if cjk
            else f"some characters, such as {min(self.missing)!r},"
        )
        how = ", on Debian or Ubuntu with `apt-get install fonts-noto-cjk`" if cjk else ""
        return (
            f'{what} are drawn as "?": no font of this machine has them; install one that does{how}'
        )

    def _font_of(self, character: str) -> Font | None:
        return next((font for font in self.fonts if ord(character) in characters_of(font)), None)


def fonts_for(texts: Iterable[str]) -> Fonts:
    """The fewest fonts found that have the characters of all texts: of what is still missing the
    next one has most."""
    chosen = [Font(BASE, *_path_and_index(font_manager.findfont(BASE)))]
    missing = {ord(c) for text in texts for c in text if _has_shape(c)} - characters_of(chosen[0])
    while missing:
        best = max(
            installed_fonts(), key=lambda font: len(missing & characters_of(font))
        )  # of equals the first
        if not missing & characters_of(best):
            break
        chosen.append(best)
        missing -= characters_of(best)
    return Fonts(tuple(chosen), frozenset(map(chr, missing)))


@cache
def installed_fonts() -> tuple[Font, ...]:
    """Of each family that matplotlib can draw with its upright, regular font; sans serif first. As
    they are now, not when it made its list."""
    listed = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts(fontext="ttf"):
        if path not in listed:
            try:
                font_manager.fontManager.addfont(path)
            except (
                Exception
            ):  # of any kind, as matplotlib has it where it makes its list: bitmaps, damaged files
                continue
    families: dict[str, Font] = {}
    for entry in sorted(font_manager.fontManager.ttflist, key=_plainness):
        if Path(entry.fname).is_file() and not entry.name.lower().lstrip(".").startswith(
            PLACEHOLDERS
        ):
            families.setdefault(
                entry.name, Font(entry.name, entry.fname, getattr(entry, "index", 0))
            )
    return tuple(families.values())


@cache
def characters_of(font: Font) -> frozenset[int]:
    """The code points that a font has a glyph for; none where its file is gone or damaged."""
    try:
        face = FT2Font(font.path, face_index=font.index) if font.index else FT2Font(font.path)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(face.get_charmap())


def _path_and_index(found: str) -> tuple[str, int]:
    return str(found), getattr(found, "face_index", 0)


def _plainness(entry: font_manager.FontEntry) -> tuple:
    weight = font_manager.weight_dict.get(entry.weight, entry.weight)
    usual = (
        entry.style == "normal",
        entry.variant == "normal",
        entry.stretch == "normal",
        "sans" in entry.name.lower(),
    )
    return (
        *(not yes for yes in usual),
        "mono" in entry.name.lower(),
        abs(weight - 400),
        getattr(entry, "index", 0),
        entry.name,
        entry.fname,
    )


def _has_shape(character: str) -> bool:
    """Not so: white space, control characters, joiners, and the selectors of variants such as that
    of ❤️."""
    return not (
        character.isspace()
        or unicodedata.category(character) in ("Cc", "Cf", "Cs")
        or _is_selector(character)
    )


def _is_selector(character: str) -> bool:
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"


def _is_cjk(character: str) -> bool:
    return unicodedata.name(character, "").startswith(CJK)


# -- lines


def columns_of(text: str) -> int:
    """How wide a text is, in Latin letters: wide characters, such as those of Chinese, count
    two."""
    return sum(1 + is_wide(c) for c in text)


def is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def wrapped(text: str, most_lines: int, fits: Callable[[str], bool]) -> list[str]:
    """The text in lines that `fits` accepts, broken at spaces, behind hyphens, and between
    characters of Chinese and Japanese, else anywhere.

    Where more than `most_lines` are needed the last one ends in "…".
    """
    lines: list[str] = []
    left = " ".join(text.split())
    while left and len(lines) < most_lines:
        end = next((n for n in range(1, len(left)) if not fits(left[: n + 1])), len(left))
        end = next((n for n in range(end, 0, -1) if _may_break(left, n)), end)
        lines.append(left[:end].rstrip())
        left = left[end:].lstrip()
    if left and lines:
        lines[-1] = lines[-1][:-1] + "…"
    return lines


def _may_break(text: str, place: int) -> bool:
    if place == len(text) or text[place] == " " or text[place - 1] in " -":
        return True
    return any(
        is_wide(c) and not unicodedata.name(c, "").startswith("HANGUL")
        for c in text[place - 1 : place + 1]
    )
