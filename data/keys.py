"""Numbers that are equal where values are equal: by them a split, a retrieval and a loss know that
two samples have the same image, sound or caption."""

import hashlib
from collections.abc import Iterable

import numpy as np

HASH_BYTES = 16


def content_hash(content: bytes) -> bytes:
    """16 bytes, equal for equal encoded images or sounds."""
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def hash64(value: str | bytes) -> int:
    """Unsigned; different values have equal numbers once in 10^19 pairs."""
    content = value if isinstance(value, bytes) else value.encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def plain_caption(text: str) -> str:
    """A caption as it is compared: case, and how many spaces, make no difference."""
    return " ".join(text.split()).casefold()


def caption_key(text: str) -> int:
    """`hash64` of the caption as it is compared, as a signed number."""
    return int(np.uint64(hash64(plain_caption(text))).astype(np.int64))


def keys_of(hashes: Iterable[bytes]) -> np.ndarray:
    """Content hashes of at least 8 bytes -> int64 [n], the first half of each."""
    return np.array([int.from_bytes(each[:8], "little", signed=True) for each in hashes], np.int64)
