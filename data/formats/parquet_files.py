"""Parquet files as they are stored: footers, rows that are decoded one by one, and values of their
cells. Files may come from anybody, so what a few bytes stand for is limited."""

import math
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.bad_samples import CAPTION_LIMIT, BadSample
from data.values import plain

# A dictionary page repeats one value of megabytes in thousands of rows for a few bytes each. Only
# what was decoded tells how large rows are, so they are decoded one by one.
ROWS_AT_ONCE = 1
# bytes of a row group that is kept; of a larger one only the rows up to the wanted one are read
KEPT_LIMIT = 256 << 20
VALUES_LIMIT = 100_000_000  # of a column of a row group; lists have several in a row
TEXT_LIMIT = 1 << 20  # bytes of the texts of a row
FOOTER_LIMIT = 32 << 20  # bytes; 100,000 chunks of columns take 10 MB
BLOCK = 1 << 20  # bytes of what is looked for in a file
OFFSETS = {pa.string(): np.int32, pa.binary(): np.int32}  # of the texts of an array
OFFSETS |= {pa.large_string(): np.int64, pa.large_binary(): np.int64}
END = 8  # bytes behind the footer: its length, and MAGIC
DELTA = "DELTA_BYTE_ARRAY"  # an encoding in which a text is a part of the one before
MAGIC = b"PAR1"  # how a file begins and ends


def open_parquet(source: Any) -> pq.ParquetFile:
    """`source`: a path, or a file that is open. Errors: OSError; pa.ArrowException, also for a
    footer that is longer than any that is read."""
    opened = source if hasattr(source, "read") else open(source, "rb")
    try:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - END))
        promised = int.from_bytes(opened.read(END)[:4], "little")
        if FOOTER_LIMIT < promised <= size - END:
            raise pa.ArrowInvalid(
                f"its footer has {promised:,} bytes; at most {FOOTER_LIMIT:,} are read"
            )
        opened.seek(0)
        return pq.ParquetFile(source)
    finally:
        if opened is not source:
            opened.close()


def is_joined(file: BinaryIO, metadata: pq.FileMetaData) -> bool:
    """Whether other parquet files stand before the one whose footer ends the file. Its places in
    the file then point into these, so their rows would be read in the place of its own."""
    end = len(MAGIC)
    if metadata.num_row_groups:
        group = metadata.row_group(metadata.num_row_groups - 1)
        for chunk in map(group.column, range(group.num_columns)):
            starts = (chunk.data_page_offset, chunk.dictionary_page_offset or math.inf)
            end = max(end, int(min(starts)) + chunk.total_compressed_size)
    # indexes of pages and Bloom filters stand there, too
    size = file.seek(0, os.SEEK_END)
    between = size - len(MAGIC) - 4 - metadata.serialized_size - end
    if between <= len(MAGIC):
        return False
    file.seek(0)
    return _holds(file, 2 * MAGIC, between + len(MAGIC))


def is_filled(metadata: pq.FileMetaData, name: str) -> bool:
    """Whether a file has a column, and its footer does not say that all of its values are null."""
    schema = metadata.schema
    own = [
        number
        for number in range(metadata.num_columns)
        if f"{schema.column(number).path}.".startswith(f"{name}.")
    ]
    groups = map(metadata.row_group, range(metadata.num_row_groups) if own else ())
    for chunk in (group.column(number) for group in groups for number in own):
        nulls = chunk.statistics and chunk.statistics.null_count  # None: not known
        if nulls is None or nulls < chunk.num_values:
            return True
    return False


def _holds(file: BinaryIO, what: bytes, within: int) -> bool:
    """Whether `what` stands in so many bytes at the beginning of a file, of which a block is held
    at a time."""
    held = b""
    while within > 0 and (block := file.read(min(BLOCK, within))):
        within -= len(block)
        held = held[1 - len(what) :] + block
        if what in held:
            return True
    return False


def small_group(file: str, group: int, column: str) -> list[pa.Array] | None:
    """An array of each row; None where they are large once they are decoded."""
    with pq.ParquetFile(file) as opened:
        if opened.metadata.row_group(group).total_byte_size > KEPT_LIMIT:
            return None
        rows: list[pa.Array] = []
        size = 0
        for batch in rows_of(opened, group, [column]):
            rows.append(batch.column(column))
            size += rows[-1].nbytes
            if size > KEPT_LIMIT:
                return None
    return rows


def rows_of(opened: pq.ParquetFile, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    # with threads a batch of one row takes ten times as long
    return opened.iter_batches(ROWS_AT_ONCE, [group], columns, use_threads=False)


def python_value(scalar: pa.Scalar) -> Any:
    """As `plain` has it. Raises BadSample: invalid-utf8, invalid-row."""
    try:
        return plain(scalar.as_py())
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise BadSample(
            "invalid-utf8", f"not UTF-8: byte {byte:#04x} at position {error.start}"
        ) from None
    except (ValueError, OverflowError) as error:  # a time beyond what Python has
        raise BadSample("invalid-row", f"a value of type {scalar.type}: {error}") from None


def texts_of(scalar: pa.Scalar) -> Any:
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
        try:
            given = plain(each.as_py())
        except UnicodeDecodeError as error:
            given = error.object
        texts.append(given.decode(errors="surrogateescape") if isinstance(given, bytes) else given)
    return texts if is_list else texts[0]


def text_bytes(array: pa.Array) -> int:
    """Of the texts of an array, also within lists and structures. A dictionary that is larger than
    the array is not gone through."""
    if pa.types.is_dictionary(array.type):
        values, used = array.dictionary, array.indices.drop_null().to_numpy()
        width = OFFSETS.get(array.type.value_type)
        if width is None or not len(used):
            return array.nbytes if width is None else 0
        ends = np.frombuffer(values.buffers()[1], width)[values.offset :]
        return int((ends[used + 1].astype(np.int64) - ends[used]).sum())
    if pa.types.is_struct(array.type):
        return sum(map(text_bytes, array.flatten()))
    if pa.types.is_nested(array.type):
        return text_bytes(array.flatten())
    return array.nbytes
