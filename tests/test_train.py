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
    words,
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
    length = words("--limit-samples 400 --steps 2")
    status, output = run_to_end("train.py", *SMALL, *length, "--run-dir", run_dir, ranks=8)
    assert status == 0, output[-3000:]
    assert set(metrics(run_dir)) == {1, 2}
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    evaluations = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
    held_out = ("composition", "family")
    assert sorted(evaluations) == [(step, name) for step in (0, 2) for name in held_out]
    record = json.loads((run_dir / "config.json").read_text())
    assert record["world_size"] == 8 and sum(len(s["ranks"]) for s in record["stage_graph"]) == 8
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step-00000002"
    assert "Zero-shot retrieval" in output and "composition (394)" in output


@pytest.mark.parametrize(
    "layout", ["fork", pytest.param("auto", marks=pytest.mark.all("a second layout"))]
)
def test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not_been_stopped(
    tmp_path, monkeypatch, fork, pairs, layout
):
    """Same losses and norms to the last bit, same weights; dropout, augmentation and BatchNorm are
    all on. With "auto", what was measured at the first start decides again, whatever a new
    measurement would say. One of the two has the other loss, the other parameter groups, averaged
    weights, which are evaluated, and matching with weights that follow both losses."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    (tmp_path / "auto.json").write_text(json.dumps(config | {"train_batch_size": BATCH}))
    fused = "--fusion 1 --fusion-width 16 --fusion-heads 2 --loss-weights measured"
    chosen = (
        [*fork, *words(fused), "--loss-weights-every", 2, "--eval-ema"]
        if layout == "fork"
        else ["--deepspeed_config", tmp_path / "auto.json", "--loss", "sigmoid"]
    )
    flags = ["--ema"] if layout == "fork" else []
    length = words("--trace-every 4 --steps 8 --save-every 100 --eval-every 100")
    arguments = [*SMALL, *pairs, *chosen, *length]
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
    said = f"goes on from step-{done:08}, step {done} of 8, split and computed as before"
    assert said in " ".join(output.split())
    whole, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "stopped")
    assert set(whole) == set(resumed) == set(range(1, 9))
    compared = ["loss", "lr", "logit_scale_exp"]
    for kind in ("grad_norm", "clip_coefficient", "clipped_share"):
        compared += [f"{kind}/{group}" for group in ("image", "text", "head")]
    own = ["lr/image", "matching_loss", "matching_accuracy", "loss_weight/matching"]
    own, others = (own, ["logit_bias"]) if layout == "fork" else (["logit_bias"], own)
    for step, line in whole.items():
        for key in (*compared, *own):
            assert line[key] == resumed[step][key], (step, key)
        assert not {*others} & (line.keys() | resumed[step].keys())
        # of the texts of the step, not of an evaluation before it
        assert 0 < line["padded_text_tokens"] <= BATCH * 16
    assert held_out_at_the_end(tmp_path / "whole") == held_out_at_the_end(tmp_path / "stopped")
    check_evaluation(tmp_path / "stopped", *flags)
    if layout == "auto":
        with pytest.raises(ValueError, match="holds no moving average of the weights"):
            open_run(tmp_path / "whole", averaged=True)
    traced = read_trace(tmp_path / "stopped" / "trace.json")
    assert list(traced) == [3, 4, 8]
    if layout == "fork":  # busy is what computes, without the waiting in it
        for rank, stage in enumerate(("image 0", "text 0")):
            computing = sum(s.seconds for s in traced[8][rank] if s.name in COMPUTE)
            assert 0 < resumed[8][f"busy_s/{stage}"] < computing + 1e-4 < resumed[8]["step_s"]
    assert draw_timeline([str(tmp_path / "stopped")]) == 0
    assert (tmp_path / "stopped" / "timeline.html").stat().st_size > 10_000
    assert (tmp_path / "stopped" / "costs.json").is_file() == (layout == "auto")
    if layout == "fork":
        files = [tmp_path / run / "loss_weights.jsonl" for run in ("whole", "stopped")]
        updates = [[json.loads(line)["step"] for line in file.open()] for file in files]
        assert updates[0] == updates[1] and 8 in updates[0]


@pytest.mark.all("a second layout")
def test_a_line_of_stages_trains_as_one_rank_does(tmp_path, merged, pairs):
    """Images of several shapes and texts of any length, which a worker loads: the second stage
    learns the shapes of a step from the loader, before the first loads it."""
    config = json.loads(merged[1].read_text())
    config["branches"] |= {"stages": {"merged": 2}, "micro_batch_size": 6}
    config["branches"] |= {"balance": {"strategy": "off"}}  # deals depend on the number of stages
    (tmp_path / "line.json").write_text(json.dumps(config))
    config["branches"] |= {"stages": {"merged": 1}}
    (tmp_path / "one.json").write_text(json.dumps(config))
    length = "--steps 4 --eval-every 2 --save-every 100 --workers 1 --image-buckets 3"
    flags = [*SMALL, *pairs, *words(length)]
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


def test_a_run_goes_on_with_other_ranks_from_the_newest_whole_checkpoint(tmp_path, fork, pairs):
    """Trained on two ranks, a tower each; its last checkpoint is damaged. One rank with both towers
    takes the one before, and says so.

    Without dropout, whose draws are numbered by micro-batch: the text branch of the fork is cut
    into more of them.
    """
    no_dropout = ["--text-tower", "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"]
    length = words("--steps 4 --save-every 1 --eval-every 4 --keep-checkpoints 2 --keep-every 2")
    arguments = [*SMALL, *no_dropout, *pairs, *length, "--run-dir", tmp_path]
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


def held_out_at_the_end(run_dir):
    """What training found of its last weights, and of the averaged ones where there are."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if line.get("held_out") and line["step"] == 8]
    assert last
    return {
        f"{line['held_out']}/{key}": value
        for line in last
        for key, value in line.items()
        if "_R@" in key or "alignment" in key
    }


