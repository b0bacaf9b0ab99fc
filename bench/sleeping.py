"""Towers whose layers sleep instead of computing, for `bench/steps.py sleeping`.

A machine has few cores, so many ranks that compute would wait for each other's turn. Ranks that
sleep do not: filling, draining, waiting and what overlaps take as long as they would with a device
each. Everything else is real: processes, messages, the loss, the average over replicas, the
optimizer. Its time is in the measurement and not in the prediction, which knows the sleeping alone,
so the sleep of a step is chosen to be long beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common import Setup, cost_model
from engine.planning.costs import CostModel
from models.towers.layers import Layer, LayerSpec, Tower, reset

WIDTH = 8
BACKWARD = 2.0  # × a forward, as for most layers


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Stem(Layer):
    """[B, WIDTH] samples of a branch to hidden states; takes no time."""

    def __init__(self, branch: str):
        super().__init__()
        self.reads = self.drops = (f"{branch}_samples",)
        self.makes = (f"{branch}_features",)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, samples: Tensor) -> Tensor:
        return self.linear(samples)


class Block(Layer):
    """`seconds` of sleep for each sample, and a layer so small that it takes none.

    Half of the backward's sleep is for the gradient of the input, half for that of the weight.
    """

    def __init__(self, branch: str, seconds: float):
        super().__init__()
        self.reads = self.makes = (f"{branch}_features",)
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, features: Tensor) -> Tensor:
        forward_s = self.seconds * len(features)
        each_s = BACKWARD / 2 * forward_s
        weight = _Sleep.apply(self.linear.weight, 0.0, each_s)
        made = features + F.linear(features, weight, self.linear.bias)
        return _Sleep.apply(made, forward_s, each_s)


@dataclass(frozen=True)
class SleepingSetup(Setup):
    """By branch: seconds of a forward of one sample through all its blocks, and their number."""

    embed_dim: int = WIDTH
    micro_batch_size: int = 8
    seconds: tuple[float, float] = (0.08, 0.027)
    num_blocks: tuple[int, int] = (16, 8)

    @property
    def towers(self) -> dict[str, Tower]:
        from models.losses import InfoNCE
        from models.towers.head import head

        towers = {}
        for branch, seconds, number in zip(("image", "text"), self.seconds, self.num_blocks):
            with torch.device("meta"):
                layers = [Stem(branch), *(Block(branch, seconds / number) for _ in range(number))]
            specs = []
            for i, layer in enumerate(layers):
                layer.canonical_names = {own: f"{branch}.{i}.{own}" for own in layer.state_dict()}
                specs.append(LayerSpec(f"{branch}.{i}", branch, layer, reset))
            scalars = InfoNCE().parameters if branch == "image" else {}
            specs.append(head(branch, WIDTH, self.embed_dim, scalars))
            towers[branch] = Tower(branch, "sleeping", WIDTH, tuple(specs), {})
        return towers

    @property
    def costs(self) -> CostModel:
        """What the layers sleep, and nothing else."""
        slept = {
            branch: [getattr(spec.template, "seconds", 0.0) for spec in tower.specs]
            for branch, tower in self.towers.items()
        }
        return cost_model(self, slept, BACKWARD)

    def inputs(self, branch: str, indices: Sequence[int]) -> dict[str, Tensor]:
        return {f"{branch}_samples": torch.randn(len(indices), WIDTH)}

    def describe(self) -> str:
        image, text = (f"{1e3 * seconds:.0f} ms" for seconds in self.seconds)
        return f"A forward sleeps {image} an image and {text} a text, micro-batches of 8."
