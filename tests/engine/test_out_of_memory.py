"""Memory that runs out: what the allocators' texts say, what is advised for a run, and the one
message, from allocations that fail for real."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from cost_models import BRANCHES, proportional
from memory_cases import TOO_MUCH, allocate_too_much, fail_in_a_layer, fail_while_averaged, failures
from ranks import run_ranks
from split_training import Case

from engine.config.reading import check_config
from engine.planning.costs import CostModel
from engine.planning.memory_advice import (
    BUILDING,
    EVALUATION,
    SAVING,
    TRAINING,
    RankSetup,
    Work,
    advice,
    smaller_size,
)
from engine.planning.planner import plan_run
from engine.processes.out_of_memory import OutOfMemory, explained, in_words, message
from engine.processes.shortage import Shortage, shortage_of, size_in_words, with_what_is_held

KIB, MIB, GIB = 2**10, 2**20, 2**30
ADVICE = (
    "If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
# Texts as torch 2.6 and newer write them.
ALONE = (
    "CUDA out of memory. Tried to allocate 320.00 MiB. GPU 0 has a total capacity of 21.99 GiB of "
    "which 19.38 MiB is free. Including non-PyTorch memory, this process has 21.96 GiB memory in "
    "use. Of the allocated memory 21.67 GiB is allocated by PyTorch, and 5.59 MiB is reserved by "
    f"PyTorch but unallocated. {ADVICE}"
)
SHARED = (
    "CUDA out of memory. Tried to allocate 25.96 GiB. GPU 4 has a total capacity of 79.18 GiB of "
    "which 23.04 GiB is free. Process 7478 has 4.08 GiB memory in use. Including non-PyTorch "
    "memory, this process has 52.02 GiB memory in use. Of the allocated memory 45.89 GiB is "
    "allocated by PyTorch, with 1.38 MiB allocated in private pools (e.g., CUDA Graphs), and 3.01 "
    f"GiB is reserved by PyTorch but unallocated. {ADVICE}"
)
CONTAINER = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.25 GiB is free. Process 1234 has 77.85 GiB memory in use. Of the allocated memory "
    "76.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated. "
    f"{ADVICE}"
)
SEVERAL = CONTAINER.replace(
    "Process 1234 has 77.85 GiB",
    "Process 12 has 512.00 MiB memory in use. Process 1234 has 77.35 GiB",
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total capacity of 79.11 GiB of "
    "which 78.00 GiB is free. 800.00 MiB allowed; Of the allocated memory 798.00 MiB is allocated "
    f"by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. {ADVICE}"
)
EXPANDED = ALONE.replace(
    ADVICE,
    "expandable_segments is enabled. If instead the process is running out of virtual address "
    "space (VSZ), ...",
)


def on_gpu(device, asked, total, free, own, others, allocated, cached, can_expand=True):
    return Shortage(
        True, "", device, asked, total, free, own, others, allocated, cached, can_expand
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ALONE,
            on_gpu(
                "GPU 0",
                320 * MIB,
                21.99 * GIB,
                19.38 * MIB,
                21.96 * GIB,
                0,
                21.67 * GIB,
                5.59 * MIB,
            ),
        ),
        (
            SHARED,
            on_gpu(
                "GPU 4",
                25.96 * GIB,
                79.18 * GIB,
                23.04 * GIB,
                52.02 * GIB,
                4.08 * GIB,
                45.89 * GIB,
                3.01 * GIB,
            ),
        ),
        (
            CONTAINER,
            on_gpu("GPU 0", 20 * GIB, 79.11 * GIB, 1.25 * GIB, 77.85 * GIB, 0, 76 * GIB, 1 * GIB),
        ),
        (
            SEVERAL,
            on_gpu(
                "GPU 0",
                20 * GIB,
                79.11 * GIB,
                1.25 * GIB,
                77.35 * GIB,
                0.5 * GIB,
                76 * GIB,
                1 * GIB,
            ),
        ),
        (LIMITED, on_gpu("GPU 1", 2 * MIB, 79.11 * GIB, 78 * GIB, None, None, 798 * MIB, 0)),
        (
            EXPANDED,
            on_gpu(
                "GPU 0",
                320 * MIB,
                21.99 * GIB,
                19.38 * MIB,
                21.96 * GIB,
                0,
                21.67 * GIB,
                5.59 * MIB,
                can_expand=False,
            ),
        ),
    ],
    ids=["alone", "shared", "container", "several", "limited", "expanded"],
)
def test_what_torch_says_of_a_gpu_is_read(text, expected):
    assert shortage_of(torch.OutOfMemoryError(text)) == replace(expected, text=text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version "
        "2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
        "2 'out of memory'",
    ],
)
def test_what_other_libraries_of_cuda_say_is_seen(text):
    found = shortage_of(RuntimeError(text))
    assert found == Shortage(True, text.splitlines()[0])


@pytest.mark.parametrize(
    ("allocate", "asked"),
    [
        (allocate_too_much, TOO_MUCH),
        (lambda: np.empty(TOO_MUCH, np.uint8), TOO_MUCH),
        (lambda: bytearray(TOO_MUCH), None),
    ],
    ids=["torch", "numpy", "python"],
)
def test_an_allocation_that_fails_on_the_host_is_seen(allocate, asked):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    found = shortage_of(caught.value)
    assert not found.on_gpu and found.asked == asked and found.text


def test_what_the_system_tells_is_added_to_what_the_text_says():
    found = with_what_is_held(Shortage(on_gpu=False, total=1.0, free=0.0), torch.device("cpu"))
    assert (found.total, found.free) == (1.0, 0.0) and found.own > 10 * MIB


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (4) must match the size of tensor b (3)"),
        RuntimeError(
            "the loader lost a process. Most often the machine ran out of memory and the system "
            "killed it"
        ),
        ValueError("CUDA out of memory"),
    ],
)
def test_other_errors_are_left_alone(error):
    assert shortage_of(error) is None and in_words(error, "rank 0") is error
    with (
        pytest.raises(type(error)) as caught,
        explained(torch.device("cpu"), lambda shortage: "no"),
    ):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (KIB, "1.00 KiB"),
        (1.5 * GIB, "1.50 GiB"),
        (2**60, "1.00 EiB"),
    ],
)
def test_sizes_in_words(num_bytes, words):
    assert size_in_words(num_bytes) == words


@pytest.mark.parametrize(
    ("text", "num_steps_done", "repeats"),
    [(ALONE, 0, True), (ALONE, 1, False), (SHARED, 0, False), (CONTAINER, 0, True)],
)
def test_only_what_would_fail_again_is_not_started_again(text, num_steps_done, repeats):
    """In the first step of a process another start does the same; unless another process held the
    memory, as in `SHARED`."""
    with (
        pytest.raises(OutOfMemory) as caught,
        explained(torch.device("cpu"), lambda shortage: shortage.device, num_steps_done),
    ):
        raise torch.OutOfMemoryError(text)
    assert (
        caught.value.repeats == repeats
        and str(caught.value).startswith("GPU ")
        and str(caught.value.__cause__) == text
    )


# -- what is advised


MINIMAL = {"train_batch_size": 96, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}
COSTS = proportional({"image": [1.0] * 4, "text": [1.0] * 4})
SHORT = shortage_of(torch.OutOfMemoryError(ALONE))
ON_HOST = Shortage(on_gpu=False, asked=GIB)
FORK = {
    "layout": "fork",
    "stages": {"image": 1, "text": 1},
    "micro_batch_size": {"image": 12, "text": 24},
}


def setup(world_size, branches, rank=0, costs=COSTS, on_gpu=True, **keys):
    config, block = check_config(copy.deepcopy(MINIMAL) | keys | {"branches": branches}, BRANCHES)
    plan = plan_run(
        config,
        block,
        world_size,
        CostModel.of(costs.layers, costs.machine, config, costs.embed_dim),
    )
    return RankSetup(plan, config, plan.graph.stage_of(rank), on_gpu)


def advised(of, instruction="ForwardPass", activity=TRAINING, shortage=SHORT):
    return advice(of, Work(activity, instruction), shortage)


def with_keys(config, keys):
    """The JSON file as a user would change it."""
    for key, value in keys.items():
        inside = isinstance(value, dict) and key in ("branches", "zero_optimization", "pipeline")
        config[key] = with_keys(dict(config.get(key, {})), value) if inside else value
    return config


RUNS = [
    (2, {**FORK, "schedule": "batch_sync"}, {}),
    (
        4,
        {
            "layout": "fork",
            "stages": {"image": 2, "text": 1},
            "replicas": {"image": 1, "text": 2},
            "schedule": "batch_sync",
        },
        {},
    ),
    (2, {**FORK, "schedule": "replay", "kept_micro_batches": {"image": 3, "text": 1}}, {}),
    (2, {"layout": "merged", "stages": {"merged": 1}}, {"gradient_accumulation_steps": 4}),
    (
        2,
        # the stages are named: left open, the planner may choose fewer or more once less is kept
        {
            "layout": "merged",
            "stages": {"merged": 2},
            "schedule": "replay",
            "kept_micro_batches": 5,
            "micro_batch_size": 4,
        },
        {"zero_optimization": {"stage": 1}},
    ),
    (
        4,
        {
            "layout": "chain",
            "stages": {"image": 1, "text": 1},
            "schedule": "batch_sync",
            "micro_batch_size": 12,
        },
        {},
    ),
    (2, {**FORK, "schedule": "per_micro_batch", "micro_batch_size": 12}, {}),
    (2, {"layout": "auto"}, {"train_micro_batch_size_per_gpu": 16}),
]


@pytest.mark.parametrize("instruction", ["ForwardPass", "ComputeLoss", "OptimizerStep"])
@pytest.mark.parametrize(("world_size", "branches", "keys"), RUNS)
def test_what_is_advised_is_taken_by_the_planner_and_needs_what_was_said(
    world_size, branches, keys, instruction
):
    """Line by line, as a user writes it into the JSON file, until nothing is left to advise."""
    config, ranks, changes = copy.deepcopy(MINIMAL) | keys | {"branches": branches}, world_size, 0
    while found := [
        remedy for remedy in advised(setup(ranks, **config), instruction) if remedy.keys
    ]:
        for remedy in found:
            before = setup(ranks, **config)
            with_keys(config, copy.deepcopy(remedy.keys))
            if '"gradient_accumulation_steps"' in remedy.words:
                del config["gradient_accumulation_steps"]
            ranks, changes = remedy.ranks or ranks, changes + 1
            after = setup(ranks, **config)
            kind = "state_bytes" if "of state" in remedy.predicted else "peak_bytes"
            assert size_in_words(after.fullest(kind)) in remedy.predicted
            assert after.fullest(kind) < before.fullest(kind), remedy.describe()
        assert changes < 40, "what is done already is advised again"
    assert changes >= (2 if instruction == "ForwardPass" else 1)


def words(found):
    return [remedy.describe() for remedy in found]


def test_advice_for_a_pass_names_the_present_and_the_next_value():
    """A layer has a million parameters, 16 bytes each, and keeps 1 MB per sample; with a checkpoint
    for each layer, 0.1 MB of its output."""
    of = setup(2, {**FORK, "schedule": "batch_sync"}, rank=1)
    assert words(advised(of)) == [
        '"branches": {"schedule": "replay"}: the activations of 1 micro-batch are held instead of 4, and each forward is computed twice; '
        "predicted 152.59 MiB at most",
        '"branches": {"micro_batch_size": {"image": 12, "text": 12}}: instead of 24; predicted 106.82 MiB at most',
        '"pipeline": {"activation_checkpoint_interval": 1}: each layer keeps its input only, and runs again in the backward; predicted 77.06 '
        "MiB at most",
        '"branches": {"stages": {"image": 1, "text": 2}} on 3 ranks: instead of 2, of which each holds fewer layers; predicted 51.12 MiB at '
        "most",
    ]


def test_with_one_micro_batch_replay_comes_with_smaller_ones():
    """By itself it would hold as much."""
    of = setup(1, {"layout": "merged", "schedule": "batch_sync", "micro_batch_size": 96})
    (first, *_) = advised(of)
    assert first.keys == {
        "branches": {"schedule": "replay", "micro_batch_size": 48}
    } and first.words.startswith("instead of 96")


def test_what_saves_nothing_is_not_advised():
    """Of four layers on three stages, one holds two, as with two stages."""
    of = setup(3, {**FORK, "stages": {"image": 2, "text": 1}})
    (only,) = advised(of, "OptimizerStep")
    assert only.keys == {"branches": {"stages": {"image": 4, "text": 1}}} and only.ranks == 5


def test_nothing_is_advised_that_is_in_use_already():
    on = {
        "pipeline": {"activation_checkpoint_interval": 2},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    branches = {
        **FORK,
        "schedule": "replay",
        "stages": {"image": 4, "text": 4},
        "micro_batch_size": 1,
    }
    of = setup(8, branches, **on)
    assert (
        advised(of) == []
        and advised(of, "OptimizerStep") == []
        and advised(of, None, BUILDING) == []
    )
    assert "What to change" not in message(
        "rank 0", of, Work(TRAINING, "ForwardPass", 0, 96, 1), SHORT
    )
    on["zero_optimization"]["offload_optimizer"]["device"] = "none"
    (only,) = advised(setup(8, branches, **on))
    assert only.keys == {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert only.predicted == f"; predicted {size_in_words(of.fullest('peak_bytes'))} at most"
    assert advised(setup(8, branches, on_gpu=False, **on), shortage=ON_HOST) == []


def test_what_holds_no_activations_is_not_advised_to_keep_fewer():
    """The optimizer's step, building, an evaluation; and a locked stage, which has no backward."""
    of = setup(
        3, {**FORK, "schedule": "batch_sync", "replicas": {"image": 2, "text": 1}}, on_gpu=False
    )
    sharding = '"zero_optimization": {"stage": 1}: the 2 replicas of image 0 share out the state of the optimizer; predicted 53.41 MiB of state'
    stages = '"branches": {"stages": {"image": 2, "text": 1}} on 5 ranks: instead of 3, of which each holds fewer layers; predicted 26.70 MiB of '
    for activity, instruction in (
        (TRAINING, "OptimizerStep"),
        (TRAINING, "ReduceGrads"),
        (TRAINING, None),
        (BUILDING, None),
    ):
        assert words(advised(of, instruction, activity, ON_HOST)) == [sharding, f"{stages}state"]
    smaller = '"branches": {"micro_batch_size": {"image": 6, "text": 24}}: instead of 12'
    assert words(advised(of, activity=EVALUATION, shortage=ON_HOST)) == [
        smaller,
        sharding,
        f"{stages}state",
    ]
    assert "--val-fraction" in words(advised(of, None, EVALUATION, ON_HOST))[0]
    locked = setup(2, {**FORK, "schedule": "batch_sync", "locked": {"image": True, "head": True}})
    assert [list(remedy.keys["branches"]) for remedy in advised(locked)] == [
        ["micro_batch_size"],
        ["stages"],
    ]


