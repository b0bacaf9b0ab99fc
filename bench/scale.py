"""Starting on hundreds of GPUs, on one machine without any: what a rank makes and asks for.

    python bench/scale.py                      512 and 1,024 ranks; writes bench/out/scale.md
    python bench/scale.py --world-sizes 64     fewer

Engines are those of the first, a middle and the last rank, built with torch's fake process group,
whose operations do nothing: process groups that were made, in how many this rank is, open files,
seconds. The store is a real one: all ranks, each a thread with connections of its own, find out
where they are, wait three times for the first rank, and watch over each other for two rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
OUT = ROOT / "bench" / "out"
LIMIT_S = 600.0
PER_NODE = 8


def layouts(world_size: int) -> dict[str, dict[str, Any]]:
    """What is given in the block "branches"."""
    half = world_size // 2
    return {
        "merged": {"layout": "merged", "stages": {"merged": 1}},
        "merged, 8 stages": {"layout": "merged", "stages": {"merged": 8}},
        "fork": {
            "layout": "fork",
            "stages": {"image": 1, "text": 1},
            "replicas": {"image": world_size - world_size // 4, "text": world_size // 4},
        },
        "fork, 2 + 2 stages": {
            "layout": "fork",
            "stages": {"image": 2, "text": 2},
            "replicas": {"image": half // 2, "text": half // 2},
        },
    }


# -- one rank's engine


def build(world_size: int, layout: str, rank: int) -> None:
    """Prints what it took to build the engine of a rank, as JSON."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    from unittest import mock

    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bench.common import Setup, make_engine

    setup = Setup(
        image_tower="vit_b_16:hidden_dim=32,num_layers=8,num_heads=2,mlp_dim=64,patch_size=16",
        image_size=32,
        text_tower="bert-mini:hidden_size=32,num_attention_heads=2,intermediate_size=64,"
        "num_hidden_layers=8",
        num_tokens=8,
        vocab_size=128,
        embed_dim=16,
        global_batch_size=12 * world_size,
        micro_batch_size=4,
    )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    made: list[Sequence[int]] = []

    def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        made.append(range(world_size) if ranks is None else ranks)
        return original(ranks=ranks, backend="fake")

    original = dist.new_group
    with (
        mock.patch.object(dist, "new_group", new_group),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        files, start = open_files(), time.perf_counter()
        engine = make_engine(setup, layouts(world_size)[layout])
        seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "groups": len(made),
                "member": sum(rank in ranks for ranks in made),
                "of_world": sum(len(ranks) == world_size for ranks in made),
                "stages": len(engine.graph.stages),
                "files": open_files() - files,
                "seconds": seconds,
            }
        )
    )


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def built(world_size: int, layout: str) -> list[dict[str, Any]]:
    """Of the first, a middle and the last rank."""
    found = []
    for rank in (0, world_size // 2, world_size - 1):
        command = [sys.executable, __file__, "--engine", str(world_size), layout, str(rank)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if ran.returncode:
            sys.exit(f"bench/scale.py: {layout}, rank {rank} failed:\n{ran.stderr[-3000:]}")
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    return found


# -- all ranks at one store


def start_together(world_size: int) -> dict[str, float]:
    """Of a rank, in a mean over all of them, each a thread: calls of the store, open files; seconds
    until all are through."""
    from unittest import mock

    import torch.distributed as dist

    from engine.checks import AUTO
    from engine.processes.places import Place, communication_of, meet
    from engine.processes.start import PREPARATION_LIMIT, free_port
    from engine.processes.store import connect
    from engine.processes.watchdog import BEAT_S, Watchdog

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    limit = timedelta(seconds=LIMIT_S)
    server = dist.TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
    )
    calls: Counter[str] = Counter()
    phase, watchdogs = "to meet", []

    def counted(name: str) -> Any:
        original = getattr(dist.Store, name)

        def call(store: dist.Store, *args: Any) -> Any:
            calls[phase] += 1
            return original(store, *args)

        return mock.patch.object(dist.PrefixStore, name, call, create=True)

    def rank_starts(rank: int) -> Any:
        client = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit
        )
        store = dist.PrefixStore("start", client)
        gpu = f"GPU {rank}"
        place = Place(f"node {rank // PER_NODE}", f"{rank}", gpu, PER_NODE, os.getpid(), {})
        decide = partial(communication_of, AUTO, "cuda")
        return meet(store, rank, world_size, place, decide)[0], client

    def waits_for_first(rank: int, turn: int) -> None:
        """As `first_rank_first`."""
        store = connect("secret", PREPARATION_LIMIT)
        if rank:
            store.wait([f"first/{turn}"])
        else:
            store.set(f"first/{turn}", "")

    def watches(rank: int) -> None:
        watchdogs.append(Watchdog(rank, places, "secret").start())

    files, found = open_files(), {}
    with ExitStack() as stack, ThreadPoolExecutor(world_size) as ranks:
        for name in ("set", "get", "add", "wait", "check", "compare_set", "multi_get"):
            stack.enter_context(counted(name))
        start = time.perf_counter()
        started = list(ranks.map(rank_starts, range(world_size)))
        found["seconds to meet"] = time.perf_counter() - start
        places, phase = started[0][0], "to wait three times"
        for turn in range(3):
            list(ranks.map(partial(waits_for_first, turn=turn), range(world_size)))
        found["seconds until then"] = time.perf_counter() - start
        phase = "to watch, two rounds"
        list(ranks.map(watches, range(world_size)))
        time.sleep(2.5 * BEAT_S)
        # both ends of a connection are in this process
        found["files"] = (open_files() - files) / 2 / world_size
        list(ranks.map(Watchdog.stop, watchdogs))
        del server
    return found | {name: number / world_size for name, number in calls.items()}


def store_table(world_sizes: Sequence[int]) -> str:
    lines = []
    for world_size in world_sizes:
        command = [sys.executable, __file__, "--store", str(world_size)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if ran.returncode:
            sys.exit(f"bench/scale.py: {world_size} ranks failed:\n{ran.stderr[-3000:]}")
        found = json.loads(ran.stdout.splitlines()[-1])
        if not lines:
            lines += ["| ranks | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
        numbers = " | ".join(f"{number:.1f}" for number in found.values())
        lines.append(f"| {world_size:,} | {numbers} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def table(world_sizes: Sequence[int]) -> str:
    lines = [
        "| ranks, layout | stages | groups made by all | of these, of a rank | of the world | s |",
        "|---|---|---|---|---|---|",
    ]
    for world_size in world_sizes:
        for layout in layouts(world_size):
            ranks = built(world_size, layout)
            most = {key: max(one[key] for one in ranks) for key in ranks[0]}
            lines.append(
                f"| {world_size:,}, {layout} | {most['stages']} | {most['groups']:,} | "
                f"{most['member']} | {most['of_world']} | {most['seconds']:.1f} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store:
        print(json.dumps(start_together(options.store)))
        return
    if options.engine:
        world_size, layout, rank = options.engine
        build(int(world_size), layout, int(rank))
        return
    text = f"{store_table(options.world_sizes)}\n\n{table(options.world_sizes)}"
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "scale.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
