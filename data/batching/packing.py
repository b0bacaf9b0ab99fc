"""Packing: which texts of a global batch make which micro-batch, by what they cost. Pure functions,
numpy only.

The loss is over the whole global batch, so the micro-batch and the replica that compute a text
change the speed and nothing else. A micro-batch is padded to its longest text. M micro-batches that
take t_m seconds on their slowest stage take Σ t_m + (S − 1) · max t_m through S stages, in any
order, and a step waits for the slowest replica. A packing should therefore

    minimise   max over replicas r of  Σ_m t_rm + (S − 1) · max_m t_rm

It is enough to sort the texts by length and to cut them into consecutive pieces: in any other
packing, texts of two micro-batches can be exchanged until one has the longer ones, and neither
costs more than before. `pack` tries two kinds of cuts, those of the cheapest costliest piece and
those of the least sum, and hands the pieces to the replicas, the costliest first.

G: texts of the global batch, R: replicas, M: micro-batches of each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from data.batching.branch_cost import BranchCost

Packing = list[list[np.ndarray]]  # [replica][micro-batch] -> int64 positions 0..G-1, each once

MOST_LENGTHS = 128  # where more are told apart, there is little to save and much to try
IMPOSSIBLE = 1 << 61  # larger than the cost of any global batch
COST_BITS = 20  # the costliest text is a whole number of this many bits
MORE_PERCENT = (0, 5, 12, 25, 50, 100)  # that the costliest piece may cost, to save padding


@dataclass(frozen=True)
class Bounds:
    """Limits of one micro-batch: the number of its texts, both limits included, and its tokens with
    padding, which bound the memory of its activations."""

    min_size: int = 1
    max_size: int = 1 << 30
    max_tokens: int = 1 << 40

    def __post_init__(self) -> None:
        if not 1 <= self.min_size <= self.max_size:
            raise ValueError(f"{self}: 1 <= min_size <= max_size is needed")


def padded_lengths(num_tokens: np.ndarray, max_text_tokens: int, multiple: int = 1) -> np.ndarray:
    """[G] what texts of `num_tokens` [G] are padded to alone, cut and rounded as by tokenizers."""
    cut = np.minimum(np.asarray(num_tokens, dtype=np.int64), max_text_tokens)
    return np.minimum(-(-cut // multiple) * multiple, max_text_tokens)


def pack(
    lengths: np.ndarray,
    cost: BranchCost,
    replicas: int,
    numbers: Sequence[int],
    num_stages: int = 1,
    bounds: Bounds = Bounds(),
) -> Packing:
    """The fastest packing into M micro-batches per replica, over all M in `numbers`.

    `lengths` [G], whole numbers >= 1: what each text is padded to alone. The costliest micro-batch
    of a replica comes first, and the m-th ones of all replicas cost about the same. Positions in a
    micro-batch ascend. The same arguments give the same packing on every machine. Errors:
    ValueError where no packing is within the bounds.
    """
    order = np.argsort(lengths, kind="stable")
    rising = lengths[order]
    costs, fixed = _whole_costs(cost, rising)
    most = np.minimum(bounds.max_size, bounds.max_tokens // rising)  # [G] texts up to each one
    best: tuple[int, np.ndarray, np.ndarray] | None = None
    cheapest = _cheapest_cuts(costs, most, replicas * max(numbers), bounds.min_size)
    for number in numbers:
        pieces = replicas * number
        cuts = _cuts(costs, most, fixed, pieces, bounds.min_size)
        for sizes in chain(cuts, cheapest.get(pieces, ())):
            ends = np.cumsum(sizes)
            seconds = fixed + sizes * costs[ends - 1]  # [R · M], in whole numbers
            lines = _hand_out(seconds, replicas)
            own = seconds[lines]  # [R, M]
            time = int((own.sum(axis=1) + (num_stages - 1) * own.max(axis=1)).max())
            if best is None or time < best[0]:
                best = time, ends, lines
    if best is None:
        raise ValueError(
            f"{len(lengths)} texts cannot be packed for {replicas} replicas into "
            f"{min(numbers)} to {max(numbers)} micro-batches each within {bounds}; allow other "
            "numbers of micro-batches, or smaller or larger ones"
        )
    _, ends, lines = best
    parts = [np.sort(part) for part in np.split(order, ends[:-1])]
    return [[parts[piece] for piece in line] for line in lines.tolist()]


def _whole_costs(cost: BranchCost, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """The seconds that each text adds to a micro-batch of its length, and those of a micro-batch
    itself, as whole numbers of one unit: sums of them are the same on every machine."""
    seconds = cost.of_sample(lengths)
    top = max(float(seconds[-1]), cost.fixed_s / len(lengths))
    # a power of two: scaling by it rounds nothing
    unit = 2.0 ** (COST_BITS - np.frexp(top)[1])
    return np.maximum(np.rint(seconds * unit), 1).astype(np.int64), int(
        np.rint(cost.fixed_s * unit)
    )


def _cheapest_cuts(
    costs: np.ndarray, most: np.ndarray, most_pieces: int, min_size: int
) -> dict[int, list[np.ndarray]]:
    """Sizes of the consecutive pieces whose sum of costs is least, of those that end where a length
    ends, by their number; a number that the bounds leave no such pieces is not there."""
    ends = np.flatnonzero(np.diff(costs, append=0)) + 1  # [L] of the texts of each length
    if len(ends) > MOST_LENGTHS:
        return {}
    starts = np.append(0, ends[:-1])
    sizes = ends - starts[:, None]  # [L, L] of a piece from one length to another
    allowed = (sizes >= min_size) & (sizes <= most[ends - 1])
    piece = np.where(allowed, sizes * costs[ends - 1], IMPOSSIBLE)
    total, first_lengths, found = piece[0], [], {}  # of the pieces so far, up to each length
    for pieces in range(1, min(most_pieces, len(ends)) + 1):
        if pieces > 1:
            totals = total[:-1, None] + piece[1:]
            first_lengths.append(totals.argmin(axis=0) + 1)
            total = np.minimum(totals.min(axis=0), IMPOSSIBLE)
        if total[-1] < IMPOSSIBLE:
            stops, last = [len(costs)], len(ends) - 1
            for first in reversed(first_lengths):
                stops.append(int(starts[first[last]]))
                last = first[last] - 1
            found[pieces] = [np.diff(np.append(0, stops[::-1]))]
    return found


def _cuts(
    costs: np.ndarray, most: np.ndarray, fixed: int, pieces: int, min_size: int
) -> Iterator[np.ndarray]:
    """[pieces] sizes of consecutive pieces: a few ways to cut, none where the bounds leave none.

    The first has the cheapest costliest piece, found by bisection. The others let it cost a little
    more and cut where a length ends, so that fewer texts are padded.
    """
    # single items of lists are read several times faster than those of arrays
    of_text, most_of = costs.tolist(), most.tolist()

    def filled(limit: int, at_lengths: bool = False) -> list[int] | None:
        """Pieces as full as the limit and the bounds allow, from the longest text down."""
        stop, sizes = len(of_text), []
        for kept in range((pieces - 1) * min_size, -1, -min_size):  # for the pieces to come
            size = min((limit - fixed) // of_text[stop - 1], most_of[stop - 1], stop - kept)
            if size < min_size:
                return None
            start = stop - size
            if at_lengths and kept and of_text[start - 1] == of_text[start]:
                end = bisect_right(of_text, of_text[start], start, stop)
                if stop - end >= min_size:  # the texts of that length all come with the next piece
                    start = end
            sizes.append(stop - start)
            stop = start
        return None if stop else sizes[::-1]

    mean = int(costs.sum()) // pieces + fixed  # no costliest piece is cheaper
    limits = range(mean, int(costs[-1]) * len(costs) + fixed + mean, max(mean >> 12, 1))
    lowest = bisect_left(limits, True, key=lambda limit: filled(limit) is not None)
    if lowest == len(limits):
        return
    yield np.array(filled(limits[lowest]))
    for percent in MORE_PERCENT:
        sizes = filled(limits[lowest] * (100 + percent) // 100, at_lengths=True)
        if sizes is not None:
            yield np.array(sizes)


def _hand_out(seconds: np.ndarray, replicas: int) -> np.ndarray:
    """[R, M] numbers of the pieces of each replica: in rounds of one per replica, the costliest
    first, each round's costliest to the replica that has least so far (LPT, Graham 1969)."""
    rounds = np.argsort(-seconds, kind="stable").reshape(-1, replicas)  # [M, R]
    lines, sums = np.empty_like(rounds), np.zeros(replicas, dtype=np.int64)
    for number, pieces in enumerate(rounds):
        lines[number, np.argsort(sums, kind="stable")] = pieces
        sums += seconds[lines[number]]
    return lines.T


