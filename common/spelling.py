"""What somebody may have meant, for messages that refuse a word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields


def near(given: str, known: Iterable[str], before: str = "") -> str:
    """`; did you mean …?` with the known word that is most like `given`, and what is written
    `before` it; empty where none is."""
    of_case = {word: word for word in known}
    for words, word in ((of_case, given), ({w.lower(): w for w in of_case}, given.lower())):
        if found := difflib.get_close_matches(word, words, 1, cutoff=0.5):
            return f"; did you mean {before + words[found[0]]!r}?"
    return ""


def nearest(given: str, valid: Sequence[str]) -> str:
    """As `near`; where no word is like `given`, all valid ones."""
    return near(given, valid) or f"; valid keys: {', '.join(valid)}"


def nearest_pattern(pattern: str, names: Sequence[str]) -> str:
    """`; did you mean …?` with what else could be written for a pattern of parameters: a name, or
    all names below one of its parts."""
    parts = [name.split(".") for name in names]
    valid = sorted(
        {*names, *(".".join(part[:i]) + ".*" for part in parts for i in range(1, len(part)))}
    )
    near = difflib.get_close_matches(pattern, valid, 1, cutoff=0.5)
    return (
        f"; did you mean {near[0]!r}?"
        if near
        else f"; there are for example {', '.join(names[:: max(1, len(names) // 3)][:3])}"
    )


def keys_of(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]
