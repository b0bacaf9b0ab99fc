"""Text from elsewhere in a Markdown document, which stays in its place."""

from __future__ import annotations

import re

from common.output import plain


def code(text: object) -> str:
    """A span of code in a line or a table: one line, whatever the text has in it."""
    said = plain(str(text)).replace("\n", "\\n").replace("\t", " ").replace("|", "\\|")
    ticks = "`" * (1 + max(map(len, re.findall("`+", said)), default=0))
    space = " " if len(ticks) > 1 else ""
    return f"{ticks}{space}{said}{space}{ticks}"


def fenced(text: str) -> str:
    """A block of code, with a fence longer than any that the text has."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{plain(text)}\n{fence}"


def words(text: object) -> str:
    """In a heading, a line or a cell of a table: no markup, no tag, one line."""
    said = " ".join(plain(str(text)).split())
    return re.sub(r"([\\`*_\[\]<>|#~!&])", r"\\\1", said)
