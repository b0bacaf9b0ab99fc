"""Ranks of the right candidate, counted one by one; and the hits that recall is made of."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.metrics import retrieval
from models.metrics.retrieval import (
    RECALL_AT,
    Relevance,
    best_ranks,
    equal_labels,
    first_answers,
    hits,
    median_rank,
    nearest,
    positive_ranks,
    query_figures,
    query_sums,
    relevant_ranks,
    reranked,
)


def recall_hits(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    return hits(positive_ranks(own, other, target))


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
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, (count, width), generator=draw).float()


def test_ranks_of_own_rows_among_all(subtests):
    for seed, high in product(range(5), (1, 50)):  # many ties, few ties
        with subtests.test(f"{seed}, {high}"):
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


def test_a_collapsed_model_scores_nothing_in_any_size_and_block(monkeypatch):
    """A product's last bit depends on the column and the block, so equal candidates must not be
    told apart by it."""
    for block_bytes in (1, 8 * 300 * 7, 1 << 26):
        monkeypatch.setattr(retrieval, "BLOCK_BYTES", block_bytes)
        for width, number in product((32, 100, 513), (2, 5, 31, 65, 300)):
            draw = torch.Generator().manual_seed(width)
            image, text = (F.normalize(torch.randn(1, width, generator=draw)) for _ in "ab")
            sides = image.expand(number, -1).contiguous(), text.expand(number, -1).contiguous()
            rows = torch.arange(number)
            relevance = Relevance.of(rows, rows, rows, rows)
            for ranks in (
                positive_ranks(*sides, rows),
                retrieval.dual_softmax_ranks(*sides, relevance),
            ):
                assert ranks.eq(number - 1).all(), (block_bytes, width, number)


def test_ranks_follow_neither_the_order_of_rows_nor_rounding(monkeypatch):
    """Every picture comes twice, with another embedding in its last bits, as in another batch: the
    two tie, in whatever order and in blocks of any size."""
    draw = torch.Generator().manual_seed(1)
    base = torch.randn(150, 64, generator=draw).repeat_interleave(2, 0)
    text = F.normalize(base + 0.5 * torch.randn(300, 64, generator=draw), dim=1)
    rows, found = torch.arange(300), {"one": set(), "dual": set(), "nearest": set()}
    for trial in range(6):
        monkeypatch.setattr(retrieval, "BLOCK_BYTES", (1, 8 * 300 * 7, 1 << 26)[trial % 3])
        order = torch.randperm(300, generator=draw) if trial else rows
        noise = 1e-7 * torch.randn(300, 64, generator=draw) / 64**0.5
        image = F.normalize(F.normalize(base, dim=1) + noise, dim=1)
        sides = text[order], image[order], Relevance.of(rows, rows, rows, rows)
        back = order.argsort()
        found["one"].add(tuple(relevant_ranks(*sides)[back].tolist()))
        found["dual"].add(tuple(retrieval.dual_softmax_ranks(*sides)[back].tolist()))
        index, _ = nearest(sides[0], sides[1], 10)  # five pictures, each twice
        pictures = (order[index] // 2)[back][:, ::2]
        found["nearest"].add(tuple(pictures.flatten().tolist()))
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 1)
    ((ranks, *_),) = [tuple(found["one"])]
    assert 1 in ranks and 0 not in ranks  # its twin is before the right picture


def test_a_similarity_beyond_the_tolerance_does_not_tie():
    query, tolerance = torch.eye(2)[:1].double(), retrieval.TOLERANCE
    for apart, rank in ((0.5 * tolerance, 1), (2 * tolerance, 0)):
        candidates = torch.tensor([[0.5, 0.0], [0.5 - apart, 0.0]], dtype=torch.float64)
        assert positive_ranks(query, candidates, torch.tensor([0])).tolist() == [rank]


def test_a_model_of_not_a_number_scores_nothing():
    own = torch.full((20, 4), float("nan"))
    other = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    for queries, candidates in ((own, other), (other, own), (own, own)):
        assert int(positive_ranks(queries, candidates, torch.arange(20)).min()) >= 0
        assert recall_hits(queries, candidates, torch.arange(20)).tolist() == [0.0, 0.0, 0.0]


def test_blocks_leave_no_trace(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK_BYTES", 64 * 8 * 50)  # 64 queries among 50 candidates
    for count in (63, 64, 65, 131):
        own, other = whole_numbers(count, 3, 1, 9), whole_numbers(50, 3, 2, 9)
        target = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(3))
        similarity = own @ other.T  # [b, B]: exact, see whole_numbers
        expected = (similarity >= similarity.gather(1, target[:, None])).sum(1) - 1
        assert positive_ranks(own, other, target).equal(expected), count


def test_no_queries():
    own, target = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    for other in (torch.randn(5, 4), torch.zeros(0, 4)):
        ranks = positive_ranks(own, other, target)
        assert ranks.dtype == torch.int64 and ranks.shape == (0,)
        assert recall_hits(own, other, target).tolist() == [0.0, 0.0, 0.0]


def test_hits_are_counted_per_k():
    assert RECALL_AT == (1, 5, 10)
    # every query ranks the candidates 0, 1, 2, …
    own = torch.arange(20, 0, -1).float().expand(20, 20)
    counted = recall_hits(own, torch.eye(20), torch.arange(20))
    assert counted.dtype == torch.float64 and counted.tolist() == [1.0, 5.0, 10.0]


def test_hits_of_parts_add_up():
    """Replicas count their own rows; the sum is that of all rows."""
    own, other, target = whole_numbers(60, 6, 4, 3), whole_numbers(60, 6, 5, 3), torch.arange(60)
    slices = slice(0, 7), slice(7, 41), slice(41, 60)
    parts = sum(recall_hits(own[rows], other, target[rows]) for rows in slices)
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


def test_the_best_of_several_texts_counts(monkeypatch, subtests):
    """Images with one to five texts, and both directions, in blocks that do not divide."""
    for seed, high in product(range(5), (1, 50)):  # many ties, few ties
        with subtests.test(f"{seed}, {high}"):
            draw = torch.Generator().manual_seed(seed)
            whose = torch.repeat_interleave(
                torch.arange(23), torch.randint(1, 6, (23,), generator=draw)
            )
            whose = whose[torch.randperm(len(whose), generator=draw)]
            image, text = (
                whole_numbers(23, 5, seed, high),
                whole_numbers(len(whose), 5, seed + 100, high),
            )
            monkeypatch.setattr(retrieval, "BLOCK_BYTES", 7 * 8 * len(whose))
            for sides in (
                (image, torch.arange(23), text, whose),
                (text, whose, image, torch.arange(23)),
            ):
                own, own_label, other, other_label = sides
                order = other_label.argsort()
                pairs = equal_labels(own_label, other_label[order])
                assert best_ranks(own, other[order], *pairs).tolist() == best_ranks_one_by_one(
                    *sides
                )


# -- equal values


def relevance_by_hand(own_key, other_key, pairs):
    """Values as the queries and candidates, and the set of those that belong together."""
    right = {(own_key[i], other_key[j]) for i, j in pairs}
    return list(dict.fromkeys(own_key)), list(dict.fromkeys(other_key)), right


def test_any_equal_value_is_right(subtests):
    """An image in several rows, a caption of several images, and both at once: CLIP_benchmark#7,
    openai/CLIP#115. Ranks as counted value by value, and the same however rows are shared out."""
    for seed in range(8):
        with subtests.test(str(seed)):
            draw = torch.Generator().manual_seed(seed)
            own_key, other_key = (torch.randint(0, n, (40,), generator=draw) for n in (15, 18))
            image, text = (
                whole_numbers(15, 4, seed, 4)[own_key],
                whole_numbers(18, 4, seed + 9, 4)[other_key],
            )
            rows = torch.arange(40)
            relevance = Relevance.of(own_key, other_key, rows, rows)
            queries, candidates, right = relevance_by_hand(
                own_key.tolist(), other_key.tolist(), zip(range(40), range(40))
            )
            first = {key: own_key.tolist().index(key) for key in queries}
            of_text = {key: other_key.tolist().index(key) for key in candidates}
            expected, chances = [], []
            for query in queries:
                similarity = {c: float(image[first[query]] @ text[of_text[c]]) for c in candidates}
                best = max(similarity[c] for c in candidates if (query, c) in right)
                wrong = [c for c in candidates if (query, c) not in right]
                expected.append(sum(similarity[c] >= best for c in wrong))
                missed = 1.0
                for drawn in range(10):
                    missed *= max(0, len(wrong) - drawn) / (len(candidates) - drawn)
                chances.append(1 - missed)
            ranks = relevant_ranks(image, text, relevance)
            assert ranks.tolist() == expected
            sums = query_sums(ranks, relevance)
            assert sums[3:6].tolist() == [len(queries), len(right), len(queries) * len(candidates)]
            assert float(sums[6]) == pytest.approx(sum(chances))
            parts = [relevance.asked_by(part) for part in (rows[::2], rows[1::2])]
            shared = sum(query_sums(relevant_ranks(image, text, part), part) for part in parts)
            torch.testing.assert_close(shared, sums)


