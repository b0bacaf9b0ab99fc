"""From the balance block, a plan and costs to a dealer per branch."""

from dataclasses import replace

import numpy as np
import pytest
from cost_models import BRANCHES, proportional

from data.batching.balance import ByCost, ByShape, InOrder
from data.batching.branch_cost import BranchCost
from data.batching.buckets import BucketedSamples
from data.batching.dealing import padding_share, predicted_s
from data.batching.feed import FeedRates
from data.batching.sampler import GlobalOrder
from data.batching.settings import Settings
from data.batching.weights import Curriculum
from data.options import DataOptions
from data.prepare import prepare_data
from engine.config.reading import check_config
from engine.planning.planner import plan_run
from launch.balancing.choosing import (
    explain_dealing,
    make_balance,
    text_cost,
)
from launch.config.blocks import dealing
from launch.config.options import parse_options

COSTS = proportional({"image": [1.0, 2.0], "text": [0.5, 1.5]})
BUCKETS = BucketedSamples(((32, 64), (64, 32)), np.zeros(4000, np.int8))


@pytest.fixture(scope="module")
def data(module_folder):
    return prepare_data(DataOptions(data=("demo:en+de+es+fr+it",)), None, module_folder("run"))


def made(
    data,
    folder,
    layout,
    balance,
    buckets=None,
    patch_size=None,
    options=(),
    schedule="batch_sync",
    **keys,
):
    stages = {"merged": 2} if layout == "merged" else {"image": 1, "text": 1}
    block = {
        "layout": layout,
        "stages": stages,
        "micro_batch_size": 12,
        "balance": balance,
        "schedule": schedule,
    } | keys
    config, block = check_config(
        {
            "train_batch_size": 48,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "branches": block,
        },
        BRANCHES,
    )
    plan = plan_run(config, block, 2, COSTS)
    order = GlobalOrder(len(data.train), 48, seed=0)
    return make_balance(
        dealing(block),
        plan,
        COSTS,
        data,
        order,
        buckets,
        patch_size,
        parse_options(list(options)),
        folder,
    )


def kinds(balance):
    return tuple(type(balance.dealers[branch]) for branch in BRANCHES)


@pytest.mark.parametrize(
    "layout, balance, buckets, expected",
    [
        ("fork", None, None, (InOrder, ByCost)),  # the default
        ("fork", {"strategy": "off"}, None, (InOrder, InOrder)),
        ("fork", {"strategy": "off"}, BUCKETS, (ByShape, ByShape)),
        ("fork", {"strategy": "deal"}, None, (InOrder, ByCost)),
        ("fork", {"strategy": "deal"}, BUCKETS, (ByShape, ByCost)),
        ("chain", {"strategy": "deal"}, None, (InOrder, ByCost)),
        (
            "merged",
            {"strategy": "deal"},
            None,
            (InOrder, ByCost),
        ),  # images stay in order: batch normalisation sees them
        ("merged", {"strategy": "deal"}, BUCKETS, (ByShape, ByCost)),
    ],
)
def test_who_deals(data, tmp_path, layout, balance, buckets, expected):
    balance = made(data, tmp_path, layout, balance, buckets)
    assert kinds(balance) == expected
    assert balance.equal_shares == (ByCost not in expected)


def test_another_objective_is_not_dealt(data, tmp_path):
    assert kinds(
        made(data, tmp_path, "merged", {"strategy": "deal"}, schedule="per_micro_batch")
    ) == (InOrder, InOrder)


@pytest.mark.parametrize("layout", ["fork", "merged"])
def test_a_deal_of_the_demo_has_little_padding_and_keeps_its_bounds(data, tmp_path, layout):
    balance = made(data, tmp_path, layout, {"strategy": "deal", "min_size": 5, "max_size": 30})
    batch, text = balance.batch(3, balance.first), balance.plan.batches["text"]
    dealer, number = balance.dealers["text"], balance.first.num_micro_batches["text"]
    shares = dealer.shares(batch, text.replicas, number)
    sizes = [len(positions) for positions, _ in shares]
    # a branch that is dealt alone may have more micro-batches than planned; images keep theirs, for
    # batch normalisation
    assert len(shares) == text.replicas * number and number <= (
        48 // 5 if layout == "fork" else text.num_micro_batches
    )
    assert sorted(np.concatenate([p for p, _ in shares]).tolist()) == list(range(48))
    assert min(sizes) >= 5 and max(sizes) <= 30
    lengths = dealer.work(batch).lengths
    in_order = [np.array_split(np.arange(48), number)]
    assert padding_share([[p for p, _ in shares]], lengths) < padding_share(in_order, lengths)


