"""The comparison with OpenCLIP's trainer: what it writes for both programs, what it reads from
their logs, and its tables. Neither program runs here: such logs were seen with OpenCLIP 3.3.0."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from bench.common import Seen, Study, Way, report, train_arguments
from bench.open_clip import (
    ALL,
    BATCH_SIZE,
    COSTS,
    LR,
    RECIPE,
    WARMUP,
    Record,
    Run,
    by_step,
    figures,
    own_settings,
    read_open_clip,
    read_own,
)
from bench.open_clip_data import TOWERS, held_out_rows, read_rows, text_tower, write_samples
from data.formats.tables import TableFormat
from launch.config.configuration import with_file
from launch.config.options import parse_options

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
    evaluations = [{"step": n, **recalls(0.0, 0.0, v, v)} for n, v in zip((2, 4), r10)]
    return Record([5.0, 4.0, 3.0, 2.0], [step_s] * 4, [0.5] * 4, list(peaks), evaluations)


def lines_of(values):
    return "".join(json.dumps(value) + "\n" for value in values)


# -- what both programs read


def encoded(colour):
    stream = io.BytesIO()
    Image.new("RGBA", (4, 4), colour).save(stream, "PNG")
    return stream.getvalue()


def test_the_files_hold_every_sample_once_and_this_program_reads_them(tmp_path):
    """20 samples, of which the last two share an image; the first is transparent. The columns are
    those that OpenCLIP reads by default."""
    images = [encoded((10, 20, 30, 0)), *(encoded((min(i, 18), 0, 0, 255)) for i in range(1, 20))]
    samples = [(f"1f{i}", image, f'name "{i}", with a comma') for i, image in enumerate(images)]
    write_samples(tmp_path / "data.partial", samples, tmp_path / "data")
    (tmp_path / "data.partial").rename(tmp_path / "data")
    files = [tmp_path / "data" / name for name in ("train.csv", "val.csv")]
    assert all(file.read_text().startswith("filepath\ttitle\n") for file in files)
    train, held_out = map(read_rows, files)
    assert len(train) == 18 and len(held_out) == 2
    assert {title for _, title in train + held_out} == {title for _, _, title in samples}
    table = TableFormat("csv", f"{files[0]}?separator=%09")
    read = [sample for part in table.parts() for sample in table.samples(part)]
    assert [sample.captions for sample in read] == [[title] for _, title in train]
    assert all(table.problem(sample) is None for sample in read)
    with Image.open(tmp_path / "data" / "images" / "1f0.png") as image:
        assert image.mode == "RGB" and set(image.getdata()) == {(255, 255, 255)}


def test_no_held_out_image_occurs_twice():
    hashes = [bytes([i // 2 if i < 60 else i]) for i in range(100)]  # the first 60 in pairs
    drawn = [held_out_rows(hashes, seed) for seed in (0, 0, 1)]
    assert all(len(each) == 10 and min(each) >= 60 for each in drawn)
    assert drawn[0] == drawn[1] != drawn[2]


# -- how the programs are called


@pytest.mark.parametrize("name", [name for name in ALL if not ALL[name].of_open_clip])
def test_the_settings_of_this_program_are_accepted(name):
    run = Run("near", "en", epochs=4, workers=0)
    given = own_settings(run, ALL[name], Path("/data"), seed=3)
    options = parse_options(train_arguments(given))
    assert (options.seed, options.epochs, options.image_tower) == (3, 4, "resnet18")
    config, block = with_file(options, options.deepspeed_config)
    assert config["train_batch_size"] == BATCH_SIZE
    assert block.layout == ("merged" if "merged" in name else "fork")
    lr = config["optimizer"]["params"]["lr"]
    assert lr == ("auto" if ALL[name].shipped else LR)


def test_the_rates_equal_those_of_open_clip():
    import torch
    from deepspeed.runtime import lr_schedules

    from engine.optimizer.parameter_groups import GroupSchedule, Setting

    schedule = RECIPE["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    made = getattr(lr_schedules, schedule["type"])
    scheduler = GroupSchedule(
        optimizer, lambda _: made(optimizer, **schedule["params"]), [Setting(1.0, None, None)], []
    )
    for step in range(30):
        # open_clip_train.scheduler.const_lr
        expected = LR * min(1.0, (step + 1) / WARMUP)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("width", [width for _, width in TOWERS.values()])
def test_the_text_tower_has_the_sizes_that_open_clip_is_given(width):
    """By the numbers of its parameters, without what OpenCLIP leaves out (the pooler)."""
    from transformers import BertConfig, BertModel

    from bench.open_clip_data import bert_sizes
    from models.towers.text import text_tower as built

    config = BertConfig(vocab_size=100, **bert_sizes(width))
    theirs = sum(p.numel() for p in BertModel(config, add_pooling_layer=False).parameters())
    assert built(f"{text_tower(width)},pool=mean", 100, 32).num_parameters == theirs


# -- what the logs say


def test_a_run_of_open_clip_is_read(tmp_path):
    (tmp_path / "out.log").write_text(OPEN_CLIP_LOG, encoding="utf-8")
    read = read_open_clip(tmp_path, 256, [1, 2])
    assert read.losses == [5.6345, 5.5878, 4.9, 4.8]
    assert read.data_wait_s == [0.341, 0.27, 0.1, 0.1] and read.peak_bytes == [1, 2]
    assert read.step_s == pytest.approx([256 / 122.271, 1.28, 2.56, 0.0002])
    assert read.evaluations == []  # of a measurement of speed
    found = recalls(0.1, 0.2, 0.3, 0.5)
    results = [{**found, "image_to_text_mean_rank": 50.0, "epoch": epoch} for epoch in (1, 2)]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "results.jsonl").write_text(lines_of(results), encoding="utf-8")
    evaluations = read_open_clip(tmp_path, 256, [1, 2]).evaluations
    assert evaluations == [{"step": 2, **found}, {"step": 4, **found}]
    (tmp_path / "out.log").write_text("Train Epoch: 0 loss=5.6\n", encoding="utf-8")
    with pytest.raises(ValueError, match="out.log"):
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
    (tmp_path / "metrics.jsonl").write_text(lines_of(lines), encoding="utf-8")
    with pytest.raises(ValueError, match="last step"):
        read_own(tmp_path, 256, [1, 2])
    (tmp_path / "done").touch()
    evaluations = [{"step": 2, **recalls(0.1, 0.2, 0.3, 0.5)}]
    expected = Record([5.5, 5.25], [2.0, 1.5], [0.25, 0.25], [1, 2], evaluations)
    assert read_own(tmp_path, 256, [1, 2]) == expected


def test_seconds_to_a_recall_are_read_off_between_evaluations():
    assert record([0.2, 0.7]).seconds_to(0.6) == pytest.approx(4 + 4 * 0.4 / 0.5)
    assert record([0.6, 0.7]).seconds_to(0.6) == pytest.approx(4)
    assert record([0.8, 0.7]).seconds_to(0.6) == pytest.approx(3)  # from 0 before training
    assert record([0.7, 0.2]).seconds_to(0.6) < 4  # once reached it counts
    assert record([0.2, 0.5]).seconds_to(0.6) is None


# -- tables


def test_the_tables():
    """Rows by step as docs/draw.py reads them; ratios within a seed, of those that reach the target;
    the first steps of a measurement of speed left out."""
    records = {
        "OpenCLIP": [record([0.2, 0.7]), record([0.3, 0.5])],
        "ours": [record([0.4, 0.8], step_s=1.0), record([0.2, 0.6], step_s=0.5)],
    }
    ways = dict.fromkeys(records, Way(dict))
    study = Study("", ways, COSTS, reference="OpenCLIP", seeds=True, notes=by_step)
    text = report(Seen(study, {n: list(map(figures, own)) for n, own in records.items()}))
    line = "| 4 | ours | 2.00 | 70.0 (60.0 – 80.0) | 70.0 (60.0 – 80.0) | 0.0 | 0.0 |"
    assert line in text and "- OpenCLIP: R@10 of 60% in 1 of 2 runs" in text
    assert "| OpenCLIP | 7 | 1.00 | 128.0 | 1.00 | 0.50 | 1,024 | 512 |" in text
    speed = "384.0 (256.0 – 512.0) | 3.00 (2.00 – 4.00)"
    assert f"| ours | 2 (2 – 3) | 0.42 | {speed} | 0.50 | 1,024 | 512 |" in text
    uneven = Record([1.0] * 3, [10.0, 1.0, 3.0], [0.0] * 3, [1, 1], [])
    assert uneven.samples_per_s(8, skip=1) == 4.0
