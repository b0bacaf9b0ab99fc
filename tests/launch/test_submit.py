"""Jobs for clusters, with a small program in the place of Python. Real runs by Slurm, mpirun and
torchrun are in tests/test_two_nodes.py."""

import os
import shutil
import subprocess

import pytest
import yaml

from launch.tools import kept_code, submit

SBATCH = "--sbatch=--time=8:00:00", "--sbatch", "-p gpu --mem=0"
OPTIONS = "--steps", "2", "--deepspeed_config", "how.json"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Gives the text of the job, and the job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    for name in ("how.json", "other.json"):
        (tmp_path / name).write_text("{}")
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


def test_a_job_keeps_the_code_and_the_configuration(write, tmp_path, monkeypatch):
    _, job = write("local")
    code = tmp_path / "shared" / "a run" / "code"
    (tmp_path / "how.json").write_text("[]")
    assert (code / "given-how.json").read_text() == "{}"
    assert (code / "COMMIT").exists() and not list(code.rglob("__pycache__"))
    train = (code / "train.py").read_text()
    with monkeypatch.context() as later:  # the code has changed since
        later.setattr(kept_code, "ROOT", tmp_path)
        with pytest.raises(SystemExit, match="^0$"):
            write("local", "--submit")
    assert (code / "train.py").read_text() == train
    found = words_of([job])
    assert found[found.index("--num_gpus") + 1] == "2" and str(code / "train.py") in found
    assert found[found.index("--deepspeed_config") + 1] == str(code / "given-how.json")


def test_a_job_runs_no_code_of_a_stranger(write, tmp_path, capfd):
    """Code that was in the folder before is run only where this tool has copied it, or where the
    command line says so; nothing is written through links."""
    run_dir = tmp_path / "shared" / "a run"
    code, mark = run_dir / "code", tmp_path / "ran"
    theirs = {
        "launch/supervise.sh": f"touch '{mark}'",
        "train.py": "",
        "json.py": "",
        "launch/cached.pyc": "",
    }
    for name, text in theirs.items():
        write("local")
        (code / name).write_text(text)
        write("local", "--submit", status=2)
        assert f"{code}: the job would run this code" in capfd.readouterr().err, name
        write("local", "--trust-run")
        assert (code / name).read_text() == text and not mark.exists()
        shutil.rmtree(code)
    write("local")
    (code / "launch" / "__pycache__").mkdir()  # Python would take it for what is beside it
    (code / "launch" / "__pycache__" / "run.cpython-311.pyc").write_text("theirs")
    write("local")
    assert not list(code.rglob("__pycache__"))

    elsewhere = tmp_path / "elsewhere"
    code.rename(elsewhere)
    code.symlink_to(elsewhere)
    for flags in ((), ("--trust-run",)):
        write("local", *flags, options=("--deepspeed_config", "other.json"), status=2)
        assert "leads out of" in capfd.readouterr().err
    code.unlink()
    (run_dir / "slurm-7.log").symlink_to(tmp_path / "how.json")
    write("slurm", status=2)
    assert "slurm-7.log: is a link" in capfd.readouterr().err