def test_texts_are_cut_into_as_many_micro_batches_as_their_padding_asks_for(data, tmp_path):
    """By default, also where the plan has one: here a micro-batch costs as much as 20 tokens
    besides its tokens."""
    plan_of = {"micro_batch_size": {"image": 12, "text": 48}}
    balance = made(data, tmp_path, "fork", None, **plan_of)
    text = BranchCost(20.0, 0.0, per_token_s=1.0)
    first = replace(balance.first, costs={"text": text})
    number = balance.num_micro_batches(first, 0)
    assert balance.plan.batches["text"].num_micro_batches == 1
    assert number["image"] == 4 and 4 <= number["text"] <= 16
    shares_of_padding, seconds = [], {n: 0.0 for n in (1, number["text"], 32)}
    for step in range(8):
        batch = balance.batch(step, first)
        for n in seconds:
            deal, work = (
                balance.dealers["text"].deal(batch, 1, n, n),
                balance.dealers["text"].work(batch),
            )
            seconds[n] += predicted_s(deal, work)
            if n == number["text"]:
                shares_of_padding.append(padding_share(deal, work.lengths))
    assert min(seconds, key=seconds.get) == number["text"]  # neither whole nor in crumbs
    assert np.mean(shares_of_padding) < 0.15
    free = replace(first, costs={"text": replace(text, fixed_s=1.0)})
    assert (
        number["text"] < balance.num_micro_batches(free, 0)["text"] <= 32
    )  # the less another one costs, the more there are


@pytest.mark.parametrize("layout", ["chain", "merged"])
@pytest.mark.parametrize("fixed_s", [0.0, 1.0, 1e3])
def test_branches_on_one_line_keep_the_planned_micro_batches(data, tmp_path, layout, fixed_s):
    """Whatever another micro-batch would cost: memory and batch normalisation see their images."""
    balance = made(data, tmp_path, layout, None, schedule="replay")  # 4 of 12 on one line
    costs = {branch: replace(cost, fixed_s=fixed_s) for branch, cost in balance.first.costs.items()}
    number = balance.num_micro_batches(replace(balance.first, costs=costs), 0)
    assert number == {
        branch: batch.num_micro_batches for branch, batch in balance.plan.batches.items()
    }
    for step in range(4):
        batch = balance.batch(step, replace(balance.first, costs=costs))
        shares = balance.dealers["image"].shares(
            batch, balance.plan.batches["image"].replicas, number["image"]
        )
        assert {len(positions) for positions, _ in shares} == {
            balance.plan.batches["image"].micro_batch_size
        }


@pytest.mark.parametrize("layout", ["chain", "merged"])
@pytest.mark.parametrize("min_size", [13, 20, 24, 33, 48])
def test_a_least_size_beyond_the_planned_one_leaves_fewer_micro_batches(
    data, tmp_path, layout, min_size
):
    balance = made(data, tmp_path, layout, {"min_size": min_size})  # 4 of 12 were planned
    number = balance.first.num_micro_batches["image"]
    assert number == 48 // min_size
    shares = balance.dealers["image"].shares(balance.batch(0, balance.first), 1, number)
    assert (
        min(len(positions) for positions, _ in shares) >= min_size
        and sum(len(positions) for positions, _ in shares) == 48
    )


def test_a_micro_batch_of_one_text_holds_the_longest(data, tmp_path):
    """With a limit of tokens that some texts reach."""
    options = ["--max-text-tokens", "10"]
    balance = made(
        data, tmp_path, "fork", None, micro_batch_size={"image": 12, "text": 1}, options=options
    )
    assert (
        max(
            balance.dealers["text"].work(balance.batch(step, balance.first)).lengths.max()
            for step in range(4)
        )
        == 10
    )
    assert balance.first.num_micro_batches["text"] >= 1


