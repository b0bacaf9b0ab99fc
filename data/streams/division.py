"""Which shards of a stream are trained on: pure functions of their counts and the seed.

S: shards, N: samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.batching.draws import HELD_OUT, LIMIT

MOST_HELD_OUT = 10_000  # samples; more would take longer to evaluate than they are worth


class Division(NamedTuple):
    """`held_out`, `train`: numbers of shards, ascending; `counts`: samples of each of `train` that
    are used."""

    held_out: np.ndarray
    train: np.ndarray
    counts: np.ndarray


def divide_shards(
    counts: np.ndarray, val_fraction: float, limit: int | None, seed: int
) -> Division:
    """Hold out whole shards, drawn at random, with about `val_fraction` of the samples, or 10,000;
    train on the others, on at most `limit` samples. Errors: ValueError where one shard
    would have to be on both sides."""
    shards = np.arange(len(counts))
    wanted = min(val_fraction * counts.sum(), MOST_HELD_OUT)
    drawn = np.random.default_rng([seed, HELD_OUT]).permutation(np.flatnonzero(counts))
    number = int(np.abs(np.cumsum(counts[drawn]) - wanted).argmin()) + 1 if wanted > 0 else 0
    if number >= len(drawn):
        raise ValueError(
            f"a stream holds out whole shards, and all {len(drawn)} of these would be; give "
            "--val-data, a smaller --val-fraction (0: nothing is held out), or more and smaller "
            "shards"
        )
    held_out = np.sort(drawn[:number])
    train = np.setdiff1d(shards, held_out)
    used = counts[train]
    if limit is not None and limit < used.sum():
        order = np.random.default_rng([seed, LIMIT]).permutation(len(train))
        before = np.cumsum(used[order]) - used[order]
        used = used.copy()
        used[order] = np.clip(limit - before, 0, used[order])
        train, used = train[used > 0], used[used > 0]
    return Division(held_out, train, used)
