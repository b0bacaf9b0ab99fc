"""How often the samples of each data set come: by temperature and floors, and by how their losses
fall, slowly, within bounds, and the same after a resume as without one."""

import math
from dataclasses import replace

import numpy as np
import pytest

from data.batching.mixing import KEPT, MOST, Adaptation, Trends, mixed
from data.batching.order import GlobalOrder

SETS = ((60, 1.0), (30, 1.0), (10, 2.0))
ORDER = GlobalOrder(100, 10, seed=4, parts=SETS)
STEPS = ORDER.steps_per_epoch


def adaptation(rate=0.5, floors=None):
    return Adaptation(("a", "b", "c"), SETS, rate, floors)


def after_epochs(trends, epochs, rates=(0.05, 0.01, 0.2), adaptation=adaptation()):
    """After each epoch, in which the losses fell by these rates: two steps, of which the second has
    twice the samples."""
    for epoch in epochs:
        mean = [3 * (1 - rate) ** epoch for rate in rates]
        trends = trends.after_step([1.2 * loss for loss in mean], [20, 10, 4])
        trends = adaptation.after_epoch(
            trends.after_step([0.9 * loss for loss in mean], [40, 20, 8])
        )
        yield trends


def last(epochs, **more):
    *_, trends = after_epochs(Trends.start(3), range(epochs), **more)
    return trends


def mixes_of(trends, adaptation=adaptation()):
    """Each from the epoch after the next on."""
    return tuple((epoch + 2, adaptation.mix(found)) for epoch, found in enumerate(trends))


def counts(epoch, order=ORDER):
    steps = range(epoch * STEPS, (epoch + 1) * STEPS)
    visits = np.concatenate([order.batch(step) for step in steps])
    return np.bincount(visits, minlength=ORDER.num_samples)


def moved(factors, parts, before, now, rate):
    """The factors after an epoch with the losses `now`."""
    ones = (1,) * len(parts)
    trends = Trends(factors, before, before, now, ones)
    return Adaptation(("",) * len(parts), parts, rate).after_epoch(trends).factors


def test_the_documented_formula():
    found = moved((1.0, 1.2), ((30, 1.0), (10, 1.0)), (2.0, 4.0), (1.0, 4.0), rate=0.5)
    shares, trend = np.array([30, 12]) / 42, np.log([0.5, 1.0])
    assert np.log(found) == pytest.approx(
        KEPT * np.log([1.0, 1.2]) + 0.5 * (trend - shares @ trend)
    )


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples():
    trends = last(2)
    assert trends.losses == pytest.approx([3 * 0.95, 3 * 0.99, 3 * 0.8])
    assert trends.before == pytest.approx([3, 3, 3])
    assert trends.samples == (0, 0, 0) and trends.sums == (0, 0, 0)  # the next one has not begun


def test_a_step_without_a_finite_loss_does_not_count():
    trends = Trends.start(3).after_step([2.0, math.nan, math.inf], [5, 0, 3])
    assert trends.sums == (10.0, 0.0, 0.0) and trends.samples == (5, 0, 0)


def test_a_set_whose_loss_falls_more_slowly_gets_more_and_one_that_falls_faster_less():
    (_, first), (_, slow), (_, fast) = adaptation().mix(last(8))
    assert slow > 1.02 and fast < 1.9 and 0.9 < first < 1.1
    words = adaptation().reason(last(8), SETS, adaptation().mix(last(8)))
    assert words.startswith("weights a 1 -> ")
    assert f"b 1 -> {slow:.3g} (loss 2.8, -1.0%), c 2 -> {fast:.3g} (loss 0.629, -20.0%)" in words


def test_it_is_slow_and_keeps_within_bounds():
    mixes = mixes_of(after_epochs(Trends.start(3), range(200)))
    weights = np.array([[weight for _, weight in parts] for _, parts in mixes]) / [1, 1, 2]
    assert (np.abs(np.diff(weights, axis=0)) < 0.12).all()
    ratio = weights / weights[:, :1]
    assert ratio.max() < MOST**2 and ratio.min() > MOST**-2 and ratio.min() < 0.6


