"""Out of memory, in one message: where it happened, what the allocator says, what the planner had
predicted, and what needs less memory and is not in use.

Nothing is planned here: the machine's memory may be the one that ran out.
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from engine.config.implied import offloads
from engine.schedule import recomputing_schedules
from engine.topology import Stage

if TYPE_CHECKING:
    from engine.batch import BranchBatch
    from engine.planning.planner import RunPlan

# What a rank may be doing when memory runs out.
TRAINING, EVALUATION = "training", "evaluation"
BUILDING, RESUMING = "building its stage", "reading a checkpoint"
SAVING = "copying its state to host memory for a checkpoint"
AVERAGING = "exchanging the weights and their average"
AFTER_BACKWARD = ("ReduceGrads", "OptimizerStep")  # the activations are gone
GPU, HOST = "GPU", "host"
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
SIZE = rf"([\d.]+) ({'|'.join(UNITS)})"
# Not all of them come as torch.OutOfMemoryError: only torch's own allocator raises that. The others
# are texts of CUDA's libraries and NCCL, and of c10/core/impl/alloc_cpu.cpp.
ON_A_GPU = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUDA ran out of memory|"
    r"CUBLAS_STATUS_ALLOC_FAILED|Cuda failure( \d+)? 'out of memory'"
)
ON_THE_HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|std::bad_alloc"
)


class OutOfMemory(RuntimeError):
    """An allocation failed. `repeats`: another start of the same run would meet it again."""

    def __init__(self, message: str, repeats: bool):
        super().__init__(message)
        self.repeats = repeats


@dataclass(frozen=True)
class Work:
    """What a rank was doing. `micro_batch` counts from 0, `step` from 1."""

    activity: str
    instruction: str | None = None
    micro_batch: int | None = None
    num_micro_batches: int = 0
    step: int = 0

    def describe(self) -> str:
        """Such as `in ForwardPass of micro-batch 3 (of 8, counted from 0), in step 12`."""
        if self.activity not in (TRAINING, EVALUATION):
            return f"while {self.activity}"
        training = self.activity == TRAINING
        where = f"step {self.step}" if training else "the evaluation of held-out samples"
        if self.instruction is None:
            between = (
                "before or after the instructions of" if training else "comparing embeddings in"
            )
            return f"{between} {where}"
        number = f" of micro-batch {self.micro_batch} (of {self.num_micro_batches}, counted from 0)"
        return f"in {self.instruction}{number if self.micro_batch is not None else ''}, in {where}"


@dataclass(frozen=True)
class RankSetup:
    """How a rank runs: the plan, DeepSpeed's part of the JSON file, and the stage of the rank.
    `on_gpu`: it computes on one."""

    plan: RunPlan
    config: Mapping[str, Any]
    stage: Stage
    on_gpu: bool

    @property
    def batch(self) -> BranchBatch:
        return self.plan.batches[next(iter(self.stage.layers))]


@contextlib.contextmanager
def explained(
    device: torch.device, words: Callable[[Exception], str], num_steps_done: int = 0
) -> Iterator[None]:
    """Raise an allocation that fails in here as OutOfMemory, with `words(error)` and what `device`
    or the machine has; any other error passes.

    What fails before this process has done a step (`num_steps_done`) fails again at another start,
    which does the same: unless other processes held the memory that it lacked. Later, another start
    may help: its allocator begins with whole blocks. It need not: a longer micro-batch comes again.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except (RuntimeError, MemoryError) as error:
        if whose_memory(error) is None:
            raise
        repeats = num_steps_done == 0 and not would_fit_alone(str(error))
        first, *others = words(error).splitlines()
        raise OutOfMemory(
            "\n".join([first, *allocator_lines(error, device), *others]), repeats
        ) from error


def in_words(error: BaseException, who: str) -> BaseException:
    """An allocation that failed where nothing `explained` it, while data are prepared for example;
    any other error as it is."""
    if isinstance(error, OutOfMemory) or whose_memory(error) is None:
        return error
    lines = allocator_lines(error, torch.device("cpu"))
    return OutOfMemory("\n".join([f"{who} ran out of memory", *lines]), repeats=False)


