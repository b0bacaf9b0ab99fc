"""Zero-shot retrieval: how far down the list of all candidates does the first right one stand?
Exact, in blocks.

All metrics compare similarities by one rule, so that a rank depends neither on the order of the
rows nor on how they are divided into blocks and over ranks. Similarities are float64 products of
float32 embeddings, whose own rounding is below `TOLERANCE`. A candidate whose similarity is within
`TOLERANCE` of the best right one ties with it, and counts as ranked before it: a model that gives
all candidates one embedding scores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

RECALL_AT = (1, 5, 10)
FIGURES = ("queries", "candidates", "answers", f"chance@{RECALL_AT[-1]}")
"""Beside the recalls of a direction; the last two are means over the queries."""
NUM_SUMS = len(RECALL_AT) + len(FIGURES)  # of `query_sums`
BLOCK_BYTES = 1 << 26  # of similarities at a time
# Rounding of float32 towers moves a cosine by up to some 1e-7, with the batch that a row is in.
# What a model tells apart is coarser by orders of magnitude.
TOLERANCE = 1e-6  # of a cosine
TIES = (
    f"similarities that differ by at most {TOLERANCE:g} tie, and a tie counts as ranked before the "
    "right answer"
)


@dataclass(frozen=True)
class Relevance:
    """Which candidates are right answers to which queries.

    Rows with equal keys hold equal values (the same image in several rows of a table, the same
    caption of several images): they are one query and one candidate, named by their first row. A
    candidate is right where some sample has both values.
    """

    query_row: Tensor  # [q] int64, the row of each query
    candidate_row: Tensor  # [m] int64, the row of each candidate
    query_of: Tensor  # [n] int64, the query that each row is of; -1: one that is left out
    query: Tensor  # [p] int64, ascending, and
    candidate: Tensor  # [p] int64: the pairs that belong together, by their numbers

    @classmethod
    def of(cls, own_key: Tensor, other_key: Tensor, own: Tensor, other: Tensor) -> Relevance:
        """`own_key` [n], `other_key` [B] int64: of the rows of both sides. `own`, `other` [s]: rows
        of which a sample has both. Errors: ValueError for a query without an answer."""
        query_row, query_of = _distinct(own_key)
        candidate_row, candidate_of = _distinct(other_key)
        number = max(1, len(candidate_row))
        pairs = (query_of[own] * number + candidate_of[other]).unique()
        relevance = cls(query_row, candidate_row, query_of, pairs // number, pairs % number)
        alone = (relevance.num_answers == 0).nonzero()
        if len(alone):
            raise ValueError(
                f"query {int(query_row[alone[0]])} has no match among the {len(candidate_row)} "
                "candidates"
            )
        return relevance

    @property
    def num_answers(self) -> Tensor:
        """Of each query: int64 [q]."""
        return self.query.bincount(minlength=len(self.query_row))

    def asked_by(self, rows: Tensor) -> Relevance:
        """Only the queries that these rows name. Ranks that share out the rows share out the
        queries."""
        kept = torch.isin(self.query_row, rows)
        number = torch.where(kept, kept.cumsum(0) - 1, -1)  # [q]
        pairs = kept[self.query]
        return replace(
            self,
            query_row=self.query_row[kept],
            query_of=number[self.query_of],
            query=number[self.query[pairs]],
            candidate=self.candidate[pairs],
        )

    def is_right(self, query: Tensor, candidate: Tensor) -> Tensor:
        """Of the queries [b] each of the candidates [b, k], by their numbers: bool [b, k]."""
        number = max(1, len(self.candidate_row))
        pairs = self.query * number + self.candidate
        return torch.isin(query[:, None] * number + candidate, pairs)

    def chance(self, k: int) -> Tensor:
        """Of each query, how likely the first k of all candidates in random order hold an answer:
        float64 [q]."""
        candidates, wrong = len(self.candidate_row), len(self.candidate_row) - self.num_answers
        drawn = torch.arange(min(k, candidates), device=wrong.device)
        missed = (wrong[:, None] - drawn).clamp(min=0).double() / (candidates - drawn)
        return 1 - missed.prod(1)


def _distinct(key: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each distinct key, in the order of the rows: [u]; the number of its key for
    each row [n]."""
    values, number = key.unique(return_inverse=True)
    rows = torch.arange(len(key), device=key.device)
    first = rows.new_full((len(values),), len(key)).scatter_reduce_(0, number, rows, "amin")
    order = first.argsort()
    return first[order], order.argsort()[number]


