"""A deal by cost: everything exactly once, within the bounds, and about as fast as work divided
evenly."""

from itertools import combinations, product

import numpy as np
import pytest

from bench.balance import simulated_s
from data.batching.branch_cost import BranchCost
from data.batching.dealing import (
    BranchWork,
    DealBounds,
    deal_balanced,
    deal_window,
    explain,
    lower_bound_s,
    micro_batch_seconds,
    padded_lengths,
    padding_share,
    predicted_s,
)
from data.modalities.tokenizer import batch_tokens, load_tokenizer

TEXT = BranchCost(fixed_s=1e-3, per_sample_s=2e-5, per_token_s=1e-5, per_token_squared_s=5e-8)
G = 4096


def texts(samples: int = G, seed: int = 0) -> BranchWork:
    tokens = np.clip(
        np.rint(np.random.default_rng(seed).lognormal(2.8, 0.6, samples)), 4, 77
    ).astype(np.int64)
    return BranchWork(padded_lengths(tokens, 77, 8), TEXT)


def exactly(number: int, min_size: int = 1, max_size: int = 1 << 30) -> DealBounds:
    return DealBounds(min_size, max_size, number, number)


def in_order(replicas: int, number: int) -> list[list[np.ndarray]]:
    return [list(line) for line in np.arange(G).reshape(replicas, number, -1)]


def sizes(dealt) -> np.ndarray:
    return np.array([[len(part) for part in line] for line in dealt])


# -- what always holds


