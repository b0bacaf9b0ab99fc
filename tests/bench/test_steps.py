"""The studies of training steps: every way to run is planned as it is called, layers that sleep do
so as predicted, and what ranks return becomes figures."""

from functools import partial

import pytest
import torch

from bench import steps
from bench.common import plan_of
from bench.sleeping import BACKWARD, Block, SleepingSetup
from engine.planning.simulator import simulate

# with profiled costs the same blocks are planned, and it takes a minute
STUDIES = [steps.strategies, partial(steps.strategies, ranks=3, global_batch=96), *steps.STUDIES]


def runs_of(make):
    for name, way in make().ways.items():
        (run, *_) = way.measure.args
        if run.branches is not None:
            yield name, run


@pytest.mark.parametrize("make", STUDIES, ids=lambda make: getattr(make, "__name__", "three ranks"))
def test_every_way_is_planned_on_its_ranks(make):
    for name, run in runs_of(make):
        _, plan = plan_of(run.setup, run.branches, run.ranks, deepspeed=run.deepspeed)
        assert plan.graph.world_size == run.ranks, name
        assert plan.schedule == run.branches.get("schedule", "batch_sync"), name


def test_nobody_is_faster_than_evenly_divided_sleep():
    for name, run in runs_of(steps.sleeping):
        costs = run.setup.costs
        _, plan = plan_of(run.setup, run.branches, run.ranks, costs)
        step_s = simulate(plan.graph, plan.batches, plan.schedule, costs).step_s
        whole = (1 + BACKWARD) * sum(run.setup.seconds) * run.setup.global_batch_size / run.ranks
        assert step_s > whole * 0.99, name


def test_the_costs_are_what_the_layers_sleep():
    setup = SleepingSetup()
    for (branch, layers), seconds in zip(setup.costs.layers.items(), setup.seconds):
        assert sum(layer.forward_s.at(4) for layer in layers) == pytest.approx(4 * seconds)
        sleeping = [getattr(s.template, "seconds", 0.0) for s in setup.towers[branch].specs]
        assert sum(sleeping) == pytest.approx(seconds)


def test_a_block_sleeps_in_both_parts_of_its_backward(monkeypatch):
    slept = []
    monkeypatch.setattr("bench.sleeping.time.sleep", slept.append)
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
    setup = SleepingSetup(global_batch_size=16, seconds=(0.0, 0.0), num_blocks=(4, 2))
    run = steps.Run(setup, {**steps.merged(2, 1), "schedule": schedule})
    found = steps.figures_of(run, 2, predicts=True)
    assert found["step_s"] > 0 and found["loss"] > 0 and 0 < found["bubble"] < 1
    assert len(found["idle"]) == len(found["predicted_idle"]) == len(found["tower"]) == 2
    assert all(0 < part < 1 for part in found["tower"])
