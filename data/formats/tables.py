"""Data sets as text files with a line per sample: JSON lines, `{"image_path": "a/b.png", "text": "a
red apple", "id": "b"}`, or a JSON list of such objects, and comma- or tab-separated tables as
OpenCLIP reads them, with the columns `filepath` and `title`."""

import contextlib
import csv
import heapq
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, TextIO

from common.files import refuse_longer
from common.spelling import near
from data.bad_samples import BadSample
from data.clips import KEYS as SPAN
from data.clips import checked_span
from data.formats.rows import (
    BESIDE,
    DEFAULT_PAIRS,
    LIST_LIMIT,
    EntriesFormat,
    Roots,
    attempt,
    second_value,
    take_captions,
)
from data.formats.specs import ROOT, existing, names_of, split_options
from data.regions import BOX_OPTIONS, BoxOptions
from data.stored.kinds import STORED, files_of, is_file, names_of_rows, stored
from data.stored.record import JSON, TABLE

NAMES = {"id": ("id",), "language": ("language",)}  # beside the modalities
JSONL = "jsonl:FILE or jsonl:FILE?image=KEY&text=KEY&audio=KEY&video=KEY&id=KEY&language=KEY"
JSONL += "&root=DIR"
LINE = (
    'JSON lines {"image_path": "path.png", "text": "a caption" or ["several", "captions"], '
    '"id": "optional name", "language": "optional, of the text"}'
)
READING = (*BOX_OPTIONS, "captions")  # how boxes and texts are read
LINE_LIMIT = 16 << 20  # bytes, or characters of a table
LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")  # how a JSON list of objects begins
BETWEEN = (" ", "\t", "\r", "\n", ",")  # two of its objects

FIELD_LIMIT = 1 << 20  # characters; a quote that is never closed takes no more than this with it
# Stands for the character NUL within the reader, which before Python 3.11 refuses the whole row; no
# other byte is read as it.
NUL = "\udc00"


