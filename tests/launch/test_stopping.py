"""What asks a run to end early, and what does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.run.stopping import SIGNALS, StopRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def handlers():
    """Those of the tests' own process, put back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_asks():
    for number in SIGNALS:
        stop = StopRequest()
        assert not stop
        signal.raise_signal(number)
        assert stop and stop.reason == number.name


def test_a_second_ctrl_c_ends_at_once_but_one_that_comes_twice_is_one():
    """In a process of its own, which sets the clock that tells one from the other."""
    script = """
import signal
from launch.run.stopping import SOON_S, StopRequest

now_s = 1000.0
stop = StopRequest(clock=lambda: now_s)
for share in (0.0, 0.5, 0.99, 1.01):
    now_s = 1000.0 + share * SOON_S
    signal.raise_signal(signal.SIGINT)
    print(share, stop.reason, flush=True)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 130, result.stderr
    assert result.stdout.splitlines() == ["0.0 SIGINT", "0.5 SIGINT", "0.99 SIGINT"]


def test_a_file_asks_unless_it_is_left_from_a_run_before(tmp_path):
    stop, file = StopRequest(), tmp_path / "stop"
    stop.watch(file)
    assert not stop
    file.touch()
    started = psutil.Process().create_time()
    os.utime(file, (started - 5, started - 5))
    assert not stop
    os.utime(file, (started + 1, started + 1))  # while this process was importing
    assert stop and stop.reason == str(file)
    stop.forget()
    assert not file.exists() and stop


def test_hours_are_counted_from_the_start_of_the_process():
    now_s, created_s = 1000.0, psutil.Process().create_time()
    least_age_s = time.time() - created_s
    stop = StopRequest(max_hours=2, clock=lambda: now_s)
    most_age_s = time.time() - created_s
    now_s = 1000.0 + 2 * 3600 - most_age_s - 0.1
    assert not stop
    now_s = 1000.0 + 2 * 3600 - least_age_s + 0.1
    assert stop and stop.reason == "--max-hours 2"
