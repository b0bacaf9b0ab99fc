"""Ranks of the right candidate, counted one by one; and the hits that recall is made of."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.metrics import retrieval
from models.metrics.retrieval import (
    RECALL_AT,
    answers_of,
    best_ranks,
    hits,
    median_rank,
    nearest,
    positive_ranks,
    recall_hits,
    reranked,
)


def ranks_one_by_one(own: Tensor, other: Tensor, target: Tensor) -> list[int]:
    """How many other candidates are at least as similar to the query as its partner."""
    ranks = []
    for query, partner in zip(own, target.tolist()):
        similarity = [float(query @ candidate) for candidate in other]
        ranks.append(
            sum(value >= similarity[partner] for i, value in enumerate(similarity) if i != partner)
        )
    return ranks


def whole_numbers(count: int, width: int, seed: int, high: int) -> Tensor:
    """Vectors of small whole numbers: products are exact in any order of summation, and ties are
    many."""
    return torch.randint(
        -high, high + 1, (count, width), generator=torch.Generator().manual_seed(seed)
    ).float()


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
    own, other = (
        torch.full((20, 4), float("nan")),
        torch.randn(20, 4, generator=torch.Generator().manual_seed(0)),
    )
    for queries, candidates in ((own, other), (other, own), (own, own)):
        assert int(positive_ranks(queries, candidates, torch.arange(20)).min()) >= 0
        assert recall_hits(queries, candidates, torch.arange(20)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("count", [63, 64, 65, 131])
def test_blocks_leave_no_trace(count, monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK_BYTES", 64 * 4 * 50)  # 64 queries among 50 candidates
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
    own = (
        torch.arange(20, 0, -1).float().expand(20, 20)
    )  # every query ranks the candidates 0, 1, 2, …
    counted = recall_hits(own, other, torch.arange(20))
    assert counted.dtype == torch.float64 and counted.tolist() == [1.0, 5.0, 10.0]


def test_hits_of_parts_add_up():
    """Replicas count their own rows; the sum is that of all rows."""
    own, other = whole_numbers(60, 6, 4, 3), whole_numbers(60, 6, 5, 3)
    target = torch.arange(60)
    parts = sum(
        recall_hits(own[rows], other, target[rows])
        for rows in (slice(0, 7), slice(7, 41), slice(41, 60))
    )
    assert parts.tolist() == recall_hits(own, other, target).tolist()


def best_ranks_one_by_one(own, own_label, other, other_label):
    """How many candidates with another label are at least as similar to the query as its best
    match."""
    ranks = []
    for query, label in zip(own, own_label.tolist()):
        similarity = [float(query @ candidate) for candidate in other]
        best = max(value for value, of in zip(similarity, other_label.tolist()) if of == label)
        ranks.append(
            sum(value >= best for value, of in zip(similarity, other_label.tolist()) if of != label)
        )
    return ranks


@pytest.mark.parametrize("high", [1, 50], ids=["many ties", "few ties"])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_several_texts_counts(seed, high, monkeypatch):
    """Images with one to five texts, and both directions, in blocks that do not divide."""
    draw = torch.Generator().manual_seed(seed)
    whose = torch.repeat_interleave(torch.arange(23), torch.randint(1, 6, (23,), generator=draw))
    whose = whose[torch.randperm(len(whose), generator=draw)]
    image, text = whole_numbers(23, 5, seed, high), whole_numbers(len(whose), 5, seed + 100, high)
    monkeypatch.setattr(retrieval, "BLOCK_BYTES", 7 * 4 * len(whose))
    for sides in ((image, torch.arange(23), text, whose), (text, whose, image, torch.arange(23))):
        assert best_ranks(*sides).tolist() == best_ranks_one_by_one(*sides)


def test_a_query_without_a_match_is_refused():
    with pytest.raises(ValueError, match="query 1 has no match among the 3 candidates"):
        best_ranks(torch.eye(2, 3), torch.tensor([0, 7]), torch.eye(3), torch.arange(3))


def test_median_and_hits_of_ranks():
    ranks = torch.tensor([0, 0, 3, 4, 9, 30])
    assert median_rank(ranks) == 4.5 and median_rank(ranks[:5]) == 4.0
    assert hits(ranks).tolist() == [2.0, 4.0, 5.0]


def test_the_nearest_of_each_query(monkeypatch):
    own, other = whole_numbers(31, 6, 0, 50), whole_numbers(40, 6, 1, 50)
    similarity = own @ other.T
    monkeypatch.setattr(retrieval, "BLOCK_BYTES", 4 * 4 * 40)
    index, value = nearest(own, other, 5)
    assert torch.equal(value, similarity.sort(1, descending=True).values[:, :5]) and torch.equal(
        similarity.gather(1, index), value
    )
    assert nearest(own, other[:3], 5)[0].shape == (31, 3) and nearest(own[:0], other, 5)[
        0
    ].shape == (0, 5)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_among_the_first_candidates_by_other_scores(seed):
    """Small whole numbers, so that scores tie; two right candidates for a third of the queries,
    none for another third."""
    draw = torch.Generator().manual_seed(seed)
    scores, right = (
        torch.randint(0, 4, (60, 7), generator=draw).float(),
        torch.zeros(60, 7, dtype=torch.bool),
    )
    right[:40, 2] = True
    right[:20, 5] = True
    scores[::9, 2], scores[::7, 3] = torch.nan, torch.nan
    found = reranked(torch.arange(100, 160), scores, right).tolist()
    for i, (own, is_right) in enumerate(zip(scores.tolist(), right.tolist())):
        best = max((-1.0 if s != s else s for s, r in zip(own, is_right) if r), default=None)
        before = sum(not r and not (best is not None and s < best) for s, r in zip(own, is_right))
        assert found[i] == (100 + i if best is None else before), i


def test_answers_to_some_queries_add_up_over_the_ranks_that_have_them():
    draw = torch.Generator().manual_seed(0)
    own, other = (F.normalize(torch.randn(30, 8, generator=draw), dim=1) for _ in range(2))
    asked, k = torch.tensor([0, 11, 29]), 4
    whole = answers_of(own, other, torch.arange(30), asked, k)
    parts = [answers_of(own[rows], other, rows, asked, k) for rows in torch.arange(30).split(7)]
    torch.testing.assert_close(sum(parts), whole)
    best = (own @ other.T)[asked].sort(1, descending=True)
    assert torch.equal(whole[0], best.indices[:, :k].double() + 1)
    torch.testing.assert_close(whole[1], best.values[:, :k].double())
    # a rank without rows, and fewer candidates than are asked for
    assert not answers_of(own[:0], other[:0], torch.zeros(0, dtype=torch.int64), asked, k).any()
    few = answers_of(own[:2], other[:2], torch.arange(2), asked, k)
    assert few[0].count_nonzero(1).tolist() == [2, 0, 0]
