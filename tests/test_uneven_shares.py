"""A batch of 25 on three replicas: shares differ by a sample, and the numbers are those of one
rank."""

import json

import pytest
from launched import ROOT, metrics, run_to_end

# no batch normalisation and no dropout, which see the split
VIT = "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,attention_dropout=0"
BERT = "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"
TOWERS = ["--image-tower", VIT, "--text-tower", BERT, "--image-size", 32, "--embed-dim", 16]
DATA = ["--limit-samples", 200, "--val-fraction", 0.05, "--max-text-tokens", 12, "--workers", 0]
FORK = {"layout": "fork", "stages": 1, "replicas": {"image": 3, "text": 1}}
MERGED = {"layout": "merged", "stages": {"merged": 1}}
RELATIVE = 1e-5  # fp32, whose sums come in another order


def run(folder, ranks, branches, *more, steps=3, **config):
    folder.mkdir(exist_ok=True)
    whole = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    whole |= {"train_batch_size": 25, **config}
    whole["branches"] |= {"micro_batch_size": "auto", **branches}
    (folder / f"{ranks}.json").write_text(json.dumps(whole))
    flags = ["--deepspeed_config", folder / f"{ranks}.json", "--run-dir", folder / "run"]
    status, output = run_to_end(
        "train.py", *TOWERS, *DATA, "--steps", steps, *flags, *more, ranks=ranks
    )
    assert status == 0, output[-3000:]
    return metrics(folder / "run"), output


def numbers_of(line):
    return {
        name: value
        for name, value in line.items()
        if name == "loss" or name.startswith(("grad_norm/", "logit_scale"))
    }


@pytest.fixture(scope="module")
def unsplit(module_folder):
    return run(module_folder("unsplit") / "a", 1, MERGED)[0]


@pytest.mark.parametrize(
    ("ranks", "branches", "config", "words"),
    [
        (4, {**FORK, "schedule": "replay"}, {"gradient_accumulation_steps": 5}, ["image ≤2×5"]),
        # what is tried beforehand changes no number, and the run goes on without it
        pytest.param(
            *(3, {**MERGED, "fit": "measure"}, {}, ["≤9×1", "tried on the device"]),
            marks=pytest.mark.all("a second layout"),
        ),
    ],
    ids=["fork", "merged"],
)
def test_shares_that_differ_by_a_sample(tmp_path, unsplit, ranks, branches, config, words):
    steps, output = run(tmp_path / "b", ranks, branches, **config)
    assert all(word in output for word in words), output
    for step, line in unsplit.items():
        assert numbers_of(steps[step]) == pytest.approx(numbers_of(line), rel=RELATIVE)
    # and it goes on on one rank, with even shares
    again, _ = run(tmp_path / "b", 1, MERGED, "--resume", "auto", steps=3)
    assert set(again) == set(steps)


def test_images_of_several_shapes_are_dealt_too(tmp_path):
    _, output = run(tmp_path / "c", 3, MERGED, "--image-buckets", 2, "--explain-balance", 1)
    assert "image: by shape, at most 9 samples in every micro-batch" in output
