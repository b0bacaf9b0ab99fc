"""Averages and gathers over nodes with slow links: as long as the planner says?

    python bench/collectives.py      as root, on Linux with iproute2; bench/out/collectives.md

Each node is a network namespace of this machine with an interface of limited speed. The ranks
measure their links as `branches.layout: "auto"` does, then average and gather tensors over groups
of different shapes, by gloo. The limit is low, so that the network is what they wait for and not
the machine's cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import free_machine
from bench.compare import ROOT, Column, Figures, Study, Way, main

if TYPE_CHECKING:
    from engine.planning.costs import Machine

PORT = 29731
LIMIT_S = 300.0
ON_A_RANK = (
    "import json, sys; from bench.collectives import measure; measure(*json.loads(sys.argv[1]))"
)


def groups_of(num_nodes: int, per_node: int) -> dict[str, list[list[int]]]:
    """Consecutive ranks, as the replicas of a stage are; those of a line work at the same time."""
    world = num_nodes * per_node
    firsts = range(0, world, per_node)
    return {
        "all ranks": [list(range(world))],
        "the ranks of each node": [list(range(first, first + per_node)) for first in firsts],
        "one of the first node, all of the others": [list(range(per_node - 1, world))],
        "one of each node, as many groups": [
            list(range(rank, world, per_node)) for rank in range(per_node)
        ],
    }


# -- on each rank


def measure(master: str, rank: int, nodes: int, per_node: int, name: str, num_bytes: int) -> None:
    """Prints, on rank 0, the figures as JSON."""
    import torch
    import torch.distributed as dist

    from engine.planning.profile_layers import Ranks
    from engine.planning.profile_machine import with_links
    from engine.processes.places import Places

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{PORT}",
        rank=rank,
        world_size=nodes * per_node,
        timeout=timedelta(seconds=LIMIT_S),
    )
    device = torch.device("cpu")
    places = Places.together(nodes * per_node)
    places = replace(places, nodes=tuple(r // per_node for r in range(nodes * per_node)))
    machine = with_links(free_machine("namespaces", 1e15), device, Ranks(device, places))
    members = groups_of(nodes, per_node)[name]
    made = [dist.new_group(ranks) for ranks in members]
    own = next((group for group, ranks in zip(made, members) if rank in ranks), None)
    for _ in range(2):  # the first does not count
        average_s, gather_s = _seconds(own, len(members[0]), num_bytes // 4)
    once_s = _predicted(machine, members[0], num_bytes)
    if rank == 0:
        found = {
            "average_s": average_s,
            "gather_s": gather_s,
            "predicted_average_s": 2 * once_s,
            "predicted_gather_s": once_s,
            "average_ratio": 2 * once_s / average_s,
            "gather_ratio": once_s / gather_s,
            "between_mb": machine.node_bytes_per_s / 1e6,
            "within_mb": machine.link_bytes_per_s / 1e6,
        }
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _predicted(machine: Machine, ranks: list[int], num_bytes: int) -> float:
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return machine.ring(ranks).seconds(num_bytes)
    # no stage's replicas: each hop is between nodes, at one rank's share
    hop_s = machine.node_latency_s + num_bytes / len(ranks) / machine.node_bytes_per_s
    return (len(ranks) - 1) * hop_s + num_bytes * machine.collective_s_per_byte


def _seconds(group: Any, size: int, numel: int) -> tuple[float, float]:
    """Of an average and of a gather in this rank's group, the slowest rank's; all ranks call it,
    and those without a group wait."""
    import torch
    import torch.distributed as dist

    found = []
    for gathers in (False, True):
        whole = torch.ones(numel // size * size)
        parts = list(whole.chunk(size))
        dist.barrier()
        started = time.perf_counter()
        if group is not None and gathers:
            dist.all_gather(parts, parts[dist.get_rank(group)].clone(), group=group)
        elif group is not None:
            dist.all_reduce(whole, group=group)
        slowest = torch.tensor([time.perf_counter() - started if group is not None else 0.0])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(float(slowest))
    return found[0], found[1]


# -- the nodes


def on_nodes(count: int, per_node: int, megabits: int, name: str, num_bytes: int) -> Figures:
    from nodes import nodes

    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the addresses have no names
    }
    with nodes(count, megabits) as made, ExitStack() as undo:
        ranks = []
        for rank in range(count * per_node):
            given = json.dumps([made[0].address, rank, count, per_node, name, num_bytes])
            started = subprocess.Popen(
                made[rank // per_node].command(sys.executable, "-c", ON_A_RANK, given),
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            undo.callback(started.kill)
            ranks.append(started)
        printed = ranks[0].communicate(timeout=LIMIT_S)[0]
        failed = [rank for rank, process in enumerate(ranks) if process.wait(timeout=30)]
    if failed:
        sys.exit(f"ranks {failed} failed; their messages are above")
    return json.loads(printed.splitlines()[-1])


def collectives(nodes: int = 2, ranks: int = 4, megabits: int = 400, mebibytes: int = 32) -> Study:
    """Averages and gathers as long as the planner's model of rings says, which lets a part of a
    tensor make one hop to each other rank, and the ranks of a node use its network together.
    --ranks and --megabits: of each node; --mebibytes: of the tensor."""
    from nodes import lacking

    if reason := lacking():
        sys.exit(f"bench/collectives.py {reason}")
    return Study(
        "Collectives over nodes with slow links",
        {
            name: Way(partial(on_nodes, nodes, ranks, megabits, name, mebibytes * 2**20))
            for name in groups_of(nodes, ranks)
        },
        (
            Column("predicted_average_s", "all-reduce, s, predicted", "{:.3f}"),
            Column("average_s", "measured", "{:.3f}"),
            Column("average_ratio", "predicted ÷ measured", "{:.2f}"),
            Column("predicted_gather_s", "all-gather, s, predicted", "{:.3f}"),
            Column("gather_s", "measured", "{:.3f}"),
            Column("gather_ratio", "predicted ÷ measured", "{:.2f}"),
            Column("between_mb", "MB/s of a rank between nodes", "{:.1f}"),
            Column("within_mb", "within", "{:.0f}"),
        ),
        f"{nodes} nodes of {ranks} ranks, {megabits} Mbit/s each, {mebibytes} MiB.",
    )


STUDIES = (collectives,)

if __name__ == "__main__":
    main("bench.collectives")
