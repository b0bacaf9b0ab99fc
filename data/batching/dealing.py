"""Who computes what together: the samples of a global batch, dealt by what they cost. Pure functions, numpy only.

The loss is over the whole global batch, so into which micro-batch of which replica a sample comes changes the speed and nothing else. A
micro-batch is padded to its longest sample, and a line of S stages with M micro-batches, t_m seconds on their slowest stage, takes
Σ t_m + (S − 1) · max t_m, in whatever order they come. A step waits for the slowest replica. So, as nearly as can be found,

    minimise   max over replicas r of  Σ_m t_rm + (S − 1) · max_m t_rm

Only deals that cut the samples, sorted by length, into consecutive pieces need to be looked at: whatever the deal, samples can be exchanged
between two of its micro-batches until one of them has the longer ones, and neither costs more than before. `data/batching/dealing_search.py` looks.

Images of different resolutions are another matter: in one micro-batch they would all be resized to the largest, which changes what is
computed. They are kept apart, as far as the bounds allow.

G: samples of the global batch, R: replicas, M: micro-batches of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.batching.branch_cost import BranchCost
from data.batching.dealing_search import Ladder, Task, best_deal

Deal = list[list[np.ndarray]]  # [replica][micro-batch] -> int64 positions 0..G-1, each position once

MOST_STEPS = 64  # different lengths that are looked at one by one; more are taken together
COST_BITS = 20  # the costliest sample is a whole number of this many bits


@dataclass(frozen=True, eq=False)
class BranchWork:
    """What the samples of one global batch are to a branch.

    `lengths` [G], whole numbers >= 1: what a sample is padded to in a micro-batch of its own (`padded_lengths` for texts; for images the size
    of their bucket, in the unit of `cost`). `most_padded`: samples × length that a micro-batch may have at most, the memory of its activations.
    `apart`: samples of different lengths come together only where the bounds leave no other way. For images, which would be resized.
    """

    lengths: np.ndarray
    cost: BranchCost
    most_padded: int | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or lengths.size < 1 or not np.issubdtype(lengths.dtype, np.integer) or lengths.min() < 1:
            raise ValueError(f"lengths {lengths!r}: a whole number >= 1 for each sample of the global batch is needed")
        if self.most_padded is not None and self.most_padded < lengths.max():
            raise ValueError(
                f"most_padded {self.most_padded}: the longest sample has {lengths.max()} by itself; give at least that, or cut samples shorter"
            )
        object.__setattr__(self, "lengths", lengths.astype(np.int64))


@dataclass(frozen=True)
class DealBounds:
    """Samples of a micro-batch, and micro-batches of a replica: from .. to, both included. BatchNorm wants a `min_size`."""

    min_size: int = 1
    max_size: int = 1 << 30
    min_micro_batches: int = 1
    max_micro_batches: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.min_size <= self.max_size or not 1 <= self.min_micro_batches <= self.max_micro_batches:
            raise ValueError(f"{self}: 1 <= min <= max is needed, of sizes and of micro-batches")


def padded_lengths(num_tokens: np.ndarray, max_text_tokens: int, multiple: int = 1) -> np.ndarray:
    """What texts of `num_tokens` [G] are padded to in a micro-batch of their own: cut, rounded up, as the tokenizer does it."""
    cut = np.minimum(np.asarray(num_tokens, dtype=np.int64), max_text_tokens)
    return np.minimum(-(-cut // multiple) * multiple, max_text_tokens)


def deal_balanced(works: Sequence[BranchWork], replicas: int, bounds: DealBounds, num_stages: int = 1, same_stages: bool = False) -> Deal:
    """[replica][micro-batch] -> sorted positions, equally many micro-batches on each replica, their sizes by cost; the costliest first.

    A branch of a fork is dealt alone: `works` has one. Where branches share a line, they share the deal: of each micro-batch the slower
    branch counts (chain, fusion) or, with `same_stages`, all together do (merged). `num_stages`: of the whole line.
    The m-th micro-batches of the replicas are alike in cost. Same arguments, same deal, on every machine.
    Errors: ValueError when the bounds leave no way.
    """
    _check(works, replicas, bounds, num_stages)
    for lengths, kinds in _kept_apart(works, bounds):
        found = best_deal(_task(works, lengths, kinds, replicas, bounds, num_stages, same_stages))
        if found is not None:
            return found
    raise ValueError(
        f"{works[0].lengths.size} samples cannot be dealt to {replicas} replicas within {bounds} and most_padded "
        f"{[work.most_padded for work in works]}; allow more micro-batches, larger ones, or smaller ones"
    )


def predicted_s(deal: Deal, works: Sequence[BranchWork], num_stages: int = 1, same_stages: bool = False) -> float:
    """Seconds of a pass through the line with this deal, whichever replica takes longest."""
    seconds = micro_batch_seconds(deal, works, same_stages)  # [R, M]
    return float((seconds.sum(axis=1) + (num_stages - 1) * seconds.max(axis=1)).max())


def micro_batch_seconds(deal: Deal, works: Sequence[BranchWork], same_stages: bool = False) -> np.ndarray:
    """[R, M]: what each micro-batch takes on its slowest stage."""
    sizes = np.array([[len(part) for part in line] for line in deal])
    of_branches = [work.cost.at(sizes, _longest(deal, work.lengths)) for work in works]
    return np.sum(of_branches, axis=0) if same_stages else np.max(of_branches, axis=0)


def lower_bound_s(
    works: Sequence[BranchWork], replicas: int, num_micro_batches: int, num_stages: int = 1, same_stages: bool = False
) -> float:
    """Seconds that no deal of that many micro-batches can beat: all work divided evenly, no sample padded beyond its own length."""
    samples = np.stack([work.cost.of_sample(work.lengths) for work in works])  # [branches, G]
    fixed = np.array([work.cost.fixed_s for work in works])
    number = replicas * num_micro_batches
    if same_stages:
        whole = number * fixed.sum() + samples.sum()
    else:  # at least what each branch has to do, and at least each sample in the branch where it costs more
        whole = max((number * fixed + samples.sum(axis=1)).max(), number * fixed.min() + samples.max(axis=0).sum())
    return float(whole / replicas * (1 + (num_stages - 1) / num_micro_batches))


def padding_share(deal: Deal, lengths: np.ndarray) -> float:
    """Part of all that is computed that is padding: 0 where every sample stands among samples of its own length."""
    sizes = np.array([[len(part) for part in line] for line in deal])
    return 1 - float(np.sum(lengths)) / float((sizes * _longest(deal, lengths)).sum())


def explain(deal: Deal, works: Sequence[BranchWork], num_stages: int = 1, same_stages: bool = False) -> str:
    """A table that a person can read: of each replica's micro-batches the samples, longest, padding and milliseconds."""
    seconds = micro_batch_seconds(deal, works, same_stages)
    bound_s = lower_bound_s(works, len(deal), len(deal[0]), num_stages, same_stages)
    step_s = predicted_s(deal, works, num_stages, same_stages)
    padding = ", ".join(f"{padding_share(deal, work.lengths):.1%}" for work in works)
    lines = [
        f"{works[0].lengths.size} samples, {len(deal)} replicas × {len(deal[0])} micro-batches, padding {padding}, "
        f"{1e3 * step_s:.4g} ms through {num_stages} stages, {step_s / bound_s - 1:.1%} above what nothing can beat",
        "replica  micro-batch  samples  longest     padding      ms",
    ]
    for r, line in enumerate(deal):
        for m, part in enumerate(line):
            longest = "/".join(str(work.lengths[part].max()) for work in works)
            own = "/".join(f"{1 - work.lengths[part].sum() / (len(part) * work.lengths[part].max()):.0%}" for work in works)
            lines.append(f"{r:7d}  {m:11d}  {len(part):7d}  {longest:>7s}  {own:>10s}  {1e3 * seconds[r, m]:6.4g}")
        lines.append(f"{r:7d}  {'all':>11s}  {sum(map(len, line)):7d}  {'':7s}  {'':10s}  {1e3 * seconds[r].sum():6.4g}")
    return "\n".join(lines)


