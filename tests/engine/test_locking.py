"""A locked tower: what learns gets the gradients of the unsplit model, and what is locked costs no
backward, no traffic and no state."""

from dataclasses import replace

import pytest
import torch
from cost_models import BRANCHES, proportional
from ranks import run_ranks
from split_training import (
    RELATIVE,
    Case,
    assemble,
    check_gradients,
    towers_of,
    train_split,
    train_whole,
)

from engine.config.reading import check_config
from engine.optimizer.locking import LockedBlock, lock_costs, lock_graph, locked_block
from engine.planning.costs import StateBytes
from engine.planning.planner import BranchBatch
from engine.planning.simulator import simulate
from engine.schedule import BatchSync, PerMicroBatch, Replay
from engine.topology import StageGraph, chain, fork, merged

COUNTS = {
    "image": [10, 0, 20, 30, 0, 5],
    "text": [10, 20, 5],
}  # parameters by layer; a layer without any is a pool


@pytest.mark.parametrize(
    ("block", "image", "text"),
    [
        ({}, [True] * 6, [True] * 3),
        ({"image": True}, [False] * 5 + [True], [True] * 3),
        ({"image": {"all_but_last": 1}}, [False, False, False, True, True, True], [True] * 3),
        (
            {"image": {"all_but_last": 2}, "text": True},
            [False, False, True, True, True, True],
            [False, False, True],
        ),
        ({"image": True, "head": True}, [False] * 6, [True, True, False]),
    ],
)
def test_layers_are_locked_from_the_input_on(block, image, text):
    assert locked_block(block).trainable(COUNTS) == {"image": tuple(image), "text": tuple(text)}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (True, ["branches.locked", "True"]),
        ({"imgae": True}, ["branches.locked.imgae", "did you mean 'image'?"]),
        ({"image": "yes"}, ["branches.locked.image", "'yes'", "all_but_last"]),
        ({"image": {"all_but_lats": 1}}, ["branches.locked.image", "all_but_last"]),
        ({"image": {"all_but_last": 0}}, ["at least 1"]),
        ({"batch_norm": "lock"}, ["branches.locked.batch_norm", "did you mean 'locked'?"]),
        ({"image": True, "text": True, "head": True}, ["nothing would learn"]),
    ],
)
def test_what_is_wrong_is_refused_with_its_key(block, words):
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "branches": {"locked": block}}
    with pytest.raises(ValueError) as error:
        check_config(config, BRANCHES)
    assert all(word in str(error.value) for word in words), error.value


def test_a_tower_with_too_few_layers_is_refused():
    with pytest.raises(
        ValueError,
        match="would lock nothing: the tower has 2 layers with parameters; use at most 1",
    ):
        LockedBlock({"text": {"all_but_last": 2}}).trainable(COUNTS)


def gradients_of(graph):
    return [(stage.name, stage.trained, stage.sends_gradients) for stage in graph.stages]


def test_the_graph_knows_where_gradients_go():
    cuts = {"image": [range(3), range(3, 6)], "text": [range(1), range(1, 3)]}
    replicas = {"image": 1, "text": 1}
    image = locked_block({"image": True}).trainable(COUNTS)
    text = locked_block({"text": True}).trainable(COUNTS)
    assert gradients_of(lock_graph(fork(cuts, replicas), image)) == [
        ("image 0", (), True),
        ("image 1", ("image",), False),
        ("text 0", ("text",), True),
        ("text 1", ("text",), True),
    ]
    # in a chain the gradients of the image embeddings pass through the locked text stages
    assert gradients_of(lock_graph(chain(cuts, 1), text)) == [
        ("image 0", ("image",), True),
        ("image 1", ("image",), True),
        ("text 0", ("image",), True),
        ("text 1", ("image", "text"), True),
    ]
    assert gradients_of(lock_graph(merged(cuts, 1), image)) == [
        ("merged 0", ("text",), True),
        ("merged 1", ("image", "text"), True),
    ]
    locked = lock_graph(fork(cuts, replicas), image)
    assert StageGraph.from_record(locked.record()) == locked


