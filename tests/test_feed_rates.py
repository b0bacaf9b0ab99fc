"""train.py with feed rates, on real towers and measured times."""

import json
import shutil
from statistics import median

import pytest
from forked_script import ROOT
from launched import metrics, run_to_end, write_pairs

TOWERS = ["--image-tower", "resnet18:layers=1-1-1-1", "--image-size", "64", "--text-tower", "bert-tiny", "--embed-dim", "32"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(arguments, folder) of a run whose images take longer than its texts, done at step 14, with a checkpoint of step 8."""
    folder = tmp_path_factory.mktemp("feed")
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    balance = {"strategy": "feed", "captions_per_image": [1, 3], "image_size": [32, 64], "interval": 1, "min_size": 2}
    config["train_batch_size"] = 60
    config["branches"] |= {
        "layout": "fork",
        "stages": {"image": 1, "text": 1},
        "schedule": "replay",
        "micro_batch_size": 15,
        "balance": balance,
    }
    (folder / "feed.json").write_text(json.dumps(config))
    arguments = [
        *TOWERS,
        "--deepspeed_config",
        folder / "feed.json",
        "--data",
        write_pairs(folder, 400, "en+de+es"),
        "--steps",
        14,
        "--save-every",
        8,
        "--eval-every",
        100,
    ]
    status, output = run_to_end("train.py", *arguments, "--run-dir", folder / "run", ranks=2)
    assert status == 0, output[-3000:]
    return arguments, folder / "run", output


def looks(run_dir):
    return [json.loads(line) for line in (run_dir / "balance.jsonl").read_text().splitlines()]


def test_texts_that_wait_get_more_captions(stopped):
    _, run_dir, output = stopped
    moved = [look["next"] for look in looks(run_dir) if look["reason"] and look["next"]]
    assert moved[0]["knobs"]["captions_per_image"] == 2 and "captions_per_image 1 -> 2: the text branch waits" in output
    tokens = metrics(run_dir, "text_tokens")
    before, after = (tokens[step]["text_tokens"] for step in (moved[0]["from_step"], moved[0]["from_step"] + 1))
    assert 1.4 < after / before < 3.5  # names in three languages, of different lengths
    late = looks(run_dir)[6:]  # another process on the same cores makes single steps slow
    assert median(look["predicted_s"]["text"] / look["measured_s"]["text"] for look in late) == pytest.approx(1, rel=0.7)


def test_a_run_that_goes_on_deals_and_feeds_as_before(stopped, tmp_path):
    """What was decided by step 8 holds, also for the steps that follow: the numbers are the same to the last bit."""
    arguments, run_dir, _ = stopped
    again = tmp_path / "run"
    shutil.copytree(run_dir, again)
    shutil.rmtree(again / "checkpoints" / "step-00000014")
    status, output = run_to_end("train.py", *arguments, "--run-dir", again, ranks=2)
    assert status == 0, output[-3000:]
    first, second = metrics(run_dir), metrics(again)
    decided = min([look["next"]["from_step"] for look in looks(run_dir) + looks(again) if look["step"] > 8 and look["next"]] + [14])
    assert decided >= 11 and set(second) == set(range(1, 15))
    for step in range(9, decided + 1):
        for key in ("loss", "grad_norm/image", "grad_norm/text", "text_tokens", "padded_text_tokens"):
            assert first[step][key] == second[step][key], (step, key)
    assert [look for look in looks(again) if look["step"] <= 8] == [look for look in looks(run_dir) if look["step"] <= 8]
