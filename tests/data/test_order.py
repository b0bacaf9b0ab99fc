"""The order of samples: which samples a step has, whatever came before it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from data.batching.order import GlobalOrder, Together

ORDER = GlobalOrder(num_samples=103, global_batch_size=12, seed=5)


def test_batch_is_the_documented_formula():
    assert ORDER.steps_per_epoch == 8
    for step, epoch, start in ((0, 0, 0), (7, 0, 84), (8, 1, 0), (21, 2, 60)):
        assert ORDER.epoch(step) == epoch
        assert (
            ORDER.batch(step).tolist()
            == np.random.default_rng([5, epoch]).permutation(103)[start : start + 12].tolist()
        )
    assert ORDER.batch(3).dtype == np.int64


def test_samples_of_one_kind_come_side_by_side():
    """So many at a time, the next ones right behind the first; what is alone keeps its turn."""
    label = np.array([0] * 7 + [1] * 2 + [*range(2, 33)])
    plain = GlobalOrder(40, 40, seed=3)
    for number in (2, 3, 7):
        order = GlobalOrder(40, 40, seed=3, together=Together(label, number))
        for step in range(4):
            left, expected = plain.batch(step).tolist(), []
            while left:
                own = [i for i in left if label[i] == label[left[0]]][:number]
                expected += own
                left = [i for i in left if i not in own]
            assert order.batch(step).tolist() == expected, (number, step)


def test_every_sample_at_most_once_per_epoch_and_epochs_differ():
    epochs = [
        np.concatenate([ORDER.batch(step) for step in range(e * 8, e * 8 + 8)]) for e in range(3)
    ]
    assert all(len(set(epoch.tolist())) == 96 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(ORDER.batch(0), GlobalOrder(103, 12, 6).batch(0))


def test_any_step_can_be_asked_for_and_callers_cannot_harm_the_order():
    forward = [ORDER.batch(step).copy() for step in range(40)]
    for step in (39, 2, 17, 39, 0):
        assert np.array_equal(ORDER.batch(step), forward[step])
    with pytest.raises(ValueError, match="read-only"):
        ORDER.batch(0)[0] = 7


def test_weights_say_how_often_the_samples_of_a_part_come():
    order = GlobalOrder(
        num_samples=40,
        global_batch_size=1,
        seed=3,
        parts=((10, 2.0), (20, 0.3), (4, 1.5), (6, 0.0)),
    )
    assert order.steps_per_epoch == order.epoch_samples == 20 + 6 + 6
    counts = np.zeros((20, 40), int)
    for epoch in range(20):
        for step in range(epoch * 32, epoch * 32 + 32):
            counts[epoch, order.batch(step)] += 1
    assert (counts[:, :10] == 2).all() and not counts[:, 34:].any()
    # 10 epochs x 6 = 3 laps of 20
    assert (counts[:, 10:30].sum(1) == 6).all() and counts[:10, 10:30].sum(0).tolist() == [3] * 20
    assert (counts[:, 30:34].sum(1) == 6).all() and counts[:2, 30:34].sum(0).tolist() == [3] * 4
    assert (
        GlobalOrder(40, 1, 3, ((10, 1.0), (30, 1.0))).batch(7).tolist()
        == GlobalOrder(40, 1, 3).batch(7).tolist()
    )
    with pytest.raises(ValueError, match="8 training samples do not fill one global batch of 12"):
        GlobalOrder(40, 12, 3, ((40, 0.2),))


def test_refusals():
    with pytest.raises(
        ValueError,
        match="10 training samples do not fill one global batch of 12; .* train_batch_size to at most 10",
    ):
        GlobalOrder(10, 12, 0)
    with pytest.raises(ValueError, match="103 training samples do not fill .* of 104"):
        replace(ORDER, earlier=((2, 104),))


# -- other sizes of the global batch


def shuffled(epoch, number=103):
    return np.random.default_rng([5, epoch]).permutation(number).tolist()


def batches(order, steps):
    return [order.batch(step).tolist() for step in steps]


def test_another_size_goes_on_with_the_samples_that_the_epoch_has_left():
    order = replace(ORDER, global_batch_size=7, earlier=((3, 12),))
    assert batches(order, range(3)) == batches(ORDER, range(3))
    assert batches(order, range(3, 12)) == [
        shuffled(0)[start : start + 7] for start in range(36, 99, 7)
    ]
    assert batches(order, range(12, 26)) == [
        shuffled(1)[start : start + 7] for start in range(0, 98, 7)
    ]
    assert order.batch(26).tolist() == shuffled(2)[:7]


def test_an_epoch_ends_where_a_larger_batch_does_not_fit_any_more():
    order = replace(ORDER, global_batch_size=50, earlier=((5, 12),))
    assert order.epoch(4) == 0 and order.epoch(5) == 1 and order.ends_epoch(5)
    assert batches(order, (4, 5, 6, 7)) == [
        shuffled(0)[48:60],
        shuffled(1)[:50],
        shuffled(1)[50:100],
        shuffled(2)[:50],
    ]


CHANGES = [
    (((3, 12),), 7),
    (((3, 12), (2, 30), (1, 5)), 4),  # three in one epoch
    (((20, 12), (1, 100), (7, 1)), 12),
    (((1, 1), (5, 40)), 60),
]


def test_over_all_changes_an_epoch_has_each_sample_once_and_all_but_what_does_not_fill_a_batch():
    weighted = ((60, 1.0), (18, 2.0), (25, 0.2))
    for (earlier, size), parts in itertools.product(CHANGES, ((), weighted)):
        order = GlobalOrder(103, size, 5, parts, earlier)
        sizes = [each for number, each in earlier for _ in range(number)]
        last = len(sizes)
        found, step = {}, 0
        while (epoch := order.epoch(step)) < order.epoch(last) + 3:
            batch = order.batch(step).tolist()
            assert len(batch) == (sizes[step] if step < last else size)
            found.setdefault(epoch, []).append(batch)
            step += 1
        assert list(found) == list(range(len(found)))
        for epoch, of_epoch in found.items():
            counts = np.bincount(sum(of_epoch, []), minlength=103)
            most = np.repeat([1, 2, 1], [60, 18, 25]) if parts else np.ones(103)
            assert (counts <= most).all(), (earlier, size, parts)
            next_size = len(found[epoch + 1][0]) if epoch + 1 in found else size
            assert 0 <= order.epoch_samples - counts.sum() < max(len(of_epoch[-1]), next_size)
        for any_step in (last, 0, step - 1, max(0, last - 1)):  # in any order
            assert order.batch(any_step).tolist() in found[order.epoch(any_step)]


def test_where_a_step_is_in_the_data_is_counted_in_samples():
    parts = ((60, 1.0), (18, 2.0), (25, 0.2))
    for earlier, size in CHANGES:
        order = GlobalOrder(103, size, 5, parts, earlier)
        order = order.with_mix(2, ((60, 1.2), (18, 4 / 3), (25, 0.2)))
        of_epoch, samples, before = [], 0, -1.0  # samples that each epoch had
        for step in range(order.first_step(order.epoch(order.changed_at) + 4)):
            assert order.samples_before(step) == samples and order.epochs_before(step) > before
            before, samples = order.epochs_before(step), samples + len(order.batch(step))
            epoch, first = order.epoch(step), order.first_step(order.epoch(step))
            of_this = order.samples_before(step) - order.samples_before(first)
            assert before == pytest.approx(epoch + of_this / 101)
            assert order.ends_epoch(step) == (step == first > 0)
            of_epoch += [0] * (step == first)
            early, late = sum(of_epoch[:2]) / 101, sum(of_epoch[2:]) / 101
            visits = [early + 1.2 * late, 2 * early + 4 / 3 * late, 0.2 * (early + late)]
            assert order.visits(step) == pytest.approx(visits), (earlier, size, step)
            of_epoch[-1] += len(order.batch(step))
        assert [order.epoch(order.first_step(epoch)) for epoch in range(12)] == list(range(12))


def test_an_order_goes_on_from_the_sizes_so_far():
    order = replace(ORDER, earlier=((3, 6),))
    assert order.changed_at == 3 and order.batch_sizes(10) == ((3, 6), (7, 12))
    assert ORDER.changed_at == 0 and ORDER.batch_sizes(4) == ((4, 12),)
    assert (
        replace(ORDER, global_batch_size=6, earlier=order.batch_sizes(10)).batch(9).tolist()
        == order.batch(9).tolist()
    )
