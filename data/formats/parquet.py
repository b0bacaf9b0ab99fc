"""A data set as parquet files: images and sounds as bytes (as Hugging Face writes them) or as
paths, and texts.

An image is read with its whole row group, of which the last one is kept: files with small row
groups are fast in any order (Hugging Face writes 100 rows), files with one large group are not.
"""

import math
import os
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.secrets import redact
from data.formats.rows import (
    DEFAULT_PAIRS,
    AudioFile,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    checked_id,
    near,
    place,
    place_audio,
    stamp,
    take_captions,
)
from data.formats.specs import (
    ROOT,
    absolute_pattern,
    expand,
    is_remote,
    local_copies,
    split_options,
)
from data.index.bad_samples import CAPTION_LIMIT, FILE_LIMIT, BadSample

OPTIONS = ("image", "text", "audio", "id", ROOT)
USAGE = (
    "parquet:FILE_OR_PATTERN or "
    "parquet:FILE_OR_PATTERN?image=COLUMN&text=COLUMN&audio=COLUMN&id=COLUMN&root=DIR"
)
AUDIO_COLUMNS = ("audio", "audio_path")
IMAGE_COLUMNS = ("image", "image_path", "filepath")
TEXT_COLUMNS = ("text", "caption", "title")
# A dictionary page repeats one value of megabytes in thousands of rows for a few bytes each, so only
# what was decoded tells how large rows are, and they are decoded one by one.
ROWS_AT_ONCE = 1
# bytes of a row group that is kept; of a larger one only the rows up to the wanted one are read
KEPT_LIMIT = 256 << 20
ROW_BYTES = 1 << 10  # that a row counts at least
DECODED_FACTOR = 1000  # times the size of its file a row group may decode to, beside FILE_LIMIT
VALUES_LIMIT = 100_000_000  # of a column of a row group; lists have several in a row
TEXT_LIMIT = 1 << 20  # bytes of the texts of a row


