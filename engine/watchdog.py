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
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

BEAT_S = 2.0
SILENCE_LIMIT_S = 40.0
EXIT_STATUS = 1


class Watchdog:
    """Watches over the other ranks from `start` to `stop`. `describe(rank)` says what a rank is, for the message."""

    def __init__(self, rank: int, world_size: int, describe: Callable[[int], str] = "rank {}".format):
        self.rank, self.world_size, self.describe = rank, world_size, describe
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of our own to the store of the process group: its own client may be busy in a blocking call.
        self._store = dist.PrefixStore("wye", dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30)))

    def start(self) -> Watchdog:
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
        """Report this rank's failure. True for the rank that is to print it; the others leave quietly."""
        claim = f"{self.rank} {message}"  # two ranks may have found out the same
        try:
            return self._store.compare_set("failure", "", claim).decode() == claim
        except RuntimeError:  # the store is gone with rank 0: the next rank speaks
            return self.rank == 1 or self.world_size == 1

    def linger(self) -> None:
        """Before rank 0 ends on a failure: leave the others the time to read it from the store that ends with rank 0."""
        if self.rank == 0 and self.world_size > 1:
            time.sleep(3 * BEAT_S)

    def cause_elsewhere(self, wait_s: float) -> tuple[str | None, bool]:
        """Why another rank failed, as far as can be found out within `wait_s`, and whether it has said so itself.

        (reason, True): a rank reported it. (description, False): a rank died without a word. (None, False): nothing found.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                reason = self._reported()
                if reason is not None:
                    return reason, True
                dead = self._dead_on_this_node()
            except RuntimeError:
                dead = 0
            if dead is not None:
                return f"{self.describe(dead)} died without a message; it was killed, or the machine ran out of memory", False
            if time.monotonic() >= deadline:
                return None, False
            time.sleep(0.1)

    def _watch(self) -> None:
        neighbour, beats = (self.rank + 1) % self.world_size, 0
        last, seen = None, time.monotonic()
        while not self._stop.wait(BEAT_S):
            beats += 1
            try:
                self._store.set(f"beat/{self.rank}", str(beats))
                reason = self._reported()
                current = self._store.get(f"beat/{neighbour}") if self._store.check([f"beat/{neighbour}"]) else None
            except RuntimeError:
                time.sleep(BEAT_S)  # the main thread may be about to say more
                self._leave(f"{self.describe(0)} ended, and with it the store of the process group", first=self.rank == 1)
            if reason is not None:
                time.sleep(BEAT_S)  # let the reporting rank print first
                self._leave(reason, first=False)
            if current != last:
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
        return self._store.get("failure").decode().partition(" ")[2] or None

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