class JsonlFormat(EntriesFormat):
    """Paths count from the file's folder, then from each further root. A file that begins with `[{`
    is one JSON list. Rows of FG-CLIP's data are read as they are. A film with `segments`, a list of
    {"start_s", "end_s", "text"}, is a sample for each, whose id is the film's, # and its number;
    with `near=K` it has the texts of the K - 1 segments that are nearest in time as well, behind
    its own."""

    unit = "B"
    caption_ways = ("lines",)

    def __init__(self, where: str) -> None:
        """`where`: `FILE[?image=KEY&…&near=K&root=DIR]`. Errors: ValueError, FileNotFoundError."""
        usual = names_of_rows(JSON) | NAMES
        known = (*usual, *READING, "near", ROOT)
        name, options, more = split_options("jsonl", where, known)
        spec = f"data spec 'jsonl:{where}':"
        self.boxes = BoxOptions.of(spec, options)
        self.captions = take_captions(spec, options, self.caption_ways)
        self.near = number_of_texts(spec, options)
        self.files = [existing(spec, name, "file", f"a file of {LINE}: {JSONL}")]
        self.keys = names_of(usual, options)
        self.holds = tuple(name for name in STORED if name in usual)
        self.roots = Roots.of(os.path.dirname(self.file), more)
        self.spec = f"jsonl:{self.file}{options or ''}{self.roots.options()}"
        self.spec += f"?near={self.near}" if self.near > 1 else ""
        self.spec += self.boxes.words() + (f"?captions={self.captions}" if self.captions else "")

    @cached_property
    def _is_list(self) -> bool:
        with open(self.file, "rb") as file:
            return LIST.match(file.read(1 << 16)) is not None

    def where(self, file: str, path: str, number: int) -> str:
        return f"{file}#[{number}]" if self._is_list else super().where(file, path, number)

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        if self._is_list:
            yield from list_entries(self.file)
            return
        number = 0
        with open(self.file, "rb") as file:
            while line := file.readline(LINE_LIMIT):
                number += 1
                size = len(line)
                # What is left of a line that is far too long is passed over.
                while len(line) == LINE_LIMIT and not line.endswith(b"\n"):
                    rest = file.readline(LINE_LIMIT)
                    size += len(rest)
                    if len(rest) < LINE_LIMIT or rest.endswith(b"\n"):
                        line = b""
                if line.strip() or size >= LINE_LIMIT:
                    yield (number, line), size

    def values(self, content: Any) -> Any:
        if content == b"":
            raise BadSample("invalid-row", f"the line has more than {LINE_LIMIT:,} bytes")
        is_line = isinstance(content, bytes)
        fields = parsed_object(content, "the line") if is_line else an_object(content, "the entry")
        fields = with_usual_keys(fields)
        segments = fields.get("segments")
        if not isinstance(segments, list) or not any(stored(m).beside for m in self.modalities):
            return self._values(fields)
        rows = [attempt(self._of_segment, fields, k) for k in range(len(segments))]
        return rows if self.near == 1 else with_near_texts(rows, self.near)

    def _of_segment(self, fields: dict[str, Any], k: int) -> dict[str, Any]:
        own = an_object(fields["segments"][k], f"segment {k}")
        values = self._values({**fields, **own})
        if "id" not in own and values["id"] is not None:
            values["id"] = f"{values['id']}#{k}"
        return values

    def _values(self, fields: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for what, keys in self.keys.items():
            given = [fields[key] for key in keys if key in fields]
            values[what] = next((value for value in given if value is not None), None)
            if len(given) > 1 and what in self.modalities:
                filled = [key for key in keys if fields.get(key) not in (None, "")]
                beside = [second_value("key", key, filled[0]) for key in filled[1:]]
                values[BESIDE] = [*values.get(BESIDE, ()), *beside]
            if not given and self.pairs == DEFAULT_PAIRS and what in self.modalities:
                wanted = keys[0] if keys else what
                hint = near(wanted, fields)
                hint += hint and f" or name it: ?{what}=KEY"
                # clips or sounds, without the pairs that read them
                for other in files_of():
                    own = () if other.name in self.modalities else other.names_in(JSON)
                    if found := next((key for key in own if key in fields), None):
                        hint = f"; '{found}' is read with --pairs {other.name}:text"
                listed = ", ".join(fields) or "none"
                detail = f"no key '{wanted}'; given: {listed}{hint}"
                values[what] = BadSample("invalid-row", detail)
        return values


def chosen_columns(
    spec: str,
    columns: Sequence[str],
    usual: dict[str, tuple[str, ...]],
    options: dict[str, str],
    made: str | None = None,
) -> dict[str, str]:
    """What a table has -> its column, the first of `names_of`. Images and texts are needed unless
    there are other files, such as sounds, to compare one of them with. `made`: the column that texts
    are made of. `spec` begins messages. Errors: ValueError."""
    names = names_of(usual, options)
    found = {key: name for key in usual for name in reversed(names[key]) if name in columns}
    found |= {} if made is None else {"text": made}
    needed, files = {*options}, [key for key in found if is_file(key)]
    if not {*files} - {*DEFAULT_PAIRS[0]}:
        needed |= {*DEFAULT_PAIRS[0]}
    elif len(files) == 1:
        needed.add("text")  # a sound or a film alone is compared with nothing
    for key in usual:
        if key in needed and key not in found:
            wanted = names[key] or (key,)
            raise ValueError(
                f"{spec} no column {' or '.join(wanted)}; there are: "
                f"{', '.join(columns) or 'none'}{near(wanted[0], columns)}; name it: "
                f"?{key}=COLUMN"
            )
    return found


def named_kinds(options: dict[str, str]) -> str:
    """Of a spec: the modalities whose columns the options give, beside which no others are counted."""
    named = [key for key in options if key in STORED]
    return f"?named={'+'.join(named)}" if named else ""


def number_of_texts(spec: str, options: dict[str, str]) -> int:
    """What `near=K` says, taken out of the options. `spec` begins the message. Errors:
    ValueError."""
    given = options.pop("near", "1")
    if not (given.isdecimal() and int(given) >= 1):
        raise ValueError(f"{spec} near '{given}': a whole number of texts from 1 is needed")
    return int(given)


def with_near_texts(rows: list[Any], number: int) -> list[Any]:
    """The segments of a film, each that has a text with those of the ones whose middles are nearest
    to its own, `number` with its own."""
    middles: dict[float, list[int]] = {}
    for k, row in enumerate(rows):
        with contextlib.suppress(BadSample, AttributeError):
            span = checked_span(*(row.get(key) for key in SPAN))
            said = row.get("text")
            if span.end_s is not None and said and not isinstance(said, BadSample):
                middles.setdefault((span.start_s + span.end_s) / 2, []).append(k)
    made = list(rows)
    times = sorted(middles)
    for at, time in enumerate(times):
        for k in middles[time]:
            others = (other for other in _by_distance(middles, times, at) if other != k)
            texts = [rows[other]["text"] for other in (k, *islice(others, number - 1))]
            one_each = [text[0] if isinstance(text, list) and text else text for text in texts[1:]]
            own = texts[0] if isinstance(texts[0], list) else [texts[0]]
            made[k] = rows[k] | {"text": [*own, *(text for text in one_each if text is not None)]}
    return made


def _by_distance(middles: dict[float, list[int]], times: Sequence[float], at: int) -> Iterator[int]:
    """The segments, by how far their middles are from a time, of equal ones the first first.
    `times`: sorted, so that no more of them are looked at than are taken."""
    yield from middles[times[at]]
    low, high = at - 1, at + 1
    while low >= 0 or high < len(times):
        below = times[at] - times[low] if low >= 0 else math.inf
        above = times[high] - times[at] if high < len(times) else math.inf
        nearest = []
        if below <= above:
            nearest.append(middles[times[low]])
            low -= 1
        if above <= below:
            nearest.append(middles[times[high]])
            high += 1
        yield from heapq.merge(*nearest)


def parsed_object(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises BadSample: invalid-row, invalid-utf8."""
    try:
        fields = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadSample(
            "invalid-utf8",
            f"{what} is not UTF-8: byte {content[error.start]:#04x} at position {error.start}; "
            "save it as UTF-8",
        ) from None
    except (ValueError, RecursionError) as error:
        # also of a number of thousands of digits, or of thousands of brackets
        raise BadSample("invalid-row", f"{what}: invalid JSON: {error}") from None
    return an_object(fields, what)


def an_object(fields: Any, what: str) -> dict[str, Any]:
    """Raises BadSample: invalid-row."""
    if isinstance(fields, BadSample):
        raise fields
    if not isinstance(fields, dict):
        raise BadSample(
            "invalid-row",
            f"{what}: a {type(fields).__name__} is given, an object {{...}} is needed",
        )
    return fields


def with_usual_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """A row of FG-CLIP's data with the usual keys beside its own, another row as it is."""
    if "f_path" not in fields:
        return fields
    texts = [fields[key] for key in ("caption", "short_caption") if key in fields]
    boxes = fields.get("bbox_info")
    regions = [*map(_region_of, boxes)] if isinstance(boxes, list) else boxes
    return {"image_path": fields["f_path"], "text": texts, "regions": regions} | fields


def _region_of(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    box, negatives = given.get("bbox"), given.get("short_expr_negs")
    return {
        "xyxy": box[:4] if isinstance(box, list) else box,  # a fifth number is a score
        "unit": given.get("unit", "relative"),
        "text": [given[key] for key in ("short_expr", "long_expr") if key in given],
        "negatives": [*negatives.values()] if isinstance(negatives, dict) else negatives,
    } | ({} if given.get("flag_short_neg", 1) else {"negatives": None})


def list_entries(file: str) -> Iterator[tuple[tuple[int, Any], int]]:
    """The entries of a file that is a JSON list, or several one behind the other, one by one, which
    takes less memory than all of them at once; where it breaks off a BadSample. Errors:
    ValueError."""
    refuse_longer(os.path.getsize(file), LIST_LIMIT, file)
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as opened:
        text = opened.read().lstrip()
    if text[:1] != "[":
        raise ValueError(f"{file}: it begins with {text[:20]!r}; a JSON list is needed")
    decode, number, at = json.JSONDecoder().raw_decode, 0, 1
    while True:
        while text[at : at + 1] in BETWEEN:
            at += 1
        if text[at : at + 1] == "]":
            if not (rest := text[at + 1 :].lstrip()):
                return
            if rest[0] == "[":
                text, at = rest, 1
                continue
        begin = at
        try:
            entry, at = decode(text, begin)
        except (ValueError, RecursionError) as error:
            wrong = BadSample("invalid-row", f"the rest of the list cannot be read: {error}")
            yield (number, wrong), len(text) - begin
            return
        yield (number, entry), at - begin
        number += 1


class TableFormat(EntriesFormat):
    """A csv or tsv file with a line of column names; sounds are in `audio_path` or `audio`, films
    in `video_path`, `video` or `video_id`. Paths count from the file's folder, then from each
    further root."""

    unit = "B"
    caption_ways = ("lines",)

    def __init__(self, kind: str, where: str) -> None:
        """`where`: `FILE[?image=COLUMN&…&separator=;&root=DIR]`. Errors: ValueError,
        FileNotFoundError."""
        usual = names_of_rows(TABLE) | NAMES
        known = (*usual, "captions", "separator", ROOT)
        name, options, more = split_options(kind, where, known)
        usage = f"{kind}:FILE or {kind}:FILE?image=COLUMN&text=COLUMN&audio=COLUMN&id=COLUMN"
        usage += "&language=COLUMN&separator=CHARACTER&root=DIR"
        spec = f"data spec '{kind}:{where}':"
        needed = f"a file of rows below a line of column names: {usage}"
        self.files = [existing(spec, name, "file", needed)]
        self.captions = take_captions(spec, options, self.caption_ways)
        self.separator = options.pop("separator", "\t" if kind == "tsv" else ",")
        if len(self.separator) != 1:
            raise ValueError(
                f"{spec} separator '{self.separator}': one character is needed (%09 is a tab)"
            )
        self.roots = Roots.of(os.path.dirname(self.file), more)
        header = self._header()
        self.num_columns = len(header)
        given = f"{spec} separator '{self.separator}' (or give another: ?separator=CHARACTER):"
        self.columns = chosen_columns(given, header, usual, options)
        self.positions = {key: header.index(column) for key, column in self.columns.items()}
        self.holds = tuple(key for key in STORED if key in self.columns)
        self.further = self._further(header, names_of(usual, options))
        self.spec = f"{kind}:{self.file}?{self.columns}{self.separator}{self.roots.options()}"
        self.spec += named_kinds(options)
        self.spec += f"?captions={self.captions}" if self.captions else ""

    def _further(
        self, header: list[str], names: dict[str, tuple[str, ...]]
    ) -> list[tuple[str, int, str]]:
        """Each column that may hold a modality of which another one is read: modality, position, and
        what to count of it."""
        return [
            (key, at, second_value("column", name, self.columns[key]))
            for key, position in self.positions.items()
            for at, name in enumerate(header)
            if name in names[key] and at != position
        ]

    def _header(self) -> list[str]:
        with self._opened() as file:
            try:
                return next(csv.reader(_noted(file, []), delimiter=self.separator), [])
            except csv.Error as error:
                raise ValueError(
                    f"{self.file}: the first line cannot be read ({error}); it has to name columns"
                ) from error

    def _opened(self) -> TextIO:
        # Bytes that are not UTF-8 become lone surrogates, which the checks of texts find.
        return open(self.file, encoding="utf-8-sig", errors="surrogateescape", newline="")

    def entries(self) -> Iterator[tuple[tuple[int, list[str] | BadSample], int]]:
        before = csv.field_size_limit(FIELD_LIMIT)
        try:
            with self._opened() as file:
                lines: list[str] = []  # of the row that is being read
                reader = csv.reader(_noted(file, lines), delimiter=self.separator)
                position, start = 0, 1
                while True:
                    try:
                        fields: list[str] | BadSample = next(reader)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        fields = _problem(error)
                    # a file's buffer; typeshed knows only what any buffer has
                    read = file.buffer.tell()  # type: ignore[attr-defined]
                    if start > 1:  # after the column names
                        for number, row in self._apart(start, lines, fields):
                            yield (number, row), read - position
                            position = read
                    start = reader.line_num + 1
                    lines.clear()
        finally:
            csv.field_size_limit(before)

    def _apart(
        self, start: int, lines: list[str], fields: list[str] | BadSample
    ) -> Iterator[tuple[int, list[str] | BadSample]]:
        """The row of these lines; or, where a quote that is not closed joined several rows, each
        line by itself and the first with what is wrong. Blank lines are passed over."""
        if isinstance(fields, list) and any(map(self._is_a_row, lines[1:])):
            fields = BadSample(
                "invalid-row", f"a quote is not closed, and took {len(lines) - 1} lines along"
            )
        if fields:
            yield start, fields
        for number, line in enumerate(lines[1:], start + 1):
            if isinstance(fields, BadSample) and (row := self._cells(line)):
                yield number, row

    def _is_a_row(self, line: str) -> bool:
        """Whether a line within a row, read by itself, is a row that names a file. One that
        ends a text of several lines has a quote too many for that."""
        cells = self._cells(line)
        if isinstance(cells, list) and len(cells) == self.num_columns and not line.count('"') % 2:
            at = next((self.positions[key] for key in self.positions if is_file(key)), 0)
            with contextlib.suppress(BadSample):
                self.roots.find(cells[at])
                return True
        return False

    def _cells(self, line: str) -> list[str] | BadSample:
        try:
            return next(csv.reader([line], delimiter=self.separator), [])
        except csv.Error as error:
            return _problem(error)

    def values(self, content: list[str] | BadSample) -> dict[str, Any]:
        if isinstance(content, BadSample):
            raise content
        given = f"{len(content)} column{'s' if len(content) != 1 else ''}"
        # a row may end before these
        needed = [key for key in self.columns if key == "id" or key in STORED]
        if len(content) <= max(self.positions[key] for key in needed):
            names = ", ".join(self.columns[key] for key in needed)
            raise BadSample("invalid-row", f"{given}, but {names} are further on")
        if any(map(str.strip, content[self.num_columns :])):
            raise BadSample(
                "invalid-row",
                f"{given}, but the first line names {self.num_columns}; put a text that holds "
                f"'{self.separator}' in quotes",
            )
        cells = {
            key: content[position].replace(NUL, "\0")
            for key, position in self.positions.items()
            if position < len(content)
        }
        # An empty cell is how a table says that there is no file.
        values: dict[str, Any] = cells | {
            kind.name: cells.get(kind.name) or None for kind in files_of()
        }
        if self.further:
            values[BESIDE] = [
                what
                for key, at, what in self.further
                if key in self.modalities and any(map(str.strip, content[at : at + 1]))
            ]
        return values


def _noted(file: TextIO, lines: list[str]) -> Iterator[str]:
    """The lines of a file for the reader, which also go to `lines`. One of gigabytes, which may be
    a hole in the file, comes in pieces, each of which is refused as a field."""
    while line := file.readline(LINE_LIMIT):
        lines.append(line.replace("\0", NUL))
        yield lines[-1]


def _problem(error: csv.Error) -> BadSample:
    if "field limit" in str(error):
        return BadSample(
            "huge-caption",
            f"a column has more than {FIELD_LIMIT:,} characters; is a quote not closed?",
        )
    return BadSample("invalid-row", str(error))
