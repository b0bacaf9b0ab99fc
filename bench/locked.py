"""What a locked image tower saves, predicted and measured: seconds of a step and memory, locked ÷
free.

    python bench/locked.py                 writes bench/out/locked.md and prints it

Two ranks train the same towers with the image tower free and locked, in turn, each in fresh
processes; a ratio is taken within a round. Predicted is what the simulator says of both with costs
that were profiled once, on both ranks together, as `"layout": "auto"` does. The image tower has
three times the work of the text tower, so that a fork is as slow as its image rank.

Expected: without the image tower's backward, two of three parts of its work, a fork's step takes
less than half the time, and merged ranks' about half; under `replay` more is saved, since the
second forward goes too. The image rank keeps no activations and a quarter of the bytes for its
weights. Predicted ÷ measured within 15 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import make_engine, micro_batches
from bench.memory_probe import TensorBytes
from bench.prediction import LAYOUTS, VIT, measure, predict, profile
from bench.strategies import MIB

SETUP = replace(
    VIT,
    text_tower=VIT.text_tower.replace("num_hidden_layers=6", "num_hidden_layers=2"),
    zero_stage=0,
)
LOCKED = {"locked": {"image": True}}
WAYS = {
    f"{layout}, {schedule}": {**LAYOUTS[layout], "schedule": schedule}
    for layout, schedule in (
        ("fork 1 + 1", "batch_sync"),
        ("fork 1 + 1", "replay"),
        ("merged × 2", "batch_sync"),
    )
}


@dataclass(frozen=True)
class Row:
    """One way to run. `*_ratio`: locked ÷ free; memory of rank 0, which has the image tower."""

    name: str
    free_s: Sequence[float]  # by round
    locked_s: Sequence[float]
    predicted_ratio: float
    free_bytes: int
    locked_bytes: int
    predicted_bytes_ratio: float


def measure_tensors(branches: dict[str, Any], record: dict) -> int:
    """On each rank: most bytes of tensors in a step after the first."""
    from engine.planning.costs import cost_model_from_json

    with TensorBytes() as probe:
        engine = make_engine(SETUP, branches, cost_model_from_json(record))
        for step in range(2):
            engine.train_batch(micro_batches(SETUP, engine, step))
            if step == 0:
                probe.mark()
    return probe.peak_bytes


def report(rows: Sequence[Row]) -> str:
    lines = [
        "# A locked image tower",
        "",
        f"{SETUP.describe()}; two ranks, {len(rows[0].free_s)} rounds in turn, median (least – "
        "most). Memory: peak tensor bytes of rank 0.",
        "",
        "| way to run | free, ms | locked, ms | locked ÷ free | predicted | free, MiB | locked, "
        "MiB | locked ÷ free | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = [locked / free for locked, free in zip(row.locked_s, row.free_s)]
        lines.append(
            f"| {row.name} | {1e3 * statistics.median(row.free_s):.0f} | "
            f"{1e3 * statistics.median(row.locked_s):.0f} | **{statistics.median(ratios):.2f}** "
            f"({min(ratios):.2f} – {max(ratios):.2f}) | {row.predicted_ratio:.2f} | "
            f"{row.free_bytes / MIB:.0f} | {row.locked_bytes / MIB:.0f} | "
            f"**{row.locked_bytes / row.free_bytes:.2f}** | {row.predicted_bytes_ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="times each way is measured, in turn (default: 3)",
    )
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="steps per measurement (default: 5)"
    )
    arguments = parser.parse_args()
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.locked as this  # so that the ranks find `measure_tensors` by name

    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        record = run_ranks(2, profile, SETUP, folder, timeout_s=600)[0]
    rows = []
    for name, way in tqdm(WAYS.items(), unit="way"):
        pair = way, {**way, **LOCKED}
        seconds = []
        for _ in range(arguments.rounds):
            runs = [
                run_ranks(2, measure, SETUP, own, record, arguments.steps, timeout_s=600)
                for own in pair
            ]
            seconds.append(
                [
                    statistics.median(max(times) for times in zip(*(rank[0] for rank in ranks)))
                    for ranks in runs
                ]
            )
        held = [run_ranks(2, this.measure_tensors, own, record, timeout_s=600)[0] for own in pair]
        free, locked = (predict(SETUP, own, record) for own in pair)
        rows.append(
            Row(
                name,
                *zip(*seconds),
                locked.step_s / free.step_s,
                *held,
                locked.stages[0].peak_bytes / free.stages[0].peak_bytes,
            )
        )
        (OUT / "locked.md").write_text(
            report(rows), encoding="utf-8"
        )  # after each: what was measured is kept
    print((OUT / "locked.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