def check_evaluation(run_dir, *flags):
    """evaluate.py finds of the last checkpoint, or with --ema of its averaged weights, what
    training found at its end."""
    status, output = run_to_end("evaluate.py", run_dir, *flags)
    assert status == 0, output
    file = run_dir / f"evaluation-step-00000008{'-ema' if flags else ''}.json"
    values = json.loads(file.read_text())
    in_training = {
        key.removeprefix("ema/"): value
        for key, value in held_out_at_the_end(run_dir).items()
        if "_R@" in key and key.startswith("ema/") == bool(flags)
    }
    assert in_training and {key: values[key] for key in in_training} == pytest.approx(
        in_training, abs=1.01 / 48
    )


# what a shell leaves of a spec, whose end must be shown although it is long
SHARDS = f"stream:/nowhere{'/of/many/folders' * 12}/{{000..999}}.parquet?text=caption&where=width>9"
CUT_SHARDS = (
    'folders/{000..999}.parquet?text=caption&where=width>9"] on rank 0; '
    f'…{SHARDS.partition("&")[0][-158:]}"] on rank 1\n    where a shell has taken a part of an '
    "argument, which it does with {…}, *, ?, &, ;, > and quotes, put the argument into quotes, or give "
    "the arguments in a file, as @FILE"
)


def test_bad_input_is_answered_with_one_message(tmp_path, merged, fork, pairs):
    """Status 2, with which supervise.sh starts nothing again: found in the flags, in the JSON, by
    the planner, in the data, by DeepSpeed. All start at once, and what is found early makes no
    folder."""
    config = json.loads(merged[1].read_text()) | {"optimizer": {"type": "Lion"}}
    (tmp_path / "lion.json").write_text(json.dumps(config))
    config = json.loads(fork[1].read_text())
    config["branches"]["replicas"] = {"image": 1, "text": 1}
    (tmp_path / "three.json").write_text(json.dumps(config))
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"image_path": "a.png", "txet": "a"}\n{"image_path": "a.png", "txet": "b"}\n')
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    nowhere = [*fork, "--data", "jsonl:nowhere.jsonl"]  # which nobody comes to see
    one = [*SMALL, *merged, *pairs]
    cases = [
        (None, [*one, "--deepspeed_config", "ds_configs/zero1_fp61.json"], "mean ds_configs/zero1"),
        (None, [*one, "--deepspeed_config", tmp_path / "lion.json"], "for GPUs only"),
        (None, [*one, "--tokenizer", "./nowhere"], "no such folder"),
        (1, nowhere, "needs a rank for each of its 2 stages"),
        (3, [*nowhere, "--deepspeed_config", tmp_path / "three.json"], "fill 2 ranks, but there"),
        (2, ["--data", f"jsonl:{data}"], f"{data}:2"),
        (2, [*SMALL, *fork, *pairs], "options.seed: 0 on rank 0; 3 on rank 1"),
        (2, [*nowhere, "--eval-every", 2], "options.eval_every: 2 on rank 0; 1 on rank 1"),
        (2, [*fork, "--data", SHARDS], CUT_SHARDS),
    ]
    others = {
        "options.seed": ["--seed", 3],
        "options.eval_every": ["--eval-every", 1],
        "&where=": ["--set", f"data={SHARDS.partition('&')[0]}"],
    }
    runs = []
    for number, (ranks, arguments, message) in enumerate(cases):
        last = next((words for key, words in others.items() if key in message), [])
        given = [*arguments, "--steps", 1, "--run-dir", tmp_path / f"run{number}"]
        runs.append(start("train.py", *given, ranks=ranks, last=last))
    for number, (run, (ranks, _, message)) in enumerate(zip(runs, cases)):
        status, output = finish(run)
        assert status == 2 and message in output, output[-3000:]
        assert output.count("train.py: error:") == 1 and "Traceback" not in output, message
        assert ranks is None or ":2" in message or not (tmp_path / f"run{number}").exists()
        assert "nowhere.jsonl" not in output, message


@pytest.mark.all("compiles an op of DeepSpeed")
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


@pytest.mark.all("starts programs that end in an error")
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


