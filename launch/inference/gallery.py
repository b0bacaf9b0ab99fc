"""Figures that a person can judge: queries with what was found for them, right and wrong
marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.files import make_folder, replacing
from data.modalities.fonts import columns_of, fonts_for, wrapped
from launch.modalities import Encoded, draw

# Okabe and Ito's colours, which the colour-blind tell apart too; a word says it as well
MARKS = {True: ("right", "#009E73"), False: ("wrong", "#D55E00"), None: ("", "black")}
DOTS_PER_INCH, CELL_INCHES = 110, 1.6
LETTERS, LETTERS_ALONE = 26, 18  # of a line below an image, and of a text in the place of one
CENTRED: dict[str, Any] = {"ha": "center", "parse_math": False}


@dataclass(frozen=True)
class Found:
    """One answer: a picture or a sound with its caption, or a text alone. `right` None: nobody
    knows."""

    value: Encoded | None
    text: str
    similarity: float
    right: bool | None = None


@dataclass(frozen=True)
class Row:
    """A query and its answers, best first: a picture or a sound with its own caption, or a text
    alone."""

    text: str
    value: Encoded | None
    found: Sequence[Found]


def draw_rows(rows: Sequence[Row], title: str, path: Path) -> str | None:
    """A line per query. `path`: .png, .svg or .pdf. Returns what to say of characters that no font
    of this machine has."""
    found = [answer.text for row in rows for answer in row.found]
    fonts = fonts_for([title, *(row.text for row in rows), *found])
    with rc_context({"font.family": fonts.families}):
        _draw_rows(rows, title, path, fonts.drawable)
    return fonts.notice()


def _draw_rows(rows: Sequence[Row], title: str, path: Path, drawable: Callable[[str], str]) -> None:
    columns = 1 + max(len(row.found) for row in rows)
    size = CELL_INCHES * columns * 1.15, CELL_INCHES * 1.35 * len(rows) + 0.6
    figure = Figure(size, layout="constrained")
    for row, cells in zip(rows, figure.subplots(len(rows), columns, squeeze=False)):
        for cell in cells:
            cell.set_axis_off()
        _draw_cell(cells[0], row.value, drawable(row.text), "query", None)
        for found, cell in zip(row.found, cells[1:]):
            heading = f"{MARKS[found.right][0]} {found.similarity:.2f}".strip()
            _draw_cell(cell, found.value, drawable(found.text), heading, found.right)
    figure.suptitle(drawable(title), fontsize=11, parse_math=False)
    make_folder(path.parent)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=DOTS_PER_INCH, format=path.suffix[1:] or "png")


def _draw_cell(
    cell: Axes, value: Encoded | None, text: str, heading: str, right: bool | None
) -> None:
    colour = MARKS[right][1]
    cell.set_title(heading, fontsize=8, color=colour, parse_math=False)
    if value is None:
        alone = _lines(text, 6, LETTERS_ALONE)
        cell.text(0.5, 0.5, alone, va="center", fontsize=8, color=colour, **CENTRED)
        return
    draw(cell, value)
    has_numbers = len(cell.get_xticks()) > 0  # the axes of a spectrogram
    height, below = -0.22 if has_numbers else -0.04, _lines(text, 3, LETTERS)
    cell.text(0.5, height, below, va="top", fontsize=6.5, transform=cell.transAxes, **CENTRED)
    for side in cell.spines.values():
        side.set(color=colour, linewidth=2 if right is not None else 0.5)
    if right is not None or has_numbers:
        cell.set_axis_on()


def _lines(text: str, most: int, letters: int) -> str:
    return "\n".join(wrapped(text, most, lambda line: columns_of(line) <= letters))
