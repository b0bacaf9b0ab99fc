"""How the weights of losses follow them, and the alignment of held-out embeddings."""

import json
import math
from dataclasses import replace

import pytest

from engine.objective import Branch, Objective, Pair
from launch.config.options import parse_options
from launch.loss_weights import KEPT, MOST, RATE, LossWeights, score
from models.losses import InfoNCE, Matching

ASKED = {"contrastive": 1.0, "matching": 0.5}
BRANCHES = {
    "image_text": ("image", "text"),
    "sound_text": ("sound", "text"),
    "image_sound": ("image", "sound"),
}
PAIRS = dict(zip((f"contrastive/{pair}" for pair in BRANCHES), (1.0, 0.5, 2.0)))
MODES = ("uncertainty", "measured")  # which follow the losses


def metrics_of(*losses, names=ASKED):
    """The metrics of a step with these losses."""
    named = (
        f"{first}_loss{slash}{rest}" for first, slash, rest in (n.partition("/") for n in names)
    )
    return dict(zip(named, losses))


def after(mode, losses, interval=10, asked=ASKED):
    """The weights of a run whose steps had these losses."""
    weights = LossWeights(mode, asked, interval)
    for step, each in enumerate(losses, 1):
        weights.after_step(step, metrics_of(*each, names=asked))
    return weights.weights()


def ratio(weights, first="matching", second="contrastive"):
    return weights[first] / weights[second]


def test_weights_change_at_updates_only_with_a_reason_and_add_up_to_what_was_asked_for():
    for mode in MODES:
        weights = LossWeights(mode, ASKED, interval=10)
        before = weights.weights()
        for step in range(1, 31):
            reason = weights.after_step(step, metrics_of(4 - 0.1 * step, 0.7 - 0.001 * step))
            # one update has nothing to compare with
            compared = step % 10 == 0 and not (step == 10 and mode == "measured")
            assert (reason is not None) == (weights.weights() != before) == compared, (mode, step)
            assert reason is None or (mode in reason and "matching" in reason)
            before = weights.weights()
            assert sum(before.values()) == pytest.approx(1.5)
    assert after("fixed", [(3.0, 0.7)] * 50) == ASKED
    alone = LossWeights("fixed", {"contrastive": 1.0}, 5)
    assert alone.after_step(5, {}) is None and alone.weights() == {"contrastive": 1.0}


def test_uncertainty_gives_each_loss_the_weight_at_which_its_objective_is_least():
    """The gradient of exp(-s) L + s is zero where exp(-s) = 1 / L."""
    found = ratio(after("uncertainty", [(2.0, 0.5)] * 2000))
    assert found == pytest.approx(0.5 * 2.0 / 0.5, rel=1e-3)


def test_a_loss_that_falls_more_slowly_gets_more():
    slow = after("measured", [(1.0 * 0.99**step, 0.7) for step in range(200)])
    even = after("measured", [(1.0 * 0.99**step, 0.7 * 0.99**step) for step in range(200)])
    assert ratio(slow) > ratio(even)


def test_matching_waits_for_the_embeddings():
    first = [(5.0, 0.7)] * 20
    start, later = (after("measured", first + [(loss, 0.7)] * 20) for loss in (5.0, 1.0))
    assert ratio(start) == pytest.approx(0.5 / MOST) and later["matching"] > 2 * start["matching"]
    # of its own pair
    asked = dict.fromkeys(["contrastive/a_b", "matching/a_b", "contrastive/c_b"], 1.0)
    own, other = (
        after("measured", [(5.0, 0.7, 5.0)] * 20 + [losses] * 20, asked=asked)["matching/a_b"]
        for losses in ((1.0, 0.7, 5.0), (5.0, 0.7, 1.0))
    )
    assert own > 2 * other


def test_weights_stay_within_bounds_whatever_the_losses():
    falling = [(10.0**-step, 1.0) for step in range(200)]
    for mode in MODES:
        for losses in ([(1e-9, 1e3)] * 500, [(1e3, 1e-9)] * 500, [(0.0, 0.0)] * 50, falling):
            found = after(mode, losses, interval=1)
            assert MOST**-3 <= ratio(found) / 0.5 <= MOST**2, (mode, losses[0])
            assert all(math.isfinite(weight) for weight in found.values())


