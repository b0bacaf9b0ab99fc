"""Which rows of shards are read, found before training from metadata alone: by an expression
(`where.py`), and by keys that are not to be seen again (`bloom.py`).

Metadata are the columns of parquet shards; of tars the parquet that img2dataset writes beside each
(`0000.parquet` beside `0000.tar`, joined by `key`); else the .json and .txt of each sample, for
which whole tars are read.

S: shards, n: kept rows of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import xxhash

from common.files import open_part, replacing_folder
from common.secrets import redact
from data.formats.store import WAIT_S
from data.identity import kept_name
from data.index.mapped import VERSION
from data.index.sources import IndexedSource
from data.progress import progress_bar
from data.streams.bloom import CAPTION, Unseen, keys_of
from data.streams.counts import AT_ONCE, is_parquet, shown_names, told_apart_by
from data.streams.metadata import WORDS, Metadata, beside, metadata_of
from data.streams.where import apply, columns

NUMBERS = -1  # instead of a seed: the rows are kept by their numbers
SEEDS = 100  # that are tried
FILES = ("counts.npy", "rows")


class Kept:
    """`counts`, `totals` [S] int64: kept rows and all rows of each shard. `marks` [S]: other
    numbers where other rows are kept. `keys` [S]: those of `metadata_keys`.

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


def metadata_keys(
    names: Sequence[str], keys: np.ndarray, shown: bool = True, limit_s: float = WAIT_S
) -> np.ndarray:
    """int64 [S]: another number where a shard or the parquet beside it has changed. `keys`: of the
    identities of the shards."""

    def look(name: str) -> int:
        there = None if is_parquet(name) else beside(name, limit_s)
        return there[1].key if there else 0

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
    `folder`: where the result is kept, from which it is taken the next time for all shards that
    have not changed. `text`: the column of captions in parquet shards. `lines`: each of their lines
    is one. `shown`, `limit_s`: as in `counts_of`. Errors: ValueError for an expression or columns
    that do not fit, metadata that are not there or are damaged, and where nothing is kept; OSError.
    """
    if where is None and unseen is None:
        return None
    if where is not None and not columns(where):
        raise ValueError(f"where={where}: names no column; write as in where=similarity>0.3")
    asked = (where, text, lines, unseen and (unseen.by, unseen.digest), *told_apart_by(names))
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
        found: list[bytes] = []
        for piece in metadata_of(name, where, by, text, limit_s):
            kept = _condition(name, where, piece)
            column = piece.table[WORDS if by == CAPTION else by].filter(kept)
            found += [key for keys in keys_of(by, column) for key in keys]
        return found

    return [key for keys in _each(read, names, True, limit_s) for key in keys]


def _each(read: Any, names: Sequence[str], shown: bool, limit_s: float) -> Iterator[Any]:
    """Of each shard what `read` gives; many at a time."""
    if not names:
        return
    whole = not is_parquet(names[0]) and beside(names[0], limit_s) is None
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
    masks, total = [np.empty(0, bool)], 0
    names: list[str] | None = None
    for found in metadata_of(name, where, by, text, limit_s):
        kept = _condition(name, where, found)
        if by is not None:
            places = np.flatnonzero(kept)
            column = found.table[WORDS if by == CAPTION else by].filter(kept)
            seen = [any(key in bloom for key in keys) for keys in keys_of(by, column, lines)]
            kept[places] = ~np.array(seen, bool)
        masks.append(kept)
        total += found.total
        if found.keys is not None:
            names = names or []
            names += found.keys
    every = np.concatenate(masks)
    if names is not None:
        hashes, seed = _unequal(name, names)
        rows = np.sort(hashes[every])
    else:
        rows, seed = np.flatnonzero(every).astype(np.int32), NUMBERS
    return rows, total, crc32(rows.tobytes(), seed & 255), seed


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
