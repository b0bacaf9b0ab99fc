"""train.py with feed rates, on real towers, by a clock that counts operations: what is decided
depends on the work alone, not on the machine."""

import json
import shutil

import pytest
from forked_script import ROOT
from launched import metrics, run_to_end, write_pairs

from data.batching.load_control import typical

TOWERS = [
    "--image-tower",
    "resnet18:layers=1-1-1-1",
    "--image-size",
    "64",
    "--text-tower",
    "bert-tiny",
    "--embed-dim",
    "32",
]
# as many steps as a measurement asks for micro-batch by micro-batch: a run that goes on from one
# has seen what the first had
INTERVAL = 3
TRAIN = "tests/counted_training.py"


@pytest.fixture(scope="module")
def whole(module_folder):
    """(arguments, folder, output) of a run whose images are sixteen times the work of its texts;
    done at step 24, with a checkpoint of step 12."""
    folder = module_folder("feed")
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    bounds = {"captions_per_image": [1, 3], "image_size": [32, 64]}
    config["train_batch_size"] = 60
    config["branches"] |= {
        "layout": "fork",
        "stages": {"image": 1, "text": 1},
        "schedule": "replay",
        "micro_batch_size": 15,
        "balance": {
            "strategy": "feed",
            **bounds,
            "interval": INTERVAL,
            "min_size": 2,
            "max_change": 4,
        },
    }
    (folder / "feed.json").write_text(json.dumps(config))
    arguments = [
        *TOWERS,
        "--deepspeed_config",
        folder / "feed.json",
        "--data",
        write_pairs(folder, 400, "en+de+es"),
        "--workers",
        0,
    ]
    arguments += ["--steps", 24, "--save-every", 12, "--eval-every", 100]
    status, output = run_to_end(TRAIN, *arguments, "--run-dir", folder / "run", ranks=2)
    assert status == 0, output[-3000:]
    return arguments, folder / "run", output


def measurements(run_dir):
    return [json.loads(line) for line in (run_dir / "balance.jsonl").read_text().splitlines()]


@pytest.mark.all("trains until the feed moves")
def test_what_waits_is_fed_more_and_then_what_all_wait_for_is_relieved(whole):
    """Three measurements ask before each move; a move holds two steps after its measurement, for
    loading is that far ahead. Measurements that saw a step from before it do not count."""
    _, run_dir, output = whole
    steps, seen = metrics(run_dir), measurements(run_dir)
    assert [record["step"] for record in seen] == [3, 6, 9, 12, 15, 18, 21, 24]
    for record in seen:  # of the steps that were measured
        for branch in ("image", "text"):
            busy_s = [
                steps[step][f"busy_s/{branch} 0"]
                for step in range(record["step"] - INTERVAL + 1, record["step"] + 1)
            ]
            assert record["busy_s"][branch] == pytest.approx(typical(busy_s), rel=1e-4)
    moves = [
        (record["step"], record["next"]["from_step"], record["reason"].partition(" waits ")[0])
        for record in seen
        if record["reason"]
    ]
    assert moves == [
        (9, 11, "captions_per_image 1 -> 3: the text branch"),
        (21, 23, "image_size 64 -> 32: the text branch"),
    ]
    assert all(f"step {step}: {what} waits" in output for step, _, what in moves)
    assert [line["captions_per_image"] for line in steps.values()] == [1] * 11 + [3] * 13
    assert [line["image_size"] for line in steps.values()] == [64] * 23 + [32]
    # names in three languages, of different lengths
    assert 2 < steps[12]["text_tokens"] / steps[11]["text_tokens"] < 4.5
    assert steps[24]["busy_s/image 0"] / steps[23]["busy_s/image 0"] == pytest.approx(
        0.25, rel=0.01
    )
    assert all(line["idle/image 0"] == 0 < line["idle/text 0"] for line in steps.values())


def test_costs_come_to_predict_what_is_measured(whole):
    _, run_dir, _ = whole
    guessed, *refitted = (
        record["predicted_s"]["text"] / record["measured_s"]["text"]
        for record in measurements(run_dir)
    )
    assert guessed < 0.1  # an accelerator's
    # operations are of the very form that is fitted
    assert refitted == pytest.approx([1] * 7, rel=1e-3)


@pytest.mark.all("one more resumed run")
def test_a_run_that_goes_on_deals_and_feeds_as_before(whole, tmp_path):
    """What was decided by step 12 holds, and so does what is decided afterwards: the numbers are
    the same to the last bit."""
    arguments, run_dir, _ = whole
    again = tmp_path / "run"
    shutil.copytree(run_dir, again)
    shutil.rmtree(again / "checkpoints" / "step-00000024")
    status, output = run_to_end(TRAIN, *arguments, "--run-dir", again, ranks=2)
    assert status == 0, output[-3000:]
    # it began behind the first move
    assert "captions_per_image 1 -> 3" not in output and "image_size 64 -> 32" in output
    assert measurements(again) == measurements(run_dir)
    first, second = metrics(run_dir), metrics(again)
    assert set(first) == set(second) == set(range(1, 25))
    for step, line in first.items():
        of_a_process = {"peak_memory_bytes", "sent_bytes"}  # its first step announces shapes
        assert line["sent_bytes"] == pytest.approx(second[step]["sent_bytes"], rel=0.1)
        differing = {
            key
            for key in line.keys() | second[step].keys()
            if line.get(key) != second[step].get(key) and not key.startswith("peak_memory_bytes/")
        }
        assert differing <= of_a_process, (step, differing)
