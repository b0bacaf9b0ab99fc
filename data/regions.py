"""Regions of an image: boxes, and phrases that say what is in them.

A row gives them as `{"box": [x, y, width, height], "text": "…" or ["…"], "negatives": ["…"]}`, or
with `"xyxy": [x1, y1, x2, y2]`, in pixels of the image as its file has it, before EXIF turns it;
with `"unit": "relative"` in fractions of its sides. The index keeps them as fractions of the image
as it is shown.
"""

import json
import marshal
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from data.bad_samples import (
    REGION_LIMIT,
    BadSample,
    check_caption,
    checked_captions,
)
from data.decoding.images import SIDES_SWAPPED
from data.values import plain

NEEDED = "box: [x, y, width, height] or xyxy: [x1, y1, x2, y2]"
UNITS = (None, "pixels", "relative")
ROUNDING = 0.01  # that a fraction may exceed 1 before it is taken for pixels
INSIDE = 0.5  # of a box's area that the image has at least
PARTS = 1_000_000  # of a side, in which edges are kept; a pixel of the longest side has 15
MARSHAL = 2  # the newest version that does not tell equal objects from the same one
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
NO_TEXT = ("no-caption", "empty-caption", "invalid-row")

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2."""


class Region(NamedTuple):
    """A box of an image, and what is said of it."""

    box: Box  # fractions 0..1 of the sides of the image as shown
    phrases: tuple[str, ...]  # at least one
    negatives: tuple[str, ...] = ()  # phrases that are not true of it


class Given(NamedTuple):
    """A region as a row gives it, checked as far as that needs no image."""

    box: Box  # of the image as its file has it
    is_relative: bool
    phrases: tuple[str, ...]
    negatives: tuple[str, ...]


class Regions(NamedTuple):
    """The good regions of a row, what is wrong with the others, what is wrong with phrases beside
    good ones, and how many regions there are in all."""

    good: list[Given]
    dropped: list[BadSample]
    phrases: list[BadSample]
    total: int

    def stamp(self) -> bytes:
        """Equal for what is equal; made in an eighth of the time of `repr`."""
        problems = [str(each) for each in (*self.dropped, *self.phrases)]
        return marshal.dumps(([*map(tuple, self.good)], problems, self.total), MARSHAL)


def checked_regions(given: Any, total: int | None = None) -> Regions:
    """The good ones of a row's regions; what is no region but a BadSample is one that cannot be
    read. `total`: of which `given` are the first. Raises BadSample when none is good, with what is
    wrong with the first."""
    given = _listed(given)
    if given is None or isinstance(given, list) and not given:
        raise BadSample("no-value", "no region is given")
    if not isinstance(given, list):
        raise BadSample(
            "invalid-row", f"the regions are {given!r:.100}; a list of {{box, text}} is needed"
        )
    found = Regions([], [], [], total or len(given))
    for each in given[:REGION_LIMIT]:
        try:
            found.good.append(_checked(each, found.phrases))
        except BadSample as problem:
            found.dropped.append(problem)
    if found.total > REGION_LIMIT:
        found.dropped.append(_too_many(found.total, "regions"))
    if not found.good:
        raise found.dropped[0]
    return found


def placed(regions: Regions, width: int, height: int, orientation: int) -> list[Region]:
    """The regions on their image; those that are not on it go from the good to the dropped ones.
    `width`, `height`: of the image as shown, in pixels; `orientation`: EXIF's, of its file."""
    is_swapped = orientation in SIDES_SWAPPED
    if is_swapped:
        width, height = height, width
    is_mirrored, is_flipped = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    found: list[Region] = []
    given = regions.good[:]
    regions.good.clear()
    # without loops over the four edges, which would take a third of the time of an index
    for each in given:
        (x1, y1, x2, y2), is_relative, phrases, negatives = each
        if not is_relative:
            x1, y1, x2, y2 = x1 / width, y1 / height, x2 / width, y2 / height
        least = INSIDE * (x2 - x1) * (y2 - y1)
        x1, y1 = 0.0 if x1 < 0 else x1, 0.0 if y1 < 0 else y1
        x2, y2 = 1.0 if x2 > 1 else x2, 1.0 if y2 > 1 else y2
        if x1 >= x2 or y1 >= y2 or (x2 - x1) * (y2 - y1) < least:
            regions.dropped.append(_outside(each, width, height))
            continue
        if is_swapped:
            x1, y1, x2, y2 = y1, x1, y2, x2
        if is_mirrored:
            x1, x2 = 1 - x2, 1 - x1
        if is_flipped:
            y1, y2 = 1 - y2, 1 - y1
        # as `round` has it, in half the time
        x1, y1 = int(x1 * PARTS + 0.5) / PARTS, int(y1 * PARTS + 0.5) / PARTS
        x2, y2 = int(x2 * PARTS + 0.5) / PARTS, int(y2 * PARTS + 0.5) / PARTS
        if x1 < x2 and y1 < y2:
            found.append(Region((x1, y1, x2, y2), phrases, negatives))
            regions.good.append(each)
        else:
            regions.dropped.append(_empty(each.box))
    return found


