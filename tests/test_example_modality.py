"""`examples/modality.py`: a modality that no other file knows of, in a fork of three branches.

A third of the samples come without it. That a fork of three branches trains as one rank does is in
test_every_modality.py, and that the gradients are right in tests/engine/test_parity.py.
"""

import json
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from launched import ROOT, metrics, run_to_end, words
from safetensors.torch import load_file, save_file
from wandb_files import pieces

from data.modalities.tokenizer import train_tokenizer
from launch.config.options import parse_options
from launch.modalities import MODALITIES
from launch.setup.model import RunModel
from launch.tools.plan import run as run_plan

MODULE = ["--import-module", "examples.modality"]
DATA = words("--data python:examples.dataset:Palettes --limit-samples 200 --val-fraction 0.05")
VIT = "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0"
TOWERS = ["--image-tower", VIT, *words("--text-tower bert-tiny --tower palette=24")]
SIZES = words("--image-size 32 --max-text-tokens 12")
PAIRS = "image:text,palette:text:0.5"
FORK = {
    "layout": "fork",
    "stages": 1,
    "replicas": {"image": 2, "text": 1, "palette": 1},
    "micro_batch_size": {"image": 6, "text": 24, "palette": 8},
    "schedule": "replay",
}
pytestmark = pytest.mark.usefixtures("registries")


def test_a_fork_of_three_branches_is_trained_evaluated_and_exported(tmp_path):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config |= {"train_batch_size": 24, "branches": config["branches"] | FORK}
    (tmp_path / "fork.json").write_text(json.dumps(config))
    run_dir, out = tmp_path / "run", tmp_path / "out"
    how = ["--deepspeed_config", tmp_path / "fork.json", "--pairs", PAIRS, "--run-dir", run_dir]
    how += words("--embed-dim 16 --workers 0 --steps 2 --wandb offline")
    status, output = run_to_end("train.py", *MODULE, *DATA, *TOWERS, *SIZES, *how, ranks=4)
    assert status == 0 and "palette → text" in output and "image → palette" in output, output
    steps, last = metrics(run_dir), metrics(run_dir, "held_out")[2]
    pairs = [steps[1][f"contrastive_loss/{pair}"] for pair in ("image_text", "palette_text")]
    assert steps[1]["loss"] == pytest.approx(pairs[0] + 0.5 * pairs[1], rel=1e-5)
    assert steps[1]["grad_norm/palette"] > 0
    assert {"palette_to_text_R@10", "text_to_palette_R@10", "image_to_text_R@10"} <= last.keys()
    # of the samples that have both; a modality that nobody knows how to draw is shown by its text
    (piece,) = pieces(run_dir)
    assert {key for key in piece.keys() if key.startswith("queries/")} == {
        f"queries/validation/{one}_to_{other}"
        for one, other in permutations(("image", "text", "palette"), 2)
    }
    assert "retrieval/validation/palette_to_text/R@1" in piece.keys()
    status, output = run_to_end("export.py", run_dir, out, "--trust-run")
    assert status == 0, output[-3000:]
    assert not any("palette" in name for name in load_file(out / "model.safetensors"))
    status, output = run_to_end("evaluate.py", run_dir, "--trust-run")
    assert status == 0 and "palette → image" in output, output[-3000:]


def test_what_the_command_line_refuses(capsys):
    for given, said in (
        ("--pairs image:text,palette:text", "there is no modality 'palette'; there are image"),
        ("--pairs image:text,text:image", "a pair is of two different modalities"),
        ("--pairs image", "'image' is no pair; write FIRST:SECOND"),
        ("--pairs image:text:0", "a weight above 0"),
        ("--tower text=bert-tiny", "text has a flag of its own, --text-tower"),
        ("--weights text=bert-tiny", "text has a flag of its own, --text-weights"),
    ):
        with pytest.raises(SystemExit):
            parse_options(given.split())
        assert said in capsys.readouterr().err
    for given, said in (
        ("--pairs palette:text --fusion 1", "it scores images with texts"),
        ("--pairs palette:text --tower plaette=24", "did you mean 'palette'"),
        ("--pairs palette:text --weights plaette=x", "did you mean 'palette'"),
    ):
        with pytest.raises(SystemExit):
            parse_options([*MODULE, *given.split()])
        assert said in capsys.readouterr().err


def test_a_tower_starts_from_weights(tmp_path):
    """Of the names of its own network, in a folder or a file."""
    flags = [*MODULE, *words("--pairs image:text,palette:text --weights"), f"palette={tmp_path}"]
    options = parse_options(flags)
    assert options.first_weights == {"palette": str(tmp_path)}
    tokenizer = train_tokenizer(["red and green", "green and blue"])
    layer = RunModel.of(parse_options(flags[:-2]), tokenizer).layers["palette"][0].build(0)
    weights = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = RunModel.of(options, tokenizer)
    begun = model.build_layer(model.layers["palette"][0]).state_dict()
    assert begun.keys() == weights.keys()
    assert all(torch.equal(begun[name], weights[name]) for name in weights)
    with pytest.raises(FileNotFoundError, match="no library has weights of the modality palette"):
        RunModel.of(replace(options, weights=("palette=DEFAULT",)), tokenizer)


def test_the_plan_tool_takes_any_number_of_branches(capsys):
    flags = words("--gpus 4 --layout fork --train-batch-size 64 --device A100")
    flags += [*TOWERS, *SIZES, "--pairs", PAIRS]
    assert run_plan([*flags, *MODULE]) == 0
    said = capsys.readouterr().out
    assert "| palette 0 ×1" in said and said.count("fork") >= 2
    MODALITIES.pop("palette")
    with pytest.raises(SystemExit):
        run_plan(flags)
    assert "there is no modality 'palette'; there are image, text" in capsys.readouterr().err


def test_data_without_the_modality_is_refused_by_name(tmp_path):
    flags = words("--pairs image:palette --data demo --steps 1")
    status, output = run_to_end("train.py", *MODULE, *flags, "--run-dir", tmp_path / "run", ranks=1)
    message = "it holds image and text, and --pairs compares image:palette; give --pairs"
    assert status == 2 and message in output, output[-2000:]
