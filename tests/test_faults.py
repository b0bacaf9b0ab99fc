"""What ends a run early, in real processes: each time one message, nobody left, and a checkpoint to
go on from."""

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
from functools import partial

import psutil
import pytest
from launched import (
    SMALL,
    command,
    end,
    finish,
    fork_flags,
    launch,
    launcher,
    metrics,
    ranks_of,
    reached,
    run_to_end,
    start,
    wait_for,
    write_pairs,
)

from launch.run.stopping import STOPPED


@pytest.fixture(scope="module")
def small(module_folder):
    """Towers, configuration and data of a fork on two ranks."""
    folder = module_folder("small")
    data = ["--data", write_pairs(folder, 320), "--max-text-tokens", 16]
    return [*SMALL, *fork_flags(folder), *data]


def _leased(file):
    with contextlib.suppress(OSError):  # open elsewhere just now
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return True


def test_a_rank_that_is_stuck_ends_all_and_says_where_each_stands(tmp_path, small):
    """The first rank writes to a file system that does not answer: whoever opens metrics.jsonl
    waits for the one who holds a lease of it."""
    length = ["--steps", 100_000, "--save-every", 2, "--eval-every", 100_000, "--workers", 0]
    run = start("train.py", *small, *length, "--stall-limit", 0.1, "--run-dir", tmp_path, ranks=2)
    wait_for(reached(tmp_path, 2), run)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # it asks to give the lease back
    try:
        with (tmp_path / "metrics.jsonl").open("r+") as held:
            wait_for(partial(_leased, held), run)
            status, output = finish(run)
    finally:
        signal.signal(signal.SIGIO, before)
    assert status == 1
    assert output.count("no rank has finished anything for 6 s (--stall-limit)") == 1, output[
        -5000:
    ]
    stacks = output.split("--- rank ")[1:]
    where = r"\(\w+ 0, replica 0\): (in \w+.*, in|before or after the instructions of) step \d+\n"
    assert re.match(f"0 {where}", stacks[0]) and "launch/run/folder.py" in stacks[0], output[-5000:]
    assert re.match(f"1 {where}", stacks[1]) and "distributed" in stacks[1], output[-5000:]
    assert (tmp_path / "checkpoints" / "latest").is_file()


@pytest.mark.all("waits for a limit of the store")
def test_a_rank_leaves_where_the_store_does_not_answer(tmp_path, small):
    """Calls to the store have no limit of their own: the rank that holds it is stopped, as by a
    debugger, and its node would not answer either where it is cut off (test_two_nodes.py)."""
    length = ["--steps", 100_000, "--save-every", 100_000, "--eval-every", 100_000, "--workers", 0]
    run = start("train.py", *small, *length, "--run-dir", tmp_path, ranks=2)
    wait_for(reached(tmp_path, 2), run)
    first, second = ranks_of(run)
    first.suspend()
    wait_for(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE, run)
    first.resume()
    status, output = finish(run)
    said = "the store of the process group, in rank 0 (image 0, replica 0), has not answered"
    assert status == 1 and said in output, output[-5000:]


@pytest.mark.all("starts the launcher")
def test_when_a_rank_dies_all_leave_one_says_why_and_a_supervised_run_goes_on(
    tmp_path, monkeypatch, small
):
    """From the newest checkpoint, to its end; and what a signal stops is not started again. The
    rank dies, and the signal comes, in the middle."""
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    (run_dir / "hold").touch()
    monkeypatch.setenv("HOLD_AFTER", "4")
    numbers = "--wandb offline --steps 12 --save-every 3 --eval-every 100 --workers 0"
    arguments = [*small, "--run-dir", run_dir, *numbers.split()]
    supervise = ["bash", "launch/supervise.sh", "--wait", 0, "--"]
    run = command(
        lambda port: [*supervise, *launcher(2, port, "tests/held_training.py"), *arguments]
    )
    try:
        wait_for(reached(run_dir, 4), run)
        # it is written in the background
        wait_for(lambda: (run_dir / "checkpoints" / "latest").is_file(), run)
        (first, victim), before = ranks_of(run), metrics(run_dir)[4]
        victim.kill()
        wait_for(lambda: "start 1 of 3" in run.said(), run)
        wait_for(lambda: not first.is_running(), run)
        # the second start has come as far
        wait_for(lambda: metrics(run_dir).get(4, before) != before, run)
        os.kill(run.pid, signal.SIGTERM)
        wait_for(lambda: (run_dir / "stop").is_file(), run)
        (run_dir / "hold").unlink()
        status, output = finish(run)
    finally:
        left = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
        end(run)  # first, or it would start again what ends
        for p in left:
            p.kill()
    assert status == STOPPED and "start 1 of 3 from checkpoint 'step-0000000" in output, output[
        -3000:
    ]
    assert output.count("error: rank 1 (text 0, replica 0) died without a message") == 1
    assert "Traceback" not in output
    assert "SIGTERM: the run saves and ends after its current step" in output
    stopped_at = max(metrics(run_dir))
    assert 4 < stopped_at < 12 and sorted(metrics(run_dir)) == list(range(1, stopped_at + 1))
    status, output = run_to_end("train.py", *arguments, ranks=2)
    assert status == 0 and len(metrics(run_dir)) == 12, output[-2000:]
    folders = (run_dir / "wandb").glob("offline-run-*")
    assert len({folder.name.rsplit("-", 1)[1] for folder in folders}) == 1  # one W&B run


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_when_a_stage_of_a_line_dies_the_ranks_that_wait_for_its_messages_leave(
    tmp_path, small, stage
):
    """With receives posted and sends on their way, on both sides of it."""
    config = json.loads(small[small.index("--deepspeed_config") + 1].read_text())
    config["branches"] |= {"layout": "merged", "stages": {"merged": 3}, "micro_batch_size": 4}
    config["branches"] |= {"schedule": "replay", "optimizer_groups": {}, "ema": None}
    (tmp_path / "line.json").write_text(json.dumps(config))
    length = ["--steps", 100_000, "--save-every", 100_000, "--eval-every", 100_000, "--workers", 0]
    flags = [*small, *length, "--deepspeed_config", tmp_path / "line.json"]
    run = start("train.py", *flags, "--run-dir", tmp_path / "run", ranks=3)
    wait_for(reached(tmp_path / "run", 3), run)
    ranks_of(run)[stage].kill()
    status, output = finish(run)
    assert status != 0
    named = f"error: rank {stage} (merged {stage}, replica 0)"
    assert output.count(named) == 1 and "Traceback" not in output, output[-3000:]
    # with rank 0 the store ends in which it may have left a message: either may be seen first
    ways = (" died without a message", *([", which holds the store"] if stage == 0 else []))
    said = output.partition(named)[2]
    assert said.startswith(ways), output[-3000:]
    assert "memory" not in said or "SIGKILL ended it" in said, output[-3000:]


