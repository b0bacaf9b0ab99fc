"""Deals the samples of a global batch to micro-batches by their cost. Pure functions, numpy only.

The loss is over the whole global batch, so the micro-batch and the replica in which a sample is
computed change the speed only. A micro-batch is padded to its longest sample. M micro-batches
that take t_m seconds on their slowest stage take Σ t_m + (S − 1) · max t_m through a line of S
stages, in any order. A step waits for the slowest replica. A deal should therefore

    minimise   max over replicas r of  Σ_m t_rm + (S − 1) · max_m t_rm

It is enough to sort the samples by length and to cut them into consecutive pieces: in any other
deal, samples of two micro-batches can be exchanged until one has the longer ones, and neither costs
more than before. `data/batching/dealing_search.py` finds the cuts.

G: samples of the global batch, R: replicas, M: micro-batches of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.batching.branch_cost import BranchCost
from data.batching.dealing_search import Task, best_deal

Deal = list[list[np.ndarray]]  # [replica][micro-batch] -> int64 positions 0..G-1, each once

COST_BITS = 20  # the costliest sample is a whole number of this many bits


@dataclass(frozen=True, eq=False)
class BranchWork:
    """The samples of one global batch, as a branch computes them.

    `lengths` [G], whole numbers >= 1: what a sample is padded to in a micro-batch of its own
    (`padded_lengths`). `most_padded`: samples × length that a micro-batch may have at most, which
    bounds the memory of its activations.
    """

    lengths: np.ndarray
    cost: BranchCost
    most_padded: int | None = None

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        whole = np.issubdtype(lengths.dtype, np.integer)
        if lengths.ndim != 1 or lengths.size < 1 or not whole or lengths.min() < 1:
            needed = "a whole number >= 1 for each sample of the global batch is needed"
            raise ValueError(f"lengths {lengths!r}: {needed}")
        if self.most_padded is not None and self.most_padded < lengths.max():
            raise ValueError(
                f"most_padded {self.most_padded}: the longest sample has {lengths.max()} by "
                "itself; give at least that, or cut samples shorter"
            )
        object.__setattr__(self, "lengths", lengths.astype(np.int64))


@dataclass(frozen=True)
class DealBounds:
    """Samples of a micro-batch, and micro-batches of a replica: from and to, both included.

    Batch normalisation needs a `min_size`.
    """

    min_size: int = 1
    max_size: int = 1 << 30
    min_micro_batches: int = 1
    max_micro_batches: int = 64

    def __post_init__(self) -> None:
        numbers = 1 <= self.min_micro_batches <= self.max_micro_batches
        if not numbers or not 1 <= self.min_size <= self.max_size:
            raise ValueError(f"{self}: 1 <= min <= max is needed, of sizes and of micro-batches")


def padded_lengths(num_tokens: np.ndarray, max_text_tokens: int, multiple: int = 1) -> np.ndarray:
    """[G] what texts of `num_tokens` [G] are padded to alone, cut and rounded as by tokenizers."""
    cut = np.minimum(np.asarray(num_tokens, dtype=np.int64), max_text_tokens)
    return np.minimum(-(-cut // multiple) * multiple, max_text_tokens)


def deal_balanced(work: BranchWork, replicas: int, bounds: DealBounds, num_stages: int = 1) -> Deal:
    """[replica][micro-batch] -> sorted positions, with as many micro-batches on each replica.

    `num_stages`: of the line. The costliest micro-batch of a replica comes first, and the m-th ones
    of all replicas cost about the same. The same arguments give the same deal on every machine.
    Errors: ValueError if no deal is within the bounds.
    """
    _check(work, replicas, bounds, num_stages)
    found = best_deal(_task(work, replicas, bounds, num_stages))
    if found is None:
        raise ValueError(
            f"{work.lengths.size} samples cannot be dealt to {replicas} replicas within {bounds} "
            f"and most_padded {work.most_padded}; allow more micro-batches, larger or smaller ones"
        )
    return found


def predicted_s(deal: Deal, work: BranchWork, num_stages: int = 1) -> float:
    """Seconds of a pass through the line with this deal, of the slowest replica."""
    seconds = micro_batch_seconds(deal, work)  # [R, M]
    return float((seconds.sum(axis=1) + (num_stages - 1) * seconds.max(axis=1)).max())


def micro_batch_seconds(deal: Deal, work: BranchWork) -> np.ndarray:
    """[R, M]: what each micro-batch takes on the branch's slowest stage."""
    return work.cost.at(_sizes(deal), _longest(deal, work.lengths))


def lower_bound_s(
    work: BranchWork,
    replicas: int,
    num_micro_batches: int,
    num_stages: int = 1,
) -> float:
    """Seconds that no deal of so many micro-batches can beat: work divided evenly, no padding."""
    of_samples = work.cost.of_sample(work.lengths).sum()
    whole = replicas * num_micro_batches * work.cost.fixed_s + of_samples
    return float(whole / replicas * (1 + (num_stages - 1) / num_micro_batches))


