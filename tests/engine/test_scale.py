"""From a loss to a step, the product of all factors (`engine/loss/scale.py`)."""

import pytest
from ranks import run_ranks
from scale_cases import scaled
from split_training import fork_of, train_whole

from engine.loss.scale import injected_scale

REPLICAS, LOSSES, WEIGHT, LIMIT = 2, 3, 0.8, 0.01
WITHIN = 3e-3  # fp16


def test_all_factors_multiply_to_the_gradient_of_the_whole_loss():
    """A loss for each of three micro-batches, two replicas of images, fp16, a weight, clipping. Of
    InfoNCE, Σ u · ∂L/∂u over its images is ∂L/∂ of the logarithm of the scale."""
    case = fork_of(
        image=(1, REPLICAS),
        text=(1, REPLICAS),
        micro_batch_size=24 // REPLICAS // LOSSES,
        schedule="per_micro_batch",
        precision="fp16",
        loss_weights={"contrastive": WEIGHT},
        clipping=dict.fromkeys(("image", "text", "head"), LIMIT),
    )
    ranks = run_ranks(case.world_size, scaled, case)
    whole = float(train_whole(case)["gradients"]["head.logit_scale"])
    images = [rank for rank in ranks if rank["stage"].startswith("image")]
    loss_scale = images[0]["loss_scale"]
    assert len(images) == REPLICAS and loss_scale > 1
    # of the sum over the losses of share · weight · ∂L/∂, which `whole` is
    factor = injected_scale(REPLICAS, loss_scale, 1 / LOSSES, WEIGHT) * LOSSES / WEIGHT
    assert sum(rank["embeds"] for rank in images) == pytest.approx(factor * whole, rel=WITHIN)
    for rank in images:  # each an equal part
        assert rank["injected"] == pytest.approx(factor * whole / REPLICAS, rel=WITHIN)
    averaged = [value for rank in images for value in rank["averaged"]]
    clipped = [value for rank in images for value in rank["clipped"]]
    assert len(averaged) == len(clipped) == 1  # ZeRO-1: one replica steps it
    assert averaged[0] == pytest.approx(whole, rel=WITHIN)
    assert 0 < images[0]["clip"] < 1
    assert clipped[0] == pytest.approx(images[0]["clip"] * whole, rel=WITHIN)
