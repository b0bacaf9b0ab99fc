"""Cost models for tests: simple enough that the answer can be worked out by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.planning.costs import CostModel, Curve, LayerCost, Machine, StateBytes

BRANCHES = ("image", "text")  # of most tests


def proportional(
    seconds_per_sample: Mapping[str, Sequence[float]],
    memory_bytes: float = 1e15,
    compared: Sequence[tuple[str, str]] = (),
    **machine: Any,
) -> CostModel:
    """A layer's forward takes as long as said per sample and its backward twice that; nothing else
    takes time unless `machine` says so.

    A layer has a million parameters, keeps 1 MB per sample for its backward and sends 100 kB per
    sample.
    """

    def layer(branch: str, i: int, seconds: float) -> LayerCost:
        forward, backward, kept, sent = (
            Curve((1,), (value,)) for value in (seconds, 2 * seconds, 1e6, 1e5)
        )
        return LayerCost(f"{branch}.{i}", 1_000_000, forward, backward, kept, sent)

    free = {
        "link_bytes_per_s": 1e15,
        "link_latency_s": 0.0,
        "flops_per_s": 1e18,
        "optimizer_s_per_parameter": 0.0,
        "gradient_s_per_parameter": 0.0,
        "instruction_s": 0.0,
    }
    layers = {
        branch: [layer(branch, i, s) for i, s in enumerate(seconds)]
        for branch, seconds in seconds_per_sample.items()
    }
    return CostModel(
        layers,
        Machine("test", memory_bytes, **(free | machine)),
        StateBytes(8, 12, 4),
        embed_dim=8,
        compared=tuple(compared),
    )
