"""From the balance block, a plan and costs to a dealer per branch."""

from dataclasses import replace

import numpy as np
import pytest
from cost_models import proportional

from data.balance import ByCost, ByShape, GlobalBatch, InOrder
from data.buckets import BucketedSamples
from data.dealing import padding_share
from data.options import DataOptions
from data.prepare import prepare_data
from data.sampler import GlobalOrder
from engine.config import check_config
from engine.planner import plan_run
from engine.topology import BRANCHES
from launch.balancing import branch_cost, constant_shapes, equal_shares, explain_dealing, make_dealers
from launch.options import parse_options

COSTS = proportional({"image": [1.0, 2.0], "text": [0.5, 1.5]})
BUCKETS = BucketedSamples(((32, 64), (64, 32)), np.zeros(4000, np.int8))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_data(DataOptions(("demo",)), None, tmp_path_factory.mktemp("run"))


def made(data, folder, layout, balance, buckets=None, schedule="batch_sync", **keys):
    stages = {"merged": 2} if layout == "merged" else {"image": 1, "text": 1}
    block = {"layout": layout, "stages": stages, "micro_batch_size": 12, "balance": balance, "schedule": schedule, **keys}
    config, block = check_config({"train_batch_size": 48, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "branches": block})
    plan = plan_run(config, block, 2, COSTS)
    return make_dealers(block.dealing(), plan, COSTS, data, buckets, parse_options([]), folder), plan


def kinds(dealers):
    return tuple(type(dealers[branch]) for branch in BRANCHES)


@pytest.mark.parametrize(
    "layout, balance, buckets, expected",
    [
        ("fork", None, None, (InOrder, InOrder)),
        ("fork", {"strategy": "off"}, BUCKETS, (ByShape, ByShape)),
        ("fork", {"strategy": "deal"}, None, (InOrder, ByCost)),
        ("fork", {"strategy": "deal"}, BUCKETS, (ByShape, ByCost)),
        ("chain", {"strategy": "deal"}, None, (ByCost, ByCost)),
        ("merged", {"strategy": "deal"}, None, (ByCost, ByCost)),
        ("merged", {"strategy": "deal"}, BUCKETS, (ByShape, ByShape)),
    ],
)
def test_who_deals(data, tmp_path, layout, balance, buckets, expected):
    dealers, plan = made(data, tmp_path, layout, balance, buckets)
    assert kinds(dealers) == expected
    assert equal_shares(dealers) == (ByCost not in expected)
    assert constant_shapes(dealers) == {"image": expected[0] is InOrder, "text": False}
    if layout != "fork":
        assert dealers["image"] is dealers["text"]  # branches that share a line share the deal


def test_another_objective_is_not_dealt(data, tmp_path):
    assert kinds(made(data, tmp_path, "merged", {"strategy": "deal"}, schedule="per_micro_batch")[0]) == (InOrder, InOrder)


@pytest.mark.parametrize("layout", ["fork", "merged"])
def test_a_deal_of_the_demo_has_little_padding_and_keeps_its_bounds(data, tmp_path, layout):
    dealers, plan = made(data, tmp_path, layout, {"strategy": "deal", "min_size": 5, "max_size": 30})
    visited = np.random.default_rng(1).permutation(len(data.train))[:48]
    batch = GlobalBatch(0, 0, visited, data.train[visited])
    text = plan.batches["text"]
    shares = dealers["text"].shares(batch, text.replicas, text.num_micro_batches)
    sizes = [len(positions) for positions, _ in shares]
    assert len(shares) == text.replicas * text.num_micro_batches and sorted(np.concatenate([p for p, _ in shares]).tolist()) == list(
        range(48)
    )
    assert min(sizes) >= 5 and max(sizes) <= 30
    lengths = dealers["text"].works(batch)[-1].lengths
    in_order = [[np.arange(48)[m * 12 : m * 12 + 12] for m in range(4)]]
    assert padding_share([[p for p, _ in shares]], lengths) < padding_share(in_order, lengths) / 2


def test_costs_are_those_of_the_slowest_stage(data, tmp_path):
    _, plan = made(data, tmp_path, "merged", None)
    image, text = (branch_cost(COSTS, plan, branch, typical_length=16.0) for branch in BRANCHES)
    batch = plan.batches["text"].micro_batch_size

    def seconds(branch, n):
        return max(
            sum(COSTS.layers[branch][i].forward_s.at(n) + COSTS.layers[branch][i].backward_s.at(n) for i in stage.layers[branch])
            for stage in plan.graph.stages
        )

    assert image.at(batch, 1) == pytest.approx(seconds("image", batch)) and text.at(batch, 16) == pytest.approx(seconds("text", batch))
    assert text.at(batch, 32) == pytest.approx(2 * text.at(batch, 16) - text.fixed_s) and image.at(batch, 99) == image.at(batch, 1)


def test_the_explanation_is_of_the_deals_that_are_made(data, tmp_path):
    order = GlobalOrder(len(data.train), 48, seed=0)
    dealers, plan = made(data, tmp_path, "fork", {"strategy": "deal"})
    text = explain_dealing(dealers, order, data.train, plan, range(3, 5))
    assert text.startswith("image: in order, 12 samples in every micro-batch\ntext, step 4: 48 samples, 1 replicas × 4 micro-batches")
    visited = order.batch(4)
    deal = dealers["text"].deal(GlobalBatch(4, 0, visited, data.train[visited]), 1, 4)
    sizes = [int(line.split()[2]) for line in text.partition("text, step 5")[2].splitlines() if line.split()[:1] == ["0"]]
    assert sizes == [len(part) for part in deal[0]] + [48]
    shared, plan = made(data, tmp_path, "merged", {"strategy": "deal"})
    assert explain_dealing(shared, order, data.train, plan, range(1)).count("merged, step 1") == 1


def test_refusals(data, tmp_path):
    for balance, words in (
        ({"strategy": "deel"}, "did you mean 'deal'"),
        ({"strategie": "deal"}, "unknown key 'branches.balance.strategie'; did you mean 'strategy'"),
        ({"min_size": 0}, "whole numbers of at least 1"),
        ({"min_size": 9, "max_size": 3}, "min_size 9 is above max_size 3"),
        ("deal", "it is an object"),
    ):
        with pytest.raises(ValueError, match=words):
            made(data, tmp_path, "fork", balance)


def test_a_run_that_goes_on_deals_the_same(data, tmp_path):
    first, again = (made(data, tmp_path, "fork", {"strategy": "deal"})[0]["text"] for _ in range(2))
    visited = np.arange(100, 148)
    batch = GlobalBatch(7, 2, visited, data.train[visited])
    assert [p.tolist() for p, _ in first.shares(batch, 1, 4)] == [p.tolist() for p, _ in again.shares(batch, 1, 4)]
    other = replace(batch, visited=visited + 500, indices=data.train[visited + 500])
    assert [p.tolist() for p, _ in first.shares(batch, 1, 4)] != [p.tolist() for p, _ in first.shares(other, 1, 4)]
