"""Jobs for clusters, with a small program in the place of Python. Real runs by Slurm, mpirun and
torchrun are in tests/test_two_nodes.py."""

import os
import subprocess

import pytest
import yaml

from launch.tools import submit

OPTIONS = "--steps", "2", "--deepspeed_config", "how.json"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Gives the text of the job, and the job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR")
    (tmp_path / "how.json").write_text("{}")
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" >> words; touch "${@: -1}/done"\n')
    python.chmod(0o755)

    def write(cluster, *flags, options=OPTIONS, status=0):
        words = ["--cluster", cluster, "--gpus", "2", "--python", str(python), *flags]
        assert submit.run([*words, "--", *options, "--run-dir", "shared/a run"]) == status
        kind = "yaml" if cluster == "kubernetes" else "sh"
        job = tmp_path / "shared" / "a run" / f"job.{kind}"
        return job.read_text() if job.exists() else "", job

    return write


def words_of(job, **environment):
    """What the job gives to Python."""
    os.makedirs("shared/a run/seed-2", exist_ok=True)
    subprocess.run(["bash", *job], check=True, env={**os.environ, **environment}, timeout=60)
    with open("words") as file:
        return file.read().split("\n")


def test_a_job_keeps_the_code_and_the_configuration(write, tmp_path):
    _, job = write("local")
    code = tmp_path / "shared" / "a run" / "code"
    (tmp_path / "how.json").write_text("[]")
    assert (code / "given-how.json").read_text() == "{}"
    assert (code / "COMMIT").exists() and not list(code.rglob("__pycache__"))
    train = (code / "train.py").read_text()
    (code / "train.py").write_text("of this run")
    with pytest.raises(SystemExit, match="^0$"):
        write("local", "--submit")
    assert (code / "train.py").read_text() == "of this run" != train
    found = words_of([job])
    assert found[found.index("--num_gpus") + 1] == "2" and str(code / "train.py") in found
    assert found[found.index("--deepspeed_config") + 1] == str(code / "given-how.json")


def test_a_job_of_slurm(write):
    text, job = write("slurm", "--nodes", "4", "--seeds", "3", "--sbatch=--time=8:00:00")
    asked = {line.split(" ", 1)[1] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=4", "--ntasks-per-node=2", "--gpus-per-node=2", "--requeue"}
    assert asked >= {"--signal=B:USR1@300", "--array=0-2 --time=8:00:00"}
    found = words_of([job], SLURM_ARRAY_TASK_ID="2")  # without Slurm
    assert found[found.index("--seed") + 1] == "2" and found[-2].endswith("a run/seed-2")


def test_a_job_of_kubernetes(write, tmp_path):
    flags = "--image", "wye: 1", "--claim", "data", "--mount", str(tmp_path)
    text, _ = write("kubernetes", "--nodes", "4", *flags)
    spec = yaml.safe_load(text)["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert spec["nprocPerNode"] == "2" and worker["replicas"] == 4
    assert container["image"] == "wye: 1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert words_of(container["command"][1:])[:2] == ["-m", "torch.distributed.run"]


def test_what_does_not_go_together_is_answered(write, capfd):
    for flags, options, key in (
        (("local", "--nodes", "2"), OPTIONS, "--nodes"),
        (("mpi", "--seeds", "2"), OPTIONS, "--seeds"),
        (("mpi", "--hostfile", "none"), OPTIONS, "no such file"),
        (("slurm", "--seeds", "2"), ("--seed", "1"), "--seed"),
        (("kubernetes",), OPTIONS, "--image"),
        (
            ("kubernetes", "--image=i", "--claim=c", "--mount=/elsewhere"),
            OPTIONS,
            "--mount /elsewhere",
        ),
    ):
        write(*flags, options=options, status=2)
        assert key in capfd.readouterr().err, flags
    with pytest.raises(SystemExit):
        write("local", options=("--stepz", "2"))
    assert "--stepz" in capfd.readouterr().err