def test_a_job_of_slurm(write):
    text, job = write("slurm", "--nodes", "4", "--seeds", "3", *SBATCH)
    asked = {line.split(" ", 1)[1] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=4", "--ntasks-per-node=2", "--gpus-per-node=2", "--requeue"}
    assert "--cpus-per-task=8" in asked
    assert asked >= {"--signal=B:USR1@300", "--array=0-2"}
    assert asked >= {"--time=8:00:00", "-p gpu --mem=0"}
    assert "--cpus-per-task=1" in write("slurm", "--cpu")[0]
    assert "--cpus-per-task=12\n" in write("slurm", "--cpus", "12")[0]
    text, job = write("slurm", "--nodes", "4", "--seeds", "3", *SBATCH)
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
    # a pod that takes the place of another one may be the first of the next round
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in container["command"][-1]


def test_arguments_reach_python_as_they_were_typed(write, tmp_path):
    (tmp_path / "d").mkdir()
    spec = "stream:d/{00..99}.tar?mixed=16&where=similarity>=0.5 and x != '$$1'"
    stages = 'branches.stages={"image":1,"text":1}'
    (tmp_path / "run.args").write_text(f"--data {spec}\n--set {stages}\n")
    options = ("@run.args", "--steps", "2")
    flags = "--image=i", "--claim=c", f"--mount={tmp_path}"
    _, job = write("slurm", options=options)
    pods, _ = write("kubernetes", *flags, options=options)
    worker = yaml.safe_load(pods)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    command = worker["containers"][0]["command"]
    for words in ([job], [each.replace("$$", "$") for each in command[1:]]):  # as Kubernetes does
        found = words_of(words)
        assert (
            found[found.index("--data") + 1] == spec and found[found.index("--set") + 1] == stages
        )
        (tmp_path / "words").unlink()
        (tmp_path / "shared" / "a run" / "done").unlink()


def test_data_that_are_not_there_are_refused_or_said_to_be_elsewhere(write, tmp_path, capfd):
    (tmp_path / "here.jsonl").touch()
    for spec in ("jsonl:gone.jsonl", "coco:images:here.jsonl", "stream:gone/{0..9}.tar?text=t"):
        options = ("--data", spec)
        text, _ = write("slurm", options=options, status=2)
        assert not text and "is not there" in capfd.readouterr().err, spec
        if spec.startswith("jsonl"):  # its file is not opened
            assert write("slurm", "--data-on-nodes", options=options)[0]
            (tmp_path / "shared" / "a run" / "job.sh").unlink()
    capfd.readouterr()
    remote = "--data", "jsonl:here.jsonl", "--data", "stream:s3://bucket/{0..9}.tar?text=t"
    assert write("slurm", options=remote)[0]
    assert "s3://bucket/{0..9}.tar: remote, not looked for" in capfd.readouterr().err
    flags = "--image=i", "--claim=c", f"--mount={tmp_path / 'shared'}"
    assert write("kubernetes", *flags, options=remote[:2])[0]
    assert "so pods see it only if it is in the image" in capfd.readouterr().err


def test_the_accelerator_of_a_login_node_is_not_that_of_the_job(
    write, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    text, _ = write("slurm")
    assert "unset DS_ACCELERATOR" in text and "--gpus-per-node=2" in text
    assert "give --cpu" in capfd.readouterr().err
    text, _ = write("slurm", "--cpu")
    assert "export DS_ACCELERATOR=cpu" in text and "--gpus-per-node" not in text
    flags = "--image=i", "--claim=c", f"--mount={tmp_path}"
    assert "nvidia.com/gpu: 2" in write("kubernetes", *flags)[0]
    text, _ = write("kubernetes", *flags, "--cpu")
    assert "nvidia.com/gpu" not in text and "export DS_ACCELERATOR=cpu" in text
    assert yaml.safe_load(text)["spec"]
    capfd.readouterr()
    assert "export DS_ACCELERATOR=cpu" in write("local")[0]
    assert "DS_ACCELERATOR" not in capfd.readouterr().err
    assert "unset RANK WORLD_SIZE" in write("slurm")[0]  # of torchrun, where it was submitted


def test_no_word_becomes_a_line_of_the_job_or_an_option_of_ssh(write, tmp_path, capfd):
    words = ["--cluster", "slurm", "--gpus", "2", "--", "--run-dir", "shared/a\ntouch ran\n#"]
    assert submit.run(words) == 2 and not (tmp_path / "shared").exists()
    assert r"--run-dir 'shared/a\ntouch ran\n#': holds a line break" in capfd.readouterr().err
    write("slurm", "--sbatch=-p gpu\ntouch ran", status=2)
    assert "--sbatch" in capfd.readouterr().err
    (tmp_path / "hosts").write_text("# two\nnode1 slots=1\n-oProxyCommand=touch slots=1\n")
    write("mpi", "--hostfile", "hosts", status=2)
    assert "'-oProxyCommand=touch' is no name of a host" in capfd.readouterr().err


def test_a_job_of_kubernetes_holds_any_text(write, tmp_path):
    for text in ('😀 "a" \\ b', "a\x7f\x85\u2028\u200bb", "größe\tc", "{a}: [b] # c"):
        assert yaml.safe_load(submit.yaml_text(["a", text])) == ["a", text]
        flags = "--image", text, "--claim", "c", "--mount", str(tmp_path)
        worker = yaml.safe_load(write("kubernetes", *flags)[0])["spec"]["pytorchReplicaSpecs"][
            "Worker"
        ]
        assert worker["template"]["spec"]["containers"][0]["image"] == text


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
