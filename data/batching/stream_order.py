"""The order of samples that lie in shards, of which few are at hand at a time: a pure function of
(seed, step) and of how many samples each shard has; numpy only.

S: shards of a data set, n: samples of one, K: shards that are mixed, N: samples of the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from data.batching.laps import Lap, Shards, are_apart, make_lap
from data.batching.order import GlobalOrder
from data.concat import Concat

LAPS_KEPT = 4  # of each data set: those of a batch, and those that are looked up ahead
MEASURED_PARTS = 16


@dataclass(frozen=True, eq=False)
class StreamOrder(GlobalOrder):
    """A `GlobalOrder` in which neighbouring steps read the same few shards: laps over each data set,
    see `LanesLap`.

    A data set with weight w has w laps an epoch; they go on from epoch to epoch, so that no sample
    comes again before all have come. Data sets with several `parts` come by turns, evenly.

    Within a global batch samples are sorted by their slots, the lanes that read them. So a replica,
    which computes consecutive positions, reads the shards of its own lanes: alone where the replicas
    divide the number of lanes and the global batch, else neighbours share a lane. The loss does not
    depend on the order within a global batch.
    """

    shards: tuple[Shards, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = [int(each.counts.sum()) for each in self.shards]
        if counts != [count for count, _ in self._newest(0)]:
            raise ValueError(f"shards with {counts} samples: those of {self.parts} are needed")

    def _newest(self, epoch: int) -> Sequence[tuple[int, float]]:
        return self._mixes_until(epoch)[-1][1] or ((self.num_samples, 1.0),)

    def _visited(self, epoch: int, start: int, stop: int) -> np.ndarray:
        samples, slots = [], []
        first_sample = 0
        for number, (count, visits) in enumerate(self._shares(epoch, start, stop)):
            for lap, begin, end in _laps(count, visits):
                found, slot = self._lap(number, lap).samples(begin, end)
                samples.append(first_sample + found)
                slots.append(slot)
            first_sample += count
        # by turns before they are sorted, so that the shards of all data sets come evenly
        by_slot = np.argsort(np.concatenate(slots), kind="stable")
        return np.concatenate(samples)[by_slot]

    def _shares(self, epoch: int, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """Of each data set: its samples, and which of its visits, counted over all epochs, are
        among the visits start..stop-1 of an epoch."""
        mixes = self._mixes_until(epoch)
        ends = [*(first for first, _ in mixes[1:]), epoch]
        parts = self._newest(epoch)
        visits = [round(weight * count) for count, weight in parts]
        own = zip(*(_turns(visits, position) for position in (start, stop)))
        for number, ((count, _), (first, last)) in enumerate(zip(parts, own)):
            before = 0
            for (begin, at), end in zip(mixes, ends):
                n, weight = (at or parts)[number]
                before += (end - begin) * round(weight * n)
            yield count, range(before + first, before + last)

    @cached_property
    def _lap(self) -> Callable[[int, int], Lap]:
        return lru_cache(LAPS_KEPT * len(self.shards))(
            lambda number, lap: make_lap(self.seed, number, lap, self.shards[number])
        )

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    # -- what is needed when

    def needed(self, samples: np.ndarray) -> dict[int, np.ndarray]:
        """Number of each data set -> the shards, ascending, that training samples [n] lie in."""
        sets = Concat(len(each.samples) for each in self.shards)
        return {
            number: np.unique(self.shards[number].samples.parts(own))
            for number, _, own in sets.split(samples)
        }

    def live(self, step: int) -> dict[int, np.ndarray]:
        """Number of each data set -> the shards that a step and those near it read."""
        stretch = self._stretch(step)
        epoch, start = stretch.place(step)
        found = {}
        for number, (count, visits) in enumerate(self._shares(epoch, start, start + stretch.size)):
            lives = [self._lap(number, k).live(a, b) for k, a, b in _laps(count, visits)]
            if lives:
                found[number] = np.unique(np.concatenate(lives))
        return found

    def coming(self, number: int) -> np.ndarray:
        """[S]: the shards of a data set in the order in which its first lap needs them."""
        return self._lap(number, 0).coming()

    def next_use(self, number: int, shard: int, step: int) -> float:
        """Epochs until a shard is read again, from `step` on; 0 while it is."""
        stretch = self._stretch(step)
        epoch, start = stretch.place(step)
        count, visits = list(self._shares(epoch, start, start))[number]
        per_epoch = round(self._newest(epoch)[number][1] * count)
        if not count or not per_epoch:
            return float("inf")
        lap, within = divmod(visits.start, count)
        wait = self._lap(number, lap).visits_until(shard, within)
        if wait is None:
            wait = count - within + (self._lap(number, lap + 1).visits_until(shard, 0) or 0)
        return wait / per_epoch

    def are_read_apart(self, replicas: int) -> bool:
        """Whether each of the replicas, where they compute equally many samples of a global batch,
        reads shards that no other reads, but for those in which lanes meet. Else neighbours have
        lanes in common."""
        visits = [round(weight * count) for count, weight in self._newest(0)]
        own = [self.global_batch_size * each / sum(visits) for each in visits]
        return replicas == 1 or all(
            each.is_integer()
            and (each % replicas == 0 if at.is_whole else are_apart(at.mixed, int(each), replicas))
            for each, at in zip(own, self.shards)
        )

    def mixing(self, step: int = 0) -> dict[int, Mixing]:
        """Number of each data set -> how well its samples are mixed, and of how many of its shards
        the global batch of a step has samples."""
        needed = self.needed(self.batch(step))
        return {
            number: Mixing(len(needed.get(number, ())), self._rank_correlation_of(number))
            for number, shards in enumerate(self.shards)
            if shards.counts.sum()
        }

    def _rank_correlation_of(self, number: int) -> float:
        """Of some parts of the first lap of a data set."""
        places, numbers = [], []
        lap, shards = self._lap(number, 0), self.shards[number]
        count = len(shards.samples)
        starts = np.arange(0, count, max(shards.mixed, count // len(shards.counts)))
        ends = np.append(starts[1:], count)
        chosen = np.unique(np.linspace(0, len(starts) - 1, MEASURED_PARTS).astype(int))
        for start, end in zip(starts[chosen].tolist(), ends[chosen].tolist()):
            numbers.append(lap.samples(start, end)[0])
            places.append(np.arange(start, end))
        return _rank_correlation(np.concatenate(places), np.concatenate(numbers))


@dataclass(frozen=True)
class Mixing:
    """`shards_per_batch`: of how many shards a global batch has samples. `rank_correlation`: of
    where samples are stored and when they come in an epoch (Spearman's), 0 for a full shuffle, 1
    without any."""

    shards_per_batch: int
    rank_correlation: float


def _laps(count: int, visits: range) -> Iterator[tuple[int, int, int]]:
    """(lap, first, one after the last visit within it) of visits counted over all laps."""
    at = visits.start
    while at < visits.stop:
        lap, within = divmod(at, count)
        end = min(count, within + visits.stop - at)
        yield lap, within, end
        at += end - within


def _turns(visits: Sequence[int], position: int) -> list[int]:
    """How many of the first `position` visits of an epoch are of each data set, which has so many
    `visits` in it: those at the times (k + 1/2) / visits, in the order of these times."""
    total = sum(visits)
    around = position / total
    # each is at most one off its share, so all that are in question lie this near
    near = (len(visits) + 1) / total
    least = [max(0, int((around - near) * each)) for each in visits]
    most = [min(each, int((around + near) * each) + 2) for each in visits]
    times = [(np.arange(a, b) + 0.5) / each for a, b, each in zip(least, most, visits) if each]
    of = [np.full(b - a, n) for n, (a, b, each) in enumerate(zip(least, most, visits)) if each]
    missing = position - sum(least)
    first = np.lexsort((np.concatenate(of), np.concatenate(times)))[:missing]
    chosen = np.bincount(np.concatenate(of)[first], minlength=len(visits))
    return [a + int(more) for a, more in zip(least, chosen)]


def _rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    if len(first) < 2:
        return 0.0
    ranks = [np.argsort(np.argsort(each)).astype(np.float64) for each in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
