"""What each rank does in the test of `"fit": "measure"`; a module of its own, because ranks import it
by name."""

import ctypes
import os
import resource
from dataclasses import replace
from functools import partial

import psutil
import torch
import torch.distributed as dist
from cost_models import BRANCHES
from small_towers import EMBED_DIM
from split_training import Case, global_batch, micro_batch, towers_of

from engine.config.reading import check_config
from engine.planning.devices import find_device
from engine.planning.planner import plan_run
from engine.planning.profile_layers import Ranks
from engine.processes.places import Places
from engine.profile_stage import fit_together
from launch.setup.costing import NOMINAL
from launch.setup.estimates import estimated_costs

M_MMAP_THRESHOLD = -3  # of mallopt(3)


def fit(case: Case, cache: str, scarce: dict[int, int]) -> dict[str, object]:
    """What is planned where these ranks may have so many bytes more than now; with the plans that
    were made on the way, and the layers that were built for a trial."""
    os.environ["WYE_CACHE"] = cache
    towers, image_size = towers_of(case)
    config, block = check_config(case.config, BRANCHES)
    costs = estimated_costs(
        list(towers.values()), config, EMBED_DIM, find_device(NOMINAL["cpu"]), float("inf")
    )
    plans, built = [], []

    def plan_within(limit_bytes: float):
        limited = replace(costs, machine=replace(costs.machine, memory_bytes=limit_bytes))
        plans.append(plan_run(config, block, case.world_size, limited))
        return plans[-1]

    def build(spec):
        built.append(spec.name)
        return spec.build(case.seed)

    batch = global_batch(case, 0, image_size)

    def inputs(branch: str, size: int):
        return micro_batch(case, batch, branch, torch.arange(size))

    rank = dist.get_rank()
    if rank in scarce:
        # addresses count, so blocks from 64 KiB on are given back when they are freed
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**16)
        now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + scarce[rank], -1))
    plan = fit_together(
        plan_within,
        {"case": str(case)},
        config["optimizer"],
        layers={branch: tower.specs for branch, tower in towers.items()},
        build_layer=build,
        inputs={branch: partial(inputs, branch) for branch in BRANCHES},
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranks=Ranks(torch.device("cpu"), Places.together(case.world_size)),
    )
    return {
        "plan": plan.describe(),
        "tried": [each.describe() for each in plans],
        "peak": [stage.peak_bytes for stage in plan.predicted],
        "built": len(built),
    }