def test_a_run_that_holds_nothing_out_shows_no_table_and_keeps_its_folder(tmp_path, merged, pairs):
    same = ["train.py", *SMALL, *merged, *pairs, "--val-fraction", 0, "--steps", 1]
    status, output = run_to_end(*same, "--run-dir", tmp_path)
    nothing = "no samples were held out (--val-fraction 0)"
    assert status == 0 and output.count(nothing) == 1, output
    assert "Zero-shot" not in output and "chance" not in output
    status, output = run_to_end(*same, "--run-dir", tmp_path, "--seed", 1)
    assert status == 2 and "options.seed: there 0, here 1" in output
    status, output = run_to_end("evaluate.py", tmp_path)
    assert status == 2 and output.count(nothing) == 1 and "--val-data" in output
    assert "R@1" not in output


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
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small = BertConfig(vocab_size=len(vocabulary), **sizes, intermediate_size=64)
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
    towers = ["--image-tower", "resnet18:layers=1-1-1-1", "--text-tower", folder]
    sizes = words("--image-size 32 --max-text-tokens 16 --embed-dim 16 --epochs 2 --workers 0")
    how = ["--deepspeed_config", tmp_path / "how.json", "--data", own_data, "--run-dir", run_dir]
    how += [*towers, "--text-weights", folder, *sizes]
    status, output = run_to_end("train.py", *how, ranks=3)
    assert status == 0, output[-3000:]
    assert "fork: image 0 ×2 | text 0 ×1" in output and "validation (6)" in output
    # 54 of 60 samples train: 4 whole batches of 12 an epoch
    assert set(metrics(run_dir)) == set(range(1, 9))

    out, second = tmp_path / "a model", tmp_path / "second"
    status, output = run_to_end("export.py", run_dir, out)
    assert status == 0 and output.splitlines()[-1] == str(out), output
    config["branches"] = {"layout": "merged", "schedule": "batch_sync"}
    (tmp_path / "how.json").write_text(json.dumps(config))
    same = ["--deepspeed_config", tmp_path / "how.json", "--data", own_data, "--import", out]
    how = [*same, *words("--seed 9 --steps 1 --workers 0"), "--run-dir", second]
    status, output = run_to_end("train.py", *how)
    assert status == 0, output[-3000:]
    first, then = (canonical_state(open_run(run).layers) for run in (run_dir, second))
    assert first.keys() == then.keys()
    last = "text.encoder.layer.1.output.dense.weight"
    for name in ("image.conv1.weight", last, "head.image_projection.weight", "head.logit_scale"):
        # one step of at most 1e-3; other first values differ by 0.05 and more
        assert (first[name] - then[name]).abs().max() < 2e-3, name


@pytest.mark.all("starts one more run")
def test_images_in_another_folder_are_found_from_any_working_directory(tmp_path, merged):
    """Trained with a relative --data-root, evaluated in another working directory; then on other
    samples, their root named in both ways."""
    root = tmp_path / "images here"
    spec = write_pairs(root, 60)
    file = tmp_path / "lists" / "pairs.csv"
    file.parent.mkdir()
    rows = [json.loads(line) for line in open(spec.partition(":")[2], encoding="utf-8")]
    paths = [str(root / row["image_path"]) for row in rows[:30]]  # absolute
    paths += [row["image_path"] for row in rows[30:]]
    with file.open("w", newline="", encoding="utf-8") as out:
        lines = zip(paths, (row["text"][0] for row in rows))
        csv.writer(out, delimiter="\t").writerows([("filepath", "title"), *lines])
    run_dir = tmp_path / "run"
    how = [*SMALL, *merged, "--data", f"tsv:{file}", "--run-dir", run_dir]
    how += ["--data-root", "images here", *words("--max-text-tokens 16 --workers 0 --steps 2")]
    status, output = run_to_end("train.py", *how, folder=tmp_path)
    assert status == 0, output[-3000:]
    record = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    assert record["options"]["data_root"] == [str(root)]
    seen = [record["data"][key] for key in ("samples", "bad_samples", "train_samples")]
    assert seen == [60, {}, 54]

    def evaluate(*given):
        status, output = run_to_end("evaluate.py", run_dir, *given)
        assert status == 0, output[-3000:]

    key, out = "image_to_text_R@1", ["--embeddings", tmp_path / "out"]
    evaluate(*out)
    values = json.loads((run_dir / "evaluation-step-00000002.json").read_text())
    last = metrics(run_dir, "held_out")[2]
    assert values[f"validation/{key}"] == pytest.approx(last[key], abs=1e-6)
    # the images by the spec that the embeddings were made of
    evaluate("--query", "apple", *out, "--picture", tmp_path / "found.png")
    assert (tmp_path / "found.png").is_file()
    found, numbers = [], tmp_path / "numbers.json"
    for given in ([f"tsv:{file}?root={root}"], [f"tsv:{file}", "--data-root", root]):
        evaluate("--val-data", *given, "--json", numbers)
        found.append(json.loads(numbers.read_text()))
    assert found[0] == found[1] and found[0]["num_samples"] == {"validation": 60}
    assert found[0]["left_out"] == 0
    status, output = run_to_end("evaluate.py", run_dir, "--data-root", root)
    assert status == 2 and "--data-root: " in output and "none is given" in output