class ParquetFormat(Format):
    """The rows of all files, in order. An id is that of the column `id`, else FILE/ROW.

    Where images or sounds are paths, these count from the files' folder, then from each further
    root; where they are bytes, roots change nothing. A row of {bytes, path} is read from its path
    where it has no bytes.
    """

    unit = "row group"
    no_folder = ""  # for messages: why paths are not looked up

    def __init__(self, where: str, progress: bool = False) -> None:
        """`where`: `PATTERN[?image=COLUMN&text=COLUMN&audio=COLUMN&id=COLUMN&root=DIR]`. Errors:
        ValueError, OSError."""
        pattern, options, more = split_options("parquet", where, OPTIONS)
        names = expand("parquet", pattern, USAGE)
        self.files = local_copies(names, progress)
        self.name_of_file = dict(zip(self.files, map(redact, names)))
        self.short_names = short_names([redact(name) for name in names])
        schema = self._schema(f"parquet:{where}")
        self.audio = self._optional(where, schema, "audio", options, AUDIO_COLUMNS)
        find = self._column if self.audio is None else self._optional
        self.image = find(where, schema, "image", options, IMAGE_COLUMNS)
        self.text = (self._column if self.image is None else find)(
            where, schema, "text", options, TEXT_COLUMNS
        )
        self.id = self._optional(where, schema, "id", options, ("id",))
        columns = {"image": self.image, "text": self.text, "audio": self.audio}
        self.holds = tuple(key for key, column in columns.items() if column is not None)
        self.stored: dict[str | None, str] = {
            column: _stored_as(schema, column, f"data spec 'parquet:{where}'")
            for column in (self.image, self.audio)
            if column is not None
        }
        self.spec = redact(f"parquet:{absolute_pattern(pattern)}")
        self.spec += f"?{self.image}&{self.text}&{self.id}"
        self.spec += "" if self.audio is None else f"&{self.audio}"
        if {"path", "either"} & {*self.stored.values()}:
            own = self._one_folder(where, names)
            if own or more:
                self.roots = Roots.of(own or more[0], more)
                self.spec += "" if own else f"?root={self.roots.own}"
                self.spec += self.roots.options()
            else:
                self.stored = dict.fromkeys(self.stored, "bytes")
                self.no_folder = (
                    "; its path is not looked up, since the files are not in one local folder: "
                    "give --data-root DIR"
                )
        self.images_are_files = self.stored.get(self.image, "bytes") != "bytes"
        self.audio_is_files = self.stored.get(self.audio, "bytes") != "bytes"

    def _schema(self, spec: str) -> pa.Schema:
        """Of the first file that can be read; the others are read by the same names."""
        for file in self.files:
            try:
                return pq.read_schema(file)
            except (pa.ArrowException, OSError) as error:
                first = f"{self.name_of_file[file]}: {error}"
        raise ValueError(f"data spec '{spec}': no file of it is a parquet file: {first}")

    def _one_folder(self, where: str, names: list[str]) -> str | None:
        """The folder that paths count from; None: the files are remote, or in several. Errors:
        ValueError for these where a column holds nothing but paths."""
        remote = [name for name in names if is_remote(name)]
        folders = {os.path.dirname(name) for name in names}
        if not remote and len(folders) == 1:
            return folders.pop()
        if (column := next((c for c, kind in self.stored.items() if kind == "path"), None)) is None:
            return None
        what = f"{remote[0]} is remote" if remote else f"the files are in {len(folders)} folders"
        raise ValueError(
            f"data spec 'parquet:{where}': column '{column}' holds paths that count from the "
            f"file's folder, but {what}; give files of one local folder, or files with the bytes"
        )

    def _column(
        self,
        where: str,
        schema: pa.Schema,
        key: str,
        options: dict[str, str],
        usual: tuple[str, ...],
    ) -> str:
        wanted = (options[key],) if key in options else usual
        found = [name for name in wanted if name in schema.names]
        if not found:
            raise ValueError(
                f"data spec 'parquet:{where}': no column {' or '.join(wanted)}; there are: "
                f"{', '.join(schema.names) or 'none'}{near(wanted[0], schema.names)}; name it: "
                f"?{key}=COLUMN"
            )
        return found[0]

    def _optional(
        self,
        where: str,
        schema: pa.Schema,
        key: str,
        options: dict[str, str],
        usual: tuple[str, ...],
    ) -> str | None:
        """As `_column`; None where it was not asked for and is not there."""
        if key in options or any(name in schema.names for name in usual):
            return self._column(where, schema, key, options, usual)
        return None

    @cached_property
    def _opened(self) -> "_Opened":
        return _Opened(self.image or self.audio)

    @cached_property
    def _opened_audio(self) -> "_Opened":
        return _Opened(self.audio) if self.image else self._opened

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_opened", "_opened_audio")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def fingerprint(self) -> list[Stamp]:
        return [stamp(file) for file in self.files]

    def parts(self) -> Iterator[Part]:
        for file in self.files:
            unchanging = "\0".join(map(str, stamp(file)))
            try:
                metadata = pq.ParquetFile(file).metadata
            except (pa.ArrowException, OSError) as error:
                yield Part(file, (None, str(error)), 1, unchanging)
                continue
            for group in range(metadata.num_row_groups):
                # Paths in a file say nothing of the images' own changes.
                own = "" if self._names_files(metadata.row_group(group)) else unchanging
                yield Part(file, (group, None), 1, own and f"{own}\0{group}")

    def _names_files(self, group: pq.RowGroupMetaData) -> bool:
        """May rows of the group be read from files of their own?"""
        if "path" in self.stored.values():
            return True
        inner = {f"{column}.bytes" for column, kind in self.stored.items() if kind == "either"}
        chunks = map(group.column, range(group.num_columns) if inner else ())
        found = [chunk.statistics for chunk in chunks if chunk.path_in_schema in inner]
        return any(each is None or each.null_count != 0 for each in found)  # None: not known

    def rows(self, part: Part) -> Iterator[Row]:
        group, fault = part.content
        name = self.short_names[self.name_of_file[part.file]]
        if fault is not None:
            yield Row(
                id=name,
                number=0,
                problem=BadSample(
                    "truncated-archive", f"no parquet file, or its end is missing: {fault}"
                ),
            )
            return
        _, file_size, mtime_ns = stamp(part.file)
        number, end = self._opened.bounds(part.file)[group : group + 2]
        start, decoded, limit = number, 0, FILE_LIMIT + DECODED_FACTOR * file_size
        try:
            for batch in self._batches(part.file, group):
                row = self._row(batch, name, number, mtime_ns)
                decoded += max(ROW_BYTES, _bytes_of(row, batch))
                if decoded > limit:
                    raise _Bomb(f"its first {number - start:,} rows decode to over {limit:,} bytes")
                yield row
                number += 1
        except _Bomb as error:
            said = (
                f"row group {group} of a file of {file_size:,} bytes: {error}; the rest is not read"
            )
            yield Row(f"{name}/{number}", number, problem=BadSample("unreadable", said))
        except (
            pa.ArrowException,
            OSError,
            KeyError,
        ) as error:  # a damaged page; a file without the columns of the first one
            # a damaged footer may promise any number
            for lost in range(number, min(end, number + file_size)):
                yield Row(
                    f"{name}/{lost}",
                    lost,
                    problem=BadSample("unreadable", f"row group {group}: {error}"),
                )

    def _batches(self, file: str, group: int) -> Iterator[pa.RecordBatch]:
        """The rows of a row group, one each. Raises _Bomb."""
        with pq.ParquetFile(file) as opened:
            chunks = opened.metadata.row_group(group)
            leaves = [chunks.column(i) for i in range(chunks.num_columns)]
        most = max((leaf.num_values for leaf in leaves), default=0)
        if most > VALUES_LIMIT:
            raise _Bomb(f"{most:,} values in a column; at most {VALUES_LIMIT:,} are read")
        # The texts of one list are decoded together: as numbers of a dictionary they take 4 bytes.
        lists = [leaf.path_in_schema for leaf in leaves if self._is_of_text_list(leaf)]
        with pq.ParquetFile(file, read_dictionary=lists) as opened:
            yield from _rows_of(opened, group, self._columns())

    def _is_of_text_list(self, leaf: pq.ColumnChunkMetaData) -> bool:
        return (
            leaf.path_in_schema.startswith(f"{self.text}.") and leaf.physical_type == "BYTE_ARRAY"
        )

    def _row(self, batch: pa.RecordBatch, name: str, number: int, mtime_ns: int) -> Row:
        row = Row(f"{name}/{number}", number, offset=number, mtime_ns=mtime_ns)
        try:
            if self.id is not None:
                row.id = checked_id(_id(_value(batch.column(self.id)[0])), row.id)
            self.fill(
                row,
                {
                    "text": lambda: self._take_text(row, batch),
                    "image": lambda: self._take_image(row, batch),
                    "audio": lambda: self._take_audio(row, batch, mtime_ns),
                },
            )
        except BadSample as problem:
            row.problem = problem
        return row

    def _columns(self) -> list[str]:
        """What is read of a row group: of images and sounds those that are compared."""
        of = {"image": self.image, "text": self.text, "audio": self.audio}
        wanted = [of.get(modality) for modality in self.modalities]
        return [column for column in (*wanted, self.id) if column is not None]

    def _take_text(self, row: Row, batch: pa.RecordBatch) -> None:
        take_captions(row, None if self.text is None else _texts(batch.column(self.text)[0]))

    def _take_image(self, row: Row, batch: pa.RecordBatch) -> None:
        image = None if self.image is None else _value(batch.column(self.image)[0])
        if image is None and self.pairs != DEFAULT_PAIRS:
            raise BadSample("no-value", "no image is given")
        content, path = _bytes_and_path(image)
        if content is None and path is not None and self.images_are_files:
            place(row, self.roots, path)
        else:
            row.image = self._bytes(content, self.image)
            row.size = len(row.image)

    def _take_audio(self, row: Row, batch: pa.RecordBatch, mtime_ns: int) -> None:
        sound = None if self.audio is None else _value(batch.column(self.audio)[0])
        if sound is None:
            raise BadSample("no-value", "no sound is given")
        content, path = _bytes_and_path(sound)
        if content is None and path is not None and self.audio_is_files:
            place_audio(row, self.roots, path)
        else:
            content = self._bytes(content, self.audio)
            row.audio = AudioFile(
                offset=row.offset, size=len(content), mtime_ns=mtime_ns, content=content
            )

    def _bytes(self, given: Any, column: str | None) -> bytes:
        if not isinstance(given, bytes):
            raise BadSample(
                "missing-file", f"column '{column}' holds no bytes in this row{self.no_folder}"
            )
        if len(given) > FILE_LIMIT:
            what = "image" if column == self.image else "sound"
            raise BadSample(
                "unreadable",
                f"the {what} has {len(given):,} bytes; at most {FILE_LIMIT:,} are read",
            )
        return given

    def image_bytes(self, file: str, path: str, offset: int, size: int) -> bytes:
        if path:
            return super().image_bytes(file, path, offset, size)
        return self._read(self._opened, self.image, file, offset)

    def audio_bytes(self, file: str, path: str, offset: int, size: int, number: int) -> bytes:
        if path:
            return super().audio_bytes(file, path, offset, size, number)
        return self._read(self._opened_audio, self.audio, file, offset)

    def _read(self, opened: "_Opened", column: str | None, file: str, row: int) -> bytes:
        try:
            return self._bytes(_bytes_and_path(opened.value(file, row))[0], column)
        except (pa.ArrowException, OSError) as error:
            raise BadSample("unreadable", f"{self.name_of_file[file]}: {error}") from error

    def where(self, file: str, path: str, number: int) -> str:
        return f"{self.name_of_file.get(file, file)}#row {number}"


