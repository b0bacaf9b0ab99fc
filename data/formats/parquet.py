"""A data set as parquet files: images and sounds as bytes (as Hugging Face writes them) or as
paths, and texts.

An image is read with its whole row group, of which the last one is kept: files with small row
groups are fast in any order (Hugging Face writes 100 rows), files with one large group are not.
"""

import json
import os
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.output import brief
from common.spelling import near
from data.annotations import Annotations
from data.bad_samples import ANNOTATION_LIMIT, FILE_LIMIT, BadSample
from data.formats.classes import Classes, classes_of
from data.formats.parquet_files import (
    TEXT_LIMIT,
    VALUES_LIMIT,
    is_filled,
    is_joined,
    open_parquet,
    python_value,
    rows_of,
    small_group,
    text_bytes,
    texts_of,
)
from data.formats.prompts import OPTIONS, TEMPLATES
from data.formats.rows import (
    DEFAULT_PAIRS,
    Media,
    Part,
    Roots,
    Row,
    Unused,
    attempt,
    take_captions,
)
from data.formats.shards import Shard, ShardsFormat
from data.formats.specs import ROOT, is_remote, names_of, split_options
from data.formats.tables import READING, chosen_columns, named_kinds
from data.identity import fingerprint
from data.regions import BoxOptions
from data.stored.annotations import StoredAnnotations
from data.stored.kinds import STORED, annotations_of, is_file, names_of_rows, stored
from data.stored.record import PARQUET
from data.stored.text import StoredText
from data.values import whole

USAGE = (
    "parquet:FILE_OR_PATTERN or "
    "parquet:FILE_OR_PATTERN?image=COLUMN&text=COLUMN&audio=COLUMN&id=COLUMN&root=DIR"
)
LABEL = "label"  # the column of classes
OF_CLASSES = (LABEL, *OPTIONS)
GROUP = 1 << 32  # a place in a file is the number of the row group times this, plus the row in it
ROW_BYTES = 1 << 10  # that a row counts at least
DECODED_FACTOR = 1000  # times the size of its file a row group may decode to, beside FILE_LIMIT
JOINED = (
    "several parquet files one behind the other, of which none can be read; give them by themselves"
)


