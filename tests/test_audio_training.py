"""train.py with images, texts and sounds: a mixed run of two data sets, split over four ranks as on
one, and what evaluate.py says of it."""

import json
import sys

import pytest
from launched import ROOT, metrics, run_to_end

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402

from data.index.sources import open_source  # noqa: E402

pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

# no batch normalisation and no dropout, which see the split
NO_DROPOUT = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
TOWERS = [
    "--image-tower",
    "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,"
    "attention_dropout=0",
    "--text-tower",
    f"bert-tiny:{NO_DROPOUT}",
    "--audio-tower",
    "hf:ast:hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,"
    f"num_mel_bins=16,{NO_DROPOUT}",
]
SIZES = ["--audio-seconds", 0.5, "--image-size", 32, "--embed-dim", 16, "--max-text-tokens", 12]
SPLITS = {
    1: {"layout": "merged", "stages": {"merged": 1}, "micro_batch_size": 24},
    4: {
        "layout": "fork",
        "stages": 1,
        "replicas": {"image": 1, "text": 1, "audio": 2},
        "micro_batch_size": {"image": 6, "text": 24, "audio": 4},
        "schedule": "replay",
    },
}
RELATIVE = 1e-5  # fp32, whose sums come in another order


@pytest.fixture
def sets(tmp_path):
    """Emoji with names, and with names and tones; a third of the latter have no image, so that
    sounds and images are never compared there."""
    demo = open_source("demo")
    specs = []
    for name, first in (("pictures", 0), ("sounds", 90)):
        rows = []
        for n in range(first, first + 90):
            row = {"id": str(n), "text": demo.captions(n)[0]}
            if name == "pictures" or n % 3:
                (tmp_path / f"{n}.png").write_bytes(demo.image_bytes(n))
                row["image_path"] = f"{n}.png"
            if name == "sounds":
                (tmp_path / f"{n}.wav").write_bytes(wav(tone(0.3 + n % 5 / 10, 200 + 7 * n)))
                row["audio_path"] = f"{n}.wav"
            rows.append(json.dumps(row) + "\n")
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        specs += ["--data", f"jsonl:{tmp_path}/{name}.jsonl"]
    return specs


def configuration(folder, ranks):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= SPLITS[ranks] | {"balance": {"strategy": "off"}}
    (folder / f"{ranks}.json").write_text(json.dumps(config))
    return folder / f"{ranks}.json"


def test_a_fork_of_three_real_branches_trains_as_one_rank_does(tmp_path, sets):
    seen = {}
    for ranks in SPLITS:
        run_dir = tmp_path / f"run{ranks}"
        flags = ["--deepspeed_config", configuration(tmp_path, ranks), "--run-dir", run_dir]
        flags += ["--pairs", "image:text,audio:text:0.5", "--workers", 0, "--steps", 2]
        status, output = run_to_end("train.py", *sets, *TOWERS, *SIZES, *flags, ranks=ranks)
        assert status == 0, output[-3000:]
        assert "audio → text" in output
        seen[ranks] = metrics(run_dir), metrics(run_dir, "held_out")[2]
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
    run_dir = tmp_path / "run4"
    status, output = run_to_end("evaluate.py", run_dir)
    assert status == 0, output[-3000:]
    (found,) = run_dir.glob("evaluation-*.json")
    numbers = json.loads(found.read_text())
    # also what no loss compared
    for direction in ("audio_to_text", "text_to_audio", "audio_to_image", "image_to_audio"):
        assert 0 <= numbers[f"validation/{direction}_R@10"] <= 1
