"""What a checkpoint costs a run: how long training waits, how slow steps are while it is written,
seconds and bytes against DeepSpeed's own.

    python bench/checkpoint.py            writes bench/out/checkpoint.md and prints it

Two replicas of one stage under ZeRO-1, which DeepSpeed can save too. Ours is flushed to the disk
and read again before it counts; DeepSpeed's is left to the kernel.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import make_engine, micro_batches
from bench.compare import MIB, Column, Figures, Study, Way, main, on_ranks
from bench.steps import STRATEGIES, merged

WARMUP_STEPS = 2


def measure(ours: bool, folder: Path, steps: int) -> Figures:
    """On each rank: of one checkpoint, after a first one that also allots the memory for copies."""
    from engine.checkpoint.layout import step_folder
    from engine.checkpoint.retention import Keep
    from engine.checkpoint.together import CheckpointWriter
    from engine.json_messages import from_first_rank

    engine = make_engine(STRATEGIES, merged(1, 2))
    batch = list(micro_batches(STRATEGIES, engine, 0))
    writer = CheckpointWriter(folder, {}, Keep(1))

    def step() -> None:
        engine.train_batch(iter(batch))

    def save() -> None:
        if ours:
            writer.save(engine, {})
        else:
            engine.save_checkpoint(str(folder), tag="one", save_latest=False)

    for _ in range(WARMUP_STEPS):
        step()
    save()
    writer.finish()
    if not ours:
        return {"waited_s": _seconds(save), "bytes": _bytes(folder / "one")}
    undisturbed = [_seconds(step) for _ in range(steps)]
    asked, checkpoint = time.perf_counter(), folder / step_folder(engine.global_steps)
    waited_s, while_writing = _seconds(save), [_seconds(step)]
    while not from_first_rank(checkpoint.is_dir()):
        while_writing.append(_seconds(step))
    written_s = time.perf_counter() - asked
    writer.finish()
    return {
        "waited_s": waited_s,
        "written_s": written_s,
        "slowdown": statistics.mean(while_writing) / statistics.mean(undisturbed),
        "bytes": _bytes(checkpoint),
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def once(ours: bool, parent: str, steps: int) -> Figures:
    folder = Path(tempfile.mkdtemp(dir=parent or None))
    try:
        return on_ranks(2, measure, ours, folder, steps)[0]
    finally:
        shutil.rmtree(folder)


def checkpoint(steps: int = 4, folder: str = "") -> Study:
    """Training waits for a copy in memory, under a tenth of DeepSpeed's wait; a step takes at most
    1.1 × as long while files are written. --folder: to measure that disk."""
    return Study(
        "Checkpoints in the background, against DeepSpeed's own",
        {
            "DeepSpeed's": Way(partial(once, False, folder, steps)),
            "ours": Way(partial(once, True, folder, steps)),
        },
        (
            Column("waited_s", "training waits, s", "{:.2f}"),
            Column("waited_s", "DeepSpeed's wait ÷", inverse=True),
            Column("written_s", "until it counts, s", "{:.2f}"),
            Column("slowdown", "a step while it is written ÷ a step otherwise", "{:.2f}"),
            Column("bytes", "size, MiB", "{:.0f}", 1 / MIB),
        ),
        f"{STRATEGIES.describe()} Merged, two replicas, ZeRO-1.",
        reference="DeepSpeed's",
        rounds=5,
    )


STUDIES = (checkpoint,)

if __name__ == "__main__":
    main("bench.checkpoint")
