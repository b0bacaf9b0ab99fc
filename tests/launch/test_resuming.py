"""Where a run goes on: with global batches of another size, too."""

import json
from pathlib import Path

import pytest
from checkpoint_cases import found, write_small
from forked_script import ROOT
from launched import run_to_end, write_pairs
from ranks import run_ranks

from data.batching.order import GlobalOrder
from launch.run.resuming import announced, change_of_size, earlier_sizes, state_of
from launch.run.stopping import STOPPED

RATE = 1e-3
SMALL = "--image-tower resnet18:layers=1-1-1-1 --image-size 32 --text-tower bert-tiny".split()
# of 100 samples 90 are trained on
SMALL += "--embed-dim 16 --val-fraction 0.1 --epochs 2 --eval-every 100 --workers 0".split()


def test_sizes_so_far_that_are_those_of_the_run_that_goes_on():
    """As JSON gives them back. A size that has not changed goes on as if the run had not been
    stopped."""
    assert earlier_sizes((), 64) == ()
    assert earlier_sizes([[120, 64]], 64) == () and earlier_sizes([[120, 64]], 96) == ((120, 64),)
    assert earlier_sizes([[120, 64], [3, 96]], 96) == ((120, 64),)
    assert earlier_sizes([[120, 64], [3, 96]], 64) == ((120, 64), (3, 96))


def test_what_another_size_means_is_said_once():
    order = GlobalOrder(20_025, 96, 0, earlier=((746, 64),))
    assert change_of_size(order, 746, 1234) == (
        "96 samples a step, and before 64: the 12,217 samples left of epoch 3 follow in their "
        "order; the learning rate's schedule counts steps, 1,234 in all"
    )
    assert change_of_size(order, 747, 1234) is None
    assert change_of_size(GlobalOrder(20_025, 64, 0), 746, 1234) is None
    for steps, samples in ((312, 20_025), (10, 20_025), (10, 640)):  # an epoch begins with it
        order = GlobalOrder(samples, min(samples, 20_000), 0, earlier=((steps, 64),))
        assert f"the {samples:,} samples left of epoch 2 follow" in change_of_size(order, steps, 9)


def test_where_a_run_goes_on_and_whether_anything_has_changed_is_announced():
    """One line for each change; without any, a line all the same."""
    same, other = GlobalOrder(20_025, 64, 0), GlobalOrder(20_025, 96, 0, earlier=((1746, 64),))
    checkpoint, begins = Path("run/checkpoints/step-00001746"), "goes on from step-00001746, "
    assert announced(checkpoint, 1746, [], same, 2340) == [
        f"{begins}step 1,746 of 2,340, split and computed as before"
    ]
    assert announced(checkpoint, 1746, ["split as fork"], same, 2340) == [f"{begins}split as fork"]
    first, second = announced(checkpoint, 1746, ["split as fork"], other, 2340)
    assert first == f"{begins}split as fork"
    assert second.startswith(f"{begins}96 samples a step, and before 64: ")


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    assert state_of(None) == {"step": 0, "batch_sizes": ()}
    needed = "balance, batch_sizes, loss_weights, step are needed.*export.py"
    with pytest.raises(ValueError, match=f"--resume .*3: its state has step, and {needed}"):
        state_of(write_small(tmp_path, 3))


def test_a_run_goes_on_with_another_batch_in_the_middle_of_an_epoch(tmp_path):
    """One process, two epochs of 90 samples: a step of 24 and 5 of 12, then 7 of 12. With steps of
    24 it would have been 3 and 3."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["branches"] |= {"layout": "merged", "stages": {"merged": 1}, "schedule": "batch_sync"}
    config["optimizer"]["params"]["lr"] = RATE
    warm = {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_type": "linear"}
    config["scheduler"] = {"type": "WarmupDecayLR", "params": warm}
    run_dir, how = tmp_path / "run", tmp_path / "how.json"
    data = ["--data", write_pairs(tmp_path, 100)]

    def train(batch_size, *arguments):
        how.write_text(json.dumps(config | {"train_batch_size": batch_size}))
        return run_to_end(
            "train.py", *SMALL, *data, "--deepspeed_config", how, "--run-dir", run_dir, *arguments
        )

    status, output = train(24, "--max-hours", "0.0001")
    assert status == STOPPED and "at step 1 of 6" in output, output
    status, output = train(12)
    assert status == 0, output
    said = "goes on from step-00000001, 12 samples a step, and before 24: the 66 samples left of"
    assert said in " ".join(output.split())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 14))
    samples = [24, 36, 48, 60, 72, 90, *range(90 + 12, 90 + 84, 12), 180]
    epochs = [number / 90 for number in samples]
    assert [line["epoch"] for line in steps] == pytest.approx(epochs, abs=1e-4)
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    # when it was stopped, and at the end: its epochs have fewer than 20 steps
    assert saved == ["step-00000001", "step-00000013"]
    rates = [RATE * (14 - step) / (14 - 2) for step in range(4, 14)]
    assert [line["lr"] for line in steps[3:]] == pytest.approx(rates)
    record = json.loads((run_dir / "config.json").read_text())
    image = record["batches"]["image"]
    assert record["total_steps"] == 13
    assert image["micro_batch_size"] * image["num_micro_batches"] == 12
    manifest = json.loads((run_dir / "checkpoints" / "step-00000013" / "manifest.json").read_text())
    assert manifest["state"]["batch_sizes"] == [[1, 24], [12, 12]]


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoints(tmp_path):
    """So that the same command can be started again and again."""
    other, own = tmp_path / "other" / "checkpoints", tmp_path / "own" / "checkpoints"
    write_small(other, 7)
    assert run_ranks(1, found, str(other / "step-00000007"), own) == [(other / "step-00000007", [])]
    write_small(own, 9)
    (checkpoint, notices), *_ = run_ranks(1, found, str(other / "step-00000007"), own)
    assert checkpoint == own / "step-00000009"
    assert "is where this run began; it has checkpoints of its own now" in notices[0]
    write_small(own, 11)  # back, on purpose
    assert run_ranks(1, found, str(own / "step-00000009"), own) == [(own / "step-00000009", [])]
