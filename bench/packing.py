"""A fork on two ranks, texts packed by cost and at random: the same towers, global batches and
number of micro-batches.

    python bench/packing.py                 writes bench/out/packing.md and prints it

Texts have log-normal lengths from 4 to 77 tokens, as captions from the web do; images have one
size, so their deal is the same. The text tower is the one that a step waits for: what is saved
there is saved altogether, until the image rank becomes the slower one. Expected: a random
micro-batch of 16 is padded to about its longest text, two to three times the mean, so the text rank
needs less than half the time. The loss of each step must be the same both ways.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

import numpy as np

from bench.balance import MAX_TEXT_TOKENS, num_tokens
from bench.common import Setup, make_engine
from data.batching.branch_cost import BranchCost
from data.batching.packing import Bounds, Packing, pack, padded_lengths, padding_share
from data.modalities.tokenizer import TENSOR_CORE_MULTIPLE

if TYPE_CHECKING:
    from torch import Tensor

SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=192,num_layers=4,num_heads=3,mlp_dim=768,patch_size=8",
    image_size=48,
    text_tower="bert-mini:hidden_size=256,num_attention_heads=4,intermediate_size=1024,num_hidden_layers=6,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    num_tokens=MAX_TEXT_TOKENS,
    vocab_size=8192,
    embed_dim=128,
    global_batch_size=256,
    micro_batch_size=16,
)
WAYS = ("at random", "by cost")
WARMUP_STEPS = 1
COST = BranchCost(
    fixed_s=0.0, per_sample_s=0.0, per_token_s=1.0
)  # in proportion to the tokens, padding included


def lengths(step: int) -> np.ndarray:
    """[G] tokens of the global batch's texts."""
    return num_tokens(SETUP.global_batch_size, seed=step)


def deal(step: int, way: str, num_micro_batches: int) -> Packing:
    """Of one replica. The seeded shuffle has fixed the order of the global batch already, so equal
    parts of it are a random deal."""
    if way == "at random":
        return [list(np.arange(SETUP.global_batch_size).reshape(num_micro_batches, -1))]
    padded = padded_lengths(lengths(step), MAX_TEXT_TOKENS, TENSOR_CORE_MULTIPLE)
    bounds = Bounds(max_tokens=SETUP.micro_batch_size * MAX_TEXT_TOKENS)
    return pack(padded, COST, 1, [num_micro_batches], bounds=bounds)


def micro_batches(
    branch: str, step: int, way: str, num_micro_batches: int
) -> Iterator[dict[str, Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(2 * step + (branch == "text"))
    count = SETUP.global_batch_size
    if branch == "image":
        everything = torch.randn(count, 3, SETUP.image_size, SETUP.image_size, generator=generator)
    else:
        everything = torch.randint(
            5, SETUP.vocab_size, (count, MAX_TEXT_TOKENS), generator=generator
        )
        number = torch.from_numpy(lengths(step))
        mask = (torch.arange(MAX_TEXT_TOKENS) < number[:, None]).long()
        everything = (
            everything.scatter(1, number[:, None] - 1, 2) * mask
        )  # 2 ends each text, 0 pads it
    for positions in deal(step, way if branch == "text" else "at random", num_micro_batches)[0]:
        place = torch.from_numpy(np.asarray(positions))
        labels = {f"{branch}_position": place, f"{branch}_index": place}
        if branch == "image":
            yield {"pixel_values": everything[place], **labels}
        else:
            longest = int(
                padded_lengths(
                    lengths(step)[positions], MAX_TEXT_TOKENS, TENSOR_CORE_MULTIPLE
                ).max()
            )
            yield {
                "input_ids": everything[place, :longest],
                "attention_mask": mask[place, :longest],
                **labels,
            }


def measure(way: str, steps: int) -> dict[str, Any]:
    """On each rank: seconds of a step, its losses, and the part of the steps in which each branch's
    rank did not compute."""
    import torch.distributed as dist

    branches = {
        "layout": "fork",
        "stages": {"image": 1, "text": 1},
        "replicas": {"image": 1, "text": 1},
    }
    engine = make_engine(SETUP, branches)
    (branch,) = engine.place.loads
    number = engine.batches[branch].num_micro_batches
    losses, idle = [], []
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            dist.barrier()
            start = time.perf_counter()
        metrics = engine.train_batch(micro_batches(branch, step, way, number))
        losses.append(metrics.loss)
        idle.append(metrics.idle)
    return {
        "step_s": (time.perf_counter() - start) / steps,
        "losses": losses,
        "idle": idle[WARMUP_STEPS:],
    }


def report(rounds: list[dict[str, dict[str, Any]]], steps: int) -> str:
    ratios = [one["at random"]["step_s"] / one["by cost"]["step_s"] for one in rounds]
    number = SETUP.global_batch_size // SETUP.micro_batch_size
    lines = [
        "# Texts packed by cost",
        "",
        f"{SETUP.describe()}, fork of two ranks, {number} micro-batches per branch, texts of 4 to "
        f"{MAX_TEXT_TOKENS} tokens, {len(rounds)} rounds of {steps} steps in turn.",
        "",
        "| texts packed | samples/s | padding | image rank idle | text rank idle | loss after the "
        "last step |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        seconds = statistics.median(one[way]["step_s"] for one in rounds)
        own = [lengths(step) for step in range(WARMUP_STEPS, WARMUP_STEPS + steps)]
        padding = statistics.mean(
            padding_share(
                deal(step, way, number), padded_lengths(n, MAX_TEXT_TOKENS, TENSOR_CORE_MULTIPLE)
            )
            for step, n in enumerate(own, start=WARMUP_STEPS)
        )
        idle = {
            s: statistics.mean(step[s] for one in rounds for step in one[way]["idle"])
            for s in ("image 0", "text 0")
        }
        lines.append(
            f"| {way} | {SETUP.global_batch_size / seconds:.1f} | {padding:.1%} | "
            f"{idle['image 0']:.0%} | {idle['text 0']:.0%} | {rounds[-1][way]['losses'][-1]:.5f} |"
        )
    median = statistics.median(ratios)
    lines += [
        "",
        f"By cost ÷ at random: **{median:.2f}** ({min(ratios):.2f} – {max(ratios):.2f}); the aim "
        f"is 1.25: {'met' if median >= 1.25 else 'missed'}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="times each way is measured, in turn (default: 5)",
    )
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="steps per measurement (default: 4)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.packing as this  # so that the ranks find the function by name

    rounds: list[dict[str, dict[str, Any]]] = [{} for _ in range(arguments.rounds)]
    for one, way in tqdm([(one, way) for one in rounds for way in WAYS], unit="run"):
        ranks = run_ranks(2, this.measure, way, arguments.steps, timeout_s=600)
        one[way] = {**ranks[0], "step_s": max(rank["step_s"] for rank in ranks)}
    for one in rounds:
        for a, b in zip(one["at random"]["losses"], one["by cost"]["losses"]):
            if abs(a - b) > 1e-4 * abs(a):
                sys.exit(
                    f"bench/packing.py: the losses differ, {a} and {b}: packing must change none"
                )
    text = report(rounds, arguments.steps)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "packing.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
