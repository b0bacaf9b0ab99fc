"""train.py with images, texts and sounds: a mixed run of two data sets, split over four ranks as on
one, and what evaluate.py says of it."""

import base64
import io
import json
import re
import sys
import tarfile
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from launched import ROOT, metrics, run_to_end
from PIL import Image
from wandb_files import pieces

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402

import evaluate  # noqa: E402
from data.decoding.sounds import decode_audio  # noqa: E402
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
                (tmp_path / f"{n}.png").write_bytes(demo.value("image", n))
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


def test_a_fork_of_three_real_branches_trains_as_one_rank_does(tmp_path, sets, monkeypatch, capsys):
    seen = {}
    for ranks in SPLITS:
        run_dir = tmp_path / f"run{ranks}"
        flags = ["--deepspeed_config", configuration(tmp_path, ranks), "--run-dir", run_dir]
        flags += ["--pairs", "image:text,audio:text:0.5", "--workers", 0, "--steps", 2]
        flags += ["--wandb", "offline" if ranks == 4 else "disabled"]
        status, output = run_to_end("train.py", *sets, *TOWERS, *SIZES, *flags, ranks=ranks)
        assert status == 0, output[-3000:]
        assert "audio → text" in output
        seen[ranks] = metrics(run_dir), metrics(run_dir, "held_out")[2]
    check_losses(*(steps for steps, _ in seen.values()))
    directions = [f"{a}_to_{b}" for a, b in permutations(("image", "text", "audio"), 2)]
    for direction in directions:  # also between images and sounds, which no loss compared
        # one sample more or less among the first ten is what rounding may change
        assert seen[4][1][f"{direction}_R@10"] == pytest.approx(
            seen[1][1][f"{direction}_R@10"], abs=0.2
        )
    run_dir = tmp_path / "run4"
    status, output = run_to_end("evaluate.py", run_dir)
    assert status == 0 and "audio → image" in output, output[-3000:]
    (found,) = run_dir.glob("evaluation-*.json")
    numbers = json.loads(found.read_text())
    trained = {f"validation/{name}": value for name, value in seen[4][1].items()}
    compared = [name for name in trained if name in numbers]
    assert {name for name in trained if "_R@" in name or "alignment/" in name} <= {*compared}
    assert {name: numbers[name] for name in compared} == pytest.approx(
        {name: trained[name] for name in compared}, rel=1e-3, abs=1e-4
    )
    check_panels(run_dir)
    check_queries(run_dir)
    check_answers(run_dir, tmp_path, monkeypatch, capsys)


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


