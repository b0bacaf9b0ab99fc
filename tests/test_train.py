"""train.py in real processes, alone and on ranks without a launcher. `test_faults.py`,
`test_screen.py` and `docs/test_notebook.py` start it as a user does."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_script import ROOT
from launched import (
    BATCH,
    LIMIT_S,
    SMALL,
    environment,
    finish,
    fork_flags,
    metrics,
    ranks_of,
    reached,
    run_to_end,
    start,
    wait_for,
    write_pairs,
)
from PIL import Image

from engine.trace import COMPUTE
from launch.inference.trained import open_run
from launch.run.stopping import STOPPED
from launch.run.trace_file import read_trace
from launch.tools.timeline import run as draw_timeline


@pytest.fixture(scope="module")
def fork(module_folder):
    return fork_flags(module_folder("config"))


@pytest.fixture(scope="module")
def pairs(module_folder):
    """320 emoji, of which 48 are held out; each rank loads by itself."""
    spec = write_pairs(module_folder("pairs"), 320)
    return ["--data", spec, "--val-fraction", 0.15, "--max-text-tokens", 16, "--workers", 0]


@pytest.fixture(scope="module")
def merged(module_folder):
    """For one rank, which measures nothing either."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text()) | {
        "train_batch_size": BATCH
    }
    config["branches"] |= {"layout": "merged", "schedule": "batch_sync"}
    file = module_folder("config") / "merged.json"
    file.write_text(json.dumps(config))
    return ["--deepspeed_config", file]


def test_eight_processes_on_a_machine_without_a_gpu(tmp_path):
    run_dir = tmp_path / "a run"  # a path with a space
    status, output = run_to_end("train.py", *SMALL, "--steps", 2, "--run-dir", run_dir, ranks=8)
    assert status == 0, output[-3000:]
    assert set(metrics(run_dir)) == {1, 2}
    evaluations = [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        if "held_out" in line
    ]
    assert {(e["step"], e["held_out"]) for e in evaluations} == {
        (s, h) for s in (0, 2) for h in ("composition", "family")
    }
    record = json.loads((run_dir / "config.json").read_text())
    assert record["world_size"] == 8 and sum(len(s["ranks"]) for s in record["stage_graph"]) == 8
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step-00000002"
    assert "Zero-shot retrieval" in output and "composition (394)" in output