def test_replay_keeps_the_activations_of_as_many_samples_as_planned(data, tmp_path):
    """Micro-batches that are smaller and more than planned leave room for more of them; those of
    further captions do not."""
    keys = {"schedule": "replay", "kept_micro_batches": {"image": 1, "text": 2}}
    balance = made(data, tmp_path, "fork", None, **keys)  # 4 micro-batches of 12
    setting = replace(balance.first, num_micro_batches={"image": 4, "text": 10})
    assert [balance.num_kept(branch, setting) for branch in BRANCHES] == [1, 5]
    captions = replace(setting, feed_rates=FeedRates(captions_per_image=3))
    assert (
        balance.num_kept("text", replace(captions, num_micro_batches={"image": 4, "text": 12})) == 2
    )
    fewer = replace(setting, num_micro_batches={"image": 4, "text": 2})
    assert balance.num_kept("text", fewer) == 1  # twice as large


def test_costs_are_those_of_the_slowest_stage(data, tmp_path):
    plan = made(data, tmp_path, "merged", None).plan
    text = text_cost(COSTS, plan, typical_length=16.0)
    batch = plan.batches["text"].micro_batch_size
    slowest = max(
        sum(COSTS.layers["text"][i].training_s(batch) for i in stage.layers["text"])
        for stage in plan.graph.stages
    )
    assert text.at(batch, 16) == pytest.approx(slowest)
    assert text.at(batch, 32) == pytest.approx(2 * text.at(batch, 16) - text.fixed_s)


def test_the_explanation_is_of_the_deals_that_are_made(data, tmp_path):
    balance = made(data, tmp_path, "fork", {"strategy": "deal"})
    settings = Settings([replace(balance.first, num_micro_batches={"image": 4, "text": 4})])
    text = explain_dealing(balance, settings, range(3, 5))
    assert text.startswith(
        "image: in order, 12 samples in every micro-batch\ntext, step 4: 48 samples, 1 replicas × "
        "4 micro-batches"
    )
    deal = balance.dealers["text"].deal(balance.batch(4, settings.at(4)), 1, 4, 4)
    sizes = [
        int(line.split()[2])
        for line in text.partition("text, step 5")[2].splitlines()
        if line.split()[:1] == ["0"]
    ]
    assert sizes == [len(part) for part in deal[0]] + [48]
    merged = made(data, tmp_path, "merged", {"strategy": "deal"})
    assert explain_dealing(merged, Settings([merged.first]), range(1)).count("text, step 1") == 1


def test_refusals(data, tmp_path):
    for balance, words in (
        ({"strategy": "deel"}, "did you mean 'deal'"),
        (
            {"strategie": "deal"},
            "unknown key 'branches.balance.strategie'; did you mean 'strategy'",
        ),
        ({"min_size": 0}, "whole numbers of at least 1"),
        ({"min_size": 9, "max_size": 3}, "min_size 9 is above max_size 3"),
        ("deal", "it is an object"),
    ):
        with pytest.raises(ValueError, match=words):
            made(data, tmp_path, "fork", balance)


def test_under_a_curriculum_the_hardest_global_batches_decide_how_many_micro_batches_there_are(
    data, tmp_path
):
    balance = made(data, tmp_path, "fork", {"strategy": "deal"})
    lengths = balance.dealers["text"].tokens.of(np.arange(len(data.train)), data.train, 0, 0)[:, 0]
    taught = replace(
        balance, order=replace(balance.order, curriculum=Curriculum(lengths, epochs=3))
    )
    steps = taught.order.steps_per_epoch

    def needed(step):
        dealer = replace(balance.dealers["text"], largest=600)
        batch = taught.batch(step, taught.first)
        return len(dealer.deal(batch, 1, 1, 12)[0])

    assert needed(steps - 1) > needed(0)
    tight = replace(
        taught,
        dealers={
            **taught.dealers,
            "text": replace(balance.dealers["text"], largest=round(600 / 0.9)),
        },
    )
    tight = replace(
        tight,
        plan=replace(
            tight.plan,
            batches={b: replace(v, num_micro_batches=12) for b, v in tight.plan.batches.items()},
        ),
    )
    assert (
        tight.num_micro_batches(tight.first, 0)["text"]
        >= max(needed(steps - 1), needed(steps - 2))
        > needed(0)
    )


