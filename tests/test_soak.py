"""What shows after many repeats alone; minutes to an hour, so not part of the suite.

WYE_SOAK=100 python -m pytest tests/test_soak.py -n 0 -s
"""

import os
import random

import pytest
from ranks import run_ranks
from soaked_training import live, lost_steps, train

REPEATS = int(os.environ.get("WYE_SOAK", "0"))
pytestmark = pytest.mark.skipif(
    REPEATS < 1, reason="takes long: WYE_SOAK=100 runs it with as many repeats"
)


def test_eight_ranks_with_shapes_that_vary_never_hang():
    """Four stages in two replicas, replay, 16 micro-batches; a line and a fork lose the same."""
    line = {"layout": "merged", "stages": {"merged": 4}, "replicas": 2}
    halves = {"image": 2, "text": 2}
    fork = {"layout": "fork", "stages": halves, "replicas": halves}
    losses = [
        run_ranks(8, train, block, 2 * REPEATS, timeout_s=60.0 + 30 * REPEATS)[0]
        for block in (line, fork)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert REPEATS < 5 or losses[0][-1] < losses[0][0]


def test_a_run_whose_ranks_are_killed_at_random_moments_ends_as_an_undisturbed_one(tmp_path):
    """In a step, in the copy, while files are written or renamed. A kill loses the steps since the
    newest whole checkpoint: up to one interval, two where that was still being written."""
    draw, endless, save_every = random.Random(0), 10**9, 3
    disturbed, whole = (tmp_path / name / "checkpoints" for name in ("disturbed", "whole"))
    for folder in (disturbed, whole):
        folder.mkdir(parents=True)
    unfinished = 0
    for _ in range(REPEATS):
        victim, after_s = draw.randrange(3), draw.uniform(0, 3.0)
        with pytest.raises(RuntimeError, match=f"rank {victim} ended without a result|onnection"):
            run_ranks(3, live, disturbed, endless, save_every, victim, after_s)
        unfinished += any(path.name.endswith(".writing") for path in disturbed.iterdir())
    lost = [n for rank in range(3) for n in lost_steps(disturbed.parent / f"steps-{rank}")]
    last = max([0, *(int(path.name.split("-")[1]) for path in disturbed.glob("step-*[0-9]"))]) + 3
    after_all = run_ranks(3, live, disturbed, last, save_every, None, 0.0)
    assert after_all == run_ranks(3, live, whole, last, save_every, None, 0.0)
    print(f"{last} steps, {unfinished} kills left a checkpoint half written, lost {sorted(lost)}")
    assert max(lost, default=0) <= 2 * save_every
