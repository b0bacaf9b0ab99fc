"""The losses in blocks of rows against the whole matrix of logits: how much memory, and how much
time?

    python bench/loss.py                    writes bench/out/loss.md and prints it
    python bench/loss.py --memory-rows 0    the times alone
    python bench/loss.py --rows 32768       on a GPU (--device auto takes it if there is one)

One rank has all images and texts, one text per image, embeddings of 512; value and all gradients
are computed. Plain is what is usually written: one matrix, torch's own loss on it, autograd. Memory
is the growth of a fresh process over what it had with its embeddings, on a GPU that of its tensors;
the whole matrix, which plain holds several times, is not there at all, so it is counted: 4 bytes a
logit. Times are taken in turn, in one process, after one of each that is not counted.

Expected. Memory: 64 MiB for the blocks, and per side a gradient and a copy of the embeddings: 0.6
GiB of 16 GiB, 4 %. Time: InfoNCE makes the logits twice, 4 products of matrices instead of 3, so up
to 1.33 where products are all that counts; but blocks stay in the cache, where plain goes through
memory a dozen times: about 1. The sigmoid loss makes them once: below 1.
On an H100, 32,768 pairs: 4.4 TFLOP in fp32 at 54 TFLOP/s, 80 ms, and 20 ms for what goes through
memory. A step of that batch takes 5 s with ViT-B-32: 2 %. A fused kernel would save most of the 20.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

if TYPE_CHECKING:
    from torch import Tensor

    from engine.loss.exchange import Side

WIDTH = 512
GIB = 2**30
LOSSES = ("infonce", "sigmoid")
AIMS = {"memory": 0.10, "time": 1.3}


def batch(rows: int, device: str) -> dict[str, Side]:
    import torch
    from torch.nn import functional as F

    from engine.loss.exchange import Side

    generator = torch.Generator().manual_seed(0)
    return {
        branch: Side(
            F.normalize(torch.randn(rows, WIDTH, generator=generator), dim=1).to(device),
            torch.arange(rows, device=device),
            None,
        )
        for branch in ("image", "text")
    }


def in_blocks(name: str, sides: dict[str, Side]) -> Tensor:
    import torch

    from models.losses import build_loss

    loss, device = build_loss(name), sides["image"].embeds.device
    part = loss.whole(
        sides,
        {key: torch.tensor([value], device=device) for key, value in loss.parameters.items()},
    )
    return sum(shares.sum() for shares in part.shares.values())


def plain(name: str, sides: dict[str, Side]) -> Tensor:
    import torch
    from torch.nn import functional as F

    from bench.baselines import info_nce
    from models.losses import build_loss

    device = sides["image"].embeds.device
    scalars = [
        torch.tensor([value], device=device, requires_grad=True)
        for value in build_loss(name).parameters.values()
    ]
    image, text = (side.embeds.clone().requires_grad_() for side in sides.values())
    if name == "infonce":
        loss = info_nce(image, text, *scalars)
    else:
        logits = scalars[0].exp() * image @ text.T + scalars[1]
        signs = 2 * torch.eye(len(image), device=device) - 1
        loss = -F.logsigmoid(signs * logits).sum() / len(image)
    loss.backward()
    return loss.detach()


def measure_memory(name: str, rows: int, device: str) -> dict[str, float]:
    """In a process of its own: bytes it grew by at most, and seconds."""
    import torch

    from bench.memory_probe import ProcessGrowth

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    in_blocks(name, batch(256, device))  # what libraries set up the first time
    sides = batch(rows, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds, _ = timed(in_blocks, name, sides)
        return {"bytes": torch.cuda.max_memory_allocated() - before, "seconds": seconds}
    growth = ProcessGrowth()
    seconds, _ = timed(in_blocks, name, sides)
    return {"bytes": growth.peak_bytes(), "seconds": seconds}


def measure_time(rows: int, rounds: int, device: str) -> dict[str, dict[str, list[float]]]:
    """loss -> way -> seconds by round, and the loss itself."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sides, found = batch(rows, device), {}
    for name in LOSSES:
        for compute in (plain, in_blocks):
            timed(compute, name, sides)
        found[name] = {"plain": [], "in blocks": [], "values": []}
        for _ in range(rounds):
            for way, compute in (("plain", plain), ("in blocks", in_blocks)):
                seconds, value = timed(compute, name, sides)
                found[name][way].append(seconds)
                found[name]["values"].append(value)
    return found


