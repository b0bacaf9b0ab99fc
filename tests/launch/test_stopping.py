"""What asks a run to end early, and what does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.stopping import SIGNALS, SOON_S, StopRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def handlers():
    """Those of the tests' own process, put back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_asks(number):
    stop = StopRequest()
    assert not stop
    signal.raise_signal(number)
    assert stop and stop.reason == number.name


def test_a_second_ctrl_c_ends_at_once_but_one_that_comes_twice_is_one():
    waiting = "from launch.stopping import StopRequest; import time; stop = StopRequest(); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", waiting], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(SOON_S / 4)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5 * SOON_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    finally:
        process.kill()


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
    age_s = time.time() - psutil.Process().create_time()
    assert not StopRequest(max_hours=(age_s + 60) / 3600)
    stop = StopRequest(max_hours=(age_s - 0.01) / 3600)
    assert stop and "--max-hours" in stop.reason