@pytest.mark.parametrize("seed", range(40))
def test_every_position_once_equal_counts_within_all_bounds(seed):
    rng = np.random.default_rng(seed)
    samples, replicas = int(rng.integers(40, 600)), int(rng.integers(1, 6))
    min_size = int(rng.integers(1, 6))
    number = int(rng.integers(1, samples // (replicas * min_size) + 1))
    most_padded = 77 * max(2 * min_size, -(-2 * samples // (replicas * number)))
    cost = TEXT if seed % 4 else BranchCost(1e-3, 1e-5)  # then lengths differ in memory alone
    work = BranchWork(texts(samples, seed).lengths, cost, most_padded)
    if rng.random() < 0.7:
        bounds = exactly(
            number, min_size, -(-samples // (replicas * number)) + int(rng.integers(2, 40))
        )
    else:
        bounds = DealBounds(min_size, samples, max_micro_batches=number)
    dealt = deal_balanced(work, replicas, bounds, int(rng.integers(1, 9)))
    assert np.sort(np.concatenate([part for line in dealt for part in line])).tolist() == list(
        range(samples)
    )
    assert all(
        part.dtype == np.int64 and (np.diff(part) > 0).all() for line in dealt for part in line
    )
    assert len(dealt) == replicas and len({len(line) for line in dealt}) == 1
    assert bounds.min_micro_batches <= len(dealt[0]) <= bounds.max_micro_batches
    assert bounds.min_size <= sizes(dealt).min() and sizes(dealt).max() <= bounds.max_size
    assert (
        max(len(part) * work.lengths[part].max() for line in dealt for part in line)
        <= work.most_padded
    )


def test_a_deal_is_found_wherever_the_bounds_leave_one():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(300):
        samples, replicas = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        min_size, number = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        bounds = DealBounds(
            min_size, min_size + int(rng.integers(0, 4)), number, number + int(rng.integers(0, 3))
        )
        work = BranchWork(
            rng.choice([8, 16, 40, 72], samples),
            BranchCost(1e-3, 1e-5, 1e-5),
            int(rng.integers(72, 300)),
        )
        possible = any(
            cuts_within(np.sort(work.lengths), replicas * n, bounds, work.most_padded)
            for n in range(number, bounds.max_micro_batches + 1)
        )
        try:
            deal_balanced(work, replicas, bounds, int(rng.integers(1, 5)))
        except ValueError:
            assert not possible
        else:
            assert possible
        found.append(possible)
    assert 50 < sum(found) < 250


def cuts_within(lengths: np.ndarray, pieces: int, bounds: DealBounds, most_padded: int) -> bool:
    """Whether any way to cut the sorted lengths is within the bounds."""
    for cuts in combinations(range(1, lengths.size), pieces - 1):
        parts = np.split(lengths, cuts)
        if all(
            bounds.min_size <= len(part) <= bounds.max_size and len(part) * part[-1] <= most_padded
            for part in parts
        ):
            return True
    return False


def test_the_same_arguments_give_the_same_deal_and_only_ratios_of_costs_count():
    first = deal_balanced(texts(600), 3, DealBounds(4), 4)
    twice = BranchCost(*(2 * c for c in TEXT.coefficients), version=9)
    for again in (
        deal_balanced(texts(600), 3, DealBounds(4), 4),
        deal_balanced(BranchWork(texts(600).lengths, twice), 3, DealBounds(4), 4),
    ):
        assert [[part.tolist() for part in line] for line in again] == [
            [part.tolist() for part in line] for line in first
        ]


def test_equal_samples_are_dealt_in_the_order_of_their_positions():
    dealt = deal_balanced(BranchWork(np.full(24, 16), TEXT), 2, exactly(3))
    parts = sorted(part.tolist() for line in dealt for part in line)
    assert parts == [list(range(start, start + 4)) for start in range(0, 24, 4)]


def test_the_lower_bound_is_one():
    rng = np.random.default_rng(0)
    for seed in range(30):
        samples, replicas, number, stages = (
            240,
            int(rng.integers(1, 5)),
            int(rng.integers(1, 7)),
            int(rng.integers(1, 9)),
        )
        work = (
            texts(samples, seed)
            if seed % 4 == 0
            else BranchWork(texts(samples, seed).lengths, BranchCost(0.1, 1e-5))
        )
        bound_s = lower_bound_s(work, replicas, number, stages)
        cuts = np.sort(rng.choice(np.arange(1, samples), replicas * number - 1, replace=False))
        parts = np.split(rng.permutation(samples) if seed % 3 else np.argsort(work.lengths), cuts)
        anyhow = [parts[r * number : (r + 1) * number] for r in range(replicas)]
        ours = deal_balanced(work, replicas, exactly(number), stages)
        assert bound_s <= predicted_s(ours, work, stages) * (1 + 1e-12)
        assert bound_s <= predicted_s(anyhow, work, stages) * (1 + 1e-12)


def test_texts_are_rounded_as_the_tokenizer_rounds_them():
    tokenizer = load_tokenizer(None, ["a b c"])
    for multiple in (1, 8):
        found = [
            batch_tokens(tokenizer, ["a " * n], 77, multiple)["input_ids"].shape[1]
            for n in range(100)
        ]
        assert (
            padded_lengths(np.arange(100) + 2, 77, multiple).tolist() == found
        )  # two special tokens


# -- how good it is


def fastest_s(work: BranchWork, replicas: int, bounds: DealBounds, stages: int) -> float:
    """By trying all cuts of the sorted samples, and everyone who could have each piece."""
    order, number = np.argsort(work.lengths, kind="stable"), bounds.min_micro_batches
    shares = [
        who
        for who in product(range(replicas), repeat=replicas * number)
        if all(who.count(r) == number for r in range(replicas))
    ]
    best = float("inf")
    for cuts in combinations(range(1, order.size), replicas * number - 1):
        parts = np.split(order, cuts)
        if not all(bounds.min_size <= len(part) <= bounds.max_size for part in parts):
            continue
        for who in shares:
            best = min(
                best,
                predicted_s(
                    [[p for p, r in zip(parts, who) if r == own] for own in range(replicas)],
                    work,
                    stages,
                ),
            )
    return best


def small_case(
    rng: np.random.Generator, replicas: int, number: int
) -> tuple[BranchWork, DealBounds, int]:
    min_size = int(rng.integers(1, 3))
    samples = int(rng.integers(replicas * number * min_size, 10))
    cost = BranchCost(
        float(rng.choice([0, 1e-3])),
        float(rng.choice([0, 1e-4])),
        1e-5,
        float(rng.choice([0, 1e-7])),
    )
    work = BranchWork(rng.choice([8, 16, 24, 32, 48, 72], samples), cost)
    return work, exactly(number, min_size), int(rng.integers(1, 6))


@pytest.mark.parametrize(
    "replicas, number", [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 1), (4, 1)]
)
def test_nothing_is_faster_where_one_replica_or_one_micro_batch_is_dealt(replicas, number):
    rng = np.random.default_rng([replicas, number])
    for _ in range(12):
        work, bounds, stages = small_case(rng, replicas, number)
        # costs are rounded to a millionth of the largest
        assert (
            predicted_s(deal_balanced(work, replicas, bounds, stages), work, stages)
            <= fastest_s(work, replicas, bounds, stages) * 1.00001
        )


def test_with_several_of_both_the_fastest_is_nearly_found():
    # Which micro-batches make a replica is a partition problem; here, with two samples in each, is
    # where what is tried is farthest off.
    rng = np.random.default_rng(0)
    over = []
    for _ in range(25):
        work, bounds, stages = small_case(rng, 2, 2)
        over.append(
            predicted_s(deal_balanced(work, 2, bounds, stages), work, stages)
            / fastest_s(work, 2, bounds, stages)
            - 1
        )
    assert np.mean(over) < 0.02 and max(over) < 0.15 and np.mean(np.array(over) < 1e-4) > 0.7


def test_deals_that_do_not_cut_the_sorted_samples_are_no_faster():
    rng = np.random.default_rng(1)
    for _ in range(6):
        work = BranchWork(rng.choice([8, 16, 32, 72], 6), TEXT)
        anyhow_s = float("inf")
        for who in product(range(3), repeat=6):
            parts = [np.flatnonzero(np.array(who) == own) for own in range(3)]
            if min(map(len, parts)):
                anyhow_s = min(anyhow_s, predicted_s([parts], work, 3))
        assert predicted_s(deal_balanced(work, 1, exactly(3), 3), work, 3) <= anyhow_s * 1.00001


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_skewed_set_is_within_5_percent_of_the_lower_bound(stages, replicas):
    work = texts()
    dealt = deal_balanced(work, replicas, exactly(32, 4), stages)
    bound_s = lower_bound_s(work, replicas, 32, stages)
    # the instruction lists of a batch_sync step, forward and backward, with the seconds of every
    # micro-batch
    step_s = simulated_s(micro_batch_seconds(dealt, work), stages)
    assert step_s == pytest.approx(predicted_s(dealt, work, stages), rel=1e-9)
    assert step_s <= 1.05 * bound_s
    assert step_s < 0.7 * simulated_s(micro_batch_seconds(in_order(replicas, 32), work), stages)


@pytest.mark.parametrize(
    "work, replicas, number, over", [(texts(), 1, 8, 0.02), (texts(), 8, 4, 0.005)]
)
def test_few_micro_batches_do_where_no_line_waits_for_the_longest(work, replicas, number, over):
    step_s = predicted_s(deal_balanced(work, replicas, exactly(number, 4)), work)
    assert step_s <= (1 + over) * lower_bound_s(work, replicas, number)


def test_more_lengths_than_are_examined_one_by_one():
    work = BranchWork(np.random.default_rng(0).integers(1, 2000, 3000), TEXT)
    dealt = deal_balanced(work, 4, exactly(32), 2)
    assert predicted_s(dealt, work, 2) <= 1.05 * lower_bound_s(work, 4, 32, 2)
    ranges = sorted(
        (work.lengths[part].min(), work.lengths[part].max()) for line in dealt for part in line
    )
    assert all(
        before[1] <= after[0] for before, after in zip(ranges, ranges[1:])
    )  # cut from the sorted samples, as ever


def test_micro_batches_of_one_sample_are_swapped_until_the_replicas_are_even():
    work = BranchWork(np.array([9, 7, 6, 5, 4, 1]), BranchCost(0.0, 0.0, 1.0))
    assert (
        predicted_s(deal_balanced(work, 2, exactly(3, 1, 1)), work) == 16
    )  # of 32; the costliest first to whom has least gives 17


@pytest.mark.parametrize("replicas", [1, 4, 8])
def test_texts_are_padded_by_less_than_5_percent_and_at_random_by_several_times_that(replicas):
    # beyond the rounding to a multiple of 8, which no deal changes
    work = texts()
    assert padding_share(deal_balanced(work, replicas, exactly(32, 4), 4), work.lengths) <= 0.05
    assert padding_share(in_order(replicas, 32), work.lengths) > 0.5


# -- how many, and in which order


def test_a_light_branch_comes_in_few_large_micro_batches_and_a_deep_line_in_many():
    heavy_start = BranchWork(np.full(256, 16), BranchCost(1.0, 1e-3))
    light_start = BranchWork(np.full(256, 16), BranchCost(1e-6, 1e-3))
    assert len(deal_balanced(heavy_start, 2, DealBounds(), 2)[0]) == 1
    assert len(deal_balanced(light_start, 2, DealBounds(), 2)[0]) == 64
    assert (
        len(deal_balanced(heavy_start, 2, DealBounds(max_size=20), 2)[0]) == 7
    )  # as few as the bound lets it
    # fixed_s · M + (S − 1)(fixed_s + work / M) is least at
    # M = √((S − 1) · work / fixed_s) = √(3 · 0.128 / 6e-3) = 8
    assert (
        len(
            deal_balanced(BranchWork(np.full(256, 16), BranchCost(6e-3, 1e-3)), 2, DealBounds(), 4)[
                0
            ]
        )
        == 8
    )


def test_each_replica_has_its_costliest_first_and_those_of_one_number_are_alike():
    work = texts()
    seconds = micro_batch_seconds(deal_balanced(work, 4, exactly(16, 4), 4), work)
    assert (np.diff(seconds, axis=1) <= 1e-9 + 0.01 * seconds[:, 1:]).all()
    assert (np.ptp(seconds, axis=0) < 0.3 * seconds.mean(axis=0)).all()
    assert np.ptp(seconds.sum(axis=1)) < 0.01 * seconds.sum(axis=1).mean()


@pytest.mark.parametrize("schedule, kept", [("batch_sync", 0), ("replay", 0), ("replay", 8)])
def test_costliest_first_is_as_fast_as_other_orders_or_faster(schedule, kept):
    work, rng = texts(), np.random.default_rng(0)
    seconds = micro_batch_seconds(deal_balanced(work, 4, exactly(16), 4), work)
    given = simulated_s(seconds, 4, schedule, kept)
    others = [
        simulated_s(order, 4, schedule, kept)
        for order in (seconds[:, ::-1], *(rng.permutation(seconds, axis=1) for _ in range(5)))
    ]
    if schedule == "batch_sync":  # there the order does not matter at all
        assert others == pytest.approx([given] * 6)
    else:
        assert given < min(others)


# -- what a person reads


def test_explain_shows_every_micro_batch():
    work = texts(64)
    dealt = deal_balanced(work, 2, exactly(3), 2)
    lines = explain(dealt, work, 2).splitlines()
    assert (
        lines[0].startswith("64 samples, 2 replicas × 3 micro-batches, padding")
        and "above what nothing can beat" in lines[0]
    )
    rows = [line.split() for line in lines[2:]]
    assert [row[:2] for row in rows] == [
        [str(r), m] for r in range(2) for m in ("0", "1", "2", "all")
    ]
    assert [int(row[2]) for row in rows if row[1] != "all"] == [
        len(part) for line in dealt for part in line
    ]
    assert rows[0][3] == str(work.lengths[dealt[0][0]].max())
    assert float(rows[3][-1]) == pytest.approx(
        1e3 * micro_batch_seconds(dealt, work)[0].sum(), rel=1e-3
    )


# -- a window of global batches


def test_a_window_has_the_same_samples_in_batches_of_similar_lengths():
    lengths = texts(4 * 128).lengths.reshape(4, 128)
    batches = deal_window(lengths, seed=(0, 7))
    assert np.sort(batches, axis=None).tolist() == list(range(4 * 128))
    ranges = sorted((lengths.flat[batch].min(), lengths.flat[batch].max()) for batch in batches)
    assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:]))
    assert np.array_equal(batches, deal_window(lengths, seed=(0, 7)))
    assert (
        len(
            {
                tuple(np.argsort([lengths.flat[b].mean() for b in deal_window(lengths, (0, w))]))
                for w in range(8)
            }
        )
        > 1
    )  # in no fixed order


def test_a_window_of_one_changes_nothing():
    assert deal_window(texts(64).lengths[None]).tolist() == [list(range(64))]


# -- refusals


def test_refusals():
    work = texts(64)
    with pytest.raises(
        ValueError,
        match="64 samples cannot be dealt to 4 replicas within .*min_size=20.*, which takes 80 to",
    ):
        deal_balanced(work, 4, DealBounds(20))
    with pytest.raises(ValueError, match="which takes 1 to 60; change the bounds"):
        deal_balanced(work, 1, DealBounds(1, 10, 1, 6))
    with pytest.raises(ValueError, match=r"most_padded 100; allow more micro-batches"):
        deal_balanced(
            BranchWork(work.lengths, TEXT, most_padded=100), 1, DealBounds(max_micro_batches=5)
        )
    with pytest.raises(ValueError, match="most_padded 50: the longest sample has"):
        BranchWork(np.array([8, 56]), TEXT, most_padded=50)
    with pytest.raises(ValueError, match="a whole number >= 1 for each sample"):
        BranchWork(np.array([8, 0]), TEXT)
    with pytest.raises(ValueError, match="1 <= min <= max"):
        DealBounds(8, 4)
