"""Collectives over two nodes: what the planner's model of them says, beside what they take.

    python bench/collectives.py      as root, on Linux with iproute2; writes bench/out/collectives.md and prints it

Each node is a network namespace of this machine with an interface of limited speed. The ranks
measure their links as `branches.layout: "auto"` does, then average and gather tensors over groups
of different shapes, by gloo. The limit is low, so that the network is what they wait for and not
the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with nodes.py
OUT = ROOT / "bench" / "out"

from nodes import lacking, nodes

PORT = 29731
LIMIT_S = 300.0


def groups_of(num_nodes: int, per_node: int) -> dict[str, list[list[int]]]:
    """Consecutive ranks, as the replicas of a stage are; those of a line work at the same time."""
    world = num_nodes * per_node
    return {
        "all ranks": [list(range(world))],
        "the ranks of each node": [
            list(range(first, first + per_node)) for first in range(0, world, per_node)
        ],
        "one of the first node, all of the others": [list(range(per_node - 1, world))],
        "one of each node, as many groups": [
            [rank + node * per_node for node in range(num_nodes)] for rank in range(per_node)
        ],
    }


# -- on each rank


def measure(options: argparse.Namespace) -> None:
    """Prints, on rank 0, what was measured as JSON."""
    import torch
    import torch.distributed as dist

    from bench.common import free_machine
    from engine.planning.profile_layers import Together
    from engine.planning.profile_machine import with_links
    from engine.processes.places import Places

    torch.set_num_threads(1)
    world = options.nodes * options.ranks
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.master}:{PORT}",
        rank=options.rank,
        world_size=world,
        timeout=timedelta(seconds=LIMIT_S),
    )
    device = torch.device("cpu")
    free = free_machine("namespaces", 1e15)
    nodes = tuple(rank // options.ranks for rank in range(world))
    places = replace(Places.together(world), nodes=nodes)
    machine = with_links(free, device, Together(device, places))
    rows = []
    for name, members in groups_of(options.nodes, options.ranks).items():
        made = [dist.new_group(ranks) for ranks in members]
        own = next((g for g, ranks in zip(made, members) if options.rank in ranks), None)
        # not consecutive, so no stage's replicas: each hop is between nodes, at one rank's share
        ring = machine.ring(members[0]) if _consecutive(members[0]) else None
        for mebibytes in options.mebibytes:
            num_bytes = mebibytes * 2**20
            seconds = [
                _seconds(own, len(members[0]), num_bytes // 4) for _ in range(options.rounds + 1)
            ][1:]
            averages, gathers = (sorted(each) for each in zip(*seconds))
            if ring is None:
                once = (len(members[0]) - 1) * (
                    machine.node_latency_s + num_bytes / len(members[0]) / machine.node_bytes_per_s
                ) + num_bytes * machine.collective_s_per_byte
            else:
                once = ring.seconds(num_bytes)
            for kind, predicted, measured in (
                ("all-reduce", 2 * once, averages),
                ("all-gather", once, gathers),
            ):
                rows.append(
                    {
                        "group": name,
                        "kind": kind,
                        "mebibytes": mebibytes,
                        "predicted_s": predicted,
                        "measured_s": measured,
                    }
                )
    if options.rank == 0:
        print(json.dumps({"machine": vars(machine), "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def _consecutive(ranks: Sequence[int]) -> bool:
    return list(ranks) == list(range(ranks[0], ranks[-1] + 1))


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


def run(options: argparse.Namespace) -> dict[str, Any]:
    given = [f"--{key}={getattr(options, key)}" for key in ("nodes", "ranks", "rounds")]
    given += ["--mebibytes", *map(str, options.mebibytes)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the addresses have no names
    with nodes(options.nodes, options.megabits) as made, ExitStack() as undo:
        ranks = []
        for rank in range(options.nodes * options.ranks):
            started = subprocess.Popen(
                made[rank // options.ranks].command(
                    *[sys.executable, __file__, *given, "--rank", str(rank)],
                    *["--master", made[0].address],
                ),
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            undo.callback(started.kill)
            ranks.append(started)
        printed = ranks[0].communicate(timeout=LIMIT_S)[0]
        failed = [r for r, process in enumerate(ranks) if process.wait(timeout=30)]
    if failed:
        raise SystemExit(f"ranks {failed} failed; their messages are above")
    return json.loads(printed.splitlines()[-1])


def report(found: dict[str, Any], options: argparse.Namespace) -> str:
    machine = found["machine"]
    lines = [
        f"{options.nodes} nodes of {options.ranks} ranks, {options.megabits} Mbit/s each; measured per "
        f"rank while all send: {machine['node_bytes_per_s'] / 1e6:.1f} MB/s between nodes, "
        f"{machine['link_bytes_per_s'] / 1e6:.0f} MB/s within; {options.rounds} rounds",
        "",
        "| group | what | MiB | predicted | measured, median (least – most) | predicted ÷ measured |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        seconds = row["measured_s"]
        median = statistics.median(seconds)
        lines.append(
            f"| {row['group']} | {row['kind']} | {row['mebibytes']} | {row['predicted_s']:.3f} s | "
            f"{median:.3f} ({seconds[0]:.3f} – {seconds[-1]:.3f}) s | {row['predicted_s'] / median:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="of each node (default: %(default)s)")
    parser.add_argument(
        "--megabits", type=int, default=400, help="per second, of each node (default: %(default)s)"
    )
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return measure(options)
    if reason := lacking():
        raise SystemExit(f"bench/collectives.py {reason}")
    text = report(run(options), options)
    OUT.mkdir(exist_ok=True)
    (OUT / "collectives.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
