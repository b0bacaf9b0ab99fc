"""What each stage does, in which order: lists of instructions, made without a process group.

The instructions are DeepSpeed's own and four of ours; `buffer_id` is the number of the micro-batch.
The executor runs them, the simulator times them, tests read them. Two stages, four micro-batches:

`batch_sync`: all forwards, one loss over the global batch, all backwards. Keeps the activations of
all micro-batches.

    stage 0   F0 F1 F2 F3 ............... B0 B1 B2 B3  R S
    stage 1      F0 F1 F2 F3  L  B0 B1 B2 B3           R S      F forward, L loss, B backward, R reduce, S optimizer step

`replay`: forwards that keep nothing, one loss, then forwards again, each followed by a backward as
soon as it can be. Keeps the activations of `num_downstream` + 1 micro-batches at most.

    stage 0   E0 E1 E2 E3    F0 F1 .. B0 F2 B1 F3 B2 .. B3  R S
    stage 1      E0 E1 E2 E3  L F0 B0 F1 B1 F2 B2 F3 B3     R S      E forward without gradient, for the embeddings only

Where memory is left, the first `num_kept` micro-batches keep their activations and need no second
forward. Here 2 do:

    stage 0   F0 F1 E2 E3    .. B0 F2 B1 F3 B2 .. B3  R S
    stage 1      F0 F1 E2 E3  L B0 B1 F2 B2 F3 B3     R S

`per_micro_batch`: a loss for each micro-batch by itself. Another objective, with fewer negatives;
for ablation only.

    stage 0   F0 F1 .... B0 F2 .... B1 F3 .. B2 .. B3  R S
    stage 1      F0 L0 B0 F1 L1 B1 F2 L2 B2 F3 L3 B3  R S

A schedule says what it is in the class attributes of `StageSchedule`. The configuration, the
planner, the simulator, the executor and the advice about memory read these and compare no names, so
a new schedule is a class that is added to `SCHEDULES` (`examples/schedule.py`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)

from engine.topology import Stage


class EmbedPass(BufferOpInstruction):
    """A forward without gradient. Its inputs that were loaded here, or came from a stage that will
    not send them again, stay in host memory for the second forward; of locked layers at the front,
    what leaves them stays instead."""


class ReloadMicroBatch(BufferOpInstruction):
    """Bring back what was kept of the micro-batch's EmbedPass: what was loaded, or what locked
    layers made of it."""


class ReplayPass(BufferOpInstruction):
    """The forward again, the same function of the same input, now with gradient."""


class ComputeLoss(PipeInstruction):
    """On last stages: exchange the embeddings of the global batch, compute the loss and the
    gradients of the own embeddings.

    With a `buffer_id` the batch is one micro-batch of each replica, and the loss counts
    1/num_micro_batches.
    """


_RECEIVES = (RecvActivation, RecvGrad)
PASSES = (ForwardPass, EmbedPass, ReplayPass, BackwardPass)


def receives_to_post(program: Sequence[PipeInstruction]) -> list[list[PipeInstruction]]:
    """For each instruction the receives that are made ready just before it.

    That is before the pass in front of the receive, so that its message travels while this rank
    computes. Those of one channel are in the order in which they are waited for.
    """
    posts: list[list[PipeInstruction]] = [[] for _ in program]
    last_pass = 0
    for place, instruction in enumerate(program):
        if isinstance(instruction, _RECEIVES):
            posts[last_pass].append(instruction)
        elif isinstance(instruction, PASSES):
            last_pass = place
    return posts


# PipeSchedule is an ABC already; mypy, which does not read DeepSpeed, has to see it here
class StageSchedule(PipeSchedule, ABC):
    """The instructions of one stage for one global batch of `num_micro_batches` micro-batches.

    A subclass writes `steps`, which yields lists of instructions. `num_kept`: how many
    micro-batches, the first ones, keep their activations; 0 for a schedule that does not recompute.
    The attributes below are for a loss over the global batch, with all activations kept, unless a
    subclass sets them.
    """

    # What it does, in a few words: for help texts and messages.
    description: ClassVar[str] = ""
    # Is the loss computed for each micro-batch by itself? Then each ComputeLoss has the `buffer_id`
    # of its micro-batch. Else there is one ComputeLoss, without, over the global batch.
    loss_per_micro_batch: ClassVar[bool] = False
    # Do only the first `num_kept` micro-batches keep their activations until their backward, and
    # the others run forward twice? Then `kept_micro_batches` may be given. Else every micro-batch
    # keeps them.
    recomputes: ClassVar[bool] = False
    # May "schedule": "auto" choose it? Never where there is a loss per micro-batch: "auto" does not
    # change what is trained.
    chosen_by_auto: ClassVar[bool] = False

    def __init__(self, stage: Stage, num_micro_batches: int, num_kept: int = 0):
        super().__init__(micro_batches=num_micro_batches, stages=1, stage_id=stage.stage_id)
        self.own_stage, self.num_kept = stage, num_kept

    def forward(
        self,
        m: int,
        run: Callable[[int], PipeInstruction] = ForwardPass,
        load: Callable[[int], PipeInstruction] = LoadMicroBatch,
    ) -> list[PipeInstruction]:
        """Take in micro-batch m, run it, hand it on."""
        stage = self.own_stage
        return [
            load(m) if stage.previous is None else RecvActivation(m),
            run(m),
            *([SendActivation(m)] if stage.next is not None else []),
        ]

    def embed(self, m: int) -> list[PipeInstruction]:
        """`forward` without gradient. Kept are the output of a last stage and, in host memory, what
        `again` needs."""
        return self.forward(
            m, EmbedPass, lambda m: LoadMicroBatch(m, keep=self.own_stage.has_backward)
        )

    def again(self, m: int) -> list[PipeInstruction]:
        """The second forward of micro-batch m, with gradient, after `embed`.

        A locked stage has none: the stage behind it has kept what it sent.
        """
        stage = self.own_stage
        if not stage.has_backward:
            return []
        comes_again = stage.previous is not None and stage.sends_gradients
        return [
            RecvActivation(m) if comes_again else ReloadMicroBatch(m),
            ReplayPass(m),
            *([SendActivation(m)] if stage.next is not None else []),
        ]

    def backward(self, m: int) -> list[PipeInstruction]:
        """Take in the gradient of what was handed on, differentiate micro-batch m, hand its
        gradient back."""
        stage = self.own_stage
        if not stage.has_backward:
            return []
        return [
            *([RecvGrad(m)] if stage.next is not None else []),
            BackwardPass(m),
            *([SendGrad(m)] if stage.previous is not None and stage.sends_gradients else []),
        ]

    def one_forward_one_backward(
        self, forward, num_done: int = 0
    ) -> Iterator[list[PipeInstruction]]:
        """Fill the pipeline, then a backward after each `forward(m)`, then empty it
        (PipeDream-Flush, Narayanan et al. 2021).

        A stage with d stages behind it runs d forwards ahead, so it holds the activations of at
        most d + 1 micro-batches. The first `num_done` micro-batches have had their forward: their
        places in the order stay empty.
        """
        ahead = min(self.own_stage.num_downstream, self.micro_batches)
        for m in range(num_done, ahead):
            yield forward(m)
        for m in range(self.micro_batches):
            if num_done <= m + ahead < self.micro_batches:
                yield forward(m + ahead)
            yield self.backward(m)


class BatchSync(StageSchedule):
    """All forwards, one loss, all backwards."""

    description = "all forwards, one loss, all backwards"
    chosen_by_auto = True

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            yield self.forward(m)
        if self.own_stage.is_last:
            yield [ComputeLoss()]
        for m in range(self.micro_batches):
            yield self.backward(m)
        yield [ReduceGrads(), OptimizerStep()]


class Replay(StageSchedule):
    """Forwards for the embeddings, one loss, then one forward, one backward with the embeddings'
    gradients (Gao et al. 2021, GradCache)."""

    description = (
        "forwards for the embeddings, one loss, then each micro-batch again, forward and backward"
    )
    recomputes = True
    chosen_by_auto = True

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.num_kept):
            yield self.forward(m)
        for m in range(self.num_kept, self.micro_batches):
            yield self.embed(m)
        if self.own_stage.is_last:
            yield [ComputeLoss()]
        if self.own_stage.has_backward:
            yield from self.one_forward_one_backward(self.again, num_done=self.num_kept)
        yield [ReduceGrads(), OptimizerStep()]


class PerMicroBatch(StageSchedule):
    """One forward, one loss, one backward: what DeepSpeed's own schedule computes. Not the loss
    over the global batch."""

    description = "a loss per micro-batch, with fewer negatives"
    loss_per_micro_batch = True

    def steps(self) -> Iterator[list[PipeInstruction]]:
        is_last = self.own_stage.is_last
        yield from self.one_forward_one_backward(
            lambda m: [*self.forward(m), *([ComputeLoss(buffer_id=m)] if is_last else [])]
        )
        yield [ReduceGrads(), OptimizerStep()]


class ForwardOnly(StageSchedule):
    """Embeddings of a held-out set: forwards, nothing else."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            yield self.forward(m)


# By the name that "schedule" in the JSON file takes. A user's module adds its own to it.
SCHEDULES: dict[str, type[StageSchedule]] = {
    "batch_sync": BatchSync,
    "replay": Replay,
    "per_micro_batch": PerMicroBatch,
}
# What "schedule" took once, and why it is not there.
REMOVED_SCHEDULES = {
    "zero_bubble": "backwards in two parts take about as much longer as stages wait less",
}


def exact_schedules() -> list[str]:
    """The names of those whose loss goes over the global batch."""
    return [name for name, own in SCHEDULES.items() if not own.loss_per_micro_batch]


def recomputing_schedules() -> list[str]:
    """The names of those that are exact and recompute; the first is advised where memory runs
    out."""
    return [name for name in exact_schedules() if SCHEDULES[name].recomputes]
