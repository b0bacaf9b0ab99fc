"""Which rows of shards are read, found before training from metadata alone: by an expression
(`where.py`), and by keys that are not to be seen again (`bloom.py`).

Metadata are the columns of parquet shards; of tars the parquet that img2dataset writes beside each
(`0000.parquet` beside `0000.tar`, joined by `key`); else the .json and .txt of each sample, for
which whole tars are read.

S: shards, n: kept rows of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from common.files import open_part, replacing_folder
from common.secrets import redact
from common.spelling import near
from data.formats.parquet import COLUMNS
from data.formats.store import WAIT_S, identity_of, open_file
from data.formats.webdataset import records
from data.identity import Identity, kept_name
from data.index.mapped import VERSION
from data.index.sources import IndexedSource
from data.progress import progress_bar
from data.streams.bloom import CAPTION, Unseen, keys_of
from data.streams.counts import AT_ONCE, PARQUET, _plain, shown_names
from data.streams.where import apply, columns

BLOCK = 1 << 16  # bytes of a parquet file that are read at a time, beside what is asked for
WORDS = ".captions"  # the column of captions, whatever it is called there
KEY, STATUS, SUCCESS = "key", "status", "success"  # of img2dataset
NUMBERS = -1  # instead of a seed: the rows are kept by their numbers
SEEDS = 100  # that are tried
SHOWN = 300  # characters of a list of columns
FILES = ("counts.npy", "rows")


class Kept:
    """`counts`, `totals` [S] int64: kept rows and all rows of each shard. `marks` [S]: other numbers
    where other rows are kept. `keys` [S]: those of `metadata_keys`.

    On disk, in a folder: counts.npy has these, and rows in 4 bytes each what is kept, one shard
    after the other: numbers of rows, or, where only their keys are known, hashes of these by a seed
    by which no two of the shard are equal. Pickled it is a path. Errors: OSError, ValueError.
    """

    def __init__(self, folder: Path, shards: np.ndarray | None = None) -> None:
        """`shards`: their numbers, where these are some of those of the folder."""
        self.folder, self._shards = folder, shards
        of = np.load(folder / FILES[0], allow_pickle=False)
        starts = np.concatenate([[0], np.cumsum(of[0])])
        self._rows = np.memmap(folder / FILES[1], np.int32, "r")
        if len(self._rows) != starts[-1]:
            raise ValueError(f"{folder} is not what was written")
        self.counts, self.totals, self.marks, self.seeds, self.keys = (
            of if shards is None else of[:, shards]
        )
        self._starts = starts[:-1] if shards is None else starts[shards]

    def __reduce__(self):
        return Kept, (self.folder, self._shards)

    def chosen(self, shards: np.ndarray) -> Kept:
        return Kept(self.folder, shards if self._shards is None else self._shards[shards])

    def rows(self, shard: int) -> np.ndarray:
        """[n] int32, ascending, as they are on disk."""
        return self._rows[self._starts[shard] : self._starts[shard] + self.counts[shard]]

    def rows_of(self, shard: int, source: IndexedSource) -> np.ndarray:
        """[n], ascending: their places among the samples of the shard, which are fewer where it
        lacks some."""
        if (seed := int(self.seeds[shard])) == NUMBERS:
            have = source.column("row")
        else:
            keys = [""] * len(source)
            short = source.format.short[source.format.files[0]]  # type: ignore[attr-defined]
            for place, name in source.index.filled("id"):
                keys[place] = name.removeprefix(short).removeprefix("/")
            have = _hashes(keys, seed)
        return np.flatnonzero(np.isin(have, self.rows(shard)))


class Metadata(NamedTuple):
    """Of a shard. `table`: a row for each sample, of which the `numbers`, or the `keys`, say which
    it is. `total`: rows of the shard."""

    table: pa.Table
    keys: list[str] | None
    total: int


def metadata_keys(
    names: Sequence[str], keys: np.ndarray, shown: bool = True, limit_s: float = WAIT_S
) -> np.ndarray:
    """int64 [S]: another number where a shard or the parquet beside it has changed. `keys`: of the
    identities of the shards."""

    def look(name: str) -> int:
        beside = None if _plain(name).lower().endswith(PARQUET) else _beside(name, limit_s)
        return beside[1].key if beside else 0

    return keys ^ np.fromiter(_each(look, names, shown, limit_s), np.int64, len(names))


def kept_rows(
    names: Sequence[str],
    keys: np.ndarray,
    folder: Path,
    where: str | None = None,
    unseen: Unseen | None = None,
    text: str | None = None,
    lines: bool = False,
    shown: bool = True,
    limit_s: float = WAIT_S,
) -> Kept | None:
    """What is read of each shard; None: all of it.

    `keys`: as `metadata_keys` gives them; 0 where a shard is not there, of which no row is kept.
    `folder`: where the result is kept, from which it is taken the next time for all shards that have
    not changed. `text`: the column of captions in parquet shards. `lines`: each of their lines is
    one. `shown`, `limit_s`: as in `counts_of`. Errors: ValueError for an
    expression or columns that do not fit, metadata that are not there or are damaged, and where
    nothing is kept; OSError.
    """
    if where is None and unseen is None:
        return None
    # read before there are threads: in two of them at once, Python 3.11's parser may fail
    if where is not None and not columns(where):
        raise ValueError(f"where={where}: names no column; write as in where=similarity>0.3")
    asked = (where, text, lines, unseen and (unseen.by, unseen.digest))
    place = folder / kept_name("kept", VERSION, shown_names(names), asked)
    old: Kept | None = None
    with suppress(OSError, ValueError, EOFError):  # not there, or damaged: it is made
        old = Kept(place)
    if old is not None and np.array_equal(old.keys, keys):
        return old
    is_new = [
        key != 0 and (old is None or old.keys[n] != key) for n, key in enumerate(keys.tolist())
    ]
    bloom = unseen and unseen.bloom()
    by = unseen.by if unseen else None
    read = partial(_kept, where=where, by=by, bloom=bloom, text=text, lines=lines, limit_s=limit_s)
    found: list[tuple[int, ...]] = []
    newly = _each(read, [*compress(names, is_new)], shown, limit_s)
    with replacing_folder(place) as beside, open_part(beside / FILES[1]) as file:
        for n, key in enumerate(keys.tolist()):
            rows, numbers = np.empty(0, np.int32), [0, 0, 0]
            if is_new[n]:
                rows, *numbers = next(newly)
            elif key and old is not None:
                rows = old.rows(n)
                numbers = [int(column[n]) for column in (old.totals, old.marks, old.seeds)]
            file.write(rows.tobytes())
            found.append((len(rows), *numbers, key))
        of = np.array(found, np.int64).T
        np.save(beside / FILES[0], of)
        if not of[0].any():
            given = {"where": where, "unseen": unseen and unseen.file}
            words = " and ".join(f"{name}={value}" for name, value in given.items() if value)
            raise ValueError(
                f"{words}: none of {of[1].sum():,} rows is kept; compare it with the values that "
                "the columns have"
            )
    return Kept(place)


def keys_in(
    names: Sequence[str],
    by: str,
    where: str | None = None,
    text: str | None = None,
    limit_s: float = WAIT_S,
) -> list[bytes]:
    """The keys of all rows, or of those that `where` is true of."""

    if where is not None:
        columns(where)  # as in `kept_rows`

    def read(name: str) -> list[bytes]:
        found = _metadata(name, where, by, text, limit_s)
        column = found.table[WORDS if by == CAPTION else by].filter(_condition(name, where, found))
        return [key for keys in keys_of(by, column) for key in keys]

    return [key for keys in _each(read, names, True, limit_s) for key in keys]


def _each(read: Any, names: Sequence[str], shown: bool, limit_s: float) -> Iterator[Any]:
    """Of each shard what `read` gives; many at a time."""
    if not names:
        return
    whole = not names[0].lower().endswith(PARQUET) and _beside(names[0], limit_s) is None
    what = "filtering, for which whole tars are read" if whole else "filtering"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            found = pool.map(read, names)
            yield from progress_bar(found, what, "shard", total=len(names), shown=shown)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _kept(
    name: str,
    where: str | None,
    by: str | None,
    bloom: Any,
    text: str | None,
    lines: bool,
    limit_s: float,
) -> tuple[np.ndarray, int, int, int]:
    """Rows, as `Kept` has them, and the shard's numbers there."""
    found = _metadata(name, where, by, text, limit_s)
    kept = _condition(name, where, found)
    if by is not None:
        places = np.flatnonzero(kept)
        column = found.table[WORDS if by == CAPTION else by].filter(kept)
        seen = [any(key in bloom for key in keys) for keys in keys_of(by, column, lines)]
        kept[places] = ~np.array(seen, bool)
    if found.keys is None:
        rows, seed = np.flatnonzero(kept).astype(np.int32), NUMBERS
    else:
        hashes, seed = _unequal(name, found.keys)
        rows = np.sort(hashes[kept])
    return rows, found.total, crc32(rows.tobytes(), seed & 255), seed


