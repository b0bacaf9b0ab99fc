"""What a run says in a terminal and in a log file: its first screen, its bar, and what libraries
would add."""

import contextlib
import io
import logging
import os
import pty
import subprocess
import sys
import warnings
from pathlib import Path

from cost_models import BRANCHES, proportional

from common.sizes import GIB, sized
from data.progress import progress_bar
from engine.config.reading import check_config
from engine.planning.planner import plan_run
from launch.setup.first_screen import _predicted, _why, folder_to_watch, print_screen
from launch.terminal import last_words
from launch.terminal.bar import Progress
from launch.terminal.last_words import MOST_LINES, say_last, shortened
from launch.terminal.quiet import UNNEEDED, VERBOSE, quiet_libraries, quiet_ranks
from launch.terminal.tables import duration

SCREEN = [("data", "demo: 12 samples"), ("why", "auto: two ways\n  " + "a long reason " * 12)]


def test_durations():
    for seconds, words in (
        *((0.0123, "12.3 ms"), (12.34, "12.3 s"), (59.999, "60 s"), (60, "1 min")),
        *((250, "4 min 10 s"), (3600 * 5 + 60 * 20, "5 h 20 min")),
        *((86400, "1 day"), (86400 * 3 + 3600 * 4, "3 days 4 h")),
    ):
        assert duration(seconds) == words


def plan_of(layout):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    written = {"train_batch_size": 48, "optimizer": optimizer, "branches": {"layout": layout}}
    costs = proportional({"image": [3.0] * 4, "text": [1.0] * 4})
    return plan_run(*check_config(written, BRANCHES), 4, costs)


def test_the_reason_of_a_plan_and_what_is_predicted_of_the_run(tmp_path):
    plan, file = plan_of("fork"), tmp_path / "mine.json"
    assert _why(plan, file) == "mine.json gives the layout"
    first, *others = _why(plan_of("auto"), file).splitlines()
    assert first.startswith("auto: ") and "ways compared" in first
    assert 1 <= len(others) <= 3 and all("× the time" in line for line in others)
    step_s = plan.predicted_step_s
    assert step_s >= max(stage.busy_s for stage in plan.predicted) > 0
    said = _predicted(plan, 1000)
    assert f"{duration(step_s)} a step, {duration(1000 * step_s)} for 1,000 steps" in said
    peak = max(stage.peak_bytes for stage in plan.predicted)
    assert 0 < peak < GIB and f"at most {sized(peak)} a rank (" in said


