"""What ranks do that are not started alike; a module of its own, because ranks import it by name."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cost_models import BRANCHES, proportional

from data.options import LoadingOptions
from engine.config.reading import check_config
from engine.planning.costs import cost_model_to_json
from engine.planning.measured import device_identity
from engine.planning.profile_layers import Ranks
from engine.planning.profile_machine import with_links
from engine.processes.agreement import refuse_differences
from engine.processes.places import Place, Places
from engine.processes.start import Processes, first_rank_first, start_processes
from launch.config.groups import InputOptions
from launch.feeding import share_cores
from launch.objective import objective_of, pairs_of
from launch.run.folder import RunFolder
from launch.setup.costing import run_costs
from launch.setup.model import RunModel
from models.losses import InfoNCE
from models.towers.building import build_towers


def start_unlike(folder: Path) -> dict[str, Any]:
    """Three ranks: two of one node, of which the second has one core, and one of another."""
    rank = int(os.environ["RANK"])
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    soft, hard = 4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if rank == 1:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    place, watched = Place.here("cpu", rank, 1), []
    processes = start_processes(
        place=replace(place, node="another", cores="others") if rank == 2 else place,
        watch=lambda rank, _, secret: watched.append((rank, dist.is_initialized(), secret)),
    )
    together = Ranks(processes.device, processes.places)
    return {
        "ranks_on_node": processes.ranks_on_node,
        "devices": processes.places.devices,
        "LOCAL_SIZE": os.environ["LOCAL_SIZE"],
        "threads": _threads(processes),
        "secret": processes.secret,
        "watched": watched[0],
        "machine": with_links(
            proportional(dict.fromkeys(BRANCHES, [1.0])).machine, processes.device, together
        ),
        "file_limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        **_wait_for_first(processes, folder / "left"),
    }


def _threads(processes: Processes) -> int:
    """That torch computes with once cores are shared."""
    share_cores(LoadingOptions(workers=0, cache="off"), processes)
    return torch.get_num_threads()


def _wait_for_first(processes: Processes, left: Path) -> dict[str, Any]:
    """`seen`: whether the first rank had gone through when this one came in."""
    before = _descriptors()
    with first_rank_first(processes):
        seen = left.exists()
        if processes.rank == 0:
            time.sleep(0.2)
            left.touch()
    return {"seen": seen, "descriptors_left": _descriptors() - before}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def compare_records() -> tuple[str | None, ...]:
    """What is said of equal records, of different ones, and of long ones with a remedy."""
    rank = int(os.environ["RANK"])
    return (
        _said({"plan": {"stages": 4}}),
        _said({"alike": 1, "plan": {"stages": 4 + rank, "layout": "fork"}}),
        _said({"data": f"{'a' * 300}{rank}{'b' * 300}"}, "give them alike"),
    )


def _said(record: dict[str, Any], remedy: str = "") -> str | None:
    try:
        refuse_differences(record, remedy)
    except ValueError as error:
        return str(error)
    return None


def costs_of_run(folder: Path) -> list[dict[str, Any]]:
    """`run_costs` where the first rank has a CPU and the second a GPU: estimates, and what the
    first has measured before."""
    rank = dist.get_rank()
    processes = Processes(
        rank=rank,
        world_size=2,
        local_rank=rank,
        places=Places.together(2),
        device=torch.device("cuda" if rank else "cpu"),
        timeout=timedelta(seconds=60),
        communication="host",
        secret="",
    )
    written = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    fork = {"layout": "fork", "balance": {"strategy": "off"}}
    config, block = check_config({**written, "branches": fork}, BRANCHES)
    towers = build_towers("resnet18:layers=1-1-1-1", "bert-tiny", 16, 32, 128, 16)
    objective = objective_of(towers, pairs_of("image:text", InfoNCE()))
    run_folder = RunFolder(folder, rank == 0)
    get = partial(
        run_costs,
        RunModel(towers, objective, embed_dim=16, seed=0),
        config,
        block,
        data=None,
        inputs=InputOptions(
            image_size=32,
            image_resize=32,
            image_mean=(0, 0, 0),
            image_std=(1, 1, 1),
            image_interpolation="bicubic",
            image_resize_mode="shortest",
            max_text_tokens=16,
        ),
        loading=LoadingOptions(workers=rank, cache="off"),
        processes=processes,
        folder=run_folder,
    )
    estimated = get()
    if rank == 0:
        name = device_identity(processes.device)["device"]
        machine = replace(estimated.machine, name=name, flops_per_s=123.0, measured=True)
        run_folder.write_costs(cost_model_to_json(replace(estimated, machine=machine)))
    return [cost_model_to_json(costs) for costs in (estimated, get())]
