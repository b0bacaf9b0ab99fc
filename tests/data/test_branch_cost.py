"""What a micro-batch costs, learned from measured seconds."""

import numpy as np
import pytest

from data.batching.branch_cost import BranchCost, fit_branch_cost, smoothed

TRUE = BranchCost(fixed_s=2e-3, per_sample_s=3e-5, per_token_s=1e-5, per_token_squared_s=4e-8)


def measured(noise: float, number: int = 200):
    rng = np.random.default_rng(0)
    sizes, lengths = rng.integers(4, 200, number), 8 * rng.integers(1, 11, number)
    return sizes, lengths, TRUE.at(sizes, lengths) * np.exp(noise * rng.standard_normal(number))


def test_seconds_are_the_documented_formula():
    assert TRUE.at(10, 16) == pytest.approx(2e-3 + 10 * (3e-5 + 1e-5 * 16 + 4e-8 * 16**2))
    assert TRUE.of_sample(np.array([8, 16])) == pytest.approx(
        [3e-5 + 8e-5 + 4e-8 * 64, 3e-5 + 16e-5 + 4e-8 * 256]
    )


def test_exact_points_give_the_exact_cost():
    found = fit_branch_cost(*measured(0.0))
    assert found.coefficients == pytest.approx(TRUE.coefficients, rel=1e-5)


def test_steps_that_took_four_times_as_long_hardly_matter():
    sizes, lengths, seconds = measured(0.05)
    seconds[::10] *= 4  # every tenth: another job ran
    found = fit_branch_cost(sizes, lengths, seconds)
    # a plain mean would be 30 % off; half of these outliers' pull on Huber's loss is what is left
    # of it
    assert np.abs(found.at(sizes, lengths) / TRUE.at(sizes, lengths) - 1).max() < 0.08


def test_coefficients_are_never_negative():
    # a straight line through these starts below 0
    found = fit_branch_cost([8, 16, 32], [64, 64, 64], [1.0, 1.9, 3.9])
    assert min(found.coefficients) >= 0
    assert found.at(np.array([8, 16, 32]), 64) == pytest.approx([1.0, 1.9, 3.9], rel=0.03)


def test_what_the_points_cannot_tell_apart_is_given_to_the_samples():
    one_length = fit_branch_cost([8, 16, 32], [64, 64, 64], [1.0, 2.0, 4.0])
    assert one_length.coefficients == pytest.approx((0, 0.125, 0, 0))
    one_size = fit_branch_cost([8, 8, 8], [8, 16, 32], [2.0, 3.0, 5.0])
    assert one_size.coefficients == pytest.approx((0, 0.125, 1 / 64, 0))
    whatever_the_size = fit_branch_cost([8, 16, 32], [64, 64, 64], [1.0, 1.0, 1.0])
    assert whatever_the_size.coefficients == pytest.approx((1, 0, 0, 0))


def test_smoothing_moves_every_prediction_by_the_weight_and_counts():
    new = BranchCost(4e-3, 5e-5, 3e-5, 0.0)
    mixed = smoothed(TRUE, new, weight=0.25)
    assert mixed.at(7, 24) == pytest.approx(0.75 * TRUE.at(7, 24) + 0.25 * new.at(7, 24))
    assert mixed.version == 1 and smoothed(mixed, new, 0.3).version == 2
    assert smoothed(TRUE, new, weight=1.0).coefficients == new.coefficients


def test_refusals():
    with pytest.raises(ValueError, match="finite numbers >= 0"):
        BranchCost(1.0, -1e-9)
    with pytest.raises(ValueError, match="not all of them 0"):
        BranchCost(0.0, 0.0)
