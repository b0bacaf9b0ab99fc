"""Boxes of a data set that are probably of another unit, or of the image the other way round, than
they are read by. One box says little; counted over all they do."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from data.decoding.images import SIDES_SWAPPED

# Counts of boxes in pixels, kept in an index beside what is unused.
NO_UNIT = "boxes without a unit"
UP_TO_1 = "boxes without a unit, of numbers up to 1"
UP_TO_1000 = "boxes without a unit, of numbers up to 1000"
FAR = "boxes without a unit, of numbers up to 1000 and above 500"
BEYOND = "boxes without a unit that go over their image"
ON_LARGE = "boxes without a unit on images of over 1250 pixels a side"
TURNED = "boxes on images that EXIF turns by 90 degrees"
ONLY_STORED = "boxes that fit their image only as its file has it"
ONLY_UPRIGHT = "boxes that fit their image only as it is shown"
DOUBTS = (
    *(NO_UNIT, UP_TO_1, UP_TO_1000, FAR, BEYOND, ON_LARGE),
    *(TURNED, ONLY_STORED, ONLY_UPRIGHT),
)
OVER = 0.01  # of a side, and a pixel, that boxes of pixels may go over an edge
LARGE = 1250  # pixels
FEWEST = 10  # boxes, by which thousandths are told, or anything of a part of a data set
SHARE = 0.1  # of the boxes that go over their image: thousandths
PIXELS = '; if they are pixels, "unit": "pixels" or ?unit=pixels'


def count_doubts(
    doubts: Counter[str],
    boxes: Iterable[Any],
    width: int,
    height: int,
    orientation: int,
    upright: bool,
) -> None:
    """Count the boxes in pixels of an image, `data.regions.Given`; the rest is as `placed` has
    it."""
    is_swapped = orientation in SIDES_SWAPPED
    shown, stored = (width, height), (height, width) if is_swapped else (width, height)
    sides = shown if upright else stored
    for each in boxes:
        if each.is_relative:
            continue
        _, _, x2, y2 = each.box
        if each.unit is None:
            most = max(each.box)
            doubts[NO_UNIT] += 1
            doubts[UP_TO_1] += most <= 1 + OVER
            doubts[UP_TO_1000] += most <= 1000
            doubts[FAR] += 500 < most <= 1000
            doubts[BEYOND] += not _fits(x2, y2, sides)
            doubts[ON_LARGE] += min(shown) > LARGE
        if is_swapped:
            as_stored, as_shown = _fits(x2, y2, stored), _fits(x2, y2, shown)
            doubts[TURNED] += 1
            doubts[ONLY_STORED] += as_stored and not as_shown
            doubts[ONLY_UPRIGHT] += as_shown and not as_stored


def _fits(x2: float, y2: float, sides: tuple[int, int]) -> bool:
    width, height = sides
    return x2 <= width * (1 + OVER) + 1 and y2 <= height * (1 + OVER) + 1


def refuse_wrong_unit(spec: str, doubts: Mapping[str, int], fewest: int = 1) -> None:
    """Raise ValueError where all boxes without a unit are fractions or thousandths. `fewest`: boxes
    that are enough to tell fractions."""
    number = doubts.get(NO_UNIT, 0)
    if number >= fewest and doubts.get(UP_TO_1) == number:
        raise ValueError(
            f"{spec}: none of its {number:,} boxes has a unit or a number above 1. Read as pixels "
            f"they would be dots; if they are fractions of the sides, give {unit_words('relative')}{PIXELS}"
        )
    over = doubts.get(BEYOND, 0)
    if number >= FEWEST and doubts.get(UP_TO_1000) == number and doubts.get(FAR):
        if over >= SHARE * number:
            raise ValueError(
                f"{spec}: none of its {number:,} boxes has a unit or a number above 1000, and "
                f"{over:,} go over their image. If they are thousandths of the sides, "
                f"give {unit_words('thousandths')}{PIXELS}"
            )


def doubtful_boxes(doubts: Mapping[str, int], upright: bool) -> list[str]:
    """Sentences on boxes that are read, and may be meant otherwise. `upright`: as they are read."""
    said = []
    number, turned = doubts.get(NO_UNIT, 0), doubts.get(TURNED, 0)
    stored, shown = doubts.get(ONLY_STORED, 0), doubts.get(ONLY_UPRIGHT, 0)
    is_large = doubts.get(ON_LARGE) == doubts.get(UP_TO_1000) == number
    if number >= FEWEST and is_large and doubts.get(FAR):
        said.append(
            f"none of {number:,} boxes without a unit has a number above 1000, though all images "
            f"have over {LARGE:,} pixels a side; if they are thousandths, give {unit_words('thousandths')}{PIXELS}"
        )
    if (stored if upright else shown) > (shown if upright else stored):
        of, other = ("as its file has it", "stored") if upright else ("as it is shown", "upright")
        said.append(
            f"of {turned:,} boxes on images that EXIF turns by 90 degrees, "
            f"{stored if upright else shown:,} fit their image only {of}, and "
            f"{shown if upright else stored:,} only the other way; if all are drawn on the image "
            f"{of}, give ?boxes={other} in the data spec"
        )
    return said


def unit_words(unit: str) -> str:
    """How a unit is given, for messages."""
    return f'"unit": "{unit}" beside each box, or ?unit={unit} in the data spec'
