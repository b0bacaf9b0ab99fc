"""train.py with films, images, sounds and texts: split over five ranks as on one, and what
evaluate.py says of it."""

import base64
import io
import json
import os
import sys

import numpy as np
import pytest
from launched import ROOT, metrics, run_to_end
from matplotlib.image import imread
from PIL import Image

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402
from bad_films import film  # noqa: E402

import evaluate  # noqa: E402
from data.index.sources import open_source  # noqa: E402

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")
pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

# no batch normalisation and no dropout, which see the split
VIT = (
    "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,"
    "attention_dropout=0"
)
NO_DROPOUT = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
TOWERS = ["--image-tower", VIT, "--video-tower", f"{VIT},time=transformer,time_layers=1"]
TOWERS += ["--text-tower", f"bert-tiny:{NO_DROPOUT}", "--audio-tower", VIT, "--audio-size", 32]
SIZES = ["--image-size", 32, "--embed-dim", 16, "--max-text-tokens", 12, "--audio-seconds", 0.5]
SIZES += ["--video-frames", 4, "--video-rate", 8, "--film-clips", 2]
PAIRS = ["--pairs", "image:text,video:text,audio:text,image:video"]
SPLITS = {
    1: {
        "layout": "merged",
        "stages": {"merged": 1},
        "micro_batch_size": 24,
        "balance": {"strategy": "off"},
    },
    5: {
        "layout": "fork",
        "stages": 1,
        "replicas": {"image": 1, "text": 1, "audio": 1, "video": 2},
        "micro_batch_size": {"image": 6, "text": 24, "audio": 12, "video": 4},
        "schedule": "replay",
        "balance": {"strategy": "deal"},
    },
}


@pytest.fixture(scope="module")
def data(module_folder):
    """Segments of films, of a tenth to all of a second, so of one to four frames: some with an
    image and a sound, some with none."""
    folder, demo, rows = module_folder("clips"), open_source("demo"), []
    for n in range(24):
        (folder / f"{n}.mp4").write_bytes(film(number=16 + n))
        for k, (start_s, end_s) in enumerate(((0.0, 0.1), (0.1, 0.5), (0.0, None))):
            i = 3 * n + k
            row = {"id": str(i), "video_path": f"{n}.mp4", "start_s": start_s, "end_s": end_s}
            row["text"] = demo.captions(i)[0]
            if i % 3:
                (folder / f"{i}.png").write_bytes(demo.value("image", i))
                row["image_path"] = f"{i}.png"
            if i % 2:
                (folder / f"{i}.wav").write_bytes(wav(tone(0.3, 200 + 7 * i)))
                row["audio_path"] = f"{i}.wav"
            rows.append(json.dumps(row))
    (folder / "set.jsonl").write_text("\n".join(rows))
    return folder, f"jsonl:{folder}/set.jsonl"


def train(folder, spec, ranks, run_dir, *more, expected=0):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= SPLITS[ranks]
    (folder / f"{ranks}.json").write_text(json.dumps(config))
    flags = ["--deepspeed_config", folder / f"{ranks}.json", "--run-dir", run_dir, *PAIRS]
    flags += ["--data", spec, "--workers", 0, *TOWERS, *SIZES, *more]
    status, output = run_to_end("train.py", *flags, ranks=ranks)
    assert status == expected, output[-3000:]


def test_a_fork_of_four_branches_trains_as_one_rank_does(data, tmp_path, monkeypatch, capsys):
    folder, spec = data
    for ranks in SPLITS:
        train(folder, spec, ranks, tmp_path / f"run{ranks}", "--steps", 2)
    whole, split = (metrics(tmp_path / f"run{ranks}") for ranks in SPLITS)
    kinds = ("contrastive_loss/", "grad_norm/")
    compared = ["loss", *(name for name in whole[1] if name.startswith(kinds))]
    assert len(compared) == 1 + 4 + 4 + 1  # pairs; branches and heads
    for step in (1, 2):
        assert {n: split[step][n] for n in compared} == pytest.approx(
            {n: whole[step][n] for n in compared}, rel=1e-5
        )
    check_evaluation(tmp_path / "run5", folder, monkeypatch, capsys)


