"""No rank waits for a dead one: heartbeats through the rendezvous store, and one message from one rank.

Every rank has a thread that counts up its own heartbeat and watches its neighbour's. When a neighbour stands still for
`SILENCE_LIMIT_S`, or a rank reports its own failure, the reason is put in the store, and every rank leaves on reading it.
The thread needs no collective, so it works while the main thread waits in one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

BEAT_S = 2.0
SILENCE_LIMIT_S = 40.0
EXIT_STATUS = 1


class Watchdog:
    """Watches over the other ranks from `start` to `stop`. `describe(rank)` says what a rank is, for the message."""

    def __init__(self, rank: int, world_size: int, describe=lambda rank: f"rank {rank}"):
        self.rank, self.world_size, self.describe = rank, world_size, describe
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of our own to the store of the process group: its own client may be busy in a blocking call.
        self._store = dist.PrefixStore("wye", dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30)))

    def start(self) -> "Watchdog":
        self._store.set(f"place/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        if self.world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="wye-watchdog", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT_S)

    def claim_failure(self, message: str) -> bool:
        """Report this rank's failure. True for the first rank to do so: it prints; the others leave quietly."""
        try:
            return self._store.compare_set("failure", "", message or "unknown").decode() == message
        except (RuntimeError, dist.DistError):  # the store is gone with rank 0
            return self.rank == 1 or self.world_size == 1

    def failure_elsewhere(self, wait_s: float) -> str | None:
        """The failure another rank reported, waiting up to `wait_s` for one; a lost connection is often only its echo."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            reason = self._reported()
            if reason is not None:
                return reason
            gone = self._dead_on_this_node()
            if gone is not None:
                return None
            time.sleep(0.1)
        return None

    def dead_rank(self) -> int | None:
        """A rank of this node whose process no longer exists."""
        return self._dead_on_this_node()

    def _watch(self) -> None:
        neighbour, beats = (self.rank + 1) % self.world_size, 0
        last, seen = None, time.monotonic()
        while not self._stop.wait(BEAT_S):
            beats += 1
            try:
                self._store.set(f"beat/{self.rank}", str(beats))
                reason = self._reported()
                current = self._store.get(f"beat/{neighbour}") if self._store.check([f"beat/{neighbour}"]) else None
                ended = self._store.check([f"ended/{neighbour}"])
            except (RuntimeError, dist.DistError):
                self._leave("the process group's store on rank 0 is gone: rank 0 ended", first=self.rank == 1)
            if reason is not None:
                time.sleep(BEAT_S)  # let the reporting rank print first
                self._leave(reason, first=False)
            if current != last or ended:
                last, seen = current, time.monotonic()
            elif time.monotonic() - seen > SILENCE_LIMIT_S:
                message = f"{self.describe(neighbour)} gave no sign of life for {SILENCE_LIMIT_S:.0f} s; it was killed or hangs"
                self._leave(message, first=self.claim_failure(message))

    def _leave(self, message: str, first: bool) -> None:
        if self._stop.is_set():
            return
        if first:
            print(f"wye: error: {message}", file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)

    def _reported(self) -> str | None:
        if not self._store.check(["failure"]):
            return None
        return self._store.get("failure").decode() or None

    def _dead_on_this_node(self) -> int | None:
        for rank in range(self.world_size):
            if rank == self.rank or not self._store.check([f"place/{rank}"]):
                continue
            host, pid = self._store.get(f"place/{rank}").decode().rsplit(" ", 1)
            if host == socket.gethostname() and not _alive(int(pid)):
                return rank
        return None


def _alive(pid: int) -> bool:
    """Is there a process of this number that is not a zombie?"""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False
