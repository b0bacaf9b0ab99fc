"""What only a GPU can show. Skipped, with the reason, where there is none."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(tmp_path, name, changes, *arguments):
    """train.py on one rank and one GPU under the JSON file `name` with these keys changed: (what it
    said, its folder)."""
    config = json.loads((ROOT / "ds_configs" / name).read_text())
    file = tmp_path / name
    file.write_text(
        json.dumps(
            config | changes | {"branches": config["branches"] | changes.get("branches", {})}
        )
    )
    run_dir = tmp_path / file.stem
    result = subprocess.run(
        [sys.executable, "train.py", "--deepspeed_config", file, "--run-dir", run_dir, *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"},
        text=True,
        capture_output=True,
        timeout=1200,
    )
    return result, run_dir


def losses(tmp_path, name):
    """Losses of 20 steps with a batch that suits the embedded data."""
    scheduler = json.loads((ROOT / "ds_configs" / name).read_text())["scheduler"]
    scheduler["params"]["warmup_num_steps"] = 5
    changes = {"train_batch_size": 120, "scheduler": scheduler}
    result, run_dir = train(tmp_path, name, changes, "--steps", "20", "--eval-every", "20")
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_bf16_and_fp16_losses_follow_fp32(tmp_path):
    """Within 2 %: half precision rounds each activation to 8 or 11 bits, and 20 steps let the
    differences grow."""
    exact = losses(tmp_path, "zero1_fp32.json")
    for name in ("zero1_bf16.json", "zero1_fp16.json"):
        assert losses(tmp_path, name) == pytest.approx(exact, rel=0.02), name


def test_memory_that_runs_out_is_one_message_with_what_to_change(tmp_path):
    """A ResNet-50 keeps some 140 MB for each image of 288 × 288 in fp32: no GPU has room for
    2,400 of them."""
    branches = {
        "layout": "merged",
        "stages": {"merged": 1},
        "micro_batch_size": 2400,
        "schedule": "batch_sync",
    }
    changes = {"train_batch_size": 2400, "branches": branches}
    arguments = [
        "--image-tower",
        "resnet50",
        "--image-size",
        "288",
        "--text-tower",
        "bert-tiny",
        "--steps",
        "2",
        "--eval-every",
        "2",
    ]
    result, run_dir = train(tmp_path, "zero1_fp32.json", changes, *arguments)
    assert result.returncode == 2, result.stderr[-3000:]
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.stderr, result.stderr[
        -3000:
    ]
    said = result.stderr.split("train.py: error: ")[1].splitlines()
    assert (
        said[0]
        == "rank 0 (merged 0, replica 0) ran out of memory in ForwardPass of micro-batch 0 (of 1, counted from 0), in step 1"
    )
    assert re.match(r"asked for: [\d.]+ [MG]iB; GPU 0 has [\d.]+ GiB, of which ", said[1])
    assert re.match(
        r"held: [\d.]+ GiB in tensors, [\d.]+ \w+ that torch had reserved and did not use", said[2]
    )
    assert said[3].startswith("predicted for a training step of merged 0: at most ")
    assert '{"schedule": "replay", "micro_batch_size": 1200}' in result.stderr
    kept = (run_dir / "error-rank0.txt").read_text()
    assert "OutOfMemoryError: CUDA out of memory" in kept and "_exec_forward_pass" in kept
