"""What is shown, recorded or sent has no credentials in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

HIDDEN = "***"
URL = re.compile(
    # found by its ://, whatever the scheme: to look for that first takes each letter's rest again
    r"(?<=[A-Za-z0-9+.-])(?P<begin>://)(?P<user>[^\s/?#'\"]*@)?"
    r"(?P<path>(?:(?!::)[^\s?#'\"])*)(?P<query>\?(?:(?!::)[^\s#'\"])*)?"
)
# Options of data specs, which stand where an address has its query.
OF_SPECS = frozenset(
    {
        "image",
        "text",
        "texts",
        "audio",
        "video",
        "region",
        "moment",
        "start_s",
        "end_s",
        "id",
        "label",
        "language",
    }
    | {"root", "split", "separator", "near", "captions", "boxes", "unit"}
    | {"names", "classnames", "templates"}
    | {"mixed", "where", "unseen", "unseen_by"}
)
SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
SHORTEST = 8  # characters of a value that is looked for everywhere


def redact(text: str) -> str:
    """`text` with *** for the user part and the query values of addresses, and for the values of
    environment variables that are named like a key, token, secret or password."""
    if "://" in text:
        text = URL.sub(_without_secrets, text)
    for value in _secrets_of_environment():
        text = text.replace(value, HIDDEN)
    return text


def redacted(value: Any) -> Any:
    """`redact` of every text in what JSON holds: a number that looks like a secret stays one."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            redact(key) if isinstance(key, str) else key: redacted(v) for key, v in value.items()
        }
    return [redacted(each) for each in value] if isinstance(value, (list, tuple)) else value


def _without_secrets(found: re.Match[str]) -> str:
    user = f"{HIDDEN}@" if found["user"] else ""
    query = "&".join(map(_without_value, (found["query"] or "").split("&")))
    return f"{found['begin']}{user}{found['path']}{query}"


def _without_value(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:  # a name alone, or a pattern such as part-?.parquet
        return word
    return word if key.lstrip("?") in OF_SPECS else f"{key}={HIDDEN}"


@lru_cache
def _secrets_of_environment() -> tuple[str, ...]:
    values = {
        value
        for name, value in os.environ.items()
        if SECRET_NAME.search(name) and len(value) >= SHORTEST and not os.path.exists(value)
    }
    return tuple(sorted(values, key=len, reverse=True))
