"""Who computes what together: the samples of a global batch, dealt by what they cost. Pure functions, numpy only.

The loss is over the whole global batch, so into which micro-batch of which replica a sample comes changes the speed and nothing else. A
micro-batch is padded to its longest sample, and a line of S stages with M micro-batches, t_m seconds on their slowest stage, takes
Σ t_m + (S − 1) · max t_m, in whatever order they come. A step waits for the slowest replica. So, as nearly as can be found,

    minimise   max over replicas r of  Σ_m t_rm + (S − 1) · max_m t_rm

Only deals that cut the samples, sorted by length, into consecutive pieces need to be looked at: whatever the deal, samples can be exchanged
between two of its micro-batches until one of them has the longer ones, and neither costs more than before. `data/batching/dealing_search.py` looks.

G: samples of the global batch, R: replicas, M: micro-batches of each.
"""

from collections.abc import Sequence
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

    `lengths` [G], whole numbers >= 1: what a sample is padded to in a micro-batch of its own (`padded_lengths`). `most_padded`: samples ×
    length that a micro-batch may have at most, the memory of its activations.
    """

    lengths: np.ndarray
    cost: BranchCost
    most_padded: int | None = None

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


def deal_balanced(work: BranchWork, replicas: int, bounds: DealBounds, num_stages: int = 1) -> Deal:
    """[replica][micro-batch] -> sorted positions, equally many micro-batches on each replica, their sizes by cost; the costliest first.

    `num_stages`: of the line. The m-th micro-batches of the replicas are alike in cost. Same arguments, same deal, on every machine.
    Errors: ValueError when the bounds leave no way.
    """
    _check(work, replicas, bounds, num_stages)
    found = best_deal(_task(work, replicas, bounds, num_stages))
    if found is None:
        raise ValueError(
            f"{work.lengths.size} samples cannot be dealt to {replicas} replicas within {bounds} and most_padded {work.most_padded}; allow "
            "more micro-batches, larger ones, or smaller ones"
        )
    return found


def predicted_s(deal: Deal, work: BranchWork, num_stages: int = 1) -> float:
    """Seconds of a pass through the line with this deal, whichever replica takes longest."""
    seconds = micro_batch_seconds(deal, work)  # [R, M]
    return float((seconds.sum(axis=1) + (num_stages - 1) * seconds.max(axis=1)).max())


def micro_batch_seconds(deal: Deal, work: BranchWork) -> np.ndarray:
    """[R, M]: what each micro-batch takes on the branch's slowest stage."""
    sizes = np.array([[len(part) for part in line] for line in deal])
    return work.cost.at(sizes, _longest(deal, work.lengths))


def lower_bound_s(work: BranchWork, replicas: int, num_micro_batches: int, num_stages: int = 1) -> float:
    """Seconds that no deal of that many micro-batches can beat: all work divided evenly, no sample padded beyond its own length."""
    whole = replicas * num_micro_batches * work.cost.fixed_s + work.cost.of_sample(work.lengths).sum()
    return float(whole / replicas * (1 + (num_stages - 1) / num_micro_batches))


def padding_share(deal: Deal, lengths: np.ndarray) -> float:
    """Part of all that is computed that is padding: 0 where every sample stands among samples of its own length."""
    sizes = np.array([[len(part) for part in line] for line in deal])
    return 1 - float(np.sum(lengths)) / float((sizes * _longest(deal, lengths)).sum())


def explain(deal: Deal, work: BranchWork, num_stages: int = 1) -> str:
    """A table that a person can read: of each replica's micro-batches the samples, longest, padding and milliseconds."""
    seconds = micro_batch_seconds(deal, work)
    bound_s = lower_bound_s(work, len(deal), len(deal[0]), num_stages)
    step_s = predicted_s(deal, work, num_stages)
    lines = [
        f"{work.lengths.size} samples, {len(deal)} replicas × {len(deal[0])} micro-batches, padding {padding_share(deal, work.lengths):.1%}, "
        f"{1e3 * step_s:.4g} ms through {num_stages} stages, {step_s / bound_s - 1:.1%} above what nothing can beat",
        "replica  micro-batch  samples  longest     padding      ms",
    ]
    for r, line in enumerate(deal):
        for m, part in enumerate(line):
            longest = work.lengths[part].max()
            own = f"{1 - work.lengths[part].sum() / (len(part) * longest):.0%}"
            lines.append(f"{r:7d}  {m:11d}  {len(part):7d}  {longest:7d}  {own:>10s}  {1e3 * seconds[r, m]:6.4g}")
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


def _check(work: BranchWork, replicas: int, bounds: DealBounds, num_stages: int) -> None:
    size = work.lengths.size
    if replicas < 1 or num_stages < 1:
        raise ValueError(f"{replicas} replicas, {num_stages} stages: >= 1 are needed")
    least = replicas * bounds.min_micro_batches * bounds.min_size
    most = replicas * bounds.max_micro_batches * bounds.max_size
    if not least <= size <= most:
        raise ValueError(
            f"{size} samples cannot be dealt to {replicas} replicas within {bounds}, which takes {least} to {most}; change the bounds"
        )


# -- the same in whole numbers ---------------------------------------------------------------------------------------------------


def _task(work: BranchWork, replicas: int, bounds: DealBounds, num_stages: int) -> Task:
    values, number = np.unique(work.lengths, return_inverse=True)  # samples of one length are one class, the shortest first
    seconds = work.cost.of_sample(values)
    top = float(max(seconds.max(), work.cost.fixed_s / work.lengths.size))
    unit = 2.0 ** (COST_BITS - np.frexp(top)[1])  # a power of two: scaling rounds nothing, and rounding is the same everywhere
    costs = np.maximum(np.rint(seconds * unit), 1).astype(np.int64)
    most = np.full(values.size, bounds.max_size, dtype=np.int64)
    if work.most_padded is not None:
        most = np.minimum(most, work.most_padded // values)
    counts = np.bincount(number)
    order = np.argsort(number.astype(np.int16 if values.size < 1 << 15 else np.int64), kind="stable")  # 16 bits sort fastest
    first_of, last_of = _steps(counts * costs)
    ladder = Ladder(order, np.add.reduceat(counts, first_of), most[last_of], costs[None, last_of])
    fixed = np.rint(np.array([work.cost.fixed_s]) * unit).astype(np.int64)
    return Task([ladder], fixed, bounds.min_size, replicas, num_stages, bounds.min_micro_batches, bounds.max_micro_batches)


def _steps(work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last class of each step: a class is a step, unless they are too many to look at; then neighbours share one.

    Such a step costs what its longest costs. Its samples are dealt in the order of their lengths all the same.
    """
    if work.size <= MOST_STEPS:
        return np.arange(work.size), np.arange(work.size)
    number = (np.cumsum(work) - work) * MOST_STEPS // work.sum()  # equal shares of the work
    first_of = np.flatnonzero(np.diff(number, prepend=-1))
    return first_of, np.append(first_of[1:], work.size) - 1
