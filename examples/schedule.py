"""A schedule of one's own: as `replay`, with the activations of one micro-batch on every stage.

    stage 0   E0 E1 E2 E3    F0 ..... B0 F1 ..... B1 F2 ..... B2 F3 ..... B3  R S
    stage 1      E0 E1 E2 E3  L F0 B0       F1 B1       F2 B2       F3 B3     R S

E is a forward without gradient, L one loss over the global batch, then each micro-batch goes
forward and backward by itself. `replay` holds the activations of one micro-batch more for each
stage behind a stage; in return its stages compute at the same time. The gradients are the same. To
use it:

    deepspeed --num_gpus 2 train.py --import-module examples.schedule --deepspeed_config how.json

where how.json has "branches": {"schedule": "one_by_one", ...}.
"""

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeInstruction, ReduceGrads

from engine.schedule import SCHEDULES, ComputeLoss, StageSchedule


class OneByOne(StageSchedule):
    """Forwards for the embeddings, one loss, then each micro-batch again, before the next."""

    description = "forwards for the embeddings, one loss, then each micro-batch again, by itself"
    recomputes = True  # the first `num_kept` micro-batches ("kept_micro_batches") need no `again`

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            yield self.forward(m) if m < self.num_kept else self.embed(m)
        if self.own_stage.is_last:
            yield [ComputeLoss()]
        for m in range(self.micro_batches):
            if m >= self.num_kept:
                yield self.again(m)
            yield self.backward(m)
        yield [ReduceGrads(), OptimizerStep()]


SCHEDULES["one_by_one"] = OneByOne