def test_losses_that_are_not_finite_do_not_count():
    fine = [(3.0, 0.7)] * 30
    found = after("uncertainty", [(math.nan, 0.7), (3.0, math.inf), *fine], interval=1)
    assert found == after("uncertainty", fine, interval=1)


def test_a_run_that_goes_on_weighs_as_one_that_never_stopped():
    losses = [(4 - 0.05 * step, 0.7 - 0.003 * step) for step in range(47)]
    for mode in ("fixed", *MODES):
        first, second = (LossWeights(mode, ASKED, 5) for _ in range(2))
        for step, pair in enumerate(losses, 1):
            if step == 24:
                second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            (first if step < 24 else second).after_step(step, metrics_of(*pair))
        assert second.weights() == after(mode, losses, 5), mode


# -- several pairs ---------------------------------------------------------------------------------


def test_losses_and_weights_have_their_names_from_the_objective():
    image, text, sound = map(Branch, ("image", "text", "sound"))
    one = Pair("image", "text", InfoNCE(), matching=Matching())
    options = parse_options(["--fusion", "1", "--matching-weight", "0.5"])
    assert LossWeights.of(options, Objective((image, text), (one,)), ()).weights() == ASKED
    plain = Objective((image, text), (Pair("image", "text", InfoNCE()),))
    assert LossWeights.of(parse_options([]), plain, ()).weights() == {"contrastive": 1.0}
    other = Pair("sound", "text", InfoNCE(), weight=0.25, prefix="sound_text_")
    several = LossWeights.of(options, Objective((image, text, sound), (one, other)), ())
    expected = {"contrastive/image_text": 1.0, "matching/image_text": 0.5}
    assert several.weights() == expected | {"contrastive/sound_text": 0.25}


def test_any_number_of_losses_share_what_was_asked_for():
    losses = [(4.0 * 0.99**step, 4.0, 4.0 * 0.98**step) for step in range(1, 101)]
    for mode in MODES:
        found = after(mode, losses, asked=PAIRS)
        assert found != PAIRS and sum(found.values()) == pytest.approx(3.5)
        factors = [found[name] / asked for name, asked in PAIRS.items()]
        # the more slowly a loss falls, the more it gets; the larger a loss stays, the less it gets
        order = (1, 0, 2) if mode == "measured" else (2, 0, 1)
        assert sorted(range(3), key=lambda i: -factors[i]) == list(order), mode


# -- alignment -------------------------------------------------------------------------------------


def held_out(*scores):
    """Figures that make these scores of the pairs, in the order of PAIRS."""
    figures = {"image_to_text_R@1": 0.5}
    for (pair, branches), value in zip(BRANCHES.items(), scores):
        figures[f"alignment/{pair}"] = value + 2.5
        figures |= {f"uniformity/{b}/{pair}": v for b, v in zip(branches, (-2.0, -3.0))}
    return {"family": figures}


def followed(evaluations, asked=PAIRS):
    weights = LossWeights("alignment", asked, 50)
    reasons = [
        weights.after_evaluation(10 * number, held_out(*scores))
        for number, scores in enumerate(evaluations)
    ]
    return weights, reasons


THREE = [(0.0, 0.5, -0.5), (-1.0, 0.2, -1.1), (-2.0, 0.0, -1.5)]


def test_the_score_of_a_pair_is_alignment_plus_the_mean_uniformity_over_all_sets_that_have_it():
    figures = held_out(0.25, 0.5, 1.0)["family"]
    assert [score(pair, {"family": figures}) for pair in BRANCHES] == [0.25, 0.5, 1.0]
    lower = held_out(-0.25, 0.0, 0.5)["family"]
    without = {key: value for key, value in figures.items() if "sound" not in key}
    sets = {"a": figures, "b": lower, "c": without}
    assert score("image_text", sets) == pytest.approx((0.25 - 0.25 + 0.25) / 3)
    assert score("sound_text", sets) == pytest.approx((0.5 + 0.0) / 2)