class ParquetFormat(ShardsFormat):
    """The rows of all files. An id is that of the column `id`, else FILE/ROW.

    Where images or sounds are paths, these count from the files' folder, then from each further
    root; where they are bytes, roots change nothing. A row of {bytes, path} is read from its path
    where it has no bytes.
    """

    unit = "row group"
    caption_ways = ("lines", "classes")
    classes: Classes | None = None  # that captions are made of
    without_bytes = ""  # for messages: why paths are not looked up

    def __init__(self, where: str, shard: Shard | None = None) -> None:
        """`where`: `PATTERN[?image=COLUMN&…&split=NAME&root=DIR]`. `shard`: instead of what the
        pattern names. Errors: ValueError, OSError."""
        usual = columns()
        pattern, options, more = split_options(
            "parquet", where, (*usual, *OF_CLASSES, *READING, "split", ROOT)
        )
        spec = f"data spec 'parquet:{where}':"
        self.boxes = BoxOptions.of(spec, options)
        self.captions = take_captions(spec, options, self.caption_ways)
        super().__init__("parquet", pattern, USAGE, shard, options.pop("split", None))
        schema = self._schema(spec)
        of_classes = {key: options.pop(key) for key in OF_CLASSES if key in options}
        column = self._class_column(spec, schema, names_of(usual, options), of_classes)
        if column is not None:
            told = class_names(schema).get(column, ())
            has_images = {*schema.names} & {*names_of(usual, options)["image"]}
            templates = TEMPLATES if has_images else ("{}",)
            of = f"column '{column}'"
            self.classes = classes_of(spec, told, of, of_classes, templates)
        self.columns = chosen_columns(spec, schema.names, usual, options, column)
        self.usual = names_of(usual, options)
        self.holds = tuple(key for key in STORED if key in self.columns)
        # modality -> "bytes", also within a structure, "path", or "either", in {bytes, path}
        self.stored = {
            key: _stored_as(schema, column, spec)
            for key, column in self.columns.items()
            if is_file(key)
        }
        self.spec += f"?{self.columns}{named_kinds(options)}{self.boxes.words()}"
        self.spec += f"?captions={self.captions}" if self.captions else ""
        self.spec += f"?classes={fingerprint(self.classes)}" if self.classes else ""
        if {"path", "either"} & {*self.stored.values()}:
            own = self._one_folder(spec)
            if own or more:
                self.roots = Roots.of(own or more[0], more)
                self.spec += ("" if own else f"?root={self.roots.own}") + self.roots.options()
            else:
                self.stored = dict.fromkeys(self.stored, "bytes")
                self.without_bytes = (
                    "; its path is not looked up, since the files are not in one local folder: "
                    "give --data-root DIR"
                )

    def _class_column(
        self,
        spec: str,
        schema: pa.Schema,
        names: dict[str, tuple[str, ...]],
        options: dict[str, str],
    ) -> str | None:
        """The column of classes that captions are made of, where there are no texts, or where the
        options say so. Errors: ValueError."""
        is_asked = bool(options) or self.captions == "classes"
        if not is_asked and {*names["text"]} & {*schema.names}:
            return None
        known = [*class_names(schema)]
        if LABEL in options or LABEL in known or (is_asked and LABEL in schema.names):
            known = [options.get(LABEL, LABEL)]
        if len(known) == 1 and known[0] in schema.names:
            return known[0]
        if not is_asked and not known:
            return None
        raise ValueError(
            f"{spec} captions are made of classes, and which column has these is not clear; there "
            f"are: {', '.join(schema.names)}{near(known[0] if known else LABEL, schema.names)}; name "
            "it: ?label=COLUMN"
        )

    @property
    def made_of(self) -> tuple[str | None, str | None]:
        """Where names of classes and their sentences are from."""
        return self.classes.made_of if self.classes else (None, None)

    def _schema(self, spec: str) -> pa.Schema:
        """The schema of the first file that can be read, which holds for the others."""
        for file in self.files:
            try:
                with open_parquet(file) as opened:
                    return opened.schema_arrow
            except (pa.ArrowException, OSError) as error:
                first = f"{self.shown[file]}: {error}"
        raise ValueError(f"{spec} no file of it is a parquet file: {first}")

    def _one_folder(self, spec: str) -> str | None:
        """The folder that paths count from; None: the files are remote, or in several. Errors:
        ValueError for these where a column holds nothing but paths."""
        remote = [name for name in self.names if is_remote(name)]
        folders = {os.path.dirname(name) for name in self.names}
        if not remote and len(folders) == 1:
            return folders.pop()
        for key, how in self.stored.items():
            if how == "path":
                found = f"the files are in {len(folders)} folders"
                raise ValueError(
                    f"{spec} column '{self.columns[key]}' holds paths that count from the file's "
                    f"folder, but {f'{remote[0]} is remote' if remote else found}; give files of "
                    "one local folder, or files with the bytes"
                )
        return None

    def parts(self) -> Iterator[Part]:
        for file in self.files:
            unchanging = self.stamp(file)
            try:
                with open(file, "rb") as opened:
                    metadata = open_parquet(opened).metadata
                    fault = JOINED if is_joined(opened, metadata) else ""
            except (pa.ArrowException, OSError) as error:
                fault = f"no parquet file, or its end is missing: {error}"
            if fault:
                yield Part(file, fault, 1, unchanging)
                continue
            start, beside = 0, self._further(metadata)
            for group in range(metadata.num_row_groups):
                chunks = metadata.row_group(group)
                # Paths in a file say nothing of the images' own changes.
                own = None if self._names_files(chunks) else (unchanging, group)
                yield Part(file, (group, start, chunks.num_rows, beside), 1, own)
                start, beside = start + chunks.num_rows, []

    @property
    def wanted(self) -> dict[str, str]:
        """What is read of each row -> its column: of images and sounds those that are compared."""
        beside = (key for name in self.modalities for key in stored(name).beside)
        keys = ("id", *self.modalities, *beside)
        return {key: self.columns[key] for key in keys if key in self.columns}

    def _further(self, metadata: pq.FileMetaData) -> list[str]:
        """Each column of a file that may hold a modality of which another column is read, as
        `Unused.what`. The footer alone is looked at, since what is not read may be large."""
        return [
            f"columns {name!r} beside {self.columns[key]!r}"
            for key in self.modalities
            if key in self.columns
            for name in self.usual[key]
            if name != self.columns[key] and is_filled(metadata, name)
        ]

    def _names_files(self, group: pq.RowGroupMetaData) -> bool:
        """Whether rows of the group may be read from files of their own."""
        if "path" in self.stored.values():
            return True
        inner = {f"{self.columns[k]}.bytes" for k, kind in self.stored.items() if kind == "either"}
        chunks = map(group.column, range(group.num_columns) if inner else ())
        found = [chunk.statistics for chunk in chunks if chunk.path_in_schema in inner]
        return any(each is None or each.null_count != 0 for each in found)  # None: not known

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        name = self.short[part.file]
        if isinstance(part.content, str):
            yield Row(name, 0, BadSample("truncated-archive", part.content))
            return
        group, first, count, beside = part.content
        yield from (Unused(what, "", first) for what in beside)
        size = os.path.getsize(part.file)
        number, decoded, limit = first, 0, FILE_LIMIT + DECODED_FACTOR * size
        wanted = self.wanted
        try:
            for batch in self._batches(part.file, group, wanted):
                values = self._values(batch, wanted, group * GROUP + number - first)
                decoded += max(ROW_BYTES, _decoded_bytes(batch, values))
                if decoded > limit:
                    raise _Bomb(f"its first {number - first:,} rows decode to over {limit:,} bytes")
                yield Row(f"{name}/{number}", number, values)
                number += 1
        except _Bomb as error:
            fault = f"row group {group} of a file of {size:,} bytes: {error}; the rest is not read"
            yield Row(f"{name}/{number}", number, BadSample("unreadable", fault))
        except (pa.ArrowException, OSError, KeyError) as error:
            # A damaged page, or a file without the columns of the first one. A damaged footer may
            # promise any number of rows.
            for lost in range(number, min(first + count, number + size)):
                unread = BadSample("unreadable", f"row group {group}: {error}")
                unread.__cause__ = error
                yield Row(f"{name}/{lost}", lost, unread)

    def _batches(self, file: str, group: int, wanted: dict[str, str]) -> Iterator[pa.RecordBatch]:
        """The rows of a row group, one each. Raises _Bomb."""
        with pq.ParquetFile(file) as opened:
            chunks = opened.metadata.row_group(group)
            leaves = [chunks.column(i) for i in range(chunks.num_columns)]
        most = max((leaf.num_values for leaf in leaves), default=0)
        if most > VALUES_LIMIT:
            raise _Bomb(f"{most:,} values in a column; at most {VALUES_LIMIT:,} are read")
        # The texts of one list are decoded together: as numbers of a dictionary they take 4 bytes.
        texts = ("text", *(kind.name for kind in annotations_of(self.modalities)))
        nested = tuple(f"{self.columns.get(key)}." for key in texts)
        lists = [
            leaf.path_in_schema
            for leaf in leaves
            if leaf.path_in_schema.startswith(nested) and leaf.physical_type == "BYTE_ARRAY"
        ]
        with pq.ParquetFile(file, read_dictionary=lists) as opened:
            yield from rows_of(opened, group, [*wanted.values()])

    def _values(
        self, batch: pa.RecordBatch, wanted: dict[str, str], place: int
    ) -> dict[str, Any] | BadSample:
        values = {
            key: attempt(self._value, key, batch.column(column)[0], place)
            for key, column in wanted.items()
        }
        if self.classes and isinstance(found := values.get("text"), tuple):
            values[LABEL], values["text"] = found
        return values["id"] if isinstance(values.get("id"), BadSample) else values

    def _value(self, key: str, scalar: pa.Scalar, place: int) -> Any:
        """Raises BadSample."""
        kind = STORED.get(key)
        if isinstance(kind, StoredText) and self.classes:
            if (given := python_value(scalar)) is None:
                raise BadSample("no-caption", f"no class in column '{self.columns[key]}'")
            return self.classes.of(str(whole(given)))
        if isinstance(kind, StoredText):
            return self._checked(key, texts_of(scalar), scalar.type, "the text", (str,))
        if isinstance(kind, StoredAnnotations):
            return self._annotations(scalar, kind)
        if key == "id":
            return self._checked(
                key, whole(python_value(scalar)), scalar.type, "the id", (int, str)
            )
        if not is_file(key):
            return self._checked(key, python_value(scalar), scalar.type, key, (int, float, str))
        found = self._content(key, python_value(scalar))
        return Media("", place, len(found), content=found) if isinstance(found, bytes) else found

    def _annotations(self, scalar: pa.Scalar, kind: StoredAnnotations) -> Any:
        """Those of a row; one of which a text is not UTF-8 is a BadSample. Raises BadSample."""
        if not isinstance(scalar, pa.ListScalar) or not scalar.is_valid:
            return python_value(scalar)
        given = scalar.values.slice(0, ANNOTATION_LIMIT)
        if (size := text_bytes(given)) > TEXT_LIMIT:
            raise BadSample(
                "huge-caption",
                f"the texts of the {kind.several} have {size:,} bytes; at most {TEXT_LIMIT:,} are read",
            )
        return kind.checked(
            [attempt(python_value, each) for each in given], self, len(scalar.values)
        )

    def _checked(self, key: str, given: Any, kind: pa.DataType, what: str, needed: tuple) -> Any:
        """What is given, or each of a list of texts, if it is of a Python type that is `needed`.
        Raises BadSample with the column and its type."""
        for each in given if isinstance(given, list) and needed == (str,) else [given]:
            is_known = isinstance(each, needed) and not isinstance(each, bool)
            if not is_known and each is not None and each == each:  # NaN: it is missing
                column = self.columns[key]
                to = "DOUBLE" if float in needed else "VARCHAR"
                raise BadSample(
                    "invalid-row",
                    f"{what} is {brief(each)}; column '{column}' is {kind!s:.100}: write it as "
                    f"{'numbers' if to == 'DOUBLE' else 'texts'}, as CAST({column} AS {to}) does",
                )
        return given

    def _content(self, modality: str, given: Any) -> bytes | str | None:
        """The bytes, or else the path where that is looked up. Raises BadSample."""
        content, path = given, None
        if isinstance(given, dict):
            content, path = given.get("bytes"), given.get("path")
        elif isinstance(given, str):
            content, path = None, given
        if content is None and path is not None and self.stored[modality] != "bytes":
            return path
        may_lack = self.pairs != DEFAULT_PAIRS
        if isinstance(content, bytes) or (given is None and may_lack):
            return content
        column = self.columns[modality]
        raise BadSample(
            "missing-file", f"column '{column}' holds no bytes in this row{self.without_bytes}"
        )

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        if media.path:
            return super().read(modality, file, number, media)
        try:
            found = self._content(modality, self._stored_value(modality, file, media.offset))
        except (pa.ArrowException, OSError, IndexError) as error:
            raise BadSample("unreadable", f"{self.shown[file]}: {error}") from error
        if not isinstance(found, bytes):
            raise BadSample("unreadable", f"{file} changed under the run")
        return found

    @cached_property
    def _kept(self) -> dict[str, tuple[tuple[str, int], list[pa.Array] | None]]:
        """Modality -> the row group that was read last and its rows, None where they are large."""
        return {}

    def _stored_value(self, modality: str, file: str, place: int) -> Any:
        """The value at a place in the column of a modality. Raises BadSample."""
        (group, row), column = divmod(place, GROUP), self.columns[modality]
        if self._kept.get(modality, ((), None))[0] != (file, group):
            self._kept.pop(modality, None)  # freed before the next one is read
            self._kept[modality] = ((file, group), small_group(file, group, column))
        rows = self._kept[modality][1]
        if rows is None:
            with pq.ParquetFile(file) as opened:
                batch = next(islice(rows_of(opened, group, [column]), row, None), None)
            rows, row = [] if batch is None else [batch.column(column)], 0
        if row >= len(rows):
            raise BadSample("unreadable", f"row group {group} of {file} ends early: it changed")
        return python_value(rows[row][0])

    def where(self, file: str, path: str, number: int) -> str:
        return f"{self.shown.get(file, file)}#row {number}"


