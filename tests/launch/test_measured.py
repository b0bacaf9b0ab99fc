"""From measured times to settings: costs refitted, feed rates moved, the same after a resume as
without one."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from batching_runs import Ranks, make_batching
from cost_models import proportional

from data.batching.branch_cost import BranchCost
from data.batching.settings import Setting, setting_at
from data.options import DataOptions
from data.prepare import prepare_data
from engine.trace import Span
from launch.batching.measured import (
    refitted,
    seconds_of_micro_batches,
    shares_by_speed,
    slowest_points,
)

COSTS = proportional({"image": [1.0, 2.0], "text": [0.5, 1.5]})
TRUE = BranchCost(2e-3, 0.0, 3e-5)  # what texts really cost
FEED = {"strategy": "feed", "captions_per_image": [1, 4], "interval": 5}


@pytest.fixture(scope="module")
def data(module_folder):
    return prepare_data(DataOptions(data=("demo:en+de+es+fr+it",)), None, module_folder("run"))


def seconds_by_stage(batching, step, image_s):
    """`image_s(step)` for all images, texts by `TRUE`."""
    batch, packer = batching.batches.at(step), batching.batches.texts
    number = batch.setting.num_micro_batches
    images = [image_s(step) / number["image"]] * number["image"]
    texts = [0.0] * number["text"]
    if packer is not None:
        lengths, (parts,) = packer.lengths(batch), packer.pack(batch, 1, [number["text"]])
        slower = 1.0 if step < 20 else 1.3  # something else runs on this machine
        texts = [slower * float(TRUE.at(len(part), lengths[part].max())) for part in parts]
    both = np.add(images, texts).tolist() if len(images) == len(texts) else []
    of = {"image": images, "text": texts, "image+text": both}
    return {stage.name: of["+".join(stage.layers)] for stage in batching.plan.graph.stages}, ()


def world(
    data, folder, balance, layout="fork", image_s=lambda step: 0.1, workers=1, size=12, **keys
):
    make = partial(
        make_batching,
        data,
        folder,
        COSTS,
        layout=layout,
        stages={"merged": 2} if layout == "merged" else {"image": 1, "text": 1},
        micro_batch_size=size,
        balance=balance,
        schedule="replay",
        **keys,
    )
    return Ranks(make, partial(seconds_by_stage, image_s=image_s), workers)


def saved(ranks):
    return json.loads(json.dumps(ranks.first.state_dict()))


def test_costs_come_to_predict_what_is_measured(data, tmp_path):
    ranks = world(data, tmp_path, {"strategy": "deal", "interval": 5})
    ranks.run(0, 80)
    first, last = (
        record["predicted_s"]["text"] / record["measured_s"]["text"]
        for record in (ranks.records[0], ranks.records[-1])
    )
    assert abs(first - 1) > 0.5 and abs(last - 1) < 0.06
    settings = ranks.settings()
    assert settings[-1]["costs"]["text"]["version"] == len(settings) - 1 >= 3
    assert settings[1]["reason"] == "costs refitted"
    assert len(settings) < 15  # once they do, they stay


def test_stages_that_hold_both_branches_have_no_times_of_one_alone(data, tmp_path):
    """So what texts cost stays as it was planned."""
    ranks = world(data, tmp_path, {"strategy": "deal", "interval": 5}, layout="merged")
    ranks.run(0, 80)
    assert ranks.first.batches.settings[-1].text_cost == ranks.first.rebalancing.planned.text_cost
    assert len(ranks.records) == 16
    assert all(record["measured_s"] == {} for record in ranks.records)


def test_a_setting_holds_for_no_step_that_a_loader_has_begun_with(data, tmp_path):
    for workers, ahead in ((0, 2), (1, 4), (8, 18)):
        ranks = world(data, tmp_path, {"strategy": "deal", "interval": 5}, workers=workers)
        ranks.run(0, 40)
        assert all(setting["from_step"] >= 5 + ahead for setting in ranks.settings()[1:])
        made = [(each["step"], each["next"]["from_step"]) for each in ranks.records if each["next"]]
        assert made and all(from_step >= step + ahead for step, from_step in made)


def test_idle_texts_get_more_captions_and_the_log_says_why(data, tmp_path):
    ranks = world(data, tmp_path, FEED, image_s=lambda step: 0.3)
    ranks.run(0, 100)
    captions = [setting["knobs"]["captions_per_image"] for setting in ranks.settings()]
    assert captions[0] == 1 and max(captions) > 1
    said = [record["reason"] for record in ranks.records if record["reason"]]
    assert said[0].startswith("captions_per_image 1 -> 2: the text branch waits")
    changed = ranks.settings()[captions.index(2)]
    assert said[0] in changed["reason"]
    before, after = (
        sum(len(positions) for _, positions, _ in ranks.loaded("text", changed["from_step"] + d))
        for d in (-1, 0)
    )
    assert (before, after) == (48, 96)


@pytest.mark.parametrize("killed", [37, 43])
def test_a_run_that_goes_on_packs_as_one_that_never_stopped(data, tmp_path, killed):
    """In the middle of an epoch, with feed rates that have moved, costs refitted, and a setting
    that is still to come."""
    whole, stopped, again = (
        world(data, tmp_path, FEED, image_s=lambda step: 0.25 if step < 30 else 0.5)
        for _ in range(3)
    )
    whole.run(0, 80)
    stopped.run(0, killed)
    state = saved(stopped)
    newest = state["settings"][-1]
    assert newest["knobs"]["captions_per_image"] > 1 and newest["costs"]["text"]["version"] > 1
    again.load(state, killed)
    for own, other in zip(again.ranks, stopped.ranks):
        own.rebalancing._spans = (
            other.rebalancing._spans
        )  # micro-batches of the last steps are not saved
    again.run(killed, 80)
    assert again.settings() == whole.settings()
    for step in range(killed, 80):
        for branch in ("image", "text"):
            assert again.loaded(branch, step) == whole.loaded(branch, step)


def test_a_run_that_is_split_in_another_way_goes_on_as_planned_with_what_it_was_fed(data, tmp_path):
    """Times of other stages tell nothing; the feed rates that held, not the one to come, stay."""
    before = world(data, tmp_path, FEED, image_s=lambda step: 0.3)
    before.run(0, 40)
    state = saved(before)
    captions = [setting["knobs"]["captions_per_image"] for setting in state["settings"]]
    changed = state["settings"][captions.index(2)]["from_step"]
    for step, expected in ((changed - 1, 1), (changed, 2)):
        now = world(data, tmp_path, FEED, size=6)
        now.load(state, step)
        first, second = now.settings()
        assert first == now.first.rebalancing.planned.record() and second["from_step"] == step
        assert second["knobs"]["captions_per_image"] == expected
        assert second["costs"]["text"]["version"] == 0
        assert second["num_micro_batches"]["image"] == 8
        assert second["num_micro_batches"]["text"] >= 4
        assert saved(now)["busy_s"] == [] and saved(now)["looks"]["busy_s"] == {}
        now.run(step, step + 5)


@pytest.mark.parametrize(
    "layout, earlier, size", [("fork", 48, 12), ("fork", 12, 96), ("merged", 48, 96)]
)
def test_a_run_that_goes_on_with_other_global_batches_goes_on_as_planned_for_them(
    data, tmp_path, layout, earlier, size
):
    """What is known of the first steps is of the new size, too: of the steps that have it."""
    balance = FEED if layout == "fork" else {"strategy": "deal", "interval": 5}
    before = world(data, tmp_path, balance, layout, size=earlier // 4, batch_size=earlier)
    before.run(0, 40)
    sizes = ((40, earlier),)
    now = world(data, tmp_path, balance, layout, size=size // 4, batch_size=size, earlier=sizes)
    now.load(saved(before), 40)
    first, second = now.settings()
    assert first == now.first.rebalancing.planned.record() and first["from_step"] == 0
    assert (second["from_step"], second["reason"]) == (40, "planned anew")
    assert second["knobs"] == setting_at(before.first.batches.settings, 40).record()["knobs"]
    captions = second["knobs"]["captions_per_image"]
    for branch, texts in (("image", 1), ("text", captions if layout == "fork" else 1)):
        loaded = now.loaded(branch, 40)
        assert len(loaded) == second["num_micro_batches"][branch]
        positions = sorted(p for _, positions, _ in loaded for p in positions)
        assert positions == list(range(size * texts))
    now.run(40, 60)


def test_a_run_that_was_not_packed_by_cost_goes_on_packed(data, tmp_path):
    """Another strategy than at its beginning: which micro-batch a sample is in changes the speed
    only."""
    before = world(data, tmp_path, {"strategy": "off"})
    after = world(data, tmp_path, None)
    after.load(saved(before), 6)
    setting = setting_at(after.first.batches.settings, 6)
    assert setting.reason == "planned anew" and setting.text_cost is not None
    loaded = after.loaded("text", 7)
    assert sorted(p for _, places, _ in loaded for p in places) == list(range(48))
    back = world(data, tmp_path, {"strategy": "off"})
    back.load(saved(after), 8)
    assert setting_at(back.first.batches.settings, 8).num_micro_batches == {"image": 4, "text": 4}
    assert [len(places) for _, places, _ in back.loaded("text", 9)] == [12] * 4


def test_points_are_those_of_the_slowest_stage_and_waiting_is_not_in_them(data, tmp_path):
    ranks = world(data, tmp_path, {"strategy": "deal"})
    of_images, of_texts = (rank.rebalancing.report() for rank in ranks.ranks)
    first, second = (
        replace(of_texts, stage=name, points=[(4, 8, s)]) for name, s in (("a", 3.0), ("b", 2.0))
    )
    assert slowest_points([of_images, first, second, second]) == [(4, 8, 2.0)] * 2
    assert slowest_points([of_images, first, second]) == [(4, 8, 3.0)]
    assert slowest_points([of_images]) == []
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
    assert refitted(TRUE, seen) == TRUE
    slower = [(n, length, 2 * s) for n, length, s in seen]
    moved = refitted(TRUE, slower)
    assert moved.version == 1
    assert moved.at(16, 8) == pytest.approx(2 * TRUE.at(16, 8), rel=0.05)
    again = refitted(moved, seen)  # half way back
    assert again.at(16, 8) == pytest.approx(1.5 * TRUE.at(16, 8), rel=0.05)


def test_shares_move_half_of_the_way_to_equal_times():
    assert shares_by_speed(None, [1.0, 1.05], 0.1) is None
    assert shares_by_speed((0.6, 0.4), [1.0, 1.05], 0.1) == (0.6, 0.4)
    assert shares_by_speed(None, [1.0, 1.5], 0.1) == (0.55, 0.45)
    # 1.25 and 0.5 of an equal share are the bounds, and what one may not have the others take
    assert shares_by_speed(None, [1.0, 100.0], 0.1) == (0.625, 0.375)
    shares = shares_by_speed(None, [1.0, 1.0, 1.0, 9.0], 0.1)
    assert shares == pytest.approx((0.2857, 0.2857, 0.2857, 0.1429), abs=2e-4)


def test_a_slow_replica_gets_fewer_samples_by_the_seconds_of_all_ranks(data, tmp_path):
    """Of the steps since the last measurement, also of those before a resume."""

    def of_rank(rank):
        return make_batching(
            data,
            tmp_path,
            COSTS,
            layout="merged",
            stages={"merged": 1},
            micro_batch_size=12,
            balance={"ranks": "measured", "interval": 4},
            rank=rank,
        ).rebalancing

    first, again = of_rank(0), of_rank(0)
    (stage,) = first.plan.graph.stages
    assert stage.replicas == 2
    busy_s = {stage.name: 0.1}
    assert not any(first.note(step, busy_s, (), (), (1.0, 1.5)) for step in (1, 2, 3))
    again.load_state_dict(json.loads(json.dumps(first.state_dict())), 3)
    for rebalancing in (first, again):
        assert rebalancing.note(4, busy_s, (), (), (1.0, 1.5))
        decided = rebalancing.decide(4, [rank.report() for rank in (rebalancing, of_rank(1))])
        shares = Setting.from_record(decided["setting"]).shares
        assert shares == dict.fromkeys(("image", "text"), (0.55, 0.45))
        assert "shares of the replicas by their speed" in decided["record"]["reason"]
