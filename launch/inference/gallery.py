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
from matplotlib.patches import Rectangle

from common.files import make_folder, replacing
from data.modalities.fonts import columns_of, fonts_for, wrapped
from launch.views import View

# Okabe and Ito's colours, which the colour-blind tell apart too; a word says it as well
MARKS = {True: ("right", "#009E73"), False: ("wrong", "#D55E00"), None: ("", "black")}
DOTS_PER_INCH, CELL_INCHES = 110, 1.6
LETTERS, LETTERS_ALONE = 26, 18  # of a line below an image, and of a text in the place of one
CENTRED: dict[str, Any] = {"ha": "center", "parse_math": False}


@dataclass(frozen=True)
class Cell:
    """A query or an answer: a picture or a sound with its caption, or a text alone. `similarity`
    None: the query. `right` None: nobody knows. `box`: x1, y1, x2, y2 of what is meant of a
    picture, in fractions of its sides."""

    value: View | None
    text: str
    similarity: float | None = None
    right: bool | None = None
    box: Sequence[float] | None = None


Row = Sequence[Cell | None]
"""A query, then its answers, best first. None: the place stays empty."""


def draw_rows(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw a line per query and print `path`: .png, .svg or .pdf. Characters that no font of this
    machine has are reported; nothing is drawn of no queries."""
    if not rows:
        print(f"{path}: not drawn, because there are no queries")
        return
    fonts = fonts_for([title, *(cell.text for row in rows for cell in row if cell)])
    with rc_context({"font.family": fonts.families}):
        _draw_rows(rows, title, path, fonts.drawable)
    print(*filter(None, (fonts.notice(), path)), sep="\n")


def _draw_rows(rows: Sequence[Row], title: str, path: Path, drawable: Callable[[str], str]) -> None:
    columns = max(map(len, rows))
    size = CELL_INCHES * columns * 1.15, CELL_INCHES * 1.35 * len(rows) + 0.6
    figure = Figure(size, layout="constrained")
    for row, places in zip(rows, figure.subplots(len(rows), columns, squeeze=False)):
        for axes in places:
            axes.set_axis_off()
        for cell, axes in zip(row, places):
            if cell:
                _draw_cell(axes, cell, drawable(cell.text))
    figure.suptitle(drawable(title), fontsize=11, parse_math=False)
    make_folder(path.parent)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=DOTS_PER_INCH, format=path.suffix[1:] or "png")


def _draw_cell(axes: Axes, cell: Cell, text: str) -> None:
    mark, colour = MARKS[cell.right]
    heading = "query" if cell.similarity is None else f"{mark} {cell.similarity:.2f}".strip()
    axes.set_title(heading, fontsize=8, color=colour, parse_math=False)
    if cell.value is None:
        alone = _lines(text, 6, LETTERS_ALONE)
        axes.text(0.5, 0.5, alone, va="center", fontsize=8, color=colour, **CENTRED)
        return
    cell.value.draw(axes)
    if cell.box is not None:
        x1, y1, x2, y2 = cell.box
        # in parts of the axes, which count from below
        where = {"transform": axes.transAxes, "fill": False, "linewidth": 1.5}
        for colour_of_line, dashes in (("white", "-"), ("#0072B2", (0, (3, 3)))):
            axes.add_patch(
                Rectangle(
                    (x1, 1 - y2), x2 - x1, y2 - y1, color=colour_of_line, linestyle=dashes, **where
                )
            )
    has_numbers = len(axes.get_xticks()) > 0  # the axes of a spectrogram
    height, below = -0.22 if has_numbers else -0.04, _lines(text, 3, LETTERS)
    axes.text(0.5, height, below, va="top", fontsize=6.5, transform=axes.transAxes, **CENTRED)
    for side in axes.spines.values():
        side.set(color=colour, linewidth=2 if cell.right is not None else 0.5)
    if cell.right is not None or has_numbers:
        axes.set_axis_on()


def _lines(text: str, most: int, letters: int) -> str:
    return "\n".join(wrapped(text, most, lambda line: columns_of(line) <= letters))
