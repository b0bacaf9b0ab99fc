"""The comparison with OpenCLIP's trainer: what it writes for both programs, what it reads from
their logs, and its tables.

Neither program runs here. That OpenCLIP itself writes such logs was seen with version 3.3.0.
"""

import csv
import io
import json
import subprocess
import sys

import psutil
import pytest
from cost_models import BRANCHES
from PIL import Image

from bench.common import laid_over
from bench.open_clip import ALL, RECIPE, VARIANTS, Run, kill_all, launch, own_configuration
from bench.open_clip_data import (
    TOWERS,
    Files,
    Sample,
    held_out_rows,
    read_rows,
    tower_description,
    write_samples,
)
from bench.open_clip_report import (
    Evaluation,
    Record,
    by_second,
    by_step,
    draw,
    load_record,
    read_open_clip,
    read_own,
    save_record,
    speed,
)
from data.formats.tables import TableFormat
from engine.config.reading import check_config

OPEN_CLIP_LOG = """\
2026-01-01,00:00:00 | INFO | Start epoch 0
2026-01-01,00:00:02 | INFO | Train Epoch: 0 [ 256/3550 (8%)] Data (t): 0.341 Batch (t): 2.094, 122.271/s, 61.1353/s/gpu LR: 0.000025 \
Logit Scale: 14.286 Contrastive_loss: 5.6345 (5.6345) Loss: 5.6345 (5.6345)
2026-01-01,00:00:04 | INFO | Train Epoch: 0 [ 512/3550 (15%)] Data (t): 0.270 Batch (t): 1.280, 200.000/s, 100.000/s/gpu LR: 0.000050 \
Logit Scale: 14.285 Contrastive_loss: 5.5878 (5.6112) Loss: 5.5878 (5.6112)
2026-01-01,00:00:05 | INFO | Eval Epoch: 1 [128 / 394]	Clip Loss: 5.111111	
2026-01-01,00:00:06 | INFO | Train Epoch: 1 [ 256/3550 (8%)] Data (t): 0.100 Batch (t): 2.560, 100.000/s, 50.0000/s/gpu LR: 0.000075 \
Logit Scale: 14.284 Contrastive_loss: 4.9000 (4.9000) Loss: 4.9000 (4.9000)
2026-01-01,00:00:07 | INFO | Train Epoch: 1 [ 512/3550 (15%)] Data (t): 0.100 Batch (t): 0.002, 1.28000e+06/s, 640000./s/gpu LR: 0.000100 \
Logit Scale: 14.283 Contrastive_loss: 4.8000 (4.8500) Loss: 4.8000 (4.8500)
"""
RECALLS = ("image_to_text_R@1", "text_to_image_R@1", "image_to_text_R@10", "text_to_image_R@10")


def recalls(*values):
    return dict(zip(RECALLS, values))


def record(r10, step_s=2.0, peaks=(2**30, 2**29)):
    """Of four steps, with evaluations after two and four of them that found `r10` in both
    directions."""
    evaluations = [
        Evaluation(step, recalls(0.0, 0.0, value, value)) for step, value in zip((2, 4), r10)
    ]
    return Record([5.0, 4.0, 3.0, 2.0], [step_s] * 4, [0.5] * 4, list(peaks), evaluations)


# -- what both programs read


def encoded(colour, mode="RGBA"):
    stream = io.BytesIO()
    Image.new(mode, (4, 4), colour).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def written(tmp_path):
    """20 samples, of which the last two share an image; the first is transparent."""
    images = [
        encoded((10, 20, 30, 0)),
        *(encoded((i, 0, 0, 255)) for i in range(1, 19)),
        encoded((18, 0, 0, 255)),
    ]
    samples = [
        Sample(f"1f{i}", image, f'name "{i}", with a comma') for i, image in enumerate(images)
    ]
    write_samples(tmp_path / "data.partial", samples, tmp_path / "data")
    (tmp_path / "data.partial").rename(tmp_path / "data")
    return Files(tmp_path / "data")


def test_the_files_hold_every_sample_once_and_a_tenth_is_held_out(written):
    train, held_out = read_rows(written.train), read_rows(written.held_out)
    assert len(train) == 18 and len(held_out) == 2
    assert {row["title"] for row in train + held_out} == {
        f'name "{i}", with a comma' for i in range(20)
    }


