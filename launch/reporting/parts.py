"""What a section of a report is made of beside charts, and values in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.run.queries import MOST_LETTERS


@dataclass(frozen=True)
class Facts:
    """What is known of one run, as (name, value)."""

    title: str
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Gallery:
    """Queries of one held-out set, each with its answers: see `launch/run/queries.py`."""

    title: str
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Section:
    """`parts`: Facts, Gallery, Text, Chart or Table, in their order."""

    name: str
    title: str
    parts: Sequence[Any] = field(default_factory=tuple)


def words(value: Any) -> str:
    """JSON, and a text as it is; what is long is cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"


def count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def duration(value: float) -> str:
    """Of seconds."""
    minutes, rest = divmod(int(round(value)), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )


def beside(run: Any, runs: Sequence[Any]) -> str:
    """What stands before the title of a part that is of one of several runs."""
    return f"{run.label}: " if len(runs) > 1 else ""