def written(regions: Sequence[Region]) -> str:
    """As the index keeps them."""
    return ENCODER.encode(regions) if regions else ""


def read(text: str) -> list[Region]:
    """What was `written`."""
    found = json.loads(text) if text else []
    return [Region(tuple(box), tuple(texts), tuple(not_true)) for box, texts, not_true in found]


def _checked(region: Any, dropped: list[BadSample]) -> Given:
    """`dropped` gets what is wrong with phrases beside good ones. Raises BadSample."""
    if isinstance(region, BadSample):
        raise region
    if not isinstance(region, (dict, Mapping)):
        raise BadSample("invalid-row", f"a region is {region!r:.100}; {{box, text}} is needed")
    box, is_relative = _box_of(region)
    text, negatives = region.get("text"), region.get("negatives")
    try:
        phrases = _phrases(text, dropped)
    except BadSample as problem:
        if problem.reason not in NO_TEXT:
            raise
        raise BadSample(
            "no-phrase", f"the text of a region is {text!r:.100}; a text or several are needed"
        ) from None
    try:
        not_true = () if negatives in (None, []) else _phrases(negatives, dropped)
    except BadSample as problem:
        dropped.append(problem)
        not_true = ()
    return Given(box, is_relative, phrases, not_true)


def _box_of(region: Mapping[str, Any]) -> tuple[Box, bool]:
    """Its box, and whether that is of fractions. Raises BadSample."""
    has_corners = region.get("box") is None
    given, unit = region.get("xyxy" if has_corners else "box"), region.get("unit")
    numbers = plain(_listed(given))
    try:
        x1, y1, x2, y2 = map(float, numbers)
        is_finite = abs(x1) + abs(y1) + abs(x2) + abs(y2) < math.inf  # nor is one NaN
        is_usual = {*map(type, numbers)} <= {int, float}
        is_good = is_finite and (is_usual or all(map(_is_number, numbers)))
    except (ValueError, TypeError, OverflowError):
        is_good = False
    if not is_good:
        raise BadSample(
            "invalid-box", f"a box is {given!r:.100}; four numbers are needed, {NEEDED}"
        )
    if unit not in UNITS:
        raise BadSample("invalid-box", f"its unit is {unit!r:.100}; pixels or relative is needed")
    if unit == "relative" and max(x1, y1, x2, y2) > 1 + ROUNDING:
        raise BadSample(
            "not-relative",
            f"a box is {numbers}, called relative; are these pixels? Leave out the unit",
        )
    if has_corners and (x1 > x2 or y1 > y2):
        raise BadSample("inverted-box", f"a box is xyxy: {numbers}; x1 <= x2, y1 <= y2 are needed")
    box = (x1, y1, x2, y2) if has_corners else (x1, y1, x1 + x2, y1 + y2)
    if box[0] >= box[2] or box[1] >= box[3]:
        raise _empty(numbers)
    return box, unit == "relative"


def _phrases(given: Any, dropped: list[BadSample]) -> tuple[str, ...]:
    """The good ones. Raises BadSample when none is."""
    if isinstance(given, str):
        check_caption(given)
        return (str(given),)  # numpy has texts of its own kind
    given = _listed(given)
    if isinstance(given, list) and len(given) > REGION_LIMIT:
        dropped.append(_too_many(len(given), "texts of a region"))
        given = given[:REGION_LIMIT]
    found = checked_captions(given)
    dropped += found.dropped
    return tuple(map(str, found.good))


def _listed(given: Any) -> Any:
    if hasattr(given, "tolist"):
        given = given.tolist()  # of numpy or pandas
    return list(given) if isinstance(given, tuple) else given


def _is_number(given: Any) -> bool:
    # float() reads texts, too
    return isinstance(given, Real) and not isinstance(given, bool)


def _empty(box: Sequence[float]) -> BadSample:
    return BadSample("empty-box", f"a box is {[*box]}; a width and a height are needed")


def _outside(region: Given, width: int, height: int) -> BadSample:
    of = f"of {width} x {height} pixels in its file"
    sides = "fractions of its sides" if region.is_relative else of
    return BadSample(
        "outside-image", f"xyxy: {[*region.box]} is to more than half outside of the image, {sides}"
    )


def _too_many(number: int, what: str) -> BadSample:
    return BadSample(
        "too-many-regions", f"{number:,} {what} are given; the first {REGION_LIMIT:,} are used"
    )
