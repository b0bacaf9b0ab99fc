"""Some columns of a parquet file, on a disk or remote: of a remote one the bytes of these columns are
fetched, and little else.

Any number of files are asked for their bytes at once, and few are decoded, a piece of rows at a
time: a page of a few bytes can stand for gigabytes, and only what was decoded tells.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from common.secrets import redact
from common.sizes import sized
from data.formats.parquet_files import DELTA, VALUES_LIMIT, text_bytes
from data.formats.specs import is_remote

BLOCK = 1 << 12  # bytes of a remote file that are read at a time, beside what is asked for
DECODED_AT_ONCE = threading.Semaphore(2)  # files; a page of one can take 2 GiB
FETCHED_LIMIT = 8 << 20  # bytes of a remote file that are held until it is its turn
ROWS_AT_ONCE = 1024
PIECE_ROWS, PIECE_BYTES = 1 << 14, 16 << 20  # of which one ends a piece
TEXT_LIMIT = 64 << 20  # bytes of the texts of ROWS_AT_ONCE rows
DECODED_LIMIT = 1 << 30  # bytes that the columns of a file decode to


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Raises ValueError where what the file holds cannot be read. Other errors: OSError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) or redact(address) in str(error):
            raise  # not of what the file holds
        raise ValueError(
            f"{redact(address)}: no parquet file, or damaged: {error}; mend it, or leave its "
            "shard out of the pattern"
        ) from error


class Columns:
    """Those of the names `read`, in a parquet file that is `opened`. Errors: ValueError for what is
    too large; the rest as `reading` has it."""

    def __init__(
        self, address: str, opened: BinaryIO, metadata: pq.FileMetaData, read: list[str]
    ) -> None:
        self.read = read
        self._address, self._opened, self._metadata = address, opened, metadata
        self._chunks = _chunks(address, metadata, read)

    @property
    def decoded_bytes(self) -> int:
        """As the footer has it."""
        return sum(max(0, chunk.total_uncompressed_size) for chunk in self._chunks)

    def pieces(self) -> Iterator[pa.Table]:
        """One or more tables that are the rows. While there are pieces to come, others wait."""
        file: Any = self._opened
        if is_remote(self._address):
            file = _Fetched(self._opened, self._chunks)
        with DECODED_AT_ONCE:
            yield from _pieces(self._address, file, self._metadata, self._chunks, self.read)


def _chunks(address: str, metadata: pq.FileMetaData, read: list[str]) -> list[Any]:
    """The chunks of the columns, of each row group. Errors: ValueError for one of which the footer
    itself says that it is too large."""
    paths = [metadata.schema.column(n).path for n in range(metadata.num_columns)]
    begins = tuple(f"{name}." for name in read)
    named = [n for n, path in enumerate(paths) if f"{path}.".startswith(begins)]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    found = [group.column(n) for group in groups for n in named]
    for each in found:
        if each.num_values > VALUES_LIMIT or each.total_uncompressed_size > DECODED_LIMIT:
            raise _too_large(
                address,
                f"column '{each.path_in_schema}' has {each.num_values:,} values of "
                f"{each.total_uncompressed_size:,} bytes in a row group",
            )
    return found


def _pieces(
    address: str, file: Any, metadata: pq.FileMetaData, chunks: list[Any], read: list[str]
) -> Iterator[pa.Table]:
    """One or more tables that are the rows. Errors: also ValueError for those that decode to too
    much."""
    # a dictionary of long texts takes no more than its numbers until its rows are measured; where a
    # text is a part of the one before, there is none
    texts = {e.path_in_schema for e in chunks if e.physical_type == "BYTE_ARRAY"}
    by_prefix = {e.path_in_schema for e in chunks if DELTA in e.encodings} & {*read}
    # Arrow's own reading ahead joins ranges, so it would not ask for what was fetched, and its
    # threads can wait for this one for ever where the file is one of Python's
    opened = pq.ParquetFile(
        file, metadata=metadata, read_dictionary=[*(texts - by_prefix)], pre_buffer=False
    )
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
        if large > TEXT_LIMIT or total > DECODED_LIMIT:
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
        f"are read, {sized(DECODED_LIMIT)} and {VALUES_LIMIT:,} values of a column: write it "
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
