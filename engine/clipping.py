"""Gradient clipping by group: image, text and head each have their own norm and their own limit.

    ‖g‖ = sqrt(Σ over the group's parameters of Σ g²)        reduced over the ranks that hold a part of the group, no others
    g  ← g · min(1, max_grad_norm / (‖g‖ + 1e-6))            as torch.nn.utils.clip_grad_norm_

It runs as a step hook of the optimizer that DeepSpeed wraps: there the gradients are reduced over the replicas, unscaled
and in the optimizer's precision, whatever the wrapper (none, ZeRO-1, BF16_Optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.communication import Communicator
from engine.topology import StageGraph

GROUPS = ("image", "text", "head")


def group_of(canonical_name: str) -> str:
    """The clipping group of a parameter: the first part of its canonical name."""
    group = canonical_name.split(".", 1)[0]
    if group not in GROUPS:
        raise ValueError(f"parameter {canonical_name!r} belongs to no clipping group; names start with one of {GROUPS}")
    return group


def ranks_of_groups(graph: StageGraph, groups_of_layers: Mapping[str, list[set[str]]]) -> dict[str, list[int]]:
    """group -> ranks that hold a part of it. `groups_of_layers[branch][i]`: the groups found in layer i of that branch."""
    ranks: dict[str, set[int]] = {group: set() for group in GROUPS}
    for stage in graph.stages:
        for branch, layers in stage.layers.items():
            for i in layers:
                for group in groups_of_layers[branch][i]:
                    ranks[group].update(stage.ranks)
    return {group: sorted(members) for group, members in ranks.items() if members}


class GroupedClipping:
    """Measures and clips the gradients of this rank's parameters, group by group."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        max_grad_norm: Mapping[str, float],
        comm: Communicator,
        optimizer: torch.optim.Optimizer,
    ):
        self.comm, self.max_grad_norm, self.optimizer = comm, dict(max_grad_norm), optimizer
        self.members = {group: [p for n, p in parameters.items() if group_of(n) == group and p.requires_grad] for group in GROUPS}
        self.norms: dict[str, Tensor] = {}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # ZeRO-1 and BF16_Optimizer give the optimizer one flat slice of the stage's parameters instead of the parameters.
        self.partitioned = not any(id(p) in held for p in parameters.values())
        optimizer.register_step_pre_hook(lambda *_: self._clip())

    @torch.no_grad()
    def _clip(self) -> None:
        for group, members in self.comm.group_members.items():
            if self.comm.rank not in members:
                continue
            gradients = [g for g in map(self.gradient, self.members[group]) if g is not None]
            square = torch.zeros(1, device=self.comm.device)
            for gradient in gradients:
                square += gradient.float().square().sum().to(self.comm.device)
            if not self.partitioned:
                square /= self.comm.stage.replicas  # every replica holds the whole gradient: count it once
            norm = self.comm.sum_over(square, self.comm.named_groups[group]).sqrt()
            self.norms[group] = norm
            if self.max_grad_norm.get(group, 0.0) > 0:
                coefficient = (self.max_grad_norm[group] / (norm + 1e-6)).clamp(max=1.0)
                for gradient in gradients:
                    gradient.mul_(coefficient.to(gradient.device))

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient the optimizer is about to use, or this rank's slice of it."""
        if not self.partitioned:
            return parameter.grad
        mapping = parameter._hp_mapping  # DeepSpeed: where this parameter lies in the rank's flat fp32 partition
        if mapping is None:
            return None
        flat = self.optimizer.param_groups[mapping.param_group_index]["params"][0].grad
        address = mapping.get_hp_fragment_address()
        return flat.narrow(0, address.start, address.numel)