def timed(
    compute: Callable[[str, dict[str, Side]], Tensor], name: str, sides: dict[str, Side]
) -> tuple[float, float]:
    start = time.perf_counter()
    value = float(compute(name, sides))  # waits for a GPU
    return time.perf_counter() - start, value


def report(
    memory: dict[str, dict[str, float]],
    memory_rows: int,
    times: dict[str, dict[str, list[float]]],
    rows: int,
) -> str:
    lines = [f"# Losses in blocks, embeddings of {WIDTH}", ""]
    if memory:
        whole = 4 * memory_rows**2
        lines += [
            f"A batch of {memory_rows:,} pairs, whole matrix {whole / GIB:.1f} GiB:",
            "",
            "| loss | memory, GiB | ÷ whole matrix | aim | time, s |",
            "|---|---|---|---|---|",
        ]
        for name, seen in memory.items():
            share = seen["bytes"] / whole
            lines.append(
                f"| {name} | {seen['bytes'] / GIB:.2f} | **{share:.1%}** | at most "
                f"{AIMS['memory']:.0%}: {verdict(share, AIMS['memory'])} | {seen['seconds']:.3g} |"
            )
        lines.append("")
    rounds = len(times[LOSSES[0]]["plain"])
    lines += [
        f"A batch of {rows:,} pairs, {rounds} rounds in turn, median (least – most):",
        "",
        "| loss | plain, s | in blocks, s | in blocks ÷ plain | aim |",
        "|---|---|---|---|---|",
    ]
    for name, seen in times.items():
        ratios = [ours / theirs for ours, theirs in zip(seen["in blocks"], seen["plain"])]
        median = statistics.median(ratios)
        lines.append(
            f"| {name} | {statistics.median(seen['plain']):.3g} | "
            f"{statistics.median(seen['in blocks']):.3g} | **{median:.2f}** ({min(ratios):.2f} – "
            f"{max(ratios):.2f}) | at most {AIMS['time']}: {verdict(median, AIMS['time'])} |"
        )
    return "\n".join(lines) + "\n"


def verdict(seen: float, aim: float) -> str:
    return "met" if seen <= aim else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--memory-rows",
        type=int,
        default=65536,
        metavar="N",
        help="pairs whose memory is measured; 0: none (default: 65536)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=16384,
        metavar="N",
        help="pairs whose time is measured (default: 16384)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="times each way is measured, in turn (default: 3)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU if there is one (default: auto)",
    )
    arguments = parser.parse_args()
    if arguments.memory_rows < 0 or arguments.rows < 2 or arguments.rounds < 1:
        parser.error("--memory-rows must be at least 0, --rows at least 2, --rounds at least 1")
    import torch
    from ranks import run_ranks

    import bench.loss as this  # so that the processes find the functions by name

    def alone(function: Callable[..., Any], *given: Any) -> Any:
        return run_ranks(1, function, *given, timeout_s=3600)[0]

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    times = alone(this.measure_time, arguments.rows, arguments.rounds, device)
    memory = {
        name: alone(this.measure_memory, name, arguments.memory_rows, device)
        for name in LOSSES
        if arguments.memory_rows
    }
    for name, seen in times.items():
        if max(seen["values"]) - min(seen["values"]) > 1e-5 * max(seen["values"]):
            sys.exit(
                f"bench/loss.py: {name}: both ways must give the same loss, but it was "
                f"{min(seen['values'])} to {max(seen['values'])}"
            )
    text = report(memory, arguments.memory_rows, times, arguments.rows)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "loss.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
