"""From a loss to a step: all that a gradient is multiplied by, in one place."""

from __future__ import annotations


def injected_scale(replicas: int, loss_scale: float, share: float, weight: float) -> float:
    """By which ∂L/∂ of what the layers made is multiplied where a backward begins with it.

    `replicas`: of the last stage; `loss_scale`: fp16's, else 1; `share`: of one of the losses of a
    step in their mean, 1 / K where there is one for each of K micro-batches, else 1; `weight`: of
    the term in the sum over all. A gradient g of the whole loss

        L = Σ over terms of weight · Σ over the losses of the step of share · L(term, loss)

    is made of what each rank computes by these factors, one behind the other:

        1 / rows                 L(term, loss) is a mean over the rows of its batch, those of all
                                 replicas (`models/losses/`); a rank has ∂L/∂ of its own rows
        × injected_scale         here: replicas · loss_scale · share · weight
        Σ over micro-batches     backward adds up, in fp32 under bf16 (`Backend.backward`)
        Σ over replicas          of a stage, each with its own rows
        ÷ replicas               what DeepSpeed makes of that sum is a mean (`reduce_gradients`)
        ÷ loss_scale             fp16: in the optimizer, before its step
        × clip                   of each group: min(1, limit / norm) (`optimizer/clipping.py`)

    Learned scalars come in equal parts of 1 / replicas from each replica of the first branch
    (`exchange_loss`). Tokens of matching are scaled by the replicas of the stage that scores them,
    and where they go to another stage by the quotient of both (`match`). DeepSpeed's own factor, one
    over the number of micro-batches, is left out (`engine/backend/deepspeed.py`).
    """
    return replicas * loss_scale * share * weight
