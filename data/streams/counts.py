"""How many samples each shard has, without reading them.

From a `sizes.json` in the shards' folder, as webdataset writes it: {"0000.tar": 9871, ...}; else of
parquet from its footer, of a tar from img2dataset's `0000_stats.json` beside it, or from one pass
over its headers. A damaged shard counts about what its format finds in it.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.files import make_folder, replacing
from common.output import brief
from common.secrets import redact
from data.formats.parquet_files import END, FOOTER_LIMIT
from data.formats.store import WAIT_S, identity_of, open_file, read_range, read_small
from data.formats.webdataset import count_rows
from data.identity import MISSING, Identity, kept_name
from data.index.mapped import VERSION
from data.progress import progress_bar
from data.stored.kinds import files_of, is_own

AT_ONCE = 64
# questions with a short answer, which take as long as the way to the store and back: by one process
# of a run, and far fewer than a bucket answers in a second
QUESTIONS_AT_ONCE = 128
BLOCK = 1 << 20  # bytes of a tar that are read at a time
FOOTER = 1 << 16  # bytes that are read first; most footers are smaller
SAMPLES_LIMIT = 10_000_000  # of a shard
SIZES_LIMIT = 16 << 20  # bytes of a sizes.json: 400,000 shards
STATS_LIMIT = 1 << 20  # bytes of a NAME_stats.json
ONE_AT_A_TIME = threading.Lock()  # of these in memory
T = TypeVar("T")
MEMBER = 512  # bytes that a sample of a tar has at least: the header of a file
PARQUET = (".parquet", ".pq")


def identities_of(
    names: Sequence[str], shown: bool = True, limit_s: float = WAIT_S
) -> list[Identity]:
    """Of each shard, by one look at its file or one question to its store; MISSING of those that
    are not there. Errors: OSError."""

    def look(name: str) -> Identity:
        try:
            return identity_of(name, limit_s)
        except FileNotFoundError:
            return MISSING

    with ThreadPoolExecutor(QUESTIONS_AT_ONCE) as pool:
        try:
            found = pool.map(look, names)
            return [*progress_bar(found, "looking at", "shard", total=len(names), shown=shown)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def counts_of(
    names: Sequence[str],
    sizes: np.ndarray,
    keys: np.ndarray,
    kept: Path | None = None,
    shown: bool = True,
    limit_s: float = WAIT_S,
) -> np.ndarray:
    """Samples of each shard, int64 [S]; 0 of those that are not there, whose key is 0. `sizes`,
    `keys` [S]: of the identities.

    `kept`: a folder for what is counted, from which it is taken the next time where a shard has not
    changed; what files beside the shards tell is read each time. `shown`: with a bar of what takes
    long. `limit_s`: how long a store that is gone is waited for. Errors: ValueError, OSError.
    """
    made_of = (shown_names(names), *told_apart_by(names))
    file = kept and kept / f"{kept_name('counts', VERSION, *made_of)}.npy"
    known = np.zeros((2, len(names)), np.int64) if file is None else _kept(file, len(names))
    # of tars large pieces are read
    in_footers = all(map(is_parquet, names))
    with ThreadPoolExecutor(QUESTIONS_AT_ONCE if in_footers else AT_ONCE) as pool:
        try:
            counts, told = _counted(pool, names, sizes, keys, known, shown, limit_s)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    found = np.stack([counts, np.where(told, 0, keys)])
    if file is not None and not np.array_equal(found, known):
        make_folder(file.parent)
        with replacing(file) as beside, beside.open("wb") as opened:
            np.save(opened, found)
    return counts


def told_apart_by(names: Sequence[str]) -> list[str]:
    """What the samples of a tar follow from beside its members: the endings of modalities of one's
    own, by which names with dots of their own are read (`0.depth.png`)."""
    if not names or is_parquet(names[0]):
        return []
    return sorted(end for kind in files_of() if is_own(kind) for end in kind.endings)


def shown_names(names: Sequence[str]) -> list[str]:
    """Equal for equal shards: a signature in an address is another one the next time."""
    return [redact(name) for name in names]


def _kept(file: Path, number: int) -> np.ndarray:
    """Counts, and keys of the identities of what was counted, [2, S]; zeros where nothing is
    kept."""
    with suppress(OSError, ValueError, EOFError):
        found = np.load(file, allow_pickle=False)
        if found.shape == (2, number) and found.dtype == np.int64:
            return found
    return np.zeros((2, number), np.int64)


def _counted(
    pool: ThreadPoolExecutor,
    names: Sequence[str],
    sizes: np.ndarray,
    keys: np.ndarray,
    known: np.ndarray,
    shown: bool,
    limit_s: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Counts, and which of them were told by files beside the shards. `known`: as `_kept`."""
    found, told = np.zeros(len(names), np.int64), np.zeros(len(names), bool)
    folders: dict[str, list[int]] = {}
    for number, name in ((number, names[number]) for number in np.flatnonzero(keys).tolist()):
        folders.setdefault(_beside(name, "sizes.json"), []).append(number)

    def listed(folder: tuple[str, list[int]]) -> list[int] | None:
        address, numbers = folder
        own = [(names[number], int(sizes[number])) for number in numbers]
        return _told(address, SIZES_LIMIT, limit_s, lambda told: _listed(address, told, own))

    left: list[int] = []
    for numbers, counts in zip(folders.values(), pool.map(listed, folders.items())):
        if counts is None:
            left += numbers
        else:
            found[numbers], told[numbers] = counts, True
    same = [number for number in left if keys[number] == known[1, number]]
    found[same] = known[0, same]
    left = sorted({*left} - {*same})
    # img2dataset writes its statistics for all shards of a folder, so the first one tells
    firsts = {_beside(names[number], ""): _stats(names[number]) for number in reversed(left)}
    are_there = partial(_told, most=STATS_LIMIT, limit_s=limit_s, pick=lambda told: True)
    with_stats = {*compress(firsts, pool.map(are_there, firsts.values()))}

    def count(number: int) -> tuple[int, bool]:
        name = names[number]
        return _count(name, int(sizes[number]), _beside(name, "") in with_stats, limit_s)

    for number, counted in zip(
        left,
        progress_bar(pool.map(count, left), "counting", "shard", total=len(left), shown=shown),
    ):
        found[number], told[number] = counted
    return found, told