def _stored_as(schema: pa.Schema, column: str, of: str) -> str:
    """Whether a column of images or sounds holds "bytes", also within a structure, a "path", or
    "either", in {bytes, path}. Errors: ValueError."""
    kind = schema.field(column).type
    stored = kind.value_type if pa.types.is_dictionary(kind) else kind
    named = {stored.field(i).name for i in range(stored.num_fields)} & {"bytes", "path"}
    if pa.types.is_struct(stored) and named:
        return "either" if len(named) == 2 else named.pop()
    if str(stored).endswith(("string", "string_view")):
        return "path"
    if str(stored).endswith(("binary", "binary_view")):
        return "bytes"
    raise ValueError(
        f"{of}: column '{column}' is {kind}; bytes, {{bytes, path}} or a path is needed"
    )


def _bytes_and_path(given: Any) -> tuple[Any, Any]:
    """Of an image or a sound as a column holds it."""
    if isinstance(given, dict):
        return given.get("bytes"), given.get("path")
    return (None, given) if isinstance(given, str) else (given, None)


class _Bomb(Exception):
    """The rest of a row group is not read."""


def _rows_of(
    opened: pq.ParquetFile, group: int, columns: Sequence[str | None]
) -> Iterator[pa.RecordBatch]:
    # with threads a batch of one row takes ten times as long
    return opened.iter_batches(ROWS_AT_ONCE, [group], columns, use_threads=False)


