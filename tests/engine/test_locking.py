"""A locked tower: what learns gets the gradients of the unsplit model, and what is locked costs no
backward, no traffic and no state."""

from dataclasses import replace

import pytest
import torch
from cost_models import BRANCHES, proportional
from ranks import about, run_all
from refusals import not_refused, refused
from split_training import (
    RELATIVE,
    Case,
    check_all_gradients,
    towers_of,
    train_split,
    train_whole,
)
from split_training import (
    fork_of as two,
)

from engine.batch import BranchBatch
from engine.config.reading import check_config
from engine.optimizer.locking import LockedBlock, lock_graph, locked_block
from engine.planning.costs import StateBytes, with_trainable
from engine.planning.simulator import simulate
from engine.schedule import SCHEDULES, BatchSync, PerMicroBatch, Replay
from engine.topology import StageGraph, fork, merged

# parameters by layer; a layer without any is a pool
COUNTS = {"image": [10, 0, 20, 30, 0, 5], "text": [10, 20, 5]}


def test_layers_are_locked_from_the_input_on():
    for block, image, text in (
        ({}, [1, 1, 1, 1, 1, 1], [1, 1, 1]),
        ({"image": True}, [0, 0, 0, 0, 0, 1], [1, 1, 1]),
        ({"image": {"all_but_last": 1}}, [0, 0, 0, 1, 1, 1], [1, 1, 1]),
        ({"image": {"all_but_last": 2}, "text": True}, [0, 0, 1, 1, 1, 1], [0, 0, 1]),
        ({"image": True, "head": True}, [0, 0, 0, 0, 0, 0], [1, 1, 0]),
    ):
        learns = locked_block(block).trainable(COUNTS)
        assert learns == {"image": tuple(map(bool, image)), "text": tuple(map(bool, text))}, block


def test_what_is_wrong_is_refused_with_its_key():
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    cases = [
        (True, "branches.locked … True"),
        ({"imgae": True}, "branches.locked.imgae … did you mean 'image'?"),
        ({"image": "yes"}, "branches.locked.image … 'yes' … all_but_last"),
        ({"image": {"all_but_lats": 1}}, "branches.locked.image … all_but_last"),
        ({"image": {"all_but_last": 0}}, "at least 1"),
        ({"batch_norm": "lock"}, "branches.locked.batch_norm … did you mean 'locked'?"),
        ({"image": True, "text": True, "head": True}, "nothing would learn"),
    ]
    assert (
        not_refused(lambda b: check_config(config | {"branches": {"locked": b}}, BRANCHES), cases)
        == []
    )
    with refused("would lock nothing: the tower has 2 layers with parameters; use at most 1"):
        LockedBlock({"text": {"all_but_last": 2}}).trainable(COUNTS)


def gradients_of(graph):
    return [(stage.name, stage.trained, stage.sends_gradients) for stage in graph.stages]


def test_the_graph_knows_where_gradients_go():
    cuts = {"image": [range(3), range(3, 6)], "text": [range(1), range(1, 3)]}
    replicas = {"image": 1, "text": 1}
    image = locked_block({"image": True}).trainable(COUNTS)
    assert gradients_of(lock_graph(fork(cuts, replicas), image)) == [
        ("image 0", (), True),
        ("image 1", ("image",), False),
        ("text 0", ("text",), True),
        ("text 1", ("text",), True),
    ]
    assert gradients_of(lock_graph(merged(cuts, 1), image)) == [
        ("merged 0", ("text",), True),
        ("merged 1", ("image", "text"), True),
    ]
    locked = lock_graph(fork(cuts, replicas), image)
    assert StageGraph.from_record(locked.record()) == locked


def names(schedule, stage, num_micro_batches=2, num_kept=0):
    groups = schedule(stage, num_micro_batches, num_kept)
    return [i.name for instructions in groups for i in instructions]


def test_a_locked_stage_runs_forwards_and_the_stage_behind_it_keeps_what_it_sent():
    cuts = {"image": [range(3), range(3, 6)], "text": [range(3)]}
    graph = lock_graph(
        fork(cuts, {"image": 1, "text": 1}), locked_block({"image": True}).trainable(COUNTS)
    )
    locked, last, _ = graph.stages
    load, forward, send = "LoadMicroBatch", "ForwardPass", "SendActivation"
    receive, ends = "RecvActivation", ["ReduceGrads", "OptimizerStep"]
    for schedule, own in ((BatchSync, forward), (PerMicroBatch, forward), (Replay, "EmbedPass")):
        assert names(schedule, locked) == [load, own, send] * 2 + ends
    backwards = ["BackwardPass"] * 2
    assert names(BatchSync, last) == [receive, forward] * 2 + ["ComputeLoss"] + backwards + ends
    again = ["ReloadMicroBatch", "ReplayPass", "BackwardPass"]
    assert names(Replay, last) == [receive, "EmbedPass"] * 2 + ["ComputeLoss"] + again * 2 + ends
    batches = dict.fromkeys(("image", "text"), BranchBatch(1, 1, 4))
    for schedule in SCHEDULES:
        simulate(graph, batches, schedule, costs())  # and none waits for ever


def costs():
    return proportional({"image": [1.0] * 6, "text": [0.1] * 3})


