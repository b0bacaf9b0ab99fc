"""What a rank does in the tests of weights that the replicas of a stage share out."""

from __future__ import annotations

from typing import Any

from split_training import (
    Case,
    alikeness,
    global_batch,
    gradient_pieces,
    make_engine,
    micro_batch,
    micro_batches_of_rank,
)
from torch import arange

EVALUATED = 3  # micro-batches, all of them by the first replica


def evaluate_unlike_numbers(case: Case) -> dict[str, Any]:
    """Before the first step and behind it the first replica evaluates all samples, and the others
    none: what was measured; the gradients of the two steps; how much this rank holds of each
    parameter, and of how much."""
    engine, _, image_size = make_engine(case)
    gradients: list[list[tuple]] = []
    engine.backend.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(gradient_pieces(engine))
    )

    def evaluate() -> dict[str, Any]:
        number = EVALUATED if engine.comm.replica == 0 else 0
        parts = arange(case.global_batch_size).chunk(EVALUATED)[:number]
        batch = global_batch(case, 0, image_size)
        loaded = (
            {n: t for b in engine.stage.loads for n, t in micro_batch(case, batch, b, part).items()}
            for part in parts
        )
        found = engine.evaluate(loaded, number, case.global_batch_size, alikeness)
        return {name: own.directions for name, own in found.items()}

    measured = []
    for step in range(2):
        measured.append(evaluate())
        engine.train_batch(micro_batches_of_rank(case, engine, step, image_size))
    held = {
        name: (parameter.to_local().numel(), parameter.numel())
        for name, parameter in engine.module.canonical_parameters.items()
    }
    return {"measured": measured, "gradients": gradients, "held": held}
