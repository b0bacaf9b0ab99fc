"""The studies of training steps: every way to run is planned as it is called, and what ranks return
becomes figures."""

from functools import partial

import pytest
from baseline_training import SETUP

from bench import steps
from bench.towers import plan_of

STUDIES = [
    steps.strategies,
    partial(steps.strategies, ranks=3, global_batch=96),
    *steps.STUDIES[1:],
]


@pytest.mark.parametrize("make", STUDIES, ids=lambda make: getattr(make, "__name__", "three ranks"))
def test_every_way_is_planned_on_its_ranks(make):
    for name, way in make().ways.items():
        (run, *_) = way.measure.args
        if run.branches is not None:
            _, plan = plan_of(run.setup, run.branches, run.ranks)
            assert plan.graph.world_size == run.ranks, name
            assert plan.schedule == run.branches.get("schedule", "batch_sync"), name


@pytest.mark.parametrize("branches", [steps.merged(2, 1) | {"schedule": "replay"}, None])
@pytest.mark.all("measures as the bench does")
def test_a_way_runs_on_real_ranks(branches):
    """Two stages of the engine, and DDP, from the same weights: the same loss, and what is told of
    each rank and stage."""
    run = steps.Run(SETUP, branches)
    found = steps.figures_of(run, 2) | steps.tensors(run)
    assert found["step_s"] > 0 and found["sent_bytes"] > 0 and min(found["tensor_bytes"]) > 0
    assert found["loss"] == pytest.approx(steps.figures_of(steps.Run(SETUP, None), 2)["loss"], 1e-4)
    if branches is not None:
        assert 0 < found["bubble"] < 1
        assert len(found["tower"]) == len(found["optimizer"]) == len(found["tensor_bytes"]) == 2
        assert all(0 < part < 1 for part in found["tower"])