@pytest.mark.parametrize("schedule", ["batch_sync", "replay"])
def test_the_simulator_knows_what_a_locked_tower_saves(schedule):
    """Six image layers of 1 s forward, 2 s backward and 1 MB kept per sample; the last, the head,
    learns. 4 micro-batches of one sample."""
    graph = fork({"image": [range(6)], "text": [range(3)]}, {"image": 1, "text": 1})
    batches = dict.fromkeys(("image", "text"), BranchBatch(1, 1, 4))
    trainable = {"image": (False,) * 5 + (True,), "text": (True,) * 3}
    model = replace(costs(), state=StateBytes(whole=16, sharded=0, gradient=4, weight=4))
    free = simulate(graph, batches, schedule, model)
    locked = simulate(
        lock_graph(graph, trainable), batches, schedule, with_trainable(model, trainable)
    )
    again = schedule == "replay"
    assert free.step_s == pytest.approx(4 * (6 + 12 + 6 * again))
    assert locked.step_s == pytest.approx(4 * (6 + 2 + 1 * again))
    assert free.stages[0].state_bytes == 6e6 * 16
    assert locked.stages[0].state_bytes == 1e6 * 16 + 5e6 * 4
    in_flight = 1 if again else 4
    assert free.stages[0].activation_bytes == 6e6 * in_flight
    # and those of one locked layer at a time
    assert locked.stages[0].activation_bytes == 1e6 * in_flight + 1e6


FREE = {"dropout": 0.1, "towers": "resnet+bert"}


def line(layout, stages, **kwargs):
    return Case(layout, stages, 1, 8, **kwargs)


ALL_OF_IMAGES = {"image": True, "head": True}
REPLAY, SIZES = {"schedule": "replay"}, {"image": 6, "text": 12}
FIXED = {"image": True, "batch_norm": "locked"}
# A case, and the stages that send gradients to the one before them.
CASES = [
    (line("merged", {"merged": 1}, locked=FIXED, **REPLAY, **FREE), set()),
    (
        line("merged", {"merged": 2}, locked={"text": {"all_but_last": 1}}, **REPLAY, **FREE),
        {"merged 1"},
    ),
    (line("merged", {"merged": 2}, locked={"text": True}, **FREE), {"merged 1"}),
    (two((2, 1), (1, 1), SIZES, locked=FIXED, **FREE), set()),
    (two((2, 1), (1, 1), SIZES, locked={"image": {"all_but_last": 1}}, **REPLAY, **FREE), set()),
    # ZeRO-1: nothing of the image branch learns
    (two((1, 2), (1, 1), 6, locked=ALL_OF_IMAGES), set()),
    (
        two(
            (2, 1),
            (1, 2),
            6,
            locked={"image": {"all_but_last": 4}},
            **REPLAY,
            checkpoint_interval=2,
        ),
        {"image 1"},
    ),
    (two((1, 2), (1, 1), 6, locked=ALL_OF_IMAGES, precision="bf16"), set()),
]
# With adapters the embeddings are locked and each block sends gradients to the one before it.
VIT_CLIP = {"towers": "vit+clip"}
BOTH = {"image": {"r": 2}, "text": {"r": 3, "alpha": 6, "target": "all"}}
CASES += [
    (line("merged", {"merged": 2}, lora=BOTH, **VIT_CLIP), {"merged 1"}),
    (two((2, 1), (1, 2), 6, lora=BOTH, **REPLAY, checkpoint_interval=2, **VIT_CLIP), {"image 1"}),
    (line("merged", {"merged": 2}, lora={"text": {"target": "mlp"}}, **FREE), {"merged 1"}),
    (two((1, 2), (1, 1), 6, lora=BOTH, precision="bf16", **VIT_CLIP), set()),
]


def test_what_learns_equals_unsplit_training_and_what_is_locked_stays():
    """Gradients and loss of the first step, statistics and the locked weights behind the second."""
    found = run_all(train_split, [replace(case, steps=2) for case, _ in CASES])
    for (case, results), (_, senders) in zip(found, CASES, strict=True):
        with about(case):
            check_locked(case, results)
            assert {result["stage"] for result in results if result["gradient_bytes"]} == senders


def check_locked(case, results):
    reference, is_fp32 = train_whole(case), case.precision == "fp32"
    if is_fp32:
        check_all_gradients(results, reference)
    loss = pytest.approx(reference["losses"][0], rel=RELATIVE if is_fp32 else 2e-2)
    assert results[0]["metrics"][0].loss == loss
    initial = train_whole(replace(case, steps=0))["parameters"]
    for name, parameter in (p for result in results for p in result["parameters"].items()):
        if name not in reference["gradients"]:
            given = initial[name] if is_fp32 else initial[name].bfloat16().float()
            assert torch.equal(parameter, given), f"{name} is locked and moved"
    for name, buffer in (b for result in results for b in result["buffers"].items()):
        if name in reference["buffers"]:  # behind one move of Adam, which makes much of rounding
            expected = reference["buffers"][name]
            assert torch.allclose(buffer, expected, rtol=1e-2, atol=1e-2), name
    check_state(results, reference)
    check_forwards(case, results, reference)


def check_forwards(case, results, reference):
    """Of the first layer of each branch, where it is locked: one for each micro-batch, also under
    `replay`."""
    first = {tower.specs[0].name: tower for tower in towers_of(case)[0].values()}
    for name, number in (each for result in results for each in result["forwards"].items()):
        if name in first and reference["gradients"].keys().isdisjoint(
            first[name].specs[0].canonical_parameters
        ):
            expected = case.steps * num_micro_batches_of(case, first[name].branch)
            assert number == expected, name


def num_micro_batches_of(case, branch):
    """Of each replica."""
    size, replicas = (case.of(branch, value) for value in (case.micro_batch_size, case.replicas))
    return case.global_batch_size // (size * replicas)


def check_state(results, reference):
    """Adam holds two numbers for each parameter that learns, and a count for each tensor it steps;
    padding and placeholders are few."""
    held = sum(result["num_state_numbers"] for result in results)
    learning = sum(gradient.numel() for gradient in reference["gradients"].values())
    assert held <= 2 * learning + 500, "what is locked has optimizer state"
