"""Fonts of this machine that have the characters of some texts, and texts in lines: for what
matplotlib draws.

One font rarely has all scripts. `fonts_for` takes matplotlib's own first and adds fonts of its list
until every character has one; what none has is drawn as "?", and `Fonts.notice` says which font to
install.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

BASE = "DejaVu Sans"  # comes with matplotlib
# fonts whose glyphs only say to which block of Unicode a character belongs
PLACEHOLDERS = ("last resort", "lastresort")
# the first words of Unicode's names
CJK = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH")


@dataclass(frozen=True)
class Fonts:
    """The fonts that draw some texts: the first that has a character draws it.

    `families`: for matplotlib's `font.family`, at least one. `characters`: the code points that
    they have. `missing`: the characters of the texts that none has.
    """

    families: list[str]
    characters: frozenset[int]
    missing: frozenset[str]

    def drawable(self, text: str) -> str:
        """The text with "?" for each character that no font has. Those without a shape, such as
        joiners, are left out where no font has them."""
        return "".join(
            "?" if c in self.missing else c
            for c in text
            if c in self.missing or c.isspace() or ord(c) in self.characters
        )

    def notice(self) -> str | None:
        """One line for the terminal, where something is missing; the same line for any Chinese,
        Japanese or Korean texts."""
        if not self.missing:
            return None
        what, how = f"some characters, such as {min(self.missing)!r},", ""
        if any(unicodedata.name(c, "").startswith(CJK) for c in self.missing):
            what = "Chinese, Japanese or Korean characters"
            how = ", on Debian or Ubuntu with `apt-get install fonts-noto-cjk`"
        return (
            f'{what} are drawn as "?": no font of this machine has them; install one that does{how}'
        )


def fonts_for(texts: Iterable[str]) -> Fonts:
    """The fewest fonts found that have the characters of all texts: of what is still missing the
    next one has most."""
    families, characters = [BASE], characters_of(BASE)
    wanted = {ord(c) for text in texts for c in text if _has_shape(c)}
    while missing := wanted - characters:
        # of equals the first
        best = max(installed_families(), key=lambda family: len(missing & characters_of(family)))
        if not missing & characters_of(best):
            break
        families.append(best)
        characters |= characters_of(best)
    return Fonts(families, characters, frozenset(map(chr, missing)))


@cache
def installed_families() -> tuple[str, ...]:
    """The families of fonts that matplotlib can draw with, sans serif first. As they are now, not
    when it made its list."""
    listed = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts(fontext="ttf"):
        if path not in listed:
            # of any kind, as matplotlib has it where it makes its list: bitmaps, damaged files
            with contextlib.suppress(Exception):
                font_manager.fontManager.addfont(path)
    names = {entry.name for entry in font_manager.fontManager.ttflist}
    plain = {name: name.lower().lstrip(".") for name in names}
    return tuple(
        sorted(
            (name for name in names if not plain[name].startswith(PLACEHOLDERS)),
            key=lambda name: ("sans" not in plain[name], "mono" in plain[name], name),
        )
    )


def characters_of(family: str) -> frozenset[int]:
    """The code points that a family's regular font has a glyph for, as its file is now; none where
    it is gone or damaged."""
    try:
        font = font_manager.FontProperties(family=[family])
        path = font_manager.findfont(font, fallback_to_default=False)
        index = getattr(path, "face_index", 0)  # in a collection (.ttc)
        found = os.stat(path)
        return _characters_in(str(path), index, (found.st_size, found.st_mtime_ns))
    except (OSError, RuntimeError, ValueError):
        return frozenset()


@cache
def _characters_in(path: str, index: int, version: tuple[int, int]) -> frozenset[int]:
    """`version`: the size and the time of the file. Errors: OSError, RuntimeError."""
    if _versions.setdefault(path, version) != version:
        _versions[path] = version
        # matplotlib keeps open fonts by their paths alone, and would draw with the one before
        getattr(getattr(font_manager, "_get_font", None), "cache_clear", lambda: None)()
    face = FT2Font(path, **({"face_index": index} if index else {}))
    return frozenset(face.get_charmap())


_versions: dict[str, tuple[int, int]] = {}  # by path, of the fonts that were read last


def _has_shape(character: str) -> bool:
    """Whether a character is more than white space, a control character, a joiner or a selector of
    variants such as that of ❤️."""
    is_selector = "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
    return not (
        character.isspace() or is_selector or unicodedata.category(character) in ("Cc", "Cf", "Cs")
    )


# -- lines


def columns_of(text: str) -> int:
    """The width of a text in Latin letters: wide characters, such as those of Chinese, count
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
