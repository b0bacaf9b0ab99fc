"""Clips: the parts of films that samples are of."""

import contextlib
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from common.output import brief
from data.bad_samples import BadSample
from data.values import plain

KEYS = ("start_s", "end_s")
"""How rows name where a clip begins and ends."""
BEHIND_S = 0.5  # lists of clips round to whole seconds


class Span(NamedTuple):
    """Seconds since a film's beginning, as players count; None: its end."""

    start_s: float = 0.0
    end_s: float | None = None


WHOLE_FILM = Span()


@dataclass(frozen=True)
class Clip:
    """What a sample has of a film. `film`: the path of its file, or its bytes."""

    film: str | bytes
    start_s: float
    end_s: float


def checked_span(start_s: Any, end_s: Any) -> Span:
    """Where a row's clip begins and ends, as far as that is known without its film; None, and what
    is not a number, as tables have it: not given. Raises BadSample: invalid-row, empty-segment."""
    start, end = (_seconds(given, key) for key, given in zip(KEYS, (start_s, end_s)))
    span = Span(start or 0.0, end)
    if span.start_s < 0 or end is not None and end <= span.start_s:
        shown = "the film's end" if end is None else f"{end:g}"
        raise BadSample(
            "empty-segment",
            f"from {span.start_s:g} to {shown} seconds; 0 <= start_s < end_s is needed",
        )
    return span


def placed_span(span: Span, film_s: float, first_s: float = 0.0) -> tuple[float, float]:
    """Start and end on a film of `film_s` seconds whose first picture comes at `first_s`: an end
    behind the film's is cut to it. Raises BadSample: outside-film, for a clip that shows
    nothing."""
    end = film_s if span.end_s is None else span.end_s
    if span.start_s >= film_s or end <= first_s:
        began = f"; its picture begins at {first_s:.2f}" if first_s else ""
        raise BadSample(
            "outside-film",
            f"from {span.start_s:g} to {end:g} seconds; the film has {film_s:.2f}{began}",
        )
    return span.start_s, min(end, film_s)


def is_cut(span: Span, end_s: float) -> bool:
    """Whether a clip that ends at `end_s` was to be longer, by more than lists of clips round."""
    return span.end_s is not None and span.end_s > end_s + BEHIND_S


def _seconds(given: Any, key: str) -> float | None:
    if isinstance(given, str):
        if not given.strip():
            return None  # an empty cell of a table
        with contextlib.suppress(ValueError):  # it is refused below
            given = float(given)
    given = plain(given)
    if given is None or isinstance(given, Real) and math.isnan(given):
        return None
    if not isinstance(given, Real) or isinstance(given, bool) or not math.isfinite(given):
        raise BadSample("invalid-row", f"{key} is {brief(given)}; seconds as a number are needed")
    return float(given)