def deal_window(lengths: np.ndarray, seed: Sequence[int] = (0,)) -> np.ndarray:
    """[W, G] int64: the samples of W consecutive global batches, W·G numbers 0..W·G-1 batch by batch, in batches of similar lengths.

    `lengths` [W, G]. A sample comes at most W − 1 steps earlier or later than it would; W = 1 changes nothing. Unlike a deal this changes which
    samples are each other's negatives. Which batch comes when is drawn from `seed`, so that a window does not go from short to long.
    """
    lengths = np.asarray(lengths)
    window, global_batch_size = lengths.shape
    batches = np.argsort(lengths, axis=None, kind="stable").reshape(window, global_batch_size)
    return np.sort(batches, axis=1)[np.random.default_rng(list(seed)).permutation(window)]


def _longest(deal: Deal, lengths: np.ndarray) -> np.ndarray:
    return np.array([[lengths[part].max() for part in line] for line in deal])


def _check(works: Sequence[BranchWork], replicas: int, bounds: DealBounds, num_stages: int) -> None:
    sizes = sorted({work.lengths.size for work in works})
    if len(sizes) != 1 or replicas < 1 or num_stages < 1:
        raise ValueError(f"works of {sizes} samples, {replicas} replicas, {num_stages} stages: one global batch, and >= 1, are needed")
    if sum(not work.apart and np.ptp(work.lengths) > 0 for work in works) > 1:
        raise ValueError("two branches whose lengths vary share a deal, and both may be padded: one of them must be apart (the images)")
    least = replicas * bounds.min_micro_batches * bounds.min_size
    most = replicas * bounds.max_micro_batches * bounds.max_size
    if not least <= sizes[0] <= most:
        raise ValueError(
            f"{sizes[0]} samples cannot be dealt to {replicas} replicas within {bounds}, which takes {least} to {most}; change the bounds"
        )


