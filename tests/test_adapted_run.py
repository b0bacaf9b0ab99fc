"""A run whose towers learn in adapters alone: trained as a fork, resumed on one rank, evaluated and
exported."""

import json
import shutil

import pytest
import torch
from exports import CAPTIONS, SIZE, TOKENS
from launched import fork_flags, metrics, run_to_end, write_pairs
from neighbours import neighbour
from safetensors.torch import load_file

from data.modalities.tokenizer import train_tokenizer
from engine.checkpoint.layout import OPTIMIZER, PARAMETER
from engine.checkpoint.reading import CheckpointReader
from launch.exporting.inputs import image_processor

pytest.importorskip("peft", reason="adapters are made by peft")
TRAIN = {"image": {"lora": {"r": 2}}, "text": {"lora": {"r": 2, "alpha": 4, "target": "all"}}}


def published(folder):
    """A small CLIPModel as transformers saves it."""
    whole = neighbour("launch/test_whole_models.py")
    torch.manual_seed(3)
    tokenizer = train_tokenizer(CAPTIONS)
    tokenizer.eos_token = "[SEP]"
    whole.MODELS["CLIPModel"](tokenizer).save_pretrained(folder)
    tokenizer.model_max_length = TOKENS
    tokenizer.save_pretrained(folder)
    image_processor(whole.PIXELS, SIZE).save_pretrained(folder)
    return folder


def flags(tmp_path, **branches):
    _, file = fork_flags(tmp_path)
    config = json.loads(file.read_text())
    config["branches"] |= {"train": TRAIN, **branches}
    file.write_text(json.dumps(config))
    return ["--deepspeed_config", file]


def state(run):
    """The newest checkpoint's parameters, and the names of those with a state of Adam."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    with CheckpointReader(newest) as reader:
        keys = list(reader._fragments)
        names = {name for kind, name in keys if kind == PARAMETER}
        shapes = {name: reader.shape(PARAMETER, name) for name in names}
        moved = {name for kind, name in keys if kind.startswith(OPTIMIZER)}
        return {n: reader.read(PARAMETER, n, s).view(s) for n, s in shapes.items()}, moved


def test_trained_resumed_elsewhere_evaluated_and_exported(tmp_path):
    model = published(tmp_path / "model")
    data, run, again = write_pairs(tmp_path, 96), tmp_path / "run", tmp_path / "again"
    how = ["--data", data, "--val-fraction", 0.25, "--workers", 0, "--steps", 4, "--save-every", 2]
    how += ["--import", model]
    status, output = run_to_end("train.py", *how, *flags(tmp_path), "--run-dir", run, ranks=2)
    assert status == 0, output[-5000:]
    assert "adapters: image tower, 1,024 trainable of" in output, output[-5000:]
    after, stepped = state(run)
    assert {name for name in after if ".lora_" in name or name.startswith("head.")} == stepped
    before = load_file(model / "model.safetensors")
    for name, tensor in after.items():
        if name not in stepped:
            there = {"image": "vision_model", "text": "text_model"}[name.partition(".")[0]]
            assert torch.equal(tensor, before[f"{there}.{name.partition('.')[2]}"]), name
    assert all(after[name].any() for name in stepped if ".lora_B." in name)

    # from the second step on one rank, with all layers in one stage
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    merged = flags(tmp_path, layout="merged", stages={"merged": 1}, replicas=1)
    status, output = run_to_end("train.py", *how, *merged, "--run-dir", again, ranks=1)
    assert status == 0, output[-5000:]
    assert metrics(again)[4]["loss"] == pytest.approx(metrics(run)[4]["loss"], rel=1e-4)
    for name, tensor in state(again)[0].items():
        torch.testing.assert_close(tensor, after[name], rtol=1e-2, atol=1e-4, msg=name)

    # merged exports have their own test: tests/launch/test_adapter_export.py
    status, output = run_to_end("export.py", run, tmp_path / "apart", "--keep-adapters")
    assert status == 0, output[-5000:]
    assert (tmp_path / "apart" / "adapters" / "text" / "adapter_model.safetensors").is_file()
    figures = []
    for where in (run, tmp_path / "apart"):
        file = tmp_path / f"{len(figures)}.json"
        words = [where, "--val-data", data, "--workers", 0, "--json", file]
        status, output = run_to_end("evaluate.py", *words)
        assert status == 0, output[-5000:]
        figures.append(json.loads(file.read_text()))
    assert figures[0].keys() == figures[1].keys() and figures[0]
    learned, unknown = (each.pop("trained_on") for each in figures)
    assert learned["samples"] == 72 and "does not say what it was trained on" in unknown["why"]
    for key, value in figures[0].items():
        same = pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
        assert figures[1][key] == same, key
