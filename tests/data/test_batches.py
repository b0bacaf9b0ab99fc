"""From the order to the micro-batches of each replica, and to the requests for them."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from plain_requests import plain_requests

from data.batching.batches import (
    Batches,
    TextPacker,
    dealt_by_cost,
    in_parts,
    sizes_of_shares,
)
from data.batching.branch_cost import BranchCost
from data.batching.buckets import Buckets
from data.batching.laps import Shards
from data.batching.load_control import FeedRates
from data.batching.order import GlobalOrder
from data.batching.packing import Bounds
from data.batching.requests import evaluation_requests
from data.batching.settings import Setting, setting_at
from data.batching.stream_order import StreamOrder
from data.modalities.lengths import TokenCounts

ORDER = GlobalOrder(num_samples=103, global_batch_size=12, seed=5)
SUBSET = np.arange(1000, 1103)
COST = BranchCost(0.1, 0.0, 1.0)
# one caption each, of 3 to 29 tokens
TEXTS = TextPacker(
    TokenCounts(np.random.default_rng(0).integers(3, 30, 103), np.arange(104)), 32, seed=5
)


def requests_of(branch, number, step=0, replicas=1, captions=1, texts=None, loads=()):
    """Of all replicas."""
    setting = Setting(0, {branch: number}, COST, FeedRates(captions))
    batches = Batches(ORDER, SUBSET, [setting], texts=texts)
    return [
        request
        for replica in range(replicas)
        for request in batches.requests(branch, replica, replicas, step, step + 1, loads)
    ]


def texts_of(requests):
    """(samples, positions) of all their texts."""
    texts = [request.texts() for request in requests]
    return tuple(
        np.concatenate([getattr(rows, name) for rows in texts]).tolist()
        for name in ("index", "position")
    )


# -- clips


def test_each_micro_batch_gets_about_as_many_frames():
    frames = np.random.default_rng(1).integers(1, 9, 96)
    for replicas, number in ((1, 4), (3, 2), (2, 3), (8, 12)):
        parts = dealt_by_cost(frames, replicas, number)
        assert len(parts) == replicas * number and all(map(len, parts))
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(96))
        assert all((np.diff(part) > 0).all() for part in parts)
        sums = [int(frames[part].sum()) for part in parts]
        assert max(sums) - min(sums) <= 8, (replicas, number, sums)
        if replicas * number == 6:
            in_order = [int(frames[part].sum()) for part in in_parts(96, replicas, number)]
            assert max(in_order) > 1.1 * max(sums)  # what it is for
    twice = [int(frames[part].sum()) for part in dealt_by_cost(frames, 2, 1, (2.0, 1.0))]
    assert twice[0] / twice[1] == pytest.approx(2, abs=0.1)
    assert [len(part) for part in dealt_by_cost(np.full(96, 8), 2, 2)] == [24] * 4
    with pytest.raises(ValueError, match="every micro-batch needs a sample"):
        dealt_by_cost(frames[:5], 2, 3)


def test_clips_are_dealt_by_their_frames_where_no_images_come_with_them():
    frames = np.random.default_rng(2).integers(1, 9, 1103)
    setting = Setting(0, {"video": 3, "image": 3})
    buckets = Buckets(((32, 64), (64, 32)), np.arange(103, dtype=np.int8) % 2)
    batches = Batches(
        ORDER, SUBSET, [setting], buckets, costs={"video": lambda index: frames[index]}
    )

    def sums(branch, loads=()):
        requests = [*batches.requests(branch, 0, 1, 0, 1, loads)]
        assert sorted(np.concatenate([r.position for r in requests])) == [*range(12)]
        return [int(frames[request.index].sum()) for request in requests]

    assert np.ptp(sums("video")) <= 2 < np.ptp(sums("image"))
    assert sums("image", ("image", "video")) == sums("image")
    assert sums("video", ("video", "text")) == sums("video")


def test_of_a_stream_each_replica_arranges_its_own_part():
    """So it asks nothing of samples whose shards others read: neither costs nor sizes."""
    counts = np.full(16, 12)
    order = StreamOrder(192, 48, 3, shards=(Shards(counts, 8),))
    frames = np.random.default_rng(2).integers(1, 9, 192)
    setting, asked = Setting(0, {"video": 3, "image": 3}, COST), []

    class Sizes:
        def __getitem__(self, visited):
            asked.extend(visited.tolist())
            return (visited % 2).astype(np.int8)

    def cost(index):
        asked.extend(index.tolist())
        return frames[index]

    buckets = Buckets(((32, 64), (64, 32)), Sizes())
    train = np.arange(192)
    batches = Batches(order, train, [setting], buckets, texts=TEXTS, costs={"video": cost})
    without = replace(batches, texts=None)
    for branch in ("video", "image"):
        found = []
        for replica in range(2):
            asked.clear()
            requests = [*batches.requests(branch, replica, 2, 0, 1)]
            own = np.concatenate([request.position for request in requests])
            assert np.sort(own).tolist() == [*range(24 * replica, 24 * replica + 24)]
            assert {*asked} == {*order.batch(0)[own].tolist()}
            assert len(order.needed(np.array(asked))[0]) <= 4 + 1
            if branch == "video":
                assert np.ptp([int(frames[request.index].sum()) for request in requests]) <= 4
            else:
                assert {request.size for request in requests} == {*buckets.sizes}
            found += own.tolist()
        assert sorted(found) == [*range(48)] and batches.asks_own(branch)
    assert not without.asks_own("image") and without.asks_own("video")
    asked.clear()  # where texts come with their images the micro-batches of all are the same
    whole = [r.position.tolist() for r in without.requests("image", 0, 1, 0, 1)]
    assert {*asked} == {*order.batch(0).tolist()} and whole != [[*range(16)]] * 3
    assert not replace(batches, weights_of=lambda batch: np.ones(48)).asks_own("video")


# -- samples


def test_the_order_does_not_depend_on_how_it_is_packed():
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


def test_without_buckets_parts_are_contiguous_equal_and_complete():
    parts = in_parts(24, 2, 3)
    assert parts[3].tolist() == [12, 13, 14, 15]  # replica 1, micro-batch 0
    assert np.concatenate(parts).tolist() == list(range(24))
    assert all(request.size is None for request in plain_requests(ORDER, SUBSET, 0, 1, 1, 0, 2))


def test_replicas_get_their_shares_and_texts_of_all_lengths_alike():
    setting = Setting(0, {"image": 2, "text": 2}, COST, shares={"image": (3, 1), "text": (3, 1)})
    setting = Setting.from_record(json.loads(json.dumps(setting.record())))
    batches = Batches(ORDER, SUBSET, [setting], texts=TEXTS)
    lengths = TEXTS.lengths(batches.at(0))
    for branch in ("image", "text"):
        own = [
            np.concatenate(
                [
                    (request.texts() if branch == "text" else request).position
                    for request in batches.requests(branch, replica, 2, 0, 1)
                ]
            )
            for replica in (0, 1)
        ]
        assert [len(each) for each in own] == [9, 3]
        assert sorted(np.concatenate(own).tolist()) == list(range(12))
    # a micro-batch has at least `min_size` texts, on the replica with the least as well
    least = replace(TEXTS, bounds=Bounds(min_size=2)).pack(batches.at(0), 2, (2,))
    assert all(len(part) >= 2 for parts in least for part in parts)
    with pytest.raises(ValueError, match="for each of 2 replicas"):
        sizes_of_shares(3, (3, 1), 2)
    means = [lengths[each].mean() for each in own]
    assert means[0] == pytest.approx(means[1], rel=0.2)


def test_with_buckets_a_micro_batch_has_images_of_one_shape():
    """But for those in which one bucket ends and the next begins."""
    number = np.random.default_rng(0).choice(3, 103, p=(0.5, 0.3, 0.2)).astype(np.int8)
    buckets = Buckets(((32, 64), (48, 48), (64, 32)), number)
    for replicas, num_micro_batches in ((1, 4), (2, 2), (2, 3)):
        for step in range(16):
            requests = [
                request
                for replica in range(replicas)
                for request in plain_requests(
                    ORDER, SUBSET, replica, replicas, num_micro_batches, step, step + 1, buckets
                )
            ]
            positions = np.concatenate([request.position for request in requests])
            assert sorted(positions.tolist()) == list(range(12))
            samples, mixed = SUBSET[ORDER.batch(step)], 0
            for request in requests:
                assert len(request.index) == 12 // len(requests)
                assert request.index.tolist() == samples[request.position].tolist()
                of_shape = np.bincount(number[request.index - 1000], minlength=3)
                assert of_shape[buckets.sizes.index(request.size)] == of_shape.max()
                mixed += of_shape.max() < len(request.index)
            assert mixed <= 2


def test_requests_come_in_the_order_they_are_run_and_may_begin_anywhere():
    requests = list(plain_requests(ORDER, SUBSET, 1, 3, 2, 4, 6))
    assert [(r.step, r.position.tolist()) for r in requests] == [
        (4, [4, 5]),
        (4, [6, 7]),
        (5, [4, 5]),
        (5, [6, 7]),
    ]
    whole = list(plain_requests(ORDER, SUBSET, 0, 2, 3, 0, 20))
    rest = list(plain_requests(ORDER, SUBSET, 0, 2, 3, 13, 20))
    assert [r.index.tolist() for r in rest] == [r.index.tolist() for r in whole[13 * 3 :]]


def test_the_requests_of_a_step_may_come_after_the_list_of_them():
    batches = Batches(ORDER, SUBSET, [Setting(0, {"image": 2})])
    found = batches.requests("image", 1, 3, 4, 6, meta_first=True)
    for step in (4, 5):
        requests = next(found)
        assert [r.step for r in requests] == [step, step]
        assert [next(found), next(found)] == requests
    assert list(found) == []


# -- texts


def test_several_captions_are_texts_of_their_own_or_come_with_their_samples():
    samples = SUBSET[ORDER.batch(0)]
    of_texts = requests_of("text", 5, captions=3, texts=TEXTS)
    of_samples = requests_of("text", 4, captions=3)
    for requests in (of_texts, of_samples):
        index, position = texts_of(requests)
        assert sorted(position) == list(range(36))
        assert index == [samples[p // 3] for p in position]
    assert len({len(request.texts().index) for request in of_texts}) > 1
    assert {len(request.texts().index) for request in of_samples} == {9}


def test_texts_are_packed_apart_from_the_images_that_share_their_stages():
    """Images in order and equally many; the texts of a micro-batch may be those of other samples,
    and of other numbers."""
    for captions in (1, 3):
        own = {"step": 2, "replicas": 2, "captions": captions}
        requests = requests_of("image", 2, texts=TEXTS, loads=("image", "text"), **own)
        for request, expected in zip(requests, requests_of("image", 2, **own), strict=True):
            assert request.index.tolist() == expected.index.tolist()
            assert request.position.tolist() == expected.position.tolist()
        alone = requests_of("image", 2, texts=TEXTS, loads=("text",), **own)
        assert texts_of(requests) == texts_of(alone)
        _, position = texts_of(requests)
        assert position != sorted(position) and sorted(position) == list(range(12 * captions))


# -- settings


def test_a_setting_holds_from_its_step_on_for_every_replica():
    settings = [
        Setting(0, {"image": 2}),
        Setting(3, {"image": 3}, feed_rates=FeedRates(image_size=32)),
    ]
    for replica in (0, 1):
        found = Batches(ORDER, SUBSET, settings).requests("image", replica, 2, 1, 5)
        assert [(r.step, len(r.index), r.feed_rates.image_size) for r in found] == [
            (1, 3, 0)
        ] * 2 + [(2, 3, 0)] * 2 + [(3, 2, 32)] * 3 + [(4, 2, 32)] * 3


def test_settings_and_mixes_may_come_while_the_requests_of_the_step_before_are_asked_for():
    parts = ((60, 1.0), (43, 1.0))
    order = GlobalOrder(103, 51, 5, parts)
    batches = Batches(order, SUBSET, [Setting(0, {"image": 1})])
    found = batches.requests("image", 0, 1, 0, 5)
    assert len(next(found).index) == 51  # step 0; step 1 is being packed
    batches.settings.append(Setting(2, {"image": 2}))
    batches.order = order.with_mix(1, ((60, 0.0), (43, 103 / 43)))  # from step 2 on
    rest = list(found)
    assert [(r.step, len(r.index)) for r in rest[:3]] == [(1, 51), (2, 26), (2, 25)]
    assert (rest[0].index < 1060).any() and all((r.index >= 1060).all() for r in rest[1:])


def test_settings_come_back_from_their_records():
    settings = [
        Setting(0, {"text": 4}, BranchCost(0.5, 0.25, 0.125, version=3)),
        Setting(7, {"text": 2}, feed_rates=FeedRates(2, 0.5, 96), reason="it waited"),
    ]
    records = json.loads(json.dumps([setting.record() for setting in settings]))
    assert list(map(Setting.from_record, records)) == settings
    assert [setting_at(settings, step).from_step for step in (0, 6, 7, 99)] == [0, 0, 7, 7]


# -- evaluation, refusals


@pytest.mark.parametrize(
    "ask, word",
    [
        (lambda: GlobalOrder(103, 12, 5, ((60, 1.0), (42, 1.0))), "103 samples together"),
        (lambda: GlobalOrder(103, 12, 5, ((60, 1.0), (43, -0.1))), "weights >= 0"),
        (lambda: GlobalOrder(103, 12, 5, ((60, 1.0), (43, np.nan))), "weights >= 0"),
        (lambda: Batches(ORDER, SUBSET[1:], []), "102 training samples"),
        (lambda: plain_requests(ORDER, SUBSET, 2, 2, 1, 0, 1), "from 0 to 1"),
        (lambda: plain_requests(ORDER, SUBSET, -1, 2, 1, 0, 1), "from 0 to 1"),
        (lambda: evaluation_requests(SUBSET, 3, 3, 4), "from 0 to 2"),
        (lambda: next(plain_requests(ORDER, SUBSET, 0, 5, 3, 0, 1)), "needs a sample"),
    ],
)
def test_what_cannot_be_is_refused_in_words(ask, word):
    with pytest.raises(ValueError, match=word):
        ask()


def test_evaluation_visits_each_sample_once_in_order():
    subset = np.arange(50, 63)
    for replicas, size in itertools.product((1, 2, 3, 5, 20), (1, 4, 100)):
        shares = [evaluation_requests(subset, r, replicas, size) for r in range(replicas)]
        flat = [request for requests in shares for request in requests]
        assert np.concatenate([r.position for r in flat]).tolist() == list(range(13))
        assert np.concatenate([r.index for r in flat]).tolist() == subset.tolist()
        assert all(1 <= len(r.index) <= size and not r.training and r.epoch == 0 for r in flat)
        sizes = [sum(len(r.index) for r in requests) for requests in shares]
        assert max(sizes) - min(sizes) <= 1, (replicas, size)
        assert shares[0][0].step == 0 and (replicas < 13 or shares[-1] == [])
