"""Moments of a film: seconds of it, and phrases that say what is seen then.

A row gives them as `{"start_s": 2.5, "end_s": 4, "text": "…" or ["…"], "negatives": ["…"]}`, in
seconds since the film's beginning, as the clip of a row is given. What lies outside of the clip of
its sample is cut off.
"""

from collections.abc import Mapping
from typing import Any

from data.annotations import Annotation, Annotations, checked_text
from data.bad_samples import BadSample
from data.clips import KEYS, checked_span

INSIDE = 0.5  # of a moment's seconds that the clip has at least
DIGITS = 3  # of seconds that are kept


def checked_moment(given: Mapping[str, Any], dropped: list[BadSample]) -> Annotation:
    """`dropped` gets what is wrong with phrases beside good ones. Raises BadSample."""
    try:
        span = checked_span(*(given.get(key) for key in KEYS))
    except BadSample as problem:
        raise BadSample("invalid-span", f"of a moment {problem.detail}") from None
    if span.end_s is None:
        needed = f"{' and '.join(KEYS)}, in seconds of the film, are needed"
        raise BadSample("invalid-span", f"a moment has no {KEYS[1]}; {needed}")
    return Annotation((span.start_s, span.end_s), *checked_text(given, dropped, "moment"))


def placed_moments(found: Annotations, start_s: float, end_s: float) -> list[Annotation]:
    """The moments within a clip, cut to it; those that are not in it go from the good to the
    dropped ones."""
    given, shown = found.good[:], []
    found.good.clear()
    for each in given:
        start, end = each.extent
        within = round(max(start, start_s), DIGITS), round(min(end, end_s), DIGITS)
        if within[1] - within[0] < INSIDE * (end - start) or within[0] >= within[1]:
            found.dropped.append(
                BadSample(
                    "outside-clip",
                    f"from {start:g} to {end:g} seconds is to more than half outside of the clip, "
                    f"from {start_s:g} to {end_s:g}",
                )
            )
            continue
        found.good.append(each)
        shown.append(each._replace(extent=within))
    return shown
