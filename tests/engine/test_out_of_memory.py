"""Memory that runs out: which errors say so, what is said of a run, and the one message, from
allocations that fail for real."""

import numpy as np
import pytest
import torch
from cost_models import proportional
from memory_cases import TOO_MUCH, allocate_too_much, fail_in_a_layer, fail_while_averaged, failures
from ranks import run_ranks
from split_training import Case

from engine.config.reading import check_config
from engine.planning.planner import plan_run
from engine.processes.out_of_memory import (
    BUILDING,
    EVALUATION,
    GPU,
    HOST,
    SAVING,
    TRAINING,
    OutOfMemory,
    RankSetup,
    Work,
    explained,
    in_words,
    message,
    not_in_use,
    size_in_words,
    whose_memory,
    would_fit_alone,
)

CPU = torch.device("cpu")
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


def test_what_libraries_of_cuda_say_is_seen_and_kept():
    assert whose_memory(torch.OutOfMemoryError(ALONE)) == GPU
    for text in (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 "
        "'out of memory'",
    ):
        assert whose_memory(RuntimeError(text)) == GPU, text
        error = RuntimeError(f"{text}\nException raised from f at a.cpp:1 (frame #0: …)")
        with pytest.raises(OutOfMemory) as caught, explained(CPU, lambda error: "here"):
            raise error
        assert str(caught.value) == f"here\nthe allocator says: {' '.join(text.split())}"


def test_an_allocation_that_fails_on_the_host_is_seen():
    arrays = (lambda: np.empty(TOO_MUCH, np.uint8), lambda: bytearray(TOO_MUCH))
    for allocate in (allocate_too_much, *arrays):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert whose_memory(caught.value) == HOST
        error = in_words(caught.value, "rank 3")
        assert isinstance(error, OutOfMemory) and in_words(error, "rank 4") is error
        assert not error.repeats
        first, says, now = str(error).splitlines()
        assert first == "rank 3 ran out of memory" and says.startswith("the allocator says: ")
        assert now.startswith("now: this machine has ") and "this process holds " in now


def test_other_errors_are_left_alone():
    killed = "the loader lost a process. Most often the machine ran out of memory and the system"
    for error in (
        RuntimeError("The size of tensor a (4) must match the size of tensor b (3)"),
        RuntimeError(f"{killed} killed it"),
        ValueError("CUDA out of memory"),
    ):
        assert whose_memory(error) is None and in_words(error, "rank 0") is error
        with pytest.raises(type(error)) as caught, explained(CPU, lambda error: "no"):
            raise error
        assert caught.value is error


def test_sizes_in_words():
    sizes = (0, 1023, 2**10, 1.5 * 2**30, 2**60)
    words = ["0 bytes", "1023 bytes", "1.00 KiB", "1.50 GiB", "1.00 EiB"]
    assert list(map(size_in_words, sizes)) == words


def test_only_what_would_fail_again_is_not_started_again():
    """In the first step of a process another start does the same; unless another process held the
    memory, as in `SHARED`."""
    once = [(text, 0, text != SHARED) for text in (ALONE, SHARED, CONTAINER, SEVERAL, LIMITED)]
    for text, num_steps_done, repeats in (*once, (ALONE, 1, False)):
        explaining = explained(CPU, lambda error: "rank 0", num_steps_done)
        with pytest.raises(OutOfMemory) as caught, explaining:
            raise torch.OutOfMemoryError(text)
        assert caught.value.repeats == repeats and str(caught.value.__cause__) == text
        assert str(caught.value) == f"rank 0\nthe allocator says: {' '.join(text.split())}"
        assert would_fit_alone(text) == (text == SHARED)


# -- what is said of a run


