"""Two ranks with a tower each against one rank with both, one thread per rank, in turn.

    python bench/split_vs_single.py            writes bench/out/split_vs_single.md and prints it

The fork has two cores where the single rank has one, so 2.0 is perfect. What is missing from it:
the branches wait for each other at the loss when their towers take unequal time, the exchange
itself, and cores that share a memory bus.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import Setup, make_engine, micro_batches

# About equal seconds per sample on one core: that is what "balanced" means here; the measured share
# of both is printed.
SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=192,num_layers=4,num_heads=3,mlp_dim=768,patch_size=8",
    image_size=64,
    text_tower="bert-mini:hidden_size=192,num_attention_heads=3,intermediate_size=768,num_hidden_layers=4",
    num_tokens=60,
    vocab_size=2048,
    embed_dim=128,
    global_batch_size=64,
    micro_batch_size=32,
    max_grad_norm=0.0,
    num_batches=1,
)
FORK = {"layout": "fork", "stages": {"image": 1, "text": 1}, "replicas": {"image": 1, "text": 1}}
SINGLE = {"layout": "merged", "stages": {"merged": 1}, "replicas": 1}


def measure(branches: dict, micro_batch_size: int, warmup: int, steps: int) -> dict[str, object]:
    """On each rank: seconds per step and seconds per kind of instruction, over `steps` steps."""
    setup = replace(SETUP, micro_batch_size=micro_batch_size)
    engine = make_engine(setup, branches)
    batch = list(micro_batches(setup, engine, 0))
    for _ in range(warmup):
        engine.train_batch(iter(batch))
    engine.instruction_seconds.clear()
    start = time.perf_counter()
    for _ in range(steps):
        engine.train_batch(iter(batch))
    step_s = (time.perf_counter() - start) / steps
    return {
        "name": engine.place.name,
        "step_s": step_s,
        "instructions_s": {k: v / steps for k, v in engine.instruction_seconds.items()},
    }


def report(rounds: list[tuple[list, list]]) -> str:
    """Markdown: the ratio pair by pair, and where the time of a step goes on each rank."""
    ratios = [single[0]["step_s"] / max(rank["step_s"] for rank in fork) for fork, single in rounds]
    lines = [
        "# Two ranks, a tower each, against one rank with both towers",
        "",
        f"{SETUP.describe()}; {len(rounds)} rounds in turn.",
        "",
        "**samples/s of the fork ÷ samples/s of the single rank: median "
        f"{statistics.median(ratios):.2f}** (least {min(ratios):.2f}, most {max(ratios):.2f}; by "
        f"round: {', '.join(f'{r:.2f}' for r in ratios)}). Perfect is 2.",
        "",
        "| rank | step, ms | forward + backward | loss and waiting for it | optimizer | the rest "
        "| not tower compute |",
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
    return [
        f"{1000 * step:.0f}",
        *(
            f"{100 * share:.1f} %"
            for share in (tower, loss, optimizer, 1 - tower - loss - optimizer, 1 - tower)
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="pairs of measurements (default: 5)"
    )
    parser.add_argument(
        "--steps", type=int, default=12, metavar="N", help="steps per measurement (default: 12)"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        default=32,
        metavar="N",
        help="samples per micro-batch on both sides (default: 32)",
    )
    arguments = parser.parse_args()
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.split_vs_single as this  # so that the ranks find `measure` by name

    rounds = []
    for _ in tqdm(range(arguments.rounds), unit="round"):
        fork, single = (
            run_ranks(
                world,
                this.measure,
                branches,
                arguments.micro_batch_size,
                3,
                arguments.steps,
                timeout_s=600,
            )
            for world, branches in ((2, FORK), (1, SINGLE))
        )
        rounds.append((fork, single))
    text = report(rounds)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "split_vs_single.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
