"""The order of samples in shards: every sample once an epoch, few shards at a time, and the same
whatever is asked first."""

import pickle
from zlib import crc32

import numpy as np
import pytest

from data.batching.laps import Shards, spread_order
from data.batching.stream_order import StreamOrder, _turns

SLIDING = 481_785_689  # of the batches of two epochs, as version 0.1 makes them
# shards, mixed, largest shard
SHAPES = [(5, 3, 40), (7, 64, 13), (1, 8, 100), (30, 4, 50), (4, 1, 9)]


def counts_of(shards, largest):
    counts = np.random.default_rng(0).integers(0, largest, shards)
    counts[0] = largest
    return counts


def order_of(counts, size, mixed=3, **more):
    return StreamOrder(int(counts.sum()), size, 3, shards=(Shards(counts, mixed),), **more)


@pytest.mark.parametrize("shards, mixed, largest", SHAPES)
def test_an_epoch_has_every_sample_once_and_a_step_reads_live_shards(shards, mixed, largest):
    counts = counts_of(shards, largest)
    order, total = order_of(counts, 7, mixed), int(counts.sum())
    epochs = []
    for epoch in range(3):
        steps = range(order.first_step(epoch), order.first_step(epoch + 1))
        batches = [order.batch(step) for step in steps]
        visited = np.concatenate(batches)
        assert len(np.unique(visited)) == len(visited) == total // 7 * 7
        assert sorted(order._visited(epoch, 0, total).tolist()) == list(range(total))
        for step, batch in zip(steps, batches):
            needed = order.needed(batch)[0]
            assert np.isin(needed, order.live(step)[0]).all()
            # neighbours share all but those that come and go
            assert len(order.live(step)[0]) <= min(shards, mixed + 2 + 7 // max(1, largest // 8))
            for shard in needed.tolist():
                assert order.next_use(0, shard, step) * total < 7 + 1e-6
        epochs.append(visited.tolist())
    assert epochs[0] != epochs[1] or total < 3
    # asked backwards, by another process, it is the same
    again = pickle.loads(pickle.dumps(order))
    for step in reversed(range(order.first_step(3))):
        assert (again.batch(step) == np.concatenate(epochs)[7 * step : 7 * step + 7]).all()


def test_a_shard_that_is_not_needed_says_when_it_is_again():
    order = order_of(np.full(40, 10), 10, mixed=4)
    for step in (0, 17, 39, 55):
        for shard in range(40):
            wait = order.next_use(0, shard, step)
            if wait == 0:
                continue
            steps = next(
                later
                for later in range(200)
                if shard in order.needed(order.batch(step + later))[0].tolist()
            )
            assert steps == int(wait * 400 + 1e-6) // 10


def test_another_global_batch_goes_on_with_what_is_left_of_the_epoch():
    counts = counts_of(30, 50)
    total = int(counts.sum())
    order = order_of(counts, 16, earlier=((11, 24), (7, 5)))
    steps = range(order.first_step(1))
    visited = np.concatenate([order.batch(step) for step in steps])
    assert len(np.unique(visited)) == len(visited) > total - 24
    assert [len(order.batch(step)) for step in (0, 10, 11, 17, 18)] == [24, 24, 5, 5, 16]
    one = order_of(counts, 24)
    assert (one.batch(4) == order.batch(4)).all()


def test_weights_repeat_data_sets_and_lose_no_sample():
    counts = [np.full(6, 20), np.full(4, 11), np.array([50])]
    parts = ((120, 1.0), (44, 2.5), (50, 0.3))
    shards = tuple(Shards(each, 3) for each in counts)
    order = StreamOrder(214, 13, 3, parts=parts, shards=shards)
    assert order.epoch_samples == 120 + 110 + 15
    seen = np.zeros(214, int)
    for epoch in range(4):
        visited = order._visited(epoch, 0, order.epoch_samples)
        seen += np.bincount(visited, minlength=214)
        shares = [np.sum((visited >= a) & (visited < b)) for a, b in ((0, 120), (120, 164))]
        assert shares == [120, 110]
    assert set(seen[:120]) == {4} and set(seen[120:164]) == {10} and set(seen[164:]) == {1, 2}
    # every global batch has its share of each
    for step in range(order.steps_per_epoch):
        of_first = int((order.batch(step) < 120).sum())
        assert abs(of_first - 13 * 120 / 245) <= 2
    other = order.with_mix(2, ((120, 0.5), (44, 185 / 44), (50, 0.0)))
    assert (other.batch(5) == order.batch(5)).all()
    visited = other._visited(2, 0, other.epoch_samples)
    assert (visited >= 164).sum() == 0 and ((visited >= 120) & (visited < 164)).sum() == 185


def test_turns_are_even_and_agree_wherever_they_are_asked():
    visits = [120, 0, 110, 15]
    before = [0, 0, 0, 0]
    for position in range(246):
        now = _turns(visits, position)
        assert sum(now) == position
        assert sorted(b - a for a, b in zip(before, now)) == [0, 0, 0, 1] or position == 0
        before = now
    # many small sets whose turns come together, beside a large one
    for visits in (np.random.default_rng(1).integers(0, 40, 30).tolist(), [400] + [1] * 30):
        times = sorted(
            ((k + 0.5) / each, number) for number, each in enumerate(visits) for k in range(each)
        )
        for position in range(0, sum(visits) + 1, 7):
            of = [number for _, number in times[:position]]
            assert _turns(visits, position) == np.bincount(of, minlength=len(visits)).tolist()


def test_a_small_batch_has_samples_of_most_shards_that_are_mixed():
    """At both ends of a lap, where shards are cut between two lanes, of half as many at least."""
    order = order_of(np.full(100, 400), 100, mixed=16)
    assert len(order.needed(order.batch(0))[0]) >= 8
    for step in (60, 150, 300):
        assert len(order.needed(order.batch(step))[0]) >= 14


@pytest.mark.parametrize(
    "mixed, size, replicas", [(32, 800, 8), (24, 72, 6), (72, 144, 9), (64, 96, 4)]
)
def test_replicas_read_shards_of_their_own(mixed, size, replicas):
    """But for a shard in which the lanes of two meet: whatever the sizes of shards."""
    for counts in (np.full(300, 50), counts_of(300, 99)):
        order = order_of(counts, size, mixed)
        assert order.are_read_apart(replicas)
        read = [set() for _ in range(replicas)]
        for step in range(order.first_step(1)):
            for own, found in zip(np.array_split(order.batch(step), replicas), read):
                found.update(order.needed(own)[0].tolist())
        assert len(set.union(*read)) == np.count_nonzero(counts)
        assert sum(map(len, read)) <= np.count_nonzero(counts) + replicas - 1


def test_replicas_that_do_not_divide_the_lanes_have_one_in_common_with_a_neighbour():
    order = order_of(np.full(300, 50), 576, 64)
    assert [order.are_read_apart(n) for n in (9, 6, 12, 48, 160, 8, 64)] == 5 * [False] + 2 * [True]
    for size, mixed, replicas in ((60, 24, 6), (801, 32, 8)):
        assert not order_of(order.shards[0].counts, size, mixed).are_read_apart(replicas)
    whole = order.needed(order.batch(7))[0]
    parts = [order.needed(own)[0] for own in np.array_split(order.batch(7), 9)]
    assert len(whole) + 8 <= sum(map(len, parts)) <= len(whole) + 16


def test_replicas_read_shards_of_their_own_of_several_data_sets():
    """Where each global batch has as many samples of each; a set that is at hand as a whole is spread
    over all replicas."""
    counts = (np.full(60, 40), np.full(60, 20), np.array([600]))
    shards = tuple(Shards(each, 16 if len(each) > 1 else 1) for each in counts)
    parts = ((2400, 1.0), (1200, 1.0), (600, 1.0))
    for size, apart in ((112, True), (100, False)):
        order = StreamOrder(4200, size, 3, parts=parts, shards=shards)
        assert order.are_read_apart(4) == apart
        read = []
        for step in range(order.first_step(1)):
            for replica, own in enumerate(np.array_split(order.batch(step), 4)):
                needed = order.needed(own)
                read += [(n, k, replica) for n in (0, 1) for k in needed.get(n, [])]
                assert not apart or np.count_nonzero(own >= 3600) == size // 7 // 4
        assert (len(set(read)) <= 126) == apart


def test_lanes_come_evenly_also_in_a_part_of_a_round():
    for number, parts in ((64, 16), (24, 8), (45, 9), (7, 7), (1, 1)):
        order = spread_order(number)
        assert sorted(order.tolist()) == list(range(number))
        rounds = np.tile(order, 3)
        for start in range(number):
            lanes = rounds[start : start + parts]
            assert np.bincount(lanes * parts // number, minlength=parts).tolist() == [1] * parts


def test_runs_of_version_0_1_go_on_in_their_order():
    shards = Shards(counts_of(30, 50), 4, slides=True)
    order = StreamOrder(int(shards.counts.sum()), 16, 3, shards=(shards,))
    batches = np.concatenate([order.batch(step) for step in range(order.first_step(2))])
    assert crc32(batches.tobytes()) == SLIDING
    for step in (0, 20, 40):
        needed = order.needed(order.batch(step))[0]
        assert np.isin(needed, order.live(step)[0]).all()
        assert max(order.next_use(0, shard, step) for shard in needed.tolist()) < 0.05
    assert sorted(order.coming(0).tolist()) == list(range(30))


def test_a_hundred_million_samples_are_asked_for_at_any_step():
    order = order_of(np.full(10_000, 10_000), 32_768, mixed=64)
    batch = order.batch(2_345)
    assert len(np.unique(batch)) == 32_768
    mixing = order.mixing(2_345)[0]
    assert 64 <= mixing.shards_per_batch <= 70 and abs(mixing.rank_correlation) < 0.2


def test_counts_that_are_not_those_of_the_samples_are_refused():
    with pytest.raises(ValueError, match="shards"):
        StreamOrder(11, 2, 0, shards=(Shards(np.array([5, 5]), 2),))


@pytest.mark.parametrize("shards, mixed, largest", SHAPES)
def test_coming_shards_are_those_that_are_needed_first(shards, mixed, largest):
    order = order_of(counts_of(shards, largest), 7, mixed)
    coming = order.coming(0).tolist()
    assert sorted(coming) == np.flatnonzero(order.shards[0].counts).tolist()
    live = set(order._lap(0, 0).live(0, 1).tolist())
    assert set(coming[: len(live)]) == live
