"""Starting on hundreds of GPUs, on one machine without any: what a rank makes and asks for.

    python bench/scale.py                      512 and 1,024 ranks; writes bench/out/scale.md and prints it
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
OUT = ROOT / "bench" / "out"
LIMIT_S = 600.0


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
    options = parser.parse_args()
    if options.engine:
        world_size, layout, rank = options.engine
        build(int(world_size), layout, int(rank))
        return
    text = table(options.world_sizes)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "scale.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
