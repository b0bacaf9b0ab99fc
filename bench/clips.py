"""What clips of the demo teach: train.py with the mean of the frames, and with a transformer over
them.

python bench/clips.py learn --seeds 3 --epochs 30         tables to bench/out/
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.compare import Column, Study, Way, main
from bench.runs import learned

FRAMES_TOWER = "resnet18:layers=1-1-1-1"


def learn(seeds: int = 3, epochs: int = 30, films: int = 2000, batch_size: int = 256) -> Study:
    """The mean of the frames tells a caption from its reversed one half of the time, the
    transformer at least 85 %; a sentence finds its window at least 5 × as often as by chance."""
    cache = f"{tempfile.gettempdir()}/clips"
    given = {
        "pairs": "video:text",
        "epochs": epochs,
        "train_batch_size": batch_size,
        "cache": cache,
    }
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


if __name__ == "__main__":
    main("bench.clips")
