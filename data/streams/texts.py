"""The texts of a remote parquet shard without its images: only the columns that are read for texts
are fetched, and written as a parquet file of the same rows.

A whole shard is a hundred times as large. A stage of texts needs a part of every shard, since texts
are packed by length over the whole global batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import make_folder, move, open_part, remove
from common.secrets import redact
from data.formats.parquet import JOINED, ParquetFormat
from data.formats.parquet_files import is_joined, open_parquet
from data.formats.specs import cache_folder
from data.formats.store import open_file
from data.identity import Identity
from data.streams.counts import SAMPLES_LIMIT, checked_rows
from data.streams.parquet_reading import BLOCK, Columns, reading


class Texts(NamedTuple):
    """Of a shard: what they take at most, about, and what writes them into a file."""

    size: int
    write: Callable[[Path], None]


@contextmanager
def opened_texts(
    address: str,
    stored: Identity,
    format_of: Callable[[Path], ParquetFormat],
    count: Callable[[int], object],
) -> Iterator[Texts]:
    """Those of a remote shard, of which no more than the footer is read before they are written.

    `format_of`: what reads a file as that of the shard; `count`: called with the bytes that are
    fetched. Errors, also of writing: ValueError where they cannot be read without the rest, such as
    those of a damaged shard; OSError.
    """
    with open_file(address, stored, BLOCK, count=count) as opened:
        with reading(address):
            file = open_parquet(opened)
            checked_rows(address, file.metadata.num_rows, SAMPLES_LIMIT)
            if is_joined(opened, file.metadata):
                raise ValueError(f"{redact(address)}: {JOINED}")
            schema = _nullable(file.schema_arrow)
            if len({*schema.names}) < len(schema.names):
                raise ValueError(f"{redact(address)}: has columns of one name")
            columns = Columns(address, opened, file.metadata, _read_for_texts(schema, format_of))

        def write(to: Path) -> None:
            part = to.with_name(f"{to.name}.texts")
            remove(part, to.parent)  # of a try that was killed
            try:
                with reading(address), open_part(part) as written:
                    _write(columns, schema, written)
                move(part, to)
            finally:
                remove(part, to.parent)

        yield Texts(columns.decoded_bytes + 2 * file.metadata.serialized_size, write)


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema], schema.metadata)


def _read_for_texts(schema: pa.Schema, format_of: Callable[[Path], ParquetFormat]) -> list[str]:
    """The columns that are read of a file of this schema."""
    with tempfile.TemporaryDirectory(dir=make_folder(cache_folder())) as folder:
        empty = Path(folder) / "empty.parquet"
        pq.write_table(schema.empty_table(), empty)
        return [*dict.fromkeys(format_of(empty).wanted.values())]


def _write(columns: Columns, schema: pa.Schema, part: object) -> None:
    """All columns of the schema, of which the others are null: which columns a shard has says how
    its texts are read."""
    writer: pq.ParquetWriter | None = None
    for piece in columns.pieces():
        if writer is None:
            for name in columns.read:
                place, field = schema.get_field_index(name), schema.field(name)
                schema = schema.set(place, field.with_type(piece.schema.field(name).type))
            writer = pq.ParquetWriter(part, schema)
        others = {field.name: pa.nulls(len(piece), field.type) for field in schema}
        found = {name: piece[name] for name in columns.read}
        writer.write_table(pa.table(others | found, schema))
    assert writer is not None
    writer.close()