def test_streams_of_three_modalities_train_on_four_ranks_as_on_one(tmp_path, sets):
    """The same samples in tar shards, of which the sounds come one and a half times an epoch."""
    specs = []
    for spec in sets[1::2]:
        name = Path(spec.partition(":")[2]).stem
        source = open_source(spec, (("image", "text"), ("audio", "text")))
        lacking = {modality: source.lacking(modality) for modality in ("image", "audio")}
        (tmp_path / name).mkdir()
        for shard in range(6):
            with tarfile.open(tmp_path / name / f"{shard}.tar", "w") as tar:
                for i in range(15 * shard, 15 * shard + 15):
                    values = {"txt": source.captions(i)[0].encode()}
                    for modality, ending in (("image", "png"), ("audio", "wav")):
                        if not lacking[modality][i]:
                            values[ending] = source.value(modality, i)
                    for ending, content in values.items():
                        member = tarfile.TarInfo(f"{i}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        specs += ["--data", f"stream:{tmp_path}/{name}/{{0..5}}.tar?mixed=2"]
    seen = []
    for ranks in SPLITS:
        run_dir = tmp_path / f"run{ranks}"
        flags = ["--deepspeed_config", configuration(tmp_path, ranks), "--run-dir", run_dir]
        flags += ["--pairs", "image:text,audio:text:0.5", "--workers", 0, "--steps", 2]
        flags += ["--data-weights", "1,1.5", "--val-fraction", 0]
        status, output = run_to_end("train.py", *specs, *TOWERS, *SIZES, *flags, ranks=ranks)
        assert status == 0, output[-3000:]
        seen.append(metrics(run_dir))
    check_losses(*seen)
    assert all(line["stream_hits"] + line["stream_misses"] > 0 for line in seen[1].values())


def check_panels(run_dir):
    """Of each pair and of each branch, and a table of queries of each direction."""
    (piece,) = pieces(run_dir)
    assert {
        *("loss/contrastive/audio_text", "optimizer/logit_scale_exp/audio_text"),
        *("throughput/audio/samples_per_s", "throughput/audio/possible_samples_per_s"),
        *("retrieval/validation/audio_to_image/R@1", "alignment/validation/alignment/image_audio"),
        *("queries/validation/audio_to_image", "queries/validation/text_to_audio"),
    } <= {*piece.keys()}


def check_queries(run_dir):
    """What the report shows: a spectrogram of each sound, which can be heard."""
    record = json.loads((run_dir / "queries.json").read_text())["sets"]["validation"]
    asked = record["audio_to_image"][0]
    sound = record["samples"][asked["query"]]
    picture = Image.open(io.BytesIO(base64.b64decode(sound["audio_picture"])))
    assert picture.size == (180, 120) and np.asarray(picture).std() > 20
    assert decode_audio(base64.b64decode(sound["audio_sound"])).rate == 16_000
    assert "image_picture" in record["samples"][asked["answers"][0]["sample"]]
    page = (run_dir / "report.html").read_text()
    assert "audio → image" in page and "<audio controls" in page
    assert len(page) < 5_000_000


def check_answers(run_dir, folder, monkeypatch, capsys):
    """--query with a sound finds itself among sounds, before all others; a tone is as any file of
    the set."""
    heard = folder / "a sound"  # a file is known by its content
    heard.write_bytes((folder / "91.wav").read_bytes())
    sounds = f"jsonl:{folder}/sounds.jsonl"

    def asked(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, (run_dir, *words))])
        evaluate.main(evaluate.parse())
        return capsys.readouterr().out

    found = asked("--query", heard, "--find", "audio", "--val-data", sounds, "--number", 3)
    assert re.search(r"1\.000\b[^\n]*│ +91\b", found) and found.count("sounds.jsonl") == 3
    drawn = folder / "found.png"
    found = asked("--query", heard, "--find", "image", "--val-data", sounds, "--picture", drawn)
    ids = [int(each) for each in re.findall(r"│ (\d+) +│", found)]
    assert len(ids) == 20 and all(n % 3 for n in ids)  # the others have no image
    assert drawn.stat().st_size > 20_000
    asked("--embeddings", folder / "out", "--val-data", sounds)
    again = asked("--query", folder / "91.png", "--embeddings", folder / "out", "--number", 2)
    assert "text" in again.splitlines()[2] and again.count("sounds.jsonl") == 2
    for name, pitch in (("low", 200), ("high", 2000)):
        (folder / "classes" / name).mkdir(parents=True)
        for i in range(3):
            (folder / "classes" / name / f"{i}.wav").write_bytes(wav(tone(0.4, pitch + 9 * i)))
    classes = f"audiofolder:{folder}/classes?templates=the sound of {{}}"
    assert "zero-shot" in asked("--classify", classes) and "chance, 2 classes" in asked(
        "--classify", classes, "--classify-train", classes
    )
    (folder / "notes.wav").write_text("no sound")
    for words, said in (
        (["--query", folder / "notes.wav"], "is no file of a modality of this model"),
        (["--query", "missing.wav"], "there is no such file"),
        (["--query", "a dog", "--find", "video"], "this model has image, text, audio"),
        (["--classify", sounds], "has image and audio of image and audio"),
    ):
        with pytest.raises(ValueError, match=said):
            asked(*words)
