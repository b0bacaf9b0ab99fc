"""What the watchdog says of a rank that is gone: what the system knows, and no more."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from engine.processes import watchdog as watchdog_module
from engine.processes.places import Places
from engine.processes.start import free_port
from engine.processes.watchdog import Watchdog, _alive, watched_by

HERE = replace(Places.together(2), pids=(os.getpid(), os.getpid()))


@pytest.fixture
def watchdog(monkeypatch):
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    yield Watchdog(rank=1, places=HERE, secret="known to the ranks")
    del store


def ended(code):
    """A process that has run `code` and ended, and of which nobody has asked how."""
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    while _alive(process.pid):
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL ended it, as it does where the machine"),
        ("import os; os.kill(os.getpid(), 15)", "SIGTERM ended it"),
        ("raise SystemExit(3)", "it ended with status 3"),
    ],
)
def test_a_rank_that_is_gone_ended_as_the_system_says(watchdog, code, words):
    process = ended(code)
    watchdog._here[0] = process.pid
    said = watchdog._of_dead(0)
    assert said.startswith("rank 0 died without a message; ") and words in said
    assert ("memory" in said) == ("SIGKILL" in words)
    # beside rank 0 its store is gone: it has left a message, unless a signal ended it
    assert watchdog._without_store() == said or "status" in words
    process.wait()
    assert "launcher may say" in watchdog._of_dead(0)
    assert "if it said why, that stands above" in watchdog._without_store()
    assert _alive(os.getpid()) and not _alive(process.pid)


def test_where_the_store_is_gone_no_cause_is_made_up(watchdog, monkeypatch):
    """Rank 0 said why it ended, and the store with that went with it."""

    def gone(keys):
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(watchdog, "_store", type("Gone", (), {"check": staticmethod(gone)}))
    words, status = watchdog.cause_elsewhere(0.0)
    assert status is None and "rank 0, which holds the store" in words
    assert "memory" not in words and "killed" not in words


def test_a_reason_that_no_rank_reported_is_said_and_has_a_status_of_ours(watchdog, monkeypatch):
    """Rank 1 says what has its name, though it reported nothing; rank 0 the rest."""
    monkeypatch.setattr(watchdog_module, "BEAT_S", 0.01)
    left, heard = [], []
    monkeypatch.setattr(os, "_exit", lambda code: left.append(code) or watchdog._stop.set())
    watchdog.tell = heard.append
    for claim, status, said in (
        (b"0 0 all is well", 1, None),
        (b"0 2 no such file", 2, None),
        (b"1 75 go\x1b[2J on", 1, "go\\x1b[2J on (found in the store as from rank 1"),
        (b"1 2 wrong", 2, "wrong (found in the store as from rank 1"),
        (b"7 1 a rank that there is not", 1, None),  # rank 0 says it
        (b"", 1, None),
        (b"1", 1, "found in the store as from rank 1"),
        (b"1 " + b"9" * 5000 + b" \xff\xfe", 1, "\ufffd\ufffd (found"),
    ):
        for found in (left, heard):
            found.clear()
        watchdog._stop.clear()
        watchdog._store.set("failure", claim)
        watchdog._watch()
        assert left == [status], claim
        assert len(heard) == (said is not None) and all(said in one for one in heard), claim
        assert watchdog.cause_elsewhere(0.0)[1] == status, claim


def test_who_is_silent_where_a_connection_is_lost_is_named(watchdog, monkeypatch):
    """Ranks 0 and 1 go on beating, and 2 does not. Rank 0 waits for no rank that is gone."""
    monkeypatch.setattr(watchdog_module, "BEAT_S", 0.05)
    watchdog.world_size, first = 3, Watchdog(rank=0, places=HERE, secret="known to the ranks")
    first.world_size = 3
    for rank in range(3):
        watchdog._store.set(f"beat/{rank}", "1")
    ended = threading.Event()

    def beat():
        while not ended.wait(0.01):
            first._store.add("beat/0", 1)

    with ThreadPoolExecutor() as threads:
        beating = threads.submit(beat)
        try:
            words, status = watchdog.cause_elsewhere(30.0)
        finally:
            ended.set()
        beating.result()
    assert status is None and "and rank 2 gave no sign of life" in words
    monkeypatch.setattr(watchdog_module, "BEAT_S", 60.0)
    with ThreadPoolExecutor() as threads:
        lingering = threads.submit(first.linger)
        with pytest.raises(TimeoutError):
            lingering.result(timeout=0.3)
        assert watchdog.claim_failure(words)
        lingering.result(timeout=30)


def test_ranks_that_stand_while_they_connect_end_with_a_message(watchdog, monkeypatch):
    """And not between: there the first rank may read for hours. A beat is a second here."""
    alone = Watchdog(0, replace(Places.together(1), pids=(os.getpid(),)), "alone")
    monkeypatch.setattr(watchdog_module, "BEAT_S", 0.01)
    monkeypatch.setattr(watchdog_module, "SILENCE_LIMIT_S", 1e9)
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: float(alone._beats))
    left, heard = [], []
    monkeypatch.setattr(os, "_exit", lambda code: left.append(code) or alone._stop.set())
    alone.tell = heard.append

    def wait(beats):
        last = alone._beats + beats
        while alone._beats < last and not alone._stop.is_set():
            time.sleep(0.001)

    alone.start()
    for _ in range(3):
        with alone.limited(30.0, "connects"):
            wait(5)
        wait(60)
    assert not left
    with alone.limited(30.0, "connects with other ranks"):
        wait(10_000)
    alone.stop()
    assert left == [1] and "no rank has finished anything for 30 s" in heard[0]
    assert "connects with other ranks" in heard[0] and "in wait" in heard[0]  # and where it stands


def test_a_rank_says_its_own_failure_once(watchdog):
    assert watchdog.claim_failure("mine", 2)
    assert not watchdog.claim_failure("another", 1)
    assert watchdog._reported() == ("mine", 2, False)


def test_each_rank_is_watched_by_its_node_or_the_one_before():
    """Three nodes, whose ranks are not in one piece."""
    places = replace(Places.together(7), nodes=(0, 1, 0, 0, 2, 2, 1))
    watched = [watched_by(rank, places) for rank in range(7)]
    assert watched == [[2, 1], [6, 4], [3], [0], [5, 0], [4], [1]]
    assert watched_by(0, Places.together(1)) == []


def test_start_and_beats_take_few_calls_in_a_large_world(watchdog, monkeypatch):
    """Ranks that each asked the store for all places made 2 million calls in a world of 1,000, and
    had 40 s for them."""
    monkeypatch.setattr(watchdog_module, "BEAT_S", 0.01)
    own = os.getpid()
    places = Places(*(tuple(rank // 8 for rank in range(1024)),) * 3, pids=(own,) * 1024)
    large, calls = Watchdog(rank=0, places=places, secret="large"), Counter()
    monkeypatch.setattr(large, "_store", Counted(large._store, calls))
    large.start()
    while large._beats < 21:
        time.sleep(0.01)
    large.stop()
    assert large._beats * 4 <= calls.total() <= large._beats * 8


class Counted:
    """A store, and the calls of it."""

    def __init__(self, store, calls):
        self._store, self._calls = store, calls

    def __getattr__(self, name):
        self._calls[name] += 1
        return getattr(self._store, name)


def test_only_who_knows_the_secret_finds_the_keys(watchdog):
    """Of the run; each has its own, so that a reason of an earlier one in the same store is not
    taken for one of now."""
    another = Watchdog(rank=0, places=HERE, secret="another")
    assert watchdog.claim_failure("mine") and another._reported() is None