@pytest.mark.all("starts the launcher")
def test_ctrl_c_in_a_terminal_saves_before_the_launcher_ends_the_ranks(tmp_path, small):
    """The launcher answers it by SIGTERM to every process, those that load included."""
    length = ["--steps", 100_000, "--save-every", 100_000, "--eval-every", 100_000, "--workers", 2]
    run = launch(2, *small, *length, "--run-dir", tmp_path)
    wait_for(reached(tmp_path, 2), run)
    os.killpg(run.pid, signal.SIGINT)
    _, output = finish(run)
    assert "stopped (SIG" in output and "error:" not in output, output[-3000:]
    # the launcher shows the whole command, as SECURITY.md warns
    assert re.search(rf" cmd = .* --max-text-tokens 16 .* --run-dir {tmp_path}", output)
    step = max(metrics(tmp_path))
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step-{step:08}"


@pytest.mark.all("starts a shell's pipe")
def test_a_pipe_that_nobody_reads_any_more_ends_no_run(tmp_path, small):
    """As `| tee log` at Ctrl-C. The progress and the table at the end are said to nobody."""
    config = json.loads(small[small.index("--deepspeed_config") + 1].read_text())
    config["branches"] |= {"layout": "merged", "stages": {"merged": 1}}
    (tmp_path / "merged.json").write_text(json.dumps(config))
    run_dir, read = tmp_path / "run", tmp_path / "read"
    piped = ["bash", "-c", 'set -o pipefail; "$@" 2>&1 | head -n 2 > "$0"', read]
    flags = [*small, "--deepspeed_config", tmp_path / "merged.json", "--steps", 6, "--workers", 0]
    trained = [sys.executable, "train.py", *flags, "--run-dir", run_dir]
    status, output = finish(command(lambda port: [*piped, *trained]))
    assert status == 0 and output == "" and len(read.read_text().splitlines()) == 2, output
    assert len(metrics(run_dir)) == 6 and (run_dir / "done").is_file()
    assert not list(run_dir.glob("error-*"))


def test_memory_that_runs_out_is_one_message_with_what_to_change(tmp_path):
    """The image rank may map 1.5 GB more than it has once it is built: its first convolution alone
    makes 1.7 GB of 256 images, and what comes before, threads that start included, half of one."""
    (folder := tmp_path / "config").mkdir()
    flags = fork_flags(folder)
    config = json.loads(flags[1].read_text()) | {"train_batch_size": 256}
    flags[1].write_text(json.dumps(config))
    sizes = "--image-size 320 --val-fraction 0.1 --max-text-tokens 16"
    large = [*SMALL, *flags, *sizes.split(), "--data", write_pairs(tmp_path, 320)]
    run_dir = tmp_path / "run"
    run = start("train.py", *large, "--steps", 2, "--workers", 0, "--run-dir", run_dir, ranks=2)
    wait_for((run_dir / "config.json").is_file, run)
    image = ranks_of(run)[0]
    limit = image.memory_info().vms + 1_500_000_000
    image.rlimit(psutil.RLIMIT_AS, (limit, limit))
    status, output = finish(run)
    assert status == 2, output[-3000:]  # in its first step: another start would end the same way
    assert output.count("error:") == 1 and "Traceback" not in output, output[-5000:]
    said = output.split("train.py: error: ")[1].splitlines()
    words = "ran out of memory in ForwardPass of micro-batch 0 (of 1, counted from 0), in step 1"
    assert said[0] == f"rank 0 (image 0, replica 0) {words}"
    assert "tried to allocate 1677721600 bytes" in said[1] and "(ulimit -v)" in said[2]
    assert said[3].startswith("predicted for a training step of image 0: at most ")
    assert "estimated" in said[3]
    assert said[5].startswith(
        '  "branches": {"schedule": "replay"} and a smaller "micro_batch_size"'
    )
    assert f"(traceback: {run_dir / 'error-rank0.txt'})" in output
    kept = (run_dir / "error-rank0.txt").read_text()
    for words in ("DefaultCPUAllocator: can't allocate memory", "_forward_pass", said[0]):
        assert words in kept
    assert not (run_dir / "error-rank1.txt").exists() and not (run_dir / "done").exists()
