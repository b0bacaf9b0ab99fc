"""Texts in data sets: one for a sample, or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data.bad_samples import Captions, checked_captions
from data.stored.record import PARQUET, TABLE, Stored

if TYPE_CHECKING:
    from data.formats.rows import Format, Sample


class StoredText(Stored):
    in_formats = True

    def texts(self) -> tuple[str, ...]:
        return ("label",)  # its class; the captions are a list

    def check(self, value: Any, sample: Sample, row: Mapping[str, Any], format: Format) -> None:
        if format.captions == "lines" and not isinstance(value, Captions):
            value = lines_of(value)
        found = value if isinstance(value, Captions) else checked_captions(value)
        sample.captions, sample.dropped = found


def lines_of(texts: Any) -> Any:
    """A text, or several, as one for each line; what is no text stays."""
    if hasattr(texts, "tolist"):
        texts = texts.tolist()  # of numpy or pandas
    every = texts if isinstance(texts, (list, tuple)) else [texts]
    return [
        line
        for each in every
        for line in ((each.splitlines() or [each]) if isinstance(each, str) else [each])
    ]


TEXT = StoredText(
    "text", {TABLE: ("title",), PARQUET: ("text", "caption", "title")}, several="texts"
)
