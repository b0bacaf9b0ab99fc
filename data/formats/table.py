"""A data set as comma- or tab-separated text with a line of column names, as OpenCLIP reads it:
`filepath`, `title`; sounds are in `audio_path` or `audio`."""

import contextlib
import csv
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TextIO

from data.formats.rows import (
    DEFAULT_PAIRS,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    checked_id,
    in_parts,
    locate,
    near,
    place,
    place_audio,
    stamp,
    take_captions,
)
from data.formats.specs import ROOT, local_file, split_options
from data.index.bad_samples import BadSample

OPTIONS = ("image", "text", "audio", "id", "language", "separator", ROOT)
AUDIO_COLUMNS = ("audio_path", "audio")
# stands for the character NUL within the reader, which before Python 3.11 refuses the whole row; no
# other byte is read as it
NUL = "\udc00"
LINE_LIMIT = 16 << 20  # characters
FIELD_LIMIT = 1 << 20  # characters; a quote that is never closed takes no more than this with it


class TableFormat(Format):
    """The rows of one csv or tsv file, in file order. Paths count from the file's folder, then from
    each further root."""

    unit = "B"

    def __init__(self, kind: str, where: str) -> None:
        """`where`: `FILE[?image=COLUMN&text=COLUMN&audio=COLUMN&id=COLUMN&language=COLUMN&separator=;&root=DIR]`.
        Errors: ValueError, FileNotFoundError."""
        name, options, more = split_options(kind, where, OPTIONS)
        usage = f"{kind}:FILE or {kind}:FILE?image=COLUMN&text=COLUMN&audio=COLUMN&id=COLUMN&separator=CHARACTER&root=DIR"
        self.file = local_file(kind, name, usage, f"rows below a line of column names: {usage}")
        self.columns = {
            key: options.get(key, default)
            for key, default in (("image", "filepath"), ("text", "title"), ("id", "id"))
        }
        self.separator = options.get("separator", "\t" if kind == "tsv" else ",")
        if len(self.separator) != 1:
            raise ValueError(
                f"data spec '{kind}:{where}': separator '{self.separator}': one character is "
                "needed (%09 is a tab)"
            )
        self.roots = Roots.of(os.path.dirname(self.file), more)
        header = self._header()
        self._look_for_audio(header, options)
        self.spec = f"{kind}:{self.file}?{self.columns}{self.separator}{self.roots.options()}"
        self.positions = self._positions(f"{kind}:{where}", header, options)
        self.num_columns = len(header)
        self.holds = tuple(key for key in ("image", "text", "audio") if key in self.positions)

    def _header(self) -> list[str]:
        with open(self.file, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            try:
                return next(csv.reader(_noted(file, []), delimiter=self.separator), [])
            except csv.Error as error:
                raise ValueError(
                    f"{self.file}: the first line cannot be read ({error}); it has to name columns"
                ) from error

    def _look_for_audio(self, header: list[str], options: dict[str, str]) -> None:
        """Adds the column of sounds where there is one. Beside it the image or the text is not
        needed. A column that is an image's or a text's by name holds no sounds."""
        taken = self.columns.values()
        wanted = (options["audio"],) if "audio" in options else AUDIO_COLUMNS
        found = next((name for name in wanted if name in header and name not in taken), None)
        if found or "audio" in options:
            self.columns["audio"] = found or options["audio"]

    def _positions(self, spec: str, header: list[str], options: dict[str, str]) -> dict[str, int]:
        needed = {"image", "text", *options} if "audio" not in self.columns else {*options}
        if "audio" in self.columns and not {*self.columns.values()} & {*header} - {
            self.columns["audio"],
            self.columns["id"],
        }:
            needed.add("text")  # a sound alone is compared with nothing
        columns = {**self.columns, "language": options.get("language", "language")}
        for key, column in columns.items():
            if column not in header and key in needed:
                raise ValueError(
                    f"data spec '{spec}': no column '{column}'; the first line names: "
                    f"{', '.join(header) or 'none'}{near(column, header)}; name it: "
                    f"?{key}=COLUMN, or another separator: ?separator=CHARACTER"
                )
        # apart from the others: a row may end before it
        self.language_position = (
            header.index(columns["language"]) if columns["language"] in header else None
        )
        return {
            key: header.index(column) for key, column in self.columns.items() if column in header
        }

    @cached_property
    def _languages(self) -> dict[int, str]:
        """Of the rows that say it: read when the first is asked for, from the whole file."""
        at = self.language_position
        found: dict[int, str] = {}
        if at is None:
            return found
        for (number, fields), _, _ in self._lines():
            if isinstance(fields, list) and len(fields) > at and fields[at]:
                found[number] = fields[at]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_languages"}

    def language(self, number: int) -> str | None:
        return self._languages.get(number)

    def fingerprint(self) -> list[Stamp]:
        return [stamp(self.file)]

    def total(self) -> int:
        return os.path.getsize(self.file)

    def parts(self) -> Iterator[Part]:
        return in_parts(self.file, self._lines())

    def _lines(self) -> Iterator[tuple[tuple[int, list[str] | BadSample], int, int]]:
        before = csv.field_size_limit(FIELD_LIMIT)
        try:
            # Bytes that are not UTF-8 become lone surrogates here, and are distinguished from text
            # when the row is checked.
            with open(
                self.file, encoding="utf-8-sig", errors="surrogateescape", newline=""
            ) as file:
                lines: list[str] = []  # of the row that is being read
                reader = csv.reader(_noted(file, lines), delimiter=self.separator)
                position, start, header = 0, 1, True
                while True:
                    try:
                        fields: list[str] | BadSample = next(reader)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        fields = _problem(error)
                    # a file's buffer; typeshed knows only what any buffer has
                    read = file.buffer.tell()  # type: ignore[attr-defined]
                    if not header:
                        for number, row in self._apart(start, lines, fields):
                            size = sum(map(len, row)) if isinstance(row, list) else 0
                            yield (number, row), size, read - position
                            position = read
                    start, header = reader.line_num + 1, False
                    lines.clear()
        finally:
            csv.field_size_limit(before)

    def _apart(
        self, start: int, lines: list[str], fields: list[str] | BadSample
    ) -> Iterator[tuple[int, list[str] | BadSample]]:
        """The row of these lines; or, where a quote that is not closed joined several rows, each
        line by itself and the first with what is wrong. Blank lines are passed over."""
        if isinstance(fields, list) and not self._joins(lines):
            if fields:
                yield start, fields
            return
        if isinstance(fields, list):
            fields = BadSample(
                "invalid-row", f"a quote is not closed, and took {len(lines) - 1} lines along"
            )
        yield start, fields
        for number, line in enumerate(lines[1:], start + 1):
            if row := self._cells(line):
                yield number, row

    def _joins(self, lines: list[str]) -> bool:
        """Is a line within a row, read by itself, a row that names a file that is there? One that
        ends a text of several lines has a quote too many for that."""
        at = self.positions.get("image", self.positions.get("audio", 0))
        for line in lines[1:]:
            cells = self._cells(line)
            if isinstance(cells, BadSample) or line.count('"') % 2:
                continue
            if len(cells) == self.num_columns:
                with contextlib.suppress(BadSample):
                    locate(self.roots, cells[at])
                    return True
        return False

    def _cells(self, line: str) -> list[str] | BadSample:
        try:
            return next(csv.reader([line], delimiter=self.separator), [])
        except csv.Error as error:
            return _problem(error)

    def rows(self, part: Part) -> Iterator[Row]:
        for number, fields in part.content:
            row = Row(id=str(number), number=number)
            try:
                if isinstance(fields, BadSample):
                    raise fields
                self._fill(row, fields)
            except BadSample as problem:
                row.problem = problem
            yield row

    def _fill(self, row: Row, fields: list[str]) -> None:
        if len(fields) <= max(self.positions.values()):
            given = f"{len(fields)} column{'s' if len(fields) != 1 else ''}"
            raise BadSample(
                "invalid-row",
                f"{given}, but {', '.join(self.columns[key] for key in self.positions)} are "
                "further on",
            )
        if any(map(str.strip, fields[self.num_columns :])):
            raise BadSample(
                "invalid-row",
                f"{len(fields)} columns, but the first line names {self.num_columns}; put a text "
                f"that holds '{self.separator}' in quotes",
            )
        values = {
            key: fields[position].replace(NUL, "\0") for key, position in self.positions.items()
        }
        row.id = checked_id(values.get("id"), row.id)
        self.fill(
            row,
            {
                "text": lambda: take_captions(row, values.get("text")),
                "image": lambda: _take_image(
                    row, self.roots, values, strict=self.pairs == DEFAULT_PAIRS
                ),
                # an empty field is how a table says that there is none
                "audio": lambda: place_audio(row, self.roots, values.get("audio") or None),
            },
        )


def _noted(file: TextIO, lines: list[str]) -> Iterator[str]:
    """The lines of a file for the reader, which also go to `lines`. One of gigabytes, which may be a
    hole in the file, comes in pieces, each of which is refused as a field."""
    while line := file.readline(LINE_LIMIT):
        lines.append(line.replace("\0", NUL))
        yield lines[-1]


def _take_image(row: Row, roots: Roots, given: dict[str, str], strict: bool) -> None:
    if not strict and not given.get("image"):
        raise BadSample("no-value", "no image is given")
    place(row, roots, given["image"])


def _problem(error: csv.Error) -> BadSample:
    if "field limit" in str(error):
        return BadSample(
            "huge-caption",
            f"a column has more than {FIELD_LIMIT:,} characters; is a quote not closed?",
        )
    return BadSample("invalid-row", str(error))


def open_csv(where: str) -> TableFormat:
    return TableFormat("csv", where)


def open_tsv(where: str) -> TableFormat:
    return TableFormat("tsv", where)