def message(who: str, setup: RankSetup, work: Work, error: Exception) -> str:
    """What is known of the run, in several lines. `who`: such as `rank 1 (text 0, replica 0)`."""
    lines = [f"{who} ran out of memory {work.describe()}"]
    if (whose_memory(error) == GPU) != setup.on_gpu or (work.activity == SAVING and setup.on_gpu):
        more = "fewer --workers, fewer ranks on this machine, or more memory to it"
        return "\n".join([*lines, f"The machine's memory ran out, not the GPU's: give {more}"])
    stage = setup.plan.predicted[setup.stage.stage_id]
    lines.append(
        f"predicted for a training step of {stage.name}: at most {size_in_words(stage.peak_bytes)} "
        f"in tensors ({size_in_words(stage.state_bytes)} weights, gradients and optimizer state, "
        f"{size_in_words(stage.activation_bytes)} activations), from "
        f"{'measured' if setup.plan.costs.machine.measured else 'estimated'} costs"
    )
    if unused := not_in_use(setup, work):
        lines.append(
            "Not in use and needs less memory (keys of the JSON file, ds_configs/README.md; python "
            "-m launch.tools.plan predicts their bytes):"
        )
    return "\n".join([*lines, *(f"  {each}" for each in unused)])


def message_of_profile(who: str, layer: str, size: int, error: Exception) -> str:
    """Where the layers are measured, before there is a plan. `size`: of the micro-batch."""
    return (
        f"{who} ran out of memory while measuring the layer {layer} with a micro-batch of {size}, "
        'for "layout": "auto"\nGive a smaller "micro_batch_size" in "branches", which alone is '
        'measured then, or a "layout" other than "auto": nothing is measured then'
    )


def not_in_use(setup: RankSetup, work: Work) -> list[str]:
    """What needs less memory where this `work` is done. What costs more comes later: time, then
    ranks."""
    if work.activity == EVALUATION and work.instruction is None:
        return [
            "fewer held-out samples, whose embeddings are compared (--val-fraction, --val-data)"
        ]
    is_pass = work.instruction is not None and work.instruction not in AFTER_BACKWARD
    found = []
    if is_pass and work.activity in (TRAINING, EVALUATION):
        found += _of_activations(setup, work.activity == TRAINING)
    zero = setup.config.get("zero_optimization", {})
    if not zero.get("stage", 0) and setup.stage.replicas > 1:
        found.append(
            f'"zero_optimization": {{"stage": 1}}: the {setup.stage.replicas} replicas of '
            f"{setup.stage.name} share out the state of the optimizer"
        )
    whole = all(stage.is_last for stage in setup.plan.graph.stages)  # branches
    if zero.get("stage", 0) == 1 and setup.stage.replicas > 1 and whole:
        found.append(
            f'"zero_optimization": {{"stage": 2}}: the {setup.stage.replicas} replicas of '
            f"{setup.stage.name} share out the gradients too, and send them in every backward"
        )
    shares = zero.get("stage", 0) == 2 and setup.stage.replicas > 1
    scaled = setup.config.get("fp16", {}).get("enabled", False)
    if shares and not scaled and not offloads(setup.config):
        found.append(
            f'"zero_optimization": {{"stage": 3}}: the {setup.stage.replicas} replicas of '
            f"{setup.stage.name} share out the weights too, and gather each layer before it runs"
        )
    if setup.on_gpu and zero.get("stage", 0) in (1, 2) and not offloads(setup.config):
        found.append(
            '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}: the state of the '
            "optimizer and its step move to the CPU"
        )
    # ZeRO-2 and ZeRO-3 refuse more stages
    if zero.get("stage", 0) < 2 and any(len(own) > 1 for own in setup.stage.layers.values()):
        found.append('more "stages", on more ranks, of which each holds fewer layers')
    if work.instruction == "ComputeLoss" and not setup.plan.schedule_type.loss_per_micro_batch:
        found.append(
            'a smaller "train_batch_size", whose embeddings the loss holds; it also changes what is '
            "trained"
        )
    return found


