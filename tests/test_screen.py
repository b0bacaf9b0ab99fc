"""What is on the screen of a person who starts train.py with DeepSpeed's launcher in a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pytest
from forked_script import ROOT
from launched import BATCH, LIMIT_S, SMALL, environment, fork_flags, launcher, metrics, write_pairs

pytestmark = pytest.mark.slow


def on_screen(*arguments):
    """(exit status, all that was written) of train.py on two ranks in a terminal of 150 columns."""
    env = environment()
    ours, theirs = pty.openpty()
    # rows and columns; termios.tcsetwinsize is of Python 3.11
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150, 0, 0))
    process = subprocess.Popen(
        [*launcher(2, env["MASTER_PORT"]), *map(str, arguments)],
        cwd=ROOT,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said, deadline = b"", time.monotonic() + LIMIT_S
    try:
        while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            said += os.read(ours, 65536)
    except OSError:  # all that hold the terminal have ended
        pass
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not done after {LIMIT_S} s:\n{said[-3000:]}")
    finally:
        os.close(ours)
    return process.wait(), said.decode(errors="replace")


def lines_of(said):
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", said)  # without colours and movements
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.all("starts the launcher")
def test_a_wrong_flag_is_the_last_thing_on_the_screen():
    status, said = on_screen("--epoch", "many")
    assert status == 2 and "exits with return code = 2" in said
    last = lines_of(said)[-1]
    assert last.startswith("train.py: error: argument --epochs: ") and "many" in last


def test_a_failure_in_a_step_is_the_last_thing_on_the_screen_behind_plan_and_bar(tmp_path):
    """At a learning rate of 1e30 the first step is taken, the others are not finite and change
    nothing; the third of them ends the run, which names the last good checkpoint."""
    file = fork_flags(tmp_path)[1]
    config = json.loads(file.read_text())
    config["optimizer"]["params"]["lr"] = 1e30
    config["branches"] |= {"optimizer_groups": {}, "gradient_clipping": {}, "max_bad_steps": 3}
    del config["scheduler"]
    file.write_text(json.dumps(config))
    data = ["--data", write_pairs(tmp_path / "pairs", 96), "--val-fraction", 0, "--workers", 0]
    run_dir = tmp_path / "run"
    how = ["--deepspeed_config", file, "--run-dir", run_dir, "--max-text-tokens", 16]
    status, said = on_screen(*SMALL, *how, *data, "--epochs", 50, "--save-every", 1)
    assert status == 2, said[-3000:]
    lines = lines_of(said)
    errors = [i for i, line in enumerate(lines) if line.startswith("train.py: error: 3 steps in")]
    launcher_ends = max(i for i, line in enumerate(lines) if "exits with return code" in line)
    assert len(errors) == 2 and errors[0] < launcher_ends < errors[1], lines[-30:]
    assert lines[-1].startswith("(traceback: ") and "Traceback" not in said
    plan = [i for i, line in enumerate(lines) if "plan: fork: image 0 ×1 | text 0 ×1" in line]
    bar = [i for i, line in enumerate(lines) if re.search(r"training: .*\d+/\d+.*loss=", line)]
    # the other rank may report while the first one still closes its bar
    assert plan and bar and plan[0] < min(bar[0], errors[0]) and bar[0] < errors[1], lines
    assert "No CUDA runtime" not in said

    bad = [json.loads(line) for line in (run_dir / "bad_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in bad] == [2, 3, 4]
    assert {len(line["samples"]) for line in bad} == {BATCH}
    assert bad[0]["loss"] is None and set(bad[0]["not_finite"]["image"]) <= set(bad[0]["samples"])
    assert [line["skipped_steps"] for line in metrics(run_dir).values()] == [0, 1, 2, 3]
    assert (run_dir / "checkpoints" / "step-00000003").is_dir()
    assert "step-00000003." in "".join(lines[errors[1] :])
