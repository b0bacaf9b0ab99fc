"""--dry-run: the first screen of a run and the errors that it would meet, in one process, with
nothing written."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launched import SMALL, write_pairs
from transformers import BertConfig, BertModel

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from bad_audio import tone, wav  # noqa: E402

from data.modalities.tokenizer import train_tokenizer
from engine.config.reading import BranchesBlock
from launch.config.blocks import refuse_missing_weights
from launch.config.options import ROOT, parse_options
from launch.run.folder import RunFolder
from launch.setup.dry_run import dry_run
from launch.setup.prepare import prepare_run, write_record
from launch.setup.ranks import PlannedRanks


@pytest.fixture(scope="module")
def pairs(module_folder):
    return write_pairs(module_folder("pairs"), 160)


@pytest.fixture
def planned(pairs, tmp_path, monkeypatch):
    """`planned(*flags)`: the exit status of a dry run in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*flags):
        words = ["--dry-run", *SMALL, "--data", pairs, "--val-fraction", "0.2", *map(str, flags)]
        return dry_run(parse_options(words))

    return run


def test_every_value_is_shown_with_its_source(planned, capsys, tmp_path):
    """Of flags and of the keys of the JSON file, whoever decided them."""
    flags = ["--ranks", 16, "--device", "H100", "--epochs", 3, "--show-options", "--run-dir", "a"]
    assert planned(*flags, "--set", "optimizer.params.lr=1e-3", "seed=5") == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: row[1:] for row in rows if len(row) > 2}
    expected = {
        "--ranks": "16 command line",
        "--seed": "5 --set",
        "--leak-bits": "null default",
        "--augmentation": '["crop", "white"] the preset',
        "optimizer.params.lr": "0.001 --set",
        "optimizer.type": "AdamW mine.json",
        "optimizer.params.eps": "1e-06 the preset (mine.json: auto)",
        "scheduler.params.total_num_steps": "3 the length of the run (mine.json: auto)",
        "branches.schedule": "batch_sync the planner (mine.json: auto)",
    }
    found = {name: " ".join(rows[name]) for name in expected}
    assert found == expected
    assert not list((tmp_path / "here").iterdir())


def test_the_first_screen_says_what_a_run_would_do_and_no_folder_is_made(
    planned, capsys, tmp_path, monkeypatch
):
    flags = ["--ranks", 16, "--device", "H100", "--epochs", 3, "--run-dir", "a run"]
    assert planned(*flags) == 0
    said = capsys.readouterr().out
    for words in (
        "data: jsonl:",
        "samples to train on",
        "image resnet18:layers=1-1-1-1,zero_init_residual=true, 4.9 M parameters, weights: random",
        "text bert-tiny:pool=mean, 0.5 M parameters, weights: random",
        "tokenizer: trained on 128 captions, ",
        "note: to start from published weights instead of random ones: --text-weights "
        "google/bert_uncased_L-2_H-128_A-2\n",
        "ranks: 16 ranks on 2 nodes, H100; bf16, ZeRO stage 1",
        "why: auto: ",
        "ways compared",
        "preset: from scratch, short, 3 steps of 96 samples",
        "optimizer: AdamW, betas 0.9 and 0.98, eps 1e-06, weight decay 0.1; WarmupCosineLR: lr ",
        "note: an epoch has 1 step: one checkpoint and one evaluation every 20 epochs (20 steps), "
        "and at the end; --save-every and --eval-every N for another number of steps",
        "MiB a rank",
        "folder: a run",
        "dry run: nothing was trained",
    ):
        assert words in said, said
    assert 8 <= len(said.splitlines()) <= 18
    assert not list((tmp_path / "here").iterdir())
    monkeypatch.setenv("RANK", "1")  # of a launcher's processes the first does it
    assert planned() == 0 and capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    assert dry_run(parse_options(["--dry-run"])) == 0  # the demo has a small tower on purpose
    said = capsys.readouterr().out
    assert "text bert-mini" in said and "weights: random" in said and "to start from" not in said


