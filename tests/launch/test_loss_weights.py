"""How the weights of losses follow them, and the alignment of held-out embeddings."""

import json
import math
from dataclasses import replace

import pytest

from engine.objective import Branch, Objective, Pair
from launch.config.options import parse_options
from launch.loss_weights import KEPT, MODES, MOST, RATE, LossWeights, score
from models.losses import InfoNCE, Matching

ASKED = {"contrastive": 1.0, "matching": 0.5}
PAIRS = {
    "contrastive/image_text": 1.0,
    "contrastive/sound_text": 0.5,
    "contrastive/image_sound": 2.0,
}
BRANCHES = {
    "image_text": ("image", "text"),
    "sound_text": ("sound", "text"),
    "image_sound": ("image", "sound"),
}


def metrics_of(contrastive, matching):
    return {"contrastive_loss": contrastive, "matching_loss": matching}


def after(mode, losses, interval=10, asked=ASKED):
    """The weights of a run whose steps had these losses."""
    weights = LossWeights(mode, asked, interval)
    for step, pair in enumerate(losses, 1):
        weights.after_step(step, metrics_of(*pair))
    return weights.weights()


@pytest.mark.parametrize("mode", ["uncertainty", "measured"])
def test_weights_change_at_updates_only_with_a_reason_and_add_up_to_what_was_asked_for(mode):
    weights = LossWeights(mode, ASKED, interval=10)
    before = weights.weights()
    for step in range(1, 31):
        reason = weights.after_step(step, metrics_of(4 - 0.1 * step, 0.7 - 0.001 * step))
        assert (reason is not None) == (weights.weights() != before)
        assert (
            reason is None if step % 10 or step == 10 and mode == "measured" else reason is not None
        )  # one update has nothing to compare with
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
    start, later = (
        after("measured", [(5.0, 0.7)] * 20 + [(loss, 0.7)] * 20) for loss in (5.0, 1.0)
    )
    assert (
        start["matching"] / start["contrastive"] == pytest.approx(0.5 / MOST)
        and later["matching"] > 2 * start["matching"]
    )


@pytest.mark.parametrize("mode", ["uncertainty", "measured"])
def test_weights_stay_within_bounds_whatever_the_losses(mode):
    for losses in (
        [(1e-9, 1e3)] * 500,
        [(1e3, 1e-9)] * 500,
        [(0.0, 0.0)] * 50,
        [(10.0**-step, 1.0) for step in range(200)],
    ):
        found = after(mode, losses, interval=1)
        ratio = found["matching"] / found["contrastive"] / 0.5
        assert MOST**-3 <= ratio <= MOST**2 and all(
            math.isfinite(weight) for weight in found.values()
        )