@pytest.mark.parametrize("layout", ["fork", "auto"])
def test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not_been_stopped(
    tmp_path, monkeypatch, fork, pairs, layout
):
    """Same losses and norms to the last bit, same weights; dropout, augmentation and BatchNorm are
    all on. With "auto", what was measured at the first start decides again, whatever a new
    measurement would say. One of the two has the other loss, the other parameter groups, averaged
    weights, which are evaluated, and matching with weights that follow both losses."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    (tmp_path / "auto.json").write_text(json.dumps(config | {"train_batch_size": BATCH}))
    fused = [
        "--fusion",
        1,
        "--fusion-width",
        16,
        "--fusion-heads",
        2,
        "--loss-weights",
        "measured",
        "--loss-weights-every",
        2,
    ]
    chosen = (
        [*fork, *fused, "--eval-ema"]
        if layout == "fork"
        else ["--deepspeed_config", tmp_path / "auto.json", "--loss", "sigmoid"]
    )
    flags = ["--ema"] if layout == "fork" else []
    arguments = [
        *SMALL,
        *pairs,
        *chosen,
        "--trace-every",
        4,
        "--steps",
        8,
        "--save-every",
        100,
        "--eval-every",
        100,
    ]
    (tmp_path / "stopped").mkdir()
    status, output = run_to_end("train.py", *arguments, "--run-dir", tmp_path / "whole", ranks=2)
    assert status == 0 and ("auto: " in output) == (layout == "auto"), output[-3000:]
    if layout == "auto":  # the two are to run the same way
        shutil.copy(tmp_path / "whole" / "costs.json", tmp_path / "stopped")
    monkeypatch.setenv("HOLD_AFTER", "3")
    (tmp_path / "stopped" / "hold").touch()
    run = start("tests/held_training.py", *arguments, "--run-dir", tmp_path / "stopped", ranks=2)
    wait_for(reached(tmp_path / "stopped", 3), run)
    if layout == "fork":  # one rank gets the signal, all stop
        ranks_of(run)[-1].send_signal(signal.SIGUSR1)
    else:
        (tmp_path / "stopped" / "stop").touch()
    (tmp_path / "stopped" / "hold").unlink()
    status, output = finish(run)
    assert status == STOPPED and "stopped (" in output, output[-2000:]
    assert not (tmp_path / "stopped" / "stop").exists()
    done = max(metrics(tmp_path / "stopped"))
    assert 3 <= done < 8
    status, output = run_to_end("train.py", *arguments, "--run-dir", tmp_path / "stopped", ranks=2)
    assert status == 0, output[-2000:]
    whole, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "stopped")
    assert set(whole) == set(resumed) == set(range(1, 9))
    for step in whole:
        of_groups = (
            f"{kind}/{g}"
            for kind in ("grad_norm", "clip_coefficient", "clipped_share")
            for g in ("image", "text", "head")
        )
        of_losses = (
            ("matching_loss", "matching_accuracy", "loss_weight/matching")
            if layout == "fork"
            else ()
        )
        for key in ("loss", "lr", "logit_scale_exp", *of_groups, *of_losses):
            assert whole[step][key] == resumed[step][key], (step, key)
        assert whole[step].get("logit_bias") == resumed[step].get("logit_bias")
        assert ("logit_bias" in whole[step]) == (layout == "auto")
        assert whole[step].get("lr/image") == resumed[step].get("lr/image")
        assert ("lr/image" in whole[step]) == (layout == "fork")
        assert (
            0 < whole[step]["padded_text_tokens"] <= BATCH * 16
        )  # of the texts of the step, not of an evaluation before it
    assert evaluate(tmp_path / "whole", *flags) == evaluate(tmp_path / "stopped", *flags)
    if layout == "auto":
        with pytest.raises(ValueError, match="holds no moving average of the weights"):
            open_run(tmp_path / "whole", averaged=True)
    traced = read_trace(tmp_path / "stopped" / "trace.json")
    assert list(traced) == [3, 4, 8]
    if layout == "fork":  # busy is what computes, without the waiting in it
        for rank, stage in enumerate(("image 0", "text 0")):
            computing = sum(s.seconds for s in traced[8][rank] if s.name in COMPUTE)
            assert 0 < resumed[8][f"busy_s/{stage}"] < computing + 1e-4 < resumed[8]["step_s"]
    assert (
        draw_timeline([str(tmp_path / "stopped")]) == 0
        and (tmp_path / "stopped" / "timeline.html").stat().st_size > 10_000
    )
    assert (tmp_path / "stopped" / "costs.json").is_file() == (layout == "auto")
    if layout == "fork":
        updates = [
            [json.loads(line)["step"] for line in (tmp_path / run / "loss_weights.jsonl").open()]
            for run in ("whole", "stopped")
        ]
        assert updates[0] == updates[1] and 8 in updates[0]


def test_a_line_of_stages_trains_as_one_rank_does(tmp_path, merged, pairs):
    """Images of several shapes and texts of any length, which a worker loads: the second stage
    learns the shapes of a step from the loader, before the first loads it."""
    config = json.loads(merged[1].read_text())
    config["branches"] |= {"stages": {"merged": 2}, "micro_batch_size": 6}
    config["branches"] |= {"balance": {"strategy": "off"}}  # deals depend on the number of stages
    (tmp_path / "line.json").write_text(json.dumps(config))
    config["branches"] |= {"stages": {"merged": 1}}
    (tmp_path / "one.json").write_text(json.dumps(config))
    length = ["--steps", 4, "--eval-every", 2, "--save-every", 100]
    flags = [*SMALL, *pairs, *length, "--workers", 1, "--image-buckets", 3]
    for name, ranks in (("line", 2), ("one", 1)):
        own = ["--deepspeed_config", tmp_path / f"{name}.json", "--run-dir", tmp_path / name]
        status, output = run_to_end("train.py", *flags, *own, ranks=ranks)
        assert status == 0, output[-3000:]
    line, one = metrics(tmp_path / "line"), metrics(tmp_path / "one")
    assert sorted(line) == sorted(one) == [1, 2, 3, 4]
    for step in line:
        assert line[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-4)
        assert line[step]["padded_text_tokens"] == one[step]["padded_text_tokens"]
    held_out = [metrics(tmp_path / name, "alignment") for name in ("line", "one")]
    assert sorted(held_out[0]) == sorted(held_out[1]) == [0, 2, 4]
    for step, found in held_out[0].items():
        assert found["alignment"] == pytest.approx(held_out[1][step]["alignment"], rel=1e-4)


def test_a_run_whose_losses_stay_not_finite_stops_and_names_the_last_good_checkpoint(
    tmp_path, pairs
):
    """A learning rate that no model survives: the first step is taken, the others are not finite
    and change nothing."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text()) | {
        "train_batch_size": 16
    }
    config["optimizer"]["params"]["lr"] = 1e30
    del config["scheduler"]
    config["branches"] |= {"max_bad_steps": 3, "layout": "merged", "schedule": "batch_sync"}
    (tmp_path / "how.json").write_text(json.dumps(config))
    run_dir = tmp_path / "run"
    arguments = [
        *SMALL,
        *pairs,
        "--deepspeed_config",
        tmp_path / "how.json",
        "--steps",
        9,
        "--save-every",
        1,
        "--eval-every",
        9,
    ]
    result = python("train.py", *arguments, "--run-dir", run_dir)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    bad = [json.loads(line) for line in (run_dir / "bad_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in bad] == [2, 3, 4] and {
        len(line["samples"]) for line in bad
    } == {16}
    assert bad[0]["loss"] is None and set(bad[0]["not_finite"]["image"]) <= set(bad[0]["samples"])
    assert [line["skipped_steps"] for line in metrics(run_dir).values()] == [0, 1, 2, 3]
    checkpoint = run_dir / "checkpoints" / "step-00000003"
    assert (
        checkpoint.is_dir()
        and "3 steps in a row had a loss or gradients that are not finite" in result.stderr
    )
    assert f"the last good checkpoint is {checkpoint}." in result.stderr


def test_a_run_goes_on_with_other_ranks_from_the_newest_whole_checkpoint(tmp_path, fork, pairs):
    """Trained on two ranks, a tower each; its last checkpoint is damaged. One rank with both towers
    takes the one before, and says so.

    Without dropout, whose draws are numbered by micro-batch: the text branch of the fork is cut
    into more of them.
    """
    no_dropout = ["--text-tower", "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"]
    arguments = [
        *SMALL,
        *no_dropout,
        *pairs,
        "--steps",
        4,
        "--save-every",
        1,
        "--eval-every",
        4,
        "--run-dir",
        tmp_path,
    ]
    arguments += ["--keep-checkpoints", 2, "--keep-every", 2]
    status, output = run_to_end("train.py", *arguments, *fork, ranks=2)
    assert status == 0, output[-3000:]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        f"step-0000000{step}" for step in (2, 3, 4)
    ]
    before = metrics(tmp_path)
    damaged = tmp_path / "checkpoints" / "step-00000004" / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    config = json.loads(fork[1].read_text())
    config["branches"] |= {
        "layout": "merged",
        "stages": {"merged": 1},
        "schedule": "replay",
        "micro_batch_size": BATCH,
    }
    (tmp_path / "merged.json").write_text(json.dumps(config))
    status, output = run_to_end(
        "train.py", *arguments, "--deepspeed_config", tmp_path / "merged.json", ranks=1
    )
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
    """What evaluate.py finds of the last checkpoint, or with --ema of its averaged weights: what
    training found at its end."""
    status, output = run_to_end("evaluate.py", run_dir, *flags)
    assert status == 0, output
    values = json.loads(
        (run_dir / f"evaluation-step-00000008{'-ema' if flags else ''}.json").read_text()
    )
    in_training = {
        f"{line['held_out'].removeprefix('ema/')}/{key}": value
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if line.get("held_out")
        and line["step"] == 8
        and line["held_out"].startswith("ema/") == bool(flags)
        for key, value in line.items()
        if "_R@" in key
    }
    assert in_training and {key: values[key] for key in in_training} == pytest.approx(
        in_training, abs=1.01 / 48
    )
    return values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--deepspeed_config", "ds_configs/zero1_fp61.json"], "did you mean ds_configs/zero1_fp"),
        (
            ["--deepspeed_config", {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}],
            "DeepSpeed has it for GPUs only",
        ),
        (["--image-tower", "resnet81"], "resnet18"),
        (["--text-tower", "bert-bse-uncased"], "did you mean 'bert-base-uncased'"),
        (["--data", "jsonl:nowhere.jsonl"], "nowhere.jsonl"),
        (["--resume", "nowhere"], "no such folder"),
        (["--tokenizer", "./nowhere"], "no such folder"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, list) else "",
)
def test_bad_input_is_answered_with_one_message(tmp_path, merged, pairs, arguments, message):
    """Status 2, with which supervise.sh starts nothing again."""
    if isinstance(arguments[-1], dict):  # keys of the JSON file
        changed = json.loads(merged[-1].read_text()) | arguments[-1]
        (tmp_path / "changed.json").write_text(json.dumps(changed))
        arguments = [*arguments[:-1], tmp_path / "changed.json"]
    ended, output = run_to_end(
        "train.py", *SMALL, *merged, *pairs, "--steps", 2, *arguments, "--run-dir", tmp_path
    )
    assert ended == 2
    assert message in output and output.count("train.py: error:") == 1
    assert "Traceback" not in output


