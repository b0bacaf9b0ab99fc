"""What somebody may have meant, for messages that refuse a word."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(given: str, valid: Sequence[str]) -> str:
    """`; did you mean …?` with the valid word that is most like `given`; where none is, all valid ones."""
    near = difflib.get_close_matches(given, valid, 1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid keys: {', '.join(valid)}"
