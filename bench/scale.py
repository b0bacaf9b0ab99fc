"""Starting on hundreds of GPUs, on one machine without any: what a rank makes and asks for.

python bench/scale.py engines                     512 and 1,024 ranks; bench/out/scale-engines.md
python bench/scale.py store --world-sizes 64      fewer
"""

from __future__ import annotations

import os
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Setup, make_engine
from bench.compare import Column, Figures, Study, Way, main, on_ranks
from bench.steps import fork, merged

LIMIT_S = 600.0
PER_NODE = 8


def layouts(world_size: int) -> dict[str, dict[str, Any]]:
    quarter = world_size // 4
    return {
        "merged": merged(1, world_size),
        "merged, 8 stages": merged(8, world_size // 8),
        "fork": fork(replicas=(world_size - quarter, quarter)),
        "fork, 2 + 2 stages": fork(2, 2, (quarter, quarter)),
    }


# -- one rank's engine


def build(world_size: int, layout: str, rank: int) -> dict[str, float]:
    """The engine of a rank, with torch's fake process group, whose operations do nothing."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_SIZE": "1"}
    from unittest import mock

    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

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
    with mock.patch.object(dist, "new_group", new_group):
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        start = time.perf_counter()
        engine = make_engine(setup, layouts(world_size)[layout])
        seconds = time.perf_counter() - start
    return {
        "groups": len(made),
        "member": sum(rank in ranks for ranks in made),
        "of_world": sum(len(ranks) == world_size for ranks in made),
        "stages": len(engine.graph.stages),
        "seconds": seconds,
    }


def built(world_size: int, layout: str) -> Figures:
    """The most of the first, a middle and the last rank."""
    found = [
        on_ranks(1, build, world_size, layout, rank, started=False)[0]
        for rank in (0, world_size // 2, world_size - 1)
    ]
    return {key: max(one[key] for one in found) for key in found[0]}


def engines(world_sizes: Sequence[int] = (512, 1024)) -> Study:
    """Process groups that are made: their number and that of a rank's own do not grow with the
    ranks, but for those of the replicas."""
    return Study(
        "Engines of many ranks",
        {
            f"{size} ranks, {layout}": Way(partial(built, size, layout))
            for size in world_sizes
            for layout in layouts(size)
        },
        (
            Column("stages", "stages", "{:.0f}"),
            Column("groups", "groups made by all", "{:,.0f}"),
            Column("member", "of these, of a rank", "{:.0f}"),
            Column("of_world", "of the world", "{:.0f}"),
            Column("seconds", "s", "{:.1f}"),
        ),
        rounds=1,
    )


# -- all ranks at one store


def start_together(world_size: int) -> dict[str, float]:
    """Of a rank, in a mean over all of them, each a thread with connections of its own: calls of a
    real store, open files; seconds until all are through."""
    from unittest import mock

    import torch.distributed as dist

    from engine.checks import AUTO
    from engine.processes.communication import communication_of
    from engine.processes.places import Place, meet
    from engine.processes.start import PREPARATION_LIMIT, free_port
    from engine.processes.store import connect
    from engine.processes.watchdog import BEAT_S, Watchdog

    port, limit = free_port(), timedelta(seconds=LIMIT_S)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit)
    calls: Counter[str] = Counter()
    phase, watchdogs = "met", []

    def counted(name: str) -> Any:
        original = getattr(dist.Store, name)

        def call(store: dist.Store, *args: Any) -> Any:
            calls[phase] += 1
            return original(store, *args)

        return mock.patch.object(dist.PrefixStore, name, call, create=True)

    def rank_starts(rank: int) -> Any:
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        store = dist.PrefixStore("start", client)
        gpu = f"GPU {rank}"
        place = Place(f"node {rank // PER_NODE}", f"{rank}", gpu, PER_NODE, os.getpid(), {})
        decide = partial(communication_of, AUTO, "cuda")
        return meet(store, rank, world_size, place, decide).places, client

    def waits_for_first(rank: int, turn: int) -> None:
        """As `first_rank_first`."""
        store = connect("secret", PREPARATION_LIMIT)
        if rank:
            store.wait([f"first/{turn}"])
        else:
            store.set(f"first/{turn}", "")

    def watches(rank: int) -> None:
        watchdogs.append(Watchdog(rank, places, "secret").start())

    files, found = _open_files(), {}
    with ExitStack() as stack, ThreadPoolExecutor(world_size) as ranks:
        for name in ("set", "get", "add", "wait", "check", "compare_set", "multi_get"):
            stack.enter_context(counted(name))
        start = time.perf_counter()
        started = list(ranks.map(rank_starts, range(world_size)))
        found["met_s"] = time.perf_counter() - start
        places, phase = started[0][0], "waited"
        for turn in range(3):
            list(ranks.map(partial(waits_for_first, turn=turn), range(world_size)))
        found["waited_s"] = time.perf_counter() - start
        phase = "watched"
        list(ranks.map(watches, range(world_size)))
        time.sleep(2.5 * BEAT_S)
        # both ends of a connection are in this process
        found["files"] = (_open_files() - files) / 2 / world_size
        list(ranks.map(Watchdog.stop, watchdogs))
        del server
    return found | {name: number / world_size for name, number in calls.items()}


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def store(world_sizes: Sequence[int] = (512, 1024)) -> Study:
    """Calls of the store by a rank: a few, whatever the number of ranks, to find out where all are,
    to wait three times for the first rank, and to watch over each other for two rounds."""
    return Study(
        "Many ranks at one store",
        {
            f"{size} ranks": Way(lambda n=size: on_ranks(1, start_together, n, started=False)[0])
            for size in world_sizes
        },
        (
            Column("met_s", "s until all have met", "{:.1f}"),
            Column("waited_s", "and waited three times", "{:.1f}"),
            Column("files", "open files of a rank", "{:.1f}"),
            Column("met", "calls of a rank, to meet", "{:.1f}"),
            Column("waited", "to wait", "{:.1f}"),
            Column("watched", "to watch, two rounds", "{:.1f}"),
        ),
        rounds=1,
    )


STUDIES = (engines, store)

if __name__ == "__main__":
    main("bench.scale")
