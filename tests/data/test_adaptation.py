"""Weights of data sets that follow how their losses fall: slow, bounded, and the same after a
resume as without one."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from data.batching.adaptation import KEPT, MOST, Adaptation, Trends, after_step, moved
from data.batching.sampler import GlobalOrder
from data.batching.settings import Setting, Settings

PARTS = ((60, 1.0), (30, 1.0), (10, 2.0))
ORDER = GlobalOrder(100, 10, seed=4, parts=PARTS)
STEPS = ORDER.steps_per_epoch


def adaptation(rate=0.5, floors=None):
    return Adaptation(("a", "b", "c"), PARTS, rate, floors)


def after_epochs(trends, epochs, rates=(0.05, 0.01, 0.2), adaptation=adaptation()):
    """After each epoch, in which the losses fell by these rates: two steps, of which the second has
    twice the samples."""
    for epoch in epochs:
        mean = [3 * (1 - rate) ** epoch for rate in rates]
        trends = after_step(trends, [1.2 * loss for loss in mean], [20, 10, 4])
        trends = adaptation.after_epoch(
            after_step(trends, [0.9 * loss for loss in mean], [40, 20, 8])
        )
        yield trends


def last(epochs, **more):
    *_, trends = after_epochs(Trends.start(3), range(epochs), **more)
    return trends


def mixes_of(trends, adaptation=adaptation()):
    """Each from the epoch after the next on."""
    return tuple((epoch + 2, adaptation.mix(found)) for epoch, found in enumerate(trends))


def counts(epoch, mixes=()):
    visits = np.concatenate(
        [ORDER.batch(step, mixes) for step in range(epoch * STEPS, (epoch + 1) * STEPS)]
    )
    return np.bincount(visits, minlength=ORDER.num_samples)


def test_the_documented_formula():
    found = moved((1.0, 1.2), ((30, 1.0), (10, 1.0)), (2.0, 4.0), (1.0, 4.0), rate=0.5)
    shares, trend = np.array([30, 12]) / 42, np.log([0.5, 1.0])
    assert np.log(found) == pytest.approx(
        KEPT * np.log([1.0, 1.2]) + 0.5 * (trend - shares @ trend)
    )


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples():
    trends = last(2)
    assert trends.losses == pytest.approx(
        [3 * 0.95, 3 * 0.99, 3 * 0.8]
    ) and trends.before == pytest.approx([3, 3, 3])
    assert trends.samples == (0, 0, 0) and trends.sums == (0, 0, 0)  # the next one has not begun


def test_a_step_without_a_finite_loss_does_not_count():
    trends = after_step(Trends.start(3), [2.0, math.nan, math.inf], [5, 0, 3])
    assert trends.sums == (10.0, 0.0, 0.0) and trends.samples == (5, 0, 0)


def test_a_set_whose_loss_falls_more_slowly_gets_more_and_one_that_falls_faster_less():
    (_, first), (_, slow), (_, fast) = adaptation().mix(last(8))
    assert slow > 1.02 and fast < 1.9 and 0.9 < first < 1.1
    words = adaptation().reason(last(8), PARTS, adaptation().mix(last(8)))
    assert (
        words.startswith("weights a 1 -> ")
        and f"b 1 -> {slow:.3g} (loss 2.8, -1.0%), c 2 -> {fast:.3g} (loss 0.629, -20.0%)" in words
    )


def test_it_is_slow_and_keeps_within_bounds():
    mixes = mixes_of(after_epochs(Trends.start(3), range(200)))
    weights = np.array([[weight for _, weight in parts] for _, parts in mixes]) / [1, 1, 2]
    assert (np.abs(np.diff(weights, axis=0)) < 0.12).all()
    ratio = weights / weights[:, :1]
    assert ratio.max() < MOST**2 and ratio.min() > MOST**-2 and ratio.min() < 0.6


def test_without_a_trend_of_their_own_the_weights_go_back_to_what_was_asked_for():
    trends = last(10)
    assert adaptation().mix(trends) != PARTS
    *_, later = after_epochs(trends, range(60), rates=(0.1, 0.1, 0.1))
    assert adaptation().mix(later) == PARTS and adaptation().mix(Trends.start(3)) == PARTS


def test_an_epoch_stays_as_long_and_floors_hold():
    floored = adaptation(floors=(0.5, 0.0, 0.15))
    for _, parts in mixes_of(after_epochs(Trends.start(3), range(40)), floored):
        visits = [round(count * weight) for count, weight in parts]
        assert sum(visits) == 110 and visits[0] >= 54 and visits[2] >= 16
    assert any(
        round(2 * 10 * parts[2][1]) < 32
        for _, parts in mixes_of(after_epochs(Trends.start(3), range(40)))
    )  # without


def test_no_set_that_comes_is_left_without_a_visit():
    few = Adaptation(("many", "one"), ((1000, 1.0), (1, 1.0)), 1.0)
    assert few.mix(replace(Trends.start(2), factors=(2.0, 0.5))) == few.parts


def test_a_set_of_which_no_loss_is_known_has_no_say():
    """It has no samples, or none came in an epoch; its factor goes back to 1."""
    with_empty = Adaptation(("a", "b", "c", "empty"), (*PARTS, (0, 1.0)), 0.5)
    trends = Trends.start(4)
    for plain in after_epochs(Trends.start(3), range(4)):
        trends = with_empty.after_epoch(after_step(trends, [*plain.losses, math.nan], [6, 3, 2, 0]))
        assert with_empty.mix(trends)[:3] == adaptation().mix(plain) and trends.factors[3] == 1
    factors = moved((1.0, 1.0, 1.5), PARTS, (2.0, 2.0, 0.0), (1.0, 1.5, 1.0), 0.5)
    assert factors[:2] == pytest.approx(moved((1.0, 1.0), PARTS[:2], (2.0, 2.0), (1.0, 1.5), 0.5))
    assert factors[2] == pytest.approx(1.5**KEPT)
    assert "c 2 -> 2 (loss 0, trend not known)" in adaptation().reason(
        Trends.start(3), PARTS, PARTS
    )


def test_the_order_follows_from_the_epoch_on_that_a_mix_is_for():
    mixes = mixes_of(after_epochs(Trends.start(3), range(6)))
    for epoch in range(3):  # nothing is known of trends before two epochs are over
        assert counts(epoch, mixes).tolist() == counts(epoch).tolist()
    total, parts = np.zeros(100, int), PARTS
    for epoch in range(12):
        parts = dict(mixes).get(epoch, parts)
        found = counts(epoch, mixes)
        total += found
        assert [found[:60].sum(), found[60:90].sum(), found[90:].sum()] == [
            round(count * weight) for count, weight in parts
        ]
        expected = [total[:60].mean(), total[60:90].mean(), total[90:].mean()]
        assert ORDER.visits((epoch + 1) * STEPS, mixes) == pytest.approx(expected)
    assert parts != PARTS
    for part in (total[:60], total[60:90], total[90:]):
        assert (
            np.ptp(part) <= 2
        )  # of a part every sample comes about equally often, whatever its weights were


def test_a_mix_that_is_yet_to_come_changes_nothing_before_it():
    mixes = mixes_of(after_epochs(Trends.start(3), range(6)))
    for known in range(len(mixes)):
        for step in range(mixes[known][0] * STEPS):
            assert np.array_equal(
                ORDER.batch(step, mixes[:known]), ORDER.batch(step, mixes[: known + 1])
            )


def test_a_run_that_goes_on_mixes_as_one_that_never_stopped():
    whole = list(after_epochs(Trends.start(3), range(9)))
    kept = json.loads(json.dumps(asdict(whole[4])))
    again = list(
        after_epochs(Trends(**{name: tuple(values) for name, values in kept.items()}), range(5, 9))
    )
    assert again == whole[5:]
    settings = Settings([Setting(0, {})])
    for mix in mixes_of(whole):
        settings.add_mix(*mix)
    same = Settings.from_records(settings.records(), json.loads(json.dumps(settings.mixes)))
    assert same.mixes == settings.mixes == mixes_of(whole)
    assert all(
        np.array_equal(ORDER.batch(step, same.mixes), ORDER.batch(step, settings.mixes))
        for step in range(120)
    )


def test_refusals():
    with pytest.raises(ValueError, match="rate 2: a number above 0 and at most 1"):
        adaptation(rate=2)
    settings = Settings([Setting(0, {})])
    with pytest.raises(ValueError, match="from epoch 0 on cannot follow that from epoch 0 on"):
        settings.add_mix(0, PARTS)
    settings.add_mix(3, PARTS)
    with pytest.raises(ValueError, match="from epoch 3 on cannot follow that from epoch 3 on"):
        settings.add_mix(3, PARTS)
    for parts in (((60, 1.0), (30, 1.0), (10, 3.0)), ((60, 1.0), (50, 1.0))):
        with pytest.raises(
            ValueError, match="from epoch 3 on: those of .* with 110 visits are needed"
        ):
            ORDER.batch(40, ((3, parts),))
