"""Starting on hundreds of GPUs, on one machine without any: what a rank makes and asks for.

python bench/scale.py engines                     512 and 1,024 ranks; bench/out/scale-engines.md
python bench/scale.py groups                      8, 64 and 1,024 ranks, with matching, regions, sound
python bench/scale.py store --world-sizes 64      fewer
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import GIB, Column, Figures, Study, Way, main, on_ranks
from bench.steps import fork, merged
from bench.towers import Setup, make_engine

LIMIT_S = 600.0
OPERATIONS = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce")
OPERATIONS += ("send", "recv")
PER_NODE = 8


def layouts(world_size: int) -> dict[str, dict[str, Any]]:
    quarter = world_size // 4
    return {
        "merged": merged(1, world_size),
        "merged, 8 stages": merged(8, world_size // 8),
        "fork": fork(replicas=(world_size - quarter, quarter)),
        "fork, 2 + 2 stages": fork(2, 2, (quarter, quarter)),
    }


@contextmanager
def groups_counted(rank: int, world_size: int) -> Iterator[dict[str, float]]:
    """What is made in here as a rank, with torch's fake process group, whose operations do nothing:
    groups, those of the rank, those with an operation, but for those that connect nobody, and those
    of the world."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from engine.groups import ALONE

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    original, made, used = dist.new_group, list[Sequence[int]](), set[Any]()

    def new_group(ranks: Any = None, backend: str | None = None, **_: Any) -> Any:
        made.append(range(world_size) if ranks is None else list(ranks))
        return original(ranks=list(made[-1]), backend=backend if backend == ALONE else "fake")

    def noting(name: str) -> Any:
        operate = getattr(dist, name)

        def operation(*args: Any, **options: Any) -> Any:
            group = options.get("group") or dist.group.WORLD
            if dist.get_backend(group) != ALONE:
                used.add(group)
            return operate(*args, **options)

        return mock.patch.object(dist, name, operation)

    found: dict[str, float] = {}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "new_group", new_group))
        for name in OPERATIONS:
            stack.enter_context(noting(name))
        yield found
    dist.destroy_process_group()
    found["groups"] = len(made)
    found["member"] = sum(rank in ranks for ranks in made)
    found["used"] = len(used)
    found["of_world"] = sum(len(ranks) == world_size for ranks in made)


# -- one rank's engine


def build(world_size: int, layout: str, rank: int) -> dict[str, float]:
    """The engine of a rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_SIZE": "1"}
    import deepspeed

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
    with groups_counted(rank, world_size) as found:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        start = time.perf_counter()
        engine = make_engine(setup, layouts(world_size)[layout])
        seconds = time.perf_counter() - start
    return {**found, "stages": len(engine.graph.stages), "seconds": seconds}


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
            Column("used", "with an operation", "{:.0f}"),
            Column("of_world", "of the world", "{:.0f}"),
            Column("seconds", "s", "{:.1f}"),
        ),
        rounds=1,
    )


# -- groups and memory of what last stages exchange

SAMPLES = 32  # of a rank in a step
WITH = {
    "pair": "image:text",
    "matching": "image:text --fusion 2",
    "regions": "image:text,region:text",
    "sound": "image:text,audio:text",
    "regions and sound": "image:text,region:text,audio:text",
}


def made_on(graph: Any, objective: Any, rank: int) -> dict[str, float]:
    """Groups for what a rank's stage exchanges."""
    import torch

    from engine.communication import Communicator
    from engine.loss.last_stage import LastStageLoss

    with groups_counted(rank, graph.world_size) as found:
        limit = timedelta(seconds=LIMIT_S)
        comm = Communicator(graph, objective, rank, torch.device("cpu"), limit)
        LastStageLoss(comm, embed_dim=1, equal_shares=True, source_starts=None)
    return found


def exchanged(world_size: int, layout: str, what: str) -> dict[str, float]:
    """Of the rank with most: groups; and the predicted bytes of a ViT-B/16 and a BERT-base on
    H100."""
    from engine.objective import Branch, Objective
    from engine.planning.planner import plan_run
    from engine.planning.simulator import room_bytes
    from engine.planning.stage_costs import stage_costs
    from launch.objective import pairs_of
    from launch.tools.plan import configuration, cost_model, parse_options
    from models.losses import InfoNCE, Matching

    flags = f"--gpus {world_size} --device H100 --train-batch-size {SAMPLES * world_size}"
    towers = "--image-tower vit_b_16 --text-tower bert-base-uncased"
    options = parse_options([*flags.split(), *towers.split(), "--pairs", *WITH[what].split()])
    config, block = configuration(options)
    costs = cost_model(options, config)
    branches = tuple(costs.layers)
    given: dict[str, Any] = {"layout": layout, "stages": 1}
    if layout == "fork":
        few = world_size // 4
        given["replicas"] = dict.fromkeys(branches[1:], few)
        given["replicas"][branches[0]] = world_size - few * (len(branches) - 1)
    plan = plan_run(config, replace(block, **given), world_size, costs)
    matching = Matching() if options.fusion else None
    pairs = pairs_of(options.pairs, InfoNCE(), matching)
    objective = Objective(tuple(map(Branch, branches)), pairs)
    ends = {rank for stage in plan.graph.stages for rank in (stage.ranks[0], stage.ranks[-1])}
    ranks = [made_on(plan.graph, objective, rank) for rank in ends]
    losses = [
        each.loss.rows_bytes + each.loss.work_bytes
        for each in stage_costs(plan.graph, plan.batches, plan.costs, per_micro_batch=False)
        if each.loss
    ]
    return {name: max(one[name] for one in ranks) for name in ranks[0]} | {
        "nccl": plan.costs.machine.memory_bytes - room_bytes(plan.graph, plan.costs),
        "loss": max(losses),
        "rank": max(stage.peak_bytes for stage in plan.predicted),
    }


def exchanging(world_size: int, layout: str, what: str) -> Figures:
    return on_ranks(1, exchanged, world_size, layout, what, started=False)[0]


def groups(world_sizes: Sequence[int] = (8, 64, 1024)) -> Study:
    """What last stages need to exchange their rows: groups, whose number on a rank does not grow
    with the ranks, and bytes of a rank as predicted."""
    return Study(
        "Groups and memory of what is exchanged",
        {
            f"{size} ranks, {layout}, {what}": Way(partial(exchanging, size, layout, what))
            for size in world_sizes
            for layout in ("merged", "fork")
            for what in WITH
        },
        (
            Column("groups", "groups made by all", "{:,.0f}"),
            Column("member", "of these, of a rank", "{:.0f}"),
            Column("used", "with an operation", "{:.0f}"),
            Column("nccl", "NCCL's GiB", "{:.2f}", 1 / GIB),
            Column("loss", "loss's GiB", "{:.2f}", 1 / GIB),
            Column("rank", "GiB of a rank", "{:.1f}", 1 / GIB),
        ),
        f"{SAMPLES} samples a rank, a quarter of the ranks for each branch but images; ViT-B/16, "
        "BERT-base, 16 regions an image, H100.",
        rounds=1,
    )


# -- all ranks at one store


def start_together(world_size: int) -> dict[str, float]:
    """Of a rank, in a mean over all of them, each a thread with connections of its own: calls of a
    real store, open files; seconds until all are through."""
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


STUDIES = (engines, groups, store)

if __name__ == "__main__":
    main("bench.scale")
