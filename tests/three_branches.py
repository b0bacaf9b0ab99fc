"""Steps of three branches that are not one after another from equal batches: a branch that stands
still, an evaluation that sets weights, an evaluation that is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from split_training import (
    Case,
    alikeness,
    make_engine,
    micro_batches_of_rank,
    num_micro_batches,
    spec_of_step,
)

SILENT = (
    {},
    {"not_loaded": {"audio": tuple(range(24))}},
    {"loss_weights": {"contrastive/audio_text": 0.0}},
    {},
)
LIMITED = {"audio": {"kind": "adaptive", "warmup_steps": 1}}
WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}


def train_with_silent_steps(case: Case) -> dict[str, Any]:
    """A step as each of `SILENT` says. On each rank: after each step all tensors and numbers of the
    state by name, which names are of sounds, and the rates."""
    from engine.checkpoint.engine_state import snapshot

    case = replace(case, ema={"decay": 0.5}, clipping=LIMITED, scheduler=WARM)
    engine, _, image_size = make_engine(case)
    states, rates = [], []
    for changes in SILENT:
        own = replace(case, **changes)
        batches = micro_batches_of_rank(own, engine, 0, image_size)
        engine.train_batch(batches, spec_of_step(own, engine, 0))
        kept = snapshot(engine)
        state: dict[str, Any] = {
            f"{f.kind} {f.name} {f.offset}": tensor.detach().clone()
            for f, tensor in kept.tensors.items()
        }
        state |= {f"number {name}": str(number) for name, number in kept.scalars.items()}
        state["number audio.limit"] = str(engine.clipping.state_dict()["mean_norm"]["audio"])
        states.append(state)
        rates.append(engine.backend.optimizer.param_groups[0]["lr"])
    names = {*engine.module.canonical_parameters, *engine.module.canonical_buffers}
    sounds = {name for name in names if name.startswith(("audio.", "head.audio_"))}
    return {"states": states, "rates": rates, "sounds": sorted(sounds | {"audio.limit"})}


def train_with_alignment(case: Case, steps: int) -> list[dict[str, Any]]:
    """On each rank, step by step: the weights that followed the evaluations so far, and the metrics
    of the step with them. The batch is the held-out set, too."""
    from engine.executor import StepSpec
    from launch.loss_weights import LossWeights
    from models.metrics.alignment import alignment_figures, alignment_sums

    def of_rows(sides: Any, branch: str, mine: Any) -> Any:
        (other,) = (name for name in sides if name != branch)
        return alignment_sums(sides[branch].embeds[mine], sides[other].embeds, mine)

    engine, _, image_size = make_engine(case)
    weights, records = LossWeights("alignment", engine.objective.losses, 50), []
    for step in range(steps):
        batches = micro_batches_of_rank(case, engine, 0, image_size)
        number = num_micro_batches(case, engine)
        measured = engine.evaluate(batches, number, case.global_batch_size, of_rows)
        figures = {}
        for pair in engine.objective.terms:
            of_pair = alignment_figures(
                *measured[pair.name].directions.values(),
                measured[pair.name].num_samples,
                pair.branches,
            )
            figures |= {f"{name}/{pair.name}": value for name, value in of_pair.items()}
        reason = weights.after_evaluation(step, {"family": figures})
        batches = micro_batches_of_rank(case, engine, 0, image_size)
        metrics = engine.train_batch(batches, StepSpec(loss_weights=weights.weights()))
        record = {"weights": weights.weights(), "reason": reason, "loss": metrics.loss}
        records.append(record | {"losses": metrics.losses})
    return records


def refused_evaluation(case: Case) -> str:
    """What each rank says of a held-out set of which the sounds have two other samples."""
    engine, _, image_size = make_engine(case)
    batches = micro_batches_of_rank(case, engine, 0, image_size)

    def with_others():
        for batch in batches:
            if "audio_index" in batch:
                batch["audio_index"] = batch["audio_index"] + (batch["audio_position"] < 2)
            yield batch

    given = None if batches is None else with_others()
    number = num_micro_batches(case, engine)
    try:
        engine.evaluate(given, number, case.global_batch_size, alikeness)
    except RuntimeError as error:
        return str(error)
    return "nothing"