def padding_share(deal: Deal, lengths: np.ndarray) -> float:
    """Part of all that is computed that is padding beyond each sample's own length."""
    return 1 - float(np.sum(lengths)) / float((_sizes(deal) * _longest(deal, lengths)).sum())


def explain(deal: Deal, work: BranchWork, num_stages: int = 1) -> str:
    """A table of all micro-batches: samples, longest sample, padding and milliseconds."""
    seconds = micro_batch_seconds(deal, work)
    bound_s = lower_bound_s(work, len(deal), len(deal[0]), num_stages)
    step_s = predicted_s(deal, work, num_stages)
    lines = [
        f"{work.lengths.size} samples, {len(deal)} replicas × {len(deal[0])} micro-batches, "
        f"padding {padding_share(deal, work.lengths):.1%}, {1e3 * step_s:.4g} ms through "
        f"{num_stages} stages, {step_s / bound_s - 1:.1%} above what nothing can beat",
        "replica  micro-batch  samples  longest     padding      ms",
    ]
    for r, line in enumerate(deal):
        for m, part in enumerate(line):
            longest = work.lengths[part].max()
            padding = f"{1 - work.lengths[part].sum() / (len(part) * longest):.0%}"
            own = f"{len(part):7d}  {longest:7d}  {padding:>10s}  {1e3 * seconds[r, m]:6.4g}"
            lines.append(f"{r:7d}  {m:11d}  {own}")
        own = f"{sum(map(len, line)):7d}  {'':7s}  {'':10s}  {1e3 * seconds[r].sum():6.4g}"
        lines.append(f"{r:7d}  {'all':>11s}  {own}")
    return "\n".join(lines)


def deal_window(lengths: np.ndarray, seed: Sequence[int] = (0,)) -> np.ndarray:
    """[W, G] int64: the samples of W consecutive global batches in batches of similar lengths.

    `lengths` [W, G]; samples are numbered 0..W·G-1 batch by batch. A sample comes at most W − 1
    steps earlier or later than it would, and W = 1 changes nothing. Unlike a deal this changes
    which samples are each other's negatives. The order of the batches is drawn from `seed`, so that
    a window does not go from short to long.
    """
    lengths = np.asarray(lengths)
    window, global_batch_size = lengths.shape
    batches = np.argsort(lengths, axis=None, kind="stable").reshape(window, global_batch_size)
    return np.sort(batches, axis=1)[np.random.default_rng(list(seed)).permutation(window)]


def _sizes(deal: Deal) -> np.ndarray:
    return np.array([[len(part) for part in line] for line in deal])


def _longest(deal: Deal, lengths: np.ndarray) -> np.ndarray:
    return np.array([[lengths[part].max() for part in line] for line in deal])


def _check(work: BranchWork, replicas: int, bounds: DealBounds, num_stages: int) -> None:
    if replicas < 1 or num_stages < 1:
        raise ValueError(f"{replicas} replicas, {num_stages} stages: >= 1 are needed")
    least = replicas * bounds.min_micro_batches * bounds.min_size
    most = replicas * bounds.max_micro_batches * bounds.max_size
    if not least <= work.lengths.size <= most:
        raise ValueError(
            f"{work.lengths.size} samples cannot be dealt to {replicas} replicas within {bounds}, "
            f"which takes {least} to {most}; change the bounds"
        )


def _task(work: BranchWork, replicas: int, bounds: DealBounds, num_stages: int) -> Task:
    """The samples sorted, and whole numbers for seconds."""
    kind = np.int16 if work.lengths.max() < 1 << 15 else np.int64  # 16 bits are sorted fastest
    order = np.argsort(work.lengths.astype(kind), kind="stable")
    lengths = work.lengths[order]
    seconds = work.cost.of_sample(lengths)
    top = max(float(seconds[-1]), work.cost.fixed_s / lengths.size)
    # a power of two: scaling by it rounds nothing, and the rounding after it is the same everywhere
    unit = 2.0 ** (COST_BITS - np.frexp(top)[1])
    costs = np.maximum(np.rint(seconds * unit), 1).astype(np.int64)
    most = np.full(lengths.size, bounds.max_size, dtype=np.int64)
    if work.most_padded is not None:
        most = np.minimum(most, work.most_padded // lengths)
    return Task(
        order,
        costs,
        most,
        fixed=int(np.rint(work.cost.fixed_s * unit)),
        min_size=bounds.min_size,
        replicas=replicas,
        num_stages=num_stages,
        min_micro_batches=bounds.min_micro_batches,
        max_micro_batches=bounds.max_micro_batches,
    )
