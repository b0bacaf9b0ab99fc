"""The losses in blocks of rows against the whole matrix of logits: how much memory, and how much
time?

    python bench/loss.py speed --rows 16384       writes bench/out/loss-speed.md and prints it
    python bench/loss.py memory --rows 65536      in blocks alone: the matrix would not fit

One rank has all images and texts, one text per image, embeddings of 512; value and all gradients
are computed. Plain is what is usually written: one matrix, torch's own loss on it, autograd. A GPU
is used if there is one.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import GIB, Column, Figures, Study, Way, main, on_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from engine.loss_protocols import Side

WIDTH = 512
LOSSES = ("infonce", "sigmoid")


def batch(rows: int, device: str) -> dict[str, Side]:
    import torch
    from torch.nn import functional as F

    from engine.loss_protocols import Side

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


def measure(way: str, name: str, rows: int, warm: bool) -> Figures:
    """In a process of its own: seconds and the bytes it grew by at most, on a GPU those of tensors.
    `warm`: after one that does not count; otherwise only libraries are."""
    import torch

    from bench.memory_probe import ProcessGrowth

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compute = {"plain": plain, "in blocks": in_blocks}[way]
    sides = batch(rows, device)
    compute(name, sides if warm else batch(256, device))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    growth, start = ProcessGrowth(), time.perf_counter()
    value = float(compute(name, sides))  # waits for a GPU
    seconds = time.perf_counter() - start
    taken = torch.cuda.max_memory_allocated() - before if device == "cuda" else growth.peak_bytes()
    return {"seconds": seconds, "value": value, "bytes": taken, "share": taken / (4 * rows**2)}


def alone(*arguments: object) -> Figures:
    return on_ranks(1, measure, *arguments)[0]


def speed(rows: int = 16384) -> Study:
    """Time in blocks against plain: InfoNCE makes the logits twice, four products of matrices
    instead of three, so 1.33 where products are all that counts; but blocks stay in the cache,
    where plain goes through memory a dozen times, so about 1. The sigmoid loss below 1. The aim is
    1.3."""
    return Study(
        "Time of the losses in blocks",
        {
            f"{name}, {way}": Way(partial(alone, way, name, rows, True), against=f"{name}, plain")
            for name in LOSSES
            for way in ("plain", "in blocks")
        },
        (
            Column("seconds", "s", "{:.3g}"),
            Column("seconds", "÷ plain"),
            Column("value", "value", "{:.5f}"),
        ),
        f"{rows:,} pairs of width {WIDTH}.",
        equal=("value", 1e-5),
    )


def memory(rows: int = 65536) -> Study:
    """Memory in blocks: 64 MiB for the blocks, and per side a gradient and a copy of the
    embeddings, 0.6 GiB of a matrix of 16 GiB, 4 %. The aim is 10 %."""
    return Study(
        "Memory of the losses in blocks",
        {name: Way(partial(alone, "in blocks", name, rows, False)) for name in LOSSES},
        (
            Column("bytes", "GiB", "{:.2f}", 1 / GIB),
            Column("share", "÷ whole matrix", "{:.1%}"),
            Column("seconds", "s", "{:.3g}"),
        ),
        f"{rows:,} pairs of width {WIDTH}; the whole matrix has {4 * rows**2 / GIB:.1f} GiB.",
        rounds=1,
    )


STUDIES = (speed, memory)

if __name__ == "__main__":
    main("bench.loss")