def test_a_table_with_a_line_per_caption_scores_as_the_same_data_grouped():
    """Five lines an image, one caption of which several images share: a perfect model is right
    everywhere, and a random one scores what it scores on images with five captions each."""
    draw = torch.Generator().manual_seed(0)
    image, text_key = torch.randn(12, 6, generator=draw), torch.arange(60)
    text_key[4::15] = 4  # one caption of four images
    text = torch.randn(60, 6, generator=draw)[text_key]
    whose = torch.arange(12).repeat_interleave(5)
    image_rows, rows = image[whose], torch.arange(60)
    by_line = {
        "image_to_text": (image_rows, text, Relevance.of(whose, text_key, rows, rows)),
        "text_to_image": (text, image_rows, Relevance.of(text_key, whose, rows, rows)),
    }
    alone = torch.arange(12)
    grouped = {
        "image_to_text": (image, text, Relevance.of(alone, text_key, *equal_labels(alone, whose))),
        "text_to_image": (text, image, Relevance.of(text_key, alone, *equal_labels(whose, alone))),
    }
    for direction in by_line:
        one, another = (
            query_figures(direction, query_sums(relevant_ranks(*sides), sides[2]).tolist())
            for sides in (by_line[direction], grouped[direction])
        )
        assert one == another
        assert one[f"{direction}_answers"] > 1
    perfect = torch.nn.functional.one_hot(whose).double()
    ranks = relevant_ranks(perfect, perfect, by_line["image_to_text"][2])
    assert int(ranks.max()) == 0


