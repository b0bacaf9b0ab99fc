"""Costs measured on the present device: each layer for some micro-batch sizes, the optimizer, the
loss, the links.

profile_layers.py     one tower's layers, one at a time
profile_machine.py    what is no layer's: the loss's products, gradients into their buffers, the optimizer's step; links between
                      neighbours of a node, and between nodes
profile_together      all of it on every rank at the same time, and the mean over the ranks: they share memory and, on a CPU, cores
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from engine.checks import AUTO
from engine.compiling import compiles
from engine.planning.costs import LayerCost, Machine
from engine.planning.measured import Tensors
from engine.planning.profile_layers import Effort, ProfiledLayer, Ranks, profile_layers
from engine.planning.profile_machine import profile_machine, with_links
from engine.processes.places import Places
from engine.streams import runs_behind


@dataclass(frozen=True)
class Profile:
    """What was measured: costs by branch, all layers in order, and the machine. `compiled_share`:
    seconds of compiled layers ÷ those of layers as they are, by branch, where both were measured;
    the costs are those of the faster way."""

    layers: Mapping[str, list[LayerCost]] = field(repr=False)
    machine: Machine
    pairs: LayerCost | None = None
    compiled_share: Mapping[str, float] = field(default_factory=dict)


def profile_together(
    layers: Mapping[str, Sequence[ProfiledLayer]],
    build_layer: Callable[[Any], nn.Module],
    inputs: Mapping[str, Callable[[int], Tensors]],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Mapping[str, Sequence[int]],
    batch_size: int,
    embed_dim: int,
    places: Places,
    budget_s: float = 60.0,
    pairs: tuple[ProfiledLayer, Callable[[int], Tensors], Sequence[int]] | None = None,
    compiling: Mapping[str, str] = MappingProxyType({}),
    done: Callable[[], object] | None = None,
) -> Profile:
    """Measure on every rank of the default process group at the same time. All ranks call it
    together and get the same numbers.

    Branches share `budget_s` equally; it bounds the repeats, not the first two passes of each
    layer. `pairs`: a layer that scores matching pairs, what it is given for so many of them, and
    how many to try. `places`: where the ranks are. `compiling`: whether the layers of a branch are
    compiled, as `branches.compile` says it; "off" where nothing is said; with "auto" each layer is
    measured in both ways. `done` is called after each layer. For the rest see `profile_layers` and
    `profile_machine`.
    """
    ranks = Ranks(device, places)
    measured, compiled_share = {}, {}
    for branch, specs in layers.items():
        choice = compiling.get(branch, "off")
        ways = {
            compiled: profile_layers(
                specs,
                build_layer,
                inputs[branch],
                dtype=dtype,
                device=device,
                sizes=sizes[branch],
                effort=Effort(budget_s=budget_s / len(layers)),
                ranks=ranks,
                compiled=compiled,
                done=done,
            )
            for compiled in (False, True)
            if choice in (AUTO, "layers" if compiled else "off")
        }
        if choice == AUTO:
            compiled_share[branch] = _seconds(ways[True]) / _seconds(ways[False])
        measured[branch] = ways[compiles(choice, compiled_share.get(branch))]
    of_pairs = None
    if pairs is not None:
        spec, given, sizes_of_pairs = pairs
        (of_pairs,) = profile_layers(
            [spec],
            build_layer,
            given,
            dtype=dtype,
            device=device,
            sizes=sizes_of_pairs,
            effort=Effort(budget_s=budget_s / 4),
            ranks=ranks,
            done=done,
        )
    parameter_sizes = [
        p.numel() for specs in layers.values() for spec in specs for p in spec.template.parameters()
    ]
    machine = profile_machine(
        device, dtype, parameter_sizes, batch_size=batch_size, embed_dim=embed_dim, ranks=ranks
    )
    if dist.get_world_size() > 1:
        machine = with_links(machine, device, ranks)
    if runs_behind(device):
        get_accelerator().empty_cache()
    return Profile(measured, machine, of_pairs, compiled_share)


def _seconds(layers: Sequence[LayerCost]) -> float:
    """Of a forward and a backward of the largest micro-batch that was measured."""
    return sum(layer.forward_s.values[-1] + layer.backward_s.values[-1] for layer in layers)