def test_this_program_reads_the_files_as_they_were_written(written):
    table = TableFormat("csv", f"{written.train}?separator=%09")
    samples = [sample for part in table.parts() for sample in table.samples(part)]
    assert [s.captions for s in samples] == [[row["title"]] for row in read_rows(written.train)]
    assert all(table.problem(sample) is None for sample in samples)


def test_images_are_flattened_onto_white(written):
    with Image.open(written.folder / "images" / "1f0.png") as image:
        assert image.mode == "RGB" and set(image.getdata()) == {(255, 255, 255)}


def test_no_held_out_image_occurs_twice():
    hashes = [bytes([i // 2 if i < 60 else i]) for i in range(100)]  # the first 60 in pairs
    for seed in range(5):
        drawn = held_out_rows(hashes, 0.1, seed)
        assert len(drawn) == 10 and min(drawn) >= 60
    assert (
        held_out_rows(hashes, 0.1, 0)
        == held_out_rows(hashes, 0.1, 0)
        != held_out_rows(hashes, 0.1, 1)
    )


def test_the_columns_are_those_that_open_clip_reads_by_default(written):
    with written.held_out.open(encoding="utf-8", newline="") as stream:
        assert next(csv.reader(stream, delimiter="\t")) == ["filepath", "title"]


# -- how the programs are called


@pytest.mark.parametrize(
    "variant",
    [variant for variant in ALL if variant.program == "wye"],
    ids=lambda variant: variant.name,
)
def test_the_json_files_of_this_program_are_accepted(variant):
    config, block = check_config(own_configuration(variant), BRANCHES)
    assert (
        config["train_batch_size"] == RECIPE.batch_size
        and block.layout == variant.config["branches"]["layout"]
    )


def test_the_rates_equal_those_of_open_clip():
    import torch
    from deepspeed.runtime import lr_schedules

    from engine.optimizer.parameter_groups import GroupSchedule, Setting

    schedule = own_configuration(VARIANTS[1])["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RECIPE.lr)
    made = getattr(lr_schedules, schedule["type"])
    scheduler = GroupSchedule(
        optimizer, lambda _: made(optimizer, **schedule["params"]), [Setting(1.0, None, None)], []
    )
    for step in range(30):
        # open_clip_train.scheduler.const_lr
        expected = RECIPE.lr * min(1.0, (step + 1) / RECIPE.warmup_steps)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("towers", TOWERS.values(), ids=TOWERS)
def test_the_text_tower_has_the_sizes_that_open_clip_is_given(towers, tmp_path):
    """By the numbers of its parameters, without what OpenCLIP leaves out (the pooler)."""
    from transformers import BertConfig, BertModel

    from models.towers.text import text_tower

    config = BertConfig(
        vocab_size=100,
        num_hidden_layers=towers.num_layers,
        hidden_size=towers.width,
        num_attention_heads=towers.num_heads,
        intermediate_size=4 * towers.width,
    )
    theirs = sum(p.numel() for p in BertModel(config, add_pooling_layer=False).parameters())
    assert text_tower(f"{towers.text},pool=mean", 100, 32).num_parameters == theirs


def test_changes_are_laid_over_object_by_object(tmp_path):
    towers = tower_description(TOWERS["unequal"], tmp_path / "text", tmp_path / "tokenizer")
    changed = laid_over(towers, {"text_cfg": {"hf_pooler_type": "cls_pooler"}, "embed_dim": 8})
    assert changed["text_cfg"] == {**towers["text_cfg"], "hf_pooler_type": "cls_pooler"}
    assert changed["embed_dim"] == 8 and changed["vision_cfg"] == towers["vision_cfg"]


def test_runs_that_differ_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr("bench.open_clip.version", lambda name: "3.3.0")
    runs = [
        Run(variant, seed, 4, "en", 0, evaluated)
        for variant in ALL
        for seed in (0, 1)
        for evaluated in (True, False)
    ]
    runs += [
        Run(VARIANTS[0], 0, 5, "en", 0),
        Run(VARIANTS[0], 0, 4, "zh", 0),
        Run(VARIANTS[0], 0, 4, "en", 1),
        Run(VARIANTS[0], 0, 4, "en", 0, towers=TOWERS["near"]),
    ]
    assert len({run.folder for run in runs}) == len(runs)


def test_the_memory_of_each_rank_is_found_below_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.open_clip.SAMPLED_EVERY_S", 0.05)
    rank = "import time; held = bytearray({} << 20); time.sleep(2)"
    launcher = (
        "import os, subprocess, sys\n"
        f"ranks = [subprocess.Popen([sys.executable, '-c', {rank!r}.format(60 * (rank + 1))], "
        "env=os.environ | {'RANK': str(rank)}) for rank in range(2)]\n"
        "sys.exit(sum(process.wait() for process in ranks))"
    )
    first, second = launch([sys.executable, "-c", launcher], tmp_path / "log", "test")
    assert 60 << 20 < first < 120 << 20 < second < 180 << 20


def test_a_failed_run_ends_the_program_with_the_end_of_its_log(tmp_path):
    with pytest.raises(
        SystemExit, match="OpenCLIP, seed 3 ended with status 1(?s:.*)no such thing"
    ):
        launch(
            [sys.executable, "-c", "import sys; sys.exit('no such thing')"],
            tmp_path / "log",
            "OpenCLIP, seed 3",
        )


def test_no_rank_outlives_its_launcher(tmp_path):
    rank = "import time; time.sleep(60)"
    launcher = (
        "import subprocess, sys\n"
        f"process = subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)\n"
        "print(process.pid, flush=True)\n"
        "process.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    rank = psutil.Process(int(process.stdout.readline()))
    kill_all(process)
    process.stdout.close()
    _, left = psutil.wait_procs([rank], timeout=10)
    assert all(
        each.status() == psutil.STATUS_ZOMBIE for each in left
    )  # of a machine whose first process does not wait for orphans


# -- what the logs say


@pytest.fixture
def open_clip_run(tmp_path):
    (tmp_path / "out.log").write_text(OPEN_CLIP_LOG, encoding="utf-8")
    (tmp_path / "checkpoints").mkdir()
    results = [
        {
            **recalls(0.1, 0.2, 0.3, 0.5),
            "image_to_text_mean_rank": 50.0,
            "epoch": epoch,
            "num_samples": 394,
        }
        for epoch in (1, 2)
    ]
    (tmp_path / "checkpoints" / "results.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in results), encoding="utf-8"
    )
    return tmp_path


def test_a_run_of_open_clip_is_read(open_clip_run):
    read = read_open_clip(open_clip_run, 256, [1, 2])
    assert (
        read.losses == [5.6345, 5.5878, 4.9, 4.8]
        and read.data_wait_s == [0.341, 0.27, 0.1, 0.1]
        and read.peak_bytes == [1, 2]
    )
    assert read.step_s == pytest.approx([256 / 122.271, 1.28, 2.56, 0.0002])
    assert [evaluation.step for evaluation in read.evaluations] == [2, 4]
    assert (
        read.evaluations[0].recalls == recalls(0.1, 0.2, 0.3, 0.5)
        and read.evaluations[0].mean_r10 == 0.4
    )


def test_a_measurement_of_speed_has_no_evaluations(open_clip_run):
    (open_clip_run / "checkpoints" / "results.jsonl").unlink()
    assert read_open_clip(open_clip_run, 256, [1, 2]).evaluations == []


def test_a_log_of_another_form_is_refused(tmp_path):
    (tmp_path / "out.log").write_text("Train Epoch: 0 loss=5.6\n", encoding="utf-8")
    with pytest.raises(ValueError, match="out.log: no line of a training step"):
        read_open_clip(tmp_path, 256, [1, 2])


def test_a_run_of_this_program_is_read(tmp_path):
    waits = {"data_wait_s/image 0": 0.25, "data_wait_s/text 0": 0.125}
    held_out = {"held_out": "validation", **recalls(0.1, 0.2, 0.3, 0.5)}
    lines = [
        {"step": 0, **held_out},
        {"step": 1, "loss": 5.5, "step_s": 2.0, **waits},
        {"step": 2, "loss": 5.25, "step_s": 1.5, **waits},
        {"step": 2, **held_out},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    with pytest.raises(ValueError, match="ended before all of its steps were done"):
        read_own(tmp_path, [1, 2])
    (tmp_path / "done").touch()
    expected = Record(
        [5.5, 5.25], [2.0, 1.5], [0.25, 0.25], [1, 2], [Evaluation(2, recalls(0.1, 0.2, 0.3, 0.5))]
    )
    assert read_own(tmp_path, [1, 2]) == expected


def test_a_record_is_kept(tmp_path):
    save_record(tmp_path / "run.record.json", record([0.2, 0.7]))
    assert load_record(tmp_path / "run.record.json") == record([0.2, 0.7])
    assert [file.name for file in tmp_path.iterdir()] == ["run.record.json"]


def test_seconds_to_a_recall_are_read_off_between_evaluations():
    assert record([0.2, 0.7]).seconds_to(0.6) == pytest.approx(4 + 4 * 0.4 / 0.5)
    assert record([0.6, 0.7]).seconds_to(0.6) == pytest.approx(4)
    assert record([0.8, 0.7]).seconds_to(0.6) == pytest.approx(3)  # from 0 before training
    assert record([0.7, 0.2]).seconds_to(0.6) < 4  # once reached it counts
    assert record([0.2, 0.5]).seconds_to(0.6) is None


# -- tables and plot

RECORDS = {
    "OpenCLIP": [record([0.2, 0.7]), record([0.3, 0.5])],
    "ours": [record([0.4, 0.8], step_s=1.0), record([0.2, 0.6], step_s=0.5)],
}


def test_the_table_by_step():
    assert by_step(RECORDS).splitlines() == [
        "| steps | variant | loss | R@10 image → text % | R@10 text → image % | R@1 image → text "
        "% | R@1 text → image % |",
        "|---|---|---|---|---|---|---|",
        "| 2 | OpenCLIP | 4.00 (4.00 – 4.00) | 25.0 (20.0 – 30.0) | 25.0 (20.0 – 30.0) | 0.0 (0.0 "
        "– 0.0) | 0.0 (0.0 – 0.0) |",
        "| 2 | ours | 4.00 (4.00 – 4.00) | 30.0 (20.0 – 40.0) | 30.0 (20.0 – 40.0) | 0.0 (0.0 – "
        "0.0) | 0.0 (0.0 – 0.0) |",
        "| 4 | OpenCLIP | 2.00 (2.00 – 2.00) | 60.0 (50.0 – 70.0) | 60.0 (50.0 – 70.0) | 0.0 (0.0 "
        "– 0.0) | 0.0 (0.0 – 0.0) |",
        "| 4 | ours | 2.00 (2.00 – 2.00) | 70.0 (60.0 – 80.0) | 70.0 (60.0 – 80.0) | 0.0 (0.0 – "
        "0.0) | 0.0 (0.0 – 0.0) |",
    ]


def test_the_table_by_second():
    seconds = "| variant | seconds to R@10 60% | ÷ OpenCLIP | samples/s | waiting for data, s a step | peak MiB, rank 0 | peak MiB, rank 1 |"
    common = "0.50 (0.50 – 0.50) | 1,024 (1,024 – 1,024) | 512 (512 – 512) |"
    assert by_second(RECORDS, 256).splitlines() == [
        seconds,
        "|---|---|---|---|---|---|---|",
        "| OpenCLIP | 7 (7 – 7), in 1 of 2 runs | 1.00 (1.00 – 1.00) | 128.0 (128.0 – 128.0) | "
        f"{common}",
        f"| ours | 2 (2 – 3) | 0.42 (0.42 – 0.42) | 384.0 (256.0 – 512.0) | {common}",
    ]
    assert "| not reached | – |" in by_second({"OpenCLIP": [record([0.1, 0.2])]}, 256)


def test_the_table_of_speed_has_ratios_within_a_round():
    slow, fast = record([], step_s=2.0), record([], step_s=1.0)
    rows = speed({"OpenCLIP": [slow, fast, fast], "ours": [fast, fast, fast]}, 256, 1).splitlines()
    assert (
        rows[0]
        == "| variant | samples/s | ÷ OpenCLIP | waiting for data, s a step | peak MiB, rank 0 | peak MiB, rank 1 |"
    )
    assert "| **1.00** (1.00 – 1.00) |" in rows[2] and "| **1.00** (1.00 – 2.00) |" in rows[3]


def test_the_first_steps_are_left_out_of_speed():
    uneven = Record([1.0] * 3, [10.0, 1.0, 3.0], [0.0] * 3, [1, 1], [])
    assert uneven.samples_per_s(8, skip=1) == 4.0


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(RECORDS, "Names in language en", tmp_path / "en.png")
    with Image.open(tmp_path / "en.png") as image:
        assert image.width > image.height > 100
