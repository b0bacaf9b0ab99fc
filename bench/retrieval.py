"""Exact retrieval among many: how much memory and time do 100,000 images and as many texts take?"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Column, Study, Way, alone, main, resident_bytes


def retrieval(samples: int = 100_000, width: int = 512) -> Study:
    """All similarities of 100,000 × 100,000 are 40 GB; in blocks of 64 MiB the process grows by
    the embeddings and a few blocks, below 2 GB."""
    return Study(
        f"{samples:,} queries among {samples:,} candidates of width {width}",
        {"one direction": Way(partial(alone, measure, samples, width))},
        (
            Column("seconds", "s", "{:.0f}"),
            Column("grown", "growth of the process, MiB", "{:,.0f}", 2**-20),
            Column("embeddings", "embeddings, MiB", "{:,.0f}", 2**-20),
            Column("all", "all similarities, MiB", "{:,.0f}", 2**-20),
            Column("first", "R@1, %", "{:.1f}", 100),
        ),
        rounds=1,
    )


STUDIES = (retrieval,)


def measure(samples: int, width: int) -> dict[str, float]:
    import torch
    from torch.nn import functional as F

    from models.metrics.retrieval import positive_ranks

    torch.manual_seed(0)
    positive_ranks(torch.eye(4), torch.eye(4), torch.arange(4))  # what only the first call loads
    image = F.normalize(torch.randn(samples, width), dim=1)
    text = F.normalize(image + 0.15 * torch.randn(samples, width), dim=1)
    # VmHWM begins anew: making the embeddings took more than they do
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident_bytes(field="VmRSS"), time.perf_counter()
    first = (positive_ranks(image, text, torch.arange(samples)) == 0).double().mean()
    return {
        "seconds": time.perf_counter() - start,
        "grown": resident_bytes() - before,
        "embeddings": 2 * image.numel() * 4,
        "all": samples**2 * 4,
        "first": float(first),
    }


if __name__ == "__main__":
    main("bench.retrieval")
