"""train.py with images, texts and sounds in tar shards: a mixed run of two data sets, split over four
ranks as on one."""

import io
import json
import sys
import tarfile

import pytest
from launched import ROOT, metrics, run_to_end

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402

from data.index.sources import open_source  # noqa: E402

pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

# no batch normalisation and no dropout, which see the split
VIT = (
    "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,"
    "attention_dropout=0"
)
TOWERS = ["--image-tower", VIT, "--audio-tower", VIT, "--audio-size", 32]
TOWERS += ["--text-tower", "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"]
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
def streams(tmp_path):
    """Emoji with names, and with names and tones; a third of the latter have no image, so that
    sounds and images are never compared there. In six shards each."""
    demo, flags = open_source("demo"), []
    for name, first in (("pictures", 0), ("sounds", 90)):
        (tmp_path / name).mkdir()
        for shard in range(6):
            with tarfile.open(tmp_path / name / f"{shard}.tar", "w") as tar:
                for n in range(first + 15 * shard, first + 15 * shard + 15):
                    values = {"txt": demo.captions(n)[0].encode()}
                    if name == "pictures" or n % 3:
                        values["png"] = demo.value("image", n)
                    if name == "sounds":
                        values["wav"] = wav(tone(0.3 + n % 5 / 10, 200 + 7 * n))
                    for ending, content in values.items():
                        member = tarfile.TarInfo(f"{n}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        flags += ["--data", f"stream:{tmp_path}/{name}/{{0..5}}.tar?mixed=2"]
    return flags


def configuration(folder, ranks):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= SPLITS[ranks] | {"balance": {"strategy": "off"}}
    (folder / f"{ranks}.json").write_text(json.dumps(config))
    return folder / f"{ranks}.json"


def check_losses(whole, split):
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


def test_streams_of_three_modalities_train_on_four_ranks_as_on_one(tmp_path, streams):
    """Of which the sounds come one and a half times an epoch."""
    seen = []
    for ranks in SPLITS:
        run_dir = tmp_path / f"run{ranks}"
        flags = ["--deepspeed_config", configuration(tmp_path, ranks), "--run-dir", run_dir]
        flags += ["--pairs", "image:text,audio:text:0.5", "--workers", 0, "--steps", 2]
        flags += ["--data-weights", "1,1.5", "--val-fraction", 0]
        status, output = run_to_end("train.py", *streams, *TOWERS, *SIZES, *flags, ranks=ranks)
        assert status == 0, output[-3000:]
        seen.append(metrics(run_dir))
    check_losses(*seen)
    assert all(line["stream_hits"] + line["stream_misses"] > 0 for line in seen[1].values())
