"""`examples/modality.py`: a modality that no other file knows of, in a fork of three branches and
on one rank.

A third of the samples come without it. That the engine's gradients are right then is in
tests/engine/test_parity.py.
"""

import json
from itertools import permutations

import pytest
from launched import ROOT, metrics, run_to_end
from wandb_files import pieces

from launch.config.options import parse_options
from launch.modalities import MODALITIES
from launch.tools.plan import run as run_plan

MODULE = "examples.modality"
# no batch normalisation and no dropout, which see the split
VIT = "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,attention_dropout=0"
BERT = "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"
DATA = [
    "--import-module",
    MODULE,
    "--data",
    "python:examples.dataset:Palettes",
    "--limit-samples",
    200,
    "--val-fraction",
    0.05,
]
TOWERS = ["--image-tower", VIT, "--text-tower", BERT, "--tower", "palette=24"]
SIZES = [
    "--image-size",
    32,
    "--embed-dim",
    16,
    "--max-text-tokens",
    12,
    "--workers",
    0,
    "--steps",
    2,
]
PAIRS = "image:text,palette:text:0.5"
SPLITS = {
    1: {"layout": "merged", "stages": {"merged": 1}, "micro_batch_size": 24},
    4: {
        "layout": "fork",
        "stages": 1,
        "replicas": {"image": 2, "text": 1, "palette": 1},
        "micro_batch_size": {"image": 6, "text": 24, "palette": 8},
        "schedule": "replay",
    },
}
RELATIVE = 1e-5  # fp32, whose sums come in another order


pytestmark = pytest.mark.usefixtures("registries")


def configuration(folder, ranks):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= SPLITS[ranks] | {"balance": {"strategy": "off"}}
    (folder / f"{ranks}.json").write_text(json.dumps(config))
    return folder / f"{ranks}.json"


def test_a_fork_of_three_branches_trains_as_one_rank_does(tmp_path):
    seen = {}
    for ranks in SPLITS:
        run_dir = tmp_path / f"run{ranks}"
        flags = [
            "--deepspeed_config",
            configuration(tmp_path, ranks),
            "--pairs",
            PAIRS,
            "--run-dir",
            run_dir,
            "--wandb",
            "offline" if ranks == 4 else "disabled",
        ]
        status, output = run_to_end("train.py", *DATA, *TOWERS, *SIZES, *flags, ranks=ranks)
        assert status == 0, output[-3000:]
        assert "palette → text" in output and "image → palette" in output
        seen[ranks] = metrics(run_dir), metrics(run_dir, "held_out")[2]
    (piece,) = pieces(tmp_path / "run4")
    # of the samples that have both; a modality that nobody knows how to draw is shown by its text
    assert {key for key in piece.keys() if key.startswith("queries/")} == {
        f"queries/validation/{one}_to_{other}"
        for one, other in permutations(("image", "text", "palette"), 2)
    }
    assert "retrieval/validation/palette_to_text/R@1" in piece.keys()
    whole, split = (steps for steps, _ in seen.values())
    compared = [
        name
        for name in whole[1]
        if name == "loss" or name.startswith(("contrastive_loss/", "grad_norm/"))
    ]
    assert len(compared) == 1 + 2 + 4  # pairs; branches and heads
    for step in (1, 2):
        assert {name: split[step][name] for name in compared} == pytest.approx(
            {name: whole[step][name] for name in compared}, rel=RELATIVE
        )
    pairs = [whole[1][f"contrastive_loss/{pair}"] for pair in ("image_text", "palette_text")]
    assert whole[1]["loss"] == pytest.approx(pairs[0] + 0.5 * pairs[1], rel=RELATIVE)
    assert {"palette_to_text_R@10", "text_to_palette_R@10", "image_to_text_R@10"} <= seen[1][
        1
    ].keys()
    out = tmp_path / "out"
    status, output = run_to_end("export.py", tmp_path / "run4", out, "--trust-run")
    assert status == 0 and (out / "model.safetensors").is_file(), output[-3000:]
    from safetensors.torch import load_file

    assert not any("palette" in name for name in load_file(out / "model.safetensors"))
    status, output = run_to_end("evaluate.py", tmp_path / "run4", "--trust-run")
    assert status == 0 and "palette → image" in output, output[-3000:]
    # one sample more or less among the first ten is what rounding may change
    assert seen[4][1]["palette_to_text_R@10"] == pytest.approx(
        seen[1][1]["palette_to_text_R@10"], abs=0.02
    )


@pytest.mark.parametrize(
    "given, words",
    [
        (
            ["--pairs", "image:text,palette:text"],
            "there is no modality 'palette'; there are image, text",
        ),
        (
            ["--pairs", "image:text,text:image"],
            "a pair is of two different modalities, and is named once",
        ),
        (["--pairs", "image"], "'image' is no pair; write FIRST:SECOND or FIRST:SECOND:WEIGHT"),
        (
            ["--pairs", "image:text:0"],
            "'image:text:0': two modalities and a weight above 0 are needed",
        ),
        (
            ["--import-module", MODULE, "--pairs", "palette:text", "--fusion", "1"],
            "it scores images with texts, and --pairs is palette:text",
        ),
        (["--tower", "text=bert-tiny"], "text has a flag of its own, --text-tower"),
        (
            ["--import-module", MODULE, "--pairs", "palette:text", "--tower", "plaette=24"],
            "did you mean 'palette'",
        ),
    ],
)
def test_what_the_command_line_refuses(given, words, capsys):
    with pytest.raises(SystemExit):
        parse_options(given)
    assert words in capsys.readouterr().err


def test_the_plan_tool_takes_any_number_of_branches(capsys):
    towers = [
        "--image-tower",
        VIT,
        "--text-tower",
        BERT,
        "--tower",
        "palette=24",
        "--image-size",
        "32",
        "--max-text-tokens",
        "12",
    ]
    flags = [
        "--gpus",
        "4",
        "--layout",
        "fork",
        "--train-batch-size",
        "64",
        "--device",
        "A100",
        *towers,
    ]
    assert run_plan([*flags, "--import-module", MODULE, "--pairs", PAIRS]) == 0
    said = capsys.readouterr().out
    assert "| palette 0 ×1" in said and said.count("fork") >= 2
    MODALITIES.pop("palette")
    with pytest.raises(SystemExit):
        run_plan([*flags, "--pairs", PAIRS])
    assert "there is no modality 'palette'; there are image, text" in capsys.readouterr().err


def test_data_without_the_modality_is_refused_by_name(tmp_path):
    flags = [
        "--import-module",
        MODULE,
        "--pairs",
        "image:palette",
        "--data",
        "demo",
        "--run-dir",
        tmp_path / "run",
        "--steps",
        1,
    ]
    status, output = run_to_end("train.py", *flags, ranks=1)
    assert (
        status == 2
        and "it holds image and text, and --pairs compares image:palette; give data" in output
    ), output[-2000:]
