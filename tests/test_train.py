"""train.py as a user starts it: the launcher, real processes, the embedded data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.stopping import STOPPED
from launch.trace_file import read_trace

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--image-tower", "resnet18:layers=1-1-1-1", "--image-size", "32", "--text-tower", "bert-tiny", "--embed-dim", "32"]
LIMIT_S = 240


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A configuration that measures nothing and chooses nothing: for tests that compare runs or look for a stage by its rank."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["branches"] |= {"layout": "fork", "stages": {"image": 1, "text": 1}, "schedule": "batch_sync"}
    config["branches"]["gradient_clipping"]["text"] = {"kind": "adaptive", "factor": 1.01, "decay": 0.9, "warmup_steps": 2}
    config["branches"]["optimizer_groups"] = {"image": {"lr": 2e-3, "layer_decay": 0.8, "warmup_steps": 3}}
    config["branches"]["ema"] = {"decay": 0.9}
    file = tmp_path_factory.mktemp("config") / "fork.json"
    file.write_text(json.dumps(config))
    return ["--deepspeed_config", file]


def environment():
    from engine.processes import free_port

    # the launcher's default port may be in use by another run on this machine
    return {**os.environ, "DS_ACCELERATOR": "cpu", "DLTS_HOSTFILE": "/nonexistent", "MASTER_PORT": str(free_port())}


def launch(world_size, *arguments, **kwargs):
    """Start the launcher in a session of its own; `finish` ends whatever is left of it."""
    env = environment()
    command = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_gpus",
        str(world_size),
        "--master_port",
        env["MASTER_PORT"],
        "train.py",
    ]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **kwargs,
    )


def finish(process, limit_s=LIMIT_S):
    """(exit status, output); fails when it takes longer than the limit or leaves a process behind."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done after {limit_s} s:\n{output[-3000:]}")
    gone, left = psutil.wait_procs([p for p in family if p.is_running()], timeout=20)
    for p in left:
        p.kill()
    assert not left, f"processes left behind: {left}"
    port = process.args[process.args.index("--master_port") + 1]
    assert not list(Path("/dev/shm").glob(f"*_{port}_*")), "shared memory left behind"
    return process.returncode, output


def metrics(run_dir, key="loss"):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if key in line}


