"""launch/supervise.sh, with small commands in the place of a launcher: what is started again, and
what is not."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.run.elastic import ElasticCommand, Limits
from launch.run.hosts import Host, Pool, read_hostfile
from launch.run.supervise import Progress, Supervisor

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "supervise.sh"
LIMIT_S = 120  # ends what hangs
STOP = 'until [ -e "$RUN/stop" ]; do sleep 0.05; done'  # for a command


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "a run"
    (folder / "checkpoints").mkdir(parents=True)
    return folder


def supervise(run_dir, command, *options, **environment):
    """Start it over a bash command, which sees the folder as $RUN and may count its starts in
    $RUN/starts."""
    text = f'echo >> "$RUN/starts"; n=$(wc -l < "$RUN/starts"); {command}'
    words = ["bash", SCRIPT, "--wait", "0", *options, "--", "bash", "-c", text, "train"]
    return subprocess.Popen(
        [*words, "--run-dir", run_dir],
        env={**os.environ, "RUN": str(run_dir), **environment},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, errors


def starts(run_dir):
    file = run_dir / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_what_another_start_would_not_mend_is_not_started_again(run_dir):
    for number, status in enumerate((0, 75, 2), 1):
        assert finish(supervise(run_dir, f'touch "$RUN/done"; exit {status}'))[0] == status
        assert starts(run_dir) == number


def test_a_program_that_is_not_there_is_not_tried_again(run_dir, tmp_path):
    (tmp_path / "text").write_text("no program")
    for program in ("no-such-launcher", tmp_path / "text"):
        words = ["bash", SCRIPT, "--wait", "0", "--", program, "--run-dir", run_dir]
        status, errors = finish(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
        assert status == 2 and f"'{program}', or a program that it starts, is not there" in errors
        assert "start 1 of 3" not in errors


def test_a_failure_is_started_again_until_it_is_done(run_dir):
    status, errors = finish(supervise(run_dir, '[ $n -ge 3 ] || exit 1; touch "$RUN/done"'))
    assert status == 0 and starts(run_dir) == 3 and "start 2 of 3 from checkpoint 'none'" in errors


def test_it_gives_up_after_so_many_failures_without_a_new_checkpoint(run_dir):
    advancing = '[ $n -gt 4 ] || echo step-$n > "$RUN/checkpoints/latest"; exit 1'
    status, errors = finish(supervise(run_dir, advancing, "--restarts", "2"))
    # four get on, and the fourth's failure is the first of three
    assert status == 1 and starts(run_dir) == 6
    assert "given up: 3 failures in a row" in errors and "step-4" in errors


def test_a_launcher_that_ends_well_without_the_run_being_done_is_started_again(run_dir):
    status, errors = finish(supervise(run_dir, '[ $n -lt 2 ] || touch "$RUN/done"'))
    assert status == 0 and starts(run_dir) == 2 and "ended without" in errors


def test_a_run_that_is_still_starting_is_asked_until_it_has_seen_it(run_dir):
    """It does not look at the first file, which is older than it is."""
    process = supervise(run_dir, f'touch "$RUN/ready"; {STOP}; rm "$RUN/stop"; {STOP}; exit 75')
    wait_for(run_dir / "ready")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75 and starts(run_dir) == 1
    assert not (run_dir / "stop").exists()


def test_a_run_that_is_asked_to_end_before_its_start_is_not_started(run_dir):
    supervisor = Supervisor(["touch", str(run_dir / "started")], run_dir)
    supervisor._note(signal.SIGTERM, None)
    assert supervisor.run() == 75 and not (run_dir / "started").exists()


def test_a_signal_is_passed_on_as_a_file_and_not_to_the_launcher(run_dir):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        process = supervise(run_dir, f'touch "$RUN/ready"; {STOP}; exit 75')
        wait_for(run_dir / "ready")
        os.killpg(process.pid, number)  # as a terminal or a scheduler does
        assert finish(process)[0] == 75
        (run_dir / "ready").unlink()
    assert starts(run_dir) == 4


def test_a_second_ctrl_c_leaves_nothing_behind(run_dir):
    waits = 'sleep 600 & echo $! > "$RUN/child"; mv "$RUN/child" "$RUN/ready"; wait'
    process = supervise(run_dir, waits)
    wait_for(run_dir / "ready")
    child = int((run_dir / "ready").read_text())
    os.kill(process.pid, signal.SIGINT)
    wait_for(run_dir / "stop")
    os.kill(process.pid, signal.SIGINT)
    assert finish(process)[0] == 130
    wait_until(lambda: ended(child))


def test_processes_that_a_killed_launcher_left_are_ended(run_dir):
    killed = 'sleep 600 & echo $! > "$RUN/child"; kill -KILL $$'
    ends = '[ $n -gt 1 ] && touch "$RUN/done" && exit 0'
    assert finish(supervise(run_dir, f"{ends}; {killed}"))[0] == 0
    wait_until(lambda: ended(int((run_dir / "child").read_text())))


@pytest.fixture
def hosts(tmp_path, run_dir, monkeypatch):
    """A function that starts the script with --elastic over hosts whose `ssh` and `nvidia-smi` are
    ours. A host answers where a file of its name is in $UP, which holds what nvidia-smi says."""
    programs, up, file = tmp_path / "bin", tmp_path / "up", tmp_path / "hostfile"
    programs.mkdir()
    up.mkdir()
    (programs / "ssh").write_text(
        '#!/bin/bash\necho >> "$UP/looks"; HOST=${@: -2:1}; [ -e "$UP/$HOST" ] || exit 255; '
        'export HOST; eval "${@: -1}"\n'
    )
    (programs / "nvidia-smi").write_text('#!/bin/bash\ncat "$UP/${HOST:-here}"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("UP", str(up))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)

    def start(limits, command, slots, launcher=("--hostfile", str(file))):
        file.write_text("# all of them\n" + "".join(f"{h} slots={n}\n" for h, n in slots.items()))
        text = f'echo "$@" >> "$RUN/starts"; n=$(wc -l < "$RUN/starts"); {command}'
        words = ["bash", SCRIPT, "--wait", "0", "--elastic", limits, "--", "bash", "-c", text]
        return subprocess.Popen(
            [*words, "deepspeed", *launcher, "train.py", "--run-dir", run_dir],
            env={**os.environ, "RUN": str(run_dir)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def answers(host, gpus, broken=0):
        lines = [f"GPU {n}: H100 (UUID: GPU-{n})" for n in range(gpus)] + ["Unable to"] * broken
        (up / f"{host}.new").write_text("".join(f"{line}\n" for line in lines))
        (up / f"{host}.new").rename(up / host)

    start.answers, start.up = answers, up
    return start


def test_an_elastic_run_gets_the_gpus_that_answer(run_dir, hosts):
    hosts.answers("more", 8)
    hosts.answers("fewer", 3, broken=1)
    hosts.answers("none", 0, broken=4)
    hosts.answers("last", 4)
    slots = {"more": 2, "fewer": 4, "away": 4, "none": 4, "last": 4}
    status, errors = finish(hosts("3:6", 'touch "$RUN/done"', slots))
    assert status == 0 and "ranks: 6 (more" in errors
    assert (run_dir / "hosts").read_text() == "more slots=2\nfewer slots=3\nlast slots=1\n"
    (given,) = (run_dir / "starts").read_text().splitlines()
    assert given.startswith(f"--force_multi --hostfile {run_dir}/hosts train.py --run-dir")


def test_an_elastic_run_on_one_host_gets_its_gpus(run_dir, hosts):
    hosts.answers("here", 3)
    for written in (["--num_gpus", "4"], ["--num_gpus=4"]):
        assert finish(hosts("1", 'touch "$RUN/done"', {}, written))[0] == 0
        assert "--num_gpus 3 train.py" in (run_dir / "starts").read_text().splitlines()[-1]


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that puts a program of bash first on PATH as nvidia-smi; it keeps its number and
    what has started it in files of $UP."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("UP", str(tmp_path))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)

    def write(text):
        asked = 'echo $$ > "$UP/pid"; tr "\\0" " " < /proc/$PPID/cmdline > "$UP/by"'
        program.write_text(f"#!/bin/bash\n{asked}\n{text}\n")
        program.chmod(0o755)

    return write


THREE = 'for n in 0 1 2; do echo "GPU $n: H100 (UUID: GPU-$n)"; done'


def test_gpus_that_answer_after_seconds_are_counted(tmp_path, smi):
    """Of a driver without its persistence mode; of eight GPUs it takes half a minute."""
    smi(f"sleep 3; {THREE}")
    pool = Pool([Host("localhost", 4)], is_here=True)
    assert pool.available(None) == ([Host("localhost", 3)], [])
    assert (tmp_path / "by").read_text().split() == "timeout -k 5 60 nvidia-smi -L".split()


def test_gpus_that_never_answer_are_said_once_and_asked_again(tmp_path, smi, capsys):
    smi(f'echo >> "$UP/times"; [ $(wc -l < "$UP/times") -le 2 ] && exec sleep 600; {THREE}')
    pool = Pool([Host("localhost", 4)], is_here=True, limit_s=1)
    none, (said,) = pool.available(None)
    assert none == [] and said.startswith("localhost: nvidia-smi -L has not answered within 1 s;")
    assert ended(int((tmp_path / "pid").read_text()))
    command = ["deepspeed", "--num_gpus", "4", "train.py", "--run-dir", str(tmp_path)]
    elastic = replace(ElasticCommand.of(Limits(2), command), pool=pool)
    supervisor = Supervisor(command, tmp_path, pause_s=0, elastic=elastic)
    assert supervisor._wait_for_hosts(elastic) == [Host("localhost", 3)]
    lines = capsys.readouterr().err.splitlines()
    waits = "waits until 2 ranks are there; now: 0"
    assert lines == [f"supervise.sh: {line}" for line in (said, waits, "starts; ranks: 3")]


def test_an_elastic_run_waits_for_enough_and_says_so_once(run_dir, hosts):
    hosts.answers("a", 1)
    process = hosts("2", 'touch "$RUN/done"', {"a": 1, "b": 1})
    looks = hosts.up / "looks"
    wait_until(lambda: looks.exists() and len(looks.read_text()) >= 4)  # both hosts, twice
    assert not starts(run_dir)
    hosts.answers("b", 1)
    status, errors = finish(process)
    assert status == 0 and starts(run_dir) == 1 and errors.count("waits until 2") == 1
    hosts.answers("a", 0)
    process = hosts("2", "exit 1", {"a": 1, "b": 1})
    wait_until(lambda: process.stderr.readline().startswith("supervise.sh: waits"))
    process.terminate()
    assert finish(process)[0] == 75 and starts(run_dir) == 1


def test_an_elastic_run_grows_when_it_is_asked_to(run_dir, hosts):
    hosts.answers("a", 1)
    ends = f'touch "$RUN/ready"; [ $n -gt 1 ] && touch "$RUN/done" && exit 0; {STOP}; exit 75'
    process = hosts("1", ends, {"a": 1, "b": 2})
    wait_for(run_dir / "ready")
    hosts.answers("b", 2)
    process.send_signal(signal.SIGUSR2)
    status, errors = finish(process)
    assert status == 0 and starts(run_dir) == 2 and "ranks: 3" in errors
    assert (run_dir / "hosts").read_text() == "a slots=1\nb slots=2\n"
    assert not (run_dir / "stop").exists()


def test_what_was_lost_and_how_long_it_took_is_said(run_dir):
    line, logged = '{"step": %s, "loss": 1}', "$RUN/metrics.jsonl"
    fails = f"""for s in 3 4 5 6 7; do printf '{line}\n' $s; done > "{logged}"
        echo step-00000004 > "$RUN/checkpoints/latest"; exit 1"""
    goes_on = f"""printf '{line}\n' 4 > "{logged}"; sleep 0.1; printf '{line}\n' 5 >> "{logged}"
        sleep 3; touch "$RUN"/done"""
    status, errors = finish(supervise(run_dir, f"if [ $n = 1 ]; then {fails}; fi; {goes_on}"))
    assert status == 0 and "trains on from step 4, " in errors and "steps lost: 3" in errors


@pytest.mark.parametrize(
    "text",
    [
        "step-0+restarts[$(touch {file})]",
        "$(touch {file})",
        "step-4\n$(touch {file})",
        "step-\x1b[2J",
    ],
)
def test_a_name_of_a_checkpoint_that_is_none_runs_nothing_and_is_not_shown(run_dir, tmp_path, text):
    """The folder may be another one's work."""
    file = tmp_path / "ran"
    (run_dir / "checkpoints/latest").write_text(text.format(file=file))
    line = '{"step": 1}'
    goes_on = f"""printf '{line}\n' > "$RUN/metrics.jsonl"; sleep 1; touch "$RUN"/done"""
    status, errors = finish(supervise(run_dir, f"if [ $n = 1 ]; then exit 1; fi; {goes_on}"))
    assert status == 0 and "from checkpoint 'none'" in errors and "trains on from step 0" in errors
    assert not file.exists() and "\x1b" not in errors


