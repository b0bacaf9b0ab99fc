"""What the ranks of tests/test_gpu.py do; a module of its own, because ranks import it by name.

All of it runs on any device: on one GPU ranks share it, and communicate through host memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import train_from
from split_training import Case, make_engine, micro_batches_of_rank, train_split


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """fp32 convolutions in fp32 (not TF32), and the same bits each time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS asks for it, before its first call
    # some kernels have no deterministic way, and say so
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
    torch.use_deterministic_algorithms(False)


def train_exactly(case: Case) -> dict[str, Any]:
    """As `train_split`, and what this rank computed on and talked through."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    with exact():
        trained = train_split(case)
    return {
        **trained,
        "device": get_accelerator().current_device_name(),
        "backend": dist.get_backend(),
    }


def train_exactly_from(case: Case, steps: int, *where: Any, **more: Any) -> dict[str, Any]:
    """As `train_from`."""
    with exact():
        return train_from(case, steps, *where, **more)


def train_with_overflow(case: Case, steps: int, overflow_at: int) -> dict[str, list[float]]:
    """The same batch again and again, with infinite pixels in one step. Losses, loss scales and
    numbers of skipped steps, step by step, and whether the weights stayed as they were in that
    step."""
    engine, _, image_size = make_engine(case)
    found: dict[str, list[float]] = {"loss": [], "loss_scale": [], "skipped": [], "moved": []}
    for step in range(steps):
        loaded = micro_batches_of_rank(case, engine, 0, image_size)
        if step == overflow_at and loaded is not None:
            loaded = iter(
                [
                    {
                        name: tensor * float("inf") if name == "pixel_values" else tensor
                        for name, tensor in one.items()
                    }
                    for one in loaded
                ]
            )
        before = [p.detach().clone() for p in engine.module.parameters()]
        metrics = engine.train_batch(loaded)
        moved = any(
            not torch.equal(old, new) for old, new in zip(before, engine.module.parameters())
        )
        found["loss"].append(metrics.loss)
        found["loss_scale"].append(metrics.loss_scale)
        found["skipped"].append(metrics.skipped_steps)
        found["moved"].append(float(moved))
    return found


def checkpoint_of(folder: Path, step: int) -> Path:
    from engine.checkpoint.layout import step_folder

    return folder / step_folder(step)
