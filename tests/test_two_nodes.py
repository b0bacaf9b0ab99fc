"""train.py on several hosts, as their launchers start it there: DeepSpeed's with pdsh and ssh,
torchrun, mpirun and Slurm's srun."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml
from launched import (
    LIMIT_S,
    SMALL,
    command,
    finish,
    fork_flags,
    launcher,
    metrics,
    reached,
    run_to_end,
    wait_for,
    write_pairs,
)
from nodes import lacking, nodes, plug, reached_by_ssh, see_late, slurm

from launch.tools import submit

STEPS = 12
SSH = "ssh", "ssh-keygen", "sshd"
# folders that each host has for itself
OWN = [os.environ["WYE_CACHE"]]


def needs(*programs):
    why = lacking(*programs)
    return pytest.mark.skipif(why is not None, reason=str(why))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options of a run."""
    folder = tmp_path_factory.mktemp("small")
    arguments = [*SMALL, *fork_flags(folder), "--data", write_pairs(folder / "pairs", 320)]
    # each layout has its own random numbers
    arguments += ["--text-tower", "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"]
    arguments += ["--max-text-tokens", 16, "--steps", STEPS, "--save-every", 3, "--workers", 0]
    return [str(argument) for argument in arguments]


@pytest.fixture(scope="module")
def of_one_host(small, tmp_path_factory):
    """The losses of two ranks of one host."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    status, output = run_to_end("train.py", *small, "--run-dir", run_dir, ranks=2)
    assert status == 0, output[-5000:]
    return losses(run_dir)


def losses(run_dir):
    found = metrics(run_dir)
    assert sorted(found) == list(range(1, STEPS + 1))
    return [found[step]["loss"] for step in sorted(found)]


@pytest.fixture
def job(small, tmp_path):
    """Writes the job of a run in tmp_path/run; gives the job's file."""

    def write(cluster, *flags, options=()):
        run_dir = str(tmp_path / "run")
        words = ["--cluster", cluster, "--cpu", "--restarts", "0", *flags]
        assert submit.run([*words, "--", *small, *options, "--run-dir", run_dir]) == 0
        return tmp_path / "run" / ("job.yaml" if cluster == "kubernetes" else "job.sh")

    return write


@pytest.mark.all("makes hosts of network namespaces")
@needs(*SSH, "pdsh")
def test_a_run_over_two_hosts_whose_cable_is_pulled(small, of_one_host, tmp_path, monkeypatch):
    """Both hosts end and one says why; the same command, given on a third host, goes on from the
    newest checkpoint, and the losses are those of one host."""
    monkeypatch.setenv("HOLD_AFTER", "4")
    run_dir, keys = tmp_path / "two", tmp_path / "ssh"
    keys.mkdir()
    run_dir.mkdir()
    (run_dir / "hold").touch()
    passed_on = {"HOLD_AFTER": "4"}
    passed_on |= {
        name: value
        for name, value in os.environ.items()
        if name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "WYE_CACHE")
        or name.startswith("WANDB_")
    }
    (tmp_path / "env").write_text("".join(f"{k}={v}\n" for k, v in passed_on.items()))
    with nodes(3, own=OWN) as made, reached_by_ssh(made, keys) as wrapped:
        monkeypatch.setenv("PATH", f"{wrapped}:{os.environ['PATH']}")
        monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "env"))
        (tmp_path / "hosts").write_text("".join(f"{n.address} slots=1\n" for n in made[:2]))

        # a shell of each host would read what is not in a file
        (tmp_path / "run.args").write_text("\n".join(small))

        def run():
            return command(
                lambda port: made[2].command(
                    *over_hosts(launcher(2, port, "tests/held_training.py"), tmp_path / "hosts"),
                    f"@{tmp_path / 'run.args'}",
                    "--run-dir",
                    str(run_dir),
                )
            )

        first = run()
        wait_for(reached(run_dir, 4), first)
        plug(made, 1, connected=False)
        status, output = finish(first)
        assert status != 0
        assert f"rank 1 (text 0, replica 0) on {made[1].name} gave no sign" in output, output[
            -5000:
        ]
        plug(made, 1, connected=True)
        (run_dir / "hold").unlink()
        status, output = finish(run())
    assert status == 0 and "2 ranks on 2 nodes" in output, output[-5000:]
    assert losses(run_dir) == of_one_host


def over_hosts(words: list[str], hosts: object) -> list[str]:
    """A launcher's command with a file of hosts instead of a number of ranks."""
    where = words.index("--num_gpus")
    return [*words[:where], "--hostfile", str(hosts), *words[where + 2 :]]