def test_files_of_a_run_that_are_links_or_pipes_lead_nowhere(run_dir, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (run_dir / "stop").symlink_to(outside)
    os.mkfifo(run_dir / "metrics.jsonl")
    os.mkfifo(run_dir / "checkpoints/latest")
    process = supervise(
        run_dir, 'touch "$RUN/ready"; until [ ! -L "$RUN/stop" ]; do sleep 0.05; done; exit 75'
    )
    wait_for(run_dir / "ready")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75
    assert outside.read_text() == "kept" and not (run_dir / "stop").exists()


def test_an_elastic_run_writes_its_hosts_through_no_link(run_dir, tmp_path, hosts):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (run_dir / "hosts").symlink_to(outside)
    hosts.answers("a", 1)
    assert finish(hosts("1", 'touch "$RUN/done"', {"a": 1}))[0] == 0
    assert outside.read_text() == "kept" and (run_dir / "hosts").read_text() == "a slots=1\n"


def test_a_run_is_as_far_as_its_last_whole_line_says(run_dir):
    progress, file = Progress(run_dir), run_dir / "metrics.jsonl"
    assert progress.step == 0
    for text, step in (
        ('{"step": 3}\n{"step": 4', 3),
        ('{"step": 3}\n{"step": "4"}\n', 0),
        ('{"loss": 1}\n', 0),
        ("[" * 60_000 + "\n", 0),
        ('{"step": 3}\n' * 9_000 + '{"step": 7}\n', 7),
    ):
        file.write_text(text)
        assert progress.step == step


@pytest.mark.parametrize("line", ["-oProxyCommand=touch$IFS x slots=1", "a slots=x", "a;b slots=1"])
def test_a_host_that_ssh_would_take_for_an_option_is_refused(tmp_path, line):
    (tmp_path / "hosts").write_text(f"# all\n\ngood slots=2\n{line}\n")
    with pytest.raises(ValueError, match="line 4: .* is not a host"):
        read_hostfile(tmp_path / "hosts")


def test_wrong_usage():
    for arguments, words in (
        ("--elastic 0 -- deepspeed --num_gpus 2 train.py --run-dir x", "--elastic: '0': MIN or"),
        ("--elastic 4:2 -- deepspeed --num_gpus 2 train.py --run-dir x", "MIN is above MAX"),
        ("--elastic 1 -- deepspeed train.py --run-dir x --num_gpus 2", "needs DeepSpeed's"),
        ("--elastic 1 -- deepspeed --num_gpus all train.py --run-dir x", "--num_gpus 'all': a"),
        ("--elastic 1 -- deepspeed --hostfile no train.py --run-dir x", "no: cannot be read"),
        (
            "--elastic 1 -- deepspeed --include=a --num_gpus 2 train.py --run-dir x",
            "leave out --include",
        ),
        ("--restarts many -- true --run-dir x", "--restarts: 'many': a whole number is needed"),
        ("-- deepspeed train.py", "has no --run-dir"),
        ("-- true --run-dir x --resume never", "--resume never: every start would begin there"),
        ("-- true --resume=x/step-1 --run-dir x", "--resume x/step-1: every start"),
        ("deepspeed train.py", "unrecognized arguments: deepspeed train.py"),
        ("", "no command given"),
    ):
        command = ["bash", SCRIPT, *arguments.split()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert result.returncode == 2 and words in result.stderr, arguments


def wait_for(file):
    wait_until(file.exists)


def wait_until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s"
        time.sleep(0.02)


def ended(pid):
    """What was killed may take a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
