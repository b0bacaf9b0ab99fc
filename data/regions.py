"""Regions of an image: boxes, and phrases that say what is in them.

A row gives them as `{"box": [x, y, width, height], "text": "…"}`, or with `"xyxy": [x1, y1, x2,
y2]`, in pixels of the image as its file has it, before EXIF turns it; with `"unit": "relative"` in
fractions of its sides, with `"thousandths"` in thousandths of them. `BoxOptions` of a data set say
otherwise. The index keeps them as fractions of the image as it is shown.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from common.output import brief
from data.annotations import Annotation, Annotations, checked_text, listed
from data.bad_samples import BadSample
from data.box_checks import count_doubts, unit_words
from data.decoding.images import SIDES_SWAPPED
from data.values import plain

NEEDED = "box: [x, y, width, height] or xyxy: [x1, y1, x2, y2]"
UNITS = {"pixels": None, "relative": 1.0, "thousandths": 1000.0}
"""What a side of the image has of each; None: its pixels."""
ROUNDING = 0.01  # of a side, that a box may go over it before its unit is doubted
PIXEL = 0.99  # of one, that a box has at least; fractions are rounded
INSIDE = 0.5  # of a box's area that the image has at least
PARTS = 1_000_000  # of a side, in which edges are kept; a pixel of the longest side has 15

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2."""


class BoxOptions(NamedTuple):
    """How a data set gives its boxes. `unit`: of UNITS, where a region does not say it; None: not
    said, so pixels. `upright`: on the image as EXIF turns it, not as its file has it."""

    unit: str | None = None
    upright: bool = False

    @classmethod
    def of(cls, spec: str, options: dict[str, str]) -> "BoxOptions":
        """Takes its own out of the options of a data spec. `spec` begins messages. Errors:
        ValueError."""
        given = {"unit": options.pop("unit", None), "boxes": options.pop("boxes", None)}
        for key, known in (("unit", (*UNITS,)), ("boxes", TURNS)):
            if given[key] not in (None, *known):
                raise ValueError(f"{spec} {key}={given[key]}; one of {', '.join(known)} is needed")
        return cls(given["unit"], given["boxes"] == TURNS[0])

    def words(self) -> str:
        """As a spec has them; of the usual ones nothing."""
        unit = f"?unit={self.unit}" if self.unit else ""
        return unit + (f"?boxes={TURNS[0]}" if self.upright else "")


BOX_OPTIONS = ("boxes", "unit")
TURNS = ("upright", "stored")


class Given(NamedTuple):
    """A region as a row gives it, checked as far as that needs no image."""

    box: Box  # in pixels, or where it `is_relative` in fractions
    unit: str | None  # None: none is given
    is_relative: bool
    phrases: tuple[str, ...]
    negatives: tuple[str, ...]


def checked_region(
    given: Mapping[str, Any], dropped: list[BadSample], unit: str | None = None
) -> Given:
    """`unit`: of a box that has none. `dropped` gets what is wrong with phrases beside good ones.
    Raises BadSample."""
    own = given.get("unit")
    unit = unit if own is None else own
    box, is_relative = _box_of(given, unit)
    return Given(box, unit, is_relative, *checked_text(given, dropped, "region"))