@pytest.mark.all("makes hosts of network namespaces")
@needs()
def test_the_command_of_pods_runs_torchrun_on_two_hosts(job, of_one_host, tmp_path, monkeypatch):
    """With the variables that the operator of PyTorchJobs gives to each pod. Where bindfs is
    installed, the second host sees files of the first late."""
    flags = "--nodes=2", "--gpus=1", "--image=wye", "--claim=data", f"--mount={tmp_path}"
    asked = yaml.safe_load(job("kubernetes", *flags).read_text())["spec"]
    worker = asked["pytorchReplicaSpecs"]["Worker"]
    elastic = asked["elasticPolicy"]
    assert worker["replicas"] == elastic["minReplicas"] == elastic["maxReplicas"] == 2
    pod = worker["template"]["spec"]["containers"][0]["command"]
    with nodes(2, own=OWN) as made:
        see_late(made[1], tmp_path)
        variables = {
            "PET_NNODES": "2:2",
            "PET_NPROC_PER_NODE": asked["nprocPerNode"],
            "PET_RDZV_BACKEND": elastic["rdzvBackend"],
            "PET_RDZV_ENDPOINT": f"{made[0].name}:23456",
            "PET_RDZV_ID": "run",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        pods = [command(lambda _: node.command(*pod)) for node in reversed(made)]
        ends = [finish(each) for each in pods]
    failed = [output[-3000:] for status, output in ends if status]
    assert not failed, "\n\n".join(failed)
    assert "2 ranks on 2 nodes" in "".join(output for _, output in ends)
    assert losses(tmp_path / "run") == of_one_host


@pytest.mark.all("makes hosts of network namespaces")
@needs(*SSH, "mpirun")
def test_mpirun_on_three_hosts_then_two_then_one(job, of_one_host, tmp_path, monkeypatch):
    """A rank is killed; two hosts go on until they are asked to end, and one to the end."""
    keys, run_dir, hosts = tmp_path / "ssh", tmp_path / "run", tmp_path / "hosts"
    keys.mkdir()
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    # the image's rank sees the whole batch, which batch normalisation needs for the same numbers
    layouts = {
        3: ['branches.stages={"image": 1, "text": 2}'],
        2: ['branches.stages={"image": 1, "text": 1}'],
        1: ["branches.layout=merged", "branches.stages=auto"],
    }
    with nodes(4, own=OWN) as made, reached_by_ssh(made, keys) as wrapped:
        monkeypatch.setenv("PATH", f"{wrapped}:{os.environ['PATH']}")

        def run(number):  # on a host that has no rank
            hosts.write_text("".join(f"{node.name} slots=1\n" for node in made[:number]))
            file = job("mpi", "--hostfile", str(hosts), options=["--set", *layouts[number]])
            return command(lambda _: made[3].command("bash", str(file)))

        first = run(3)
        wait_for(reached(run_dir, 4), first)
        kill_rank(run_dir, "OMPI_COMM_WORLD_RANK", "1")
        status, output = finish(first)
        assert status == 1 and "3 ranks on 3 nodes" in output, output[-5000:]
        second = run(2)
        wait_for(reached(run_dir, 7), second)
        (run_dir / "stop").touch()
        status, output = finish(second)
        assert status == 75 and "2 ranks on 2 nodes" in output, output[-5000:]
        status, output = finish(run(1))
    assert status == 0, output[-5000:]
    assert losses(run_dir) == pytest.approx(of_one_host, rel=1e-4)


def kill_rank(run_dir: Path, variable: str, rank: str) -> None:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if (
            str(run_dir) in words
            and words[1].endswith("train.py")
            and process.environ().get(variable) == rank
        ):
            process.kill()
            return
    pytest.fail(f"no rank {rank}")


@pytest.mark.all("makes hosts of network namespaces")
@needs("munged", "slurmctld", "slurmd", "sbatch")
def test_slurm_on_two_hosts_then_one(job, of_one_host, tmp_path, monkeypatch):
    """Before its time is over the job saves, is queued again and goes on. A rank is killed, and one
    host goes on."""
    run_dir, state = tmp_path / "run", tmp_path / "slurm"
    state.mkdir()
    with nodes(2, own=OWN) as made, slurm(made, state) as variables:

        def ask(*words):
            done = subprocess.run(
                made[1].command(*words), env=variables, capture_output=True, text=True
            )
            assert done.returncode == 0, done
            return done.stdout

        def queue(number, *options):
            file = job("slurm", "--nodes", number, "--gpus", "1", options=options)
            name = ask("sbatch", "--parsable", str(file)).strip()
            return name, run_dir / f"slurm-{name}.log"

        first, log = queue("2")
        until(reached(run_dir, 4), log)
        ask("scancel", "--batch", "--signal=USR1", first)
        until(lambda: waits_again(ask("scontrol", "show", "job", first)), log)
        # not two minutes later, but a node refuses a job that it has ended in the same second
        ask("scontrol", "update", f"JobId={first}", "StartTime=now+3")
        until(reached(run_dir, 9), log)
        kill_rank(run_dir, "SLURM_PROCID", "1")
        until(lambda: "given up" in log.read_text(), log)
        said = " ".join(log.read_text().split())  # lines end where the folder's name makes them
        assert "before it could save" not in said  # all ranks have ended by themselves
        assert "stop; the same command" in said and said.count("2 ranks on 2 nodes") == 2, said
        _, log = queue("1", "--set", "branches.layout=merged", "branches.stages=auto")
        until((run_dir / "done").exists, log)
    found = losses(run_dir)
    assert found[:6] == of_one_host[:6]  # of two hosts, whatever the newest checkpoint was
    assert found == pytest.approx(of_one_host, rel=1e-4)


def waits_again(shown: str) -> bool:
    return "JobState=PENDING" in shown and "Restarts=0" not in shown


def until(condition, log: Path) -> None:
    # where a job cannot begin, Slurm waits two minutes before it tries again
    deadline = time.monotonic() + LIMIT_S / 2
    of_slurm = log.parents[1] / "slurm" / "slurm.log"
    while not (log.exists() and condition()):
        if time.monotonic() > deadline:
            said = log.read_text() if log.exists() else "not started"
            pytest.fail(f"{said[-5000:]}\n{of_slurm.read_text()[-5000:]}")
        time.sleep(0.1)