def test_every_rank_meets_the_error_and_one_tells_it(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"image_path": "a.png", "txet": "a"}\n{"image_path": "a.png", "txet": "b"}\n')
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    given = ["--data", f"jsonl:{data}", "--run-dir", tmp_path / "run"]
    status, output = run_to_end("train.py", *given, ranks=2)
    assert status == 2 and output.count("train.py: error:") == 1, output[-3000:]
    assert f"{data}:2" in output and "text" in output


def test_too_few_or_too_many_processes_are_answered_before_anything_is_prepared(tmp_path, fork):
    """The data does not exist, which nobody comes to see, and no folder is made."""
    arguments = ["--data", "jsonl:nowhere.jsonl", "--run-dir", tmp_path / "run"]
    status, output = run_to_end("train.py", *fork, *arguments, ranks=1)
    assert status == 2 and output.count("train.py: error:") == 1, output
    assert (
        "layout 'fork' needs a rank for each of its 2 stages" in output
        and "deepspeed --num_gpus 2" in output
    )
    config = json.loads(fork[1].read_text())
    config["branches"]["replicas"] = {"image": 1, "text": 1}
    (tmp_path / "three.json").write_text(json.dumps(config))
    status, output = run_to_end(
        "train.py", "--deepspeed_config", tmp_path / "three.json", *arguments, ranks=3
    )
    assert status == 2 and output.count("train.py: error:") == 1, output
    assert "(image 1×1 + text 1×1) fill 2 ranks, but there are 3" in output
    assert (
        "nowhere.jsonl" not in output
        and "Traceback" not in output
        and not (tmp_path / "run").exists()
    )


