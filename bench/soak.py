"""Eight processes, four stages in two replicas, `replay`, 16 micro-batches whose shapes vary: many
steps, no hang.

    python bench/soak.py                       200 steps of a merged line of four stages, then of a fork of 2 + 2; some minutes on two cores

Every rank has a time limit; a rank that hangs ends the run with the names of those that did not
finish.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py

from bench.common import Setup, make_engine, micro_batches

SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=48,num_heads=4,num_layers=4,mlp_dim=64,patch_size=8",
    image_size=32,
    text_tower="bert-tiny:hidden_size=48,intermediate_size=64,num_hidden_layers=4",
    num_tokens=32,
    vocab_size=128,
    embed_dim=24,
    global_batch_size=96,
    micro_batch_size=3,
    num_batches=2,
)
LINES = {
    "merged, 4 stages × 2": {"layout": "merged", "stages": {"merged": 4}, "replicas": 2},
    "fork, (2 + 2) stages × 2": {
        "layout": "fork",
        "stages": {"image": 2, "text": 2},
        "replicas": {"image": 2, "text": 2},
    },
}


def train(branches: dict, steps: int) -> dict[str, float]:
    """On each rank: train with texts cut to lengths that change with step and micro-batch."""
    engine = make_engine(SETUP, {**branches, "schedule": "replay"})
    losses = []
    for step in range(steps):
        batch = micro_batches(SETUP, engine, step)
        if batch is not None:
            batch = (
                {n: _cut(n, t, step, m) for n, t in tensors.items()}
                for m, tensors in enumerate(batch)
            )
        losses.append(engine.train_batch(batch).loss)
    number = next(iter(engine.batches.values())).num_micro_batches
    return {
        "steps": len(losses),
        "micro-batches": number,
        "first loss": losses[0],
        "last loss": losses[-1],
    }


def _cut(name: str, tensor, step: int, m: int):
    return (
        tensor[:, : 9 + (7 * step + 5 * m) % 24].contiguous()
        if name in ("input_ids", "attention_mask")
        else tensor
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        metavar="N",
        help="optimizer steps per line (default: 200)",
    )
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="S", help="seconds per line (default: 1800)"
    )
    arguments = parser.parse_args()
    from ranks import run_ranks

    import bench.soak as this  # so that the ranks find `train` by name

    for name, branches in LINES.items():
        start = time.perf_counter()
        result = run_ranks(8, this.train, branches, arguments.steps, timeout_s=arguments.limit)[0]
        print(f"{name}: {result}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
