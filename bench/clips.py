"""What clips of the demo teach: train.py with the mean of the frames, and with a transformer over
them.

python bench/clips.py learn --seeds 3 --epochs 30         tables to bench/out/
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.compare import Column, Figures, Study, Way, main
from bench.runs import call, settings, train_command

FRAMES_TOWER = "resnet18:layers=1-1-1-1"


def learn(seeds: int = 3, epochs: int = 30, films: int = 2000, batch_size: int = 256) -> Study:
    """The mean of the frames tells a caption from its reversed one half of the time, the transformer
    at least 85 %; a sentence finds its window at least 5 × as often as by chance."""
    given = {"epochs": epochs, "train_batch_size": batch_size}
    ways = {}
    for name, time, more in (
        ("mean", "mean", ""),
        ("transformer", "transformer", ""),
        ("transformer, events", "transformer", ":events"),
    ):
        tower = {"video_tower": f"{FRAMES_TOWER},time={time}", "data": f"demo:clips:{films}{more}"}
        ways[name] = Way(partial(learned, given | tower, seeds))
    columns = [
        Column("composition/video_to_order_right", "order, %", "{:.1f}", 100),
        Column("concept/video_to_order_right", "of unseen emoji, %", "{:.1f}", 100),
        Column("composition/video_to_text_R@1", "video → text R@1, %", "{:.1f}", 100),
        Column("composition/text_to_video_R@1", "text → video R@1, %", "{:.1f}", 100),
        Column("composition/grounding_R@1_iou_0.5", "window, IoU ≥ 0.5, %", "{:.1f}", 100),
        Column("composition/grounding_chance_iou_0.5", "by chance, %", "{:.1f}", 100),
    ]
    how = f"{films} films, {epochs} epochs of batches of {batch_size}, medians of {seeds} seeds"
    return Study("Clips", ways, columns, how, rounds=1)


STUDIES = (learn,)


def learned(given: dict[str, Any], seeds: int) -> Figures:
    """What evaluate.py finds at the end, of each seed."""
    figures: dict[str, list[float]] = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as run_dir:
            log, run = Path(run_dir) / "log", Path(run_dir) / "run"
            common = settings(
                "trace_every=0 wandb=disabled eval_every=1000000 pairs=video:text",
                {"run_dir": str(run), "seed": seed, "cache": f"{tempfile.gettempdir()}/clips"},
            )
            call(train_command(2, common | given), log, f"seed {seed}", 2)
            words = ("evaluate.py", run, "--json", run / "found.json")
            call([sys.executable, *map(str, words)], log, f"evaluating seed {seed}")
            found = json.loads((run / "found.json").read_text())
        print({n: v for n, v in found.items() if "R@1" in n or "order" in n}, flush=True)
        for name, value in found.items():
            if isinstance(value, float):
                figures.setdefault(name, []).append(value)
    return figures


if __name__ == "__main__":
    main("bench.clips")
