"""Shards are fetched before they are needed."""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from stores import Faults, http_server
from stream_shards import write_shards

from data.batching.laps import Shards
from data.batching.stream_order import StreamOrder
from data.streams.opening import open_stream
from data.streams.prefetch import AT_ONCE, _Following

SAMPLES = 6


def test_room_is_for_the_shard_that_is_needed_first(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))  # in which nobody else makes room
    pattern = write_shards(tmp_path / "shards", [SAMPLES] * 16)
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        source, mixed = open_stream(f"stream:{url}/{pattern}?mixed=1")
        order = StreamOrder(len(source), SAMPLES, 0, shards=(Shards(source.table.counts, mixed),))
        by_step = [int(order.needed(order.batch(step))[0][0]) for step in range(16)]
        source.keep(by_step[:3])
        for shard in by_step[:3]:
            source.shard(shard)
        source.cache = replace(source.cache, limit_bytes=source.cache.usage())  # all is taken
        following = _Following(None, None, source, order, None, 3, {})

        def fetch(step):
            return pool.submit(following.fetch, 0, by_step[step], step)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                later = [fetch(step) for step in range(5, 4 + AT_ONCE)]
                wait_until(lambda: following.roomless)
                first = fetch(4)
                wait_until(lambda: (0, by_step[4]) in following.roomless)
                wait([first], 0.5)  # a try of another that began before
                faults.requests.clear()
                source.keep(by_step[1:3])
                first.result(30)
                asked = [each.split()[1] for each in faults.requests if each.startswith("GET")]
                assert asked == [f"/{by_step[4]:05d}.tar"]
            finally:
                following.step = 16  # which ends the others
        assert all(each.result() is None for each in later)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "too long"
        time.sleep(0.02)
