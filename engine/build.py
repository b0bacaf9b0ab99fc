"""From a plan to a running engine: the communicator, the stage of this rank, DeepSpeed around
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from engine.communication import Communicator
from engine.executor import ForkEngine, FromBytes
from engine.module import DescribesLayer, StageModule
from engine.objective import Objective
from engine.optimizer.clipping_rules import refuse_idle_patterns
from engine.optimizer.parameter_groups import settings_of
from engine.planning.planner import RunPlan, deepspeed_config
from engine.processes.out_of_memory import BUILDING, RankSetup, Work, explained, message
from engine.processes.start import as_local_rank
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
    values of those that come as uint8, on this rank's device. Raises ValueError for a pattern (of clipping or decay) that matches no parameter, OutOfMemory
    when the stage does not fit.
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
    settings = settings_of(plan.optimizer_groups, layers, config["optimizer"])
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
        module = StageModule(
            graph=plan.graph,
            rank=rank,
            layers=layers,
            build_layer=build_layer,
            stage_group=comm.stage_group,
            seed=seed,
            settings=settings,
            trainable=plan.trainable,
            batch_norm_locked=plan.batch_norm_locked,
            compiled=plan.compiled,
        )
        return ForkEngine(
            module,
            comm,
            batches=plan.batches,
            config=resolved,
            schedule=plan.schedule,
            clipping=plan.clipping,
            optimizer_groups=plan.optimizer_groups,
            average=plan.average,
            embed_dim=embed_dim,
            equal_shares=equal_shares,
            source_starts=source_starts,
            setup=setup,
            from_bytes=from_bytes,
        )
