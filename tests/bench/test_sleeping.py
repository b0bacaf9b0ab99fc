"""Ranks whose layers sleep: every way to run is planned as it is called, and runs."""

import pytest
import torch
from ranks import run_ranks

from bench.sleeping import BACKWARD, CASES, Case, Row, costs_of, measure, plan_of, report, towers_of
from engine.planning.simulator import simulate

WAYS = [(case, schedule) for case in CASES for schedule in case.schedules]


@pytest.mark.parametrize("case, schedule", WAYS, ids=lambda value: getattr(value, "name", value))
def test_every_way_is_planned_on_its_ranks(case, schedule):
    _, plan, costs = plan_of(case, schedule)
    assert plan.graph.world_size == case.ranks and plan.schedule == schedule
    simulated = simulate(plan.graph, plan.batches, plan.schedule, costs)
    whole = (1 + BACKWARD) * sum(case.seconds.values()) * case.global_batch_size / case.ranks
    assert simulated.step_s > whole * 0.99  # nobody is faster than evenly divided work


def test_the_costs_are_what_the_layers_sleep():
    case = CASES[0]
    for branch, layers in costs_of(case).layers.items():
        assert sum(layer.forward_s.at(4) for layer in layers) == pytest.approx(
            4 * case.seconds[branch]
        )
        sleeping = [getattr(s.template, "seconds", 0.0) for s in towers_of(case)[branch].specs]
        assert sum(sleeping) == pytest.approx(case.seconds[branch])


def test_a_block_sleeps_in_both_parts_of_its_backward(monkeypatch):
    slept = []
    monkeypatch.setattr("bench.sleeping.time.sleep", slept.append)
    from bench.sleeping import Block

    block = Block("image", 0.5)
    features = torch.randn(4, 8, requires_grad=True)
    (made,) = (block({"image_features": features})["image_features"],)
    assert sum(slept) == 4 * 0.5
    slept.clear()
    torch.autograd.grad(made.sum(), features, retain_graph=True)
    assert slept == [BACKWARD / 2 * 4 * 0.5]
    made.sum().backward()
    assert sum(slept) == 3 * BACKWARD / 2 * 4 * 0.5


@pytest.mark.parametrize("schedule", ["batch_sync", "replay"])
def test_a_way_runs_on_real_ranks(schedule):
    block = {"layout": "merged", "stages": {"merged": 2}, "replicas": 1}
    none = dict.fromkeys(("image", "text"), 0.0)
    case = Case("merged 2", 2, block, none, {"image": 4, "text": 2}, global_batch_size=16)
    ranks = run_ranks(2, measure, case, schedule, 2)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds, _ in ranks)
    assert ranks[0][1].keys() == ranks[1][1].keys() and len(ranks[0][1]) == 2
    row = Row(case, schedule, 1.0, ranks[0][0], [0.0, 0.0], list(ranks[0][1].values()))
    assert f"| merged 2 | 2 | {schedule} | 1.00 |" in report([row])
