"""What the metadata of one shard say of its rows: columns of parquet, or the .json and .txt of a
tar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from common.secrets import redact
from common.spelling import near
from data.formats.parquet_files import open_parquet
from data.formats.store import WAIT_S, identity_of, open_file
from data.formats.webdataset import records
from data.identity import Identity
from data.stored.record import PARQUET
from data.stored.text import TEXT
from data.streams.bloom import CAPTION
from data.streams.counts import SAMPLES_LIMIT, checked_rows, is_parquet, without_query
from data.streams.parquet_reading import BLOCK, Columns, reading
from data.streams.where import columns

WORDS = ".captions"  # the column of captions, whatever it is called there
KEY, STATUS, SUCCESS = "key", "status", "success"  # of img2dataset
SHOWN = 300  # characters of a list of columns


class Beside(NamedTuple):
    """The parquet file that img2dataset writes beside a tar."""

    address: str
    stored: Identity


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
    elif (there := beside(name, limit_s)) is not None:
        for table in rows_beside(there, [*wanted], words, limit_s):
            yield Metadata(table, [str(key) for key in table[KEY].to_pylist()], len(table))
    else:
        yield _of_members(name, [*wanted], words, limit_s)


def beside(name: str, limit_s: float = WAIT_S) -> Beside | None:
    """The parquet file of a tar, where there is one. Errors: OSError."""
    plain = without_query(name)
    address = f"{os.path.splitext(plain)[0]}.parquet{name[len(plain) :]}"
    try:
        return Beside(address, identity_of(address, limit_s))
    except (FileNotFoundError, PermissionError):  # which stores also say of what is not there
        return None


def rows_beside(
    there: Beside,
    wanted: list[str],
    words: bool,
    limit_s: float = WAIT_S,
    count: Callable[[int], object] = lambda fetched: None,
) -> Iterator[pa.Table]:
    """Of the samples of a tar what the parquet file beside it has: their keys, the columns `wanted`
    and, as `WORDS`, captions. `count`: as in `open_file`."""
    titles = (CAPTION, "text", "title") if words else ()
    tables = _columns(*there, [*wanted, KEY], titles, limit_s, (STATUS,), count)
    return (
        table.filter(pc.equal(table[STATUS], SUCCESS)) if STATUS in table.column_names else table
        for table in tables
    )


def _columns(
    address: str,
    stored: Identity,
    wanted: list[str],
    titles: Sequence[str],
    limit_s: float,
    maybe: Sequence[str] = (),
    count: Callable[[int], object] = lambda fetched: None,
) -> Iterator[pa.Table]:
    """Columns of a parquet file, also those of `maybe` that are there; as `WORDS` the first of
    `titles`."""
    with open_file(address, stored, BLOCK, limit_s, count) as opened, reading(address):
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
        for table in Columns(address, opened, file.metadata, read).pieces():
            yield table.append_column(WORDS, table[captions]) if captions else table


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