def names(schedule, stage, num_micro_batches=2, num_kept=0):
    return [
        i.name
        for instructions in schedule(stage, num_micro_batches, num_kept)
        for i in instructions
    ]


def test_a_locked_stage_runs_forwards_and_the_stage_behind_it_keeps_what_it_sent():
    cuts = {"image": [range(3), range(3, 6)], "text": [range(3)]}
    graph = lock_graph(
        fork(cuts, {"image": 1, "text": 1}), locked_block({"image": True}).trainable(COUNTS)
    )
    locked, tail, _ = graph.stages
    load, forward, send, receive = (
        "LoadMicroBatch",
        "ForwardPass",
        "SendActivation",
        "RecvActivation",
    )
    ends = ["ReduceGrads", "OptimizerStep"]
    assert names(BatchSync, locked) == [load, forward, send] * 2 + ends
    assert names(PerMicroBatch, locked) == [load, forward, send] * 2 + ends
    assert names(Replay, locked) == [load, "EmbedPass", send] * 2 + ends
    assert (
        names(BatchSync, tail)
        == [receive, forward] * 2 + ["ComputeLoss"] + ["BackwardPass"] * 2 + ends
    )
    again = ["ReloadMicroBatch", "ReplayPass", "BackwardPass"]
    assert names(Replay, tail) == [receive, "EmbedPass"] * 2 + ["ComputeLoss"] + again * 2 + ends
    for schedule in (BatchSync, Replay, PerMicroBatch):
        simulate(
            graph,
            dict.fromkeys(("image", "text"), BranchBatch(1, 1, 4)),
            schedule_name(schedule),
            costs(),
        )  # and none waits for ever


def schedule_name(schedule):
    from engine.schedule import SCHEDULES

    return next(name for name, own in SCHEDULES.items() if own is schedule)


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
    locked = simulate(lock_graph(graph, trainable), batches, schedule, lock_costs(model, trainable))
    again = schedule == "replay"
    assert free.step_s == pytest.approx(4 * (6 + 12 + 6 * again))
    assert locked.step_s == pytest.approx(4 * (6 + 2 + 1 * again))
    assert free.stages[0].state_bytes == 6e6 * 16
    assert locked.stages[0].state_bytes == 1e6 * 16 + 5e6 * 4
    in_flight = 1 if again else 4
    assert free.stages[0].activation_bytes == 6e6 * in_flight
    assert (
        locked.stages[0].activation_bytes == 1e6 * in_flight + 1e6
    )  # and those of one locked layer at a time


FREE = {"dropout": 0.1, "towers": "resnet+bert"}


def two(image, text, micro_batch_size, **kwargs):
    """image, text: (stages, replicas)."""
    return Case(
        "fork",
        {"image": image[0], "text": text[0]},
        {"image": image[1], "text": text[1]},
        micro_batch_size,
        **kwargs,
    )