# -- what a packing costs


def micro_batch_seconds(packing: Packing, lengths: np.ndarray, cost: BranchCost) -> np.ndarray:
    """[R, M]: what each micro-batch takes on the slowest stage."""
    return cost.at(*_sizes_and_longest(packing, lengths))


def predicted_s(
    packing: Packing, lengths: np.ndarray, cost: BranchCost, num_stages: int = 1
) -> float:
    """Seconds of a pass through the stages, of the slowest replica."""
    seconds = micro_batch_seconds(packing, lengths, cost)
    return float((seconds.sum(axis=1) + (num_stages - 1) * seconds.max(axis=1)).max())


def lower_bound_s(
    lengths: np.ndarray,
    cost: BranchCost,
    replicas: int,
    num_micro_batches: int,
    num_stages: int = 1,
) -> float:
    """Seconds that no packing into so many micro-batches can beat: work divided evenly, no
    padding."""
    of_texts = cost.of_sample(lengths).sum()
    whole = replicas * num_micro_batches * cost.fixed_s + of_texts
    return float(whole / replicas * (1 + (num_stages - 1) / num_micro_batches))


def padding_share(packing: Packing, lengths: np.ndarray) -> float:
    """Part of all tokens that is padding beyond each text's own length."""
    sizes, longest = _sizes_and_longest(packing, lengths)
    return 1 - float(np.sum(lengths)) / float((sizes * longest).sum())