def test_without_a_trend_of_their_own_the_weights_go_back_to_what_was_asked_for():
    trends = last(10)
    assert adaptation().mix(trends) != SETS
    *_, later = after_epochs(trends, range(60), rates=(0.1, 0.1, 0.1))
    assert adaptation().mix(later) == SETS and adaptation().mix(Trends.start(3)) == SETS


def test_an_epoch_stays_as_long_and_floors_hold():
    floored = adaptation(floors=(0.5, 0.0, 0.15))
    for _, parts in mixes_of(after_epochs(Trends.start(3), range(40)), floored):
        visits = [round(count * weight) for count, weight in parts]
        assert sum(visits) == 110 and visits[0] >= 54 and visits[2] >= 16
    # without
    assert any(
        round(2 * 10 * parts[2][1]) < 32
        for _, parts in mixes_of(after_epochs(Trends.start(3), range(40)))
    )


def test_no_set_that_comes_is_left_without_a_visit():
    few = Adaptation(("many", "one"), ((1000, 1.0), (1, 1.0)), 1.0)
    assert few.mix(replace(Trends.start(2), factors=(2.0, 0.5))) == few.parts


def test_a_set_of_which_no_loss_is_known_has_no_say():
    """It has no samples, or none came in an epoch; its factor goes back to 1."""
    with_empty = Adaptation(("a", "b", "c", "empty"), (*SETS, (0, 1.0)), 0.5)
    trends = Trends.start(4)
    for plain in after_epochs(Trends.start(3), range(4)):
        trends = with_empty.after_epoch(trends.after_step([*plain.losses, math.nan], [6, 3, 2, 0]))
        assert with_empty.mix(trends)[:3] == adaptation().mix(plain) and trends.factors[3] == 1
    factors = moved((1.0, 1.0, 1.5), SETS, (2.0, 2.0, 0.0), (1.0, 1.5, 1.0), 0.5)
    assert factors[:2] == pytest.approx(moved((1.0, 1.0), SETS[:2], (2.0, 2.0), (1.0, 1.5), 0.5))
    assert factors[2] == pytest.approx(1.5**KEPT)
    assert "c 2 -> 2 (loss 0, trend not known)" in adaptation().reason(Trends.start(3), SETS, SETS)


def test_the_order_follows_from_the_epoch_on_that_a_mix_is_for():
    mixes = mixes_of(after_epochs(Trends.start(3), range(6)))
    order = replace(ORDER, mixes=mixes)
    for epoch in range(3):  # nothing is known of trends before two epochs are over
        assert counts(epoch, order).tolist() == counts(epoch).tolist()
    total, parts = np.zeros(100, int), SETS
    for epoch in range(12):
        parts = dict(mixes).get(epoch, parts)
        found = counts(epoch, order)
        total += found
        visits = [found[:60].sum(), found[60:90].sum(), found[90:].sum()]
        assert visits == [round(count * weight) for count, weight in parts]
        expected = [total[:60].mean(), total[60:90].mean(), total[90:].mean()]
        assert order.visits((epoch + 1) * STEPS) == pytest.approx(expected)
    assert parts != SETS
    # samples of a set come about equally often, whatever its weights were
    assert all(np.ptp(part) <= 2 for part in (total[:60], total[60:90], total[90:]))
    for known in range(len(mixes)):  # a mix that is yet to come changes nothing before it
        before, after = (replace(ORDER, mixes=mixes[:n]) for n in (known, known + 1))
        for step in range(mixes[known][0] * STEPS):
            assert np.array_equal(before.batch(step), after.batch(step))


def test_refusals():
    for parts in (((60, 1.0), (30, 1.0), (10, 3.0)), ((60, 1.0), (50, 1.0))):
        with pytest.raises(ValueError, match="from epoch 3 on: those of .* with 110 visits"):
            ORDER.with_mix(3, parts)


# -- shares of an epoch


def shares(parts):
    visits = np.array([round(count * weight) for count, weight in parts])
    return visits / visits.sum()


PARTS = ((80_000, 1.0), (15_000, 1.0), (5_000, 1.0))


def test_without_temperature_and_floors_the_weights_stay_as_they_are():
    for parts in (PARTS, ((7, 0.3), (11, 2.7), (5, 0.0)), ((0, 1.0), (10, 1.0))):
        assert mixed(parts) == parts == mixed(parts, floors=[0.0] * len(parts))
    assert mixed(PARTS, floors=(0.5, 0.1, 0.05)) == PARTS  # floors that hold already


