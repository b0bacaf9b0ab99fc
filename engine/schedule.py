"""What each stage does, in which order: lists of instructions, made without a process group.

The instructions are DeepSpeed's own; `buffer_id` is the number of the micro-batch. The executor runs them, tests read them.

`batch_sync`: all forwards, one loss over the global batch, all backwards:

    stage 0   F0 F1 F2 F3 ............... B0 B1 B2 B3  R S
    stage 1      F0 F1 F2 F3  L  B0 B1 B2 B3           R S      F forward, L loss, B backward, R reduce, S optimizer step
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
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


class ComputeLoss(PipeInstruction):
    """Tails: exchange the embeddings of the global batch, compute the loss and the gradients of the own embeddings."""


class StageSchedule(PipeSchedule):
    """The instructions of one stage for one global batch of `num_micro_batches` micro-batches."""

    def __init__(self, stage: Stage, num_micro_batches: int):
        super().__init__(micro_batches=num_micro_batches, stages=1, stage_id=stage.stage_id)
        self.place = stage

    def forward(self, m: int) -> list[PipeInstruction]:
        """Take in micro-batch m, run it, hand it on."""
        stage = self.place
        return [
            *([RecvActivation(m)] if stage.previous is not None else []),
            *([LoadMicroBatch(m)] if stage.loads else []),
            ForwardPass(m),
            *([SendActivation(m)] if stage.next is not None else []),
        ]

    def backward(self, m: int) -> list[PipeInstruction]:
        stage = self.place
        return [
            *([RecvGrad(m)] if stage.next is not None else []),
            BackwardPass(m),
            *([SendGrad(m)] if stage.previous is not None else []),
        ]


class BatchSync(StageSchedule):
    """All forwards, one loss, all backwards. Keeps the activations of every micro-batch until its backward."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            yield self.forward(m)
        if self.place.is_tail:
            yield [ComputeLoss()]
        for m in range(self.micro_batches):
            yield self.backward(m)
        yield [ReduceGrads(), OptimizerStep()]


class ForwardOnly(StageSchedule):
    """Embeddings of a held-out set: forwards, nothing else."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            yield self.forward(m)


SCHEDULES = {"batch_sync": BatchSync}
