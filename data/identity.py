"""Which content a file has, as far as that is known without reading it, and the names of what is kept
about it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """Equal for a file that has not changed. `size`: bytes. `mtime_ns`: time of the last change of a
    local file, never 0. `etag`: of a file in a store, where it has none the time of its last change.
    """

    size: int
    mtime_ns: int = 0
    etag: str = ""

    @staticmethod
    def of(status: os.stat_result) -> Identity:
        """The identity of a local file."""
        return Identity(status.st_size, status.st_mtime_ns or 1)

    @property
    def key(self) -> int:
        """A number for arrays, from 1 to 2^63 - 1; 0 of MISSING."""
        return 0 if self == MISSING else (int(fingerprint(self)[:16], 16) >> 1) or 1


MISSING = Identity(-1, -1)  # of what is not there


def fingerprint(what: Any) -> str:
    """A hash that is equal for what is equal by its `repr`."""
    words = repr(what).encode(errors="backslashreplace")
    return hashlib.blake2b(words, digest_size=12).hexdigest()


def kept_name(kind: str, version: int, *made_of: Any) -> str:
    """The name of a file that is kept. It is another one for another `version` of the code that
    writes it, and for each change of what its content is `made_of`: the identities of files,
    filters, tokenizers. So what is found under it never has to be doubted."""
    return f"{kind}-{version}-{fingerprint(made_of)}"
