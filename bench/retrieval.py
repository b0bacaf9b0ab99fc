"""Exact retrieval among many: how much memory and time do 100,000 images and as many texts take?

    python bench/retrieval.py         writes bench/out/retrieval.md and prints it

Predicted: the similarities of 100,000 × 100,000 are 40 GB; in blocks of 64 MiB the process grows by
the embeddings and a few blocks, below 2 GB.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "bench" / "out"
MIB = 2**20


def kilobytes(field: str) -> int:
    """Of this process, as the kernel counts: VmHWM, the most it ever had, or VmRSS."""
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--samples",
        type=int,
        default=100_000,
        metavar="N",
        help="images, and texts (default: 100,000)",
    )
    parser.add_argument(
        "--width", type=int, default=512, metavar="D", help="of an embedding (default: 512)"
    )
    arguments = parser.parse_args()
    import torch
    from torch.nn import functional as F

    from models.metrics.retrieval import positive_ranks

    torch.manual_seed(0)
    positive_ranks(torch.eye(4), torch.eye(4), torch.arange(4))  # what only the first call loads
    image = F.normalize(torch.randn(arguments.samples, arguments.width), dim=1)
    text = F.normalize(image + 0.15 * torch.randn(arguments.samples, arguments.width), dim=1)
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # VmHWM begins anew: making the embeddings took more than they do
    before, start = kilobytes("VmRSS"), time.perf_counter()
    first = (positive_ranks(image, text, torch.arange(arguments.samples)) == 0).double().mean()
    seconds = time.perf_counter() - start
    grown = (kilobytes("VmHWM") - before) / 1024
    report = (
        f"{arguments.samples:,} queries among {arguments.samples:,} candidates of width "
        f"{arguments.width}, one direction, {torch.get_num_threads()} threads: {seconds:.0f} s, "
        f"the process grew by {grown:,.0f} MiB, beside the {2 * image.numel() * 4 / MIB:,.0f} of "
        f"the embeddings; all similarities would be {arguments.samples**2 * 4 / MIB:,.0f} MiB. R@1 "
        f"{100 * float(first):.1f} %.\n"
    )
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "retrieval.md").write_text(report, encoding="utf-8")
    print(report, end="")


if __name__ == "__main__":
    main()
