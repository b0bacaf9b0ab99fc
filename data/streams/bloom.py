"""Files of keys that are not to be seen again: a Bloom filter behind a line that says what it is
of.

A key that was put in is always found; of others a share, the filter's rate, is found by chance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from common.files import make_folder, refuse_longer, replacing
from data.keys import content_hash, plain_caption
from data.values import plain, whole

CAPTION = "caption"
MARK = b"wye-unseen-1 "  # 1: of the file's version
HASH = "blake2b-128"  # of UTF-8: equal in every process, unlike Python's own
LINE_LIMIT = 1 << 16  # bytes
FILE_LIMIT = 8 << 30  # bytes, which are held in memory: those of 4 billion keys
HASHES = 8  # bytes of rbloom's content that say how many hashes a key has; its bits follow
MOST_HASHES = 1100  # of a key, at the smallest rate that a float has


@dataclass(frozen=True)
class Unseen:
    """An open file. `by`: the column whose values are its keys, or `caption`. `digest`: of what it
    holds."""

    file: Path
    by: str
    digest: str

    def bloom(self) -> Any:
        """In memory: holds `content_hash` of each key."""
        with self.file.open("rb") as opened:
            opened.readline(LINE_LIMIT)
            return _rbloom().load_bytes(opened.read(), _number)


def open_unseen(file: Path, by: str = CAPTION) -> Unseen:
    """Errors: FileNotFoundError; ValueError for what is no such file, is damaged, or is of other
    keys than `by`, and where rbloom is not installed."""
    _rbloom()
    if not file.is_file():
        raise FileNotFoundError(
            f"unseen={file}: there is no such file; write one by python -m data.streams.unseen"
        )
    refuse_longer(file.stat().st_size, FILE_LIMIT, f"unseen={file}")
    with file.open("rb") as opened:
        line = opened.readline(LINE_LIMIT)
        hashes, bits = int.from_bytes(opened.read(HASHES), "little"), opened.read(1)
        opened.seek(len(line))
        digest = hashlib.file_digest(opened, "blake2b").hexdigest()
    try:
        if not line.startswith(MARK):
            raise ValueError
        head = json.loads(line.removeprefix(MARK))
        of, hashed, promised = (head[name] for name in ("by", "hash", "digest"))
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"unseen={file}: is no file of keys of this version; write one by "
            "python -m data.streams.unseen"
        ) from None
    if (hashed, promised) != (HASH, digest):
        raise ValueError(f"unseen={file}: is damaged or cut off; copy it again, or write it anew")
    if not 1 <= hashes <= MOST_HASHES or not bits:
        found = f"{hashes:,} hashes of a key" if bits else "no bits"
        raise ValueError(
            f"unseen={file}: has {found}; 1 to {MOST_HASHES:,} hashes and a bit or more are needed: "
            "write it anew"
        )
    if of != by:
        raise ValueError(
            f"unseen={file}: holds values of '{of}', and '{by}' is compared; give &unseen_by={of}, "
            f"or write a file by --by {by}"
        )
    return Unseen(file, by, digest)


def write_unseen(file: Path, by: str, keys: Sequence[bytes], rate: float) -> None:
    """`keys`: `content_hash` of each. `rate`: of others that are found. Errors: ValueError,
    OSError."""
    bloom = _rbloom()(max(1, len(keys)), rate, _number)
    bloom.update(keys)
    content = bloom.save_bytes()
    if len(content) <= HASHES:
        raise ValueError(
            f"--rate {rate}: {len(keys):,} keys are too few for it, and none would be found; give a "
            "smaller one"
        )
    digest = hashlib.blake2b(content).hexdigest()
    head = json.dumps({"by": by, "hash": HASH, "digest": digest, "keys": len(keys), "rate": rate})
    make_folder(file.parent)
    with replacing(file) as beside, beside.open("wb") as opened:
        opened.write(MARK + head.encode() + b"\n")
        opened.write(content)


def keys_of(by: str, column: pa.ChunkedArray, lines: bool = False) -> Iterator[list[bytes]]:
    """Of each row the keys of its value: one, or of a list several, or none of a null. `lines`:
    each line of a caption is one."""
    kind = column.type
    # as bytes, since some tools write texts that are not UTF-8
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not pa.types.is_null(kind.value_type):
            column = column.cast(pa.large_list(pa.large_binary()))
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.cast(pa.large_binary())
    for chunk in column.chunks:
        for value in chunk.to_pylist():
            values = value if isinstance(value, list) else [value]
            if lines and by == CAPTION:
                values = [line for each in values if each is not None for line in each.splitlines()]
            yield [key_of(by, each) for each in values if each is not None]


def key_of(by: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    value = whole(plain(value) if isinstance(value, Decimal) else value)
    text = plain_caption(value) if by == CAPTION else str(value)
    return content_hash(text.encode(errors="backslashreplace"))


def _number(key: bytes) -> int:
    return int.from_bytes(key, "little", signed=True)


def _rbloom() -> Any:
    try:
        from rbloom import Bloom
    except ImportError as error:
        raise ValueError(
            "unseen: the Python package 'rbloom' is not installed, which reads and writes files of "
            "keys; run: pip install -r requirements-filters.txt"
        ) from error
    return Bloom