MINIMAL = {"train_batch_size": 96, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}
COSTS = proportional({"image": [1.0] * 4, "text": [1.0] * 4})
SHORT, ON_HOST = torch.OutOfMemoryError(ALONE), MemoryError()
SIZES = {"image": 12, "text": 24}
FORK = {"layout": "fork", "stages": {"image": 1, "text": 1}, "micro_batch_size": SIZES}
FORK["schedule"] = "batch_sync"
PASS = Work(TRAINING, "ForwardPass", 0, 4, 1)
KEYS = (
    *('"schedule": "replay"', '"kept_micro_batches"', '"micro_batch_size"'),
    *('"activation_checkpoint_interval"', '"zero_optimization": {"stage": 1}'),
    '"zero_optimization": {"stage": 2}',
    *("offload_optimizer", '"stages"', '"train_batch_size"', "--val-fraction"),
)
REPLAY, KEPT, SIZE, CHECKPOINTS, ZERO, ZERO_2, OFFLOAD, STAGES, BATCH, HELD_OUT = KEYS


def setup(world_size, branches, rank=0, costs=COSTS, on_gpu=True, **keys):
    config, block = check_config(MINIMAL | keys | {"branches": branches}, tuple(costs.layers))
    plan = plan_run(config, block, world_size, costs)
    return RankSetup(plan, config, plan.graph.stage_of(rank), on_gpu)


def named(of, work=PASS):
    """Keys, in the order in which they are given."""
    return [key for line in not_in_use(of, work) for key in KEYS if key in line]


def test_for_a_pass_all_that_is_not_in_use_is_named():
    assert named(setup(2, FORK)) == [REPLAY, SIZE, CHECKPOINTS, STAGES]
    with_replicas = {**FORK, "replicas": {"image": 2, "text": 1}}
    assert named(setup(3, with_replicas)) == [REPLAY, SIZE, CHECKPOINTS, ZERO, STAGES]
    zero = {"zero_optimization": {"stage": 1}}
    assert named(setup(3, with_replicas, **zero))[-3:] == [ZERO_2, OFFLOAD, STAGES]
    more_stages = {**with_replicas, "stages": {"image": 1, "text": 2}}
    assert named(setup(4, more_stages, **zero))[-2:] == [OFFLOAD, STAGES]
    two = {"zero_optimization": {"stage": 2}}
    assert named(setup(3, with_replicas, **two)) == [REPLAY, SIZE, CHECKPOINTS, OFFLOAD]
    assert OFFLOAD not in named(setup(3, with_replicas, on_gpu=False, **zero))
    kept = {**FORK, "schedule": "replay", "kept_micro_batches": {"image": 3, "text": 1}}
    assert named(setup(2, kept)) == [KEPT, SIZE, CHECKPOINTS, STAGES]
    (fewer, *_) = not_in_use(setup(2, kept), PASS)
    assert fewer.endswith("than 3")


