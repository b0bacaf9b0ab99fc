"""train.py with regions: a fork that packs phrases by themselves and computes twice trains as one
rank does, and evaluate.py finds what it found."""

import json

import pytest
from launched import ROOT, metrics, run_to_end

from data.index.sources import open_source

# no batch normalisation and no dropout, which see the split
TOWERS = [
    "--image-tower",
    "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,"
    "attention_dropout=0",
    "--text-tower",
    "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0",
]
SIZES = ["--image-size", 64, "--embed-dim", 16, "--max-text-tokens", 16, "--augmentation", "crop"]
PAIRS = ["--pairs", "image:text,region:text:0.5", "--loss", "region:text=sigmoid"]
PAIRS += ["--max-regions", 4, "--max-negatives", 3]
SPLITS = {
    1: {"layout": "merged", "stages": {"merged": 1}, "micro_batch_size": 24},
    3: {
        "layout": "fork",
        "stages": 1,
        "replicas": {"image": 2, "text": 1},
        "micro_batch_size": {"image": 4, "text": 12},
        "schedule": "replay",
    },
}
RELATIVE = 1e-5  # fp32, whose sums come in another order


@pytest.fixture
def data(tmp_path):
    """Scenes, of which every third has no region, and some have negatives."""
    scenes = open_source("demo:scenes:90", (("image", "text"), ("image", "region")))
    lines = []
    for n in range(60):
        (tmp_path / f"{n}.bmp").write_bytes(scenes.value("image", n))
        regions = [
            {
                "xyxy": region.box,
                "unit": "relative",
                "text": region.phrases[0],
                "negatives": ["a blue elephant", f"a green thing {n}"] if n % 4 == 0 else [],
            }
            for region in scenes.value("region", n)
        ]
        row = {"image_path": f"{n}.bmp", "text": scenes.captions(n)[0]}
        lines.append(json.dumps(row | ({"regions": regions} if n % 3 else {})))
    (tmp_path / "scenes.jsonl").write_text("\n".join(lines))
    return ["--data", f"jsonl:{tmp_path}/scenes.jsonl"]


def test_a_fork_with_regions_trains_as_one_rank_does(tmp_path, data):
    seen = {}
    for ranks, split in SPLITS.items():
        run_dir = tmp_path / f"run{ranks}"
        config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
        config["train_batch_size"] = 24
        config["branches"] |= split
        (tmp_path / f"{ranks}.json").write_text(json.dumps(config))
        flags = ["--deepspeed_config", tmp_path / f"{ranks}.json", "--run-dir", run_dir]
        flags += ["--workers", 0, "--steps", 4, "--wandb", "disabled"]
        status, output = run_to_end("train.py", *data, *TOWERS, *SIZES, *PAIRS, *flags, ranks=ranks)
        assert status == 0, output[-3000:]
        assert "phrase → box" in output and "region → phrase" in output
        seen[ranks] = metrics(run_dir), metrics(run_dir, "held_out")[4]
    (one, held_out), (split_up, held_out_split) = seen.values()
    losses = ("loss", "contrastive_loss/image_text", "contrastive_loss/region_phrase")
    counts = ("left_out_samples/region_phrase", "duplicate_samples/region_phrase")
    for step in one:
        for name in losses:
            assert split_up[step][name] == pytest.approx(one[step][name], rel=RELATIVE), name
        assert [split_up[step].get(n) for n in counts] == [one[step].get(n) for n in counts]
    assert any(one[step].get(counts[0]) for step in one)  # boxes that crops have cut off
    assert held_out["phrase_to_box_queries"] == held_out_split["phrase_to_box_queries"] > 0
    for name in ("alignment/region_phrase", "uniformity/region/region_phrase"):
        assert held_out_split[name] == pytest.approx(held_out[name], rel=1e-3)