def test_the_pair_that_improves_least_gets_more_by_the_documented_formula():
    weights, reasons = followed(THREE)
    logarithms = [0.0, 0.0, 0.0]
    for risen in ((-1.0, -0.3, -0.6), (-2.0, -0.5, -1.0)):
        mean = sum(risen) / 3
        logarithms = [KEPT * log + RATE * (r - mean) for log, r in zip(logarithms, risen)]
    shares = [asked * math.exp(log) for asked, log in zip(PAIRS.values(), logarithms)]
    expected = [3.5 * share / sum(shares) for share in shares]
    assert list(weights.weights().values()) == pytest.approx(expected)
    assert reasons[0] is None, "one evaluation has nothing to compare with"
    assert reasons[1].startswith("loss weights, alignment: contrastive/image_text 1 -> 0.9")
    assert "(alignment + uniformity -1)" in reasons[1]
    losses = metrics_of(1.0, 2.0, 3.0, names=PAIRS)
    assert weights.after_step(50, losses) is None, "it does not follow losses"


def test_pairs_that_improve_alike_keep_what_was_asked_for_wherever_they_began():
    weights, _ = followed([(0.0, 2.0, -1.0), (-0.5, 1.5, -1.5), (-1.0, 1.0, -2.0)])
    assert weights.weights() == pytest.approx(PAIRS)


def test_factors_of_alignment_stay_within_bounds_and_add_up():
    for scores in ((4.0, -4.0, -4.0), (-4.0, 4.0, -4.0), (-1e9, 0.0, 1e9)):
        found = followed([(0.0, 0.0, 0.0), *[scores] * 100])[0].weights()
        factors = [weight / PAIRS[name] for name, weight in found.items()]
        assert sum(found.values()) == pytest.approx(3.5)
        assert max(factors) / min(factors) == pytest.approx(MOST**2), scores


def test_matching_keeps_its_weight_under_alignment():
    asked = PAIRS | {"matching/image_text": 0.7}
    found = followed([(0.0, 0.0, 0.0), (0.0, -1.0, -2.0)], asked)[0].weights()
    assert found["matching/image_text"] == 0.7 and found["contrastive/image_text"] > 1.0
    assert sum(found.values()) == pytest.approx(4.2)


def test_an_evaluation_that_is_not_finite_or_repeated_does_not_count():
    again = LossWeights("alignment", PAIRS, 50)
    for number, scores in enumerate(THREE):
        assert again.after_evaluation(10 * number, held_out(math.nan, 0.0, 0.0)) is None
        again.after_evaluation(10 * number, held_out(*scores))
        assert again.after_evaluation(10 * number, held_out(*scores)) is None
    assert again.weights() == followed(THREE)[0].weights()


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


def test_alignment_needs_two_pairs_and_held_out_samples_of_each():
    for asked, words in (
        ({"contrastive": 1.0}, "; give fixed, or"),
        (ASKED, "beside matching, of"),
    ):
        with pytest.raises(ValueError, match=f"need two pairs, and this run has one.*{words}"):
            LossWeights("alignment", asked, 5)
    weights = LossWeights("alignment", PAIRS, 5)
    with pytest.raises(ValueError, match="nothing was measured of the pair image_sound"):
        weights.after_evaluation(0, held_out(0.1, 0.2))
    options = replace(parse_options([]), loss_weights="alignment")
    other = Pair("sound", "text", InfoNCE(), prefix="sound_text_")
    branches = tuple(map(Branch, ("image", "text", "sound")))
    objective = Objective(branches, (Pair("image", "text", InfoNCE()), other))
    with pytest.raises(ValueError, match="goes by held-out samples, and none are held out"):
        LossWeights.of(options, objective, ())
    expected = {"contrastive/image_text": 1.0, "contrastive/sound_text": 1.0}
    assert LossWeights.of(options, objective, ["family"]).weights() == expected