def test_nothing_is_named_that_is_in_use_already():
    on = {
        "pipeline": {"activation_checkpoint_interval": 2},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    stages = {"image": 4, "text": 4}
    branches = {**FORK, "schedule": "replay", "stages": stages, "micro_batch_size": 1}
    of = setup(8, branches, **on)
    assert named(of) == [] and "Not in use" not in message("rank 0", of, PASS, SHORT)


def test_what_holds_no_activations_is_not_told_to_keep_fewer():
    """The optimizer's step, building, an evaluation; and a locked stage, which has no backward."""
    of = setup(3, {**FORK, "replicas": {"image": 2, "text": 1}})
    for work in (Work(TRAINING, "OptimizerStep"), Work(TRAINING), Work(BUILDING)):
        assert named(of, work) == [ZERO, STAGES]
    assert named(of, Work(EVALUATION, "ForwardPass")) == [SIZE, ZERO, STAGES]
    assert named(of, Work(EVALUATION)) == [HELD_OUT]
    assert named(of, Work(TRAINING, "ComputeLoss"))[-1] == BATCH
    locked = setup(2, {**FORK, "locked": {"image": True, "head": True}})
    assert named(locked) == [SIZE, STAGES]


def test_memory_of_the_machine_is_not_that_of_the_gpu():
    of = setup(2, FORK)
    for work, error in ((PASS, ON_HOST), (Work(SAVING), SHORT)):
        said = message("rank 0", of, work, error)
        assert "--workers" in said and "predicted" not in said
    here = message("rank 0", setup(2, FORK, on_gpu=False), PASS, ON_HOST)
    assert REPLAY in here and "predicted for a training step" in here


def test_the_whole_message_of_a_run_of_three_branches():
    """Its costs say which branches are compared."""
    pairs = (("image", "text"), ("audio", "text"))
    layers = dict.fromkeys(("image", "text", "audio"), [1.0] * 4)
    costs = proportional(layers, compared=pairs, measured=True)
    of = setup(1, {"layout": "merged", "stages": {"merged": 1}, "micro_batch_size": 48}, 0, costs)
    work = Work(TRAINING, "ForwardPass", 1, 2, 12)
    first, predicted, head, *lines = message("rank 0 (merged 0)", of, work, SHORT).splitlines()
    assert first.endswith("in ForwardPass of micro-batch 1 (of 2, counted from 0), in step 12")
    peak = size_in_words(of.plan.predicted[0].peak_bytes)
    assert predicted.startswith(f"predicted for a training step of merged 0: at most {peak} in ")
    assert predicted.endswith("from measured costs") and "JSON file" in head
    assert 3 <= len(lines) and all(line.startswith("  ") for line in lines)


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
    assert found.keys() == where.keys()
    for name, (text, repeats, cause) in found.items():
        first, says, now = text.splitlines()[:3]
        assert first == f"rank 0 (merged 0, replica 0) ran out of memory {where[name]}"
        assert f"tried to allocate {TOO_MUCH} bytes" in says and "this machine has" in now, name
        assert repeats == (name != "second step")
        assert cause.startswith("RuntimeError: ") and f"tried to allocate {TOO_MUCH} bytes" in cause
        holds = ("forward", "backward", "second step", "loading", "loss")
        assert (REPLAY in text) == (name in holds)


def test_the_rank_that_fails_says_so():
    one = {"image": 1, "text": 1}
    fork = Case("fork", one, one, {"image": 8, "text": 6}, schedule="replay")
    line = Case("merged", {"merged": 2}, 1, 8, checkpoint_interval=1)
    text, end = "text.encoder.layers.1", "counted from 0), in step 1"
    for case, layer, at, words in (
        (
            fork,
            text,
            2,
            "1 (text 0, replica 0) ran out of memory in EmbedPass of micro-batch 2 (of 4",
        ),
        (
            fork,
            text,
            5,
            "1 (text 0, replica 0) ran out of memory in ReplayPass of micro-batch 1 (of 4",
        ),
        # a forward again, in the backward
        (
            line,
            LAYER,
            3,
            "0 (merged 0, replica 0) ran out of memory in BackwardPass of micro-batch 0 (of 3",
        ),
    ):
        with pytest.raises(RuntimeError) as caught:
            run_ranks(2, fail_in_a_layer, case, layer, "forward", at)
        said = str(caught.value)
        assert f"engine.processes.out_of_memory.OutOfMemory: rank {words}, {end}\n" in said
        assert "DefaultCPUAllocator: can't allocate memory" in said
        assert "The above exception was the direct cause" in said
        assert ("activation_checkpoint_interval" in said) == (case.checkpoint_interval == 0)
        assert REPLAY not in said or case.schedule == "batch_sync"


def test_a_rank_that_fails_under_averaged_weights_does_not_wait_for_the_others():
    """To put its weights back takes a collective of the stage's replicas, of which one goes on."""
    case = Case("merged", {"merged": 1}, 2, 12, ema={"decay": 0.5})
    words = "(?s)rank 1 failed.*ran out of memory in ForwardPass.*in the evaluation"
    with pytest.raises(RuntimeError, match=words):
        run_ranks(2, fail_while_averaged, case, LAYER)