def _condition(name: str, where: str | None, found: Metadata) -> np.ndarray:
    if where is None:
        return np.ones(len(found.table), bool)
    try:
        return apply(where, found.table).copy()
    except ValueError as error:
        raise ValueError(f"{redact(name)}: {error}") from error


def _unequal(name: str, keys: list[str]) -> tuple[np.ndarray, int]:
    """Hashes of the keys, and the seed by which they differ."""
    for seed in range(SEEDS):
        hashes = _hashes(keys, seed)
        if len(np.unique(hashes)) == len(keys):
            return hashes, seed
    raise ValueError(
        f"{redact(name)}: of its {len(keys):,} keys two are equal, or they are too many; each sample "
        "needs a key of its own, and a shard some 100,000 at most: write it anew"
    )


def _hashes(keys: Sequence[str], seed: int) -> np.ndarray:
    hashes = (
        xxhash.xxh32_intdigest(each.removeprefix("./").encode(errors="backslashreplace"), seed)
        for each in keys
    )
    return np.fromiter(hashes, np.uint32, len(keys)).view(np.int32)


# -- metadata of one shard


def _metadata(
    name: str, where: str | None, by: str | None, text: str | None, limit_s: float
) -> Metadata:
    """Errors: ValueError, OSError."""
    words = by == CAPTION
    wanted = dict.fromkeys(columns(where) if where else ())
    wanted |= {} if by is None or words else {by: None}
    if _plain(name).lower().endswith(PARQUET):
        stored = identity_of(name, limit_s)
        titles = (text,) if text else COLUMNS["text"]
        table = _columns(name, stored, [*wanted], titles if words else (), limit_s)
        return Metadata(table, None, len(table))
    if (there := _beside(name, limit_s)) is None:
        return _of_members(name, [*wanted], words, limit_s)
    titles = (CAPTION, "text", "title") if words else ()
    table = _columns(*there, [*wanted, KEY], titles, limit_s, (STATUS,))
    if STATUS in table.column_names:
        table = table.filter(pc.equal(table[STATUS], SUCCESS))
    keys = [str(key) for key in table[KEY].to_pylist()]
    return Metadata(table, keys, len(table))


