"""The folder of a run: it knows which run it holds, and its files can be read by anyone."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import socket
import time
from dataclasses import replace

import psutil
import pytest
from cost_models import BRANCHES, proportional
from launched import SMALL, run_to_end

from common import __version__
from common.files import cut_lines, lines_from_end
from engine.config.deepspeed_keys import DEEPSPEED_KEYS
from engine.config.reading import BranchesBlock, check_config
from engine.optimizer.bad_steps import BadStep
from engine.planning.planner import plan_run
from launch.config.options import parse_options
from launch.journal import Journal
from launch.run.folder import (
    BRANCHES_FREE_TO_CHANGE,
    BRANCHES_SPLIT,
    DEEPSPEED_FREE_TO_CHANGE,
    RunFolder,
    choose_folder,
    training_identity,
)
from models.towers.building import build_towers

CONFIG = {"train_batch_size": 48, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
BLOCK = {"layout": "auto", "gradient_clipping": {"image": 1.0}, "max_bad_steps": 10}


def identity(words="", config=CONFIG, block=BLOCK, plan=None):
    """What refuse_other_run compares."""
    options = parse_options(words.split())
    return training_identity(options.record(), config, block, plan), options.resume


def lines_in(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_in(file):
    return [line["step"] for line in lines_in(file)]


def plan_for(world_size, block=BLOCK, config=CONFIG):
    return plan_run(
        *check_config({**config, "branches": block}, BRANCHES),
        world_size,
        proportional({"image": [1.0], "text": [1.0]}),
    )


@pytest.fixture(scope="module")
def towers():
    return build_towers("resnet18:layers=1-1-1-1", "bert-tiny", 8, 32, 50, 8, 0)


@pytest.fixture
def decided(towers):
    """What write_config takes beside the flags: a plan for two ranks, the data's summary, the
    towers, the steps."""
    return plan_for(2), {"source": "demo", "train_samples": 96}, towers, 700


@pytest.fixture
def begin(tmp_path, decided):
    """`begin(words, …)`: a folder that holds a run with these flags."""

    def begin(words="", name="a run", **how):
        folder = RunFolder(tmp_path / name, first_rank=True)
        flags = {"options": parse_options(words.split()).record(), "tokenizer": None}
        folder.write_config(identity(words, **how)[0], flags, *decided)
        return folder

    return begin


@pytest.fixture
def folder(begin):
    """A folder that already holds a run with all defaults."""
    return begin()


def refuses(folder, said, *given, **how):
    """It takes no run with these flags, configuration or plan."""
    with pytest.raises(ValueError, match=said):
        folder.refuse_other_run(*identity(*given, **how))


def test_a_new_folder_holds_no_run(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "new", first_rank=True)
    assert folder.path.is_dir() and folder.previous() is None
    folder.refuse_other_run(*identity("--resume never"))
    folder.forget_after(0)
    assert not folder.metrics.exists()
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="--run-dir .*taken: a file of this name exists"):
        RunFolder(tmp_path / "taken", first_rank=True)


def test_config_json_is_json_and_holds_what_was_decided(folder):
    text = (folder.path / "config.json").read_text(encoding="utf-8")
    record = json.loads(text, parse_constant=pytest.fail)
    assert record["training"]["deepspeed_config"] == {"optimizer": CONFIG["optimizer"]}
    options, versions = record["options"], record["versions"]
    assert options["image_tower"] == "resnet18:layers=1-1-1-1" and options["run_dir"] is None
    assert {"python", "torch", "deepspeed", "transformers", "torchvision"} <= versions.keys()
    assert (record["world_size"], record["total_steps"]) == (2, 700)
    assert record["data"]["train_samples"] == 96 and "git_commit" in record
    assert [stage["ranks"] for stage in record["stage_graph"]] == [[0], [1]]
    text = {"replicas": 1, "micro_batch_size": 48, "num_micro_batches": 1, "num_kept": 0}
    assert record["batches"]["text"] == text
    assert all(tower["num_parameters"] > 0 for tower in record["towers"].values())
    # nothing half-written beside it
    assert [file.name for file in folder.path.iterdir()] == ["config.json"]


def test_no_record_of_a_run_holds_the_credentials_of_an_address(begin):
    data = "webdataset:https://user:pa55word@host/a.tar?Signature=s1gnature"
    folder = begin(f"--data {data}")
    folder.note_bad_sample(data, "0", f"{data}#0", "unreadable", f"{data}: broken")
    for file in ("config.json", "bad_samples.jsonl"):
        kept = (folder.path / file).read_text()
        assert "https://***@host/a.tar?Signature=***" in kept, file
        assert "pa55word" not in kept and "s1gnature" not in kept, file


# -- the same run, and another one


def test_the_same_run_goes_on_split_and_computed_in_another_way(folder):
    free = "--resume auto --save-every 5 --workers 1 --wandb offline --eval-every 3 --run-dir x"
    # --set is compared in the configuration, where it has been put
    free += " --deepspeed_config renamed.json --keep-checkpoints 1 --set steps_per_print=5"
    for words in ("", free):
        folder.refuse_other_run(*identity(words))
    config = {
        **CONFIG,
        "train_batch_size": 96,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": 4,
        "pipeline": {"activation_checkpoint_interval": 1},
    }
    split = {"layout": "merged", "stages": {"merged": 2}, "replicas": 3}
    block = {**BLOCK, **split, "schedule": "replay", "max_bad_steps": 50}
    folder.refuse_other_run(*identity(config=config, block=block, plan=plan_for(8)))
    for balance in (None, {"strategy": "off"}, {"strategy": "deal", "min_size": 4}):
        folder.refuse_other_run(*identity(block={**BLOCK, "balance": balance}))
    assert set(DEEPSPEED_FREE_TO_CHANGE) <= set(DEEPSPEED_KEYS)
    assert {*BRANCHES_FREE_TO_CHANGE, *BRANCHES_SPLIT} <= set(BranchesBlock.__dataclass_fields__)


def test_what_0_1_0_did_not_record_is_compared_where_it_is_used_alone():
    """Else every run of it would be another one."""
    of_0_1_0 = """augmentation data data_adapt data_floors data_root data_temperature data_weights
    duplicates embed_dim epochs fusion fusion_heads fusion_scales fusion_width image_buckets
    image_interpolation image_mean image_resize image_resize_mode image_size image_std image_tower
    image_weights imported index_check label_smoothing leak_bits limit_samples loss loss_weights
    loss_weights_every matching_weight max_audio_seconds max_text_tokens on_leak pairs projection
    seed steps text_tower text_weights tokenizer tower val_data val_fraction"""
    assert {*identity()[0]["options"]} == {*of_0_1_0.split()}
    assert identity("--prefixes 8,16")[0]["options"]["prefixes"] == [8, 16]
    used = identity("--views-per-image 2 --terms image=infonce")[0]["options"]
    assert (used["views_per_image"], used["terms"]) == (2, "image=infonce")


def test_another_run_is_refused_with_every_difference(folder):
    optimizer = {"type": "AdamW", "params": {"lr": 0.002}}
    config = {**CONFIG, "optimizer": optimizer, "scheduler": {"type": "WarmupLR"}}
    with pytest.raises(ValueError) as refusal:
        folder.refuse_other_run(*identity("--seed 3 --image-size 32", config=config))
    message, *lines = str(refusal.value).splitlines()
    assert str(folder.path) in message and "with another configuration" in message
    assert [line.strip() for line in lines] == [
        "deepspeed_config.optimizer.params.lr: there 0.001, here 0.002",
        'deepspeed_config.scheduler.type: there null, here "WarmupLR"',
        "options.image_resize: there 64, here 32",
        "options.image_size: there 64, here 32",
        "options.seed: there 0, here 3",
    ]
    other = "--data jsonl:a.jsonl --seed 1 --val-fraction 0.2 --text-weights x --tokenizer y"
    with pytest.raises(ValueError) as refusal:  # a long list is cut
        folder.refuse_other_run(*identity(other))
    assert len(str(refusal.value).splitlines()) == 1 + 8 + 1 and str(refusal.value).endswith("…")
    clipped = {"layout": "auto", "gradient_clipping": {"image": 2.0}}
    refuses(folder, "branches.gradient_clipping.image: there 1.0, here 2.0", block=clipped)
    feed = {"strategy": "feed", "captions_per_image": [1, 2]}
    refuses(folder, "branches.balance", block={**BLOCK, "balance": feed})
    refuses(folder, "already holds a run, and --resume is never; give", "--resume never")


def test_when_it_is_evaluated_belongs_to_a_run_whose_loss_weights_follow_that(tmp_path, decided):
    def at(every):
        options = replace(parse_options(["--eval-every", every]), loss_weights="alignment")
        return training_identity(options.record(), CONFIG, BLOCK), "auto"

    folder = RunFolder(tmp_path / "a run", first_rank=True)
    folder.write_config(at("3")[0], {}, *decided)
    folder.refuse_other_run(*at("3"))
    with pytest.raises(ValueError, match="options.eval_every: there 3, here 4"):
        folder.refuse_other_run(*at("4"))


def test_a_loss_per_micro_batch_is_another_objective_and_belongs_to_its_split(folder, begin):
    block = {**BLOCK, "schedule": "per_micro_batch", "micro_batch_size": 8}
    refuses(folder, 'branches.schedule: there null, here "per_micro_batch"', block=block)
    other = begin(name="another run", block=block, plan=plan_for(2, block))
    other.refuse_other_run(*identity(block=block))  # before the plan is known
    other.refuse_other_run(*identity(block={**block, "max_bad_steps": 50}, plan=plan_for(2, block)))
    refuses(other, "stages: there .*, here ", block=block, plan=plan_for(4, block))
    larger = {**CONFIG, "train_batch_size": 96}
    split = {"config": larger, "block": block, "plan": plan_for(2, block, larger)}
    refuses(other, 'stages: there .* 8.u00d76", here .* 8.u00d712"', **split)
    smaller = {**block, "micro_batch_size": 4}
    refuses(other, "branches.micro_batch_size: there 8, here 4", block=smaller)
    refuses(other, 'branches.schedule: there "per_micro_batch", here null')


def test_weights_of_samples_are_compared_with_their_defaults(begin):
    weights = {"use": "loss", "image": 0.3, "text": 0.7}
    folder = begin(block={**BLOCK, "sample_weights": weights})
    folder.refuse_other_run(*identity(block={**BLOCK, "sample_weights": {**weights, "audio": 0.0}}))
    other = {**BLOCK, "sample_weights": {**weights, "audio": 1.0}}
    refuses(folder, "branches.sample_weights.audio: there 0.0, here 1.0", block=other)


def test_other_roots_make_another_run(begin, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    data, a, b = "--data jsonl:x", f"--data-root {tmp_path}/a", f"--data-root {tmp_path}/b"
    folder = begin(f"{data} {a}")
    folder.refuse_other_run(*identity(f"{data} {a}"))
    for other in (f"{data} {b}", data, f"{data} {a} {b}"):
        refuses(folder, "options.data_root: there .*a.*, here ", other)


def test_a_run_of_another_program_or_version_is_named_as_such_and_refused(folder, tmp_path):
    file = folder.path / "config.json"
    record = json.loads(file.read_text())
    assert record["version"] == __version__ and folder.previous() == record
    file.write_text(json.dumps({**record, "version": "0.1.7"}))  # its runs are read
    assert folder.previous()["version"] == "0.1.7"
    for version in (None, "0.2.0", "1.0.0"):
        record.pop("version", None)
        file.write_text(json.dumps(record | ({"version": version} if version else {})))
        said = f"made by version {version or 'before 0.1.0'}, and this"
        with pytest.raises(ValueError, match=said):
            folder.previous()
    file.write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="its config.json is of another program; give .*--run-dir"):
        folder.previous()


# -- files that grow


def test_what_was_evaluated_after_a_step_comes_back(tmp_path):
    folder = RunFolder(tmp_path / "a run", first_rank=True)
    assert folder.evaluated(0) == {}
    for step in (0, 5):
        folder.append(folder.metrics, {"step": step, "loss": 1.0})
        figures = {"alignment": step + 0.1 + 0.2, "effective_rank/image": math.nan}
        folder.append(folder.metrics, {"step": step, "held_out": "family", **figures})
        folder.append(folder.metrics, {"step": step, "held_out": "ema/family", "alignment": 7.0})
    for line in folder.metrics.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # which others can read
    found = folder.evaluated(5)
    assert list(found) == ["family", "ema/family"] and found["family"]["alignment"] == 5 + 0.1 + 0.2
    assert math.isnan(found["family"]["effective_rank/image"])
    assert folder.lacks(5, {"family", "another"})  # and its first half is dropped
    assert steps_in(folder.metrics) == [0, 0, 0, 5] and folder.lacks(4, {"family"})
    assert not folder.lacks(0, {"family"}) and steps_in(folder.metrics) == [0, 0, 0, 5]


def test_a_change_of_loss_weights_that_is_decided_once_more_is_listed_once(tmp_path):
    folder = RunFolder(tmp_path / "a run", first_rank=True)
    for step in (1, 2, 2, 3, 2):
        folder.append_loss_weights({"step": step, "contrastive": 0.1 * step, "reason": "why"})
    assert steps_in(folder.loss_weights) == [1, 2, 3, 2]


def test_what_is_damaged_and_of_no_account_is_made_anew(folder):
    """A machine that goes down leaves files that are empty or cut."""
    for step in (0, 1, 2, 2, 3, 4):
        folder.append(folder.metrics, {"step": step, "loss": step / 2})
    with folder.metrics.open("a") as file:
        file.write('{"st\n"}\n{"step": 2, "lo')
    folder.forget_after(2)
    assert steps_in(folder.metrics) == [0, 1, 2, 2]
    folder.append(folder.metrics, {"step": 3, "loss": 1.0})
    assert steps_in(folder.metrics) == [0, 1, 2, 2, 3]
    folder.forget_after(-1)
    assert folder.metrics.read_text() == ""
    folder.write_costs({"a": 1})
    assert folder.read_costs() == {"a": 1}
    for damaged in ("", '{"a": '):
        folder.costs.write_text(damaged)
        assert folder.read_costs() is None
    (folder.path / "config.json").write_text("")
    with pytest.raises(ValueError, match="config.json: is damaged .* delete it, and the same"):
        folder.previous()


def test_a_resume_reads_the_end_of_a_long_file_and_writes_nothing_before_it(folder, monkeypatch):
    """Lines of a million steps are gigabytes. Of all files that grow, one block from the end is
    read, and what is before it stays as it lies on the disk."""
    padding = {f"busy_s/image {rank}": 0.125 for rank in range(40)}
    for file in folder._of_steps:
        file.write_text("".join(json.dumps({"step": s, **padding}) + "\n" for s in range(1, 2001)))
    of_step = {"step": 1990, "held_out": "family", "alignment": 1.0}
    lines = folder.metrics.read_text().splitlines(keepends=True)
    lines.insert(1990, json.dumps(of_step) + "\n")
    folder.metrics.write_text("".join(lines))
    before = {file: file.stat() for file in folder._of_steps}
    read, reading = [], lines_from_end

    def counted(path):
        for place, line in reading(path):
            read.append(line)
            yield place, line

    monkeypatch.setattr("common.files.lines_from_end", counted)
    monkeypatch.setattr("launch.run.folder.lines_from_end", counted)
    folder.forget_after(1990)
    assert folder.evaluated(1990) == {"family": of_step}
    assert folder.lacks(1990, {"another"}) and not folder.evaluated(1990)
    for file, was in before.items():
        assert steps_in(file) == [*range(1, 1991)]
        assert file.stat().st_ino == was.st_ino, "is cut, not copied"
    assert len(read) < 100


def test_lines_come_from_the_end_whatever_blocks_they_lie_in(tmp_path, monkeypatch):
    file = tmp_path / "lines"
    assert list(lines_from_end(file)) == []
    for text in ("", "\n", "a", "a\n", "a\nbc\n\nd", "\n\n", "ä\n" * 3 + "end", "x\n\n"):
        file.write_text(text)
        for size in (1, 2, 3, 1 << 16):
            monkeypatch.setattr("common.files.BLOCK", size)
            found = list(lines_from_end(file))
            assert [line for _, line in reversed(found)] == text.splitlines(), (text, size)
            for place, line in found:
                assert text.encode()[place:].startswith(line.encode()), (text, size)
    file.write_text("1\n2\n3")
    cut_lines(file, lambda line: False)
    assert file.read_text() == "1\n2\n3\n", "a line without its end gets one"
    cut_lines(file, lambda line: int(line) > 1)
    assert file.read_text() == "1\n"


def test_bad_steps_are_listed_with_the_ids_of_their_samples(folder):
    journal = Journal(folder, trace_every=0)
    for step in (3, 7):
        bad = BadStep((5, 6), {"image": (6,), "text": ()})
        journal.bad_step(step, math.nan, bad, lambda i: f"id {i}")
    folder.forget_after(3)
    samples = {"not_finite": {"image": ["id 6"], "text": []}, "samples": ["id 5", "id 6"]}
    assert lines_in(folder.bad_steps) == [{"step": 3, "loss": None, **samples}]
    folder.refuse_more_bad_steps(2, 3, pytest.fail)
    for saved, named in ((None, "not there, none was saved"), (folder.checkpoints, "checkpoints")):
        with pytest.raises(ValueError, match=f'"max_bad_steps" is 3; the last .* is .*{named}'):
            folder.refuse_more_bad_steps(3, 3, lambda: saved)


def test_only_the_first_rank_writes(tmp_path, decided):
    folder = RunFolder(tmp_path / "a run", first_rank=False)
    assert not folder.path.exists()
    first = RunFolder(tmp_path / "a run", first_rank=True)
    first.append(first.metrics, {"step": 1})
    folder.append(folder.metrics, {"step": 2})
    folder.write_config(identity()[0], {}, *decided)
    folder.forget_after(0)
    assert first.metrics.read_text() == '{"step": 1}\n' and folder.previous() is None


def test_the_folders_name(tmp_path, monkeypatch):
    assert choose_folder(tmp_path, ("demo",)) == tmp_path
    chosen = str(choose_folder(None, ("jsonl:a/b.jsonl",)))
    assert chosen.startswith("runs/") and chosen.endswith("-jsonl") and ":" not in chosen
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")  # whose runs may begin in the same second
    monkeypatch.setenv("WANDB_RUN_ID", "run45678")
    assert choose_folder(None, ["demo"]).name.endswith("-demo-run45678")


# -- one run at a time


def hold(path, pipe):
    folder = RunFolder(path, first_rank=True)
    folder.claim()
    if os.fork() == 0:
        time.sleep(60)  # as a loader does that has not noticed yet
    pipe.send("held")
    time.sleep(600)


@pytest.fixture
def held(tmp_path):
    """A folder in which another run writes, with that run."""
    path, context = tmp_path / "a run", multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    run = context.Process(target=hold, args=(path, theirs))
    run.start()
    assert ours.recv() == "held"
    children = psutil.Process(run.pid).children()
    yield path, run
    for process in (run, *children):
        process.kill()
    run.join()


def test_one_run_at_a_time_writes_in_a_folder(held):
    path, run = held
    with pytest.raises(ValueError) as error:
        RunFolder(path, first_rank=True).claim()
    assert f"process {run.pid} on {socket.gethostname()}" in str(error.value)
    assert str(path / "stop") in str(error.value)
    RunFolder(path, first_rank=False).claim()  # a rank that writes nothing, and --dry-run
    run.kill()
    run.join()  # though a child of it lives
    RunFolder(path, first_rank=True).claim()
    assert f"process {os.getpid()} on" in (path / "lock").read_text()


def test_where_the_file_system_has_no_locks_a_run_of_this_machine_is_seen(
    held, monkeypatch, caplog, tmp_path
):
    path, run = held

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with pytest.raises(ValueError, match=f"process {run.pid} on"):
        RunFolder(path, first_rank=True).claim()
    other = tmp_path / "other"
    other.mkdir()
    (other / "lock").write_text(f"process {run.pid} on elsewhere, started never")
    RunFolder(other, first_rank=True).claim()
    (record,) = caplog.records
    assert "has no locks (No locks available)" in record.getMessage()


def test_a_second_start_leaves_no_line_in_the_folder_of_the_first(held):
    path, run = held
    before = {file: file.read_bytes() for file in path.iterdir()}
    status, output = run_to_end("train.py", *SMALL, "--run-dir", path, ranks=1)
    assert status == 2 and output.count(f"process {run.pid} on") == 1, output
    assert {file: file.read_bytes() for file in path.iterdir()} == before
