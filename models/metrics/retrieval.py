"""Zero-shot retrieval: how far down the list of all candidates does the first right one stand?
Exact, in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

RECALL_AT = (1, 5, 10)
BLOCK_BYTES = 1 << 26  # of similarities at a time


def best_ranks(own: Tensor, own_label: Tensor, other: Tensor, other_label: Tensor) -> Tensor:
    """Rank (0 = first) of each query's best match among all candidates: int64 [b].

    `own` [b, D] queries, `other` [B, D] candidates; a candidate matches a query where their labels,
    [b] and [B], are equal. Matches do not stand in each other's way: as COCO counts, an image has
    found its text when one of its five is among the first. Another candidate that ties with the
    best match counts as ranked before it, so that a collapsed model scores nothing. Errors:
    ValueError where a query has no match.
    """
    order = other_label.argsort()
    first, last = (
        torch.searchsorted(other_label[order], own_label, right=right) for right in (False, True)
    )
    if (first == last).any():
        raise ValueError(
            f"query {int((first == last).nonzero()[0])} has no match among the {len(other)} "
            "candidates"
        )
    ranks, parts = torch.empty_like(own_label), list(blocks(len(own), len(other)))
    # made once: blocks that come and go leave gaps between what stays, and the process grows
    most = max((rows.stop - rows.start for rows in parts), default=0)
    memory, flags = (
        own.new_empty(most, len(other)),
        torch.empty(most, len(other), dtype=torch.bool, device=own.device),
    )
    for rows in parts:
        similarity = torch.mm(
            own[rows], other.T, out=memory[: rows.stop - rows.start]
        )  # [block, B]
        number = (last - first)[rows]
        query = torch.arange(len(number), device=own.device).repeat_interleave(
            number
        )  # of each match, [p]
        within = torch.arange(len(query), device=own.device) - (
            number.cumsum(0) - number
        ).repeat_interleave(number)
        match = order[first[rows].repeat_interleave(number) + within]  # [p]
        of_match = similarity[query, match]
        of_match = torch.where(of_match.isnan(), -torch.inf, of_match)  # no better than any other
        best = torch.full_like(similarity[:, 0], -torch.inf).scatter_reduce_(
            0, query, of_match, "amax"
        )
        behind = torch.lt(
            similarity, best[:, None], out=flags[: len(similarity)]
        )  # not-a-number is not: it counts as ranked before
        before = (len(other) - behind.sum(1)).index_add_(
            0, query, (~behind[query, match]).long(), alpha=-1
        )
        ranks[rows] = before
    return ranks


def positive_ranks(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """`best_ranks` where each query has one match: candidate `target` [b]."""
    return best_ranks(own, target, other, torch.arange(len(other), device=other.device))


def reranked(ranks: Tensor, scores: Tensor, right: Tensor) -> Tensor:
    """Ranks after the first k candidates of each query were put in the order of other `scores` [b,
    k]: int64 [b].

    `ranks` [b] among all candidates as `best_ranks` counts, `right` [b, k] bool. A query with no
    right one among its k keeps its rank; as there, another candidate that ties with the best right
    one, and one without a score (not a number), is before it.
    """
    best = torch.where(right & ~scores.isnan(), scores, -torch.inf).amax(1, keepdim=True)
    return torch.where(right.any(1), (~(scores < best) & ~right).sum(1), ranks)


def recall_hits(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """How many queries find their partner among the first k, for each k of RECALL_AT: float64
    [3]."""
    return hits(positive_ranks(own, other, target))


def hits(ranks: Tensor) -> Tensor:
    """How many of the ranks [b] are among the first k, for each k of RECALL_AT: float64 [3]."""
    return torch.stack([(ranks < k).sum() for k in RECALL_AT]).double()


def median_rank(ranks: Tensor) -> float:
    """Counted from 1, as papers do; of an even number the mean of the middle two."""
    return float(ranks.double().quantile(0.5)) + 1


def nearest(own: Tensor, other: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k candidates of `other` [B, D] that are most like each query of `own` [b, D], best first:
    (index int64 [b, k], similarity [b, k]). k is at most B."""
    found = [
        torch.topk(own[rows] @ other.T, min(k, len(other)), dim=1)
        for rows in blocks(len(own), len(other))
    ]
    empty = own.new_zeros(0, min(k, len(other)))
    return (
        torch.cat([part.indices for part in found]) if found else empty.long(),
        torch.cat([part.values for part in found]) if found else empty,
    )


def answers_of(own: Tensor, other: Tensor, target: Tensor, asked: Tensor, k: int) -> Tensor:
    """The k best candidates of those queries of `own` [b, D] whose `target` [b] is in `asked` [Q]:
    float64 [2, Q, k], the index of each in `other` [B, D] counted from 1, and its similarity. Zeros
    for a query that is not in `own`, and where there are fewer candidates.

    So the parts of several ranks, each with own queries of its own, add up to the whole.
    """
    found = own.new_zeros(2, len(asked), k, dtype=torch.float64)
    row, query = (target[:, None] == asked.to(target)).nonzero(as_tuple=True)
    index, similarity = nearest(own[row], other, k)
    found[0, query, : index.shape[1]] = index.double() + 1
    found[1, query, : index.shape[1]] = similarity.double()
    return found


def blocks(num_queries: int, num_candidates: int) -> Iterator[slice]:
    """Rows of queries, so many at a time that their similarities to all candidates take
    `BLOCK_BYTES`."""
    rows = max(1, BLOCK_BYTES // (4 * max(1, num_candidates)))
    return (slice(start, min(start + rows, num_queries)) for start in range(0, num_queries, rows))
