"""What the layers of towers would cost on hardware that is not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.config.implied import precision_of
from engine.planning.costs import CostModel, FurtherRows, configured
from engine.planning.devices import BYTES, Device, estimated_layers, estimated_machine
from models.towers.building import describe_layers, describe_pairs, token_bytes
from models.towers.layers import Tower


def estimated_costs(
    towers: Sequence[Tower],
    config: Mapping[str, Any],
    embed_dim: int,
    device: Device,
    memory_bytes: float | None = None,
    num_tokens: int | None = None,
    compared: Sequence[tuple[str, str]] = (),
    further: Sequence[FurtherRows] = (),
) -> CostModel:
    """Counted operations of all towers against the device's data sheet; `memory_bytes` instead of
    the device's own. `num_tokens` of a text: default the most that the tower takes. `compared`: the
    pairs of branches; where there are two, they are one; `further`: as in `CostModel`."""
    precision = precision_of(config)
    layers = {
        tower.branch: estimated_layers(
            describe_layers(tower, BYTES[precision], num_tokens), device, precision
        )
        for tower in towers
    }
    pairs = None
    if "fusion" in towers[0].config:
        image, text = towers
        counted = describe_pairs(image, text, BYTES[precision])
        (pairs,) = estimated_layers([counted], device, precision)
    machine = estimated_machine(device, precision)
    if memory_bytes is not None:
        machine = replace(machine, memory_bytes=memory_bytes)
    return CostModel(
        layers,
        machine,
        embed_dim=embed_dim,
        pairs=pairs,
        token_bytes=token_bytes(towers, BYTES[precision]),
        compared=tuple(compared),
        further=tuple(further),
        **configured(config),
    )
