"""The exponential moving average of the weights, kept where they are stepped: each rank averages
its own, in fp32.

    average ← average + (1 − d) · (weight − average)   after every applied step t = 1, 2, …
    d = decay, or with a warm-up min(decay, (1 + t) / (10 + t)), so that the first weights are soon forgotten

The rule of TensorFlow's ExponentialMovingAverage. Under ZeRO-1 and bf16 what is stepped, and so
averaged, is this rank's slice of the fp32 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from common.blocks import Switch, block, read_block


@block
class AverageBlock:
    """The `ema` block inside `branches`."""

    decay: Annotated[
        float, Field(gt=0, lt=1, description="a number between 0 and 1, such as 0.9999")
    ] = 0.9999
    warmup: Switch = True

    def decay_at(self, step: int) -> float:
        """Of the applied step `step`, counted from 1."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


def average_block(written: Any) -> AverageBlock | None:
    """`branches.ema` as written; None: nothing is averaged. Errors: ValueError with the key."""
    example = '{"decay": 0.9999, "warmup": true}'
    return None if written is None else read_block(AverageBlock, written, "branches.ema", example)


class WeightAverage:
    """The average of some fp32 tensors, of any shapes, which an optimizer changes in place."""

    def __init__(self, weights: Sequence[Tensor], block: AverageBlock):
        self._of, self.weights = tuple(weights), [weight.detach() for weight in weights]
        self.block, self.num_updates = block, 0
        self.averages = [weight.clone() for weight in self.weights]

    @torch.no_grad()
    def update(self, moved: Callable[[Tensor], bool] = lambda _: True) -> None:
        """After an applied step. `moved`: whether it has moved one of the weights; averages of
        others stay."""
        self.num_updates += 1
        pairs = [(a, w) for a, w, of in zip(self.averages, self.weights, self._of) if moved(of)]
        if pairs:
            averages, weights = map(list, zip(*pairs))
            torch._foreach_lerp_(averages, weights, 1 - self.block.decay_at(self.num_updates))

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the averages in the place of the weights, and the weights in theirs; a second time
        undoes it to the last bit."""
        for weight, average in zip(self.weights, self.averages):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
