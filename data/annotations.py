"""Annotations: what is said of a place within one value, such as a box of an image or some seconds
of a film. `data/regions.py` and `data/moments.py` have the two kinds of places.

A row gives them as a list of objects, each with its place and `"text": "…" or ["…"]`, and with
`"negatives": ["…"]`, phrases that are not true of it. One with `"candidate": true` and no text is a
place that phrases of others may choose in an evaluation, and that training does not see.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.output import brief
from data.bad_samples import ANNOTATION_LIMIT, BadSample, check_caption, checked_captions

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
NO_TEXT = ("no-caption", "empty-caption", "invalid-row")


class Annotation(NamedTuple):
    """A place within a value, and what is said of it. `extent`: of a region x1, y1, x2, y2 in
    fractions 0..1 of the sides of the image as shown; of a moment start and end in seconds of the
    film. `phrases`: at least one; of a candidate none. `negatives`: phrases that are not true of
    it."""

    extent: tuple[float, ...]
    phrases: tuple[str, ...]
    negatives: tuple[str, ...] = ()


class Annotations(NamedTuple):
    """The good annotations of a row, as its kind checks them without the value that they are of;
    what is wrong with the others, and with phrases beside good ones; how many there are in all; and
    how many are in doubt, by what is (`data/box_checks.py`)."""

    good: list[Any]
    dropped: list[BadSample]
    phrases: list[BadSample]
    total: int
    doubts: Counter[str]

    @classmethod
    def none(cls, total: int) -> "Annotations":
        return cls([], [], [], total, Counter())


def checked_text(
    given: Mapping[str, Any], dropped: list[BadSample], name: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The phrases and the negatives of an annotation. `dropped` gets what is wrong with phrases
    beside good ones; `name`: of the kind, for messages. Raises BadSample."""
    text, negatives = given.get("text"), given.get("negatives")
    try:
        is_candidate = text is None and given.get("candidate") is True
        phrases = () if is_candidate else _phrases(text, dropped, name)
    except BadSample as problem:
        if problem.reason not in NO_TEXT:
            raise
        raise BadSample(
            "no-phrase", f"the text of a {name} is {brief(text)}; a text or several are needed"
        ) from None
    try:
        not_true = () if negatives in (None, []) else _phrases(negatives, dropped, name)
    except BadSample as problem:
        dropped.append(problem)
        not_true = ()
    return phrases, not_true


def written(annotations: Sequence[Annotation]) -> str:
    """As the index keeps them."""
    return ENCODER.encode(annotations) if annotations else ""


def read(text: str) -> list[Annotation]:
    """What was `written`."""
    found = json.loads(text) if text else []
    return [
        Annotation(tuple(extent), tuple(texts), tuple(not_true))
        for extent, texts, not_true in found
    ]


def listed(given: Any) -> Any:
    """Lists of numpy, pandas and parquet, and tuples, as lists; what is no list stays."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    return list(given) if isinstance(given, tuple) else given


def too_many(number: int, reason: str, what: str) -> BadSample:
    return BadSample(
        reason, f"{number:,} {what} are given; the first {ANNOTATION_LIMIT:,} are used"
    )


def _phrases(given: Any, dropped: list[BadSample], name: str) -> tuple[str, ...]:
    """The good ones. Raises BadSample when none is."""
    if isinstance(given, str):
        check_caption(given)
        return (str(given),)  # numpy has texts of its own kind
    given = listed(given)
    if isinstance(given, list) and len(given) > ANNOTATION_LIMIT:
        dropped.append(too_many(len(given), f"too-many-{name}s", f"texts of a {name}"))
        given = given[:ANNOTATION_LIMIT]
    found = checked_captions(given)
    dropped += found.dropped
    return tuple(map(str, found.good))
