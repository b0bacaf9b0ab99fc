"""Towers of transformers in whole runs: from folders of weights, stopped and gone on with, evaluated
and exported."""

import json
import shutil

import pytest
import torch
from launched import fork_flags, metrics, run_to_end
from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

SPOKEN = "python:spoken_texts:Spoken"
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
IMAGES = {**SIZES, "num_hidden_layers": 2, "patch_size": 8, "image_size": 32}
TEXTS = {**SIZES, "num_hidden_layers": 1, "vocab_size": 90}
XLM = "xlm-mlm-en-2048:emb_dim=32,n_layers=2,n_heads=2,n_langs=3"


@pytest.mark.slow
def test_a_run_from_a_folder_of_weights(tmp_path):
    """Images larger than the weights', texts with languages, which the tower takes. Stopped after
    the first checkpoint, it goes on to the same last bit."""
    torch.manual_seed(0)
    folder = tmp_path / "siglip"
    SiglipModel(SiglipConfig(vision_config=IMAGES, text_config=TEXTS)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    flag, file = fork_flags(tmp_path)
    towers = ("--image-tower", f"hf:{folder}", "--image-weights", folder, "--text-tower", XLM)
    how = [
        *(*towers, "--image-size", 64, "--embed-dim", 32, flag, file, "--data", SPOKEN),
        *("--val-fraction", 0.2, "--workers", 0, "--steps", 4, "--save-every", 2),
    ]
    run_dir = tmp_path / "run"
    status, output = run_to_end("train.py", *how, "--run-dir", run_dir, ranks=2)
    assert status == 0, output[-5000:]
    assert "has shape (16, 32) there and (64, 32) in the tower: interpolated" in output
    record = json.loads((run_dir / "config.json").read_text())
    assert record["options"]["image_mean"] == [0.5, 0.5, 0.5]
    expected = metrics(run_dir)

    shutil.rmtree(run_dir / "checkpoints" / "step-00000004")
    (run_dir / "done").unlink()
    status, output = run_to_end("train.py", *how, "--run-dir", run_dir, ranks=2)
    assert status == 0, output[-5000:]
    again = metrics(run_dir)
    assert {s: line["loss"] for s, line in again.items()} == {
        s: line["loss"] for s, line in expected.items()
    }

    status, output = run_to_end("export.py", run_dir, tmp_path / "out")
    assert status == 0, output[-5000:]
    shutil.move(folder, tmp_path / "moved")  # the export stands alone
    found = []
    for number, of in enumerate((tmp_path / "out", run_dir)):
        if of == run_dir:
            shutil.move(tmp_path / "moved", folder)
        file = tmp_path / f"{number}.json"
        more = ("--trust-run",) if of == run_dir else ("--val-data", SPOKEN)
        status, output = run_to_end("evaluate.py", of, *more, "--workers", 0, "--json", file)
        assert status == 0, output[-5000:]
        found.append(json.loads(file.read_text()))
    assert all(any("R@1" in key for key in each) for each in found)
    # the run's stages and evaluate.py see the same pixels, whose mean is not CLIP's
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    *_, last = (line for line in lines if line.get("held_out"))
    for key in ("alignment", "uniformity/image", "cosine_pairs"):
        assert found[1][f"validation/{key}"] == pytest.approx(last[key], rel=1e-4), key
