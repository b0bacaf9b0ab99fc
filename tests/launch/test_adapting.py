"""Weights of data sets that follow their losses: from the losses of steps to the order of the
samples, the same after a resume."""

import json
import math
from functools import partial

import numpy as np
import pytest
from batching_runs import Ranks, make_batching
from cost_models import proportional

from data.options import DataOptions
from data.prepare import prepare_data
from engine.step_metrics import SourceLoss
from engine.trace import Span

COSTS = proportional({"image": [1.0], "text": [1.0]})
RATES = np.array([0.1, 0.02])  # by which the losses fall in an epoch
SETS = ("--data", "demo:de", "--data", "demo:fr")
ADAPT = ("--data-adapt", "0.5")
PACKED = {"strategy": "deal", "interval": 5}


@pytest.fixture(scope="module")
def data(module_folder):
    """Epochs of 10 steps."""
    return prepare_data(
        DataOptions(data=("demo:de", "demo:fr"), limit_samples=480), None, module_folder("run")
    )


def world(data, folder, options=ADAPT, balance=None, workers=1, **keys):
    def measured(batching, step):
        """Losses are made up."""
        of_first = batching.order.batch(step) < data.parts[0][0]
        samples = [int(of_first.sum()), int((~of_first).sum())]
        losses = 3 * (1 - RATES) ** (step // batching.order.steps_per_epoch)
        sources = [SourceLoss(n, loss if n else math.nan) for n, loss in zip(samples, losses)]
        return {"image 0": [0.1], "text 0": [0.1]}, sources

    make = partial(
        make_batching,
        data,
        folder,
        COSTS,
        options=[*SETS, *options],
        layout="fork",
        stages={"image": 1, "text": 1},
        micro_batch_size=12,
        balance=balance or {"strategy": "off", "interval": 5},
        **keys,
    )
    return Ranks(make, measured, workers, traced=False)


def samples_of(ranks, step):
    """What the text branch loads in a step."""
    return [index for indices, _, _ in ranks.loaded("text", step) for index in indices]


def moves_of(ranks):
    return [record for record in ranks.records if "mix" in record]


def test_a_set_that_falls_more_slowly_comes_more_often_and_the_log_says_why(data, tmp_path):
    ranks = world(data, tmp_path)
    steps, starts = ranks.first.order.steps_per_epoch, data.source_starts
    ranks.run(0, 8 * steps)
    of_second = [
        sum(
            index >= starts[1]
            for step in range(epoch * steps, (epoch + 1) * steps)
            for index in samples_of(ranks, step)
        )
        for epoch in range(8)
    ]
    assert len(set(of_second[:3])) == 1
    assert of_second[2] < of_second[3] < of_second[5] < of_second[7]
    move = moves_of(ranks)[0]
    first = move["mix"]
    assert (move["step"], first["from_step"]) == (2 * steps, 3 * steps) and move["next"] is None
    assert first["losses"] == pytest.approx([2.7, 2.94])
    assert first["losses_before"] == pytest.approx([3.0, 3.0])
    de, fr = first["weights"]
    assert first["reason"] == (
        f"weights demo:de 1 -> {de:.3g} (loss 2.7, -10.0%), "
        f"demo:fr 1 -> {fr:.3g} (loss 2.94, -2.0%)"
    )
    assert all(record["reason"] is None for record in ranks.records)  # nothing on feed rates


def test_a_mix_is_for_epochs_that_no_loader_has_begun_with(data, tmp_path):
    for workers in (0, 1, 30):
        ranks = world(data, tmp_path, workers=workers)
        steps = ranks.first.order.steps_per_epoch
        ranks.run(0, 6 * steps)
        mixed = [(record["step"], record["mix"]["from_step"]) for record in moves_of(ranks)]
        assert mixed and all(start >= step + 2 * workers + 2 for step, start in mixed)
        epochs = [epoch for epoch, _ in ranks.first.order.mixes]
        assert [start for _, start in mixed] == [epoch * steps for epoch in epochs]


@pytest.mark.parametrize(("killed", "balance"), [(3, None), (61, PACKED), (64, PACKED)])
def test_a_run_that_goes_on_mixes_as_one_that_never_stopped(data, tmp_path, killed, balance):
    """From the middle of an epoch, before a mix that is known already."""
    whole, stopped, again = (world(data, tmp_path, balance=balance) for _ in range(3))
    steps = whole.first.order.steps_per_epoch
    whole.run(0, 8 * steps)
    stopped.run(0, killed)
    again.load(json.loads(json.dumps(stopped.first.state_dict())), killed)
    again.run(killed, 8 * steps)
    assert [b.state_dict() for b in again.ranks] == [b.state_dict() for b in whole.ranks]
    assert len(whole.first.order.mixes) >= 5
    for step in range(killed, 8 * steps, 3):
        assert samples_of(again, step) == samples_of(whole, step)


@pytest.mark.parametrize("size, ended", [(96, False), (300, True)])
def test_losses_of_an_epoch_are_counted_over_a_change_of_the_batch(data, tmp_path, size, ended):
    """After 4 steps of the second epoch. What it has left is three batches of 96, and less than one
    of 300."""
    before = world(data, tmp_path)
    before.run(0, 14)
    state = before.first.state_dict()
    assert before.first.order.steps_per_epoch == 10 and sum(state["trends"]["samples"]) == 4 * 48
    now = world(data, tmp_path, batch_size=size, earlier=((14, 48),))
    now.load(json.loads(json.dumps(state)), 14)
    trends = now.first.state_dict()["trends"]
    if ended:
        assert trends["samples"] == (0, 0) and trends["before"] == state["trends"]["losses"]
        assert trends["losses"] == pytest.approx(3 * (1 - RATES))
    else:
        assert trends == state["trends"]
        now.run(14, 17)
        assert now.first.state_dict()["trends"]["samples"] == (0, 0)
        assert now.first.order.ends_epoch(17) and now.first.order.samples_before(17) == 960


def test_where_texts_are_packed_the_micro_batches_are_counted_anew_for_a_mix(data, tmp_path):
    ranks = world(data, tmp_path, balance=PACKED)
    steps = ranks.first.order.steps_per_epoch
    ranks.run(0, 7 * steps)
    words = "other weights of the data sets"
    anew = [each["from_step"] for each in ranks.settings() if words in each["reason"]]
    epochs = [epoch for epoch, _ in ranks.first.order.mixes if epoch * steps <= anew[-1]]
    assert [ranks.first.order.epoch(from_step) for from_step in anew] == epochs


def test_seconds_are_set_against_what_was_loaded_under_a_mix(data, tmp_path):
    """Points, of which costs are refitted: texts of each micro-batch, what they are padded to, its
    seconds."""
    ranks = world(data, tmp_path, balance=PACKED)
    ranks.run(0, 60)
    text, step = ranks.ranks[1], 61
    packer = text.batches.texts
    assert text.order.mixes[0][0] < 6
    loaded = ranks.loaded("text", step)
    spans = [Span("ForwardPass", m, 0.0, m + 1.0) for m in range(len(loaded))]
    text.rebalancing.note(step + 1, {"image 0": 0.1, "text 0": 0.1}, spans)
    for point, (index, _, _), m in zip(text.rebalancing.report().points, loaded, range(99)):
        number = np.searchsorted(data.train, index)
        tokens = packer.tokens.of(number, np.array(index), 0, text.order.epoch(step))
        assert point == (len(index), tokens.max(), m + 1.0)
    assert len(text.rebalancing.report().points) == len(loaded)


def test_without_it_nothing_is_measured_and_no_step_knows_of_it(data, tmp_path):
    ranks = world(data, tmp_path, options=())
    assert ranks.first.rebalancing.adaptation is None and ranks.first.rebalancing.interval == 0
    ranks.run(0, 3 * ranks.first.order.steps_per_epoch)
    assert ranks.records == [] and ranks.first.order.mixes == ()
    assert not any(ranks.first.state_dict()["trends"]["samples"])


def test_it_cannot_decide_where_nothing_is_ever_measured(data, tmp_path):
    words = "--data-adapt 0.5 .* branches.balance.interval is 0, never; give an interval"
    with pytest.raises(ValueError, match=words):
        world(data, tmp_path, balance={"interval": 0})
