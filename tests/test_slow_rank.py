"""A rank at a fraction of its speed is named while the run goes on, and may be given less."""

import json
import time

import pytest
from launched import (
    BATCH,
    ROOT,
    finish,
    metrics,
    ranks_of,
    reached,
    run_to_end,
    start,
    wait_for,
    words,
    write_pairs,
)

from launch.reporting.reading import read_folder
from launch.tracking.alerts import SKIPPED, WINDOW

# nothing in them depends on which samples are on which rank
TOWERS = "--image-tower vit_b_16:patch_size=8,num_layers=1,num_heads=2,hidden_dim=32,mlp_dim=64"
TOWERS += " --text-tower bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"
TOWERS += " --image-size 32 --embed-dim 32 --max-text-tokens 16 --workers 0"


@pytest.mark.all("holds a rank up for a minute")
def test_a_rank_that_is_held_up_is_named_and_given_less(tmp_path):
    """By a process that stops it nine tenths of the time, so that what else keeps the cores busy does
    not hold up another rank more. The losses are those of one rank."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = BATCH
    config["branches"] |= {"layout": "merged", "stages": {"merged": 1}}
    config["branches"]["balance"] = {"ranks": "measured", "interval": SKIPPED + WINDOW}
    (tmp_path / "merged.json").write_text(json.dumps(config))
    data = write_pairs(tmp_path / "pairs", 160)
    flags = [*words(TOWERS), "--deepspeed_config", tmp_path / "merged.json", "--data", data]
    flags += ["--steps", 30, "--eval-every", 30, "--run-dir"]
    run = start("train.py", *flags, tmp_path / "run", ranks=2)
    wait_for(reached(tmp_path / "run", 1), run)
    _, slow = ranks_of(run)
    while len(metrics(tmp_path / "run")) < SKIPPED + WINDOW:
        slow.suspend()
        time.sleep(0.27)
        slow.resume()
        time.sleep(0.03)
    status, output = finish(run)
    assert status == 0, output[-3000:]

    lines = (tmp_path / "run" / "alerts.jsonl").read_text().splitlines()
    alert = next(each for each in map(json.loads, lines) if "is slow" in each["title"])
    assert alert["title"] == "Rank 1 (merged 0, replica 1) is slow"
    assert "other replicas of merged 0" in alert["text"] and alert["step"] >= WINDOW
    assert any("is slow" in each for each in read_folder(tmp_path / "run", "").notices)
    assert f"{alert['title']}. {alert['text']}" in " ".join(output.split())

    (line,) = (tmp_path / "run" / "balance.jsonl").read_text().splitlines()
    changed = json.loads(line)["next"]
    assert changed["from_step"] < 30 and "shares of the replicas" in changed["reason"]
    for quick, held_up in changed["shares"].values():
        assert 0.5 < quick <= 0.625 and quick + held_up == pytest.approx(1, abs=1e-3)
    status, output = run_to_end("train.py", *flags, tmp_path / "one", ranks=1)
    assert status == 0, output[-3000:]
    shared, alone = metrics(tmp_path / "run"), metrics(tmp_path / "one")
    for step, line in shared.items():
        assert line["loss"] == pytest.approx(alone[step]["loss"], rel=1e-5), step
