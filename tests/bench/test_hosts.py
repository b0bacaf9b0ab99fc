"""What hosts fetch: what is counted of a store's log, and how many hosts read a shard."""

import numpy as np
import pytest

from bench.hosts import Log, fetched, last_uses, measure, order_of, reads


def test_bytes_of_images_and_others_are_told_apart_until_the_last_step_that_reads_the_shard():
    shards = [(100, [range(10, 40), range(50, 90)]), (80, [range(0, 80)])]
    log, lines = Log(), [{"at_s": 1.0}, {"at_s": 2.0}]
    asked = {
        0.1: "HEAD /pairs/00000.parquet",
        0.2: "GET /pairs/sizes.json",
        0.3: "GET /pairs/00000.parquet",  # all of it
        0.4: "GET /pairs/00000.parquet 30-59",
        0.5: "GET /pairs/00000.parquet 95-",
        0.6: "GET /pairs/00001.parquet 70-79",
        1.5: "GET /pairs/00000.parquet",  # for a step after the last
    }
    log.at_s, log.requests = [*asked], [*asked.values()]
    found = fetched(log, lines, {0: 0, 1: 1}, shards)
    assert found.tolist() == [[70 + 20, 30 + 10 + 5, 3], [10, 0, 1]]


def test_a_host_reads_the_shards_of_its_part_of_each_batch():
    counts = np.full(256, 20)
    order = order_of(counts, 4, 32)
    two = last_uses(order, 2, order.steps_per_epoch)
    for step in range(order.steps_per_epoch):
        for own, part in zip(two, np.split(order.batch(step), 2)):
            assert all(own[shard] >= step for shard in (part // 20).tolist())
    assert set().union(*two) == set(range(256))
    found = reads(counts, 4, 16)
    # whole lanes, which are shared where there are more hosts
    assert 1 == found["2"] == sum(map(len, two)) / 256 < found["8"] <= found["64"]


@pytest.mark.all("measures as the bench does")
def test_two_hosts_and_a_store():
    """Both read every shard: one of them fetches it as a whole, the other its texts, and what lies
    within 64 KB of the footer of so small a shard."""
    found = measure({"image": 1, "text": 1}, 32, 16, 4, 16, 8, 0)
    assert found["by_order"] == [1, 1]
    (of_images, of_texts), (others, _) = found["image_times"], found["other_times"]
    assert 1 <= of_images == others <= 1 + 2 / 32 and of_texts < 0.3, found
    assert found["image_most"] < 2.3, found
    assert 0.5 < max(found["used"]) <= 1
    assert found["counted"] == pytest.approx(1, abs=0.1)
