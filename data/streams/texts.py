"""The texts of a remote shard without its images.

Of a parquet shard only the columns that are read for texts are fetched, and written as a parquet
file of the same rows. Of a tar beside which img2dataset has written a parquet file, the captions of
that one are fetched, and written as a tar of the same samples; what reads images compares them with
those of the tar.

A whole shard is a hundred times as large. A stage of texts needs a part of every shard, since texts
are packed by length over the whole global batch.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import make_folder, move, open_part, remove
from common.output import brief
from common.secrets import redact
from data.bad_samples import REASON_OF_CODE
from data.formats.parquet import JOINED, ParquetFormat
from data.formats.parquet_files import is_joined, open_parquet
from data.formats.specs import cache_folder
from data.formats.store import open_file
from data.formats.webdataset import keys_and_captions
from data.identity import Identity
from data.index.sources import IndexedSource
from data.streams.bloom import CAPTION
from data.streams.counts import SAMPLES_LIMIT, checked_rows
from data.streams.metadata import KEY, WORDS, Beside, beside, rows_beside
from data.streams.parquet_reading import BLOCK, Columns, reading

TAR_LIMIT = 256 << 20  # bytes of the captions of a tar
TAR_BLOCK = 1 << 14  # bytes of a remote tar that are read at a time
TRIED = 8  # samples of a tar
DAMAGES = ("truncated-archive", "empty-file")  # of a shard
PLAIN_KEY = re.compile(r"[^./\\\x00-\x1f]{1,90}")  # a name of members that is read as it is written


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


def tar_of_captions(
    address: str, there: Beside, number: int, count: Callable[[int], object]
) -> bytes:
    """A tar of as many samples as a remote one has, `number`, with the captions that the parquet
    file beside that has. `count`: as in `opened_texts`. Errors: ValueError where it is not of these
    samples; OSError."""
    tables = rows_beside(there, [], True, count=count)
    written, total = io.BytesIO(), 0
    with tarfile.TarFile(fileobj=written, mode="w") as tar:
        for table in tables:
            for key, caption in zip(table[KEY].to_pylist(), table[WORDS].to_pylist()):
                total += 1
                if not isinstance(key, str) or not PLAIN_KEY.fullmatch(key):
                    raise ValueError(
                        f"{redact(address)}: key {brief(key)} beside it is no plain name"
                    )
                ending, content = "txt", caption
                if not isinstance(caption, str):  # a sample without a caption
                    ending, content = "json", json.dumps({CAPTION: caption})
                member = tarfile.TarInfo(f"{key}.{ending}")
                encoded = content.encode(errors="surrogateescape")
                member.size = len(encoded)
                tar.addfile(member, io.BytesIO(encoded))
                if written.tell() > TAR_LIMIT:
                    raise ValueError(f"{redact(address)}: the captions beside it take too much")
    if total != number:
        raise ValueError(f"{redact(address)}: {total:,} rows beside it, {number:,} samples")
    return written.getvalue()


def agrees_at_first(address: str, number: int, is_lines: bool) -> bool:
    """Whether the first samples of a remote tar are named and described as beside it. Errors:
    OSError."""
    there = beside(address)
    if there is None:
        return False
    with suppress(ValueError):
        captions = tar_of_captions(address, there, number, lambda fetched: None)
        told = keys_and_captions(io.BytesIO(captions), len(captions), address, is_lines)
        with open_file(address, block=TAR_BLOCK) as tar:
            size = tar.seek(0, os.SEEK_END)
            tar.seek(0)
            own = keys_and_captions(tar, size, redact(address), is_lines)
            return [*islice(own, TRIED)] == [*islice(told, TRIED)]
    return False


def unlike_captions(captions: bytes, source: IndexedSource, is_lines: bool) -> str | None:
    """The name of the first sample of a tar that has another one, or other captions, than
    `tar_of_captions` gave; None: there is none. What a damaged tar lacks is not compared."""
    short = source.format.short[source.format.files[0]]  # type: ignore[attr-defined]
    bad, told = (
        source.column("bad"),
        keys_and_captions(io.BytesIO(captions), len(captions), short, is_lines),
    )
    for i, (key, texts) in enumerate(told):
        if i == len(source) or REASON_OF_CODE.get(int(bad[i])) in DAMAGES:
            return None
        name = source.identity(i)
        if name != f"{short}/{key}" or (not bad[i] and texts != source.captions(i)):
            return name
    return None
