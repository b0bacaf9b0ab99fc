"""How the pieces of a deal are found: limits, pools, hands. In whole numbers, so that every machine finds the same. numpy only.

`data/batching/dealing.py` says what a deal is and what is minimised. Here the samples of a task are sorted by length, as ladders with a step for each
length; those of different ladders share no micro-batch. A pool is all that is padded to one length, in a number of micro-batches:

    lengths          8 8 8 8 8 8 8 8 8 8 8 8 8 8 16 16 16 16 24 24
    pools            8 8 8 8 8 8 8 8 8 8 8 8 │ 8 8 16 16 16 16 │ 24 24       the best where a micro-batch may have 48 tokens
    micro-batches    6 + 6                   │ 3 + 3           │ 2

1. For a limit on the cost of a micro-batch, and a price for having another one, the pools with least padding are found by dynamic programming
   over the steps, for hundreds of limits, prices and numbers of micro-batches at once (`_walk`).
2. The most promising become hands: micro-batches sorted by cost and dealt in rounds of one per replica, the costliest to whom has least.
3. From the slowest replica samples move to others within a pool, or micro-batches are swapped, while that helps.

K: steps of a ladder, S: kinds of stages, R: replicas, M: micro-batches of a replica.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

_NEVER = np.int64(1 << 60)
_LIMITS = (0, 5, 10, 15, 20, 30, 40, 55, 75, 100, 150, 200, 300, 500, 1000, 3000)  # ‰ above the lowest that is possible
_PRICES = (0, 20, 60, 150, 400)  # ‰ of the limit; and one beyond everything, which asks for the fewest micro-batches
_NUMBERS = 16  # numbers of micro-batches that are looked at where several are allowed ...
_NUMBERS_CLOSELY = 4  # ... and at how many of them with all limits and prices
_HANDS = 6  # of the most promising pools, how many become hands, compared by what they really take
_EVENED = 3  # and in how many of these the replicas are evened out
_EVEN_ENOUGH = 1001  # ‰ of the mean that the slowest replica may take


class Ladder(NamedTuple):
    """Samples that may share micro-batches, by length: K steps. All numbers are int64."""

    order: np.ndarray  # [n] positions, by step, then by position
    counts: np.ndarray  # [K] samples of each step
    most: np.ndarray  # [K] samples that a micro-batch padded to this step may have, falling
    costs: np.ndarray  # [S, K] of a sample on each kind of stage, >= 1, rising

    @property
    def rises(self) -> np.ndarray:
        """[K] what a sample costs more on the next step; 0 on the last."""
        dearest = self.costs.max(axis=0)
        return np.diff(dearest, append=dearest[-1])

    @property
    def work(self) -> int:
        return int((self.counts * self.costs.max(axis=0)).sum())


class Task(NamedTuple):
    ladders: Sequence[Ladder]
    fixed: np.ndarray  # [S] int64, of a micro-batch on each kind of stage
    min_size: int
    replicas: int
    num_stages: int
    min_micro_batches: int
    max_micro_batches: int

    @property
    def work(self) -> int:
        return sum(ladder.work for ladder in self.ladders)


def best_deal(task: Task) -> list[list[np.ndarray]] | None:
    """[replica][micro-batch] -> sorted positions: the best deal among those tried. None where the task allows none."""
    numbers = _numbers(task)
    if not numbers.size:
        return None
    hands: dict[tuple[_Pool, ...], _Hand] = {}
    for pools, groups in chain(_promising(task, numbers), _even(task, numbers)):
        divided = _divided(task, pools, groups)
        if divided is not None and divided not in hands:
            hands[divided] = _hand(task, divided)
        if len(hands) == _HANDS:
            break
    if not hands:
        return None
    best = sorted(hands.values(), key=lambda hand: _between(_times(task, hand.costs)))[:_EVENED]
    return _filled(task, min((_evened(task, hand) for hand in best), key=lambda hand: _time(task, hand.costs)))


def _numbers(task: Task) -> np.ndarray:
    """The numbers of micro-batches per replica worth looking at: of those that are possible, all or ever fewer away from the best."""
    samples = sum(ladder.order.size for ladder in task.ladders)
    fewest = sum(int(_fewest(ladder, ladder.most[:, None])[0]) for ladder in task.ladders)
    least = max(task.min_micro_batches, -(-fewest // task.replicas))
    most = min(task.max_micro_batches, samples // (task.min_size * task.replicas))
    numbers = np.arange(least, most + 1, dtype=np.int64)
    if numbers.size <= _NUMBERS:
        return numbers
    whole = (task.work + task.replicas * numbers * int(task.fixed.max())) * (numbers + task.num_stages - 1) // numbers
    best = int(numbers[np.argmin(whole)])  # by the lower bound
    chosen, more, fewer = {best}, best, best
    while len(chosen) < _NUMBERS and (more < most or fewer > least):
        more, fewer = min(max(more + 1, more * 4 // 3), most), max(min(fewer - 1, fewer * 3 // 4), least)
        chosen |= {more, fewer}
    return np.array(sorted(chosen), dtype=np.int64)


def _promising(task: Task, numbers: np.ndarray) -> Iterator[tuple[tuple[_Pool, ...], int]]:
    """Pools, and the number of micro-batches of all replicas that they are for: what should take least time first."""
    if numbers.size > _NUMBERS_CLOSELY:
        promise = _choices(task, numbers, _LIMITS[::3], _PRICES[::3]).promise.reshape(numbers.size, -1).min(axis=1)
        numbers = np.sort(numbers[np.argsort(promise, kind="stable")[:_NUMBERS_CLOSELY]])
    choices = _choices(task, numbers, _LIMITS, _PRICES)
    made: Counter[int] = Counter()
    seen = set()
    for i in np.argsort(choices.promise, kind="stable")[: np.count_nonzero(choices.promise < _NEVER)].tolist():
        groups = int(choices.groups[i])
        alike = groups, int(choices.number[i]), int(choices.padding[i])
        if alike in seen or made[groups] * numbers.size > 2 * _HANDS:
            continue  # most probably the same pools; or enough of this number
        seen.add(alike)
        made[groups] += 1
        pools = (_pools(which, ladder, walk, i) for which, (ladder, walk) in enumerate(zip(task.ladders, choices.walks)))
        yield tuple(chain.from_iterable(pools)), groups


def _even(task: Task, numbers: np.ndarray) -> Iterator[tuple[tuple[_Pool, ...], int]]:
    """Micro-batches of even sizes, which there are where there is any way at all."""
    if len(task.ladders) == 1:
        for groups in (numbers * task.replicas).tolist():
            pools = _even_pools(task.ladders[0], groups)
            if pools:
                yield pools, groups


class _Choices(NamedTuple):
    """Every number of micro-batches with every limit and price; the walks have the pools of each."""

    groups: np.ndarray  # micro-batches of all replicas
    limits: np.ndarray
    walks: list[_Walk]
    number: np.ndarray  # of micro-batches that are needed
    padding: np.ndarray  # of all samples
    promise: np.ndarray  # the time that the slowest replica should take; _NEVER: impossible


def _choices(task: Task, numbers: np.ndarray, limits_permille: Sequence[int], prices_permille: Sequence[int]) -> _Choices:
    all_padding = sum(ladder.order.size * int(ladder.costs.max()) for ladder in task.ladders)
    limits = _lowest_limits(task, numbers)[:, None] * (1000 + np.array(limits_permille)) // 1000  # [numbers, limits]
    prices = limits[:, :, None] * np.array(prices_permille) // 1000  # [numbers, limits, prices]
    prices = np.concatenate([prices, np.full_like(prices[:, :, :1], all_padding + 1)], axis=2)
    limits = np.broadcast_to(limits[:, :, None], prices.shape).reshape(-1)
    groups = np.repeat(numbers * task.replicas, limits.size // numbers.size)
    prices = prices.reshape(-1)
    walks = [_walk(ladder, task.fixed, task.min_size, limits, prices) for ladder in task.ladders]
    number = sum(np.minimum(walk.number, 1 << 40) for walk in walks)
    possible = number <= groups
    padding = np.where(possible, sum(walk.value for walk in walks) - prices * np.where(possible, number, 0), 0)
    fixed = groups // task.replicas * int(task.fixed.max())
    # a replica's only micro-batch may take as long as the limit; several even out
    time = np.maximum((task.work + padding) // task.replicas + fixed, np.where(groups == task.replicas, limits, 0))
    return _Choices(groups, limits, walks, number, padding, np.where(possible, time + (task.num_stages - 1) * limits, _NEVER))


# -- which samples are padded to which length -----------------------------------------------------------------------------------


class _Walk(NamedTuple):
    """The best pools of a ladder for each pair of limit and price."""

    capacity: np.ndarray  # [K, pairs] samples of a micro-batch
    lacks: np.ndarray  # [K, pairs] see `_lacks`
    value: np.ndarray  # [pairs] padding + price × number of micro-batches; _NEVER: there is no way
    number: np.ndarray  # [pairs] of micro-batches
    from_even: np.ndarray  # [K + 1, pairs] where the pools that end evenly before a step began
    from_lacking: np.ndarray  # [K + 1, pairs] where those began that leave as many samples as the step lacks


class _Pool(NamedTuple):
    """Consecutive samples of a ladder, in `number` micro-batches that are padded to one step."""

    ladder: int
    start: int
    stop: int
    number: int
    costs: tuple[int, ...]  # of a sample, on each kind of stage
    most: int  # samples of a micro-batch

    @property
    def samples(self) -> int:
        return self.stop - self.start

    def cost(self, fixed: Sequence[int], size: int) -> int:
        return max(own + size * of_sample for own, of_sample in zip(fixed, self.costs))


def _capacity(ladder: Ladder, fixed: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """[K, ...] samples of a micro-batch padded to each step that stays within the limits."""
    room = np.maximum(limits - fixed.reshape(-1, 1, *[1] * limits.ndim), 0)  # [S, 1, ...]
    within = (room // ladder.costs.reshape(*ladder.costs.shape, *[1] * limits.ndim)).min(axis=0)
    return np.minimum(within, ladder.most.reshape(-1, *[1] * limits.ndim))


def _fewest(ladder: Ladder, capacity: np.ndarray) -> np.ndarray:
    """How few micro-batches do: from the longest down, each as full as it may be. `capacity` [K, ...]; _NEVER where one holds nothing."""
    number = np.zeros(capacity.shape[1:], dtype=np.int64)
    room = np.zeros_like(number)
    for step in range(ladder.counts.size - 1, -1, -1):
        holds = np.maximum(capacity[step], 1)
        left = np.maximum(ladder.counts[step] - room, 0)
        more = -(-left // holds)
        room = np.maximum(room - ladder.counts[step], 0) + more * holds - left
        number += more
    return np.where(capacity[-1] > 0, number, _NEVER)


def _lowest_limits(task: Task, numbers: np.ndarray) -> np.ndarray:
    """For each number of micro-batches the lowest limit on the cost of one, within 0.01 %."""
    groups = numbers * task.replicas
    longest = max(int((task.fixed + ladder.costs[:, -1]).max()) for ladder in task.ladders)
    low = np.maximum(task.work // groups + int(task.fixed.min()), longest) - 1  # never enough, or just so
    width = low // 4 + 1
    while True:
        high = low + width
        few = sum(_fewest(ladder, _capacity(ladder, task.fixed, high)) for ladder in task.ladders)
        enough = few <= groups
        if enough.all():
            break
        width = np.where(enough, width, 2 * width)
    parts = np.arange(65, dtype=np.int64)
    for _ in range(2):
        limits = low[:, None] + width[:, None] * parts // 64  # [numbers, 65]
        few = sum(_fewest(ladder, _capacity(ladder, task.fixed, limits)) for ladder in task.ladders)
        first = np.maximum(np.argmax(few <= groups[:, None], axis=1), 1)
        rows = np.arange(groups.size)
        low, width = limits[rows, first - 1], limits[rows, first] - limits[rows, first - 1]
    return low + width


def _lacks(counts: np.ndarray, holds: np.ndarray, min_size: int) -> np.ndarray:
    """[K, ...] how many samples each step and those above it are short of, to have micro-batches of `min_size` of their own."""
    lacks, above = np.zeros_like(holds), np.int64(0)
    if min_size == 1:
        return lacks
    for step in range(counts.size - 1, -1, -1):
        own = counts[step] - above
        above = lacks[step] = np.maximum(-(-np.maximum(own, 0) // holds[step]) * min_size - own, 0)
    return lacks


def _walk(ladder: Ladder, fixed: np.ndarray, min_size: int, limits: np.ndarray, prices: np.ndarray) -> _Walk:
    """Least padding + price × micro-batches, for each pair. Dynamic programming over the steps, from the shortest.

    At a step there are its own samples and those left over from below. Either all of them are put into micro-batches here, or only full
    ones are made, and less than one micro-batch is left for the next step, padded to it. (To leave more never helps: it would fill a
    micro-batch of the next step without one sample of that step.) Where the next step is short of samples for micro-batches of `min_size`,
    just what it lacks may be left too. A row is a step from which on nothing had been left (even) or what it lacks (odd).
    """
    K, pairs = ladder.counts.size, limits.size
    capacity = _capacity(ladder, fixed, limits)
    holds, rises = np.maximum(capacity, 1), ladder.rises
    lacks = _lacks(ladder.counts, holds, min_size)
    left = np.zeros((2 * K, pairs), dtype=np.int64)
    value = np.full((2 * K, pairs), _NEVER)
    number = np.zeros((2 * K, pairs), dtype=np.int64)
    even, even_number = np.zeros(pairs, dtype=np.int64), np.zeros(pairs, dtype=np.int64)
    lacking, lacking_number = np.full(pairs, _NEVER), np.zeros(pairs, dtype=np.int64)
    from_even, from_lacking = np.zeros((2, K + 1, pairs), dtype=np.int32)
    columns = np.arange(pairs)

    def ended(pool: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All of `pool` in micro-batches here: value and number by pair, and the row it began in."""
        number_here = -(-pool // per)
        total = np.where((pool >= number_here * min_size) & (pool >= 0), value[:rows] + prices * number_here, _NEVER)
        row = np.argmin(total, axis=0)
        return np.minimum(total[row, columns], _NEVER), (number[:rows] + number_here)[row, columns], row

    for step in range(K):
        rows = 2 * step + 2
        value[rows - 2], number[rows - 2], left[rows - 2] = even, even_number, 0
        value[rows - 1], number[rows - 1], left[rows - 1] = lacking, lacking_number, lacks[step]
        per = holds[step]
        pool = left[:rows] + ladder.counts[step]
        whole = pool // per
        rest = pool - whole * per
        even, even_number, from_even[step + 1] = ended(pool)
        lacking = np.full(pairs, _NEVER)
        if step + 1 < K and lacks[step + 1].any():
            lacking, lacking_number, from_lacking[step + 1] = ended(pool - lacks[step + 1])
            lacking = np.minimum(lacking + lacks[step + 1] * rises[step], _NEVER)
        left[:rows] = rest
        value[:rows] = np.minimum(value[:rows] + prices * whole + rest * rises[step], _NEVER)
        number[:rows] += whole
    never = (capacity[-1] < max(min_size, 1)) | (even >= _NEVER)
    return _Walk(capacity, lacks, np.where(never, _NEVER, even), np.where(never, _NEVER, even_number), from_even, from_lacking)


def _pools(which: int, ladder: Ladder, walk: _Walk, pair: int) -> list[_Pool]:
    """The pools of one pair, walked back."""
    pools, stop, last_left = [], ladder.counts.size, 0
    capacity, lacks, counts = walk.capacity[:, pair].tolist(), walk.lacks[:, pair].tolist(), ladder.counts.tolist()
    starts = [0, *accumulate(counts)]
    came_from = walk.from_even
    while stop > 0:
        row = int(came_from[stop, pair])
        begin, lacked = divmod(row, 2)
        left = lacks[begin] if lacked else 0
        place = starts[begin] - left
        for step in range(begin, stop):
            samples, per = left + counts[step], capacity[step]
            if step == stop - 1:
                samples -= last_left
                number = -(-samples // per)
                left = 0
            else:
                number, left = divmod(samples, per)
                samples -= left
            if samples:
                pools.append(_pool(which, ladder, step, place, place + samples, number))
            place += samples
        stop, last_left = begin, lacks[begin] if lacked else 0
        came_from = walk.from_lacking if lacked else walk.from_even
    return pools


def _even_pools(ladder: Ladder, groups: int) -> tuple[_Pool, ...]:
    """A pool for each micro-batch, as even as the memory allows, from the longest down; none where it does not allow it."""
    ends, stop, pools = np.cumsum(ladder.counts), ladder.order.size, []
    for left in range(groups, 0, -1):
        step = int(np.searchsorted(ends, stop))
        size = min(-(-stop // left), int(ladder.most[step]))
        pools.append(_pool(0, ladder, step, stop - size, stop, 1))
        stop -= size
    return () if stop else tuple(pools[::-1])


def _pool(which: int, ladder: Ladder, step: int, start: int, stop: int, number: int) -> _Pool:
    return _Pool(which, start, stop, number, tuple(ladder.costs[:, step].tolist()), int(ladder.most[step]))


# -- from pools to a deal --------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One micro-batch of a hand."""

    cost: int
    pool: int
    size: int


class _Hand(NamedTuple):
    """Micro-batches before they have samples: as many columns as a replica has micro-batches."""

    pools: tuple[_Pool, ...]
    pool: np.ndarray  # [R, M] which pool its samples are from
    sizes: np.ndarray  # [R, M]
    costs: np.ndarray  # [R, M]


def _time(task: Task, costs: np.ndarray) -> int:
    return int(_times(task, costs).max())


def _between(times: np.ndarray) -> int:
    """Half way from the mean to the slowest, times 2 R: where evening out leads, more or less."""
    return int(times.sum() + times.size * times.max())


def _times(task: Task, costs: np.ndarray) -> np.ndarray:
    """[R]"""
    return costs.sum(axis=1) + (task.num_stages - 1) * costs.max(axis=1)


def _hand(task: Task, pools: tuple[_Pool, ...]) -> _Hand:
    """Micro-batches of even sizes, dealt in rounds."""
    numbers = np.array([pool.number for pool in pools])
    groups = int(numbers.sum())
    pool = np.repeat(np.arange(len(pools)), numbers)
    even, more = np.array([divmod(p.samples, p.number) for p in pools]).T
    place = np.arange(groups) - np.repeat(np.cumsum(numbers) - numbers, numbers)  # within the pool
    sizes = even[pool] + (place < more[pool])
    costs = _costs(task, pools, pool, sizes)
    order = np.argsort(-costs, kind="stable").reshape(-1, task.replicas)  # [M, R], a round a row
    dealt = np.empty_like(order)
    sums = np.zeros(task.replicas, dtype=np.int64)
    for number, costliest_first in enumerate(order):
        dealt[number, np.argsort(sums, kind="stable")] = costliest_first
        sums += costs[dealt[number]]
    return _Hand(pools, pool[dealt.T], sizes[dealt.T], costs[dealt.T])


def _divided(task: Task, pools: tuple[_Pool, ...], groups: int) -> tuple[_Pool, ...] | None:
    """Pools in `groups` micro-batches: one by one more where they are costliest. None where `min_size` does not allow so many."""
    numbers, fixed = [pool.number for pool in pools], task.fixed.tolist()
    heap: list[tuple[int, int]] = []  # (− cost of its largest micro-batch, pool)

    def offer(i: int) -> None:
        if pools[i].samples >= (numbers[i] + 1) * task.min_size:
            heapq.heappush(heap, (-pools[i].cost(fixed, -(-pools[i].samples // numbers[i])), i))

    for i in range(len(pools)):
        offer(i)
    for _ in range(groups - sum(numbers)):
        if not heap:
            return None
        _, i = heapq.heappop(heap)
        numbers[i] += 1
        offer(i)
    return tuple(pool._replace(number=number) for pool, number in zip(pools, numbers))


def _costs(task: Task, pools: tuple[_Pool, ...], pool: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    of_sample = np.array([p.costs for p in pools]).T  # [S, pools]
    return (task.fixed.reshape(-1, *[1] * pool.ndim) + sizes * of_sample[:, pool]).max(axis=0)


def _evened(task: Task, hand: _Hand) -> _Hand:
    """Samples or micro-batches given by the slowest replica to a faster one, while the slower of the two gets faster by it."""
    lines = [[_Part(*part) for part in zip(*columns)] for columns in zip(hand.costs.tolist(), hand.pool.tolist(), hand.sizes.tolist())]
    times = [_time_of(task, line) for line in lines]
    for _ in range(6 * task.replicas):
        slow = times.index(max(times))
        if 1000 * times[slow] * task.replicas <= _EVEN_ENOUGH * sum(times):
            break
        for fast in sorted(range(task.replicas), key=times.__getitem__)[:4]:
            both = _given(task, hand.pools, lines[slow], lines[fast]) or _swapped(task, lines[slow], lines[fast])
            if both is not None:
                lines[slow], lines[fast] = both
                times[slow], times[fast] = _time_of(task, both[0]), _time_of(task, both[1])
                break
        else:
            break
    costs, pool, sizes = (np.array([[part[i] for part in line] for line in lines]) for i in range(3))
    return _Hand(hand.pools, pool, sizes, costs)


def _time_of(task: Task, line: list[_Part]) -> int:
    costs = [part.cost for part in line]
    return sum(costs) + (task.num_stages - 1) * max(costs)


def _given(task: Task, pools: tuple[_Pool, ...], slow: list[_Part], fast: list[_Part]) -> tuple[list[_Part], list[_Part]] | None:
    """Move samples within a pool that both have, from one's largest micro-batch of it to the other's smallest."""
    takers = {part.pool: i for i, part in sorted(enumerate(fast), key=lambda item: -item[1].size)}
    givers = {part.pool: i for i, part in sorted(enumerate(slow), key=lambda item: item[1].size) if part.pool in takers}
    before, fixed = _time_of(task, slow), task.fixed.tolist()
    gap, best, least = before - _time_of(task, fast), None, before
    for which, i in givers.items():
        pool, j = pools[which], takers[which]
        room = min(slow[i].size - task.min_size, pool.most - fast[j].size)
        samples = min(max(gap // (2 * max(pool.costs)), 1), room)
        if samples >= 1:
            gives, takes = slow[i].size - samples, fast[j].size + samples
            both = slow.copy(), fast.copy()
            both[0][i], both[1][j] = _Part(pool.cost(fixed, gives), which, gives), _Part(pool.cost(fixed, takes), which, takes)
            slower = max(_time_of(task, both[0]), _time_of(task, both[1]))
            if slower < least:
                best, least = both, slower
    return best


def _swapped(task: Task, slow: list[_Part], fast: list[_Part]) -> tuple[list[_Part], list[_Part]] | None:
    """Exchange two micro-batches whose difference halves that of the replicas, as nearly as there are."""
    before = _time_of(task, slow)
    gap = before - _time_of(task, fast)
    less = np.subtract.outer([part.cost for part in slow], [part.cost for part in fast])  # [M, M]
    away = np.where((less > 0) & (less < gap), np.abs(2 * less - gap), _NEVER)
    i, j = divmod(int(np.argmin(away)), len(fast))
    both = [*slow[:i], fast[j], *slow[i + 1 :]], [*fast[:j], slow[i], *fast[j + 1 :]]
    return both if away[i, j] < _NEVER and max(_time_of(task, line) for line in both) < before else None


def _filled(task: Task, hand: _Hand) -> list[list[np.ndarray]]:
    """Give the micro-batches their samples; each replica's costliest comes first."""
    places = np.argsort(hand.pool, axis=None, kind="stable")
    parts: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * places.size
    place = {which: pool.start for which, pool in enumerate(hand.pools)}
    for i in places.tolist():
        which, size = int(hand.pool.flat[i]), int(hand.sizes.flat[i])
        order = task.ladders[hand.pools[which].ladder].order
        parts[i] = np.sort(order[place[which] : place[which] + size])
        place[which] += size
    replicas, number = hand.pool.shape
    first = np.argsort(-hand.costs, axis=1, kind="stable")
    return [[parts[r * number + m] for m in first[r].tolist()] for r in range(replicas)]
