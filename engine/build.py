"""From a plan to a running engine: the communicator, the stage of this rank, DeepSpeed around
it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from engine.backend.deepspeed import DeepSpeedBackend
from engine.backend.fully_sharded import FullyShardedBackend, LayerSharding
from engine.backend.protocol import Backend
from engine.batch import BranchBatch
from engine.communication import Communicator
from engine.config.implied import averages_early, precision_of, steps_matrices, zero_stage
from engine.executor import ForkEngine
from engine.module import DescribesLayer, StageModule
from engine.objective import Objective
from engine.optimizer.classes import (
    make_optimizer,
    make_schedule,
    optimizer_maker,
    with_length,
)
from engine.optimizer.clipping_rules import refuse_idle_patterns
from engine.optimizer.muon import Muon
from engine.optimizer.parameter_groups import (
    GroupSchedule,
    OptimizerGroups,
    Setting,
    settings_of,
)
from engine.planning.planner import RunPlan
from engine.processes.out_of_memory import BUILDING, RankSetup, Work, explained, message
from engine.processes.start import as_local_rank
from engine.stage_runner import FromBytes
from engine.streams import runs_behind
from engine.trace import HostClock


def build_engine(
    plan: RunPlan,
    config: Mapping[str, Any],
    *,
    layers: Mapping[str, Sequence[DescribesLayer]],
    build_layer: Callable[[Any], nn.Module],  # from what `layers` hold
    objective: Objective,
    embed_dim: int,
    total_num_steps: int,
    seed: int,
    timeout: timedelta,
    equal_shares: bool = True,
    source_starts: Sequence[int] | None = None,
    clock: HostClock = time.perf_counter,
    from_bytes: Mapping[str, FromBytes] | None = None,
) -> ForkEngine:
    """The engine of this rank. All ranks call it together, after the process group is up.

    `layers[branch]` describes every layer of a branch in order; `build_layer` makes one of them,
    and is called for this rank's own only. `total_num_steps` resolves an "auto" in the
    learning-rate schedule. `equal_shares` promises that each replica of a stage has equally many
    samples of every global batch. `source_starts`: the first index of each of several sources of
    the samples, ascending, whose losses are reported separately; None: there is one. A pair of the
    `objective` may have a `matching` loss where the last layer of its second branch has a `fusion`.
    `clock`: what steps are measured by on a CPU. `from_bytes`: by the names of inputs, what makes
    values of those that come as uint8, on this rank's device. Raises ValueError for a pattern (of
    clipping or decay) that matches no parameter, OutOfMemory when the stage does not fit.
    """
    rank = dist.get_rank()
    device = torch.device(get_accelerator().current_device_name())
    refuse_idle_patterns(
        plan.clipping,
        [name for specs in layers.values() for spec in specs for name in spec.canonical_parameters],
    )
    branch = next(iter(plan.graph.stage_of(rank).layers))
    resolved = deepspeed_config(
        config,
        plan.batches[branch],
        total_num_steps,
        max(stage.replicas for stage in plan.graph.stages),
    )
    comm = Communicator(
        graph=plan.graph,
        objective=objective,
        rank=rank,
        device=device,
        timeout=timeout,
        clock=clock,
    )
    setup = RankSetup(plan, config, plan.graph.stage_of(rank), runs_behind(device))
    building = partial(message, plan.graph.describe_rank(rank), setup, Work(BUILDING))
    with explained(device, building), as_local_rank(device):
        sharding = LayerSharding(comm, resolved) if zero_stage(resolved) == 3 else None
        module = StageModule(
            graph=plan.graph,
            rank=rank,
            layers=layers,
            build_layer=build_layer,
            stage_group=comm.stage_group,
            seed=seed,
            settings=settings_of(
                plan.optimizer_groups, layers, config["optimizer"], apart=objective.may_lack_rows
            ),
            trainable=plan.trainable,
            batch_norm_locked=plan.batch_norm_locked,
            compiled=plan.compiled,
            shard_layer=sharding.shard if sharding else None,
        )
        first_scalars = {name: each.detach().clone() for name, each in module.scalars.items()}
        backend = _backend(module, comm, sharding, resolved, plan.optimizer_groups)
        if isinstance(backend.optimizer, Muon):
            backend.optimizer.place(backend.shards(), comm)
        return ForkEngine(
            module,
            comm,
            backend,
            batches=plan.batches,
            schedule=plan.schedule,
            clipping=plan.clipping,
            optimizer_groups=plan.optimizer_groups,
            base_lr=(resolved.get("optimizer", {}).get("params") or {}).get("lr"),
            first_scalars=first_scalars,
            average=plan.average,
            embed_dim=embed_dim,
            equal_shares=equal_shares,
            source_starts=source_starts,
            setup=setup,
            from_bytes=from_bytes,
        )


def _backend(
    module: StageModule,
    comm: Communicator,
    sharding: LayerSharding | None,
    config: dict[str, Any],
    rules: OptimizerGroups,
) -> Backend:
    groups = [_optimizer_group(*group) for group in module.parameter_groups]
    schedule = partial(_group_schedule, config, rules, module.parameter_groups)
    if sharding:
        optimizer = partial(make_optimizer, config)
        return FullyShardedBackend(module, comm, sharding, config, groups, optimizer, schedule)
    return DeepSpeedBackend(
        module, comm, config, groups, schedule, averages_early(config), optimizer_maker(config)
    )


def _group_schedule(
    config: Mapping[str, Any],
    rules: OptimizerGroups,
    groups: Sequence[tuple[Setting, Sequence[nn.Parameter]]],
    optimizer: torch.optim.Optimizer,
) -> GroupSchedule:
    """DeepSpeed's schedule of the file, scaled for each group."""
    scheduler = config.get("scheduler", {})
    make = partial(make_schedule, optimizer, scheduler.get("type"), scheduler.get("params"))
    warmups = [rule.warmup_steps for rule in rules.rules.values()]
    return GroupSchedule(optimizer, make, [setting for setting, _ in groups], warmups)