def ranks_of(process):
    """The rank processes below the launcher."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "--local_rank" in " ".join(p.cmdline())]


def wait_for(condition, process, limit_s=120):
    deadline = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"ended or waited too long:\n{process.communicate()[0][-3000:]}")
        time.sleep(0.1)


def reached(run_dir, step):
    file = run_dir / "metrics.jsonl"
    return lambda: file.is_file() and any(f'"step": {step},' in line and '"loss"' in line for line in file.read_text().splitlines())


def test_eight_processes_on_a_machine_without_a_gpu(tmp_path):
    run_dir = tmp_path / "a run"  # a path with a space
    status, output = finish(launch(8, *SMALL, "--steps", 2, "--run-dir", run_dir, "--wandb", "offline"))
    assert status == 0, output[-3000:]
    assert set(metrics(run_dir)) == {1, 2}
    evaluations = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if "held_out" in line]
    assert {(e["step"], e["held_out"]) for e in evaluations} == {(s, h) for s in (0, 2) for h in ("composition", "family")}
    record = json.loads((run_dir / "config.json").read_text())
    assert record["world_size"] == 8 and sum(len(s["ranks"]) for s in record["stage_graph"]) == 8
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step-00000002"
    assert list((run_dir / "wandb").glob("offline-run-*"))
    assert "Zero-shot retrieval" in output and "composition (394)" in output


@pytest.mark.parametrize("layout", ["fork", "auto"])
def test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not_been_stopped(tmp_path, fork, layout):
    """Same losses and norms to the last bit, same weights; dropout, augmentation and BatchNorm are all on. With "auto", what was
    measured at the first start decides again, whatever a new measurement would say. One of the two has the other loss, the other parameter
    groups and averaged weights, which are evaluated."""
    chosen = [*fork, "--eval-ema"] if layout == "fork" else ["--loss", "sigmoid"]
    flags = ["--ema"] if layout == "fork" else []
    arguments = [*SMALL, *chosen, "--trace-every", 4, "--steps", 8, "--save-every", 100, "--eval-every", 100]
    (tmp_path / "stopped").mkdir()
    status, output = finish(launch(2, *arguments, "--run-dir", tmp_path / "whole"))
    assert status == 0 and ("auto: " in output) == (layout == "auto"), output[-3000:]
    if layout == "auto":  # the two are to run the same way
        shutil.copy(tmp_path / "whole" / "costs.json", tmp_path / "stopped")
    process = launch(2, *arguments, "--run-dir", tmp_path / "stopped")
    wait_for(reached(tmp_path / "stopped", 3), process)
    if layout == "fork":  # one rank is told, all stop
        ranks_of(process)[-1].send_signal(signal.SIGUSR1)
    else:
        (tmp_path / "stopped" / "stop").touch()
    status, output = finish(process)
    assert status == STOPPED and "stopped (" in output, output[-2000:]
    assert not (tmp_path / "stopped" / "stop").exists()
    done = max(metrics(tmp_path / "stopped"))
    assert 3 <= done < 8
    status, output = finish(launch(2, *arguments, "--run-dir", tmp_path / "stopped"))
    assert status == 0, output[-2000:]
    whole, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "stopped")
    assert set(whole) == set(resumed) == set(range(1, 9))
    for step in whole:
        of_groups = (f"{kind}/{g}" for kind in ("grad_norm", "clip_coefficient", "clipped_share") for g in ("image", "text", "head"))
        for key in ("loss", "lr", "logit_scale_exp", *of_groups):
            assert whole[step][key] == resumed[step][key], (step, key)
        assert whole[step].get("logit_bias") == resumed[step].get("logit_bias")
        assert ("logit_bias" in whole[step]) == (layout == "auto")
        assert whole[step].get("lr/image") == resumed[step].get("lr/image")
        assert ("lr/image" in whole[step]) == (layout == "fork")
        assert 0 < whole[step]["padded_text_tokens"] <= 120 * 32  # of the texts of the step, not of an evaluation before it
    assert evaluate(tmp_path / "whole", *flags) == evaluate(tmp_path / "stopped", *flags)
    assert list(read_trace(tmp_path / "stopped" / "trace.json")) == [3, 4, 8]
    timeline = subprocess.run(
        [sys.executable, "-m", "launch.timeline", tmp_path / "stopped"],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert timeline.returncode == 0 and (tmp_path / "stopped" / "timeline.png").stat().st_size > 10_000, timeline.stderr
    assert (tmp_path / "stopped" / "costs.json").is_file() == (layout == "auto")


def test_a_run_whose_losses_stay_not_finite_stops_and_names_the_last_good_checkpoint(tmp_path):
    """A learning rate that no model survives: the first step is taken, the others are not finite and change nothing."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text()) | {"train_batch_size": 16}
    config["optimizer"]["params"]["lr"] = 1e30
    del config["scheduler"]
    config["branches"] |= {"max_bad_steps": 3, "layout": "merged", "schedule": "batch_sync"}
    (tmp_path / "how.json").write_text(json.dumps(config))
    run_dir = tmp_path / "run"
    arguments = [*SMALL, "--deepspeed_config", tmp_path / "how.json", "--steps", "9", "--save-every", "1", "--eval-every", "9"]
    command = [sys.executable, "train.py", *map(str, arguments), "--run-dir", str(run_dir)]
    result = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    bad = [json.loads(line) for line in (run_dir / "bad_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in bad] == [2, 3, 4] and {len(line["samples"]) for line in bad} == {16}
    assert bad[0]["loss"] is None and set(bad[0]["not_finite"]["image"]) <= set(bad[0]["samples"])
    assert [line["skipped_steps"] for line in metrics(run_dir).values()] == [0, 1, 2, 3]
    checkpoint = run_dir / "checkpoints" / "step-00000003"
    assert checkpoint.is_dir() and "3 steps in a row had a loss or gradients that are not finite" in result.stderr
    assert f"the last good checkpoint is {checkpoint}." in result.stderr


def test_a_run_goes_on_with_other_ranks_from_the_newest_whole_checkpoint(tmp_path, fork):
    """Trained on two ranks, a tower each; its last checkpoint is damaged. One rank with both towers takes the one before, and says so."""
    arguments = [*SMALL, "--steps", 4, "--save-every", 1, "--eval-every", 4, "--run-dir", tmp_path]
    arguments += ["--keep-checkpoints", 2, "--keep-every", 2]
    status, output = finish(launch(2, *arguments, *fork))
    assert status == 0, output[-3000:]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [f"step-0000000{step}" for step in (2, 3, 4)]
    before = metrics(tmp_path)
    damaged = tmp_path / "checkpoints" / "step-00000004" / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    config = json.loads(fork[1].read_text())
    config["branches"] |= {"layout": "merged", "stages": {"merged": 1}, "schedule": "replay", "micro_batch_size": 120}
    (tmp_path / "merged.json").write_text(json.dumps(config))
    status, output = finish(launch(1, *arguments, "--deepspeed_config", tmp_path / "merged.json"))
    assert status == 0, output[-3000:]
    said = " ".join(output.split())
    assert f"passed over: {damaged.parent}: {damaged.name} has" in said
    assert "goes on from step-00000003, split as merged: merged 0 ×1" in said
    assert metrics(tmp_path)[4]["loss"] == pytest.approx(before[4]["loss"], rel=1e-4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        *(f"step-0000000{step}" for step in (2, 3, 4)),
        "step-00000004.set-aside",
    ]


def evaluate(run_dir, *flags):
    """What evaluate.py finds of the last checkpoint, or with --ema of its averaged weights: what training found at its end."""
    command = [sys.executable, "evaluate.py", str(run_dir), *flags]
    result = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    values = json.loads((run_dir / f"evaluation-step-00000008{'-ema' if flags else ''}.json").read_text())
    in_training = {
        f"{line['held_out'].removeprefix('ema/')}/{key}": value
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if line.get("held_out") and line["step"] == 8 and line["held_out"].startswith("ema/") == bool(flags)
        for key, value in line.items()
        if "_R@" in key
    }
    assert in_training and {key: values[key] for key in in_training} == pytest.approx(in_training, abs=1.01 / 394)
    return values


def test_when_a_rank_dies_all_leave_within_a_minute_and_one_says_why(tmp_path, fork):
    process = launch(3, *SMALL, *fork, "--steps", 1000, "--eval-every", 1000, "--save-every", 1000, "--run-dir", tmp_path)
    wait_for(reached(tmp_path, 2), process)
    victim = next(p for p in ranks_of(process) if "--local_rank=2" in p.cmdline())
    died = time.monotonic()
    victim.kill()
    status, output = finish(process, limit_s=60)
    assert status != 0 and time.monotonic() - died < 60
    assert output.count("error: rank 2 (text 0, replica 0) died without a message") == 1, output[-3000:]
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["--deepspeed_config", "ds_configs/zero1_fp61.json"], "did you mean ds_configs/zero1_fp", 1),
        (["--deepspeed_config", "ds_configs/zero1_fp16.json"], "does not compute in fp16", 2),
        (["--image-tower", "resnet81"], "resnet18", 2),
        (["--text-tower", "bert-bse-uncased"], "did you mean 'bert-base-uncased'", 2),
        (["--data", "jsonl:nowhere.jsonl"], "nowhere.jsonl", 1),
        (["--resume", "nowhere"], "no such folder", 1),
        (["--tokenizer", "./nowhere"], "no such folder", 1),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_is_answered_with_one_message(tmp_path, arguments, message, status):
    """Status 2: another start would meet it again; 1: a file that is not there may come back."""
    result = subprocess.run(
        [sys.executable, "train.py", *SMALL, "--steps", "2", *arguments, "--run-dir", str(tmp_path)],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert result.returncode == status
    assert message in result.stderr and result.stderr.count("train.py: error:") == 1
    assert "Traceback" not in result.stderr


def test_every_rank_meets_the_error_and_one_tells_it(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"image_path": "a.png", "text": "a"}\n{"image_path": "b.png", "txet": "b"}\n')
    status, output = finish(launch(4, "--data", f"jsonl:{data}", "--run-dir", tmp_path / "run"))
    assert status == 2 and output.count("train.py: error:") == 1, output[-3000:]
    assert f"{data}:2" in output and "text" in output


def test_a_folder_that_holds_another_run_is_refused(tmp_path):
    command = [sys.executable, "train.py", *SMALL, "--steps", "1", "--eval-every", "9", "--run-dir", str(tmp_path)]
    first = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
    assert first.returncode == 0, first.stderr
    second = subprocess.run([*command, "--seed", "1"], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
    assert second.returncode == 2 and "options.seed: there 0, here 1" in second.stderr


def test_own_data_and_pretrained_text_weights_then_an_export_to_go_on_from(tmp_path):
    """A JSONL file, a Hugging Face folder with weights and tokenizer, two branches with replicas of their own; the exported model, and
    a run on one process that begins with it."""
    from transformers import BertConfig, BertModel

    from data.sources import open_source
    from data.tokenizer import load_tokenizer
    from launch.exporting import canonical_state
    from launch.trained import open_run

    demo = open_source("demo")
    (tmp_path / "pictures").mkdir()
    lines = []
    for i in range(0, 3000, 50):
        (tmp_path / "pictures" / f"{i}.png").write_bytes(demo.image_bytes(i))
        lines.append(json.dumps({"image_path": f"pictures/{i}.png", "text": demo.captions(i), "id": demo.identity(i)}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    folder = tmp_path / "text tower"
    load_tokenizer(None, [demo.captions(i)[0] for i in range(0, 3000, 50)], folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    small = BertConfig(vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    BertModel(small).save_pretrained(folder)
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config |= {"train_batch_size": 12}
    config["branches"] |= {
        "layout": "fork",
        "replicas": {"image": 2, "text": 1},
        "schedule": "replay",
        "micro_batch_size": {"image": 3, "text": 4},
    }
    (tmp_path / "how.json").write_text(json.dumps(config))
    run_dir = tmp_path / "run"
    process = launch(
        3, "--deepspeed_config", tmp_path / "how.json", "--data", f"jsonl:{tmp_path / 'pairs.jsonl'}", "--image-tower",
        "resnet18:layers=1-1-1-1", "--image-size", "64", "--text-tower", folder, "--text-weights", folder, "--max-text-tokens", "16",
        "--embed-dim", "16", "--epochs", "2", "--run-dir", run_dir,
    )  # fmt: skip
    status, output = finish(process)
    assert status == 0, output[-3000:]
    assert "fork: image 0 ×2 | text 0 ×1" in output and "validation (6)" in output
    assert set(metrics(run_dir)) == set(range(1, 9))  # 54 of 60 samples train: 4 whole batches of 12 an epoch

    out, second = tmp_path / "a model", tmp_path / "second"
    exported = python("export.py", run_dir, out)
    assert exported.returncode == 0 and exported.stdout.splitlines()[-1] == str(out), exported.stderr
    same_data = ["--deepspeed_config", tmp_path / "how.json", "--data", f"jsonl:{tmp_path / 'pairs.jsonl'}"]
    (tmp_path / "how.json").write_text(json.dumps(config | {"branches": {"layout": "merged", "schedule": "batch_sync"}}))
    go_on = python("train.py", "--import", out, *same_data, "--seed", "9", "--steps", "1", "--run-dir", second)
    assert go_on.returncode == 0, go_on.stderr[-3000:]
    first, then = (canonical_state(open_run(run).layers) for run in (run_dir, second))
    assert first.keys() == then.keys()
    for name in ("image.conv1.weight", "text.encoder.layer.1.output.dense.weight", "head.image_projection.weight", "head.logit_scale"):
        assert (first[name] - then[name]).abs().max() < 2e-3  # one step of at most 1e-3; other first values differ by 0.05 and more


def python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