def test_a_build_that_was_killed_does_not_hold_up_a_run_that_offloads(tmp_path, merged, pairs):
    """A killed build of DeepSpeed's CPUAdam leaves torch's lock file, for which older versions of
    torch wait for ever; newer ones lock the file itself. The first time on a machine, the op is
    compiled here."""
    config = json.loads(merged[1].read_text())
    del config["optimizer"]["params"]["torch_adam"]
    config["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "offload.json").write_text(json.dumps(config))
    lock = Path(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam", "lock")
    lock.parent.mkdir(exist_ok=True)
    lock.write_text("of a build that was killed")
    arguments = [*SMALL, "--deepspeed_config", tmp_path / "offload.json", *pairs, "--steps", 1]
    status, output = run_to_end("train.py", *arguments, "--run-dir", tmp_path / "run")
    assert status == 0, output
    assert not lock.exists() or not lock.read_text()  # it was taken away, not waited for


def test_ranks_without_a_gpu_that_are_told_to_use_one_are_answered_once():
    """Two nodes, by what their environment says: the first rank says it, and none waits."""
    ranks = []
    for rank in range(2):
        variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "DS_ACCELERATOR": "cuda"}
        env = environment() if not ranks else ranks[0][0]
        env = env | {name: str(value) for name, value in variables.items()}
        started = subprocess.Popen(
            [sys.executable, "train.py"], cwd=ROOT, env=env, text=True, stderr=subprocess.PIPE
        )
        ranks.append((env, started))
    said = [started.communicate(timeout=LIMIT_S)[1] for _, started in ranks]
    assert [started.returncode for _, started in ranks] == [2, 2], said
    assert "error: DS_ACCELERATOR asks for cuda" in said[0] and "Traceback" not in said[0], said
    assert "error" not in said[1], said


def test_ranks_with_other_options_are_refused_before_anything_is_built(tmp_path, fork, pairs):
    """The same command on all nodes, but for one word."""
    how = ["train.py", *SMALL, *fork, *pairs, "--steps", 1, "--run-dir", tmp_path / "run"]
    status, output = run_to_end(*how, ranks=2, last=["--seed", 3])
    assert status == 2 and output.count("train.py: error:") == 1, output
    assert "options.seed: 0 on rank 0; 3 on rank 1" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run_is_refused(tmp_path, merged, pairs):
    same = [
        "train.py",
        *SMALL,
        *merged,
        *pairs,
        "--steps",
        1,
        "--eval-every",
        9,
        "--run-dir",
        tmp_path,
    ]
    status, output = run_to_end(*same)
    assert status == 0, output
    assert (
        "Zero-shot retrieval of held-out samples" in output
        and "no samples were held out" not in output
    )
    status, output = run_to_end(*same, "--seed", 1)
    assert status == 2 and "options.seed: there 0, here 1" in output


def test_a_run_that_holds_nothing_out_shows_no_table(tmp_path, merged, pairs):
    status, output = run_to_end(
        "train.py",
        *SMALL,
        *merged,
        *pairs,
        "--val-fraction",
        0,
        "--steps",
        1,
        "--run-dir",
        tmp_path,
    )
    assert status == 0, output
    assert (
        output.count("no samples were held out (--val-fraction 0)") == 1
        and "Zero-shot" not in output
        and "chance" not in output
    )
    status, output = run_to_end("evaluate.py", tmp_path)
    assert (
        status == 2
        and output.count("no samples were held out (--val-fraction 0)") == 1
        and "--val-data" in output
        and "R@1" not in output
    )


def test_own_data_and_pretrained_text_weights_then_an_export_to_go_on_from(tmp_path):
    """A JSONL file, a Hugging Face folder with weights and tokenizer, two branches with replicas of
    their own; the exported model, and a run on one process that begins with it."""
    from transformers import BertConfig, BertModel

    from data.index.sources import open_source
    from data.modalities.tokenizer import train_tokenizer
    from launch.exporting.writing import canonical_state
    from launch.inference.trained import open_run

    own_data = write_pairs(tmp_path / "own", 60)
    source = open_source(own_data)
    folder = tmp_path / "text tower"
    train_tokenizer([source.captions(i)[0] for i in range(60)], folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    small = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
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
    status, output = run_to_end(
        "train.py", "--deepspeed_config", tmp_path / "how.json", "--data", own_data, "--image-tower", "resnet18:layers=1-1-1-1",
        "--image-size", "32", "--text-tower", folder, "--text-weights", folder, "--max-text-tokens", "16", "--embed-dim", "16",
        "--epochs", "2", "--workers", "0", "--run-dir", run_dir, ranks=3,
    )  # fmt: skip
    assert status == 0, output[-3000:]
    assert "fork: image 0 ×2 | text 0 ×1" in output and "validation (6)" in output
    assert set(metrics(run_dir)) == set(
        range(1, 9)
    )  # 54 of 60 samples train: 4 whole batches of 12 an epoch

    out, second = tmp_path / "a model", tmp_path / "second"
    exported = python("export.py", run_dir, out)
    assert exported.returncode == 0 and exported.stdout.splitlines()[-1] == str(out), (
        exported.stderr
    )
    same_data = ["--deepspeed_config", tmp_path / "how.json", "--data", own_data]
    (tmp_path / "how.json").write_text(
        json.dumps(config | {"branches": {"layout": "merged", "schedule": "batch_sync"}})
    )
    status, output = run_to_end(
        "train.py",
        "--import",
        out,
        *same_data,
        "--seed",
        "9",
        "--steps",
        "1",
        "--workers",
        "0",
        "--run-dir",
        second,
    )
    assert status == 0, output[-3000:]
    first, then = (canonical_state(open_run(run).layers) for run in (run_dir, second))
    assert first.keys() == then.keys()
    for name in (
        "image.conv1.weight",
        "text.encoder.layer.1.output.dense.weight",
        "head.image_projection.weight",
        "head.logit_scale",
    ):
        assert (
            first[name] - then[name]
        ).abs().max() < 2e-3  # one step of at most 1e-3; other first values differ by 0.05 and more


def test_images_in_another_folder_are_found_from_any_working_directory(tmp_path, merged):
    """Trained with a relative --data-root, evaluated in another working directory; then on other
    samples, their root named in both ways."""
    root = tmp_path / "images here"
    spec = write_pairs(root, 60)
    file = tmp_path / "lists" / "pairs.csv"
    file.parent.mkdir()
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = [json.loads(line) for line in open(spec.partition(":")[2], encoding="utf-8")]
        absolute = [str(root / row["image_path"]) for row in rows[:30]]
        paths = absolute + [row["image_path"] for row in rows[30:]]
        csv.writer(out, delimiter="\t").writerows(
            [("filepath", "title"), *zip(paths, (row["text"][0] for row in rows))]
        )
    data = [
        "--data",
        f"tsv:{file}",
        "--data-root",
        "images here",
        "--max-text-tokens",
        16,
        "--workers",
        0,
    ]
    run_dir, arguments = tmp_path / "run", [ROOT / "train.py", *SMALL, *merged, *data, "--steps", 2]
    trained = python(*arguments, "--run-dir", run_dir, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr[-3000:]
    record = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    assert record["options"]["data_root"] == [str(root)]
    assert (
        record["data"]["samples"],
        record["data"]["bad_samples"],
        record["data"]["train_samples"],
    ) == (60, {}, 54)

    status, output = run_to_end("evaluate.py", run_dir, "--embeddings", tmp_path / "out")
    assert status == 0, output[-3000:]
    values = json.loads((run_dir / "evaluation-step-00000002.json").read_text())
    last = metrics(run_dir, "held_out")[2]
    assert values["validation/image_to_text_R@1"] == pytest.approx(
        last["image_to_text_R@1"], abs=1e-6
    )
    query = [
        "--query",
        "apple",
        "--embeddings",
        tmp_path / "out",
        "--picture",
        tmp_path / "found.png",
    ]
    status, output = run_to_end(
        "evaluate.py", run_dir, *query
    )  # the images by the spec that the embeddings were made of
    assert status == 0 and (tmp_path / "found.png").is_file(), output[-3000:]

    found = []
    for given in (
        ["--val-data", f"tsv:{file}?root={root}"],
        ["--val-data", f"tsv:{file}", "--data-root", root],
    ):
        status, output = run_to_end(
            "evaluate.py", run_dir, *given, "--json", tmp_path / "numbers.json"
        )
        assert status == 0, output[-3000:]
        found.append(json.loads((tmp_path / "numbers.json").read_text()))
    assert (
        found[0] == found[1]
        and found[0]["num_samples"] == {"validation": 60}
        and found[0]["left_out"] == 0
    )
    status, output = run_to_end("evaluate.py", run_dir, "--data-root", root)
    assert status == 2 and "--data-root: " in output and "none is given" in output


def python(*arguments, folder=ROOT):
    """As a user starts it where one process is enough."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment(), text=True, capture_output=True, timeout=LIMIT_S
    )
