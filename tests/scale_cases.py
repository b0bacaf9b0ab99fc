"""What a gradient is multiplied by, from the loss to the step, as ranks see it."""

from typing import Any

from split_training import Case, make_engine, micro_batches_of_rank, spec_of_step


def scaled(case: Case) -> dict[str, Any]:
    """On each rank, of one step: Σ u · ∂L/∂u over all image embeddings u that a backward begins with,
    and the gradients of the logarithm of the scale: where backwards begin, averaged over replicas
    and without the loss scale, and as the optimizer gets it."""
    engine, _, image_size = make_engine(case)
    backend, last_stage_loss, scale = engine.backend, engine.last_stage_loss, engine.module.scalars
    found: dict[str, Any] = {"embeds": 0.0, "injected": 0.0, "averaged": [], "clipped": []}
    found["loss_scale"] = backend.loss_scale
    of_loss, reduce = last_stage_loss.gradients, backend.reduce_gradients

    def gradients(outputs, *args, **kwargs):
        pieces = of_loss(outputs, *args, **kwargs)
        for made, own in zip(outputs, pieces):
            if "image_embeds" in own:
                found["embeds"] += float((made["image_embeds"] * own["image_embeds"]).sum())
                found["injected"] += float(own["logit_scale"])
        return pieces

    def reduce_gradients():
        reduce()
        for parameter in scale.values():
            if (of_step := backend.reduced_gradient(parameter)) and of_step[0].numel():
                found["averaged"] += [float(of_step[0]) / of_step[1]]

    def about_to_step(*_):
        for parameter in scale.values():
            own = backend.gradient(parameter)
            found["clipped"] += [] if own is None or not own.numel() else [float(own)]

    last_stage_loss.gradients, backend.reduce_gradients = gradients, reduce_gradients
    backend.optimizer.register_step_pre_hook(about_to_step)  # after that which clips
    metrics = engine.train_batch(
        micro_batches_of_rank(case, engine, 0, image_size), spec_of_step(case, engine, 0)
    )
    return found | {"clip": metrics.clip_coefficient["head"], "stage": engine.stage.name}