def placed(
    regions: Annotations, width: int, height: int, orientation: int, upright: bool = False
) -> list[Annotation]:
    """The regions on their image; those that are not on it go from the good to the dropped ones.
    `width`, `height`: of the image as shown, in pixels; `orientation`: EXIF's, of its file;
    `upright`: whether the boxes are of the image as shown."""
    count_doubts(regions.doubts, regions.good, width, height, orientation, upright)
    if upright:
        orientation = 1
    is_swapped = orientation in SIDES_SWAPPED
    if is_swapped:
        width, height = height, width
    is_mirrored, is_flipped = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    found: list[Annotation] = []
    given = regions.good[:]
    regions.good.clear()
    # without loops over the four edges, which would take a third of the time of an index
    for each in given:
        (x1, y1, x2, y2), _, is_relative, phrases, negatives = each
        if not is_relative:
            x1, y1, x2, y2 = x1 / width, y1 / height, x2 / width, y2 / height
        least = INSIDE * (x2 - x1) * (y2 - y1)
        x1, y1 = 0.0 if x1 < 0 else x1, 0.0 if y1 < 0 else y1
        x2, y2 = 1.0 if x2 > 1 else x2, 1.0 if y2 > 1 else y2
        if x1 >= x2 or y1 >= y2 or (x2 - x1) * (y2 - y1) < least:
            regions.dropped.append(_outside(each, width, height))
            continue
        is_tiny = (x2 - x1) * width < PIXEL or (y2 - y1) * height < PIXEL
        if is_swapped:
            x1, y1, x2, y2 = y1, x1, y2, x2
        if is_mirrored:
            x1, x2 = 1 - x2, 1 - x1
        if is_flipped:
            y1, y2 = 1 - y2, 1 - y1
        # as `round` has it, in half the time
        x1, y1 = int(x1 * PARTS + 0.5) / PARTS, int(y1 * PARTS + 0.5) / PARTS
        x2, y2 = int(x2 * PARTS + 0.5) / PARTS, int(y2 * PARTS + 0.5) / PARTS
        if not (x1 < x2 and y1 < y2):
            regions.dropped.append(_empty(each.box))
        elif is_tiny:
            regions.dropped.append(_tiny(each, width, height))
        else:
            found.append(Annotation((x1, y1, x2, y2), phrases, negatives))
            regions.good.append(each)
    return found


def _box_of(region: Mapping[str, Any], unit: Any) -> tuple[Box, bool]:
    """Its box, in pixels or in fractions, and whether it is in these. Raises BadSample."""
    has_corners = region.get("box") is None
    given = region.get("xyxy" if has_corners else "box")
    numbers = plain(listed(given))
    try:
        x1, y1, x2, y2 = map(float, numbers)
        is_finite = abs(x1) + abs(y1) + abs(x2) + abs(y2) < math.inf  # nor is one NaN
        is_usual = {*map(type, numbers)} <= {int, float}
        is_good = is_finite and (is_usual or all(map(_is_number, numbers)))
    except (ValueError, TypeError, OverflowError):
        is_good = False
    if not is_good:
        raise BadSample(
            "invalid-box", f"a box is {brief(given)}; four numbers are needed, {NEEDED}"
        )
    if not (unit is None or isinstance(unit, str) and unit in UNITS):
        needed = "pixels or relative or thousandths"
        raise BadSample("invalid-box", f"its unit is {brief(unit)}; {needed} is needed")
    side = None if unit is None else UNITS[unit]
    if side is not None and max(x1, y1, x2, y2) > side * (1 + ROUNDING):
        raise BadSample(
            "not-relative",
            f"a box is {numbers}, called {unit}; are these pixels? Leave out the unit",
        )
    if has_corners and (x1 > x2 or y1 > y2):
        raise BadSample("inverted-box", f"a box is xyxy: {numbers}; x1 <= x2, y1 <= y2 are needed")
    box = (x1, y1, x2, y2) if has_corners else (x1, y1, x1 + x2, y1 + y2)
    if box[0] >= box[2] or box[1] >= box[3]:
        raise _empty(numbers)
    if side is not None and side != 1:
        box = (box[0] / side, box[1] / side, box[2] / side, box[3] / side)
    return box, side is not None


def _is_number(given: Any) -> bool:
    # float() reads texts, too
    return isinstance(given, Real) and not isinstance(given, bool)


def _empty(box: Sequence[float]) -> BadSample:
    return BadSample("empty-box", f"a box is {[*box]}; a width and a height are needed")


def _tiny(region: Given, width: int, height: int) -> BadSample:
    said = f"xyxy: {[*region.box]} is less than a pixel of {width} x {height}"
    if region.unit is None and max(region.box) <= 1 + ROUNDING:
        said += f"; are these fractions of the sides? Give {unit_words('relative')}"
    return BadSample("below-a-pixel", said)


def _outside(region: Given, width: int, height: int) -> BadSample:
    of = f"of {width} x {height} pixels in its file"
    sides = "fractions of its sides" if region.is_relative else of
    return BadSample(
        "outside-image", f"xyxy: {[*region.box]} is to more than half outside of the image, {sides}"
    )
