"""The order of samples in shards: every sample once an epoch, few shards at a time, and the same
whatever is asked first."""

import pickle

import numpy as np
import pytest

from data.batching.stream_order import Shards, StreamOrder, _turns

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
            # within the group in which it comes, one of its samples may come later
            assert wait * 40 <= steps + 1e-6 and steps <= wait * 40 + 4


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
    order = order_of(np.full(100, 400), 100, mixed=16)
    for step in (0, 3, 150):
        assert len(order.needed(order.batch(step))[0]) >= 14


def test_a_replica_reads_a_part_of_the_shards():
    order = order_of(np.full(400, 50), 800, mixed=32)
    whole = order.needed(order.batch(9))[0]
    for own in np.array_split(order.batch(9), 8):
        assert len(order.needed(own)[0]) <= 12 < 32 <= len(whole)


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
    assert sorted(coming) == list(range(shards))
    assert set(coming[:mixed]) == set(order._lap(0, 0).live(0, 1).tolist())
