"""The instructions of a stage, and how many it has of each kind. Plain Python, without costs.

Both are remembered: of the thousands of candidates that a planner compares, most stages are alike.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from engine.batch import BranchBatch
from engine.schedule import (
    BackwardPass,
    ComputeLoss,
    EmbedPass,
    ForwardPass,
    OptimizerStep,
    PipeInstruction,
    ReduceGrads,
    ReplayPass,
    SendActivation,
    SendGrad,
    StageSchedule,
)
from engine.topology import Stage


class Counts(NamedTuple):
    """What a stage's list holds, and how many micro-batches have activations: at most, and when the
    loss is computed."""

    forwards: int
    replays: int
    backwards: int
    losses: int
    reductions: int
    steps: int
    activations_sent: int
    gradients_sent: int
    in_flight: int
    in_flight_at_loss: int


def micro_batch_of(instruction: PipeInstruction) -> int | None:
    return instruction.kwargs.get("buffer_id")


@lru_cache(maxsize=512)  # long lists take some 0.1 MB each
def instructions_of(
    kind: Stage, num_micro_batches: int, num_kept: int, schedule: type[StageSchedule]
) -> tuple[PipeInstruction, ...]:
    """The list of a stage of this `kind`. Raises ValueError where its losses are not those that the
    schedule says it has."""
    groups = schedule(kind, num_micro_batches, num_kept)
    found = tuple(instruction for group in groups for instruction in group)
    losses = {micro_batch_of(i) is not None for i in found if type(i) is ComputeLoss}
    if losses - {schedule.loss_per_micro_batch}:
        raise ValueError(
            f"{schedule.__name__}: its ComputeLoss has {'a' if True in losses else 'no'} "
            f"buffer_id, and its loss_per_micro_batch is {schedule.loss_per_micro_batch}; a loss "
            "per micro-batch has one, a loss over the global batch has none"
        )
    return found


@lru_cache(maxsize=4096)
def counted(
    kind: Stage, num_micro_batches: int, num_kept: int, schedule: type[StageSchedule]
) -> Counts:
    """The counts of `instructions_of` the same."""
    kinds = [type(i) for i in instructions_of(kind, num_micro_batches, num_kept, schedule)]
    numbers = Counter(kinds)
    held = peak = at_loss = 0
    for each in kinds:
        if each is ForwardPass or each is ReplayPass:
            held += 1
            peak = max(peak, held)
        elif each is BackwardPass:
            held -= 1
        elif each is ComputeLoss:
            at_loss = max(at_loss, held)
    return Counts(
        forwards=numbers[ForwardPass] + numbers[EmbedPass],
        replays=numbers[ReplayPass],
        backwards=numbers[BackwardPass],
        losses=numbers[ComputeLoss],
        reductions=numbers[ReduceGrads],
        steps=numbers[OptimizerStep],
        activations_sent=numbers[SendActivation],
        gradients_sent=numbers[SendGrad],
        in_flight=peak,
        in_flight_at_loss=at_loss,
    )


def counts_of(stage: Stage, batch: BranchBatch, schedule: type[StageSchedule]) -> Counts:
    """The counts of a stage, without writing down long lists: beyond what fills the pipeline each
    micro-batch adds the same."""
    number, kept = batch.num_micro_batches, batch.num_kept
    filled = max(stage.num_downstream, kept) + 3
    if number <= filled:
        return counted(stage.kind, number, kept, schedule)
    last, before = (counted(stage.kind, n, kept, schedule) for n in (filled, filled - 1))
    return Counts(
        *(end + (number - filled) * (end - start) for end, start in zip(last, before, strict=True))
    )