def _of_activations(setup: RankSetup, training: bool) -> list[str]:
    found, schedule, batch = [], setup.plan.schedule_type, setup.batch
    with_backward = training and setup.stage.has_backward
    if with_backward and not schedule.recomputes and not schedule.loss_per_micro_batch:
        # by itself it would hold as much where there is one micro-batch
        smaller = ' and a smaller "micro_batch_size"' if batch.num_micro_batches == 1 else ""
        found.append(
            f'"branches": {{"schedule": "{recomputing_schedules()[0]}"}}{smaller}: few micro-batches '
            "hold their activations at a time, and each forward is computed twice"
        )
    if with_backward and schedule.recomputes and batch.num_kept:
        found.append(f'fewer "kept_micro_batches" than {batch.num_kept}')
    if batch.micro_batch_size > 1:
        fewer = ", which also leaves each sample fewer negatives"
        found.append(
            f'a smaller "micro_batch_size" than {batch.micro_batch_size}'
            f"{fewer if training and schedule.loss_per_micro_batch else ''}"
        )
    interval = setup.config.get("pipeline", {}).get("activation_checkpoint_interval", 0)
    if with_backward and not interval:
        found.append(
            '"pipeline": {"activation_checkpoint_interval": 1}: each layer keeps its input only, and '
            "runs again in the backward"
        )
    return found


# -- what allocators say


def whose_memory(error: BaseException) -> str | None:
    """GPU or HOST, if `error` is an allocation that failed; None for any other error."""
    text = str(error)
    is_runtime = isinstance(error, RuntimeError)
    if isinstance(error, torch.OutOfMemoryError) or (is_runtime and ON_A_GPU.search(text)):
        return GPU
    if isinstance(error, MemoryError) or (is_runtime and ON_THE_HOST.search(text)):
        return HOST
    return None


def allocator_lines(error: BaseException, device: torch.device) -> list[str]:
    """The error's own text, and where that does not say it what `device` or the machine has now."""
    text = str(error).partition("\nException raised from")[0]  # a stack of C++
    lines = [f"the allocator says: {' '.join(text.split()) or type(error).__name__}"]
    # a message that knows less is better than another error
    with contextlib.suppress(RuntimeError, ValueError, OSError, psutil.Error):
        if whose_memory(error) == HOST:
            lines.append(_held_on_host())
        elif device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
            accelerator = get_accelerator()
            free, total = accelerator.available_memory(), accelerator.total_memory()
            held = size_in_words(accelerator.memory_allocated())
            lines.append(
                f"now: {device} has {size_in_words(total)}, of which {size_in_words(free)} are "
                f"free; {held} in tensors of this process"
            )
    return lines


def _held_on_host() -> str:
    used, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = f", and may have {size_in_words(limit)} of addresses (ulimit -v)"
    return (
        f"now: this machine has {size_in_words(machine.total)}, of which "
        f"{size_in_words(machine.available)} are free; this process holds {size_in_words(used.rss)}"
        f"{limited if limit != resource.RLIM_INFINITY else ''}"
    )


def would_fit_alone(text: str) -> bool:
    """Do other processes hold the memory that was lacking on a GPU, as torch tells it? False where
    it does not tell."""
    asked = _sizes(text, r"Tried to allocate")
    total = _sizes(text, r"total capac\w+ of")  # "capacty" in some versions
    own = _sizes(text, r"this process has")
    # In a container the numbers of processes are not those that the driver knows, and this process
    # is named like the others. It is one that holds much.
    own = own or _sizes(text, r"Process \d+ has")
    return bool(asked and total and own) and asked[0] + max(own) <= total[0]


def _sizes(text: str, before: str) -> list[float]:
    found = re.finditer(rf"{before} {SIZE}", text)
    return [float(each[1]) * 1024 ** UNITS.index(each[2]) for each in found]


def size_in_words(num_bytes: float) -> str:
    """Such as `20.00 GiB`."""
    power = max((n for n in range(len(UNITS)) if 1024**n <= num_bytes), default=0)
    return f"{num_bytes / 1024**power:.{2 if power else 0}f} {UNITS[power]}"