def test_what_the_screen_proposes_for_pretrained_weights_can_be_typed(planned, capsys, tmp_path):
    """Of a text tower in a folder, with its weights and tokenizer beside it."""
    tokenizer = train_tokenizer(["a dark picture", "a bright picture of a number"])
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), intermediate_size=32, **sizes))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "bert")
    tower = ["--ranks", 1, "--text-tower", tmp_path / "bert"]
    planned(*tower)
    said = capsys.readouterr().out
    note = next(line for line in said.splitlines() if line.strip().startswith("note: to start"))
    flags = note.rpartition("random ones: ")[2].split()
    assert flags == ["--text-weights", str(tmp_path / "bert")]
    planned(*tower, *flags)
    said = capsys.readouterr().out
    assert f"weights: from {tmp_path / 'bert'}\n" in said and "to start from" not in said
    assert f"tokenizer: of {tmp_path / 'bert'}, {len(tokenizer)} entries\n" in said
    (tmp_path / "bert" / "tokenizer_config.json").unlink()
    planned(*tower)
    assert "entries; without tokenizer_config.json, so transf" in capsys.readouterr().out


def test_samples_that_are_used_without_what_is_broken_are_not_called_unusable(
    pairs, planned, tmp_path, capsys
):
    file = Path(pairs.removeprefix("jsonl:"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for name, content in (("page", b"<html>"), ("short", wav(tone(0.3))), ("long", wav(tone(1)))):
        (file.parent / f"{name}.wav").write_bytes(content)
    sounds = ["page.wav", "long.wav", *["short.wav"] * (len(lines) - 2)]
    rows = [{**line, "audio_path": sound} for line, sound in zip(lines, sounds)]
    rows.append({"text": "nothing else"})
    spoken = file.parent / "spoken.jsonl"
    spoken.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data", f"jsonl:{spoken}", "--pairs", "image:text,audio:text"]
    flags += ["--audio-tower", "resnet18:layers=1-1-1-1", "--ranks", 1, "--device", "H100"]
    flags += ["--max-bad-fraction", 0.5]
    assert planned(*flags, "--max-audio-seconds", 0.5) == 0
    said = capsys.readouterr().out
    assert "; 1 cannot be used; 2 are used in part (" in said, said
    assert all(words in said for words in ("not-audio 1", "huge-audio 1", "no-value 1")), said


def test_what_is_no_part_of_a_sample_is_counted(pairs, planned, capsys):
    file = Path(pairs.removeprefix("jsonl:"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    specs = []
    for name, own in (("train", lines[:2]), ("test", lines[-30:])):
        texts = [{**line, "text": [*line["text"], None]} for line in own]
        (file.parent / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
        specs.append(f"jsonl:{file.parent}/{name}.jsonl")
    flags = ["--ranks", 1, "--device", "H100", "--on-leak", "drop"]
    assert planned("--data", specs[0], "--val-data", specs[1], *flags) == 0
    said, of = capsys.readouterr().out, "also there, and not read:"
    assert (
        f"held out: validation 30; {of} 2 captions without text; of {specs[1]}; {of} 30 captions without text"
        in said
    ), said


def config_with(tmp_path, **changes):
    config = json.loads((ROOT / "ds_configs" / "zero1_bf16.json").read_text())
    branches = config.pop("branches") | changes.pop("branches", {})
    (tmp_path / "mine.json").write_text(json.dumps({**config, **changes, "branches": branches}))
    return ["--deepspeed_config", tmp_path / "mine.json"]


@pytest.fixture(autouse=True)
def small_batch(tmp_path, monkeypatch):
    """The default file for a GPU asks for more samples than there are."""
    from launch.config import configuration

    config_with(tmp_path, train_batch_size=96)
    file = tmp_path / "mine.json"
    monkeypatch.setattr(configuration, "default_config", lambda *_: file)


UNTESTED = {"zero_allow_untested_optimizer": True}


def test_it_meets_the_errors_of_a_run(planned, tmp_path, capsys):
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}} | UNTESTED
    for flags, changes, words in (
        (["--ranks", 1], {"branches": {"layout": "fork"}}, "needs a rank for each"),
        ([], {"train_batch_size": 4096}, "do not fill one global batch"),
        (["--image-tower", "resnet19"], {}, "resnet1"),
        (["--tokenizer", "./nowhere"], {}, "no such folder"),
        (["--text-weights", "./nowhere"], {}, "nowhere"),
        (["--data", "jsonl:nowhere.jsonl"], {}, "nowhere.jsonl"),
        (["--loss-weights", "alignment"], {}, "pairs"),
        (["--resume", "nowhere"], {}, "no such folder"),
        (["--device", "flops=1e13,memory=2e7,bandwidth=1e11"], {}, "memory"),
        ([], sgd, "AdamW"),
        ([], {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, "mine.json: optimizer"),
        ([], {"scheduler": {"type": "ReduceLROnPlateau"}}, "scheduler.type"),
    ):
        given = config_with(tmp_path, **{"train_batch_size": 96} | changes)
        with pytest.raises((ValueError, OSError, SystemExit)) as error:
            planned("--ranks", 2, "--device", "A100", *flags, *given)
        assert words in f"{error.value} {capsys.readouterr().err}", flags or changes


def weighing(**keys):
    """--set with this `sample_weights` block."""
    return ["--set", f"branches.sample_weights={json.dumps({'use': 'loss', **keys})}"]


@pytest.mark.parametrize(
    "keys, expected",
    (
        (
            {"audio": 0.5},
            r"\.audio: it weighs samples by their audio, .* image, text; remove the key",
        ),
        ({"image": 0, "text": 0, "audio": 1}, r"\.audio: it weighs .* remove the key"),
        ({"audio": 0}, ""),
        ({}, ""),
    ),
)
def test_weights_of_a_branch_that_is_missing_are_refused(keys, expected, planned):
    if not expected:
        assert planned("--ranks", 1, *weighing(**keys)) == 0
        return
    with pytest.raises(ValueError, match=f"^branches.sample_weights{expected}"):
        planned("--ranks", 1, *weighing(**keys))


@pytest.mark.parametrize(
    "branches, keys, expected",
    (
        (("audio", "text"), {"image": 0.3}, r"\.image: .* branches audio, text; remove"),
        (("image", "video"), {"text": 0.7}, r"\.text: .* branches image, video; remove"),
        (("image", "video"), {"image": 0}, ": .* weighs none; raise one"),
        (("video", "depth"), {}, ": .* weighs none; raise one"),
        (("audio", "text"), {"image": 0}, ""),
        (("audio", "text"), {}, ""),
        (("audio", "video"), {"audio": 1}, ""),
    ),
)
def test_weights_are_of_the_branches_of_any_run(branches, keys, expected):
    block = BranchesBlock(sample_weights={"use": "loss", **keys})
    if not expected:
        refuse_missing_weights(block, branches)
        return
    with pytest.raises(ValueError, match=f"^branches.sample_weights{expected}"):
        refuse_missing_weights(block, branches)


def test_a_run_that_began_with_such_weights_goes_on(pairs, planned, tmp_path):
    given = ["--ranks", "1", "--run-dir", str(tmp_path / "run"), *weighing(audio=0)]
    options = parse_options(["--dry-run", *SMALL, "--data", pairs, "--val-fraction", "0.2", *given])
    run = prepare_run(options, PlannedRanks(options, tmp_path / "temporary"))
    write_record(replace(run, folder=RunFolder(tmp_path / "run", first_rank=True)))
    file = tmp_path / "run" / "config.json"
    record = json.loads(file.read_text())
    record["training"]["branches"]["sample_weights"]["audio"] = 0.5
    file.write_text(json.dumps(record))
    assert planned(*given[:-2], *weighing(audio=0.5)) == 0


def test_several_sizes_of_images_are_refused_where_the_tower_takes_one(planned):
    """Before anything is measured, whichever option asks for them."""
    tower = ["--image-tower", "timm:vit_tiny_patch16_224:depth=1", "--ranks", 2]
    balance = 'branches.balance={"strategy": "feed", "image_size": [32, 64]}'
    for asked, named in (
        (["--image-buckets", 2], "--image-buckets"),
        (["--set", balance], "branch"),
    ):
        with pytest.raises(ValueError, match=f"^{named}.* takes images of one size only"):
            planned(*tower, *asked)
    tower[1] += ",dynamic_img_size=true"
    assert planned(*tower, "--image-buckets", 2) == 0
