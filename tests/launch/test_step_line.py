"""What a step leaves in metrics.jsonl beside what the engine measured."""

from dataclasses import replace

import pytest

from data.batching.order import GlobalOrder
from engine.step_metrics import SourceLoss, StepMetrics
from launch.run.step_line import step_line
from launch.tracking.names import step_names

METRICS = StepMetrics(
    loss=3.5,
    scalars={"logit_scale_exp": 14.0},
    grad_norm={"image": 1.0, "text": 2.0, "head": 0.5},
    clip_coefficient={"image": 1.0, "text": 0.5, "head": 1.0},
    clipped_share={"image": 0.0, "text": 1.0, "head": 0.0},
    lr=1e-3,
    group_lr={},
    step_applied=True,
    skipped_steps=0,
    bad_step=None,
    bad_steps_in_a_row=0,
    loss_scale=1.0,
    stop_requested=False,
    idle={"image 0": 0.25, "text 0": 0.0},
    busy_s={"image 0": 1.5, "text 0": 2.0},
    data_wait_s={"image 0": 0.0, "text 0": 0.0},
    sent_bytes=100,
    peak_memory_bytes=200,
    left_out={"image_text": 0},
    duplicates={"image_text": 3},
    counts={"text_tokens": 300.0, "padded_text_tokens": 400.0},
)
ORDER = GlobalOrder(40, 10, 0, ((30, 1.0), (10, 3.0)))


def line_of(step, sources=(), metrics=METRICS, order=ORDER, feed_rates={}):
    return step_line(metrics, step, 2.0, order, feed_rates, sources)


def test_rates_are_of_the_step():
    line = line_of(6, ("a", "b"))
    rates = {"step": 6, "epoch": 1.0, "step_s": 2.0, "samples_per_s": 5.0, "images_per_s": 5.0}
    rates |= {"text_tokens_per_s": 150.0, "padding_share/text": 0.25, "duplicate_samples": 3}
    assert rates.items() <= line.items() and "padding_share/audio" not in line
    assert METRICS.record(6, 1.0, 5.0, 2.0).items() <= line.items()
    heard = replace(METRICS, counts={"audio_seconds": 30.0, "padded_audio_seconds": 40.0})
    assert line_of(6, metrics=heard)["padding_share/audio"] == 0.25
    alone = line_of(6, metrics=replace(METRICS, counts={"padded_depth_tokens": 9.0}))
    assert "padding_share/depth" not in alone  # of what, nobody counted
    assert line_of(6, metrics=replace(METRICS, counts={}))["padding_share/text"] == 0.0
    no_texts = replace(METRICS, grad_norm={"image": 1.0, "audio": 1.0}, counts=heard.counts)
    keys = line_of(6, metrics=no_texts).keys()
    assert {"images_per_s", "sounds_per_s", "padding_share/audio"} <= keys
    assert not {"text_tokens_per_s", "padding_share/text"} & keys
    seen = line_of(6, metrics=replace(METRICS, grad_norm={"video": 1.0, "text": 1.0}))
    assert seen["films_per_s"] == 5.0 and "images_per_s" not in seen
    assert step_names(seen)["throughput/video/samples_per_s"] == 5.0
    assert line_of(4, feed_rates={"captions_per_image": 2})["captions_per_image"] == 2
    assert "captions_per_image" not in line_of(4)


def test_epochs_are_counted_in_samples_over_a_change_of_the_batch():
    """60 samples an epoch: 2 steps of 20, then steps of 10."""
    order = replace(ORDER, earlier=((2, 20),))
    epochs = [line_of(step, order=order)["epoch"] for step in (1, 2, 3, 4, 10)]
    assert epochs == [0.3333, 0.6667, 0.8333, 1.0, 2.0]
    assert line_of(4, order=order)["samples_per_s"] == 5.0


def test_of_several_sources_it_says_their_losses_and_how_often_they_have_been_visited():
    sources = ("demo:de", "jsonl:few.jsonl")
    losses = (SourceLoss(6, 3.1), SourceLoss(4, 4.1))
    line = line_of(9, sources, replace(METRICS, sources=losses))
    assert (line["loss/demo:de"], line["loss/jsonl:few.jsonl"]) == (3.1, 4.1)
    visits = line["epochs/demo:de"], line["epochs/jsonl:few.jsonl"]
    assert visits == pytest.approx((1.5, 4.5))
    alone = line_of(9, ("demo",), order=GlobalOrder(40, 10, 0))
    assert not any(key.startswith(("epochs/", "loss/")) for key in alone)
    # they follow the mixes so far. Epochs of 6 steps: of 9 steps, 3 are of the second
    line = line_of(9, sources, order=ORDER.with_mix(1, ((30, 1.5), (10, 1.5))))
    visits = line["epochs/demo:de"], line["epochs/jsonl:few.jsonl"]
    assert visits == pytest.approx((1 + 1.5 / 2, 3 + 1.5 / 2))
