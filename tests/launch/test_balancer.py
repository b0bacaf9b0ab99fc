"""From measured times to settings: costs refitted, feed rates moved, the same after a resume as
without one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from cost_models import BRANCHES, proportional

from data.batching.branch_cost import BranchCost
from data.batching.sampler import GlobalOrder, training_requests
from data.options import DataOptions
from data.prepare import prepare_data
from engine.config.reading import check_config
from engine.planning.planner import plan_run
from engine.trace import Span
from launch.balancing.balancer import Balancer, refitted, seconds_of_micro_batches, slowest_points
from launch.balancing.choosing import make_balance
from launch.config.blocks import dealing
from launch.config.options import parse_options

COSTS = proportional({"image": [1.0, 2.0], "text": [0.5, 1.5]})
TRUE = BranchCost(2e-3, 0.0, 3e-5)  # what texts really cost


@pytest.fixture(scope="module")
def data(module_folder):
    return prepare_data(DataOptions(data=("demo:en+de+es+fr+it",)), None, module_folder("run"))


class World:
    """The ranks of a run whose times are made up: `image_s(step)` for all images, texts by
    `TRUE`."""

    def __init__(
        self,
        data,
        folder,
        balance,
        layout="fork",
        image_s=lambda step: 0.1,
        workers=1,
        micro_batch_size=12,
        batch_size=48,
        earlier=(),
    ):
        stages = {"merged": 2} if layout == "merged" else {"image": 1, "text": 1}
        block = {
            "layout": layout,
            "stages": stages,
            "micro_batch_size": micro_batch_size,
            "balance": balance,
            "schedule": "replay",
        }
        config = {
            "train_batch_size": batch_size,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "branches": block,
        }
        config, block = check_config(config, BRANCHES)
        plan = plan_run(config, block, 2, COSTS)
        order = GlobalOrder(len(data.train), batch_size, seed=0, earlier=earlier)
        self.data, self.image_s = data, image_s
        self.balance = make_balance(
            dealing(block),
            plan,
            COSTS,
            data,
            order,
            None,
            None,
            parse_options([]),
            folder,
        )
        self.ranks = [Balancer(self.balance, 0, stage.name, workers) for stage in plan.graph.stages]
        self.records = []

    def deal(self, branch, step):
        """What the first replica of a branch loads in a step."""
        settings, order = self.ranks[0].settings, self.balance.order
        requests = training_requests(
            order,
            self.data.train,
            0,
            1,
            branch,
            settings,
            step,
            step + 1,
            [self.balance.dealers[branch]],
        )
        rows = [r.texts()[:2] if branch == "text" else (r.index, r.position) for r in requests]
        return [
            (index.tolist(), position.tolist(), settings.at(step).feed_rates)
            for index, position in rows
        ]

    def seconds(self, step):
        """By stage, of each micro-batch of the step."""
        of = {}
        for stage in self.balance.plan.graph.stages:
            dealer = self.balance.dealers["text"]
            batch = self.balance.batch(step, self.ranks[0].settings.at(step))
            number = batch.setting.num_micro_batches
            lengths, shares = dealer.work(batch).lengths, dealer.shares(batch, 1, number["text"])
            slower = 1.0 if step < 20 else 1.3  # something else runs on this machine
            texts = [slower * float(TRUE.at(len(part), lengths[part].max())) for part, _ in shares]
            images = [self.image_s(step) / number["image"]] * number["image"]
            of[stage.name] = {
                "image": images,
                "text": texts,
                "image+text": np.add(images, texts) if len(images) == len(texts) else None,
            }["+".join(stage.layers)]
        return of

    def run(self, start, stop):
        for step in range(start, stop):
            seconds = self.seconds(step)
            busy_s = {name: float(sum(times)) for name, times in seconds.items()}
            due = [
                rank.note(
                    step + 1,
                    busy_s,
                    [
                        Span("ForwardPass", m, 0.0, s)
                        for m, s in enumerate(seconds[rank._stage_name])
                    ],
                )
                for rank in self.ranks
            ]
            assert len(set(due)) == 1
            if due[0]:
                decided = self.ranks[0].decide(step + 1, [rank.report() for rank in self.ranks])
                self.records.append([rank.take_over(decided) for rank in self.ranks][0])

    def settings(self):
        return [rank.settings.records() for rank in self.ranks]


def test_costs_come_to_predict_what_is_measured(data, tmp_path):
    world = World(data, tmp_path, {"strategy": "deal", "interval": 5})
    world.run(0, 80)
    first, last = (
        record["predicted_s"]["text"] / record["measured_s"]["text"]
        for record in (world.records[0], world.records[-1])
    )
    assert abs(first - 1) > 0.5 and abs(last - 1) < 0.06
    settings = [setting for setting in world.settings()[0]]
    assert (
        settings[-1]["costs"]["text"]["version"] == len(settings) - 1 >= 3
        and settings[1]["reason"] == "costs refitted"
    )
    assert len(settings) < 15  # once they do, they stay


def test_stages_that_hold_both_branches_have_no_times_of_one_alone(data, tmp_path):
    """So what texts cost stays as it was planned."""
    world = World(data, tmp_path, {"strategy": "deal", "interval": 5}, layout="merged")
    world.run(0, 80)
    assert world.ranks[0].settings.newest.costs == world.balance.first.costs
    assert all(record["measured_s"] == {} for record in world.records) and len(world.records) == 16


def test_a_setting_holds_for_no_step_that_a_loader_has_begun_with(data, tmp_path):
    for workers, ahead in ((0, 2), (1, 4), (8, 18)):
        world = World(data, tmp_path, {"strategy": "deal", "interval": 5}, workers=workers)
        world.run(0, 40)
        for setting in world.settings()[0][1:]:
            assert setting["from_step"] >= 5 + ahead
        made = {
            record["step"]: record["next"]["from_step"]
            for record in world.records
            if record["next"]
        }
        assert made and all(from_step >= step + ahead for step, from_step in made.items())


def test_idle_texts_get_more_captions_and_the_log_says_why(data, tmp_path):
    world = World(
        data,
        tmp_path,
        {"strategy": "feed", "captions_per_image": [1, 4], "interval": 5},
        image_s=lambda step: 0.3,
    )
    world.run(0, 100)
    feed_rates = [setting["knobs"]["captions_per_image"] for setting in world.settings()[0]]
    assert feed_rates[0] == 1 and max(feed_rates) > 1
    said = [record["reason"] for record in world.records if record["reason"]]
    assert said[0].startswith("captions_per_image 1 -> 2: the text branch waits")
    changed = next(
        setting for setting in world.settings()[0] if setting["knobs"]["captions_per_image"] == 2
    )
    assert said[0] in changed["reason"]
    before, after = (world.deal("text", changed["from_step"] + d) for d in (-1, 0))
    assert (
        sum(len(positions) for _, positions, _ in after)
        == 2 * sum(len(positions) for _, positions, _ in before)
        == 96
    )


@pytest.mark.parametrize("killed", [37, 43])
def test_a_run_that_goes_on_deals_as_one_that_never_stopped(data, tmp_path, killed):
    """In the middle of an epoch, with feed rates that have moved, costs refitted, and a setting
    that is still to come."""

    def world():
        balance = {"strategy": "feed", "captions_per_image": [1, 4], "interval": 5}
        return World(data, tmp_path, balance, image_s=lambda step: 0.25 if step < 30 else 0.5)

    whole, stopped, again = world(), world(), world()
    whole.run(0, 80)
    stopped.run(0, killed)
    state = json.loads(json.dumps(stopped.ranks[0].state_dict()))
    assert (
        state["settings"][-1]["knobs"]["captions_per_image"] > 1
        and state["settings"][-1]["costs"]["text"]["version"] > 1
    )
    for rank in again.ranks:
        rank.load_state_dict(state, killed)
        rank._spans = stopped.ranks[
            again.ranks.index(rank)
        ]._spans  # micro-batches of the last steps are not saved
    again.run(killed, 80)
    assert again.settings() == whole.settings()
    for step in range(killed, 80):
        for branch in ("image", "text"):
            assert again.deal(branch, step) == whole.deal(branch, step)


def test_a_run_that_is_split_in_another_way_goes_on_as_planned_with_what_it_was_fed(data, tmp_path):
    """Times of other stages tell nothing; the feed rates that held, not the one to come, stay."""
    balance = {"strategy": "feed", "captions_per_image": [1, 4], "interval": 5}
    before = World(data, tmp_path, balance, image_s=lambda step: 0.3)
    before.run(0, 40)
    state = json.loads(json.dumps(before.ranks[0].state_dict()))
    changed = next(
        setting for setting in state["settings"] if setting["knobs"]["captions_per_image"] == 2
    )["from_step"]
    for step, captions in ((changed - 1, 1), (changed, 2)):
        now = World(data, tmp_path, balance, micro_batch_size=6)
        for rank in now.ranks:
            rank.load_state_dict(state, step)
        (first, second), (same, _) = (rank.settings.records() for rank in now.ranks)
        assert first == same == now.balance.first.record() and second["from_step"] == step
        assert (
            second["knobs"]["captions_per_image"] == captions
            and second["costs"]["text"]["version"] == 0
        )
        assert (
            second["num_micro_batches"]["image"] == 8 and second["num_micro_batches"]["text"] >= 4
        )
        assert (
            now.ranks[0].state_dict()["busy_s"] == []
            and now.ranks[0].state_dict()["looks"]["busy_s"] == {}
        )
        now.run(step, step + 5)


@pytest.mark.parametrize(
    "layout, earlier, size", [("fork", 48, 12), ("fork", 12, 96), ("merged", 48, 96)]
)
def test_a_run_that_goes_on_with_other_global_batches_goes_on_as_planned_for_them(
    data, tmp_path, layout, earlier, size
):
    """What is known of the first steps is of the new size, too: of the steps that have it."""
    balance = {
        "strategy": "deal" if layout == "merged" else "feed",
        "captions_per_image": [1, 4],
        "interval": 5,
        "window": 3,
    }
    balance = {
        key: value
        for key, value in balance.items()
        if layout == "fork" or key != "captions_per_image"
    }
    before = World(
        data,
        tmp_path,
        balance,
        layout,
        image_s=lambda step: 0.3,
        micro_batch_size=earlier // 4,
        batch_size=earlier,
    )
    before.run(0, 40)
    state = json.loads(json.dumps(before.ranks[0].state_dict()))
    now = World(
        data,
        tmp_path,
        balance,
        layout,
        micro_batch_size=size // 4,
        batch_size=size,
        earlier=((40, earlier),),
    )
    for rank in now.ranks:
        rank.load_state_dict(state, 40)
    first, second = now.ranks[0].settings.records()
    assert (
        first["num_micro_batches"] == now.balance.num_micro_batches(now.balance.first, 40)
        and first["from_step"] == 0
    )
    assert first == now.balance.first.record() and (second["from_step"], second["reason"]) == (
        40,
        "planned anew",
    )
    assert second["knobs"] == before.ranks[0].settings.at(40).record()["knobs"]
    captions = second["knobs"]["captions_per_image"]
    assert captions == 1 or layout == "fork"
    for branch, texts in (("image", 1), ("text", captions if layout == "fork" else 1)):
        dealt = now.deal(branch, 40)
        assert len(dealt) == second["num_micro_batches"][branch]
        assert sorted(p for _, positions, _ in dealt for p in positions) == list(
            range(size * texts)
        )
    now.run(40, 60)


def test_points_are_those_of_the_slowest_stage_and_waiting_is_not_in_them(data, tmp_path):
    world = World(data, tmp_path, {"strategy": "deal"})
    graph = world.balance.plan.graph
    reports = [
        replace(rank.report(), points=[(4, 8, s)]) for rank, s in zip(world.ranks, (1.0, 2.0))
    ]
    assert slowest_points(graph, [*reports, reports[1]]) == {
        "image": [(4, 8, 1.0)],
        "text": [(4, 8, 2.0)] * 2,
    }
    spans = [
        Span("EmbedPass", 0, 0.0, 1.0),
        Span("ReplayPass", 0, 4.0, 5.5),
        Span("BackwardPass", 0, 6.0, 8.0),
        Span("RecvGrad", 0, 5.5, 6.0),
    ]
    assert seconds_of_micro_batches(
        [*spans, Span("ForwardPass", 1, 1.0, 2.0), Span("OptimizerStep", None, 8.0, 9.0)]
    ) == {0: 4.5, 1: 1.0}


def test_costs_that_predict_well_stay_as_they_are():
    sizes, lengths = np.array([4, 8, 16, 32]), np.array([32, 16, 8, 24])
    seen = [
        (int(n), int(length), float(TRUE.at(n, length)) * factor)
        for n, length, factor in zip(sizes, lengths, (1.01, 0.99, 1.02, 1.0))
    ]
    assert refitted({"text": TRUE}, {"text": seen}) == {"text": TRUE}
    slower = [(n, length, 2 * s) for n, length, s in seen]
    moved = refitted({"text": TRUE}, {"text": slower, "image": slower})
    assert (
        set(moved) == {"text"}
        and moved["text"].version == 1
        and moved["text"].at(16, 8) == pytest.approx(2 * TRUE.at(16, 8), rel=0.05)
    )
    again = refitted(moved, {"text": seen})  # half way back
    assert again["text"].at(16, 8) == pytest.approx(1.5 * TRUE.at(16, 8), rel=0.05)


def test_a_run_that_was_not_dealt_by_cost_goes_on_dealt(data, tmp_path):
    """Another strategy than at its beginning: which micro-batch a sample is in changes the speed
    only."""
    before = World(data, tmp_path, {"strategy": "off"})
    state = json.loads(json.dumps(before.ranks[0].state_dict()))
    after = World(data, tmp_path, None)
    for rank in after.ranks:
        rank.load_state_dict(state, 6)
    assert after.ranks[0].settings.at(6).reason == "planned anew" and set(
        after.ranks[0].settings.at(6).costs
    ) == {"text"}
    assert sorted(p for _, places, _ in after.deal("text", 7) for p in places) == list(range(48))
    back = World(data, tmp_path, {"strategy": "off"})
    for rank in back.ranks:
        rank.load_state_dict(json.loads(json.dumps(after.ranks[0].state_dict())), 8)
    assert back.ranks[0].settings.at(8).num_micro_batches == {"image": 4, "text": 4}
    assert [len(places) for _, places, _ in back.deal("text", 9)] == [12] * 4
