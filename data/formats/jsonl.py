"""A data set as a file of JSON lines: `{"image_path": "a/b.png", "text": "a red apple", "id":
"b"}`."""

import contextlib
import difflib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from data.formats.rows import (
    DEFAULT_PAIRS,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    checked_id,
    checked_language,
    in_parts,
    place,
    place_audio,
    stamp,
    take_captions,
)
from data.formats.specs import ROOT, local_file, split_options
from data.index.bad_samples import BadSample

# Of each, the first that a line has. Hugging Face's metadata.jsonl has `file_name`.
KEYS = {
    "image": ("image_path", "file_name"),
    "text": ("text",),
    "audio": ("audio_path", "audio"),
    "id": ("id",),
    "language": ("language",),
}
USAGE = "jsonl:FILE or jsonl:FILE?image=KEY&text=KEY&audio=KEY&id=KEY&language=KEY&root=DIR"
FORMAT = '{"image_path": "path.png", "text": "a caption" or ["several", "captions"], "id": "optional name", "language": "optional, of the text"}'
LINE_LIMIT = 16 << 20  # bytes


class JsonlFormat(Format):
    """The samples of one JSON-lines file, in file order. Paths count from the file's folder, then
    from each further root."""

    unit = "B"
    holds = ("image", "text", "audio")

    def __init__(self, where: str) -> None:
        """`where`: `FILE[?image=KEY&text=KEY&audio=KEY&id=KEY&language=KEY&root=DIR]`. Errors:
        ValueError, FileNotFoundError."""
        name, options, more = split_options("jsonl", where, (*KEYS, ROOT))
        self.file = local_file("jsonl", name, USAGE, f"JSON lines {FORMAT}")
        # a key that is named for one thing is not read as another by its usual name
        self.keys = {
            what: (options[what],)
            if what in options
            else tuple(key for key in usual if key not in options.values())
            for what, usual in KEYS.items()
        }
        self.roots = Roots.of(os.path.dirname(self.file), more)
        self.spec = f"jsonl:{self.file}{options or ''}{self.roots.options()}"

    def fingerprint(self) -> list[Stamp]:
        return [stamp(self.file)]

    def total(self) -> int:
        return os.path.getsize(self.file)

    def parts(self) -> Iterator[Part]:
        return in_parts(self.file, self._lines())

    def _lines(self) -> Iterator[tuple[tuple[int, bytes], int, int]]:
        number = 0
        with open(self.file, "rb") as file:
            while line := file.readline(LINE_LIMIT):
                number += 1
                size = len(line)
                while len(line) == LINE_LIMIT and not line.endswith(
                    b"\n"
                ):  # far too long: what is left is passed over
                    rest = file.readline(LINE_LIMIT)
                    size += len(rest)
                    if len(rest) < LINE_LIMIT or rest.endswith(b"\n"):
                        line = b""
                if line.strip() or size >= LINE_LIMIT:
                    yield (number, line), len(line), size

    def rows(self, part: Part) -> Iterator[Row]:
        for number, line in part.content:
            row = Row(id=str(number), number=number)
            try:
                self._fill(row, line)
            except BadSample as problem:
                row.problem = problem
            yield row

    @cached_property
    def _languages(self) -> dict[int, str | int]:
        """Of the lines that say it: read when the first is asked for, from the whole file."""
        found: dict[int, str | int] = {}
        key = next(iter(self.keys["language"]), "")
        # other keys may be written with escapes
        word = json.dumps(key).encode() if key.isascii() else b""
        for (number, line), _, _ in self._lines():
            if word in line:
                with contextlib.suppress(BadSample):
                    language = checked_language(_fields(line).get(key))
                    found |= {} if language is None else {number: language}
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_languages"}

    def language(self, number: int) -> str | int | None:
        return self._languages.get(number)

    def _fill(self, row: Row, line: bytes) -> None:
        fields = _fields(line)
        found = {}
        for what, keys in self.keys.items():
            given = [fields[key] for key in keys if key in fields]
            if given:
                found[what] = next((value for value in given if value is not None), None)
        row.id = checked_id(found.get("id"), row.id)
        for what in ("image", "text") if self.pairs == DEFAULT_PAIRS else ():
            if what not in found:
                raise BadSample("invalid-row", self._without(what, fields))
        self.fill(
            row,
            {
                "text": lambda: take_captions(row, found.get("text")),
                "image": lambda: _take_image(row, self.roots, found),
                "audio": lambda: place_audio(row, self.roots, found.get("audio")),
            },
        )

    def _without(self, what: str, fields: dict) -> str:
        """For the message of a line without a key."""
        key = (self.keys[what] or KEYS[what])[0]
        close = difflib.get_close_matches(key, fields, n=1, cutoff=0.4)
        hint = f"; rename '{close[0]}'? or name it: ?{what}={close[0]}" if close else ""
        return f"no key '{key}'; given: {', '.join(fields) or 'none'}{hint}"


def _take_image(row: Row, roots: Roots, found: dict) -> None:
    if "image" not in found:
        raise BadSample("no-value", "no image is given")
    place(row, roots, found["image"])


def _fields(line: bytes) -> dict:
    if not line:
        raise BadSample("invalid-row", f"the line has more than {LINE_LIMIT:,} bytes")
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        detail = f"not UTF-8: byte {line[error.start]:#04x} at position {error.start}; save the file as UTF-8"
        raise BadSample("invalid-utf8", detail) from None
    except json.JSONDecodeError as error:
        raise BadSample(
            "invalid-row", f"invalid JSON: {error.msg} at column {error.colno}"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, thousands of brackets
        raise BadSample("invalid-row", f"invalid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadSample(
            "invalid-row", f"a {type(fields).__name__} is given, an object {{...}} is needed"
        )
    return fields
