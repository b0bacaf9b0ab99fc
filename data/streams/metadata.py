"""What the metadata of one shard say of its rows: columns of parquet, or the .json and .txt of a
tar.

Any number of shards are asked for their bytes at once, and few are decoded, a piece of rows at a
time: a page of a few bytes can stand for gigabytes, and only what was decoded tells.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.secrets import redact
from common.sizes import sized
from common.spelling import near
from data.formats.parquet_files import DELTA, VALUES_LIMIT, open_parquet, text_bytes
from data.formats.specs import is_remote
from data.formats.store import identity_of, open_file
from data.formats.webdataset import records
from data.identity import Identity
from data.stored.record import PARQUET
from data.stored.text import TEXT
from data.streams.bloom import CAPTION
from data.streams.counts import SAMPLES_LIMIT, checked_rows, is_parquet, without_query
from data.streams.where import columns

BLOCK = 1 << 16  # bytes of a parquet file that are read at a time, beside what is asked for
WORDS = ".captions"  # the column of captions, whatever it is called there
KEY, STATUS, SUCCESS = "key", "status", "success"  # of img2dataset
SHOWN = 300  # characters of a list of columns
DECODED_AT_ONCE = threading.Semaphore(2)  # shards; a page of one can take 2 GiB
FETCHED_LIMIT = 8 << 20  # bytes of a remote shard that are held until it is its turn
ROWS_AT_ONCE = 1024
PIECE_ROWS, PIECE_BYTES = 1 << 14, 16 << 20  # of which one ends a piece
TEXT_LIMIT = 64 << 20  # bytes of the texts of ROWS_AT_ONCE rows
METADATA_LIMIT = 1 << 30  # bytes that the columns of a shard decode to


class Metadata(NamedTuple):
    """Of some rows of a shard, in order. `table`: a row for each sample, of which the numbers, or
    the `keys`, say which it is. `total`: how many."""

    table: pa.Table
    keys: list[str] | None
    total: int


def metadata_of(
    name: str, where: str | None, by: str | None, text: str | None, limit_s: float
) -> Iterator[Metadata]:
    """All rows of a shard, in one piece or several. While there are pieces to come, others wait.
    Errors: ValueError, OSError."""
    words = by == CAPTION
    wanted = dict.fromkeys(columns(where) if where else ())
    wanted |= {} if by is None or words else {by: None}
    if is_parquet(name):
        stored = identity_of(name, limit_s)
        titles = (text,) if text else TEXT.names_in(PARQUET)
        for table in _columns(name, stored, [*wanted], titles if words else (), limit_s):
            yield Metadata(table, None, len(table))
    elif there := beside(name, limit_s):
        titles = (CAPTION, "text", "title") if words else ()
        for table in _columns(*there, [*wanted, KEY], titles, limit_s, (STATUS,)):
            if STATUS in table.column_names:
                table = table.filter(pc.equal(table[STATUS], SUCCESS))
            yield Metadata(table, [str(key) for key in table[KEY].to_pylist()], len(table))
    else:
        yield _of_members(name, [*wanted], words, limit_s)


def beside(name: str, limit_s: float) -> tuple[str, Identity] | None:
    """The parquet file of a tar, where there is one."""
    plain = without_query(name)
    address = f"{os.path.splitext(plain)[0]}.parquet{name[len(plain) :]}"
    try:
        return address, identity_of(address, limit_s)
    except (FileNotFoundError, PermissionError):  # which stores also say of what is not there
        return None


def _columns(
    address: str,
    stored: Identity,
    wanted: list[str],
    titles: Sequence[str],
    limit_s: float,
    maybe: Sequence[str] = (),
) -> Iterator[pa.Table]:
    """Columns of a parquet file, also those of `maybe` that are there; as `WORDS` the first of
    `titles`."""
    with open_file(address, stored, BLOCK, limit_s) as opened:
        try:
            file = open_parquet(opened)
            schema = file.schema_arrow
            captions = next((title for title in titles if title in schema.names), None)
            if titles and captions is None:
                wanted = [*wanted, titles[0]]
            for name in wanted:
                _refuse_unknown(address, name, schema.names)
                _refuse_kind(address, name, schema.field(name).type)
            checked_rows(address, file.metadata.num_rows, SAMPLES_LIMIT)
            more = [name for name in maybe if name in schema.names]
            read = [*dict.fromkeys([*wanted, *more, *([captions] if captions else ())])]
            leaves = _leaves(address, file.metadata, read)
            fetched = _Fetched(opened, leaves) if is_remote(address) else opened
            with DECODED_AT_ONCE:
                for table in _pieces(address, fetched, file.metadata, leaves, read):
                    yield table.append_column(WORDS, table[captions]) if captions else table
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) or redact(address) in str(error):
                raise  # not of what the file holds
            raise ValueError(
                f"{redact(address)}: no parquet file, or damaged: {error}; mend it, or leave its "
                "shard out of the pattern"
            ) from error


def _leaves(address: str, metadata: pq.FileMetaData, read: list[str]) -> list[Any]:
    """The chunks of the columns, of each row group. Errors: ValueError for one of which the footer
    itself says that it is too large."""
    paths = [metadata.schema.column(n).path for n in range(metadata.num_columns)]
    begins = tuple(f"{name}." for name in read)
    named = [n for n, path in enumerate(paths) if f"{path}.".startswith(begins)]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    found = [group.column(n) for group in groups for n in named]
    for each in found:
        if each.num_values > VALUES_LIMIT or each.total_uncompressed_size > METADATA_LIMIT:
            raise _too_large(
                address,
                f"column '{each.path_in_schema}' has {each.num_values:,} values of "
                f"{each.total_uncompressed_size:,} bytes in a row group",
            )
    return found


def _pieces(
    address: str, file: Any, metadata: pq.FileMetaData, leaves: list[Any], read: list[str]
) -> Iterator[pa.Table]:
    """One or more tables that are the rows. Errors: also ValueError for those that decode to too
    much."""
    # a dictionary of long texts takes no more than its numbers until its rows are measured; where a
    # text is a part of the one before, there is none
    texts = {e.path_in_schema for e in leaves if e.physical_type == "BYTE_ARRAY"}
    by_prefix = {e.path_in_schema for e in leaves if DELTA in e.encodings} & {*read}
    opened = pq.ParquetFile(file, metadata=metadata, read_dictionary=[*(texts - by_prefix)])
    # lists come in pieces of their own, which Arrow cannot join
    at_once = 1 if by_prefix or not texts <= {*read} else ROWS_AT_ONCE
    groups = range(metadata.num_row_groups)
    batches = chain.from_iterable(
        opened.iter_batches(at_once, [group], read, use_threads=False) for group in groups
    )
    held: list[pa.RecordBatch] = []
    rows = size = total = 0
    for batch in batches:
        large = sum(map(text_bytes, batch.columns))
        total += large
        if large > TEXT_LIMIT or total > METADATA_LIMIT:
            raise _too_large(address, f"the texts of {len(batch):,} rows have {large:,} bytes")
        held.append(_plain(batch))
        rows, size = rows + len(batch), size + held[-1].nbytes
        if rows >= PIECE_ROWS or size >= PIECE_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    schema = _plain(pa.RecordBatch.from_pylist([], opened.schema_arrow)).schema
    yield pa.Table.from_batches(held, None if held else pa.schema(map(schema.field, read)))


def _too_large(address: str, found: str) -> ValueError:
    return ValueError(
        f"{redact(address)}: {found}; at most {sized(TEXT_LIMIT)} of texts in {ROWS_AT_ONCE} rows "
        f"are compared, {sized(METADATA_LIMIT)} and {VALUES_LIMIT:,} values of a column: write it "
        "anew, or leave its shard out of the pattern"
    )


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With its texts as texts, not as numbers of a dictionary."""
    arrays = [_decoded(array) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _decoded(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_list(array.type) and pa.types.is_dictionary(array.type.value_type):
        values = array.values.dictionary_decode()
        return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
    return array


class _Fetched(io.RawIOBase):
    """A remote file of which the chunks that will be decoded are fetched, as far as they are
    few."""

    def __init__(self, file: BinaryIO, chunks: list[Any]) -> None:
        self._file, self._pieces = file, dict[int, bytes]()
        starts = [
            chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks
        ]  # a footer may say anything
        sizes = [max(0, chunk.total_compressed_size) for chunk in chunks]
        for start, size, sum_of in zip(starts, sizes, accumulate(sizes)):
            if start >= 0 and sum_of <= FETCHED_LIMIT:
                file.seek(start)
                self._pieces[start] = file.read(size)
        self.seek, self.tell = file.seek, file.tell  # type: ignore[method-assign]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        at = self.tell()
        piece = self._pieces.get(at, b"")
        if len(piece) < len(buffer):
            return cast(Any, self._file).readinto(buffer)
        buffer[:] = piece[: len(buffer)]
        self.seek(at + len(buffer))
        return len(buffer)


def _refuse_unknown(address: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        listed = ", ".join(known)
        listed = listed if len(listed) <= SHOWN else f"{listed[:SHOWN]}…"
        raise ValueError(
            f"{redact(address)}: has no column {name!r}{near(name, known)}; it has {listed or 'none'}"
        )


def _refuse_kind(address: str, name: str, kind: pa.DataType) -> None:
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise ValueError(
            f"{redact(address)}: column '{name}' is {kind}; numbers, texts, times and truth values "
            "are compared"
        )


def _of_members(name: str, wanted: list[str], words: bool, limit_s: float) -> Metadata:
    """From the .json of each sample of a tar, and captions as its format finds them."""
    stored = identity_of(name, limit_s)
    values: dict[str, list[Any]] = {each: [] for each in wanted}
    captions: list[list[str]] = []
    known: dict[str, None] = {}
    total = 0
    with open_file(name, stored, limit_s=limit_s) as file:
        for record, texts in records(file, stored.size, redact(name), bool(wanted), words):
            total += 1
            known |= dict.fromkeys(record)
            captions.append(texts)
            for each, column in values.items():
                column.append(record.get(each))
    if wanted and total and not known:
        raise ValueError(
            f"{redact(name)}: has no metadata: no .parquet beside it with columns key, "
            f"{', '.join(wanted)}, and no .json in it; write these, or leave where and unseen_by out"
        )
    for each in wanted if total else ():
        _refuse_unknown(name, each, [*known])
    table: dict[str, pa.Array] = {}
    for each, column in values.items():
        try:
            table[each] = pa.array(column)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise ValueError(
                f"{redact(name)}: '{each}' of its .json is of several kinds: {error}"
            ) from error
    if words:
        table[WORDS] = pa.array(captions, pa.list_(pa.string()))
    return Metadata(pa.table(table), None, total)