def _beside(name: str, limit_s: float) -> tuple[str, Identity] | None:
    """The parquet file of a tar, where there is one."""
    plain = _plain(name)
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
) -> pa.Table:
    """Columns of a parquet file, also those of `maybe` that are there; as `WORDS` the first of
    `titles`."""
    with open_file(address, stored, BLOCK, limit_s) as opened:
        try:
            file = pq.ParquetFile(opened)
            schema = file.schema_arrow
            captions = next((title for title in titles if title in schema.names), None)
            if titles and captions is None:
                wanted = [*wanted, titles[0]]
            for name in wanted:
                _refuse_unknown(address, name, schema.names)
                kind = schema.field(name).type
                if pa.types.is_nested(kind) or pa.types.is_binary(kind):
                    raise ValueError(
                        f"{redact(address)}: column '{name}' is {kind}; numbers, texts, times and "
                        "truth values are compared"
                    )
            more = [name for name in maybe if name in schema.names]
            read = dict.fromkeys([*wanted, *more, *([captions] if captions else ())])
            table = file.read([*read], use_threads=False)
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) or redact(address) in str(error):
                raise  # not of what the file holds
            raise ValueError(
                f"{redact(address)}: no parquet file, or damaged: {error}; mend it, or leave its "
                "shard out of the pattern"
            ) from error
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            plain = table[field.name].cast(field.type.value_type)
            table = table.set_column(number, field.name, plain)
    return table.append_column(WORDS, table[captions]) if captions else table


def _refuse_unknown(address: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        listed = ", ".join(known)
        listed = listed if len(listed) <= SHOWN else f"{listed[:SHOWN]}…"
        raise ValueError(
            f"{redact(address)}: has no column {name!r}{near(name, known)}; it has {listed or 'none'}"
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
