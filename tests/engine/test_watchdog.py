"""What the watchdog says of a rank that is gone: what the system knows, and no more."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from engine.processes.start import free_port
from engine.processes.watchdog import Watchdog, _alive


@pytest.fixture
def watchdog(monkeypatch):
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    yield Watchdog(rank=1, world_size=2)
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