def _bytes_of(row: Row, batch: pa.RecordBatch) -> int:
    """That the row was decoded to."""
    captions = sum(map(len, row.captions))
    if row.problem is not None or row.lacks or row.dropped:  # it does not hold all that was decoded
        return captions + sum(map(_decoded_bytes, batch.columns))
    sound = 0 if row.audio is None else row.audio.size
    return captions + len(row.id) + len(row.path) + len(row.image or b"") + sound


def _decoded_bytes(column: pa.Array) -> int:
    """Of one row, in a time that good rows do not spend. A dictionary, which all rows share, does
    not count, nor the texts of a list."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_list = pa.types.is_nested(column.type) and not pa.types.is_struct(column.type)
    return 0 if is_list else column.nbytes


class _Opened:
    """Files of one process, and of one column the last row group."""

    def __init__(self, column: str | None) -> None:
        """`column`: None where only the rows are counted."""
        self._column = column
        self._bounds: dict[str, list[int]] = {}
        self._file: tuple[str, pq.ParquetFile] | None = None
        self._group: tuple[str, int, list[pa.Array]] | None = None  # an array of each row

    def bounds(self, file: str) -> list[int]:
        """The first row of each row group, and the number of all rows."""
        if file not in self._bounds:
            metadata = self._open(file).metadata
            groups = range(metadata.num_row_groups)
            self._bounds[file] = list(
                accumulate((metadata.row_group(group).num_rows for group in groups), initial=0)
            )
        return self._bounds[file]

    def value(self, file: str, row: int) -> Any:
        """The image column of one row. Raises BadSample when the file has no such row any
        more."""
        bounds = self.bounds(file)
        if not 0 <= row < bounds[-1]:
            raise BadSample(
                "unreadable",
                f"{file} has {bounds[-1]} rows, row {row} is asked for; it changed under the run",
            )
        group = bisect_right(bounds, row) - 1
        if self._group is None or self._group[:2] != (file, group):
            self._group = None  # freed before the next one is read
            found = self._keep(self._open(file), file, group, row - bounds[group])
            if self._group is None:
                return found
        return _value(self._group[2][row - bounds[group]][0])

    def _keep(self, opened: pq.ParquetFile, file: str, group: int, wanted: int) -> Any:
        """Keep the row group, as far as it is small once it is decoded; else the value of its row
        `wanted` comes back. Raises BadSample."""
        is_large = opened.metadata.row_group(group).total_byte_size > KEPT_LIMIT
        rows, size, found = [], 0, None
        for number, batch in enumerate(_rows_of(opened, group, [self._column])):
            column = batch.column(self._column)
            size += column.nbytes
            found = column[0] if number == wanted else found
            is_large = is_large or size > KEPT_LIMIT
            if not is_large:
                rows.append(column)
                continue
            rows.clear()
            if found is not None:
                return _value(found)
        if found is None:
            raise BadSample("unreadable", f"row group {group} ends early")
        self._group = (file, group, rows)

    def _open(self, file: str) -> pq.ParquetFile:
        if self._file is None or self._file[0] != file:
            self._file = (file, pq.ParquetFile(file))
        return self._file[1]


def _value(scalar: pa.Scalar) -> Any:
    """Raises BadSample: invalid-utf8."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        raise BadSample(
            "invalid-utf8",
            f"not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}",
        ) from None


