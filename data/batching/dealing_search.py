"""Finds a deal: cuts the sorted samples into pieces and gives them to replicas. numpy only.

`data/batching/dealing.py` says what a deal is and which time is minimised. A piece is a micro-batch
that has no replica yet: samples that follow each other when all are sorted by length.

1. Where several numbers of micro-batches are allowed, up to NUMBERS of them are tried (`_numbers`).
2. The samples are cut with a limit on the cost of a piece. A low limit keeps the costliest piece
   small, for which the other stages wait. A high limit leaves more freedom to avoid padding.
   - The lowest possible limit is found by bisection, with pieces filled from the longest sample
     down (`_filled`). With many pieces this is near the best, because only the pieces in which one
     length follows another are padded. Beyond MOST_CUT pieces nothing else is tried.
   - With fewer pieces, dynamic programming finds the cuts with the least sum of costs (`_cut`), for
     rising limits, until no higher one can be faster than what was found.
3. Pieces are dealt in rounds of one per replica, the costliest to the replica that has least so
   far. Then the slowest and the fastest replica exchange pieces while that helps (`_handed_out`).

Costs and times are whole numbers, so every machine finds the same deal.

G: samples, P: places where samples may be cut, R: replicas, M: micro-batches of a replica.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

NEVER = 1 << 52  # above every cost; hundreds of them add up to less than 64 bits
NUMBERS = 4  # numbers of micro-batches that are tried
MOST_CUT = 64  # pieces for which dynamic programming is fast enough
PLACES = 256  # evenly spaced places for cuts, where there are more samples than that
ENDS = 128  # further places, where a length ends
ALL_LIMITS = 12  # samples up to which every limit is tried
RISE = 10  # ‰ from the lowest limit to the next one; doubled each time
NEAR = 1001  # ‰ of the time at which nothing more is looked for


@dataclass(frozen=True)
class Task:
    """A global batch, sorted by length with the shortest first, and the bounds of its deal."""

    order: np.ndarray  # [G] positions in the global batch
    costs: np.ndarray  # [G] int64 >= 1, what each sample adds to a piece of its own length; rising
    most: np.ndarray  # [G] int64, samples of a piece of which this one is the longest; falling
    fixed: int  # cost of a piece besides its samples
    min_size: int
    replicas: int
    num_stages: int
    min_micro_batches: int
    max_micro_batches: int

    @cached_property
    def lists(self) -> tuple[list[int], list[int]]:
        """`costs` and `most`: single items of lists are read several times faster."""
        return self.costs.tolist(), self.most.tolist()

    def times(self, costs: np.ndarray) -> np.ndarray:
        """[R] time of each replica, from the costs [R, M] of its micro-batches."""
        return costs.sum(axis=1) + (self.num_stages - 1) * costs.max(axis=1)


def best_deal(task: Task) -> list[list[np.ndarray]] | None:
    """[replica][micro-batch] -> sorted positions: the fastest deal found. None: none is allowed."""
    best_time, best = float("inf"), None
    tried: list[int] = []
    for least_time, number, least_sum in _numbers(task):
        if len(tried) == NUMBERS or NEAR * least_time >= 1000 * best_time:
            break
        if any(8 * abs(number - other) < other for other in tried):
            continue  # nearly the same number takes nearly the same time
        tried.append(number)
        for least_time, sizes in _cuts(task, number, least_sum):
            if NEAR * least_time >= 1000 * best_time:
                break
            time, pieces = _handed_out(task, sizes)
            if time < best_time:
                best_time, best = time, (sizes, pieces)
    if best is None:
        return None
    sizes, pieces = best
    parts = np.split(task.order, np.cumsum(sizes)[:-1])
    return [[np.sort(parts[piece]) for piece in line] for line in pieces.tolist()]


def _numbers(task: Task) -> list[tuple[int, int, int]]:
    """(time, number, sum of costs) for each number of micro-batches per replica that the bounds
    allow, the least time first. The sum is about the least there is; the time is that of a deal in
    which all micro-batches have equal parts of it."""
    highest = min(task.max_micro_batches, task.costs.size // (task.min_size * task.replicas))
    numbers = range(task.min_micro_batches, highest + 1)

    def allowed(number: int) -> bool:
        return _filled(task, NEVER, number * task.replicas) is not None

    # Without bounds the least sum has cuts only where a length ends; more pieces cost `fixed` each.
    free = replace(task, min_size=1, most=np.full_like(task.most, task.costs.size))
    places = np.concatenate([[0], _ends(task), [task.costs.size]])
    sums = _least_sums(_piece_costs(free, places, NEVER), places.size - 1)[1:, -1].tolist()
    found = []
    for number in numbers[bisect_left(numbers, True, key=allowed) :]:
        pieces = number * task.replicas
        known = min(pieces, len(sums))
        least_sum = sums[known - 1] + (pieces - known) * task.fixed
        found.append((least_sum * (number + task.num_stages - 1) // pieces, number, least_sum))
    return sorted(found)


def _cuts(task: Task, number: int, least_sum: int) -> Iterator[tuple[int, np.ndarray]]:
    """(least time, sizes [R · M] of pieces): nothing from here on takes less than that time."""
    pieces = number * task.replicas
    mean = int(task.costs.sum()) // pieces + task.fixed
    highest = int(task.costs[-1]) * task.costs.size + task.fixed
    limits = range(mean, highest + mean, max(mean >> 17, 1))

    def possible(limit: int) -> bool:
        return _filled(task, limit, pieces) is not None

    lowest = limits[bisect_left(limits, True, key=possible)]
    yield 0, np.array(_filled(task, lowest, pieces))
    if pieces > MOST_CUT:
        return
    below, places = lowest, _places(task)
    for limit in _limits(task, lowest, highest):
        sizes = _cut(task, places, pieces, limit)
        if sizes is not None:
            yield least_sum // task.replicas + (task.num_stages - 1) * below, sizes
        below = limit


def _limits(task: Task, lowest: int, highest: int) -> Iterator[int]:
    """Limits on the cost of a piece, rising."""
    yield lowest
    if task.costs.size <= ALL_LIMITS:
        sizes = np.arange(1, task.costs.size + 1)[:, None]
        limits = np.unique(task.fixed + sizes * task.costs)
        yield from limits[limits > lowest].tolist()
    elif task.num_stages == task.replicas == 1:
        yield highest  # only the sum counts
    else:
        limit, rise = lowest, RISE
        while limit < highest:
            limit, rise = limit + limit * rise // 1000 + 1, 2 * rise
            yield limit


def _filled(task: Task, limit: int, pieces: int) -> list[int] | None:
    """Sizes of so many pieces, each as full as the limit and the bounds allow, from the longest
    sample down. None: the samples do not fit, in whichever way they are cut."""
    costs, most = task.lists
    room, stop, sizes = limit - task.fixed, len(costs), []
    for kept in range((pieces - 1) * task.min_size, -1, -task.min_size):  # for the pieces to come
        size = min(room // costs[stop - 1], most[stop - 1], stop - kept)
        if size < task.min_size:
            return None
        sizes.append(size)
        stop -= size
    return None if stop else sizes[::-1]


# -- dynamic programming over the number of pieces -------------------------------------------------


def _ends(task: Task) -> np.ndarray:
    """Places where a length ends and the next one begins: all, or every few of them."""
    ends = np.flatnonzero(np.diff(task.costs)) + 1
    return ends[:: max(1, -(-ends.size // ENDS))]


def _places(task: Task) -> np.ndarray:
    """[P] where samples may be cut: anywhere, or after equal shares of the work and each length."""
    if task.costs.size <= PLACES:
        return np.arange(task.costs.size + 1)
    work = np.cumsum(task.costs)
    shares = np.searchsorted(work, work[-1] * np.arange(PLACES) // PLACES)
    return np.unique(np.concatenate([shares, _ends(task), [task.costs.size]]))


def _piece_costs(task: Task, places: np.ndarray, limit: int) -> np.ndarray:
    """[B, P - 1] cost of the piece from place p + 1 - B + b to place p + 1; NEVER: not allowed.

    Beyond B places a piece is above the limit, or there are no more places.
    """
    stops, number = places[1:], np.arange(1, places.size)
    work = np.append(0, np.cumsum(task.costs))[places]
    first = np.searchsorted(work, work[1:] - (limit - task.fixed))
    reach = max(1, int((number - first).max()))
    starts = number - reach + np.arange(reach)[:, None]
    sizes = stops - places[np.maximum(starts, 0)]
    costs = task.fixed + sizes * task.costs[stops - 1]
    allowed = (sizes >= task.min_size) & (sizes <= task.most[stops - 1]) & (costs <= limit)
    return np.where(allowed & (starts >= 0), costs, NEVER)


def _least_sums(costs: np.ndarray, pieces: int) -> np.ndarray:
    """[pieces + 1, B - 1 + P]: [n, B - 1 + p] is the least cost of n pieces that end at place p."""
    reach, stops = costs.shape
    least = np.full((pieces + 1, reach + stops), NEVER)
    least[0, reach - 1] = 0
    for number in range(pieces):
        before = sliding_window_view(least[number, :-1], stops)  # [B, P - 1]
        least[number + 1, reach:] = (before + costs).min(axis=0)
    return least


def _cut(task: Task, places: np.ndarray, pieces: int, limit: int) -> np.ndarray | None:
    """[pieces] sizes with the least sum of costs within the limit. None: nothing is within it."""
    costs = _piece_costs(task, places, limit)
    least, reach = _least_sums(costs, pieces), costs.shape[0]
    if least[-1, -1] >= NEVER:
        return None
    stop, stops = places.size - 1, []
    for number in range(pieces - 1, -1, -1):
        stops.append(places[stop])
        sums = least[number, stop - 1 : stop - 1 + reach] + costs[:, stop - 1]
        stop += int(np.argmin(sums)) - reach
    return _evened(task, np.array(stops[::-1]))


def _evened(task: Task, stops: np.ndarray) -> np.ndarray:
    """[pieces] sizes of pieces that end at `stops`, made equal where the longest are alike."""
    # different lengths may have one cost, but then not one memory
    differs = np.diff(task.costs[stops - 1], append=0) | np.diff(task.most[stops - 1], append=0)
    last = np.flatnonzero(differs)  # piece of each row of pieces that are alike
    samples, pieces = np.diff(stops[last], prepend=0), np.diff(last, prepend=-1)
    place = np.arange(stops.size) - np.repeat(last + 1 - pieces, pieces)
    return np.repeat(samples // pieces, pieces) + (place < np.repeat(samples % pieces, pieces))


# -- from pieces to replicas -----------------------------------------------------------------------


def _handed_out(task: Task, sizes: np.ndarray) -> tuple[int, np.ndarray]:
    """The time of the slowest replica, and the pieces [R, M] of each, the costliest first."""
    costs = task.fixed + sizes * task.costs[np.cumsum(sizes) - 1]
    rounds = np.argsort(-costs, kind="stable").reshape(-1, task.replicas)  # [M, R]
    pieces, sums = np.empty_like(rounds), np.zeros(task.replicas, dtype=np.int64)
    for number, own in enumerate(rounds):
        pieces[number, np.argsort(sums, kind="stable")] = own
        sums += costs[pieces[number]]
    pieces = pieces.T.copy()
    for _ in range(4 * task.replicas):
        if not _exchange(task, costs, pieces):
            break
    first = np.argsort(-costs[pieces], axis=1, kind="stable")
    return int(task.times(costs[pieces]).max()), np.take_along_axis(pieces, first, axis=1)


def _exchange(task: Task, costs: np.ndarray, pieces: np.ndarray) -> bool:
    """Exchange, in place, two pieces of the slowest and the fastest replica: those whose costs
    differ most nearly by half as much as the times. False: that would not be faster."""
    times = task.times(costs[pieces])
    slow, fast = times.argmax(), times.argmin()
    less = np.subtract.outer(costs[pieces[slow]], costs[pieces[fast]])  # [M, M]
    off = np.abs(2 * less - (times[slow] - times[fast]))
    i, j = np.unravel_index(off.argmin(), off.shape)
    both = pieces[[slow, fast]]
    both[0, i], both[1, j] = both[1, j], both[0, i]
    if task.times(costs[both]).max() >= times[slow]:
        return False
    pieces[[slow, fast]] = both
    return True
