"""No rank waits for a dead one, or for one that is stuck: heartbeats through the rendezvous store,
and one message from one rank.

Every rank has a thread that counts up its own heartbeat and watches that of the next rank on its
node; the first rank of a node also watches that of the next node. When one of these stands still
for `SILENCE_LIMIT_S`, the process of a rank of the same node is gone, or a rank reports its own
failure, the reason is put in the store, and every rank leaves on reading it. So a beat takes each
rank a few calls of the store, in a world of any size. The thread needs no collective, so it works
while the main thread waits in one. A second thread watches the first: where the network or the node
of the store is down, calls to the store do not return.

It also sees whether the main threads get on. Where none finishes anything for a given time, every
rank tells where its main thread stands: the one that is stuck, and those that wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

from common.output import plain
from engine.processes.places import Places
from engine.processes.store import connect

BEAT_S = 2.0
SILENCE_LIMIT_S = 40.0
LOST_BEATS = 3  # without a sign of life, where a connection is lost as well
EXIT_STATUS = 1
FAILURES = ("1", "2")  # exit statuses that a rank may report: failed, and would fail again
EXIT_CODE = 49  # in /proc/PID/stat, from the state on


class Watchdog:
    """Watches over the other ranks from `start` to `stop`. `places`: where all ranks are; `secret`:
    of the run, see `connect`. `describe(rank)` says what a rank is, for the message, which `tell`
    shows."""

    def __init__(
        self,
        rank: int,
        places: Places,
        secret: str,
        describe: Callable[[int], str] = "rank {}".format,
        tell: Callable[[str], None] = partial(print, file=sys.stderr, flush=True),
    ):
        self.rank, self.describe, self.tell = rank, describe, tell
        self.world_size = len(places.nodes)
        self.watched = watched_by(rank, places)
        self._progress: Callable[[], int] | None = None
        self._doing: Callable[[], str] = str
        self._stall_limit_s = 0.0
        self._passed = 0  # ends of what is `limited`
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._claims: set[str] = set()  # what this rank has reported itself
        self._beats = 0  # rounds of `_watch`
        self._here = {other: places.pids[other] for other in places.beside(rank)}
        self._store = connect(secret, timedelta(seconds=30))

    def start(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, name="wye-watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="wye-watchdog-guard", daemon=True).start()
        return self

    def follow(self, progress: Callable[[], int], limit_s: float, doing: Callable[[], str]) -> None:
        """From now on all ranks are stuck when the numbers `progress()` of all of them stay the
        same for `limit_s` seconds: one that is stuck stops the others sooner or later, and one that
        waits for others that get on is not. `doing()` says, in another thread, where this rank
        stands."""
        self._stall_limit_s, self._progress, self._doing = limit_s, progress, doing

    @contextlib.contextmanager
    def limited(self, limit_s: float, doing: str) -> Iterator[None]:
        """In here all ranks are stuck where none has come in, or gone out, for `limit_s` seconds.
        `doing` says what a rank does in here."""
        self._passed += 1
        self.follow(lambda: self._passed, limit_s, lambda: doing)
        try:
            yield
        finally:
            self._passed += 1
            self._progress = None

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT_S)

    def claim_failure(self, message: str, status: int = EXIT_STATUS) -> bool:
        """Report this rank's failure, and the exit status of all. True for the rank that is to
        print it; the others leave quietly."""
        # two ranks may have found out the same
        claim = f"{self.rank} {status} {message}"
        self._claims.add(claim)
        try:
            first = _text(self._store.compare_set("failure", "", claim)) == claim
            self._need_not_hear(self.rank)
            return first
        except RuntimeError:  # the store is gone with rank 0: the next rank speaks
            return self.rank == 1 or self.world_size == 1

    def linger(self) -> None:
        """Before rank 0 ends on a failure: leave the others the time to read it from the store that
        ends with rank 0. It waits for those that live and have not read it yet."""
        deadline = time.monotonic() + 3 * BEAT_S
        keys = [f"heard/{rank}" for rank in range(1, self.world_size)]
        with contextlib.suppress(RuntimeError):
            while self.rank == 0 and time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(0.1)

    def _need_not_hear(self, *ranks: int) -> None:
        """They know of the failure and leave, or are gone."""
        for rank in ranks:
            self._store.set(f"heard/{rank}", "")

    def cause_elsewhere(self, wait_s: float) -> tuple[str | None, int | None]:
        """Why another rank failed, as far as can be found out within `wait_s`, and the exit status
        of all if it has said so itself.

        (reason, status): a rank reported it. (description, None): a rank died without a word, or
        the store is gone, where it may have left one. (None, None): nothing found.
        """
        began = time.monotonic()
        beats: list[bytes] | None = None
        while True:
            try:
                if wait_s and beats is None:
                    beats = self._beats_of_all()
                reported = self._reported()
                if reported is not None:
                    message, status, forged = reported
                    if forged:
                        self._leave(message, status, first=True)
                    self._need_not_hear(self.rank)
                    return message, status
                dead = self._dead_on_this_node()
                if dead is None and beats and time.monotonic() - began > LOST_BEATS * BEAT_S:
                    if silent := self._silent_since(beats):
                        return self._of_silent(silent), None
                    beats = []
            except RuntimeError:
                return self._without_store(), None
            if dead is not None:
                return self._of_dead(dead), None
            if time.monotonic() - began >= wait_s:
                return None, None
            time.sleep(0.1)

    def _beats_of_all(self) -> list[bytes]:
        """In two calls; none where a rank has not begun."""
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        return self._store.multi_get(keys) if self._store.check(keys) else []

    def _silent_since(self, beats: list[bytes]) -> list[int]:
        """The ranks that have not gone on from these beats."""
        pairs = enumerate(zip(beats, self._beats_of_all(), strict=True))
        silent = [rank for rank, (a, b) in pairs if a == b and rank != self.rank]
        self._need_not_hear(*silent)
        return silent

    def _of_silent(self, ranks: list[int]) -> str:
        some = ", ".join(map(self.describe, ranks[:8])) + " …" * (len(ranks) > 8)
        return (
            f"a connection was lost, and {some} gave no sign of life for "
            f"{LOST_BEATS * BEAT_S:.0f} s; it has ended, or its node cannot be reached"
        )

    def _of_dead(self, rank: int) -> str:
        status = _wait_status(self._here.get(rank))
        if status is None:
            how = "the launcher may say how it ended"
        elif number := os.WTERMSIG(status):
            how = _signal_in_words(number)
        else:
            how = f"it ended with status {os.WEXITSTATUS(status)}"
        return f"{self.describe(rank)} died without a message; {how}"

    def _without_store(self) -> str:
        status = _wait_status(self._here.get(0))
        if status is not None and os.WTERMSIG(status):
            return self._of_dead(0)
        return (
            f"{self.describe(0)}, which holds the store of the process group, has ended or hangs; "
            "if it said why, that stands above"
        )

    def _watch(self) -> None:
        alive = {rank: _Unchanged() for rank in self.watched}
        getting_on, reported_progress, everyone = _Unchanged(), 0, 0
        while not self._stop.wait(BEAT_S):
            self._beats += 1
            # where a call holds Python's lock, this thread stands still too, and only
            # faulthandler's can speak
            with contextlib.suppress(RuntimeError):  # no memory is left for a thread of its own
                faulthandler.dump_traceback_later(SILENCE_LIMIT_S - 2 * BEAT_S)
            try:
                self._store.set(f"beat/{self.rank}", str(self._beats))
                dead = self._dead_on_this_node()
                reported = self._reported()  # after that: who spoke before it died is heard
                beats = {rank: self._value(f"beat/{rank}") for rank in self.watched}
                follows = self._progress  # which the main thread may take away
                if follows is not None:
                    progress = follows()
                    everyone = self._store.add("progress", progress - reported_progress)
                    reported_progress = progress
                if self._store.check(["stall"]):
                    self._tell_stack()
            except RuntimeError:
                time.sleep(BEAT_S)  # the main thread may be about to say more
                self._leave(self._without_store(), EXIT_STATUS, first=self.rank == 1)
            if reported is not None:
                message, status, forged = reported
                if not forged:
                    time.sleep(BEAT_S)  # let the reporting rank print first
                with contextlib.suppress(RuntimeError):
                    self._need_not_hear(self.rank)
                self._leave(message, status, first=forged)
            if dead is not None:  # a collective of NCCL does not notice it
                message = self._of_dead(dead)
                self._leave(message, EXIT_STATUS, first=self.claim_failure(message))
            for rank, beat in beats.items():
                if alive[rank].for_s(beat) > SILENCE_LIMIT_S:
                    with contextlib.suppress(RuntimeError):
                        self._need_not_hear(rank)
                    message = (
                        f"{self.describe(rank)} gave no sign of life for {SILENCE_LIMIT_S:.0f} s; "
                        "it has ended or hangs, or its node cannot be reached"
                    )
                    self._leave(message, EXIT_STATUS, first=self.claim_failure(message))
            if follows is not None and getting_on.for_s(everyone) > self._stall_limit_s:
                self._end_stall()
        faulthandler.cancel_dump_traceback_later()

    def _guard(self) -> None:
        """Leave where the store has not answered for as long as others wait for a sign of life.

        It counts its own rounds and not seconds: a process that was stopped for an hour, or held
        Python's lock, has not waited for the store.
        """
        seen, rounds = self._beats, 0
        while not self._stop.wait(BEAT_S):
            rounds = rounds + 1 if seen == self._beats else 0
            seen = self._beats
            if rounds:  # this thread runs, so nobody holds the lock
                faulthandler.cancel_dump_traceback_later()
            if rounds * BEAT_S > SILENCE_LIMIT_S:
                message = (
                    f"the store of the process group, in {self.describe(0)}, has not answered for "
                    f"{SILENCE_LIMIT_S:.0f} s; its process hangs, or its node or the network is down"
                )
                # nobody can be asked who speaks: the first of each node does, and beside rank 0 the next
                first = os.environ.get("LOCAL_RANK", "0") == "0" or self.rank == 1
                self._leave(message, EXIT_STATUS, first)

    def _end_stall(self) -> None:
        """The first rank to come collects where all stand, says it, and all leave."""
        if self._store.compare_set("stall", "", str(self.rank)) != str(self.rank).encode():
            return
        self._tell_stack()
        deadline = time.monotonic() + 4 * BEAT_S
        keys = [f"stack/{rank}" for rank in range(self.world_size)]
        while time.monotonic() < deadline and not self._store.check(keys):
            time.sleep(0.1)
        stacks = [
            f"--- {self.describe(rank)}: {_text(self._value(key) or b'no answer')}"
            for rank, key in enumerate(keys)
        ]
        message = (
            f"no rank has finished anything for {self._stall_limit_s:.0f} s (--stall-limit); all "
            "ranks end, the newest checkpoint is whole. Those that wait in communication wait for "
            f"one that does not:\n{''.join(stacks)}"
        )
        self._leave(message, EXIT_STATUS, first=self.claim_failure(message))

    def _tell_stack(self) -> None:
        main = threading.main_thread().ident
        frame = None if main is None else sys._current_frames().get(main)
        stack = "".join(traceback.format_stack(frame))
        self._store.set(f"stack/{self.rank}", f"{self._doing()}\n{stack}")

    def _leave(self, message: str, status: int, first: bool) -> None:
        if self._stop.is_set():
            return
        if first:
            # behind a progress bar, which ends in no newline
            self.tell(f"\nwye: error: {plain(message)}")
        self.linger()
        os._exit(status)

    def _reported(self) -> tuple[str, int, bool] | None:
        """(reason, exit status, whether it has this rank's name and is not from it: then this rank
        says it)."""
        found = self._value("failure")
        if found is None:
            return None
        claim = _text(found)
        rank, status, message = [*claim.split(" ", 2), "", ""][:3]
        if rank not in map(str, range(self.world_size)):
            rank = "0"
        forged = rank == str(self.rank) and claim not in self._claims
        if forged:
            message += f" (found in the store as from rank {rank}, which has not reported it)"
        return message, int(status) if status in FAILURES else EXIT_STATUS, forged

    def _dead_on_this_node(self) -> int | None:
        dead = [rank for rank, pid in self._here.items() if not _alive(pid)]
        self._need_not_hear(*dead)
        return dead[0] if dead else None

    def _value(self, key: str) -> bytes | None:
        """What stands in the store; None: nothing yet."""
        return self._store.get(key) if self._store.check([key]) else None


def watched_by(rank: int, places: Places) -> list[int]:
    """The ranks whose silence this one reports: the next on its node, and for the first of a node
    that of the next node. Rings, so each rank is watched."""
    beside, firsts = places.beside(rank), places.across(rank)
    rings = [beside, firsts] if rank == beside[0] else [beside]
    return [ring[(ring.index(rank) + 1) % len(ring)] for ring in rings if len(ring) > 1]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


class _Unchanged:
    """How long a value has been the same."""

    def __init__(self) -> None:
        self._value: object = None
        self._since = time.monotonic()

    def for_s(self, value: object) -> float:
        if value != self._value:
            self._value, self._since = value, time.monotonic()
        return time.monotonic() - self._since


def _alive(pid: int) -> bool:
    """Is there a process of this number that is not a zombie?"""
    stat = _stat(pid)
    return bool(stat) and stat[0] not in ("Z", "X")


def _wait_status(pid: int | None) -> int | None:
    """Of a process of this node that has ended, as `os.wait` has it. The system knows it until its
    parent has asked; None: not known here."""
    stat = _stat(pid) if pid else []
    return int(stat[EXIT_CODE]) if len(stat) > EXIT_CODE and stat[0] == "Z" else None


def _signal_in_words(number: int) -> str:
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    memory = number == signal.SIGKILL
    return f"{name} ended it{', as it does where the machine runs out of memory' if memory else ''}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rsplit(")", 1)[1].split()
    except OSError:
        return []
