"""The study of ZeRO: every way is planned, and what ranks return becomes figures beside those that
the planner predicts."""

from functools import partial

import pytest

from bench import zero
from bench.common import MIB
from bench.towers import plan_of
from engine.config.implied import precision_of, zero_stage

tiny = partial(zero.zero, layers=1, width=32, heads=2, image_size=32, steps=1, profile_seconds=1)


def test_every_way_is_planned_and_compared_with_stage_1():
    ways = tiny(stages=(0, 1, 2)).ways
    runs = {name: way.measure.args[0] for name, way in ways.items()}
    assert len(ways) == 2 * (3 + 2)  # bf16 needs ZeRO-1 at least
    for name, run in runs.items():
        against = runs[ways[name].against]
        assert (against.layout, against.precision, against.stage) == (run.layout, run.precision, 1)
        config, plan = plan_of(run.setup, run.branches, zero.RANKS, run.deepspeed)
        assert (zero_stage(config), precision_of(config)) == (run.stage, run.precision), name
        assert plan.graph.world_size == zero.RANKS and plan.schedule == "replay", name
    assert not any(way.against for way in tiny(stages=(2,)).ways.values())


def test_a_stage_that_does_not_exist_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="zero_optimization.stage"):
        tiny(stages=(1, 9))


@pytest.mark.all("measures as the bench does")
def test_a_way_runs_on_real_ranks():
    """A rank holds at least what is predicted, and more at its peak than between backwards."""
    way = tiny(stages=(2,)).ways["fork 2 + 2, bf16, ZeRO-2"]
    found = way.measure() | way.once()
    assert found["step_s"] > 0 and found["predicted_s"] > 0
    for stage in range(2):
        between, peak = found["between"][stage], found["peak"][stage]
        assert found["predicted_between"][stage] < between < peak < 200 * MIB
        assert found["peak_share"][stage] == peak / found["predicted_peak"][stage]