def columns() -> dict[str, tuple[str, ...]]:
    """What rows may hold -> the columns that it may stand under."""
    return names_of_rows(PARQUET) | {"id": ("id",)}


def class_names(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Column -> names of the classes that its numbers stand for, as the library `datasets` writes
    them into a file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: tuple(name.replace("_", " ") for name in kind["names"])
            for column, kind in features.items()
            if column in schema.names
            and isinstance(kind, dict)
            and kind.get("_type") == "ClassLabel"
            and all(isinstance(name, str) and name.strip() for name in kind["names"])
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


class _Bomb(Exception):
    """The rest of a row group is not read."""


def _stored_as(schema: pa.Schema, column: str, spec: str) -> str:
    """See `ParquetFormat.stored`. Errors: ValueError."""
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
        f"{spec} column '{column}' is {kind}; bytes, {{bytes, path}} or a path is needed"
    )


def _decoded_bytes(batch: pa.RecordBatch, values: dict[str, Any] | BadSample) -> int:
    """That one row was decoded to. A dictionary, which all rows share, does not count; lists, which
    are read as one, count by their texts."""
    texts = values.get("text") if isinstance(values, dict) else None
    texts = texts if isinstance(texts, list) else []
    for given in values.values() if isinstance(values, dict) else ():
        if isinstance(given, Annotations):
            texts = [*texts, *(each for found in given.good for each in found.phrases)]
            texts += [each for found in given.good for each in found.negatives]
    size = sum(len(text) for text in texts if isinstance(text, str))
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not pa.types.is_nested(column.type) or pa.types.is_struct(column.type):
            size += column.nbytes
    return size