# A case, and the stages that send gradients to the one before them.
CASES = [
    (
        Case(
            "merged",
            {"merged": 1},
            1,
            8,
            locked={"image": True, "batch_norm": "locked"},
            schedule="replay",
            **FREE,
        ),
        set(),
    ),
    (
        Case(
            "merged",
            {"merged": 2},
            1,
            8,
            locked={"text": {"all_but_last": 1}},
            schedule="replay",
            **FREE,
        ),
        {"merged 1"},
    ),
    (Case("chain", {"image": 1, "text": 1}, 1, 8, locked={"text": True}, **FREE), {"text 0"}),
    (
        Case(
            "chain",
            {"image": 1, "text": 1},
            1,
            8,
            locked={"image": True, "head": True},
            schedule="replay",
            **FREE,
        ),
        set(),
    ),
    (
        two(
            (2, 1),
            (1, 1),
            {"image": 6, "text": 12},
            locked={"image": True, "batch_norm": "locked"},
            **FREE,
        ),
        set(),
    ),
    (
        two(
            (2, 1),
            (1, 1),
            {"image": 6, "text": 12},
            locked={"image": {"all_but_last": 1}},
            schedule="replay",
            **FREE,
        ),
        set(),
    ),
    (
        two((1, 2), (1, 1), 6, locked={"image": True, "head": True}),
        set(),
    ),  # ZeRO-1: nothing of the image branch learns
    (
        two(
            (2, 1),
            (1, 2),
            6,
            locked={"image": {"all_but_last": 4}},
            schedule="replay",
            checkpoint_interval=2,
        ),
        {"image 1"},
    ),
    (two((1, 2), (1, 1), 6, locked={"image": True, "head": True}, precision="bf16"), set()),
]
# With adapters the embeddings are locked and each block sends gradients to the one before it.
VIT_CLIP = {"towers": "vit+clip"}
BOTH = {"image": {"r": 2}, "text": {"r": 3, "alpha": 6, "target": "all"}}
CASES += [
    (Case("chain", {"image": 1, "text": 1}, 1, 8, lora=BOTH, **VIT_CLIP), {"text 0"}),
    (
        two((2, 1), (1, 2), 6, lora=BOTH, schedule="replay", checkpoint_interval=2, **VIT_CLIP),
        {"image 1"},
    ),
    (Case("merged", {"merged": 2}, 1, 8, lora={"text": {"target": "mlp"}}, **FREE), {"merged 1"}),
    (two((1, 2), (1, 1), 6, lora=BOTH, precision="bf16", **VIT_CLIP), set()),
]


@pytest.mark.parametrize(
    ("case", "senders"), CASES, ids=lambda value: str(value) if isinstance(value, Case) else ""
)
def test_what_learns_equals_unsplit_training_and_what_is_locked_stays(case, senders):
    """Gradients and loss of the first step, statistics and the locked weights behind the second."""
    size = case.micro_batch_size
    sizes = size if isinstance(size, dict) else {"image": size, "text": size}
    case, batches = (
        replace(case, steps=2),
        {b: (s, case.global_batch_size // s) for b, s in sizes.items()},
    )
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, batches)
    loss = results[0]["metrics"][0].loss
    if case.precision == "fp32":
        check_gradients(
            assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
            reference["gradients"],
        )
    assert loss == pytest.approx(
        reference["losses"][0], rel=RELATIVE if case.precision == "fp32" else 2e-2
    )
    initial = train_whole(replace(case, steps=0), batches)["parameters"]
    for result in results:
        for name, parameter in result["parameters"].items():
            if name not in reference["gradients"]:
                given = (
                    initial[name] if case.precision == "fp32" else initial[name].bfloat16().float()
                )
                assert torch.equal(parameter, given), f"{name} is locked and moved"
        for name, buffer in result["buffers"].items():
            if (
                name in reference["buffers"]
            ):  # behind one move of Adam, which makes much of rounding
                torch.testing.assert_close(
                    buffer,
                    reference["buffers"][name],
                    rtol=1e-2,
                    atol=1e-2,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
    assert {result["stage"] for result in results if result["gradient_bytes"]} == senders
    check_state(results, reference)
    check_forwards(case, results, reference)


def check_forwards(case, results, reference):
    """Of the first layer of each branch, where it is locked: one for each micro-batch, also under
    `replay`."""
    first = {tower.specs[0].name: tower for tower in towers_of(case)[0].values()}
    for result in results:
        for name in first.keys() & result["forwards"].keys():
            if first[name].specs[0].canonical_parameters.keys().isdisjoint(reference["gradients"]):
                assert result["forwards"][name] == case.steps * num_micro_batches_of(
                    case, first[name].branch
                ), name


def num_micro_batches_of(case, branch):
    """Of each replica."""
    size, replicas = (
        value[branch] if isinstance(value, dict) else value
        for value in (case.micro_batch_size, case.replicas)
    )
    return case.global_batch_size // (size * replicas)


def check_state(results, reference):
    """Adam holds two numbers for each parameter that learns, and a count for each tensor it steps;
    padding and placeholders are few."""
    held = sum(result["num_state_numbers"] for result in results)
    learning = sum(gradient.numel() for gradient in reference["gradients"].values())
    assert held <= 2 * learning + 500, "what is locked has optimizer state"