def test_the_loss_is_given_the_global_batch():
    found = words(advised(setup(2, {**FORK, "schedule": "replay"}), "ComputeLoss"))
    assert '"train_batch_size"' in found[-1] and not any(
        "micro_batch_size" in line or "checkpoint" in line for line in found
    )
    found = words(advised(setup(2, {**FORK, "schedule": "batch_sync"}), "ComputeLoss"))
    assert '"train_batch_size"' in found[-1] and '{"schedule": "replay"}' in found[0]


def test_memory_of_the_machine_is_not_that_of_the_gpu():
    of = setup(2, {**FORK, "schedule": "batch_sync"})
    for work in (Work(TRAINING, "LoadMicroBatch", 0, 8, 1), Work(SAVING)):
        (only,) = advice(of, work, ON_HOST)
        assert "--workers" in only.words
        assert "predicted" not in message("rank 0", of, work, ON_HOST)
    here = message(
        "rank 0", replace(of, on_gpu=False), Work(TRAINING, "LoadMicroBatch", 0, 8, 1), ON_HOST
    )
    assert '{"schedule": "replay"}' in here and "predicted for a training step" in here


def test_other_processes_and_pieces_that_are_too_small_come_first():
    of = setup(2, {**FORK, "schedule": "batch_sync"})
    shared = shortage_of(torch.OutOfMemoryError(SHARED))
    assert (
        words(advised(of, shortage=shared))[0]
        == "end the other processes on GPU 4: without them it would fit"
    )
    pieces = replace(SHORT, cached=2 * GIB)
    assert words(advised(of, shortage=pieces))[0].startswith(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    assert advised(of, shortage=replace(pieces, can_expand=False)) == advised(of)


@pytest.mark.parametrize(
    ("size", "share", "smaller"),
    [(32, 320, 16), (30, 60, 15), (25, 75, 5), (7, 14, 2), (1, 8, None)],
)
def test_the_next_smaller_micro_batch_divides_the_share(size, share, smaller):
    assert smaller_size(size, share) == smaller


def test_the_whole_message():
    of = setup(2, {**FORK, "schedule": "replay"}, rank=1)
    text = message(
        "rank 1 (text 0, replica 0)",
        of,
        Work(TRAINING, "ReplayPass", 3, 4, 12),
        shortage_of(torch.OutOfMemoryError(SEVERAL)),
    )
    assert text.splitlines() == [
        "rank 1 (text 0, replica 0) ran out of memory in ReplayPass of micro-batch 3 (of 4, "
        "counted from 0), in step 12",
        "asked for: 20.00 GiB; GPU 0 has 79.11 GiB, of which 1.25 GiB were free",
        "held: 76.00 GiB in tensors, 1.00 GiB that torch had reserved and did not use, 77.35 GiB "
        "by this process in all, 512.00 MiB by other processes",
        "predicted for a training step of text 0: at most 152.59 MiB in tensors (61.04 MiB "
        "weights, gradients and optimizer state, 91.55 MiB activations); an estimate, since the "
        "layout was given and nothing was measured",
        "What to change, each beside the lines above it; keys are of the JSON file "
        "(ds_configs/README.md):",
        *(f"  {line}" for line in words(advised(of))),
    ]
    assert '{"micro_batch_size": {"image": 12, "text": 12}}: instead of 24; predicted ' in text
    measured = replace(COSTS, machine=replace(COSTS.machine, measured=True))
    assert "from measured costs" in message(
        "", setup(2, FORK, costs=measured), Work(TRAINING), SHORT
    )


# -- allocations that fail


LAYER = "image.encoder.layers.encoder_layer_1"


def test_wherever_it_fails_the_message_says_where():
    """One rank with both towers, three micro-batches of 8."""
    (found,) = run_ranks(1, failures, Case("merged", {"merged": 1}, 1, 8), LAYER)
    where = {
        "building": "while building its stage",
        "forward": "in ForwardPass of micro-batch 1 (of 3, counted from 0), in step 1",
        "backward": "in BackwardPass of micro-batch 2 (of 3, counted from 0), in step 1",
        "second step": "in ForwardPass of micro-batch 0 (of 3, counted from 0), in step 2",
        "loading": "in LoadMicroBatch of micro-batch 0 (of 3, counted from 0), in step 1",
        "loss": "in ComputeLoss, in step 1",
        "averaging": "in ReduceGrads, in step 1",
        "step": "in OptimizerStep, in step 1",
        "evaluation": "in ForwardPass of micro-batch 0 (of 3, counted from 0), in the evaluation of held-out samples",
        "comparing": "comparing embeddings in the evaluation of held-out samples",
    }
    assert {name: text.splitlines()[0] for name, (text, _, _) in found.items()} == {
        name: f"rank 0 (merged 0, replica 0) ran out of memory {words}"
        for name, words in where.items()
    }
    for name, (text, repeats, cause) in found.items():
        assert (
            text.splitlines()[1].startswith("asked for: 1.00 EiB; this machine has ")
            and "held: " in text
        ), name
        assert repeats == (name != "second step")
        assert cause.startswith("RuntimeError: ") and f"tried to allocate {TOO_MUCH} bytes" in cause
        assert ('{"schedule": "replay"}' in text) == (
            name in ("forward", "backward", "second step", "loading", "loss")
        )


@pytest.mark.parametrize(
    ("case", "layer", "where", "at", "words"),
    [
        (
            Case(
                "fork",
                {"image": 1, "text": 1},
                {"image": 1, "text": 1},
                {"image": 8, "text": 6},
                schedule="replay",
            ),
            "text.encoder.layers.1",
            "forward",
            2,
            "rank 1 (text 0, replica 0) ran out of memory in EmbedPass of micro-batch 2 (of 4, "
            "counted from 0), in step 1",
        ),
        (
            Case(
                "fork",
                {"image": 1, "text": 1},
                {"image": 1, "text": 1},
                {"image": 8, "text": 6},
                schedule="replay",
            ),
            "text.encoder.layers.1",
            "forward",
            5,
            "rank 1 (text 0, replica 0) ran out of memory in ReplayPass of micro-batch 1 (of 4, "
            "counted from 0), in step 1",
        ),
        (
            Case("chain", {"image": 1, "text": 1}, 1, 8, checkpoint_interval=1),
            LAYER,
            "forward",  # again, in the backward
            3,
            "rank 0 (image 0, replica 0) ran out of memory in BackwardPass of micro-batch 0 (of "
            "3, counted from 0), in step 1",
        ),
    ],
    ids=["embed", "replay", "recomputed"],
)
def test_the_rank_that_fails_says_so(case, layer, where, at, words):
    with pytest.raises(RuntimeError) as caught:
        run_ranks(2, fail_in_a_layer, case, layer, where, at)
    said = str(caught.value)
    assert f"engine.processes.out_of_memory.OutOfMemory: {words}\n" in said
    assert (
        "DefaultCPUAllocator: can't allocate memory" in said
        and "The above exception was the direct cause" in said
    )
    assert ("activation_checkpoint_interval" in said) == (case.checkpoint_interval == 0)
    assert ('{"schedule": "replay"}' in said) == (case.schedule == "batch_sync")


def test_a_rank_that_fails_under_averaged_weights_does_not_wait_for_the_others():
    """To put its weights back takes a collective of the stage's replicas, of which one goes on."""
    case = Case("merged", {"merged": 1}, 2, 12, ema={"decay": 0.5})
    with pytest.raises(
        RuntimeError,
        match="(?s)rank 1 failed.*rank 1 .merged 0, replica 1. ran out of memory in ForwardPass.*in the evaluation",
    ):
        run_ranks(2, fail_while_averaged, case, LAYER)


def test_what_nothing_explains_is_one_message_too():
    with pytest.raises(MemoryError) as caught:
        np.empty(TOO_MUCH, np.uint8)
    error = in_words(caught.value, "rank 3")
    assert isinstance(error, OutOfMemory) and not error.repeats
    assert str(error).startswith("rank 3 ran out of memory\nasked for: 1.00 EiB; this machine has ")
    assert in_words(error, "rank 4") is error