def test_without_equal_values_nothing_is_said_of_them():
    rows = torch.arange(30)
    relevance = Relevance.of(rows, rows + 5, rows, rows)
    figures = query_figures("a_to_b", query_sums(rows % 3, relevance).tolist())
    assert list(figures) == ["a_to_b_R@1", "a_to_b_R@5", "a_to_b_R@10"]
    assert float(relevance.chance(10)[0]) == pytest.approx(1 / 3)


def test_first_answers_show_a_value_once_and_mark_what_is_right():
    key, rows = torch.tensor([7, 7, 8, 9]), torch.arange(4)
    text_key = torch.tensor([1, 2, 2, 3])
    image = torch.eye(3)[torch.tensor([0, 0, 1, 2])]
    text = torch.tensor([[0.9, 0, 0], [1.0, 0.5, 0], [1.0, 0.5, 0], [0, 0, 1.0]])
    relevance = Relevance.of(key, text_key, rows, rows)
    found = first_answers(image, text, relevance, rows[:2], asked=torch.tensor([1, 3, -1]), k=3)
    assert found[0].tolist()[:2] == [[2.0, 1.0, 1.0], [pytest.approx(1), pytest.approx(0.9), 1.0]]
    assert found[0, 2, [0, 2]].tolist() == [4.0, 0.0]
    assert not found[1:].any()  # row 3 is another rank's, and no row has the number -1


