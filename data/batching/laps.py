"""One pass over a data set in shards, of which few are read at a time: pure functions of a seed and
of how many samples each shard has; numpy only.

S: shards, n: samples of one, N: samples of all, K: shards that are mixed, P: pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from data.batching.draws import GROUP, SHARD, SHARDS
from data.concat import Concat

GROUPS_KEPT = 8


@dataclass(frozen=True, eq=False)
class Shards:
    """`counts` [S] int64: samples of each shard of a data set; `mixed`: K. `slides`: as runs of
    version 0.1 have it."""

    counts: np.ndarray
    mixed: int
    slides: bool = False

    @cached_property
    def samples(self) -> Concat:
        """Those of all shards in a row."""
        return Concat(self.counts)

    @property
    def is_whole(self) -> bool:
        """Whether this is a data set that is at hand as a whole."""
        return len(self.counts) == 1


class Lap(Protocol):
    """Every sample of a data set once, in `N` visits."""

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """[stop - start] samples of these visits, and the slot of each, from 0 to 1: samples of a
        shard keep theirs from visit to visit."""

    def live(self, start: int, stop: int) -> np.ndarray:
        """The shards that these visits read, and others near them."""

    def coming(self) -> np.ndarray:
        """The shards that have samples, in the order in which they are needed first."""

    def visits_until(self, shard: int, visit: int) -> int | None:
        """How many visits come between `visit` and the next of a shard, 0 while it is live; None:
        it comes no more."""


def make_lap(seed: int, number: int, lap: int, shards: Shards) -> Lap:
    """The pass `lap` over the data set `number` of a run."""
    return (SlidingLap if shards.slides else LanesLap)((seed, number, lap), shards)


class LanesLap:
    """Samples of K lanes by turns, which read shards of their own, one at a time.

    The shards stand in a row in a random order, and the row is cut into K lanes with as many samples
    each (one more or less). A round visits every lane once, in an order in which any few visits
    in a row are spread evenly: of 2·k of them each half of the lanes has k. So whole rounds have
    equally many samples of each part of the lanes, and what reads one part reads its shards alone.
    Every other lane is read backwards: a shard in which two lanes meet is read by both at a time.
    Within a shard the order is random. MosaicML's canonical nodes are parts of the samples in the
    same spirit.
    """

    def __init__(self, seed: tuple[int, int, int], shards: Shards) -> None:
        self._seed, self._shards = seed, shards
        self._order = np.random.default_rng([*seed, SHARDS]).permutation(len(shards.counts))
        self._row = Concat(shards.counts[self._order])
        number = max(1, min(shards.mixed, len(self._row)))
        self._turns = spread_order(number)
        whole, rest = divmod(len(self._row), number)
        self._turn = np.argsort(self._turns)
        self._lanes = Concat(whole + (self._turn < rest))
        # those of a batch, and those that come with the next
        self._permutation = lru_cache(2 * number + GROUPS_KEPT)(self._permuted)

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        number = len(self._turns)
        rounds, turns = np.divmod(np.arange(start, stop), number)
        lanes = self._turns[turns]
        found = np.empty(len(lanes), np.int64)
        for part, own, within in self._row.split(self._places(lanes, rounds)):
            shard = int(self._order[part])
            found[own] = self._shards.samples.starts[shard] + self._permutation(shard)[within]
        if self._shards.is_whole:  # which anybody can read, so each replica has as many of it
            return found, np.arange(len(found)) / len(found)
        return found, lanes / number

    def live(self, start: int, stop: int) -> np.ndarray:
        lanes = np.arange(len(self._turns))
        lengths = np.diff(self._lanes.starts)
        ends = [np.minimum(visit // len(lanes), lengths - 1) for visit in (start, stop - 1)]
        parts = [self._row.parts(self._places(lanes, rounds)) for rounds in ends]
        first, last = np.minimum(*parts), np.maximum(*parts)
        return np.unique(
            self._order[np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last)])]
        )

    def coming(self) -> np.ndarray:
        shards = self._order[self._pieces.part][np.argsort(self._pieces.visit, kind="stable")]
        _, first = np.unique(shards, return_index=True)
        return shards[np.sort(first)]

    def visits_until(self, shard: int, visit: int) -> int | None:
        pieces, part = self._pieces, int(self._place[shard])
        own = slice(*np.searchsorted(pieces.part, [part, part + 1]))
        later = pieces.end[own] > visit // len(self._turns)
        if not later.any():
            return None
        return max(0, int(pieces.visit[own][later].min()) - visit)

    def _places(self, lanes: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """Where in the row lanes are in rounds."""
        first, end = self._lanes.starts[lanes], self._lanes.starts[lanes + 1]
        return np.where(lanes % 2, end - 1 - rounds, first + rounds)

    @cached_property
    def _place(self) -> np.ndarray:
        return np.argsort(self._order)

    @cached_property
    def _pieces(self) -> _Pieces:
        cuts = np.union1d(self._row.starts, self._lanes.starts)
        begins, ends = cuts[:-1], cuts[1:]
        lanes = self._lanes.parts(begins)
        first, last = self._lanes.starts[lanes], self._lanes.starts[lanes + 1]
        is_back = lanes % 2 == 1
        begin = np.where(is_back, last - ends, begins - first)
        end = np.where(is_back, last - begins, ends - first)
        visit = begin * len(self._turns) + self._turn[lanes]
        return _Pieces(self._row.parts(begins), visit, end)

    def _permuted(self, shard: int) -> np.ndarray:
        return _permuted(self._seed, shard, int(self._shards.counts[shard]))


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Of what lanes read of shards, in the order of the row, [P] each: the shard's place there, the
    first visit, and the round after the last one."""

    part: np.ndarray
    visit: np.ndarray
    end: np.ndarray


