"""Weights of data sets that follow their losses: from the losses of steps to the order of the
samples, the same after a resume."""

import json
import math

import numpy as np
import pytest
from cost_models import BRANCHES, proportional

from data.batching.dealing import padded_lengths
from data.batching.sampler import GlobalOrder, training_requests
from data.options import DataOptions
from data.prepare import prepare_data
from engine.config.reading import check_config
from engine.planning.planner import plan_run
from engine.step_metrics import SourceLoss
from engine.trace import Span
from launch.balancing.balancer import Balancer
from launch.balancing.choosing import make_balance
from launch.config.blocks import dealing
from launch.config.options import parse_options

COSTS = proportional({"image": [1.0], "text": [1.0]})
BUSY_S = {"image 0": 0.1, "text 0": 0.1}
RATES = np.array([0.1, 0.02])  # by which the losses fall in an epoch
SETS = ("--data", "demo:de", "--data", "demo:fr")


@pytest.fixture(scope="module")
def data(module_folder):
    """Epochs of 10 steps."""
    return prepare_data(
        DataOptions(data=("demo:de", "demo:fr"), limit_samples=480), None, module_folder("run")
    )


class World:
    """The ranks of a run whose losses are made up."""

    def __init__(self, data, folder, *options, balance=None, workers=1, batch_size=48, earlier=()):
        block = {
            "layout": "fork",
            "stages": {"image": 1, "text": 1},
            "micro_batch_size": 12,
            "balance": balance or {"interval": 5},
        }
        config, block = check_config(
            {"train_batch_size": batch_size, "optimizer": {"type": "AdamW"}, "branches": block},
            BRANCHES,
        )
        plan = plan_run(config, block, 2, COSTS)
        self.data, self.order = (
            data,
            GlobalOrder(len(data.train), batch_size, 0, data.parts, earlier=earlier),
        )
        self.balance = make_balance(
            dealing(block),
            plan,
            COSTS,
            data,
            self.order,
            None,
            None,
            parse_options([*SETS, *options]),
            folder,
        )
        self.ranks = [Balancer(self.balance, 0, stage.name, workers) for stage in plan.graph.stages]
        self.records = []

    @property
    def settings(self):
        return self.ranks[0].settings

    def run(self, start, stop):
        for step in range(start, stop):
            visited = self.order.batch(step, self.settings.mixes)
            samples = [int(n) for n in np.bincount(visited >= self.data.parts[0][0], minlength=2)]
            losses = 3 * (1 - RATES) ** (step // self.order.steps_per_epoch)
            sources = [SourceLoss(n, loss if n else math.nan) for n, loss in zip(samples, losses)]
            due = [rank.note(step + 1, BUSY_S, [], sources) for rank in self.ranks]
            assert len(set(due)) == 1
            if due[0]:
                decided = self.ranks[0].decide(step + 1, [rank.report() for rank in self.ranks])
                self.records.append([rank.take_over(decided) for rank in self.ranks][0])

    def loaded(self, step):
        """What the text branch loads in a step."""
        dealer = self.balance.dealers["text"]
        requests = training_requests(
            self.order, self.data.train, 0, 1, "text", self.settings, step, step + 1, [dealer]
        )
        return np.concatenate([request.texts()[0] for request in requests]).tolist()


def test_a_set_that_falls_more_slowly_comes_more_often_and_the_log_says_why(data, tmp_path):
    world = World(data, tmp_path, "--data-adapt", "0.5")
    steps, starts = world.order.steps_per_epoch, data.source_starts
    world.run(0, 8 * steps)
    of_second = [
        sum(
            index >= starts[1]
            for step in range(epoch * steps, (epoch + 1) * steps)
            for index in world.loaded(step)
        )
        for epoch in range(8)
    ]
    assert (
        len(set(of_second[:3])) == 1 and of_second[2] < of_second[3] < of_second[5] < of_second[7]
    )
    moves = [record for record in world.records if "mix" in record]
    first = moves[0]["mix"]
    assert (
        moves[0]["step"] == 2 * steps
        and first["from_step"] == 3 * steps
        and moves[0]["next"] is None
    )
    assert first["losses"] == pytest.approx([2.7, 2.94]) and first[
        "losses_before"
    ] == pytest.approx([3.0, 3.0])
    assert (
        first["reason"]
        == f"weights demo:de 1 -> {first['weights'][0]:.3g} (loss 2.7, -10.0%), demo:fr 1 -> {first['weights'][1]:.3g} (loss 2.94, -2.0%)"
    )
    assert all(
        record["reason"] is None for record in world.records
    )  # of feed rates nothing is said


def test_a_mix_is_for_epochs_that_no_loader_has_begun_with(data, tmp_path):
    for workers in (0, 1, 30):
        world = World(data, tmp_path, "--data-adapt", "0.5", workers=workers)
        steps = world.order.steps_per_epoch
        world.run(0, 6 * steps)
        mixed = [
            (record["step"], record["mix"]["from_step"])
            for record in world.records
            if "mix" in record
        ]
        assert mixed and all(
            from_step % steps == 0 and from_step >= step + 2 * workers + 2
            for step, from_step in mixed
        )
        assert [from_step // steps for _, from_step in mixed] == [
            epoch for epoch, _ in world.settings.mixes
        ]


@pytest.mark.parametrize(
    "balance", [{"interval": 5}, {"strategy": "deal", "interval": 5}], ids=["off", "deal"]
)
@pytest.mark.parametrize("killed", [3, 61, 64])
def test_a_run_that_goes_on_mixes_as_one_that_never_stopped(data, tmp_path, killed, balance):
    """From the middle of an epoch, before a mix that is known already."""
    whole, stopped, again = (
        World(data, tmp_path, "--data-adapt", "0.5", balance=balance) for _ in range(3)
    )
    steps = whole.order.steps_per_epoch
    whole.run(0, 8 * steps)
    stopped.run(0, killed)
    state = json.loads(json.dumps(stopped.ranks[0].state_dict()))
    for rank in again.ranks:
        rank.load_state_dict(state, killed)
    again.run(killed, 8 * steps)
    assert [rank.state_dict() for rank in again.ranks] == [
        rank.state_dict() for rank in whole.ranks
    ]
    assert len(whole.settings.mixes) >= 5
    for step in range(killed, 8 * steps, 3):
        assert again.loaded(step) == whole.loaded(step)


@pytest.mark.parametrize("size, ended", [(96, False), (300, True)])
def test_losses_of_an_epoch_are_counted_over_a_change_of_the_batch_and_the_epoch_ends_with_what_it_had(
    data, tmp_path, size, ended
):
    """After 4 steps of the second epoch. What it has left is three batches of 96, and less than one
    of 300."""
    before = World(data, tmp_path, "--data-adapt", "0.5")
    before.run(0, 14)
    state = before.ranks[0].state_dict()
    assert before.order.steps_per_epoch == 10 and sum(state["trends"]["samples"]) == 4 * 48
    now = World(data, tmp_path, "--data-adapt", "0.5", batch_size=size, earlier=((14, 48),))
    for rank in now.ranks:
        rank.load_state_dict(json.loads(json.dumps(state)), 14)
    trends = now.ranks[0].state_dict()["trends"]
    if ended:
        assert trends["samples"] == (0, 0) and trends["before"] == state["trends"]["losses"]
        assert trends["losses"] == pytest.approx(3 * (1 - RATES))
    else:
        assert trends == state["trends"]
        now.run(14, 17)
        assert now.ranks[0].state_dict()["trends"]["samples"] == (0, 0) and now.order.ends_epoch(17)
        assert now.order.samples_before(17) == 960


def test_where_samples_are_dealt_the_micro_batches_are_counted_anew_for_a_mix(data, tmp_path):
    world = World(
        data, tmp_path, "--data-adapt", "0.5", balance={"strategy": "deal", "interval": 5}
    )
    steps = world.order.steps_per_epoch
    world.run(0, 7 * steps)
    anew = [
        setting
        for setting in world.settings.records()
        if "other weights of the data sets" in setting["reason"]
    ]
    epochs = [epoch for epoch, _ in world.settings.mixes]
    assert [world.order.epoch(setting["from_step"]) for setting in anew] == [
        epoch for epoch in epochs if epoch * steps <= anew[-1]["from_step"]
    ]


def test_seconds_are_set_against_what_was_loaded_under_a_mix(data, tmp_path):
    """Points, of which costs are refitted: texts of each micro-batch, what they are padded to, its
    seconds."""
    world = World(
        data, tmp_path, "--data-adapt", "0.5", balance={"strategy": "deal", "interval": 5}
    )
    world.run(0, 60)
    text, step, dealer = world.ranks[1], 61, world.balance.dealers["text"]
    assert world.settings.mixes[0][0] < 6
    requests = list(
        training_requests(
            world.order, data.train, 0, 1, "text", world.settings, step, step + 1, [dealer]
        )
    )
    text.note(
        step + 1, BUSY_S, [Span("ForwardPass", m, 0.0, m + 1.0) for m in range(len(requests))]
    )
    for (texts, longest, seconds), request, m in zip(
        text.report().points, requests, range(len(requests)), strict=True
    ):
        index = request.texts()[0]
        tokens = dealer.tokens.of(np.searchsorted(data.train, index), index, 0, request.epoch)
        assert (texts, longest, seconds) == (
            len(index),
            padded_lengths(tokens, dealer.max_text_tokens).max(),
            m + 1.0,
        )


def test_without_it_nothing_is_measured_and_no_step_knows_of_it(data, tmp_path):
    world = World(data, tmp_path, balance={"strategy": "off", "interval": 5})
    assert world.balance.adaptation is None and world.ranks[0].measurement_interval == 0
    world.run(0, 3 * world.order.steps_per_epoch)
    assert (
        world.records == []
        and world.settings.mixes == ()
        and world.ranks[0].state_dict()["trends"] is None
    )


def test_it_cannot_decide_where_nothing_is_ever_measured(data, tmp_path):
    with pytest.raises(
        ValueError,
        match="--data-adapt 0.5 .* branches.balance.interval is 0, never; give an interval of at least 1",
    ):
        World(data, tmp_path, "--data-adapt", "0.5", balance={"interval": 0})
