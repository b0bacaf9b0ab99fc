"""What each rank does in the tests of memory that runs out; a module of its own, because ranks
import it by name.

The allocations fail for real: no machine has 2**60 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from split_training import Case, make_engine, micro_batches_of_rank, with_loss
from torch import Tensor, nn

from engine.processes.out_of_memory import OutOfMemory
from models.losses import InfoNCE

TOO_MUCH = 2**60


def allocate_too_much(*_: Any, **__: Any) -> Tensor:
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


class TooMuch:
    """Does what it wraps until its call number `at`, counted from 0, which allocates too much."""

    def __init__(self, wrapped: Any, at: int = 0):
        self.wrapped, self.left = wrapped, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return allocate_too_much() if self.left < 0 else self.wrapped(*args, **kwargs)


@dataclass(frozen=True)
class HungryLoss(InfoNCE):
    def whole(self, *_: Any) -> Any:
        return allocate_too_much()

    statistics = whole


def hungry_engine(case: Case, layer: str, where: str, at: int = 0):
    """An engine whose layer `layer` allocates too much where it is built, or in its `forward` or
    `backward` number `at`, from 0."""
    passes: list[None] = []

    def before_forward(*_: Any) -> None:
        passes.append(None)
        if len(passes) == at + 1 and where == "forward":
            allocate_too_much()

    def after_forward(_: nn.Module, __: Any, outputs: dict[str, Tensor]) -> None:
        if len(passes) == at + 1 and where == "backward":
            next(t for t in outputs.values() if t.requires_grad).register_hook(allocate_too_much)

    def build_layer(spec: Any) -> nn.Module:
        built = spec.build(case.seed)
        if spec.name == layer and where == "building":
            allocate_too_much()
        if spec.name == layer:
            built.register_forward_pre_hook(before_forward)
            built.register_forward_hook(after_forward)
        return built

    return make_engine(case, build_layer)


def fail_in_a_layer(case: Case, layer: str, where: str, at: int = 0, steps: int = 1) -> None:
    """On the rank that has this layer: OutOfMemory."""
    engine, _, image_size = hungry_engine(case, layer, where, at)
    for step in range(steps):
        engine.train_batch(micro_batches_of_rank(case, engine, step, image_size))


def fail_while_averaged(case: Case, layer: str) -> None:
    """A step, then an evaluation of the averaged weights in which rank 1 fails, after one forward
    in the step."""
    rank = dist.get_rank()
    engine, _, image_size = hungry_engine(case, layer, "forward" if rank == 1 else "never", at=1)
    engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))
    with engine.averaged_weights():
        engine.evaluate(
            micro_batches_of_rank(case, engine, 1, image_size),
            1,
            case.global_batch_size,
            lambda sides, branch, _: sides[branch].embeds.sum()[None],
        )


def failures(case: Case, layer: str) -> dict[str, tuple[str, bool, str]]:
    """One rank: what it says, whether another start would meet it again, and what it was raised
    from, by where the allocation failed."""
    engine, _, image_size = make_engine(case)
    engines = {where: make_engine(case)[0] for where in ("loss", "averaging", "step", "comparing")}
    engines["loss"].last_stage_loss.objective = with_loss(engines["loss"].objective, HungryLoss())
    engines["averaging"].backend.reduce_gradients = TooMuch(None)
    engines["step"].backend.optimizer.register_step_pre_hook(allocate_too_much)

    def train(engine: Any, steps: int = 1) -> None:
        for step in range(steps):
            engine.train_batch(micro_batches_of_rank(case, engine, step, image_size))

    def evaluate(engine: Any, measure: Any) -> None:
        engine.evaluate(
            micro_batches_of_rank(case, engine, 0, image_size),
            engine.batches["image"].num_micro_batches,
            case.global_batch_size,
            measure,
        )

    number = engine.batches["image"].num_micro_batches
    calls = {
        "building": lambda: hungry_engine(case, layer, "building"),
        "forward": lambda: train(hungry_engine(case, layer, "forward", 1)[0]),
        "backward": lambda: train(hungry_engine(case, layer, "backward", 2)[0]),
        "second step": lambda: train(hungry_engine(case, layer, "forward", number)[0], 2),
        "loading": lambda: engine.train_batch(map(allocate_too_much, [0])),
        "evaluation": lambda: evaluate(
            hungry_engine(case, layer, "forward")[0],
            lambda sides, branch, _: sides[branch].embeds.sum()[None],
        ),
        "comparing": lambda: evaluate(engines["comparing"], allocate_too_much),
        "loss": lambda: train(engines["loss"]),
        "averaging": lambda: train(engines["averaging"]),
        "step": lambda: train(engines["step"]),
    }
    return {where: _error_of(call) for where, call in calls.items()}


def _error_of(call: Any) -> tuple[str, bool, str]:
    try:
        call()
    except OutOfMemory as error:
        return str(error), error.repeats, f"{type(error.__cause__).__name__}: {error.__cause__}"
    raise AssertionError("nothing failed")