def _listed(address: str, told: dict[str, Any], shards: list[tuple[str, int]]) -> list[int]:
    """Counts of shards, of name and size, that a sizes.json lists."""
    bases = [without_query(name).rpartition("/")[2] for name, _ in shards]
    if missing := [base for base in bases if base not in told]:
        more = f" and {len(missing) - 1:,} more" if missing[1:] else ""
        raise ValueError(
            f"{redact(address)} lacks {missing[0]}{more}; it must have the number of samples of each "
            "shard of its folder: write it anew, or remove it, and the shards are counted"
        )
    return [
        _number(address, base, told[base], most_samples(name, size))
        for base, (name, size) in zip(bases, shards)
    ]


def _count(name: str, size: int, with_stats: bool, limit_s: float) -> tuple[int, bool]:
    """How many, and whether a file beside the shard tells it."""
    # of parquet img2dataset writes the rows of failures, too, so its successes are fewer
    if not is_parquet(name) and with_stats:
        address, most = _stats(name), most_samples(name, size)
        found = _told(
            address,
            STATS_LIMIT,
            limit_s,
            lambda told: _number(address, "successes", told.get("successes"), most),
        )
        if found is not None:
            return found, True
    if is_parquet(name):
        return _footer_rows(name, size, limit_s), False
    with open_file(name, Identity(size), BLOCK, limit_s) as file:
        return count_rows(file, size, redact(name)), False


def most_samples(name: str, size: int) -> int:
    """That a shard of so many bytes can hold. A footer, or a file beside it, may say anything."""
    return min(SAMPLES_LIMIT, max(0, size if is_parquet(name) else size // MEMBER))


def checked_rows(address: str, rows: int, most: int) -> int:
    """Errors: ValueError where a footer says what cannot be."""
    if not 0 <= rows <= most:
        raise ValueError(
            f"{redact(address)}: its footer says {rows:,} rows; at most {most:,} can be in it: write "
            "it anew, or leave its shard out of the pattern"
        )
    return rows


def _footer_rows(name: str, size: int, limit_s: float) -> int:
    """Of a parquet file; 1 of a damaged one, as its format has it. Errors: ValueError, OSError."""
    end = read_range(name, max(0, size - FOOTER), size, limit_s)
    needed = int.from_bytes(end[-END:-4], "little") + END
    if len(end) < needed <= min(size, FOOTER_LIMIT + END):
        end = read_range(name, size - needed, size, limit_s)
    try:
        rows = pq.read_metadata(pa.BufferReader(end)).num_rows
    except (pa.ArrowException, OSError):
        return 1
    return checked_rows(name, rows, most_samples(name, size))


def _told(address: str, most: int, limit_s: float, pick: Callable[[dict[str, Any]], T]) -> T | None:
    """What is picked of an object that a file of JSON holds, which need not be there. Errors:
    ValueError, OSError."""
    try:
        content = read_small(address, most, limit_s)
    except (FileNotFoundError, PermissionError):  # which stores also say of what is not there
        return None
    with ONE_AT_A_TIME:
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{redact(address)} is no JSON: {error}; mend or remove it") from error
        if not isinstance(found, dict):
            raise ValueError(f"{redact(address)} must hold an object, {{...}}; mend or remove it")
        return pick(found)


def _number(address: str, key: str, given: Any, most: int) -> int:
    if type(given) is not int or not 0 <= given <= most:
        raise ValueError(
            f"{redact(address)}: '{key}' is {brief(given)}; a whole number of samples is needed, of "
            f"0 to {most:,}, as many as its shard can hold: mend or remove it"
        )
    return given


def without_query(name: str) -> str:
    """Without what follows a name in an address of the web."""
    return re.split("[?#]", name)[0] if name.startswith(("http://", "https://")) else name


def is_parquet(name: str) -> bool:
    return without_query(name).lower().endswith(PARQUET)


def _stats(name: str) -> str:
    stem = os.path.splitext(without_query(name))[0]
    return f"{stem}_stats.json{name[len(without_query(name)) :]}"


def _beside(name: str, file: str) -> str:
    """The address of a file in a shard's folder; a signature may hold for all of it."""
    plain = without_query(name)
    return f"{plain[: plain.rfind('/') + 1]}{file}{name[len(plain) :]}"