def _texts(scalar: pa.Scalar) -> Any:
    """A text, or a list of them; bytes that are not UTF-8 become lone surrogates, which the check
    of captions finds. Some tools write texts as bytes. Raises BadSample: huge-caption."""
    is_list = isinstance(scalar, pa.ListScalar) and scalar.is_valid
    texts: list[Any] = []
    size = 0
    for each in scalar if is_list else [scalar]:
        each = each.value if isinstance(each, pa.DictionaryScalar) else each
        if isinstance(each, pa.BinaryScalar) and each.is_valid:
            size += each.as_buffer().size
        if size > TEXT_LIMIT or len(texts) > CAPTION_LIMIT:
            raise BadSample(
                "huge-caption",
                f"the texts of the row have over {size:,} bytes; at most {TEXT_LIMIT:,} bytes and "
                f"{CAPTION_LIMIT:,} texts are read",
            )
        texts.append(_text(each))
    return texts if is_list else texts[0]


def _text(scalar: pa.Scalar) -> Any:
    try:
        given = scalar.as_py()
    except UnicodeDecodeError as error:
        given = error.object
    return given.decode(errors="surrogateescape") if isinstance(given, bytes) else given


def _id(given: Any) -> Any:
    """What a text or a whole number may have become: DuckDB has a type for UUIDs, and pandas makes
    a column of numbers float where one is missing."""
    if isinstance(given, float):
        return int(given) if given.is_integer() else None if math.isnan(given) else given
    return str(given) if isinstance(given, uuid.UUID) else given


def short_names(files: list[str]) -> dict[str, str]:
    """File -> its name alone where these differ, else its path below what all have in common: a
    part of ids."""
    bases = [os.path.basename(file) for file in files]
    if len(set(bases)) == len(files):
        return dict(zip(files, bases))
    common = os.path.commonprefix([os.path.dirname(file) + "/" for file in files])
    common = common[: common.rfind("/") + 1]
    return {file: file[len(common) :] for file in files}
