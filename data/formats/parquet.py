"""A data set as parquet files: images as bytes (as Hugging Face writes them) or as paths, and
texts.

An image is read with its whole row group, of which the last one is kept: files with small row
groups are fast in any order (Hugging Face writes 100 rows), files with one large group are not.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.formats.rows import (
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    checked_captions,
    checked_id,
    near,
    place,
    stamp,
)
from data.formats.specs import (
    ROOT,
    absolute_pattern,
    expand,
    is_remote,
    local_copies,
    split_options,
)
from data.index.bad_samples import FILE_LIMIT, BadSample

OPTIONS = ("image", "text", "id", ROOT)
USAGE = (
    "parquet:FILE_OR_PATTERN or parquet:FILE_OR_PATTERN?image=COLUMN&text=COLUMN&id=COLUMN&root=DIR"
)
IMAGE_COLUMNS = ("image", "image_path", "filepath")
TEXT_COLUMNS = ("text", "caption", "title")
ROWS_AT_ONCE = 64
KEPT_LIMIT = (
    256 << 20
)  # bytes of a row group that is kept; of a larger one only the rows up to the wanted one are read


class ParquetFormat(Format):
    """The rows of all files, in order. An id is that of the column `id`, else FILE/ROW.

    Where images are paths, these count from the files' folder, then from each further root; where
    they are bytes, roots change nothing.
    """

    unit = "row group"

    def __init__(self, where: str, progress: bool = False) -> None:
        """`where`: `PATTERN[?image=COLUMN&text=COLUMN&id=COLUMN&root=DIR]`. Errors: ValueError,
        OSError."""
        pattern, options, more = split_options("parquet", where, OPTIONS)
        names = expand("parquet", pattern, USAGE)
        self.files = local_copies(names, progress)
        self.name_of_file = dict(zip(self.files, names))
        self.short_names = short_names(names)
        schema = self._schema(f"parquet:{where}")
        self.image = self._column(where, schema, "image", options, IMAGE_COLUMNS)
        self.text = self._column(where, schema, "text", options, TEXT_COLUMNS)
        self.id = (
            self._column(where, schema, "id", options, ("id",))
            if "id" in options or "id" in schema.names
            else None
        )
        kind = schema.field(self.image).type
        self.in_struct = pa.types.is_struct(kind)
        self.images_are_files = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if self.in_struct and "bytes" not in [kind.field(i).name for i in range(kind.num_fields)]:
            raise ValueError(
                f"data spec 'parquet:{where}': column '{self.image}' is {kind}; bytes, {{bytes, "
                "path} or a path is needed"
            )
        if not (
            self.in_struct
            or self.images_are_files
            or pa.types.is_binary(kind)
            or pa.types.is_large_binary(kind)
        ):
            raise ValueError(
                f"data spec 'parquet:{where}': column '{self.image}' is {kind}; bytes, {{bytes, "
                "path} or a path is needed"
            )
        if self.images_are_files:
            remote = [name for name in names if is_remote(name)]
            folders = {os.path.dirname(name) for name in names}
            if remote or len(folders) > 1:
                what = (
                    f"{remote[0]} is remote"
                    if remote
                    else f"the files are in {len(folders)} folders"
                )
                raise ValueError(
                    f"data spec 'parquet:{where}': column '{self.image}' holds paths that count "
                    f"from the file's folder, but {what}; give files of one local folder, or files "
                    "with the images' bytes"
                )
            self.roots = Roots.of(folders.pop(), more)
        self.spec = f"parquet:{absolute_pattern(pattern)}?{self.image}&{self.text}&{self.id}"
        self.spec += self.roots.options() if self.images_are_files else ""

    def _schema(self, spec: str) -> pa.Schema:
        """Of the first file that can be read; the others are read by the same names."""
        for file in self.files:
            try:
                return pq.read_schema(file)
            except (pa.ArrowException, OSError) as error:
                first = f"{self.name_of_file[file]}: {error}"
        raise ValueError(f"data spec '{spec}': no file of it is a parquet file: {first}")

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

    @cached_property
    def _opened(self) -> "_Opened":
        return _Opened(self.image)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def fingerprint(self) -> list[Stamp]:
        return [stamp(file) for file in self.files]

    def parts(self) -> Iterator[Part]:
        for file in self.files:
            # Paths in a file say nothing of the images' own changes.
            unchanging = "" if self.images_are_files else "\0".join(map(str, stamp(file)))
            try:
                groups = pq.ParquetFile(file).metadata.num_row_groups
            except (pa.ArrowException, OSError) as error:
                yield Part(file, (None, str(error)), 1, unchanging)
                continue
            for group in range(groups):
                yield Part(file, (group, None), 1, unchanging and f"{unchanging}\0{group}")

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
        mtime_ns = os.stat(part.file).st_mtime_ns
        number, end = self._opened.bounds(part.file)[group : group + 2]
        try:
            with pq.ParquetFile(part.file) as file:
                columns = [
                    column for column in (self.image, self.text, self.id) if column is not None
                ]
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    for i in range(batch.num_rows):
                        yield self._row(batch, i, name, number, mtime_ns)
                        number += 1
        except (
            pa.ArrowException,
            OSError,
            KeyError,
        ) as error:  # a damaged page; a file without the columns of the first one
            for lost in range(number, end):
                yield Row(
                    f"{name}/{lost}",
                    lost,
                    problem=BadSample("unreadable", f"row group {group}: {error}"),
                )

    def _row(self, batch: pa.RecordBatch, i: int, name: str, number: int, mtime_ns: int) -> Row:
        row = Row(f"{name}/{number}", number, offset=number, mtime_ns=mtime_ns)
        try:
            if self.id is not None:
                row.id = checked_id(_value(batch.column(self.id)[i]), row.id)
            row.captions = checked_captions(_value(batch.column(self.text)[i]))
            image = _value(batch.column(self.image)[i])
            if self.images_are_files:
                place(row, self.roots, image)
            else:
                row.image = self._bytes(image)
                row.size = len(row.image)
        except BadSample as problem:
            row.problem = problem
        return row

    def _bytes(self, image: Any) -> bytes:
        if self.in_struct and isinstance(image, dict):
            image = image.get("bytes")
        if not isinstance(image, bytes):
            raise BadSample("missing-file", f"column '{self.image}' holds no bytes in this row")
        if len(image) > FILE_LIMIT:
            raise BadSample(
                "unreadable",
                f"the image has {len(image):,} bytes; at most {FILE_LIMIT:,} are read",
            )
        return image

    def image_bytes(self, file: str, path: str, offset: int, size: int) -> bytes:
        if self.images_are_files:
            return super().image_bytes(file, path, offset, size)
        try:
            return self._bytes(self._opened.value(file, offset))
        except (pa.ArrowException, OSError) as error:
            raise BadSample("unreadable", f"{self.name_of_file[file]}: {error}") from error

    def where(self, file: str, path: str, number: int) -> str:
        return f"{self.name_of_file.get(file, file)}#row {number}"


class _Opened:
    """Files and the last row group of one process."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._bounds: dict[str, list[int]] = {}
        self._file: tuple[str, pq.ParquetFile] | None = None
        self._group: tuple[str, int, pa.ChunkedArray] | None = None

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
            opened = self._open(file)
            if opened.metadata.row_group(group).total_byte_size > KEPT_LIMIT:
                return self._from_large(opened, group, row - bounds[group])
            self._group = (
                file,
                group,
                opened.read_row_group(group, columns=[self._column]).column(self._column),
            )
        return _value(self._group[2][row - bounds[group]])

    def _from_large(self, opened: pq.ParquetFile, group: int, row: int) -> Any:
        for batch in opened.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[self._column]):
            if row < batch.num_rows:
                return _value(batch.column(self._column)[row])
            row -= batch.num_rows
        raise BadSample("unreadable", f"row group {group} ends early")

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


def short_names(files: list[str]) -> dict[str, str]:
    """File -> its name alone where these differ, else its path below what all have in common: a
    part of ids."""
    bases = [os.path.basename(file) for file in files]
    if len(set(bases)) == len(files):
        return dict(zip(files, bases))
    common = os.path.commonprefix([os.path.dirname(file) + "/" for file in files])
    common = common[: common.rfind("/") + 1]
    return {file: file[len(common) :] for file in files}
