"""How many samples each shard has, without reading them.

From a `sizes.json` in the shards' folder, as webdataset writes it: {"0000.tar": 9871, ...}; else of
parquet from its footer, of a tar from img2dataset's `0000_stats.json` beside it, or from one pass
over its headers. A damaged shard counts about what its format finds in it.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.files import make_folder, replacing
from common.secrets import redact
from data.formats.specs import is_remote, local_path
from data.formats.store import WAIT_S, identity_of, open_file, read_all, read_range
from data.formats.webdataset import count_rows
from data.keys import content_hash
from data.progress import progress_bar

AT_ONCE = 64
BLOCK = 1 << 20  # bytes of a tar that are read at a time
FOOTER = 1 << 16  # bytes that are read first; most footers are smaller
PARQUET = (".parquet", ".pq")


def counts_of(
    names: list[str], kept: Path | None = None, shown: bool = True, limit_s: float = WAIT_S
) -> tuple[np.ndarray, np.ndarray]:
    """Samples and bytes of each shard, int64 [S] both; 0 bytes where they were not looked up.

    `kept`: a folder for the result, from which it is taken the next time. `shown`: with a bar of
    what takes long. `limit_s`: how long a store that is gone is waited for. Errors: ValueError,
    OSError.
    """
    file = None if kept is None else kept / f"counts-2-{_key(names)}.npy"
    found = None if file is None else _kept(file, len(names))
    if found is None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                found = _counted(pool, names, shown, limit_s)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if file is not None:
            make_folder(file.parent)
            with replacing(file) as beside, beside.open("wb") as opened:
                np.save(opened, found)
    return found[0], found[1]


def _key(names: list[str]) -> str:
    """Equal for equal shards: a signature in an address is another one the next time."""
    return content_hash(redact("\n".join(names)).encode(errors="surrogateescape")).hex()


def _kept(file: Path, number: int) -> np.ndarray | None:
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (2, number) and found.dtype == np.int64 else None


def _counted(pool: ThreadPoolExecutor, names: list[str], shown: bool, limit_s: float) -> np.ndarray:
    found = np.zeros((2, len(names)), np.int64)
    folders: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        folders.setdefault(_beside(name, "sizes.json"), []).append(number)
    ask = partial(_json, limit_s=limit_s)
    left: list[int] = []
    for (address, numbers), sizes in zip(folders.items(), pool.map(ask, folders)):
        if sizes is None:
            left += numbers
        else:
            found[:, numbers] = _listed(address, sizes, [names[number] for number in numbers])
    # img2dataset writes its statistics for all shards of a folder, so the first one tells
    firsts = {_beside(names[number], ""): _stats(names[number]) for number in reversed(left)}
    with_stats = {
        folder for folder, first in zip(firsts, pool.map(ask, firsts.values())) if first is not None
    }

    def count(number: int) -> tuple[int, int]:
        name = names[number]
        return _count(name, _beside(name, "") in with_stats, limit_s)

    for number, counted in zip(
        left,
        progress_bar(pool.map(count, left), "counting", "shard", total=len(left), shown=shown),
    ):
        found[:, number] = counted
    return found


def _listed(address: str, sizes: dict[str, Any], names: list[str]) -> list[list[int]]:
    """Counts and bytes of shards that a sizes.json lists."""
    bases = [_plain(name).rpartition("/")[2] for name in names]
    if missing := [base for base in bases if base not in sizes]:
        more = f" and {len(missing) - 1:,} more" if missing[1:] else ""
        raise ValueError(
            f"{redact(address)} lacks {missing[0]}{more}; it must have the number of samples of each "
            "shard of its folder: write it anew, or remove it, and the shards are counted"
        )
    counts = [_number(address, base, sizes[base]) for base in bases]
    return [counts, [0 if is_remote(n) else os.path.getsize(local_path(n)) for n in names]]


def _count(name: str, with_stats: bool, limit_s: float) -> tuple[int, int]:
    # of parquet img2dataset writes the rows of failures, too, so its successes are fewer
    if not _plain(name).lower().endswith(PARQUET) and with_stats:
        address = _stats(name)
        if (stats := _json(address, limit_s)) is not None:
            return _number(address, "successes", stats.get("successes")), 0
    stored = identity_of(name, limit_s)
    if _plain(name).lower().endswith(PARQUET):
        return _footer_rows(name, stored.size, limit_s), stored.size
    with open_file(name, stored, BLOCK, limit_s) as file:
        return count_rows(file, stored.size, redact(name)), stored.size


def _footer_rows(name: str, size: int, limit_s: float) -> int:
    """Of a parquet file; 1 of a damaged one, as its format has it."""
    end = read_range(name, max(0, size - FOOTER), size, limit_s)
    needed = int.from_bytes(end[-8:-4], "little") + 8
    if len(end) < needed <= size:
        end = read_range(name, size - needed, size, limit_s)
    try:
        return pq.read_metadata(pa.BufferReader(end)).num_rows
    except (pa.ArrowException, OSError):
        return 1


def _json(address: str, limit_s: float) -> dict[str, Any] | None:
    """What a file says that need not be there. Errors: ValueError, OSError."""
    try:
        found = json.loads(read_all(address, limit_s))
    except (FileNotFoundError, PermissionError):  # which stores also say of what is not there
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{redact(address)} is no JSON: {error}; mend or remove it") from error
    if not isinstance(found, dict):
        raise ValueError(f"{redact(address)} must hold an object, {{...}}; mend or remove it")
    return found


def _number(address: str, key: str, given: Any) -> int:
    if type(given) is not int or not 0 <= given < 1 << 40:
        raise ValueError(
            f"{redact(address)}: '{key}' is {given!r:.100}; a whole number of samples, 0 or more, is "
            "needed: mend or remove it"
        )
    return given


def _plain(name: str) -> str:
    """Without what follows a name in an address of the web."""
    return re.split("[?#]", name)[0] if name.startswith(("http://", "https://")) else name


def _stats(name: str) -> str:
    stem = os.path.splitext(_plain(name))[0]
    return f"{stem}_stats.json{name[len(_plain(name)) :]}"


def _beside(name: str, file: str) -> str:
    """The address of a file in a shard's folder; a signature may hold for all of it."""
    plain = _plain(name)
    return f"{plain[: plain.rfind('/') + 1]}{file}{name[len(plain) :]}"