def test_in_a_log_file_each_fact_is_one_line_and_in_a_terminal_it_is_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    print_screen([*SCREEN, ("note", "resnet18: one layer"), ("note", "resnet18: one layer")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["     data: demo: 12 samples", "      why: auto: two ways"]
    assert lines[2].strip() == ("a long reason " * 12).strip()
    # what two branches have in common is said once
    assert lines[3:] == ["     note: resnet18: one layer"]
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_screen(SCREEN)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) > 4 and all(len(line) <= 70 for line in lines)
    assert all(line.startswith(" " * 11) for line in lines[2:])  # under their text
    folder, said = folder_to_watch(Path("runs/a run")).splitlines()
    assert folder == "runs/a run" and "open runs/a run/report.html" in said


def test_what_all_ranks_find_is_said_by_the_first(caplog, monkeypatch):
    monkeypatch.delenv(VERBOSE, raising=False)
    of_models, weights = logging.getLogger("models"), logging.getLogger("models.weights.reading")
    for rank in (0, 1):
        quiet_ranks(rank)
        weights.warning("interpolated on rank %d", rank)
        weights.error("broken on rank %d", rank)
    of_models.setLevel(logging.NOTSET)
    assert caplog.messages == ["interpolated on rank 0", "broken on rank 0", "broken on rank 1"]


def step_line(**values):
    return {"loss": 1.25, "samples_per_s": 80.0, "step_s": 1.0} | values


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_names_the_stage_that_is_waited_for(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(0, 10, True) as bar:
        bar.step(step_line(**{"idle/image 0": 0.1, "idle/text 0": 0.6}))
        assert "waits_for=image 0" in bar.postfix and "loss=1.250" in bar.postfix
        for _ in range(40):  # one odd step changes nothing; that texts take longer for long, does
            bar.step(step_line(**{"idle/image 0": 0.6, "idle/text 0": 0.1}))
            if bar.n == 2:
                assert "waits_for=image 0" in bar.postfix
        assert "waits_for=text 0" in bar.postfix
        for _ in range(40):
            bar.step(step_line(**{"idle/image 0": 0.3, "idle/text 0": 0.31}))
        assert "waits_for" not in bar.postfix
        for _ in range(40):
            bar.step(step_line(**{"idle/image 0": 0.3, "data_wait_s/image 0": 0.4}))
        assert "waits_for=data of image 0" in bar.postfix


def test_warnings_come_above_the_bar_and_are_put_back_behind_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    before = warnings.showwarning
    with Progress(0, 10, True) as bar:
        bar.refresh()
        warnings.warn("the disk is nearly full", stacklevel=1)
        lines = screen.getvalue().splitlines()  # also where the bar is written anew
        (line,) = [line for line in lines if "UserWarning: the disk is nearly full" in line]
        assert "training" not in line
    assert warnings.showwarning is before


def test_a_log_file_has_a_line_for_each_update_and_nothing_for_what_is_quick(monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with Progress(0, 3, True) as bar:
        for _ in range(3):
            bar.step(step_line())
    lines = [line for line in file.getvalue().split("\n") if line]
    assert "\r" not in file.getvalue() and "3/3" in lines[-1]
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    assert list(progress_bar(range(5), "counting", "sample")) == list(range(5))
    assert file.getvalue() == ""


def test_only_messages_that_say_nothing_are_left_out(monkeypatch):
    monkeypatch.delenv(VERBOSE, raising=False)
    logger = logging.getLogger("torch.utils.cpp_extension")
    filters = list(logger.filters)
    try:
        quiet_libraries()
        passes = [
            logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, said, (), None))
            for said in (f"{UNNEEDED}, using CUDA_HOME", "the compiler was not found")
        ]
        assert [bool(each) for each in passes] == [False, True]
        del logger.filters[len(filters) :]
        monkeypatch.setenv(VERBOSE, "1")
        quiet_libraries()
        assert logger.filters == filters
    finally:
        logger.filters[:] = filters


def test_without_a_terminal_a_message_stands_once_and_a_long_one_is_shortened(capfd, monkeypatch):
    assert shortened("one\ntwo") == "one\ntwo"
    long = shortened("\n".join(map(str, range(100))))
    assert len(long.splitlines()) == MOST_LINES and long.endswith("99")
    monkeypatch.setattr(last_words, "is_launcher", lambda process: True)
    say_last("train.py: error: no such file")
    assert capfd.readouterr().err.count("no such file") == 1


# In place of the launcher: it kills all descendants of a rank that has failed, waits for them, and
# then has the last word. The argument makes its command line that of DeepSpeed's.
KILLS = """
import psutil, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
rank.wait()
for process in psutil.Process().children(recursive=True):
    process.terminate(); process.wait()
print("launcher: exits with return code = 2")
"""
FAILS = """
import sys
from launch.terminal.last_words import say_last
say_last("train.py: error: no such file")
sys.exit(2)
"""


def test_behind_the_launchers_words_the_message_comes_again():
    ours, theirs = pty.openpty()
    call = [sys.executable, "-c", KILLS, "deepspeed.launcher.launch", FAILS]
    process = subprocess.Popen(call, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # all that hold the terminal have ended
        while piece := os.read(ours, 4096):
            said += piece
    assert process.wait() == 0
    lines = [line for line in said.decode().replace("\r", "").splitlines() if line]
    error, launcher = "train.py: error: no such file", "launcher: exits with return code = 2"
    assert lines == [error, launcher, error]
