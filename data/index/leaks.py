"""Samples that training and a held-out set share: by the bytes of the image, by the decoded sound,
by their id, or by looking alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from data.index.sources import KnownSource
from data.stored.kinds import other_files

MAX_SHOWN = 5
HASH_BITS = 64
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Leak:
    """Training samples [n] that also are in a held-out set, and their partners there [n]; the first
    found of each."""

    kind: str  # "content", the name of another modality whose values are files, "id" or "near"
    train: np.ndarray
    held_out: np.ndarray


def find_leaks(
    train: KnownSource,
    train_subset: np.ndarray,
    held_out: KnownSource,
    held_out_subset: np.ndarray,
    near_bits: int | None = None,
) -> list[Leak]:
    """Each training sample once, as the strongest kind of leak that it is: content before audio
    before video before other files before id before near.

    content: the encoded images are equal byte for byte. audio: the sounds are equal sample by
    sample, once decoded. video: frames of the films look equal. Another modality whose values are
    files: its own key, else its bytes. id: the ids are equal and so is a
    caption (ids that only number the samples of a shard are equal by chance). near: perceptual
    hashes differ in at most `near_bits` of 64 bits; None: not looked for. Samples that have
    neither images nor captions are compared by their ids alone, unless these are numbers.
    """
    found, left = [], np.ones(len(train_subset), bool)
    sides = ((train, train_subset), (held_out, held_out_subset))
    for kind in ("content", *other_files(), "id"):
        own, other = _equal(*(source.keys(kind)[subset] for source, subset in sides))
        fresh = left[own]
        if kind == "id":
            pairs = zip(train_subset[own].tolist(), held_out_subset[other].tolist())
            fresh &= np.array([_is_same(train, i, held_out, j) for i, j in pairs], bool)
        found.append(Leak(kind, train_subset[own[fresh]], held_out_subset[other[fresh]]))
        left[own[fresh]] = False
    if near_bits is not None:
        hashes = [source.column("perceptual_hash")[subset] for source, subset in sides]
        own, other = _near(hashes[0], hashes[1], near_bits)
        fresh = left[own]
        found.append(Leak("near", train_subset[own[fresh]], held_out_subset[other[fresh]]))
    return [leak for leak in found if len(leak.train)]


def _is_same(train: KnownSource, i: int, held_out: KnownSource, j: int) -> bool:
    """Whether two samples with the same id also have a caption in common."""
    captions, others = train.captions(i), held_out.captions(j)
    if not captions and not others and not train.keys("content")[i]:
        return not train.identity(i).isdigit()
    return not set(captions).isdisjoint(others)


def _equal(own: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in `own` [n] whose key is in `other`, ascending, and the first place there [n]. Key 0
    is no key."""
    order = np.argsort(other, kind="stable")
    keys = other[order]
    at = np.searchsorted(keys, own)
    hit = (at < len(keys)) & (own != 0)
    hit[hit] = keys[at[hit]] == own[hit]
    return np.flatnonzero(hit), order[at[hit]]


def _near(own: np.ndarray, other: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Places as of `_equal`, for hashes at most `bits` apart: those agree in one of `bits` + 1
    bands of bits at least, so only such are compared."""
    partner = np.full(len(own), len(other), np.int64)
    edges = np.linspace(0, HASH_BITS, bits + 2).astype(int)
    for low, high in zip(edges, edges[1:]):
        mask = np.uint64(((1 << int(high - low)) - 1) << int(low))
        order = np.argsort(other & mask, kind="stable")
        bands = (other & mask)[order]
        for first in range(0, len(own), ROWS_AT_ONCE):
            rows = own[first : first + ROWS_AT_ONCE]
            start, stop = (
                np.searchsorted(bands, rows & mask, side=side) for side in ("left", "right")
            )
            counts = stop - start
            row = np.repeat(np.arange(len(rows)), counts)
            within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
            candidate = order[np.repeat(start, counts) + within]
            close = (
                (_bits_set(other[candidate] ^ rows[row]) <= bits)
                & (other[candidate] != 0)
                & (rows[row] != 0)
            )
            np.minimum.at(partner, first + row[close], candidate[close])
    places = np.flatnonzero(partner < len(other))
    return places, partner[places]


def _bits_set(values: np.ndarray) -> np.ndarray:
    """How many bits of each uint64 are 1."""
    return np.unpackbits(values.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1).sum(1)


def describe_leaks(train: KnownSource, held_out: KnownSource, name: str, leaks: list[Leak]) -> str:
    """How many of each kind, and the first few."""
    counts = ", ".join(f"{number} by {kind}" for kind, number in count_leaks(leaks).items())
    pairs = [
        (leak.kind, int(i), int(j)) for leak in leaks for i, j in zip(leak.train, leak.held_out)
    ]
    lines = [f"{len(pairs)} training samples are also in the held-out set '{name}' ({counts}):"]
    for kind, i, j in pairs[:MAX_SHOWN]:
        of = kind if kind in other_files() else None
        lines.append(f"    {train.where(i, of)} is {held_out.where(j, of)} ({kind})")
    if len(pairs) > MAX_SHOWN:
        lines.append(f"    ... and {len(pairs) - MAX_SHOWN} more")
    return "\n".join(lines)


def count_leaks(leaks: list[Leak]) -> Mapping[str, int]:
    return {leak.kind: len(leak.train) for leak in leaks}
