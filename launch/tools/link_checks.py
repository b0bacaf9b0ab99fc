"""How fast every two ranks reach each other. `launch.tools.doctor` starts this module once on every
host, which starts the ranks of the host; the first rank prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.output import outlive_output
from engine.json_messages import from_all_ranks, wait_for_all
from engine.processes.communication import HOST
from engine.processes.places import Place, meet
from engine.processes.start import prepare_for
from engine.processes.store import open_store
from launch.tools.machine_checks import Finding, judged

MESSAGE = {"nccl": 64 << 20, "gloo": 4 << 20}  # bytes
TRIES = 3  # the first connects
SLOW = 0.5  # of what most of its kind reach
LIMIT = timedelta(seconds=60)


def measure(local: int, host: str, first: int, here: int, world: int, meeting: str) -> None:
    """As one rank. In each turn a rank speaks to one other, both ways at once, so that a slow link
    delays nobody else; after `world` turns every two have met."""
    on_gpus = os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend, rank = "nccl" if on_gpus else "gloo", first + local
    dist.init_process_group(
        backend,
        store=_met(meeting, rank, world, local, here, device.type),
        rank=rank,
        world_size=world,
        timeout=LIMIT,
    )
    if on_gpus:  # a run has groups of gloo beside those of NCCL
        by_gloo: Any = dist.new_group(backend="gloo", timeout=LIMIT)
        wait_for_all(by_gloo)
    mine, theirs = torch.zeros(2, MESSAGE[backend], dtype=torch.uint8, device=device)
    found = []
    for turn in range(world):
        other, seconds = (turn - rank) % world, float("inf")
        for _ in range(TRIES):
            wait_for_all()
            start = time.perf_counter()
            if other != rank:
                both = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()
            if on_gpus:
                torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - start)
        if other > rank:
            found.append((rank, other, MESSAGE[backend] / seconds))
    of_all = from_all_ranks((host, found))
    if rank == 0:
        finding = compare([host for host, _ in of_all], [link for _, own in of_all for link in own])
        print(json.dumps({"findings": [finding]}), flush=True)
    wait_for_all()
    dist.destroy_process_group()


def _met(
    meeting: str, rank: int, world: int, local: int, here: int, device_type: str
) -> dist.Store:
    """The store in which the ranks have met, and chosen their interface as those of a run do: of
    one host where no other machine can connect. `meeting`: host of the first rank and port."""
    host, _, port = meeting.rpartition(":")
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "LOCAL_SIZE": str(here)}
    place = Place.here(device_type, local, here)  # where the way to that host leads
    store = open_store(rank, world, LIMIT)
    places = meet(store, rank, world, place, lambda told: HOST).places
    prepare_for(places, rank, HOST)
    return store


def compare(hosts: Sequence[str], links: Sequence[tuple[int, int, float]]) -> Finding:
    """Speeds, and the links that are much slower than most of their kind. `hosts`: by rank."""
    found, slow = [], []
    for near, kind in ((True, "within a host"), (False, "between hosts")):
        of_kind = [link for link in links if (hosts[link[0]] == hosts[link[1]]) == near]
        if speeds := sorted(speed for *_, speed in of_kind):
            most = speeds[len(speeds) * 3 // 4]
            found.append(f"{kind} {most / 1e9:.2f} GB/s, the slowest {speeds[0] / 1e9:.2f}")
            slow += [
                f"rank {one} on {hosts[one]} and rank {two} on {hosts[two]} {speed / 1e9:.2f}"
                for one, two, speed in of_kind
                if speed < SLOW * most
            ]
    advice = "slow: look at cables, network cards and nvidia-smi topo -m of these"
    return judged("links", -len(slow), -len(links), 0, "; ".join([*found, *slow[:4]]), advice)


if __name__ == "__main__":
    outlive_output()
    host, (first, here, world) = sys.argv[1], map(int, sys.argv[2:5])
    # forked: torch is imported once, and no GPU is open yet
    torch.multiprocessing.start_processes(
        measure,
        (host, first, here, world, ":".join(sys.argv[5:])),
        nprocs=here,
        start_method="fork",
    )
