"""Bad inputs and the words of the messages that refuse them; " … " stands for any text between."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def pattern(words: str) -> str:
    return "(?s)" + ".*".join(map(re.escape, words.split(" … ")))


def refused(words: str) -> Any:
    return pytest.raises(ValueError, match=pattern(words))


def not_refused(call: Callable, cases: Iterable[tuple]) -> list[tuple]:
    """Of cases (*arguments, words): those that `call` accepts, or refuses in other words."""
    found = []
    for *arguments, words in cases:
        message = "accepted"
        try:
            call(*arguments)
        except ValueError as error:
            message = str(error)
        if not re.search(pattern(words), message):
            found.append((arguments, words, message))
    return found