def spread_order(number: int) -> np.ndarray:
    """[number] the numbers 0..number-1 in an order in which they are spread evenly: by their digits
    from the last to the first, the bases being the prime factors (van der Corput)."""
    order, rest = np.zeros(1, np.int64), number
    for factor in _factors(number):
        rest //= factor
        order = (order + rest * np.arange(factor)[:, None]).ravel()
    return order


def are_apart(lanes: int, visits: int, replicas: int) -> bool:
    """Whether each of the replicas, which compute equally many of any `visits` in a row, reads lanes
    that no other reads."""
    even = np.cumprod([1, *_factors(lanes)])  # so many visits in a row are of so many equal parts
    return bool(((even % replicas == 0) & (visits % even == 0)).any())


def _factors(number: int) -> list[int]:
    """Primes, ascending."""
    found, factor = [], 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            found.append(factor)
            number //= factor
    return found


class SlidingLap:
    """As runs of version 0.1 go on: shards come and leave one by one.

    The samples of each shard are cut at random into K pieces. Group g has a piece of each of the
    shards at the places g - K + 1 .. g, counted round the end, and its samples are shuffled.
    """

    def __init__(self, seed: tuple[int, int, int], shards: Shards) -> None:
        self._seed = seed
        self._shards = shards
        num_shards = len(shards.counts)
        self._mixed = max(1, min(shards.mixed, num_shards))
        self._order = np.random.default_rng([*self._seed, SHARDS]).permutation(num_shards)
        self._place = np.argsort(self._order)
        counts = shards.counts[self._order]
        sizes = np.zeros(num_shards, np.int64)
        for piece in range(self._mixed):
            whole, rest = np.divmod(counts, self._mixed)
            sizes += np.roll(whole + (piece < rest), piece)
        self.groups = Concat(sizes)
        self._group = lru_cache(GROUPS_KEPT)(self._make_group)
        # each is needed for K groups
        self._permutation: Callable[[int], np.ndarray]
        self._permutation = lru_cache(self._mixed + GROUPS_KEPT)(self._permuted)

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        (first,) = self.groups.parts(np.array([start])).tolist()
        found = []
        while self.groups.starts[first] < stop:
            begin = int(self.groups.starts[first])
            found.append(self._group(first)[max(0, start - begin) : stop - begin])
            first += 1
        samples = np.concatenate(found)
        slots = self._place[self._shards.samples.parts(samples)] % self._mixed / self._mixed
        return samples, slots

    def live(self, start: int, stop: int) -> np.ndarray:
        (first,) = self.groups.parts(np.array([start])).tolist()
        last = int(np.searchsorted(self.groups.starts, stop, side="left"))
        places = np.arange(first - self._mixed + 1, max(last, first + 1))
        return self._order[places % len(self._order)]

    def coming(self) -> np.ndarray:
        first = -np.arange(self._mixed) % len(self._order)
        return self._order[np.concatenate([first, np.arange(1, len(self._order) - len(first) + 1)])]

    def visits_until(self, shard: int, visit: int) -> int | None:
        place, groups = int(self._place[shard]), len(self._order)
        (at,) = self.groups.parts(np.array([visit])).tolist()
        if (at - place) % groups < self._mixed:
            return 0
        return int(self.groups.starts[place]) - visit if place > at else None

    def _make_group(self, group: int) -> np.ndarray:
        pieces = []
        for piece in range(self._mixed):
            shard = int(self._order[(group - piece) % len(self._order)])
            own = np.array_split(self._permutation(shard), self._mixed)[piece]
            pieces.append(self._shards.samples.starts[shard] + own)
        samples = np.concatenate(pieces).astype(np.int64)
        np.random.default_rng([*self._seed, group, GROUP]).shuffle(samples)
        return samples

    def _permuted(self, shard: int) -> np.ndarray:
        return _permuted(self._seed, shard, int(self._shards.counts[shard]))


def _permuted(seed: tuple[int, int, int], shard: int, count: int) -> np.ndarray:
    kind = np.int32 if count <= np.iinfo(np.int32).max else np.int64
    order = np.arange(count, dtype=kind)
    np.random.default_rng([*seed, shard, SHARD]).shuffle(order)
    return order