# -- samples that are kept apart -----------------------------------------------------------------------------------------------


def _kept_apart(works: Sequence[BranchWork], bounds: DealBounds) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """lengths [branches, G] and kinds [G], from the ways that resize fewest samples to the one in which all have one size.

    Kinds are numbered from 0, the cheapest; different ones share no micro-batch. What is resized has its new length.
    """
    lengths = np.stack([work.lengths for work in works])
    lengths, kinds = _enough_of_each(works, lengths, _numbered(works, lengths), bounds.min_size)
    yield lengths, kinds
    ways = [_in_full_micro_batches(works, lengths, kinds, bounds)] if kinds.any() else []
    while kinds.any():
        lengths, kinds = _fewer_kinds(works, lengths, kinds)
        ways.append((lengths, kinds))
    yield from sorted(ways, key=lambda way: int(np.count_nonzero([row != work.lengths for row, work in zip(way[0], works)])))


def _enough_of_each(works: Sequence[BranchWork], lengths: np.ndarray, kinds: np.ndarray, min_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples that are too few for a micro-batch of their own get the next larger size; the largest gets what it lacks from the next."""
    while True:
        counts = np.bincount(kinds)
        if counts.size == 1 or counts.min() >= min_size:
            return lengths, kinds
        few = int(np.argmax(counts < min_size))
        if few < counts.size - 1:
            moved = kinds == few
        else:
            moved = _last_of(kinds, few - 1, min_size - counts[few])
            few -= 1
        lengths, kinds = _resized(works, lengths, kinds, moved, few + 1)


def _in_full_micro_batches(
    works: Sequence[BranchWork], lengths: np.ndarray, kinds: np.ndarray, bounds: DealBounds
) -> tuple[np.ndarray, np.ndarray]:
    """What is left over when each kind fills micro-batches of the largest size, from the cheapest up, joins the next kind."""
    kind = 0
    while kind < kinds.max():
        own = kinds == kind
        holds = min([bounds.max_size, *(work.most_padded // row[own].max() for work, row in zip(works, lengths) if work.most_padded)])
        rest = np.count_nonzero(own) % holds
        before = kinds.max()
        if rest:
            lengths, kinds = _resized(works, lengths, kinds, _last_of(kinds, kind, rest), kind + 1)
        kind += int(kinds.max() == before)  # a kind of which all were left over is no more
    return lengths, kinds


def _fewer_kinds(works: Sequence[BranchWork], lengths: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All samples of one kind at the next larger size: of the kind where that adds least."""
    added = []
    for kind in range(kinds.max()):
        own, larger = np.flatnonzero(kinds == kind), int(np.argmax(kinds == kind + 1))
        seconds = [work.cost.of_sample(row[larger]) - work.cost.of_sample(row[own]) for work, row in zip(works, lengths) if work.apart]
        added.append(np.sum(seconds))
    kind = int(np.argmin(added))
    return _resized(works, lengths, kinds, kinds == kind, kind + 1)


def _last_of(kinds: np.ndarray, kind: int, number: int) -> np.ndarray:
    """[G] bool: the last `number` samples of a kind by position, or all there are."""
    chosen = np.zeros(kinds.size, dtype=bool)
    chosen[np.flatnonzero(kinds == kind)[-number:]] = True
    return chosen


def _resized(works, lengths: np.ndarray, kinds: np.ndarray, moved: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = lengths.copy()
    together = moved | (kinds == kind)
    for row, work in zip(lengths, works):
        if work.apart:
            row[together] = row[together].max()
    return lengths, _numbered(works, lengths)


def _numbered(works: Sequence[BranchWork], lengths: np.ndarray) -> np.ndarray:
    """A number for each combination of lengths of the branches that are kept apart, from 0, rising with the seconds of a sample."""
    own = [(work, row) for work, row in zip(works, lengths) if work.apart]
    if not own:
        return np.zeros(lengths.shape[1], dtype=np.int64)
    first, number = _combinations([row for _, row in own])
    seconds = sum(work.cost.of_sample(row[first]) for work, row in own)
    place = np.empty(first.size, dtype=np.int64)
    place[np.lexsort((first, seconds))] = np.arange(first.size)
    return place[number]


def _combinations(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Of every combination of values that occurs in the columns: a column that has it; and of every column, its combination's number."""
    key = np.zeros(len(rows[0]), dtype=np.int64)
    for row in rows:
        values, number = np.unique(row, return_inverse=True)
        key = key * values.size + number
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return first, number


# -- the same in whole numbers ---------------------------------------------------------------------------------------------------


def _task(
    works: Sequence[BranchWork],
    lengths: np.ndarray,
    kinds: np.ndarray,
    replicas: int,
    bounds: DealBounds,
    num_stages: int,
    same_stages: bool,
) -> Task:
    # Samples that are equal to all branches are one class. Those that are resized stand together, so that few micro-batches are mixed.
    original = [work.lengths for work in works if work.apart]
    first, number = _combinations([kinds, *lengths, *original])
    seconds = np.stack([work.cost.of_sample(row[first]) for work, row in zip(works, lengths)])  # [branches, classes]
    fixed = np.array([work.cost.fixed_s for work in works])
    if same_stages:
        seconds, fixed = seconds.sum(axis=0, keepdims=True), fixed.sum(keepdims=True)
    top = float(max(seconds.max(), fixed.max() / kinds.size))
    unit = 2.0 ** (COST_BITS - np.frexp(top)[1])  # a power of two: scaling rounds nothing, and rounding is the same everywhere
    costs = np.maximum(np.rint(seconds * unit), 1).astype(np.int64)
    most = np.full(first.size, bounds.max_size, dtype=np.int64)
    for work, row in zip(works, lengths):
        if work.most_padded is not None:
            most = np.minimum(most, work.most_padded // row[first])
    counts = np.bincount(number, minlength=first.size)
    step_of = np.empty(first.size, dtype=np.int16 if first.size < 1 << 15 else np.int64)  # 16 bits sort fastest
    ladders = []
    for kind in range(int(kinds.max()) + 1):
        own = np.flatnonzero(kinds[first] == kind)
        own = own[np.lexsort((*(row[first[own]] for row in (*original, *lengths)), costs[:, own].max(axis=0)))]
        step_of[own] = np.arange(own.size)
        members = np.flatnonzero(kinds == kind)
        order = members[np.argsort(step_of[number[members]], kind="stable")]
        first_of, last_of = _steps(counts[own] * costs[:, own].max(axis=0))
        ladders.append(Ladder(order, np.add.reduceat(counts[own], first_of), most[own[last_of]], costs[:, own[last_of]]))
    whole_fixed = np.rint(fixed * unit).astype(np.int64)
    limits = bounds.min_micro_batches, bounds.max_micro_batches
    return Task(ladders, whole_fixed, bounds.min_size, replicas, num_stages, *limits)


def _steps(work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last class of each step: a class is a step, unless they are too many to look at; then neighbours share one.

    Such a step costs what its longest costs. Its samples are dealt in the order of their lengths all the same.
    """
    if work.size <= MOST_STEPS:
        return np.arange(work.size), np.arange(work.size)
    number = (np.cumsum(work) - work) * MOST_STEPS // work.sum()  # equal shares of the work
    first_of = np.flatnonzero(np.diff(number, prepend=-1))
    return first_of, np.append(first_of[1:], work.size) - 1
