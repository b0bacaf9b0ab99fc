"""Single facts of GPUs and of NCCL, for bench/first_hour.py. Prints one line of JSON.

    python -m bench.on_gpu.first_facts FACT [--ranks N] [--steps N]

Without a GPU the same calls run on the CPU over gloo, to try them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bench.common import on_ranks

BUSY_S = 0.5
GROUPS = 4  # of one rank
TINY = "hidden_size=32,num_attention_heads=2,intermediate_size=64,num_hidden_layers=4"


def device_waits(ranks: int, steps: int) -> dict[str, float]:
    """Seconds that the host spends in a call while another stream is busy for BUSY_S. What takes as
    long waits for the whole device."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    values = torch.rand(1 << 20, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "a kernel that was there": lambda: values + 1,
        "the first kernel of a module": lambda: torch.special.i0e(values),
        "1 GiB more for the allocator": lambda: torch.empty(
            1 << 30, dtype=torch.int8, device=device
        ),
        "a copy from pageable memory": lambda: values.copy_(torch.rand(1 << 20)),
        "64 MiB of pinned memory": lambda: torch.empty(
            1 << 26, dtype=torch.int8, pin_memory=on_gpu
        ),
    }
    if on_gpu:
        calls["an event"] = lambda: torch.cuda.Event().record()
        calls["a stream"] = torch.cuda.Stream
        calls["memory given back"] = torch.cuda.empty_cache
    calls["a kernel that was there"]()  # loads it
    found = {}
    for name, call in calls.items():
        if on_gpu:
            _keep_busy(values)
        start = time.perf_counter()
        kept = call()
        found[f"{name}, s"] = time.perf_counter() - start
        if on_gpu:
            torch.cuda.synchronize()
        del kept
    return found


def _keep_busy(values: Any) -> None:
    """Another stream, for BUSY_S."""
    import torch

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(BUSY_S * 2e9))  # cycles, of which a GPU has up to 2e9 a second


def one_rank_groups(ranks: int, steps: int) -> dict[str, float]:
    """MiB that a group of one rank takes of the device with its first operation, on a CPU of the
    process; the first one, which loads the library, and each of the next."""
    import psutil
    import torch
    import torch.distributed as dist

    from engine.processes.start import start_processes, stop_processes

    device = start_processes().device

    def free() -> int:
        if device.type == "cuda":
            return torch.cuda.mem_get_info()[0]
        return -psutil.Process().memory_info().rss

    taken = []
    for _ in range(GROUPS):
        before = free()
        group: Any = dist.new_group([0])
        dist.all_reduce(torch.ones(1 << 20, device=device), group=group)
        taken.append((before - free()) / 2**20)
    stop_processes()
    return {"first, MiB": taken[0], "each of the next, MiB": sum(taken[1:]) / len(taken[1:])}


def unequal_nodes(ranks: int, steps: int) -> dict[str, float]:
    """Seconds to start on two nodes of which one has three of eight ranks, as this host pretends."""
    start = time.perf_counter()
    told = on_ranks(ranks, _start_unequal, 3 * ranks // 8, started=False)
    if len({device for _, device in told}) < ranks and "cuda" in told[0][1]:
        raise RuntimeError(f"ranks share a GPU: {told}")
    return {"start, s": time.perf_counter() - start, "ranks": len(told)}


def _start_unequal(first: int) -> tuple[int, str]:
    """As one rank; those of the first node see the first GPUs."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = range(first) if rank < first else range(first, world)
    os.environ["LOCAL_RANK"] = str(rank - ranks[0])
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ranks))
    from deepspeed.accelerator import get_accelerator

    from engine.json_messages import from_all_ranks
    from engine.processes.places import Place
    from engine.processes.start import start_processes

    accelerator = get_accelerator()
    kind, count = accelerator.device_name(), accelerator.device_count()
    place = Place.here(kind, rank - ranks[0], count)
    processes = start_processes(place=replace(place, node=f"node{int(rank >= first)} {place.node}"))
    told = from_all_ranks([rank, f"{processes.device.type} {place.device} {ranks[0]}"])
    return tuple(told[rank])


def edges(ranks: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step with edges in both branches, many small micro-batches and nothing to
    compute, for each schedule."""
    from engine.schedule import SCHEDULES

    found = {}
    for schedule in SCHEDULES:
        seconds = on_ranks(ranks, _train_edges, schedule, steps)
        found[f"{schedule}, ms"] = 1e3 * max(seconds)
    return found


def _train_edges(schedule: str, steps: int) -> float:
    """Seconds a step, after a first one."""
    import math

    import torch.distributed as dist

    from bench.steps import fork
    from bench.towers import Setup, make_engine, micro_batches

    ranks = dist.get_world_size()
    setup = Setup(
        image_tower="vit_b_16:hidden_dim=32,num_layers=4,num_heads=2,mlp_dim=64,patch_size=16",
        image_size=32,
        text_tower=f"bert-mini:{TINY}",
        num_tokens=8,
        vocab_size=128,
        embed_dim=16,
        global_batch_size=8 * ranks,
        micro_batch_size=2,
    )
    stages, replicas = (2, ranks // 4) if ranks >= 4 else (1, ranks // 2)
    engine = make_engine(
        setup, {**fork(stages, stages, (replicas, replicas)), "schedule": schedule}
    )
    start = time.perf_counter()
    for step in range(1 + steps):
        if step == 1:
            start = time.perf_counter()
        loss = engine.train_batch(micro_batches(setup, engine, step)).loss
        if not math.isfinite(loss):
            raise RuntimeError(f"{schedule}: the loss of step {step} is {loss}")
    return (time.perf_counter() - start) / max(1, steps)


FACTS: Mapping[str, Callable[[int, int], dict[str, float]]] = {
    fact.__name__: fact for fact in (device_waits, one_rank_groups, unequal_nodes, edges)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fact", choices=FACTS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args()
    # by its name, where ranks find its functions, and not as __main__
    from bench.on_gpu import first_facts

    print(json.dumps({"figures": first_facts.FACTS[given.fact](given.ranks, given.steps)}))


if __name__ == "__main__":
    main()
