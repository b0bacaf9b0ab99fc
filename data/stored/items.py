"""Values of Python data sets as the bytes of files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from data.bad_samples import BadSample
from data.stored.roots import Roots, local_path

ANYWHERE = Roots(("/",))


def bytes_or_path(given: Any, modality: str) -> Any:
    """The content of a path, and of {bytes, path}, as Hugging Face's data sets give what they do
    not decode; all else as it is. Raises BadSample."""
    if isinstance(given, Mapping) and {"bytes", "path"} & {*given}:
        given = given.get("path") if given.get("bytes") is None else given["bytes"]
    if isinstance(given, (str, os.PathLike)):
        return ANYWHERE.read(local_path(os.fspath(given)), modality)
    return given


def encoded_file(given: Any) -> bytes:
    """Raises BadSample."""
    found = bytes_or_path(given, "file")
    if isinstance(found, bytes):
        return found
    raise BadSample(
        "unreadable", f"a {type(found).__name__}; bytes, a path or {{bytes, path}} is needed"
    )