def test_losses_that_are_not_finite_do_not_count():
    fine = [(3.0, 0.7)] * 30
    assert after("uncertainty", [(math.nan, 0.7), (3.0, math.inf), *fine], interval=1) == after(
        "uncertainty", fine, interval=1
    )


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "alignment"])
def test_a_run_that_goes_on_weighs_as_one_that_never_stopped(mode):
    losses = [(4 - 0.05 * step, 0.7 - 0.003 * step) for step in range(47)]
    first = LossWeights(mode, ASKED, 5)
    for step, pair in enumerate(losses[:23], 1):
        first.after_step(step, metrics_of(*pair))
    second = LossWeights(mode, ASKED, 5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, pair in enumerate(losses[23:], 24):
        second.after_step(step, metrics_of(*pair))
    assert second.weights() == after(mode, losses, 5)


def test_one_loss_has_nothing_to_share():
    weights = LossWeights("fixed", {"contrastive": 1.0}, 5)
    assert weights.after_step(5, {}) is None and weights.weights() == {"contrastive": 1.0}


# -- several pairs ---------------------------------------------------------------------------------


def of_pairs(*losses):
    return {
        name.replace("contrastive", "contrastive_loss"): loss for name, loss in zip(PAIRS, losses)
    }


def test_losses_and_weights_have_their_names_from_the_objective():
    image, text, sound = map(Branch, ("image", "text", "sound"))
    one = Pair("image", "text", InfoNCE(), matching=Matching())
    options = parse_options(["--fusion", "1", "--matching-weight", "0.5"])
    assert LossWeights.of(options, Objective((image, text), (one,)), ()).weights() == ASKED
    plain = Objective((image, text), (Pair("image", "text", InfoNCE()),))
    assert LossWeights.of(parse_options([]), plain, ()).weights() == {"contrastive": 1.0}
    other = Pair("sound", "text", InfoNCE(), weight=0.25, prefix="sound_text_")
    several = LossWeights.of(options, Objective((image, text, sound), (one, other)), ())
    assert several.weights() == {
        "contrastive/image_text": 1.0,
        "matching/image_text": 0.5,
        "contrastive/sound_text": 0.25,
    }


@pytest.mark.parametrize("mode", ["uncertainty", "measured"])
def test_any_number_of_losses_share_what_was_asked_for(mode):
    weights = LossWeights(mode, PAIRS, 10)
    for step in range(1, 101):
        weights.after_step(step, of_pairs(4.0 * 0.99**step, 4.0, 4.0 * 0.98**step))
    found = weights.weights()
    assert found != PAIRS and sum(found.values()) == pytest.approx(3.5)
    factors = [found[name] / asked for name, asked in PAIRS.items()]
    if mode == "measured":
        assert factors[1] > factors[0] > factors[2], (
            "the more slowly a loss falls, the more it gets"
        )
    else:
        assert factors[2] > factors[0] > factors[1], "the larger a loss stays, the less it gets"


def test_matching_waits_for_the_embeddings_of_its_own_pair():
    asked = {
        "contrastive/image_text": 1.0,
        "matching/image_text": 1.0,
        "contrastive/sound_text": 1.0,
    }
    found = {}
    for falls in ("image_text", "sound_text"):
        weights = LossWeights("measured", asked, 10)
        for step in range(1, 41):
            later = 1.0 if step > 20 else 5.0
            losses = {
                f"contrastive_loss/{pair}": later if pair == falls else 5.0
                for pair in ("image_text", "sound_text")
            }
            weights.after_step(step, losses | {"matching_loss/image_text": 0.7})
        found[falls] = weights.weights()["matching/image_text"]
    assert found["image_text"] > 2 * found["sound_text"]


# -- alignment -------------------------------------------------------------------------------------


def held_out(*scores, sets=("family",)):
    """Figures that make these scores of the pairs, in the order of PAIRS."""
    figures = {}
    for (pair, branches), value in zip(BRANCHES.items(), scores):
        figures |= {
            f"alignment/{pair}": value + 2.5,
            f"uniformity/{branches[0]}/{pair}": -2.0,
            f"uniformity/{branches[1]}/{pair}": -3.0,
        }
    return {name: {"image_to_text_R@1": 0.5, **figures} for name in sets}


def followed(evaluations, asked=PAIRS):
    weights = LossWeights("alignment", asked, 50)
    reasons = [
        weights.after_evaluation(10 * number, held_out(*scores))
        for number, scores in enumerate(evaluations)
    ]
    return weights, reasons


def test_the_score_of_a_pair_is_alignment_plus_the_mean_uniformity_over_all_sets_that_have_it():
    figures = held_out(0.25, 0.5, 1.0)["family"]
    assert [score(pair, {"family": figures}) for pair in BRANCHES] == [0.25, 0.5, 1.0]
    other = {
        key: value - 0.5 if key.startswith("alignment") else value for key, value in figures.items()
    }
    without = {key: value for key, value in figures.items() if "sound" not in key}
    assert score("image_text", {"a": figures, "b": other, "c": without}) == pytest.approx(
        (0.25 - 0.25 + 0.25) / 3
    )
    assert score("sound_text", {"a": figures, "b": other, "c": without}) == pytest.approx(
        (0.5 + 0.0) / 2
    )


def test_the_pair_that_improves_least_gets_more_by_the_documented_formula():
    weights, reasons = followed([(0.0, 0.5, -0.5), (-1.0, 0.2, -1.1), (-2.0, 0.0, -1.5)])
    logarithms = [0.0, 0.0, 0.0]
    for risen in ((-1.0, -0.3, -0.6), (-2.0, -0.5, -1.0)):
        logarithms = [
            KEPT * log + RATE * (own - sum(risen) / 3) for log, own in zip(logarithms, risen)
        ]
    shares = [asked * math.exp(log) for asked, log in zip(PAIRS.values(), logarithms)]
    assert list(weights.weights().values()) == pytest.approx(
        [3.5 * share / sum(shares) for share in shares]
    )
    assert reasons[0] is None, "one evaluation has nothing to compare with"
    assert (
        reasons[1].startswith("loss weights, alignment: contrastive/image_text 1 -> 0.9")
        and "(alignment + uniformity -1)" in reasons[1]
    )
    assert weights.after_step(50, of_pairs(1.0, 2.0, 3.0)) is None, "it does not follow losses"


def test_pairs_that_improve_alike_keep_what_was_asked_for_wherever_they_began():
    weights, reasons = followed([(0.0, 2.0, -1.0), (-0.5, 1.5, -1.5), (-1.0, 1.0, -2.0)])
    assert weights.weights() == pytest.approx(PAIRS)


@pytest.mark.parametrize("scores", [(4.0, -4.0, -4.0), (-4.0, 4.0, -4.0), (-1e9, 0.0, 1e9)])
def test_factors_of_alignment_stay_within_bounds_and_add_up(scores):
    weights, _ = followed([(0.0, 0.0, 0.0), *[scores] * 100])
    factors = [weight / PAIRS[name] for name, weight in weights.weights().items()]
    assert sum(weights.weights().values()) == pytest.approx(3.5)
    assert max(factors) / min(factors) == pytest.approx(MOST**2) and all(
        math.isfinite(factor) for factor in factors
    )


def test_one_evaluation_moves_a_factor_by_a_part_of_what_is_behind():
    weights, _ = followed([(0.0, 0.0, 0.0), (0.3, 0.0, 0.0)])
    found = weights.weights()
    ratio = found["contrastive/image_text"] / found["contrastive/sound_text"] / 2
    assert math.log(ratio) == pytest.approx(RATE * 0.3)


def test_matching_keeps_its_weight_under_alignment():
    weights, _ = followed(
        [(0.0, 0.0, 0.0), (0.0, -1.0, -2.0)], asked=PAIRS | {"matching/image_text": 0.7}
    )
    found = weights.weights()
    assert found["matching/image_text"] == 0.7 and found["contrastive/image_text"] > 1.0
    assert sum(found.values()) == pytest.approx(4.2)


def test_an_evaluation_that_is_not_finite_or_repeated_does_not_count():
    evaluations = [(0.0, 0.5, -0.5), (-1.0, 0.2, -1.1), (-2.0, 0.0, -1.5)]
    weights, _ = followed(evaluations)
    again = LossWeights("alignment", PAIRS, 50)
    for number, scores in enumerate(evaluations):
        assert again.after_evaluation(10 * number, held_out(math.nan, 0.0, 0.0)) is None
        again.after_evaluation(10 * number, held_out(*scores))
        assert again.after_evaluation(10 * number, held_out(*scores)) is None
    assert again.weights() == weights.weights()


def test_a_run_that_goes_on_follows_alignment_as_one_that_never_stopped():
    """Its checkpoint is written before the evaluation of its step; the log tells it of that
    again."""
    evaluations = [(-0.1 * number, -0.3 * number, 0.2 * number**0.5) for number in range(12)]
    whole, _ = followed(evaluations)
    first, _ = followed(evaluations[:5])
    second = LossWeights("alignment", PAIRS, 50)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.weights() == first.weights()
    for number, scores in list(enumerate(evaluations))[4:]:
        second.after_evaluation(10 * number, json.loads(json.dumps(held_out(*scores))))
    assert second.weights() == whole.weights() and second.state_dict() == whole.state_dict()


def test_the_state_of_an_earlier_version_is_taken():
    weights = LossWeights("measured", ASKED, 5)
    known = {
        "logarithms": {"contrastive": 0.1, "matching": -0.1},
        "smoothed": {"contrastive": 3.0, "matching": 0.6},
    }
    weights.load_state_dict(
        {**known, "before": known["smoothed"], "first": {"contrastive": 4.0, "matching": 0.7}}
    )
    factors = [math.exp(0.1), math.exp(-0.1) * 0.25]
    total = 1.5 / (factors[0] + 0.5 * factors[1])
    assert list(weights.weights().values()) == pytest.approx(
        [factors[0] * total, 0.5 * factors[1] * total]
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"contrastive": 1.0}, "; give fixed, or"), (ASKED, "beside matching, of which no alignment")],
)
def test_alignment_needs_two_pairs(asked, words):
    with pytest.raises(ValueError, match=f"need two pairs, and this run has one.*{words}"):
        LossWeights("alignment", asked, 5)


def test_alignment_needs_held_out_samples_of_every_pair():
    weights = LossWeights("alignment", PAIRS, 5)
    with pytest.raises(ValueError, match="nothing was measured of the pair image_sound"):
        weights.after_evaluation(0, held_out(0.1, 0.2))
    options = replace(parse_options([]), loss_weights="alignment")
    pairs = (
        Pair("image", "text", InfoNCE()),
        Pair("sound", "text", InfoNCE(), prefix="sound_text_"),
    )
    objective = Objective(tuple(map(Branch, ("image", "text", "sound"))), pairs)
    with pytest.raises(
        ValueError, match="--loss-weights alignment goes by held-out samples, and none are held out"
    ):
        LossWeights.of(options, objective, ())
    assert LossWeights.of(options, objective, ["family"]).weights() == {
        "contrastive/image_text": 1.0,
        "contrastive/sound_text": 1.0,
    }
