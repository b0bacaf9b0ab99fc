"""Texts packed by cost: everything exactly once, within the bounds, and about as fast as work
divided evenly."""

from itertools import combinations, product

import numpy as np
import pytest

from data.batching.branch_cost import BranchCost
from data.batching.packing import (
    Bounds,
    explain,
    lower_bound_s,
    micro_batch_seconds,
    pack,
    padded_lengths,
    padding_share,
    predicted_s,
)
from data.modalities.tokenizer import batch_tokens, train_tokenizer

TEXT = BranchCost(fixed_s=1e-3, per_sample_s=2e-5, per_token_s=1e-5, per_token_squared_s=5e-8)
G = 4096


def texts(samples: int = G, seed: int = 0) -> np.ndarray:
    """Lengths as captions from the web have them."""
    tokens = np.rint(np.random.default_rng(seed).lognormal(2.8, 0.6, samples)).clip(4, 77)
    return padded_lengths(tokens, 77, 8)


def in_order(replicas: int, number: int) -> list[list[np.ndarray]]:
    return [list(line) for line in np.arange(G).reshape(replicas, number, -1)]


def as_lists(packing):
    return [[part.tolist() for part in line] for line in packing]


# -- what always holds


def test_every_position_once_equal_counts_within_all_bounds():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        samples, replicas = int(rng.integers(40, 600)), int(rng.integers(1, 6))
        min_size = int(rng.integers(1, 6))
        most = int(rng.integers(1, samples // (replicas * min_size) + 1))
        numbers = range(most if rng.random() < 0.7 else 1, most + 1)
        bounds = Bounds(
            min_size=min_size,
            max_size=-(-samples // (replicas * most)) + int(rng.integers(2, 40)),
            max_tokens=77 * max(2 * min_size, -(-2 * samples // (replicas * most))),
        )
        # in every fourth case lengths differ in memory alone
        cost, lengths = TEXT if seed % 4 else BranchCost(1e-3, 1e-5), texts(samples, seed)
        packing = pack(lengths, cost, replicas, numbers, int(rng.integers(1, 9)), bounds)
        parts = [part for line in packing for part in line]
        assert np.sort(np.concatenate(parts)).tolist() == list(range(samples))
        assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
        assert len(packing) == replicas and {len(line) for line in packing} <= set(numbers)
        assert len({len(line) for line in packing}) == 1
        assert bounds.min_size <= min(map(len, parts)) and max(map(len, parts)) <= bounds.max_size
        assert max(len(part) * lengths[part].max() for part in parts) <= bounds.max_tokens


def test_a_packing_is_found_wherever_the_bounds_leave_one():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(300):
        samples, replicas = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        min_size, number = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        numbers = range(number, number + int(rng.integers(1, 4)))
        most = min_size + int(rng.integers(0, 4))
        bounds = Bounds(min_size, most, int(rng.integers(72, 300)))
        lengths = rng.choice([8, 16, 40, 72], samples)
        possible = any(cuts_within(np.sort(lengths), replicas * n, bounds) for n in numbers)
        try:
            pack(lengths, TEXT, replicas, numbers, int(rng.integers(1, 5)), bounds)
        except ValueError:
            assert not possible
        else:
            assert possible
        found.append(possible)
    assert 50 < sum(found) < 250


def cuts_within(lengths: np.ndarray, pieces: int, bounds: Bounds) -> bool:
    """Whether any way to cut the sorted lengths is within the bounds."""
    return any(
        all(
            bounds.min_size <= len(part) <= bounds.max_size
            and len(part) * part[-1] <= bounds.max_tokens
            for part in np.split(lengths, cuts)
        )
        for cuts in combinations(range(1, lengths.size), pieces - 1)
    )


def test_the_same_arguments_give_the_same_packing_and_only_ratios_of_costs_count():
    first = as_lists(pack(texts(600), TEXT, 3, range(1, 20), 4, Bounds(4)))
    twice = BranchCost(*(2 * c for c in TEXT.coefficients), version=9)
    for cost in (TEXT, twice):
        assert as_lists(pack(texts(600), cost, 3, range(1, 20), 4, Bounds(4))) == first


def test_equal_texts_are_packed_in_the_order_of_their_positions():
    packing = pack(np.full(24, 16), TEXT, 2, [3])
    parts = sorted(part.tolist() for line in packing for part in line)
    assert parts == [list(range(start, start + 4)) for start in range(0, 24, 4)]


def test_each_replica_has_its_costliest_first_and_those_of_one_number_are_alike():
    seconds = micro_batch_seconds(pack(texts(), TEXT, 4, [16], 4, Bounds(4)), texts(), TEXT)
    assert (np.diff(seconds, axis=1) <= 1e-9 + 0.01 * seconds[:, 1:]).all()
    assert (np.ptp(seconds, axis=0) < 0.3 * seconds.mean(axis=0)).all()
    assert np.ptp(seconds.sum(axis=1)) < 0.01 * seconds.sum(axis=1).mean()


def test_texts_are_rounded_as_the_tokenizer_rounds_them():
    tokenizer = train_tokenizer(["a b c"])
    for multiple in (1, 8):
        found = [
            batch_tokens(tokenizer, ["a " * n], 77, multiple)[0]["input_ids"].shape[1]
            for n in range(100)
        ]
        # two special tokens
        assert padded_lengths(np.arange(100) + 2, 77, multiple).tolist() == found


# -- how good it is


def test_predicted_seconds_are_those_of_a_line_of_stages():
    rng = np.random.default_rng(0)
    for stages in (1, 2, 5):
        lengths = texts(200)
        packing = pack(lengths, TEXT, 3, [7], stages)
        passes = []
        for seconds in micro_batch_seconds(packing, lengths, TEXT):
            done = np.zeros(stages)  # when each stage has computed its last micro-batch
            for own in rng.permutation(seconds):  # in any order
                for stage in range(stages):
                    done[stage] = max(done[stage], done[stage - 1] if stage else 0.0) + own
            passes.append(done[-1])
        assert predicted_s(packing, lengths, TEXT, stages) == pytest.approx(max(passes))


def test_the_lower_bound_is_one():
    rng = np.random.default_rng(0)
    for seed in range(30):
        replicas, number, stages = (int(rng.integers(1, most)) for most in (5, 7, 9))
        lengths, cost = texts(240, seed), BranchCost(0.1, 1e-5) if seed % 4 else TEXT
        bound_s = lower_bound_s(lengths, cost, replicas, number, stages) / (1 + 1e-12)
        cuts = np.sort(rng.choice(np.arange(1, 240), replicas * number - 1, replace=False))
        parts = np.split(rng.permutation(240), cuts)
        anyhow = [parts[r * number : (r + 1) * number] for r in range(replicas)]
        for packing in (anyhow, pack(lengths, cost, replicas, [number], stages)):
            assert bound_s <= predicted_s(packing, lengths, cost, stages)


@pytest.mark.parametrize(("replicas", "number"), [(1, 2), (1, 4), (3, 1), (2, 2)])
def test_packings_of_few_texts_are_near_the_fastest(replicas, number):
    """The fastest by trying all ways to share out the texts, sorted or not."""
    rng, over = np.random.default_rng([replicas, number]), []
    for _ in range(20):
        lengths = rng.choice([8, 16, 24, 32, 48, 72], 6)
        cost = BranchCost(*rng.choice([[0, 1e-4], [1e-3, 0]]), 1e-5, float(rng.choice([0, 1e-7])))
        stages = int(rng.choice([1, 1, 2, 3, 5]))
        ours_s = predicted_s(pack(lengths, cost, replicas, [number], stages), lengths, cost, stages)
        over.append(ours_s / fastest_s(lengths, cost, replicas, number, stages) - 1)
        # a sum of costs is least where pieces end with a length
        if replicas == stages == 1 and len(set(lengths)) >= number:
            assert over[-1] < 1e-4
    assert np.mean(over) < 0.05 and max(over) < 0.25 and min(over) > -1e-9


def fastest_s(lengths, cost, replicas, number, stages) -> float:
    best = float("inf")
    for who in product(range(replicas * number), repeat=len(lengths)):
        parts = [np.flatnonzero(np.array(who) == own) for own in range(replicas * number)]
        if who[0] == 0 and min(map(len, parts)):
            anyhow = [parts[r * number : (r + 1) * number] for r in range(replicas)]
            best = min(best, predicted_s(anyhow, lengths, cost, stages))
    return best


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2, 8])
def test_a_skewed_set_is_within_5_percent_of_the_lower_bound(stages, replicas):
    lengths = texts()
    packing = pack(lengths, TEXT, replicas, [32], stages, Bounds(4))
    step_s = predicted_s(packing, lengths, TEXT, stages)
    assert step_s <= 1.05 * lower_bound_s(lengths, TEXT, replicas, 32, stages)
    assert step_s < 0.7 * predicted_s(in_order(replicas, 32), lengths, TEXT, stages)
    # beyond the rounding to a multiple of 8, which no packing changes
    assert padding_share(packing, lengths) <= 0.05
    assert padding_share(in_order(replicas, 32), lengths) > 0.5


def test_few_micro_batches_are_cut_where_a_length_ends():
    """An even cost of all micro-batches alone would pad several percent of the tokens here."""
    for replicas, number in ((1, 8), (4, 8), (8, 4)):
        packing = pack(texts(), TEXT, replicas, [number])
        assert padding_share(packing, texts()) < (0.05 if replicas == 1 else 0.01)
        bound_s = lower_bound_s(texts(), TEXT, replicas, number)
        assert predicted_s(packing, texts(), TEXT) <= 1.06 * bound_s


def test_many_different_lengths():
    lengths = np.random.default_rng(0).integers(1, 2000, 3000)
    packing = pack(lengths, TEXT, 4, [32], 2)
    bound_s = lower_bound_s(lengths, TEXT, 4, 32, 2)
    assert predicted_s(packing, lengths, TEXT, 2) <= 1.05 * bound_s


def test_a_light_branch_comes_in_few_large_micro_batches_and_a_deep_line_in_many():
    lengths, numbers = np.full(256, 16), range(1, 65)

    def number(fixed_s: float, stages: int = 2, bounds: Bounds = Bounds()) -> int:
        return len(pack(lengths, BranchCost(fixed_s, 1e-3), 2, numbers, stages, bounds)[0])

    assert number(1.0) == 1 and number(1e-6) == 64
    assert number(1.0, bounds=Bounds(max_size=20)) == 7  # as few as the bound lets it
    # fixed_s · M + (S − 1)(fixed_s + work / M) is least at
    # M = √((S − 1) · work / fixed_s) = √(3 · 0.128 / 6e-3) = 8
    assert number(6e-3, stages=4) == 8


# -- what a person reads


def test_explain_shows_every_micro_batch():
    lengths = texts(64)
    packing = pack(lengths, TEXT, 2, [3], 2)
    lines = explain(packing, lengths, TEXT, 2).splitlines()
    assert lines[0].startswith("64 samples, 2 replicas × 3 micro-batches, padding")
    rows = [line.split() for line in lines[2:]]
    which = [[str(r), m] for r in range(2) for m in ("0", "1", "2", "all")]
    assert [row[:2] for row in rows] == which
    sizes = [len(part) for line in packing for part in line]
    assert [int(row[2]) for row in rows if row[1] != "all"] == sizes
    assert rows[0][3] == str(lengths[packing[0][0]].max())
    seconds = micro_batch_seconds(packing, lengths, TEXT)
    assert float(rows[3][-1]) == pytest.approx(1e3 * seconds[0].sum(), rel=1e-3)


def test_refusals():
    for numbers, bounds in (
        ([4], Bounds(20)),
        (range(1, 7), Bounds(max_size=10)),
        (range(1, 6), Bounds(max_tokens=100)),
    ):
        with pytest.raises(ValueError, match="64 texts cannot be packed for 1 replicas into"):
            pack(texts(64), TEXT, 1, numbers, 1, bounds)
    with pytest.raises(ValueError, match="1 <= min_size <= max_size"):
        Bounds(8, 4)
