"""How the weights of two losses follow them."""

import json
import math

import pytest

from launch.balancing.loss_weights import MODES, MOST, LossWeights

ASKED = {"contrastive": 1.0, "matching": 0.5}


def told(contrastive, matching):
    return {"contrastive_loss": contrastive, "matching_loss": matching}


def after(mode, losses, interval=10, asked=ASKED):
    """The weights of a run whose steps had these losses."""
    weights = LossWeights(mode, asked, interval)
    for step, pair in enumerate(losses, 1):
        weights.after_step(step, told(*pair))
    return weights.weights()


@pytest.mark.parametrize("mode", ["uncertainty", "measured"])
def test_weights_change_at_looks_only_with_a_reason_and_add_up_to_what_was_asked_for(mode):
    weights = LossWeights(mode, ASKED, interval=10)
    before = weights.weights()
    for step in range(1, 31):
        reason = weights.after_step(step, told(4 - 0.1 * step, 0.7 - 0.001 * step))
        assert (reason is not None) == (weights.weights() != before)
        assert (
            reason is None if step % 10 or step == 10 and mode == "measured" else reason is not None
        )  # one look has nothing to compare with
        assert reason is None or (mode in reason and "matching" in reason)
        before = weights.weights()
        assert sum(before.values()) == pytest.approx(1.5)


def test_fixed_weights_are_those_that_were_asked_for():
    assert after("fixed", [(3.0, 0.7)] * 50) == ASKED


def test_uncertainty_gives_each_loss_the_weight_at_which_its_objective_is_least():
    """The gradient of exp(-s) L + s is zero where exp(-s) = 1 / L."""
    found = after("uncertainty", [(2.0, 0.5)] * 2000)
    assert found["matching"] / found["contrastive"] == pytest.approx(0.5 * 2.0 / 0.5, rel=1e-3)


def test_a_loss_that_falls_more_slowly_gets_more():
    slow = after("measured", [(1.0 * 0.99**step, 0.7) for step in range(200)])
    even = after("measured", [(1.0 * 0.99**step, 0.7 * 0.99**step) for step in range(200)])
    assert slow["matching"] / slow["contrastive"] > even["matching"] / even["contrastive"]


def test_matching_waits_for_the_embeddings():
    start, later = (after("measured", [(5.0, 0.7)] * 20 + [(loss, 0.7)] * 20) for loss in (5.0, 1.0))
    assert start["matching"] / start["contrastive"] == pytest.approx(0.5 / MOST) and later["matching"] > 2 * start["matching"]


@pytest.mark.parametrize("mode", ["uncertainty", "measured"])
def test_weights_stay_within_bounds_whatever_the_losses(mode):
    for losses in ([(1e-9, 1e3)] * 500, [(1e3, 1e-9)] * 500, [(0.0, 0.0)] * 50, [(10.0**-step, 1.0) for step in range(200)]):
        found = after(mode, losses, interval=1)
        ratio = found["matching"] / found["contrastive"] / 0.5
        assert MOST**-3 <= ratio <= MOST**2 and all(math.isfinite(weight) for weight in found.values())


def test_losses_that_are_not_finite_do_not_count():
    fine = [(3.0, 0.7)] * 30
    assert after("uncertainty", [(math.nan, 0.7), (3.0, math.inf), *fine], interval=1) == after("uncertainty", fine, interval=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_goes_on_weighs_as_one_that_never_stopped(mode):
    losses = [(4 - 0.05 * step, 0.7 - 0.003 * step) for step in range(47)]
    first = LossWeights(mode, ASKED, 5)
    for step, pair in enumerate(losses[:23], 1):
        first.after_step(step, told(*pair))
    second = LossWeights(mode, ASKED, 5)
    second.go_on_from(json.loads(json.dumps(first.state())))
    for step, pair in enumerate(losses[23:], 24):
        second.after_step(step, told(*pair))
    assert second.weights() == after(mode, losses, 5)


def test_one_loss_has_nothing_to_share():
    weights = LossWeights("fixed", {"contrastive": 1.0}, 5)
    assert weights.after_step(5, {}) is None and weights.weights() == {"contrastive": 1.0}


@pytest.mark.parametrize(("mode", "asked", "interval"), [("fix", ASKED, 5), ("fixed", ASKED, 0), ("fixed", {"contrastive": 0.0}, 5)])
def test_what_cannot_be_is_refused(mode, asked, interval):
    with pytest.raises(ValueError):
        LossWeights(mode, asked, interval)
