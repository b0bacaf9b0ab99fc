"""A process of a rank that has shards fetched and listed before they are needed."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from data.batching.stream_order import StreamOrder
from data.index.sources import Source
from data.processes import end_with_parent, start_method
from data.streams.lengths import StreamTokenCounts
from data.streams.several import streams_of
from data.streams.source import TEXTS

AHEAD_S = 120.0  # of training
AHEAD_STEPS = 4  # at least
AT_ONCE = 8
PACE_STEPS = 50  # from which the time of a step is known
PAUSE_S = 0.25  # where there is no room, or nothing to do


class Prefetcher:
    """Follows a rank from `step` on. `share`: the replica of the rank and the number of replicas,
    where it reads a part of each global batch alone; None: it reads all. `tokens`: of each data
    set, what counts the tokens of a shard."""

    def __init__(
        self,
        source: Source,
        order: StreamOrder,
        share: tuple[int, int] | None,
        step: int,
        tokens: Mapping[int, StreamTokenCounts] | None = None,
    ) -> None:
        context: Any = start_method()
        self._own, other = context.Pipe()
        self._order, self._fetched = order, 0.0
        self._process = context.Process(
            target=_prefetch, args=(other, source, order, share, step, tokens or {}), daemon=True
        )
        self._process.start()
        other.close()

    def at(self, step: int, order: StreamOrder) -> None:
        """The rank asks for this step."""
        with contextlib.suppress(OSError):  # it has ended: shards are fetched when they are needed
            self._own.send((step, None if order is self._order else order))
            while self._own.poll():
                self._fetched += self._own.recv()
        self._order = order

    def taken_bytes(self) -> float:
        """That were fetched since the last call."""
        fetched, self._fetched = self._fetched, 0.0
        return fetched

    def close(self) -> None:
        self._own.close()
        self._process.terminate()
        self._process.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prefetch(rank: Connection, *known: Any) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        _Following(rank, pool, *known).run()


class _Following:
    def __init__(
        self,
        rank: Connection,
        pool: ThreadPoolExecutor,
        source: Source,
        order: StreamOrder,
        share: tuple[int, int] | None,
        step: int,
        tokens: Mapping[int, StreamTokenCounts],
    ) -> None:
        self.streams, self.order, self.share = streams_of(source), order, share
        self.step, self.rank, self.pool = step, rank, pool
        self.then = {number: counts.count for number, counts in tokens.items()}
        self.places = {
            name: (number, shard)
            for number, stream in self.streams.items()
            for shard, name in enumerate(stream.entries)
        }
        self.roomless: dict[tuple[int, int], int] = {}  # shards -> the steps that need them
        self.seen: deque[tuple[float, int]] = deque([(time.monotonic(), step)], PACE_STEPS)

    def run(self) -> None:
        """Until the rank has ended."""
        coming = self.coming()
        working: set[Future[None]] = set()
        with contextlib.suppress(EOFError, OSError):
            while True:
                working = {each for each in working if not each.done()}
                what = next(coming) if len(working) < AT_ONCE else None
                self.hear(PAUSE_S if what is None else 0.0)
                if what is not None:
                    working.add(self.pool.submit(self.fetch, *what))

    def fetch(self, number: int, shard: int, step: int) -> None:
        """Until the shard is there, or the rank is past the step that needs it. Room that comes
        free is for what is needed first: it would take the place of the others again."""
        stream = self.streams[number]

        def unclaimed() -> None:
            self.roomless.pop((number, shard), None)

        try:
            while step >= self.step:
                if step <= min([*self.roomless.values()], default=step):
                    # a store that is gone is reported by the reader that needs the shard
                    with contextlib.suppress(OSError):
                        then = self.then.get(number)
                        if stream.prefetch(shard, self.next_use(), then, begin=unclaimed):
                            return
                        self.roomless[number, shard] = step
                time.sleep(PAUSE_S)
        finally:
            unclaimed()

    def hear(self, wait_s: float) -> None:
        """What the rank says. Raises EOFError, OSError when it has ended."""
        while self.rank.poll(wait_s):
            wait_s = 0.0
            step, order = self.rank.recv()
            self.order = order or self.order
            if step > self.step:
                self.step = step
                self.seen.append((time.monotonic(), step))
        fetched = sum(s.taken_counts()["stream_bytes"] for s in self.streams.values())
        if fetched:
            self.rank.send(fetched)

    def coming(self) -> Iterator[tuple[int, int, int] | None]:
        """(number of the data set, shard, step) in the order of need; None: none for now."""
        at, recent = self.step, dict[tuple[int, int], int]()
        while True:
            at = max(at, self.step)
            if at >= self.step + self.ahead():
                yield None
                continue
            batch = self.order.batch(at)
            if self.share is not None:
                batch = np.array_split(batch, self.share[1])[self.share[0]]
            for number, shards in self.order.needed(batch).items():
                for shard in shards.tolist() if number in self.streams else ():
                    if (number, shard) not in recent:
                        yield number, shard, at
                    recent[number, shard] = at
            at += 1
            recent = {what: last for what, last in recent.items() if last >= self.step - 1}

    def ahead(self) -> int:
        """Steps, at most those of an epoch: then all shards come again."""
        (first_s, first), (last_s, last) = self.seen[0], self.seen[-1]
        if last == first:
            return AHEAD_STEPS
        step_s = max((last_s - first_s) / (last - first), 1e-6)
        return max(AHEAD_STEPS, min(int(AHEAD_S / step_s), self.order.steps_per_epoch))

    def next_use(self) -> Callable[[str], float]:
        order, step = self.order, self.step

        def next_use(name: str) -> float:
            # also of what other ranks of this machine read of the same shards
            number, shard = self.places[name.partition(TEXTS)[0]]  # KeyError: of another run
            return order.next_use(number, shard, step)

        return next_use
