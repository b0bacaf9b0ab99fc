"""What ends a run early, in real processes: each time one message, nobody left, and a checkpoint to go on from."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from test_train import LIMIT_S, ROOT, SMALL, environment, finish, fork, launch, metrics, ranks_of, reached, wait_for  # noqa: F401


def test_a_rank_that_is_stuck_ends_all_and_says_where_each_stands(tmp_path, fork):  # noqa: F811
    """The first rank writes to a file system that does not answer: metrics.jsonl turns into a pipe that nobody reads."""
    process = launch(
        2, *SMALL, *fork, "--steps", 1000, "--save-every", 2, "--eval-every", 1000, "--stall-limit", 0.1, "--run-dir", tmp_path
    )
    wait_for(reached(tmp_path, 2), process)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").replace(tmp_path / "metrics.jsonl")
    stuck = time.monotonic()
    status, output = finish(process, limit_s=90)
    assert status == 1 and time.monotonic() - stuck < 60
    assert output.count("has finished nothing for 6 s (--stall-limit)") == 1, output[-5000:]
    stacks = output.split("--- rank ")[1:]
    assert stacks[0].startswith("0 (image 0, replica 0):") and "launch/run_folder.py" in stacks[0], output[-5000:]
    assert stacks[1].startswith("1 (text 0, replica 0):") and "distributed" in stacks[1], output[-5000:]
    assert (tmp_path / "checkpoints" / "latest").is_file()


def test_a_supervised_run_goes_on_after_a_rank_was_killed(tmp_path, fork):  # noqa: F811
    """From the newest checkpoint, to its end; and what a signal stops is not started again."""
    run_dir, env = tmp_path / "a run", environment()
    command = [
        *("bash", "launch/supervise.sh", "--wait", "0", "--", str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2"),
        *("--master_port", env["MASTER_PORT"], "train.py", *SMALL, *map(str, fork), "--run-dir", str(run_dir), "--wandb", "offline"),
        *("--steps", "8", "--save-every", "2", "--eval-every", "100", "--workers", "1"),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        wait_for(reached(run_dir, 3), process)
        ranks_of(process)[-1].kill()
        wait_for(reached(run_dir, 5), process, LIMIT_S)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 75 and "start 1 of 3 from checkpoint 'step-0000000" in output, output[-3000:]
        assert "SIGTERM: the run saves and ends after its current step" in output
        stopped_at = max(metrics(run_dir))
        assert stopped_at < 8 and sorted(metrics(run_dir)) == list(range(1, stopped_at + 1))
        done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
        assert done.returncode == 0 and len(metrics(run_dir)) == 8, done.stderr[-2000:]
        assert len({folder.name.rsplit("-", 1)[1] for folder in (run_dir / "wandb").glob("offline-run-*")}) == 1  # one W&B run
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()  # first, or it would start again what ends
        for p in left:
            p.kill()


def test_ctrl_c_in_a_terminal_saves_before_the_launcher_ends_the_ranks(tmp_path, fork):  # noqa: F811
    """The launcher answers it by SIGTERM to every process, those that load included."""
    process = launch(2, *SMALL, *fork, "--steps", 1000, "--save-every", 1000, "--eval-every", 1000, "--workers", 2, "--run-dir", tmp_path)
    wait_for(reached(tmp_path, 2), process)
    os.killpg(process.pid, signal.SIGINT)
    _, output = finish(process, limit_s=60)
    assert "stopped (SIG" in output and "error:" not in output, output[-3000:]
    step = max(metrics(tmp_path))
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step-{step:08}"
