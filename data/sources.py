"""Where samples come from: the interface that every kind of data set offers, and the words that open one."""

import difflib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from PIL import Image

from data.demo import open_demo
from data.jsonl import open_jsonl


@runtime_checkable
class Source(Protocol):
    """A data set of numbered samples 0..len-1; each is one picture and one or more texts."""

    spec: str
    """What it was opened with, for example `jsonl:train.jsonl`."""

    def __len__(self) -> int: ...

    def identity(self, i: int) -> str:
        """A name of the sample that stays when other samples come or go; unique in the source."""

    def captions(self, i: int) -> list[str]:
        """At least one text, none of them empty."""

    def image(self, i: int) -> Image.Image:
        """The decoded picture, in whatever mode the file has."""

    def content_key(self, i: int) -> str:
        """Equal for two samples that show the same picture."""


@runtime_checkable
class ConceptSource(Source, Protocol):
    """A source that knows which samples are variants of one concept, so that whole concepts can be held out."""

    def family(self, i: int) -> str:
        """Equal for all skin tones and genders of one concept."""

    def toneless(self, i: int) -> str:
        """Equal for samples that differ in skin tone only."""


KINDS: dict[str, tuple[str, Callable[[str], Source]]] = {
    "demo": ("demo[:LANG+LANG]", open_demo),
    "jsonl": ("jsonl:FILE", open_jsonl),
}
"""Kind -> how it is written, and the function that opens it from what follows the colon."""


def open_source(spec: str) -> Source:
    """Open a data set by its spec, `KIND` or `KIND:WHERE`; see `KINDS`.

    Errors: ValueError for a spec or content that breaks a rule, FileNotFoundError for a missing file.
    """
    kind, _, where = spec.partition(":")
    if kind not in KINDS:
        known = ", ".join(usage for usage, _ in KINDS.values())
        near = difflib.get_close_matches(kind.lower(), KINDS, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else "give one of these."
        if kind.lower().endswith((".jsonl", ".json")):
            hint = f"did you mean 'jsonl:{spec}'?"
        raise ValueError(f"data spec '{spec}': unknown kind '{kind}'; known: {known}; {hint}")
    return KINDS[kind][1](where)
