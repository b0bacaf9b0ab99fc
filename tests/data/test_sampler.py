"""The order of samples and how it is dealt."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from plain_requests import plain_requests

from data.batching.balance import ByShape, GlobalBatch, InOrder
from data.batching.branch_cost import BranchCost
from data.batching.buckets import BucketedSamples
from data.batching.feed import FeedRates
from data.batching.sampler import GlobalOrder, evaluation_requests, training_requests
from data.batching.settings import Setting, Settings
from data.batching.weights import Curriculum

ORDER = GlobalOrder(num_samples=103, global_batch_size=12, seed=5)
SUBSET = np.arange(1000, 1103)


def test_batch_is_the_documented_formula():
    assert ORDER.steps_per_epoch == 8
    for step, epoch, start in ((0, 0, 0), (7, 0, 84), (8, 1, 0), (21, 2, 60)):
        assert ORDER.epoch(step) == epoch
        assert (
            ORDER.batch(step).tolist()
            == np.random.default_rng([5, epoch]).permutation(103)[start : start + 12].tolist()
        )
    assert ORDER.batch(3).dtype == np.int64


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
    assert (counts[:, 10:30].sum(1) == 6).all() and counts[:10, 10:30].sum(0).tolist() == [
        3
    ] * 20  # 10 epochs x 6 = 3 laps of 20
    assert (counts[:, 30:34].sum(1) == 6).all() and counts[:2, 30:34].sum(0).tolist() == [3] * 4
    assert (
        GlobalOrder(40, 1, 3, ((10, 1.0), (30, 1.0))).batch(7).tolist()
        == GlobalOrder(40, 1, 3).batch(7).tolist()
    )
    with pytest.raises(ValueError, match="they must add up"):
        GlobalOrder(40, 1, 3, ((10, 1.0),))
    with pytest.raises(ValueError, match="8 training samples do not fill one global batch of 12"):
        GlobalOrder(40, 12, 3, ((40, 0.2),))


def test_order_does_not_depend_on_how_it_is_dealt():
    by_position = []
    for replicas, num_micro_batches in ((1, 1), (3, 2), (2, 3), (1, 12), (12, 1)):
        seen = {}
        for replica in range(replicas):
            for request in plain_requests(
                ORDER, SUBSET, replica, replicas, num_micro_batches, 6, 11
            ):
                assert request.training and request.epoch == ORDER.epoch(request.step)
                assert len(request.index) == 12 // (replicas * num_micro_batches)
                assert request.index.dtype == request.position.dtype == np.int64
                for position, index in zip(request.position.tolist(), request.index.tolist()):
                    assert seen.setdefault((request.step, position), index) == index
        assert len(seen) == 5 * 12
        by_position.append(seen)
    assert all(seen == by_position[0] for seen in by_position)
    assert by_position[0][(9, 4)] == 1000 + ORDER.batch(9)[4]


def test_with_buckets_a_micro_batch_has_images_of_one_shape():
    draw = np.random.default_rng(0)
    number = draw.choice(3, 103, p=(0.5, 0.3, 0.2)).astype(np.int8)
    buckets = BucketedSamples(((32, 64), (48, 48), (64, 32)), number)
    for replicas, num_micro_batches in ((1, 4), (2, 2), (2, 3)):
        own = total = 0
        for step in range(16):
            requests = [
                request
                for replica in range(replicas)
                for request in plain_requests(
                    ORDER,
                    SUBSET,
                    replica,
                    replicas,
                    num_micro_batches,
                    step,
                    step + 1,
                    ByShape(buckets),
                )
            ]
            positions = np.concatenate([request.position for request in requests])
            assert sorted(positions.tolist()) == list(range(12))
            for request in requests:
                assert (
                    request.index.tolist() == SUBSET[ORDER.batch(step)[request.position]].tolist()
                )
                shape = buckets.sizes.index(request.size)
                mine = number[request.index - 1000]
                assert (mine == shape).sum() == np.bincount(
                    mine, minlength=3
                ).max()  # the most common one
                own, total = own + (mine == shape).sum(), total + len(mine)
        assert own / total > 0.75
    assert all(request.size is None for request in plain_requests(ORDER, SUBSET, 0, 1, 1, 0, 2))


def test_requests_come_in_the_order_they_are_run():
    requests = list(plain_requests(ORDER, SUBSET, 1, 3, 2, 4, 6))
    assert [(r.step, r.position.tolist()) for r in requests] == [
        (4, [4, 5]),
        (4, [6, 7]),
        (5, [4, 5]),
        (5, [6, 7]),
    ]


def test_the_requests_of_a_step_may_come_behind_the_list_of_them():
    settings = Settings([Setting(0, {"image": 2})])
    outlined = training_requests(ORDER, SUBSET, 1, 3, "image", settings, 4, 6, outlined=True)
    for step in (4, 5):
        requests = next(outlined)
        assert [r.step for r in requests] == [step, step]
        assert [next(outlined), next(outlined)] == requests
    assert list(outlined) == []


def test_starting_in_the_middle_gives_the_rest():
    whole = list(plain_requests(ORDER, SUBSET, 0, 2, 3, 0, 20))
    rest = list(plain_requests(ORDER, SUBSET, 0, 2, 3, 13, 20))
    assert [r.index.tolist() for r in rest] == [r.index.tolist() for r in whole[13 * 3 :]]


def test_deal_is_contiguous_equal_and_complete():
    everyone = np.arange(24)
    shares = InOrder().shares(GlobalBatch(0, 0, everyone, everyone), 2, 3)
    assert shares[3][0].tolist() == [12, 13, 14, 15]  # replica 1, micro-batch 0
    assert np.concatenate([part for part, _ in shares]).tolist() == list(range(24)) and {
        size for _, size in shares
    } == {None}


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("micro_batch_size", [1, 4, 100])
def test_evaluation_visits_each_sample_once_in_order(replicas, micro_batch_size):
    subset = np.arange(50, 63)
    per_replica = [
        evaluation_requests(subset, r, replicas, micro_batch_size) for r in range(replicas)
    ]
    flat = [request for requests in per_replica for request in requests]
    assert np.concatenate([r.position for r in flat]).tolist() == list(range(13))
    assert np.concatenate([r.index for r in flat]).tolist() == subset.tolist()
    assert all(
        1 <= len(r.index) <= micro_batch_size and not r.training and r.epoch == 0 for r in flat
    )
    sizes = Counter(sum(len(r.index) for r in requests) for requests in per_replica)
    assert max(sizes) - min(sizes) <= 1
    assert per_replica[0][0].step == 0 and (
        replicas < 13 or per_replica[-1] == [] or replicas == 13
    )


def test_refusals():
    with pytest.raises(
        ValueError,
        match="10 training samples do not fill one global batch of 12; .* train_batch_size to at most 10",
    ):
        GlobalOrder(10, 12, 0)
    with pytest.raises(ValueError, match="seed -1"):
        GlobalOrder(10, 2, -1)
    with pytest.raises(ValueError, match="global_batch_size 0"):
        GlobalOrder(10, 0, 1)
    with pytest.raises(ValueError, match="steps count from 0"):
        ORDER.batch(-1)
    with pytest.raises(
        ValueError,
        match="12 cannot be dealt to 5 replicas x 3 micro-batches; each needs a sample",
    ):
        plain_requests(ORDER, SUBSET, 0, 5, 3, 0, 1)
    with pytest.raises(ValueError, match="each needs a sample"):
        plain_requests(ORDER, SUBSET, 0, 1, 0, 0, 1)
    with pytest.raises(ValueError, match="replica 3 of 3: .* 0..2"):
        plain_requests(ORDER, SUBSET, 3, 3, 2, 0, 1)
    with pytest.raises(ValueError, match="subset has 100 samples, the order is made for 103"):
        plain_requests(ORDER, SUBSET[:100], 0, 3, 2, 0, 1)
    with pytest.raises(ValueError, match="micro_batch_size 0"):
        evaluation_requests(SUBSET, 0, 1, 0)
    with pytest.raises(ValueError, match="replica -1 of 2"):
        evaluation_requests(SUBSET, -1, 2, 4)


# -- settings, feed rates and windows


class Whole:
    """Deals texts in contiguous parts."""

    deals_texts, equal_shares = True, False

    def shares(self, batch, replicas, num_micro_batches):
        texts = np.arange(len(batch.visited) * batch.setting.feed_rates.captions_per_image)
        return [(part, None) for part in np.array_split(texts, replicas * num_micro_batches)]


def test_a_setting_holds_from_its_step_on_for_every_replica():
    settings = Settings(
        [Setting(0, {"image": 2}), Setting(3, {"image": 3}, feed_rates=FeedRates(image_size=32))]
    )
    for replica in (0, 1):
        found = list(training_requests(ORDER, SUBSET, replica, 2, "image", settings, 1, 5))
        assert [(r.step, len(r.index), r.feed_rates.image_size) for r in found] == [
            (1, 3, 0)
        ] * 2 + [(2, 3, 0)] * 2 + [(3, 2, 32)] * 3 + [(4, 2, 32)] * 3


def test_a_setting_may_come_while_the_requests_of_the_step_before_are_asked_for():
    settings = Settings([Setting(0, {"image": 1})])
    found = training_requests(ORDER, SUBSET, 0, 1, "image", settings, 0, 4)
    assert len(next(found).index) == 12  # step 0; step 1 is being dealt
    settings.add(Setting(2, {"image": 2}))
    assert [(r.step, len(r.index)) for r in found] == [(1, 12), (2, 6), (2, 6), (3, 6), (3, 6)]


def test_several_captions_are_texts_of_their_own_or_come_with_their_samples():
    settings = Settings([Setting(0, {"text": 5}, feed_rates=FeedRates(captions_per_image=3))])
    of_texts = [
        r.texts() for r in training_requests(ORDER, SUBSET, 0, 1, "text", settings, 0, 1, [Whole()])
    ]
    of_samples = [
        r.texts()
        for r in training_requests(
            ORDER,
            SUBSET,
            0,
            1,
            "text",
            Settings([Setting(0, {"text": 4}, feed_rates=FeedRates(3))]),
            0,
            1,
        )
    ]
    samples = SUBSET[ORDER.batch(0)]
    for found in (of_texts, of_samples):
        index, position, number = (np.concatenate(column) for column in zip(*found))
        assert position.tolist() == list(range(36)) and number.tolist() == [0, 1, 2] * 12
        assert index.tolist() == np.repeat(samples, 3).tolist()
    assert len({len(index) for index, _, _ in of_texts}) > 1 and {
        len(index) for index, _, _ in of_samples
    } == {9}


@pytest.mark.parametrize("captions", [1, 3])
def test_texts_are_dealt_apart_from_the_images_that_share_their_line(captions):
    """Images in order and equally many; the texts of a micro-batch may be those of other samples,
    and of other numbers."""
    settings = Settings(
        [Setting(0, {"image": 4, "text": 4}, feed_rates=FeedRates(captions_per_image=captions))]
    )
    both = [InOrder(), Backwards()]
    found = [
        list(training_requests(ORDER, SUBSET, replica, 3, "image", settings, 2, 3, both))
        for replica in range(3)
    ]
    requests = [request for of_replica in found for request in of_replica]
    alone = [
        request
        for replica in range(3)
        for request in training_requests(ORDER, SUBSET, replica, 3, "image", settings, 2, 3)
    ]
    samples = SUBSET[ORDER.batch(2)]
    for request, expected in zip(requests, alone, strict=True):
        assert (
            request.index.tolist() == expected.index.tolist()
            and request.position.tolist() == expected.position.tolist()
        )
    index, position, number = (
        np.concatenate(column) for column in zip(*(request.texts() for request in requests))
    )
    assert (
        position.tolist() == list(range(12 * captions))[::-1]
        and index.tolist() == samples[position // captions].tolist()
    )
    assert number.tolist() == (position % captions).tolist()


class Backwards(Whole):
    def shares(self, batch, replicas, num_micro_batches):
        texts = np.arange(len(batch.visited) * batch.setting.feed_rates.captions_per_image)[::-1]
        return [(part, None) for part in np.array_split(texts, replicas * num_micro_batches)]


def test_settings_follow_each_other_and_come_back_from_their_records():
    settings = Settings(
        [Setting(0, {"text": 4}, {"text": BranchCost(0.5, 0.25, 0.125, version=3)})]
    )
    settings.add(Setting(7, {"text": 2}, feed_rates=FeedRates(2, 0.5, 96), reason="it waited"))
    again = Settings.from_records(json.loads(json.dumps(settings.records())))
    assert [again.at(step) for step in range(12)] == [settings.at(step) for step in range(12)]
    assert again.at(6).costs["text"].version == 3 and again.at(7).feed_rates.image_size == 96
    for from_step in (0, 7):
        with pytest.raises(ValueError, match="cannot follow those from"):
            settings.add(Setting(from_step, {}))
    with pytest.raises(ValueError, match="from step 2"):
        Settings([Setting(2, {})])


def test_a_window_sorts_the_samples_of_its_global_batches_and_no_others():
    length = np.random.default_rng(3).integers(4, 78, 103)
    order = replace(ORDER, window=3, lengths_of=lambda visited, epoch: length[visited] + epoch)
    assert ORDER.steps_per_epoch == 8
    for first, last in ((0, 3), (3, 6), (6, 8), (8, 11)):  # the last of an epoch is shorter
        plain, sorted_ = ([o.batch(step) for step in range(first, last)] for o in (ORDER, order))
        assert sorted(np.concatenate(plain).tolist()) == sorted(np.concatenate(sorted_).tolist())
        ends = sorted((length[batch].min(), length[batch].max()) for batch in sorted_)
        assert all(before[1] <= after[0] for before, after in zip(ends, ends[1:]))
    assert all(
        np.array_equal(replace(order, window=1).batch(step), ORDER.batch(step)) for step in range(9)
    )


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


def test_a_change_at_an_epochs_end_is_an_order_of_the_new_size_with_its_own_steps():
    """Seven samples were left of the epoch, which the earlier size did not fill: they stay out."""
    order, alone = (
        replace(ORDER, global_batch_size=7, earlier=((8, 12),)),
        replace(ORDER, global_batch_size=7),
    )
    assert batches(order, range(8, 60)) == batches(alone, range(14, 66))


def test_an_epoch_ends_where_a_larger_batch_does_not_fit_any_more():
    order = replace(ORDER, global_batch_size=50, earlier=((5, 12),))
    assert order.epoch(4) == 0 and order.epoch(5) == 1 and order.ends_epoch(5)
    assert batches(order, (4, 5, 6, 7)) == [
        shuffled(0)[48:60],
        shuffled(1)[:50],
        shuffled(1)[50:100],
        shuffled(2)[:50],
    ]


def test_a_change_within_a_window_leaves_those_samples_that_did_not_come():
    length = np.random.default_rng(3).integers(4, 78, 103)
    before = replace(ORDER, window=4, lengths_of=lambda visited, epoch: length[visited])
    order = replace(
        before, global_batch_size=5, earlier=((6, 12),)
    )  # of the second window, steps 4..7, two batches came
    assert batches(order, range(6)) == batches(before, range(6))
    came = {sample for batch in batches(order, range(6)) for sample in batch}
    left = [sample for sample in shuffled(0) if sample not in came]
    assert left[:24] != shuffled(0)[72:96] and len(left) == 31
    for steps, samples in (
        (range(6, 10), left[:20]),
        (range(10, 12), left[20:30]),
        (range(12, 16), shuffled(1)[:20]),
    ):  # windows
        assert sorted(sum(batches(order, steps), [])) == sorted(samples)
        ends = sorted((length[batch].min(), length[batch].max()) for batch in batches(order, steps))
        assert all(one[1] <= other[0] for one, other in zip(ends, ends[1:]))


def test_a_curriculum_keeps_the_order_that_the_epoch_began_with_and_a_smaller_batch_takes_what_it_left_out():
    curriculum = Curriculum(np.random.default_rng(1).random(103), epochs=2)
    order = replace(ORDER, curriculum=curriculum, global_batch_size=3, earlier=((2, 12),))
    visits = np.array(shuffled(0))
    row = [*curriculum.arranged(visits[:96], 0), *visits[96:]]
    assert sum(batches(order, range(2 + 26)), []) == row[: 24 + 3 * 26] and order.ends_epoch(2 + 26)
    assert sum(batches(order, range(28, 28 + 34)), []) == [
        *curriculum.arranged(np.array(shuffled(1))[:102], 1)
    ]


CHANGES = [
    (((3, 12),), 7),
    (((3, 12), (2, 30), (1, 5)), 4),  # three in one epoch
    (((20, 12), (1, 100), (7, 1)), 12),
    (((1, 1), (5, 40)), 60),
]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "parts", "curriculum"])
@pytest.mark.parametrize("earlier, size", CHANGES)
def test_over_all_changes_an_epoch_has_each_sample_once_and_all_but_what_does_not_fill_a_batch(
    earlier, size, kind, window
):
    length = np.random.default_rng(3).integers(4, 78, 103)
    given = {
        "parts": {"parts": ((60, 1.0), (18, 2.0), (25, 0.2))},
        "curriculum": {"curriculum": Curriculum(length, 2)},
    }.get(kind, {})
    order = GlobalOrder(
        103,
        size,
        5,
        window=window,
        lengths_of=lambda visited, epoch: length[visited] + epoch,
        earlier=earlier,
        **given,
    )
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
        most = np.repeat([1, 2, 1], [60, 18, 25]) if kind == "parts" else np.ones(103)
        assert (counts <= most).all()
        next_size = len(found[epoch + 1][0]) if epoch + 1 in found else size
        assert 0 <= order.epoch_samples - counts.sum() < max(len(of_epoch[-1]), next_size)
    for any_step in (last, 0, step - 1, max(0, last - 1)):  # in any order
        assert order.batch(any_step).tolist() in found[order.epoch(any_step)]


@pytest.mark.parametrize("earlier, size", CHANGES)
def test_where_a_step_is_in_the_data_is_counted_in_samples(earlier, size):
    parts = ((60, 1.0), (18, 2.0), (25, 0.2))
    order = GlobalOrder(103, size, 5, parts, earlier=earlier)
    mixes = ((2, ((60, 1.2), (18, 4 / 3), (25, 0.2))),)
    of_epoch, samples, before = [], 0, -1.0  # samples that each epoch had
    for step in range(order.first_step(order.epoch(order.changed_at) + 4)):
        assert order.samples_before(step) == samples and order.epochs_before(step) > before
        before, samples = order.epochs_before(step), samples + len(order.batch(step))
        first = order.first_step(order.epoch(step))
        assert before == pytest.approx(
            order.epoch(step) + (order.samples_before(step) - order.samples_before(first)) / 101
        )
        assert order.ends_epoch(step) == (step == first > 0)
        of_epoch += [0] * (step == first)
        early, late = sum(of_epoch[:2]) / 101, sum(of_epoch[2:]) / 101
        assert order.visits(step, mixes) == pytest.approx(
            [early + 1.2 * late, 2 * early + 4 / 3 * late, 0.2 * (early + late)]
        )
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


@pytest.mark.parametrize(
    "earlier", [((0, 6),), ((2, 12),), ((2, 6), (1, 6)), ((2, 0),), ((2, 104),)]
)
def test_sizes_that_no_run_had(earlier):
    with pytest.raises(ValueError, match="another size every time|of 1 to 103 samples"):
        replace(ORDER, earlier=earlier)
