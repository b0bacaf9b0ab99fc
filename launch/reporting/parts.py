"""What a report is made of. A part of a section is one of these or a `str`, a paragraph."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from launch.run.queries import MOST_LETTERS
from launch.terminal.tables import Table


@dataclass(frozen=True)
class Chart:
    """A figure, a table with the same numbers, and a sentence for who cannot see it. `name` is
    unique on the page."""

    name: str
    title: str
    figure: go.Figure
    table: Table
    summary: str
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Facts:
    """What is known of a run, as (name, value)."""

    title: str
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Gallery:
    """Queries of a held-out set with their answers, see `launch/run/queries.py`: by direction, such
    as `image → text`, the modality of the queries, that of the answers, and the queries. `samples`:
    by the names that queries and answers have."""

    title: str
    asked: Mapping[str, tuple[str, str, Sequence[Mapping[str, Any]]]]
    samples: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    parts: Sequence[Any]


def escaped(text: Any) -> str:
    """For labels of figures, of which plotly would take tags such as <b> as markup."""
    return html.escape(str(text), quote=False)


def words(value: Any) -> str:
    """A text as it is, anything else as JSON; what is long is cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"
