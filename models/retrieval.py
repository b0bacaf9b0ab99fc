"""Zero-shot retrieval: how far down the list of all candidates does the right one stand? Exact, in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

RECALL_AT = (1, 5, 10)
BLOCK_ROWS = 1024


def positive_ranks(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """Rank (0 = first) of each query's partner among all candidates: int64 [b].

    `own` [b, D] queries, `other` [B, D] candidates, `target` [b] the candidate that belongs to each query. A candidate that
    ties with the partner counts as ranked before it, so that a collapsed model scores nothing.
    """
    ranks = []
    for start in range(0, len(own), BLOCK_ROWS):
        similarity = own[start : start + BLOCK_ROWS] @ other.T  # [block, B]
        partner = similarity.gather(1, target[start : start + BLOCK_ROWS, None])
        ranks.append((~(similarity < partner)).sum(1) - 1)  # not-a-number counts as ranked before, too
    return torch.cat(ranks) if ranks else target.new_zeros(0)


def recall_hits(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """How many queries find their partner among the first k, for each k of RECALL_AT: float64 [3]."""
    ranks = positive_ranks(own, other, target)
    return torch.stack([(ranks < k).sum() for k in RECALL_AT]).double()