def test_shares_go_with_the_root_of_the_sizes_and_an_epoch_stays_as_long():
    parts = ((80_000, 1.0), (15_000, 2.0), (5_000, 1.0), (9_000, 0.0))
    sizes = np.array([80_000, 30_000, 5_000])
    for temperature in (0.5, 1.5, 1 / 0.7, 1 / 0.3, 100, 1e9):
        found = mixed(parts, temperature)
        assert sum(round(count * weight) for count, weight in found) == sizes.sum()
        wanted = sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum()
        assert shares(found) == pytest.approx([*wanted, 0], abs=1e-5), temperature
        assert [count for count, _ in found] == [80_000, 15_000, 5_000, 9_000]
    assert shares(found) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=1e-5)


def test_floors_hold():
    for floors, expected in (
        ((0, 0, 0.2), (0.8 * 80 / 95, 0.8 * 15 / 95, 0.2)),  # the others give up in proportion
        ((0, 0.14, 0.2), (0.66, 0.14, 0.2)),  # which brings the second below its own floor
        ((0.8, 0.1, 0.1), (0.8, 0.1, 0.1)),
        ((0.1, 0.1, 0.1), (0.9 * 80 / 95, 0.9 * 15 / 95, 0.1)),
    ):
        assert shares(mixed(PARTS, floors=floors)) == pytest.approx(expected, abs=1e-5), floors


def test_floors_hold_for_any_sizes_and_temperatures():
    rng = np.random.default_rng(0)
    for _ in range(300):
        number = int(rng.integers(2, 7))
        parts = tuple(
            (int(count), float(weight))
            for count, weight in zip(rng.integers(50, 3000, number), rng.uniform(0.2, 3, number))
        )
        floors = rng.dirichlet(np.ones(number)) * rng.uniform(0.2, 0.9)
        temperature = float(rng.uniform(0.8, 5))
        found = mixed(parts, temperature, floors)
        total = sum(round(count * weight) for count, weight in parts)
        assert sum(round(count * weight) for count, weight in found) == total
        assert (shares(found) >= floors - 1 / total).all()
        free = shares(found) > floors + 2 / total  # those above their floor keep their proportions
        natural = np.array([count * weight for count, weight in parts])[free] ** (1 / temperature)
        assert shares(found)[free] / shares(found)[free].sum() == pytest.approx(
            natural / natural.sum(), abs=number / total / free.sum() * 20
        )


def test_the_order_visits_as_the_shares_say_and_says_how_often():
    parts = mixed(((90, 1.0), (20, 1.0), (10, 1.0)), 1e9, (0, 0, 0.5))
    order = GlobalOrder(120, 10, seed=2, parts=parts)
    assert order.epoch_samples == 120 and order.steps_per_epoch == 12
    counts = np.zeros(120, int)
    for step in range(36):
        np.add.at(counts, order.batch(step), 1)
        if step % 12 == 11:
            assert order.visits(step + 1) == pytest.approx(
                [counts[:90].mean(), counts[90:110].mean(), counts[110:].mean()]
            )
    # half of each epoch, 60 visits of 10 samples, is noticed
    assert counts[110:].tolist() == [18] * 10
    assert order.visits(6)[2] == pytest.approx(3) and order.visits(0) == (0, 0, 0)
    assert GlobalOrder(120, 10, seed=2).visits(5) == ()
    # a last partial global batch is dropped
    assert GlobalOrder(120, 50, seed=2, parts=parts).visits(2)[2] == pytest.approx(6 * 100 / 120)


def test_what_no_shares_can_keep_is_refused():
    for parts, temperature, floors, words in (
        (((9, 1.0), (0, 1.0)), 1, (0, 0.1), "data set 2 has no training samples, and a floor"),
        (((9, 1.0), (9, 0.0)), 1, (0, 0.1), "data set 2 has weight 0, and a floor of 0.1"),
        (PARTS, 1, (0.5, 0.5, 0.1), "at most 1 together"),
        (PARTS, 1, (0, 0.5, 0.5), "data set 1 has 80000 .* less than one of them"),
        (((9000, 1.0), (9, 0.01)), 1, None, "data set 2 has 9 .* less than one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            mixed(parts, temperature, floors)