def explain(packing: Packing, lengths: np.ndarray, cost: BranchCost, num_stages: int = 1) -> str:
    """A table of all micro-batches: texts, longest text, padding and milliseconds."""
    seconds = micro_batch_seconds(packing, lengths, cost)
    sizes, longest = _sizes_and_longest(packing, lengths)
    step_s = predicted_s(packing, lengths, cost, num_stages)
    bound_s = lower_bound_s(lengths, cost, len(packing), len(packing[0]), num_stages)
    lines = [
        f"{len(lengths)} samples, {len(packing)} replicas × {len(packing[0])} micro-batches, "
        f"padding {padding_share(packing, lengths):.1%}, {1e3 * step_s:.4g} ms through "
        f"{num_stages} stages, {step_s / bound_s - 1:.1%} above what nothing can beat",
        "replica  micro-batch  samples  longest     padding      ms",
    ]
    row = "{:>7}  {:>11}  {:>7}  {:>7}  {:>10}  {:>6}".format
    for r, line in enumerate(packing):
        for m, part in enumerate(line):
            padding = 1 - lengths[part].sum() / (sizes[r, m] * longest[r, m])
            ms = f"{1e3 * seconds[r, m]:.4g}"
            lines.append(row(r, m, sizes[r, m], longest[r, m], f"{padding:.0%}", ms))
        lines.append(row(r, "all", sizes[r].sum(), "", "", f"{1e3 * seconds[r].sum():.4g}"))
    return "\n".join(lines)


def _sizes_and_longest(packing: Packing, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Texts and longest text of each micro-batch, [R, M] each."""
    sizes = np.array([[len(part) for part in line] for line in packing])
    longest = np.array([[lengths[part].max() for part in line] for line in packing])
    return sizes, longest
