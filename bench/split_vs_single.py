"""Two ranks with a tower each against one rank with both, one thread per rank, in turn.

    python bench/split_vs_single.py            writes bench/out/split_vs_single.md and prints it

The fork has two cores where the single rank has one, so 2.0 is perfect. What is missing from it: the branches wait for
each other at the loss when their towers take unequal time, the exchange itself, and cores that share a memory bus.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "bench" / "out"

# About equal seconds per sample on one core: that is what "balanced" means here; the measured share of both is printed.
IMAGE_TOWER, IMAGE_SIZE = "vit_b_16:hidden_dim=192,num_layers=4,num_heads=3,mlp_dim=768,patch_size=8", 64
TEXT_TOWER, NUM_TOKENS = "bert-mini:hidden_size=192,num_attention_heads=3,intermediate_size=768,num_hidden_layers=4", 60
EMBED_DIM, VOCAB, GLOBAL_BATCH_SIZE = 128, 2048, 64
FORK = {"layout": "fork", "stages": {"image": 1, "text": 1}, "replicas": {"image": 1, "text": 1}}
SINGLE = {"layout": "merged", "stages": {"merged": 1}, "replicas": 1}


def measure(branches: dict, micro_batch_size: int, warmup: int, steps: int) -> dict[str, object]:
    """On each rank: seconds per step and seconds per kind of instruction, over `steps` steps."""
    from datetime import timedelta

    import torch

    from engine.build import build_engine
    from engine.config import check_config
    from engine.planner import plan_run
    from models.losses import InfoNCE
    from models.towers import build_towers, count_flops, meta_inputs

    config, block = check_config(
        {
            "train_batch_size": GLOBAL_BATCH_SIZE,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 4000000, "allgather_bucket_size": 4000000},
            "branches": {**branches, "micro_batch_size": micro_batch_size},
        }
    )
    towers = {t.branch: t for t in build_towers(IMAGE_TOWER, TEXT_TOWER, EMBED_DIM, IMAGE_SIZE, VOCAB, NUM_TOKENS, 0, 2)}
    plan = plan_run(config, block, torch.distributed.get_world_size(), {b: count_flops(t, meta_inputs(t, 2)) for b, t in towers.items()})
    engine = build_engine(
        plan,
        config,
        {b: t.specs for b, t in towers.items()},
        lambda spec: spec.build(0),
        InfoNCE(),
        EMBED_DIM,
        total_num_steps=100,
        seed=0,
        timeout=timedelta(seconds=120),
        constant_shapes={"image": True, "text": True},
    )
    generator = torch.Generator().manual_seed(0)
    everything = {
        "image": {"pixel_values": torch.randn(GLOBAL_BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)},
        "text": {
            "input_ids": torch.randint(5, VOCAB, (GLOBAL_BATCH_SIZE, NUM_TOKENS), generator=generator),
            "attention_mask": torch.ones(GLOBAL_BATCH_SIZE, NUM_TOKENS, dtype=torch.int64),
        },
    }
    place = torch.arange(GLOBAL_BATCH_SIZE)
    batch = {
        name: tensor
        for branch in engine.place.loads
        for name, tensor in {**everything[branch], f"{branch}_position": place, f"{branch}_index": place}.items()
    }
    micro_batches = [dict(zip(batch, parts)) for parts in zip(*(t.split(micro_batch_size) for t in batch.values()))]
    for _ in range(warmup):
        engine.train_batch(iter(micro_batches))
    engine.instruction_seconds.clear()
    start = time.perf_counter()
    for _ in range(steps):
        engine.train_batch(iter(micro_batches))
    step_s = (time.perf_counter() - start) / steps
    return {"name": engine.place.name, "step_s": step_s, "instructions_s": {k: v / steps for k, v in engine.instruction_seconds.items()}}


def report(rounds: list[tuple[list, list]]) -> str:
    """Markdown: the ratio pair by pair, and where the time of a step goes on each rank."""
    ratios = [single[0]["step_s"] / max(rank["step_s"] for rank in fork) for fork, single in rounds]
    lines = [
        "# Two ranks, a tower each, against one rank with both towers",
        "",
        f"`{IMAGE_TOWER}` at {IMAGE_SIZE} pixels, `{TEXT_TOWER}` at {NUM_TOKENS} tokens, global batch {GLOBAL_BATCH_SIZE}, one thread per rank, "
        f"{len(rounds)} rounds in turn.",
        "",
        f"**samples/s of the fork ÷ samples/s of the single rank: median {statistics.median(ratios):.2f}** "
        f"(least {min(ratios):.2f}, most {max(ratios):.2f}; by round: {', '.join(f'{r:.2f}' for r in ratios)}). Perfect is 2.",
        "",
        "| rank | step, ms | forward + backward | loss and waiting for it | optimizer | the rest | not tower compute |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, index in (("fork", 0), ("single", 1)):
        for position in range(len(rounds[0][index])):
            samples = [r[index][position] for r in rounds]
            lines.append(f"| {kind}: {samples[0]['name']} | " + " | ".join(_row(samples)) + " |")
    return "\n".join(lines) + "\n"


def _row(samples: list[dict]) -> list[str]:
    def median(of) -> float:
        return statistics.median(of(s) for s in samples)

    def seconds(s: dict, *names: str) -> float:
        return sum(s["instructions_s"].get(name, 0.0) for name in names)

    step = median(lambda s: s["step_s"])
    tower = median(lambda s: seconds(s, "ForwardPass", "BackwardPass") / s["step_s"])
    loss = median(lambda s: seconds(s, "ComputeLoss") / s["step_s"])
    optimizer = median(lambda s: seconds(s, "ReduceGrads", "OptimizerStep") / s["step_s"])
    return [f"{1000 * step:.0f}", *(f"{100 * share:.1f} %" for share in (tower, loss, optimizer, 1 - tower - loss - optimizer, 1 - tower))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="pairs of measurements (default: 5)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="steps per measurement (default: 12)")
    parser.add_argument("--micro-batch-size", type=int, default=32, metavar="N", help="samples per micro-batch on both sides (default: 32)")
    arguments = parser.parse_args()
    from tqdm import tqdm

    import bench.split_vs_single as this  # so that the ranks find `measure` by name
    from launch.ranks import run_ranks

    rounds = []
    for _ in tqdm(range(arguments.rounds), unit="round"):
        fork, single = (
            run_ranks(world, this.measure, branches, arguments.micro_batch_size, 3, arguments.steps, timeout_s=600)
            for world, branches in ((2, FORK), (1, SINGLE))
        )
        rounds.append((fork, single))
    text = report(rounds)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "split_vs_single.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
