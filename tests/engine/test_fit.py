"""`"fit": "measure"`: plans are tried until one fits the memory, which runs out for real."""

import pytest
from fit_cases import fit
from ranks import run_cases, run_ranks
from split_training import Case, fork_of

from engine.config.reading import BranchesBlock, changed

MIB = 2**20


def test_a_plan_that_does_not_fit_one_rank_is_lowered_on_all_and_the_answer_is_kept(tmp_path):
    case = fork_of((2, 1), (1, 1), global_batch_size=1536, schedule="auto")
    runs = [
        run_ranks(3, fit, case, str(tmp_path / folder), scarce)
        for folder, scarce in (("roomy", {}), ("tight", {2: 150 * MIB}), ("tight", {2: 150 * MIB}))
    ]
    for run in runs:
        assert len({each["plan"] for each in run}) == 1
    (roomy, *_), tight, again = runs
    # the plan is made once more at the end
    assert roomy["tried"] == [roomy["plan"]] * 2 and "micro-batches 768×2" in roomy["plan"]
    assert tight[0]["tried"][0] == roomy["plan"] and len(set(tight[0]["tried"])) > 2
    assert tight[0]["plan"] == tight[0]["tried"][-1] == tight[0]["tried"][-2]
    assert tight[0]["peak"][2] < roomy["peak"][2]
    assert [each["built"] for each in again] == [0, 0, 0]
    assert [each["plan"] for each in again] == [each["plan"] for each in tight]


def test_every_kind_of_stage_can_be_tried(tmp_path):
    locked = {"image": True, "batch_norm": "locked"}
    cases = [
        Case("merged", {"merged": 2}, 1, schedule="replay", global_batch_size=8),
        fork_of((1, 1), (1, 1), checkpoint_interval=1, global_batch_size=8),
        fork_of((1, 1), (1, 1), towers="resnet+bert", locked=locked, precision="bf16"),
    ]
    for case, of_ranks in zip(
        cases, run_cases(2, fit, [(c, str(tmp_path / c.layout), {}) for c in cases])
    ):
        assert all(each["built"] for each in of_ranks), case


def test_nothing_that_fits_says_which_was_the_smallest(tmp_path):
    case = fork_of((1, 1), (1, 1), global_batch_size=1536, schedule="batch_sync")
    with pytest.raises(RuntimeError, match="branches.fit.*micro-batches.* nothing fits"):
        run_ranks(2, fit, case, str(tmp_path), {1: 20 * MIB})


def test_it_looks_for_what_is_left_open():
    with pytest.raises(ValueError, match='fit.*"auto"'):
        changed(BranchesBlock(fit="measure"), micro_batch_size=8)