def _optimizer_group(setting: Setting, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """A parameter group as optimizers take it."""
    decay = {} if setting.weight_decay is None else {"weight_decay": setting.weight_decay}
    matrices = {"muon": True} if setting.muon else {}
    return {"params": list(parameters), **decay, **matrices}


def deepspeed_config(
    config: Mapping[str, Any], batch: BranchBatch, total_num_steps: int, most_replicas: int = 2
) -> dict[str, Any]:
    """The dictionary DeepSpeed reads on a rank of this branch: the file's keys with the branch's
    batch filled in.

    `most_replicas`: of any stage. Where no stage has two, ZeRO has nothing to shard, and under fp32
    it would only add copies of the weights and gradients; fp16 and bf16 need the wrapper of ZeRO-1,
    and so does an offloaded optimizer. torch's own Adam runs fused unless the file says how.
    """
    resolved = copy.deepcopy(dict(config))
    zero = resolved.get("zero_optimization", {})
    if most_replicas == 1 and zero:
        wrapped = precision_of(config) != "fp32" or "offload_optimizer" in zero
        zero["stage"] = min(zero_stage(config), 1) if wrapped else 0
    # DeepSpeed knows equal shares only; what it computes with these numbers is not used for rows
    resolved["train_batch_size"] = batch.places
    resolved["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
    resolved["gradient_accumulation_steps"] = batch.num_micro_batches
    resolved["gradient_clipping"] = (
        # DeepSpeed's default is 1.0, over all parameters of a stage; engine/optimizer/clipping.py
        # clips by group
        0.0
    )
    if precision_of(config) == "bf16":
        # DeepSpeed would round the fp32 sums to bf16 on their way to the other replicas
        resolved.setdefault("communication_data_type", "fp32")
        # gradients reach their fp32 sums during the backward, so that averages can start in it
        resolved["bf16"].setdefault("immediate_grad_update", True)
    if steps_matrices(config.get("optimizer", {})):
        # DeepSpeed does not know it, and asks whether it may step slices
        resolved["zero_allow_untested_optimizer"] = True
    resolved.setdefault("steps_per_print", None)
    if "pipeline" in resolved:
        resolved["pipeline"]["use_reentrant"] = False
    optimizer = resolved.get("optimizer", {})
    params = optimizer.get("params") or {}
    if (
        str(optimizer.get("type", "")).lower() in ("adam", "adamw")
        and params.get("torch_adam")
        and not {"fused", "foreach", "capturable", "differentiable"} & set(params)
    ):
        # one pass over the parameters instead of a dozen, on a CPU as on a GPU, and nothing to
        # compile
        params["fused"] = True
    if scheduler := resolved.get("scheduler"):
        scheduler["params"] = with_length(scheduler.get("params", {}), total_num_steps)
    return resolved
