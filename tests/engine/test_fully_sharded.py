"""ZeRO-3 beyond what `test_parity.py` covers: forwards that only some replicas do."""

import torch
from fully_sharded_cases import evaluate_unlike_numbers
from ranks import about, run_cases
from split_training import assemble, check_gradients, fork_of, merged_of, train_whole

from engine.optimizer.classes import make_optimizer
from engine.optimizer.parameter_groups import GroupSchedule, Setting

CASES = [
    merged_of(1, 2, 12, zero_stage=3),  # one micro-batch
    merged_of(1, 2, 4, zero_stage=3, locked={"image": True}),
    fork_of((1, 2), (1, 1), {"image": 4, "text": 6}, zero_stage=3),
    fork_of((1, 2), (1, 1), {"image": 4, "text": 6}, zero_stage=3, schedule="replay"),
]


def test_replicas_that_evaluate_unlike_numbers_train_on():
    """A replica without a micro-batch gathers weights as often as the one that has all, and both
    gather layers in one order in the backward after it."""
    for case in CASES:
        (results,) = [run_cases(case.world_size, evaluate_unlike_numbers, [(case,)])[0]]
        reference = train_whole(case)
        shapes = {name: each.shape for name, each in reference["clipped"].items()}
        first = [{"gradients": result["gradients"][0]} for result in results]
        with about(case):
            check_gradients(assemble(first, shapes), reference["clipped"])
            before, after = results[0]["measured"]
            for pair, directions in before.items():
                for way, sums in directions.items():
                    assert all(torch.equal(r["measured"][0][pair][way], sums) for r in results)
                    assert not torch.equal(after[pair][way], sums), "a step changes embeddings"
                    assert sums[-1] == 24


def test_a_replica_holds_its_share_behind_a_step():
    """Nothing stays whole, but what has one row."""
    (results,) = [run_cases(2, evaluate_unlike_numbers, [(CASES[0],)])[0]]
    for own, other in zip(*(result["held"].items() for result in results)):
        (name, (first, number)), (_, (second, _)) = own, other
        assert first + second == number, name
    total = sum(number for _, number in results[0]["held"].values())
    shares = [sum(held for held, _ in result["held"].values()) / total for result in results]
    assert all(0.4 < share < 0.6 for share in shares), shares


def test_a_stage_in_which_nothing_learns_has_a_schedule():
    """Its group is empty: without a projection, a locked tower and its head have nothing to step."""
    adamw = {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}
    for block in (adamw, {"type": "Muon", "params": {"lr": 0.5}}):
        optimizer = make_optimizer({"optimizer": block}, [{"params": []}])
        schedule = GroupSchedule(optimizer, lambda _: None, [Setting(1.0, 0.0, None)], [])
        optimizer.step()
        schedule.step()
        assert schedule.rates == {None: 0.5}
