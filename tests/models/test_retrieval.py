"""Ranks of the right candidate, counted one by one; and the hits that recall is made of."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.retrieval import BLOCK_ROWS, RECALL_AT, positive_ranks, recall_hits


def ranks_one_by_one(own: Tensor, other: Tensor, target: Tensor) -> list[int]:
    """How many other candidates are at least as similar to the query as its partner."""
    ranks = []
    for query, partner in zip(own, target.tolist()):
        similarity = [float(query @ candidate) for candidate in other]
        ranks.append(sum(value >= similarity[partner] for i, value in enumerate(similarity) if i != partner))
    return ranks


def whole_numbers(count: int, width: int, seed: int, high: int) -> Tensor:
    """Vectors of small whole numbers: products are exact in any order of summation, and ties are many."""
    return torch.randint(-high, high + 1, (count, width), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("high", [1, 50], ids=["many ties", "few ties"])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_of_own_rows_among_all(seed, high):
    other = whole_numbers(40, 5, seed, high)  # [B, D]
    own = whole_numbers(17, 5, seed + 100, high)  # [b, D]
    target = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:17]
    ranks = positive_ranks(own, other, target)
    assert ranks.dtype == torch.int64 and ranks.shape == (17,)
    assert ranks.tolist() == ranks_one_by_one(own, other, target)


def test_the_nearest_is_first_and_the_farthest_last():
    other = torch.eye(4)
    own = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(4, 4)
    assert positive_ranks(own, other, torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_a_collapsed_model_scores_nothing():
    same = F.normalize(torch.ones(30, 8), dim=1)
    assert positive_ranks(same, same, torch.arange(30)).tolist() == [29] * 30
    assert recall_hits(same, same, torch.arange(30)).tolist() == [0.0, 0.0, 0.0]


def test_a_model_of_not_a_number_scores_nothing():
    own, other = torch.full((20, 4), float("nan")), torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    for queries, candidates in ((own, other), (other, own), (own, own)):
        assert int(positive_ranks(queries, candidates, torch.arange(20)).min()) >= 0
        assert recall_hits(queries, candidates, torch.arange(20)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("count", [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 3])
def test_blocks_leave_no_trace(count):
    own, other = whole_numbers(count, 3, 1, 9), whole_numbers(50, 3, 2, 9)
    target = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(3))
    similarity = own @ other.T  # [b, B]: exact, see whole_numbers
    expected = (similarity >= similarity.gather(1, target[:, None])).sum(1) - 1
    assert positive_ranks(own, other, target).equal(expected)


def test_no_queries():
    own, target = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    for other in (torch.randn(5, 4), torch.zeros(0, 4)):
        ranks = positive_ranks(own, other, target)
        assert ranks.dtype == torch.int64 and ranks.shape == (0,)
        assert recall_hits(own, other, target).tolist() == [0.0, 0.0, 0.0]


def test_hits_are_counted_per_k():
    assert RECALL_AT == (1, 5, 10)
    other = torch.eye(20)
    own = torch.arange(20, 0, -1).float().expand(20, 20)  # every query ranks the candidates 0, 1, 2, …
    hits = recall_hits(own, other, torch.arange(20))
    assert hits.dtype == torch.float64 and hits.tolist() == [1.0, 5.0, 10.0]


def test_hits_of_parts_add_up():
    """Replicas count their own rows; the sum is that of all rows."""
    own, other = whole_numbers(60, 6, 4, 3), whole_numbers(60, 6, 5, 3)
    target = torch.arange(60)
    parts = sum(recall_hits(own[rows], other, target[rows]) for rows in (slice(0, 7), slice(7, 41), slice(41, 60)))
    assert parts.tolist() == recall_hits(own, other, target).tolist()
