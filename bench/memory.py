"""Peak memory of a fork of two ranks as the number of micro-batches grows, under `batch_sync` and
under `replay`.

    python bench/memory.py            writes bench/out/memory.md and bench/out/memory.png

Micro-batches stay the same size, so the global batch grows with their number. `batch_sync` keeps
the activations of all of them, `replay` those of one: its peak with 64 micro-batches should be
within 5 % of that with 8. What still grows under `replay` is small but real: what was loaded, which
waits in host memory for the second forward; the embeddings of the global batch [B, D]; its
similarities [B, B].

On a CPU host memory is the memory that is measured, so what was loaded **is** counted in every
figure, and stands in a column of its own; on a GPU it would lie outside the device's memory. Each
point is a fresh process group; tensor bytes come from a run of their own (`bench/memory_probe.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import Setup, make_engine, micro_batches
from bench.memory_probe import ProcessGrowth, TensorBytes
from bench.strategies import MIB, save_plot

SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=256,num_layers=8,num_heads=4,mlp_dim=1024,patch_size=8",
    image_size=32,
    text_tower="bert-mini:hidden_size=256,num_attention_heads=4,intermediate_size=1024,num_hidden_layers=6,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    num_tokens=17,
    vocab_size=8192,
    embed_dim=128,
    global_batch_size=8,  # of one micro-batch: multiplied by their number
    micro_batch_size=8,
    num_batches=1,
)
FORK = {"layout": "fork", "stages": {"image": 1, "text": 1}, "replicas": {"image": 1, "text": 1}}
POINTS = (4, 8, 16, 32, 64)
SCHEDULES = ("replay", "batch_sync")
STEPS = 2
TOLERANCE = 0.05


def train(schedule: str, num_micro_batches: int, after_first=lambda: None) -> int:
    """A few steps on this rank. Returns the bytes of the inputs that it loads for one step."""
    setup = replace(SETUP, global_batch_size=SETUP.micro_batch_size * num_micro_batches)
    engine = make_engine(setup, {**FORK, "schedule": schedule})
    for step in range(STEPS):
        engine.train_batch(micro_batches(setup, engine, step))
        if step == 0:
            after_first()
    loaded = next(micro_batches(setup, engine, 0))
    return num_micro_batches * sum(t.numel() * t.element_size() for t in loaded.values())


def measure_process(schedule: str, num_micro_batches: int) -> tuple[int, int]:
    """On each rank: (growth of the process, bytes loaded)."""
    growth = ProcessGrowth()
    loaded = train(schedule, num_micro_batches)
    return growth.peak_bytes(), loaded


def measure_tensors(schedule: str, num_micro_batches: int) -> int:
    """On each rank: most bytes of tensors in a step after the first."""
    with TensorBytes() as probe:
        train(schedule, num_micro_batches, probe.mark)
    return probe.peak_bytes


@dataclass(frozen=True)
class Point:
    """By rank: image, text."""

    schedule: str
    num_micro_batches: int
    tensor_bytes: Sequence[int]
    process_bytes: Sequence[int]
    loaded_bytes: Sequence[int]


def report(points: Sequence[Point]) -> str:
    lines = [
        "# Peak memory against the number of micro-batches",
        "",
        f"{SETUP.describe().replace(f'global batch {SETUP.global_batch_size}, ', '')}; fork of "
        "two ranks. MiB per rank, image / text. What was loaded is part of the tensor bytes and "
        "of the process growth.",
        "",
        "| schedule | micro-batches | global batch | peak tensor MiB | process growth MiB | of "
        "these loaded inputs MiB |",
        "|---|---|---|---|---|---|",
    ]
    for p in points:
        cells = [
            " / ".join(f"{n / MIB:.1f}" for n in values)
            for values in (p.tensor_bytes, p.process_bytes, p.loaded_bytes)
        ]
        lines.append(
            f"| {p.schedule} | {p.num_micro_batches} | "
            f"{p.num_micro_batches * SETUP.micro_batch_size} | " + " | ".join(cells) + " |"
        )
    return "\n".join([*lines, "", *_verdicts(points)]) + "\n"


def _verdicts(points: Sequence[Point]) -> list[str]:
    lines = []
    for schedule in SCHEDULES:
        by_number = {p.num_micro_batches: p for p in points if p.schedule == schedule}
        if not {8, 64} <= by_number.keys():
            continue
        few, many = by_number[8], by_number[64]
        for what in ("tensor_bytes", "process_bytes"):
            ratios = [b / a for a, b in zip(getattr(few, what), getattr(many, what))]
            verdict = ""
            if schedule == "replay":
                verdict = f": {'within' if max(ratios) <= 1 + TOLERANCE else 'NOT within'} {TOLERANCE:.0%}"
            lines.append(
                f"- {schedule}, {what.replace('_', ' ')}, 64 micro-batches ÷ 8: image "
                f"{ratios[0]:.3f}, text {ratios[1]:.3f}{verdict}"
            )
    return lines


def plot(points: Sequence[Point], path: Path) -> None:
    """Both ranks' peaks against the number of micro-batches, tensors left, processes right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for panel, what, title in zip(
        panels, ("tensor_bytes", "process_bytes"), ("tensors", "process growth")
    ):
        for schedule, colour in zip(SCHEDULES, ("tab:blue", "tab:olive")):
            own = [p for p in points if p.schedule == schedule]
            for rank, (branch, style) in enumerate((("image", "-"), ("text", "--"))):
                values = [getattr(p, what)[rank] / MIB for p in own]
                panel.plot(
                    [p.num_micro_batches for p in own],
                    values,
                    style,
                    marker="o",
                    color=colour,
                    label=f"{schedule}, {branch} rank",
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks(
            sorted({p.num_micro_batches for p in points}),
            sorted({p.num_micro_batches for p in points}),
        )
        panel.set_title(title)
        panel.set_xlabel(f"micro-batches of {SETUP.micro_batch_size}")
    panels[0].set_ylabel("peak per rank, MiB")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--points",
        default=",".join(map(str, POINTS)),
        metavar="N[,N]",
        help="numbers of micro-batches (default: %(default)s)",
    )
    numbers = [int(n) for n in parser.parse_args().points.split(",")]
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.memory as this  # so that the ranks find the functions by name

    points = []
    OUT.mkdir(parents=True, exist_ok=True)
    for schedule, number in tqdm([(s, n) for s in SCHEDULES for n in numbers], unit="point"):
        process, loaded = zip(*run_ranks(2, this.measure_process, schedule, number, timeout_s=600))
        tensors = run_ranks(2, this.measure_tensors, schedule, number, timeout_s=900)
        points.append(Point(schedule, number, tensors, process, loaded))
        (OUT / "memory.md").write_text(
            report(points), encoding="utf-8"
        )  # after every point: what was measured is kept
    print((OUT / "memory.md").read_text(encoding="utf-8"))
    save_plot(plot, points, OUT / "memory.png")


if __name__ == "__main__":
    main()
