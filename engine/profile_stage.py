"""Whether a plan fits the memory: one step of this rank's stage, without the other ranks.

Layers, activations and gradients are those of the run. What else the stage is predicted to hold
(the optimizer's state, messages, the loss's tensors) is allocated and left alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from engine.communication import Signature, signature_of
from engine.json_messages import from_first_rank
from engine.layer_keys import layer_key
from engine.module import DescribesLayer, Outline, StageModule
from engine.optimizer.parameter_groups import settings_of
from engine.planning.fit import Fit, corrected, find_fit
from engine.planning.instructions import counts_of
from engine.planning.measured import Cache, Tensors, device_identity, digest
from engine.planning.planner import RunPlan
from engine.planning.profile_layers import Ranks, placed
from engine.planning.profile_machine import usable_bytes
from engine.planning.stage_costs import stage_costs
from engine.processes.out_of_memory import GPU, HOST, whose_memory
from engine.processes.start import as_local_rank
from engine.streams import runs_behind
from engine.topology import Stage


def fit_together(
    plan_within: Callable[[float], RunPlan],
    key: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    layers: Mapping[str, Sequence[DescribesLayer]],
    build_layer: Callable[[Any], torch.nn.Module],
    inputs: Mapping[str, Callable[[int], Tensors]],
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
) -> RunPlan:
    """The plan that fits, as every rank finds it: all call it together. What was found is kept in
    `WYE_CACHE`, and nothing is tried where that is known. `key`: what the plan depends on beside the
    layers and the device; `optimizer`: that of the configuration. Errors: as `find_fit`."""
    trial = _Trial(optimizer, layers, build_layer, inputs, dtype, device, ranks)
    memory_bytes = usable_bytes(device, ranks)
    structures = {b: [layer_key(spec.template) for spec in specs] for b, specs in layers.items()}
    known = {**key, **device_identity(device), "dtype": str(dtype), "layers": digest(structures)}
    if runs_behind(device):  # what is free on a CPU changes all the time
        known["memory"] = memory_bytes
    cache, name = Cache(), f"fit-{digest(known)}"
    kept = from_first_rank(cache.read_values(name) if ranks.rank == 0 else None)
    if kept is not None:
        fit = Fit(float(kept["limit_bytes"]), float(kept["ratio"]))
    else:
        fit = find_fit(plan_within, trial.held_share, memory_bytes)
        if ranks.rank == 0:
            cache.write(name, known, fit)
    return corrected(plan_within(fit.limit_bytes), fit.ratio)


@dataclass(frozen=True)
class _Trial:
    """What the stage of any plan is made of; see `fit_together`."""

    optimizer: Mapping[str, Any]
    layers: Mapping[str, Sequence[DescribesLayer]]
    build_layer: Callable[[Any], torch.nn.Module]
    inputs: Mapping[str, Callable[[int], Tensors]]
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks

    def held_share(self, plan: RunPlan) -> float | None:
        """Bytes that a step held ÷ those that it was predicted to hold, the most of all ranks; None
        where the memory of one ran out. On a CPU nobody counts them, and it is 1."""
        share = None
        on_gpu = runs_behind(self.device)
        try:
            with (
                as_local_rank(self.device),
                torch.random.fork_rng(
                    [self.device] if on_gpu else [], device_type=self.device.type
                ),
            ):
                share = self._step(plan)
        except (RuntimeError, MemoryError) as error:
            if whose_memory(error) != (GPU if on_gpu else HOST):
                raise
        gc.collect()
        if on_gpu:
            get_accelerator().empty_cache()
        if not self.ranks.all(share is not None):
            return None
        return -self.ranks.least(-round(1e6 * (share or 0.0))) / 1e6

    def _step(self, plan: RunPlan) -> float:
        graph, stage, kind = plan.graph, plan.graph.stage_of(self.ranks.rank), plan.schedule_type
        counts = counts_of(stage, plan.batches[next(iter(stage.layers))], kind)
        paid = stage_costs(graph, plan.batches, plan.costs, kind.loss_per_micro_batch)
        costs, on_gpu = paid[stage.stage_id], runs_behind(self.device)
        if on_gpu:
            get_accelerator().reset_peak_memory_stats()
            before = get_accelerator().memory_allocated()
        module = StageModule(
            graph=graph,
            rank=self.ranks.rank,
            layers=self.layers,
            build_layer=self.build_layer,
            stage_group=None,  # nothing is averaged
            seed=0,
            settings=settings_of(plan.optimizer_groups, self.layers, self.optimizer),
            trainable=plan.trainable,
            batch_norm_locked=plan.batch_norm_locked,
            compiled=plan.compiled,
        ).train()
        module.activation_checkpoint_interval = plan.costs.checkpoint_interval
        for parameter in module.parameters():  # as DeepSpeed, which leaves buffers in fp32
            parameter.data = parameter.data.to(self.dtype)
        own = sum(p.nbytes * (1 + p.requires_grad) for p in module.parameters())
        held = [self._room(costs.fixed_bytes - own)]
        given = self._given(plan, stage)
        if kind.recomputes or not stage.has_backward:
            with torch.no_grad():
                module(_copied(given))
        made = [
            module(_copied(given)) for _ in range(counts.in_flight if stage.has_backward else 0)
        ]
        if costs.loss is not None:
            held.append(self._room(costs.loss.rows_bytes))
            self._room(costs.loss.work_bytes)
        while made:
            roots = [tensor for tensor in made.pop(0).values() if tensor.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        if not on_gpu:
            return 1.0
        seen = get_accelerator().max_memory_allocated() - before
        return seen / plan.predicted[stage.stage_id].peak_bytes

    def _room(self, num_bytes: float) -> Tensor:
        return torch.empty(max(0, int(num_bytes)), dtype=torch.uint8, device=self.device)

    def _given(self, plan: RunPlan, stage: Stage) -> Tensors:
        """A micro-batch as it reaches the layers of the stage: from the data, and random numbers of
        the shapes that the stages above it send."""
        above = [stage]
        while (previous := above[0].previous) is not None:
            above.insert(0, plan.graph.stages[previous])
        received: Signature = ()
        for each in above:
            loaded: Tensors = {}
            for branch in each.loads:
                of_branch = self.inputs[branch](plan.batches[branch].micro_batch_size)
                where = self.device if each is stage else torch.device("meta")
                loaded |= placed(of_branch, self.dtype, where)
            if each is not stage:
                templates = [
                    self.layers[branch][i].template
                    for branch in each.layers
                    for i in each.layers[branch]
                ]
                outline = Outline(templates, self.dtype)
                received = outline.signature(received + signature_of(loaded), training=True)
        tensors: Tensors = {}
        for name, dtype, shape in received:
            tensors[name] = torch.zeros(shape, dtype=dtype, device=self.device)
            if dtype.is_floating_point:
                learns = bool(plan.graph.trained_before(stage))
                tensors[name] = torch.randn_like(tensors[name]).requires_grad_(learns)
        return {**tensors, **loaded}


def _copied(tensors: Tensors) -> Tensors:
    return {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in tensors.items()
    }