def test_a_query_without_a_match_is_refused():
    with pytest.raises(ValueError, match="query 1 has no match among the 3 candidates"):
        Relevance.of(torch.arange(2), torch.arange(3), torch.tensor([0]), torch.tensor([2]))


def test_median_and_hits_of_ranks():
    ranks = torch.tensor([0, 0, 3, 4, 9, 30])
    assert median_rank(ranks) == 4.5 and median_rank(ranks[:5]) == 4.0
    assert hits(ranks).tolist() == [2.0, 4.0, 5.0]


def test_the_nearest_of_each_query(monkeypatch):
    own, other = whole_numbers(31, 6, 0, 50), whole_numbers(40, 6, 1, 50)
    similarity = own @ other.T
    monkeypatch.setattr(retrieval, "BLOCK_BYTES", 4 * 4 * 40)
    index, value = nearest(own, other, 5)
    assert torch.equal(value, similarity.double().sort(1, descending=True).values[:, :5])
    assert torch.equal(similarity.double().gather(1, index), value)
    # of equal ones the earlier row, and one that is not a number last
    same = torch.tensor([[1.0], [torch.nan], [2.0], [1.0], [1.0]])
    assert nearest(torch.ones(1, 1), same, 5)[0].tolist() == [[2, 0, 3, 4, 1]]
    assert nearest(own, other[:3], 5)[0].shape == (31, 3) and nearest(own[:0], other, 5)[
        0
    ].shape == (0, 5)


def test_ranks_among_the_first_candidates_by_other_scores(subtests):
    """Small whole numbers, so that scores tie; two right candidates for a third of the queries,
    none for another third."""
    for seed in range(5):
        with subtests.test(str(seed)):
            draw = torch.Generator().manual_seed(seed)
            scores, right = (
                torch.randint(0, 4, (60, 7), generator=draw).float(),
                torch.zeros(60, 7, dtype=torch.bool),
            )
            right[:40, 2] = True
            right[:20, 5] = True
            scores[::9, 2], scores[::7, 3] = torch.nan, torch.nan
            ranks = torch.where(torch.arange(60) < 40, torch.arange(60) % 7, 100)
            ranks[1::8] = 7  # the right ones are among the 7 by a broken tie alone
            found = reranked(ranks, scores, right).tolist()
            for i, (own, is_right) in enumerate(zip(scores.tolist(), right.tolist())):
                best = max(
                    (-1.0 if s != s else s for s, r in zip(own, is_right) if r), default=None
                )
                before = sum(
                    not r and not (best is not None and s < best) for s, r in zip(own, is_right)
                )
                is_scored = best is not None and ranks[i] < 7
                assert found[i] == (before if is_scored else ranks[i]), i


def test_dual_softmax_is_a_product_with_the_softmax_over_queries(monkeypatch):
    """As CAMoE has it, in blocks too."""
    draw = torch.Generator().manual_seed(3)
    own, other = (F.normalize(torch.randn(7, 5, generator=draw).double(), dim=1) for _ in "ab")
    rows = torch.arange(7)
    relevance = Relevance.of(rows, rows, rows, rows)
    similarity = own @ other.T
    weighed = similarity * (retrieval.DUAL_SCALE * similarity).softmax(0)
    expected = (weighed >= weighed.diagonal()[:, None]).sum(1) - 1
    for bytes_at_once in (1, 1 << 20):
        monkeypatch.setattr(retrieval, "BLOCK_BYTES", bytes_at_once)
        assert torch.equal(retrieval.dual_softmax_ranks(own, other, relevance), expected)
