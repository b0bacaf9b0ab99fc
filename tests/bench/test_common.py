"""The harness: ways in turn, ratios within a round, a table that is there after each measurement,
and programs that are ended with all that they started."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from bench.common import Column, Program, Study, Way, call, chosen, compare, kill_all, main

COLUMNS = (
    Column("s", "ms", "{:.0f}", 1e3),
    Column("s", "speed", inverse=True),
    Column("held", "most", "{:.0f}", pick=max),
    Column("held", "÷ slow"),
)


def study(**given) -> Study:
    return Study("A study", columns=COLUMNS, reference="slow", **given)


def turns(seconds, held, loss=1.0):
    values = iter(seconds)
    return lambda: {"s": next(values), "held": held, "loss": loss}


def test_a_ratio_is_taken_within_a_round(tmp_path):
    """The machine is twice as slow in the second round, and the ratio is the same."""
    ways = {
        "slow": Way(turns([0.4, 0.8, 0.4], [4.0, 8.0])),
        "fast": Way(turns([0.2, 0.4, 0.1], [2.0, 2.0]), once=lambda: {"held": [1.0, 2.0]}),
        "alone": Way(lambda: {"s": 1.0}, exact=False),
    }
    seen = compare(study(ways=ways, equal=("loss", 1e-6)), tmp_path / "out" / "a.md", 3)
    rows = (tmp_path / "out" / "a.md").read_text().splitlines()
    assert seen.median("fast", "s") == 0.2
    assert "| slow | 400 (400 – 800) | 1.00 | 8 | 1.00 / 1.00 |" in rows
    assert "| fast | 200 (100 – 400) | 2.00 (2.00 – 4.00) | 2 | 0.50 / 0.25 |" in rows
    assert "| alone (another objective) | 1000 | 0.40 (0.40 – 0.80) | – | – |" in rows


def test_what_was_measured_is_kept_when_a_way_fails(tmp_path):
    ways = {"slow": Way(turns([0.4], [1.0])), "broken": Way(lambda: 1 / 0)}
    with pytest.raises(ZeroDivisionError):
        compare(study(ways=ways), tmp_path / "a.md", 3)
    assert "| slow | 400 |" in (tmp_path / "a.md").read_text()


def test_what_is_there_is_not_measured_again_and_the_rest_is(tmp_path):
    file, seconds = tmp_path / "a.md", iter([0.2, 0.3, 0.1])
    ways = {"slow": Way(turns([0.4, 0.8], [1.0])), "fast": Way(lambda: {"s": next(seconds)})}
    compare(study(ways=ways), file, 1, flags={"steps": 2})
    with pytest.raises(SystemExit, match="other flags: {'steps': 2}"):
        compare(study(ways=ways), file, 2, resume=True)
    seen = compare(study(ways=ways), file, 2, resume=True, flags={"steps": 2})
    assert seen.values("slow", "s") == [0.4, 0.8] and seen.values("fast", "s") == [0.2, 0.3]
    assert json.loads((tmp_path / "a.json").read_text())["rounds"] == seen.rounds
    ways["slow"] = Way(turns([0.5], [1.0]))
    assert compare(study(ways=ways), file, 1).values("fast", "s") == [0.1]


def test_seeds_are_given_to_the_ways_and_cells_have_their_mean(tmp_path):
    ways = {"slow": Way(lambda seed: {"s": 0.1 * (1 + seed**2)})}
    compare(study(ways=ways, seeds=True), tmp_path / "a.md", 3)
    text = (tmp_path / "a.md").read_text()
    assert "Seeds: 3; mean (least – most)." in text and "| slow | 267 (100 – 500) |" in text


def test_ways_that_must_end_alike_do(tmp_path):
    ways = {"slow": Way(turns([1], [1.0], 2.0)), "fast": Way(turns([1], [1.0], 2.1))}
    with pytest.raises(SystemExit, match="loss"):
        compare(study(ways=ways, equal=("loss", 1e-3)), tmp_path / "a.md", 1)


def test_only_takes_a_name_or_all_that_hold_a_word_and_what_they_are_compared_with():
    ways = dict.fromkeys(("slow", "ddp", "ddp_cached", "fork-a"), Way(dict))
    ways["fork-b"] = Way(dict, against="fork-a")
    for words, names in (
        (["slow"], ["slow"]),
        (["ddp"], ["slow", "ddp"]),
        (["cached", "fork"], ["slow", "ddp_cached", "fork-a", "fork-b"]),
        (["fork-b"], ["fork-a", "fork-b"]),
        (["x"], []),
    ):
        assert list(chosen(study(ways=ways), words).ways) == names


@pytest.mark.parametrize(
    "given, named",
    [
        ("strategies --ranks 3 --global-batch 64", "multiple"),
        ("memory --points 8 0", "--points"),
        ("split --rounds 0", "--rounds"),
        ("split --only forks", "fork"),
        ("split --points 8", "--points"),
    ],
)
def test_a_wrong_command_is_one_error(monkeypatch, capsys, given, named):
    monkeypatch.setattr("sys.argv", ["bench/steps.py", *given.split()])
    with pytest.raises(SystemExit) as ended:
        main("bench.steps")
    assert ended.value.code == 2 and named in capsys.readouterr().err.splitlines()[-1]


# -- programs


def test_the_memory_of_each_rank_is_found_below_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.common.SAMPLED_EVERY_S", 0.05)
    rank = "import time; held = bytearray({} << 20); time.sleep(2)"
    launcher = (
        "import os, subprocess, sys\n"
        f"ranks = [subprocess.Popen([sys.executable, '-c', {rank!r}.format(60 * (rank + 1))], "
        "env=os.environ | {'RANK': str(rank)}) for rank in range(2)]\n"
        "sys.exit(sum(process.wait() for process in ranks))"
    )
    first, second = call([sys.executable, "-c", launcher], tmp_path / "log", "test", 2)
    assert 60 << 20 < first < 120 << 20 < second < 180 << 20


def test_a_failed_run_ends_the_program_with_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
    with pytest.raises(SystemExit, match="OpenCLIP, seed 3 (?s:.*)no such thing"):
        call(command, tmp_path / "log", "OpenCLIP, seed 3")


def test_no_rank_outlives_its_launcher():
    rank = "import time; time.sleep(60)"
    launcher = (
        "import subprocess, sys\n"
        f"process = subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)\n"
        "print(process.pid, flush=True)\n"
        "process.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    rank = psutil.Process(int(process.stdout.readline()))
    kill_all(process)
    process.stdout.close()
    _, left = psutil.wait_procs([rank], timeout=10)
    # a zombie: of a machine whose first process does not wait for orphans
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in left)


@pytest.mark.parametrize("waits, limit_s, status", [(True, 1.0, None), (False, 60.0, 0)])
def test_a_program_is_ended_at_its_limit_and_leaves_nothing(tmp_path, waits, limit_s, status):
    """Also where it has ended by itself: what it left in its session."""
    left = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    launcher = (
        "import subprocess, sys, time\n"
        f"left = subprocess.Popen([sys.executable, '-c', {left!r}], stdout=subprocess.PIPE)\n"
        "print(left.stdout.readline().decode(), end='', flush=True)\n"
        f"{'left.wait()' if waits else ''}\n"
    )
    program = Program([sys.executable, "-c", launcher], tmp_path / "log")
    while not program.said().endswith("\n"):
        time.sleep(0.05)
    child = psutil.Process(int(program.last_words()))
    assert program.end(limit_s) == status
    _, alive = psutil.wait_procs([child], timeout=10)
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in alive)
