"""What a rank does in the test of gradients that only some replicas make."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from split_training import Case, gradient_pieces, make_engine, micro_batches_of_rank

from engine.trace import WAIT


class SkippingLayers:
    """Builds layers; of the `skipped` a replica runs all but one, each in turn: in its n-th forward
    that of the number n plus its rank."""

    def __init__(self, case: Case, skipped: tuple[str, ...]):
        self.case, self.skipped = case, skipped

    def __call__(self, spec: Any) -> Any:
        layer = spec.build(self.case.seed)
        if spec.name in self.skipped:
            forward, number = layer.forward, self.skipped.index(spec.name)
            turns = iter(range(dist.get_rank(), 1000))

            def skipping(tensors: dict) -> dict:
                left_out = next(turns) % len(self.skipped) == number
                return tensors if left_out else forward(tensors)

            layer.forward = skipping
        return layer


def train_with_skipped_layers(case: Case, skipped: tuple[str, ...]) -> list[tuple]:
    """The gradients of the first step."""
    engine, _, image_size = make_engine(case, SkippingLayers(case, skipped))
    found: list[tuple] = []
    engine.backend.optimizer.register_step_pre_hook(
        lambda *_: found.extend(gradient_pieces(engine))
    )
    engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))
    return found


def waits_in_backwards(case: Case) -> list[int]:
    """How often this rank waits for others, in each backward of its first step."""
    engine, _, image_size = make_engine(case)
    engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))
    waits = [span for span in engine.recorder.spans if span.name == WAIT]
    return [
        sum(span.start_s <= wait.start_s and wait.end_s <= span.end_s for wait in waits)
        for span in engine.recorder.spans
        if span.name == "BackwardPass"
    ]