def equal_labels(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Labels [n] and [B], the latter ascending -> the pairs of rows that have the same: int64 [s]
    each, those of the first ascending."""
    first, last = (torch.searchsorted(other, own, right=right) for right in (False, True))
    number = last - first
    rows = torch.arange(len(own), device=own.device).repeat_interleave(number)
    within = torch.arange(len(rows), device=own.device) - (number.cumsum(0) - number)[rows]
    return rows, first[rows] + within


def similarities(own: Tensor, other: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of a block of queries `own` [q, D], and their similarities to all candidates `other`
    [m, D]: float64 [block, m], in memory that the next block uses again."""
    parts, candidates = list(blocks(len(own), len(other))), other.double().T
    # made once: blocks that come and go leave gaps between what stays, and the process grows
    most = max((rows.stop - rows.start for rows in parts), default=0)
    memory = own.new_empty(most, len(other), dtype=torch.float64)
    for rows in parts:
        # float64 also keeps TF32 out of the product on a GPU
        yield rows, torch.mm(own[rows].double(), candidates, out=memory[: rows.stop - rows.start])


def best_ranks(
    own: Tensor,
    other: Tensor,
    query: Tensor,
    candidate: Tensor,
    change: Callable[[Tensor], Any] | None = None,
    margin: Callable[[Tensor], Tensor | float] = lambda best: TOLERANCE,
) -> Tensor:
    """Rank (0 = first) of each query's best match among all candidates: int64 [q].

    `own` [q, D] queries, `other` [m, D] candidates; `query` [p], ascending, and `candidate` [p]:
    the pairs that match, at least one for each query. Matches do not stand in each other's way: as
    COCO counts, an image has found its text when one of its five is among the first. Another
    candidate that ties with the best match counts as ranked before it. `change`: of similarities
    [block, m], in place; `margin`: by how much what it makes of the best match [block] may exceed
    what it makes of another that ties with it.
    """
    last = query.bincount(minlength=len(own)).cumsum(0)
    ranks, flags = query.new_empty(len(own)), None
    for rows, similarity in similarities(own, other):
        flags = torch.empty_like(similarity, dtype=torch.bool) if flags is None else flags
        if change is not None:
            change(similarity)
        of_block = slice(int(last[rows.start - 1]) if rows.start else 0, int(last[rows.stop - 1]))
        within, match = query[of_block] - rows.start, candidate[of_block]
        of_match = similarity[within, match]
        of_match = torch.where(of_match.isnan(), -torch.inf, of_match)  # no better than any other
        best = torch.full_like(similarity[:, 0], -torch.inf).scatter_reduce_(
            0, within, of_match, "amax"
        )
        # not-a-number is not: it counts as ranked before
        behind = torch.lt(similarity, (best - margin(best))[:, None], out=flags[: len(similarity)])
        before = (len(other) - behind.sum(1)).index_add_(
            0, within, (~behind[within, match]).long(), alpha=-1
        )
        ranks[rows] = before
    return ranks


def relevant_ranks(own: Tensor, other: Tensor, relevance: Relevance) -> Tensor:
    """`best_ranks` of the queries among the rows `own` [n, D], with candidates among `other` [B,
    D]: int64 [q]."""
    queries, candidates = own[relevance.query_row], other[relevance.candidate_row]
    return best_ranks(queries, candidates, relevance.query, relevance.candidate)


def rank_bounds(own: Tensor, other: Tensor, relevance: Relevance) -> tuple[Tensor, Tensor]:
    """`relevant_ranks`, and the same with each tie as ranked behind the best right answer. A rank
    that follows from the order of rows, as that of `torch.topk`, lies between them."""
    queries, candidates = own[relevance.query_row], other[relevance.candidate_row]
    pairs = (relevance.query, relevance.candidate)
    last = best_ranks(queries, candidates, *pairs)
    return last, best_ranks(queries, candidates, *pairs, margin=lambda best: -TOLERANCE)


DUAL_SCALE = 100.0  # of the similarities in the softmax: the largest that CLIP trains with


def dual_softmax_ranks(own: Tensor, other: Tensor, relevance: Relevance) -> Tensor:
    """As `relevant_ranks`, with each similarity times its softmax over all queries of a candidate
    (CAMoE: Cheng et al. 2021): int64 [q]."""
    queries, candidates = own[relevance.query_row], other[relevance.candidate_row]
    total = candidates.new_full((len(candidates),), -torch.inf, dtype=torch.float64)
    for _, similarity in similarities(queries, candidates):  # log-sum-exp over the queries
        total = torch.logaddexp(total, (DUAL_SCALE * similarity).logsumexp(0))

    def weigh(similarity: Tensor) -> None:
        similarity *= (DUAL_SCALE * similarity - total).exp()

    def margin(best: Tensor) -> Tensor:
        # TOLERANCE of a cosine, in the exponent once by the similarity and once by the total
        return 2 * DUAL_SCALE * TOLERANCE * best.abs()

    return best_ranks(queries, candidates, relevance.query, relevance.candidate, weigh, margin)


def positive_ranks(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """`best_ranks` where each query has one match: candidate `target` [b]."""
    return best_ranks(own, other, torch.arange(len(own), device=own.device), target)


SCORE_TOLERANCE = 1e-5  # of a score of float32, relative to 1 or its own size


def reranked(ranks: Tensor, scores: Tensor, right: Tensor) -> Tensor:
    """Ranks after the first k candidates of each query were put in the order of other `scores` [b,
    k]: int64 [b].

    `ranks` [b] among all candidates as `best_ranks` counts, `right` [b, k] bool. A query with no
    right one among its k keeps its rank, and so does one whose right ones are there only because a
    tie was broken. As there, another candidate that ties with the best right one (within
    `SCORE_TOLERANCE`), and one without a score (not a number), is before it.
    """
    best = torch.where(right & ~scores.isnan(), scores, -torch.inf).amax(1, keepdim=True)
    least = best - SCORE_TOLERANCE * best.abs().clamp(min=1)
    is_scored = right.any(1) & (ranks < scores.shape[1])
    return torch.where(is_scored, (~(scores < least) & ~right).sum(1), ranks)


def hits(ranks: Tensor) -> Tensor:
    """How many of the ranks [b] are among the first k, for each k of RECALL_AT: float64 [3]."""
    return torch.stack([(ranks < k).sum() for k in RECALL_AT]).double()


def query_sums(ranks: Tensor, relevance: Relevance) -> Tensor:
    """What `query_figures` divides, float64 [7], which ranks add up: `hits`; of all queries their
    number, answers and candidates, and how likely the first 10 of a random order are right."""
    number = ranks.new_tensor(len(ranks), dtype=torch.float64)
    answers = relevance.num_answers.sum().double()
    of_all = [number, answers, number * len(relevance.candidate_row)]
    return torch.cat([hits(ranks), torch.stack([*of_all, relevance.chance(RECALL_AT[-1]).sum()])])


def query_figures(direction: str, sums: Sequence[float]) -> dict[str, float]:
    """{"image_to_text_R@1": …, …} in 0..1, from the sums of `query_sums`. Where queries do not
    have one answer each among as many candidates also {"image_to_text_queries": …} and so on, of
    `FIGURES`. Without queries none."""
    *found, number, answers, candidates, chance = map(float, sums)
    if not number:
        return {}
    values = {f"{direction}_R@{k}": count / number for k, count in zip(RECALL_AT, found)}
    if answers == number and candidates == number * number:
        return values
    means = (number, candidates / number, answers / number, chance / number)
    return values | {f"{direction}_{name}": value for name, value in zip(FIGURES, means)}


def median_rank(ranks: Tensor) -> float:
    """Counted from 1, as papers do; of an even number the mean of the middle two."""
    return float(ranks.double().quantile(0.5)) + 1


def nearest(own: Tensor, other: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k candidates of `other` [B, D] that are most like each query of `own` [b, D], best first:
    (index int64 [b, k], similarity float64 [b, k]). Of similarities that are equal once rounded to
    `TOLERANCE` the earlier row is first; one that is not a number is last. k is at most B."""
    k = min(k, len(other))
    index = torch.zeros(len(own), k, dtype=torch.int64, device=own.device)
    values = torch.zeros(len(own), k, dtype=torch.float64, device=own.device)
    row = torch.arange(len(other), device=own.device)
    for rows, similarity in similarities(own, other):
        # whole numbers below 2^53, so float64 holds them exactly
        key = (similarity / TOLERANCE).round_().mul_(len(other)).sub_(row)
        index[rows] = key.nan_to_num_(nan=-torch.inf, neginf=-torch.inf).topk(k, dim=1).indices
        values[rows] = similarity.gather(1, index[rows])
    return index, values


def first_answers(
    own: Tensor, other: Tensor, relevance: Relevance, mine: Tensor, asked: Tensor, k: int
) -> Tensor:
    """What is found for some rows, in a form that can be summed over ranks: float64 [q, k, 3], for
    each of the rows `asked` [q] the k candidates that are most like it, best first, as (row + 1,
    similarity, 1 where it is right).

    `own` [n, D], `other` [B, D]: all rows of both sides; `mine` [b]: those that are looked at here.
    Zeros stand for rows that are not among them, and for candidates beyond the last.
    """
    found = torch.zeros(len(asked), k, 3, dtype=torch.float64, device=own.device)
    here = torch.isin(asked, mine).nonzero()[:, 0]
    rows = asked[here]
    index, similarity = nearest(own[rows], other[relevance.candidate_row], k)
    number = index.shape[1]
    found[here, :number, 0] = relevance.candidate_row[index].double() + 1
    found[here, :number, 1] = similarity
    found[here, :number, 2] = relevance.is_right(relevance.query_of[rows], index).double()
    return found


def blocks(num_queries: int, num_candidates: int) -> Iterator[slice]:
    """Rows of queries, so many at a time that their similarities to all candidates, in float64,
    take `BLOCK_BYTES`."""
    rows = max(1, BLOCK_BYTES // (8 * max(1, num_candidates)))
    return (slice(start, min(start + rows, num_queries)) for start in range(0, num_queries, rows))