def check_evaluation(run_dir, folder, monkeypatch, capsys):
    """As at the end of training; where a sentence holds in a film; a clip finds itself."""

    def evaluated(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words), "--workers", "0"])
        evaluate.main(evaluate.parse())
        return capsys.readouterr().out

    said = " ".join(evaluated(run_dir).split())
    assert "4 frames a clip at 8/s at most" in said and "dual softmax" in said
    found = json.loads((run_dir / "evaluation-step-00000002.json").read_text())
    last = metrics(run_dir, "held_out")[2]
    for name in ("video_to_text_R@5", "image_to_video_R@5", "alignment/video_text"):
        assert found[f"validation/{name}"] == pytest.approx(last[name], rel=1e-3, abs=1e-4)
    assert 0 < found["validation/grounding_chance_iou_0.5"] < 1
    assert found["validation/grounding_queries"] > 2
    record = json.loads((run_dir / "queries.json").read_text())["sets"]["validation"]
    sample = record["samples"][record["video_to_text"][0]["query"]]
    strip = Image.open(io.BytesIO(base64.b64decode(sample["video_picture"])))
    assert strip.width > 3 * strip.height and np.asarray(strip).std() > 20
    for name, n in (("runs", 0), ("jumps", 1)):
        (folder / "classes" / name).mkdir(parents=True)
        (folder / "classes" / name / "a.mp4").write_bytes((folder / f"{n}.mp4").read_bytes())
    said = evaluated(run_dir, "--classify", f"videofolder:{folder}/classes")
    assert "chance, 2 classes" in said and "4 frames a clip at 8/s at most" in said
    picture = folder / "found.png"
    spec = ("--val-data", f"jsonl:{folder}/set.jsonl")
    words = ("--query", folder / "3.mp4", "--find", "video", "--number", 2, "--picture", picture)
    said = evaluated(run_dir, *spec, *words)
    assert "1.000" in said and " 11 " in said  # the third clip of the film is all of it
    assert imread(picture).std() > 0.1
    words = ("--query", folder / "3.mp4", "--find", "window", "--number", 99, "--picture", picture)
    said = evaluated(run_dir, *words)
    lines = [line for line in said.splitlines() if " s " in line and "│" in line]
    held_out = found["num_samples"]["validation"]
    assert 2 <= len(lines) <= held_out / 2  # the best window of each film
    # of a film that is damaged since, and of no other one, there is no window
    first = lines[0].split("│")[3].strip()
    damaged = folder / f"{int(first) // 3}.mp4"
    whole, status = damaged.read_bytes(), damaged.stat()
    damaged.write_bytes(
        whole[: len(whole) // 3] + bytes(len(whole) // 3) + whole[-len(whole) // 3 :]
    )
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    left = evaluated(run_dir, *words)
    damaged.write_bytes(whole)
    assert "left out" in left and [line for line in lines if line in left] == lines[1:]
    assert imread(picture).std() > 0.1


def test_a_resumed_run_ends_where_an_undisturbed_one_ends_bit_for_bit(data, tmp_path):
    """With two workers, each of which has its own film open."""
    folder, spec = data
    flags = ("--steps", 3, "--eval-every", 3, "--workers", 2)
    train(folder, spec, 1, tmp_path / "whole", *flags)
    # which stops after its first step, with a checkpoint
    train(folder, spec, 1, tmp_path / "parts", *flags, "--max-hours", 1e-9, expected=75)
    train(folder, spec, 1, tmp_path / "parts", *flags)
    losses = [
        [line["loss"] for line in metrics(tmp_path / name).values()] for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3