def test_a_run_that_goes_on_deals_the_same(data, tmp_path):
    first, again = (made(data, tmp_path, "fork", {"strategy": "deal"}) for _ in range(2))
    assert first.first == again.first
    for step in (0, 7):
        deals = [
            [p.tolist() for p, _ in b.dealers["text"].shares(b.batch(step, b.first), 1, 3)]
            for b in (first, again)
        ]
        assert (
            deals[0]
            == deals[1]
            != [
                p.tolist()
                for p, _ in first.dealers["text"].shares(first.batch(step + 1, first.first), 1, 3)
            ]
        )


# -- feed rates


def test_the_ladders_are_what_bounds_towers_and_data_leave(data, tmp_path):
    feed = {
        "strategy": "feed",
        "captions_per_image": [1, 40],
        "kept_patches": [0.5, 1],
        "image_size": [30, 64],
    }
    ladders = made(data, tmp_path, "fork", feed, schedule="replay", patch_size=8).ladders
    assert ladders.captions_per_image == (1, 2, 3, 4, 5)  # there are no more
    assert ladders.kept_patches == tuple(n / 16 for n in range(8, 17)) and ladders.image_size == (
        32,
        40,
        48,
        56,
        64,
    )
    at_once = made(
        data, tmp_path, "fork", feed, patch_size=8
    ).ladders  # all activations wait for the loss: memory is a bound
    assert 1 <= max(at_once.captions_per_image) < 5


def test_several_captions_get_micro_batches_of_their_own_in_a_fork_and_more_with_their_images_in_a_line(
    data, tmp_path
):
    for layout in ("fork", "chain"):
        balance = made(
            data,
            tmp_path,
            layout,
            {"strategy": "feed", "captions_per_image": [1, 5]},
            schedule="replay",
        )
        setting = replace(balance.first, feed_rates=FeedRates(captions_per_image=5))
        setting = replace(setting, num_micro_batches=balance.num_micro_batches(setting, 8))
        batch, text = balance.batch(8, setting), balance.plan.batches["text"]
        number = setting.num_micro_batches["text"]
        dealer = balance.dealers["text"]
        shares = dealer.shares(batch, text.replicas, number)
        positions = np.concatenate([p for p, _ in shares])
        assert sorted(positions.tolist()) == list(range(48 * 5))
        lengths = dealer.work(batch).lengths
        assert (
            max(len(p) * lengths[p].max() for p, _ in shares) <= text.micro_batch_size * 32
        )  # no more than was planned
        assert setting.num_micro_batches["image"] == (4 if layout == "fork" else number)


def test_a_batch_that_does_not_fit_takes_as_little_more_as_goes(data, tmp_path):
    balance = made(data, tmp_path, "fork", {"strategy": "deal"})
    tight = replace(balance.dealers["text"], largest=70)
    shares = tight.shares(balance.batch(0, balance.first), 1, 4)
    lengths = tight.work(balance.batch(0, balance.first)).lengths
    assert sorted(np.concatenate([p for p, _ in shares]).tolist()) == list(range(48))
    assert 70 < max(len(p) * lengths[p].max() for p, _ in shares) <= 1.35 * lengths.sum() / 4


def test_bounds_that_do_not_go_together_with_the_rest_are_refused(data, tmp_path):
    for balance, layout, words in (
        (
            {"strategy": "feed"},
            "fork",
            "needs bounds of one of captions_per_image, kept_patches, image_size",
        ),
        (
            {"strategy": "feed", "captions_per_image": [1, 4], "interval": 0},
            "fork",
            "an interval of at least 1",
        ),
        (
            {"strategy": "deal", "captions_per_image": [1, 4]},
            "fork",
            'only "strategy": "feed" moves it',
        ),
        ({"strategy": "feed", "captions_per_image": [1, 4]}, "merged", "different GPUs"),
        (
            {"strategy": "feed", "captions_per_image": [4, 1]},
            "fork",
            r"takes \[least, most\], two whole numbers from 1 to 64",
        ),
        (
            {"strategy": "feed", "captions_per_image": [6, 20]},
            "fork",
            "no image of this data has more than 5 captions",
        ),
        (
            {"strategy": "feed", "kept_patches": [0.5, 1]},
            "fork",
            "has no patches to leave out; use a ViT",
        ),
        ({"strategy": "feed", "image_size": [32, 128]}, "fork", r"goes beyond --image-size 64"),
        ({"strategy": "off", "window": 4}, "fork", "deals nothing"),
        ({"strategy": "deal", "dead_band": 1.5}, "fork", "a number between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=words):
            made(data, tmp_path, layout, balance)
