"""What a checkpoint costs a run: how long training waits, how slow steps are while it is written,
seconds and bytes against DeepSpeed's own.

    python bench/checkpoint.py            writes bench/out/checkpoint.md and prints it

Two replicas of one stage under ZeRO-1, which DeepSpeed can save too. In each round, in turn: steps
that nothing disturbs; a checkpoint of ours, with steps until it counts; a checkpoint of
DeepSpeed's, which training waits for. Ours is flushed to the disk and read again before it counts;
DeepSpeed's is left to the kernel.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import make_engine, micro_batches
from bench.strategies import MIB, SETUP

BRANCHES = {"layout": "merged", "stages": {"merged": 1}, "replicas": 2}
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Round:
    """Seconds as rank 0 sees them. `undisturbed_s`, `while_writing_s`: of single steps; `waited_s`:
    of training for the checkpoint."""

    undisturbed_s: list[float]
    while_writing_s: list[float]
    waited_s: float
    written_s: float  # from asking for it until it counts
    num_bytes: int
    deepspeed_s: float
    deepspeed_bytes: int

    @property
    def slowdown(self) -> float:
        return statistics.mean(self.while_writing_s) / statistics.mean(self.undisturbed_s)


def measure(folder: Path, rounds: int, steps: int) -> list[Round]:
    """On each rank."""
    from engine.checkpoint.layout import step_folder
    from engine.checkpoint.retention import Keep
    from engine.checkpoint.together import CheckpointWriter
    from engine.json_messages import from_first_rank

    engine = make_engine(SETUP, BRANCHES)
    batch = list(micro_batches(SETUP, engine, 0))
    writer, theirs = CheckpointWriter(folder / "ours", {}, Keep(1)), folder / "deepspeed"

    def step() -> None:
        engine.train_batch(iter(batch))

    for _ in range(WARMUP_STEPS):
        step()
    writer.save(engine, {})  # the first one also allots the memory for the copies
    writer.finish()
    found = []
    for _ in range(rounds):
        undisturbed = [_seconds(step) for _ in range(steps)]
        asked, checkpoint = time.perf_counter(), folder / "ours" / step_folder(engine.global_steps)
        waited = _seconds(lambda: writer.save(engine, {}))
        while_writing = [_seconds(step)]
        while not from_first_rank(checkpoint.is_dir()):
            while_writing.append(_seconds(step))
        written = time.perf_counter() - asked
        writer.finish()
        deepspeed_s = _seconds(
            lambda: engine.save_checkpoint(str(theirs), tag="one", save_latest=False)
        )
        found.append(
            Round(
                undisturbed_s=undisturbed,
                while_writing_s=while_writing,
                waited_s=waited,
                written_s=written,
                num_bytes=_bytes(checkpoint),
                deepspeed_s=deepspeed_s,
                deepspeed_bytes=_bytes(theirs),
            )
        )
        from_first_rank(
            shutil.rmtree(theirs, ignore_errors=True) if engine.comm.rank == 0 else None
        )
    return found


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def report(rounds: list[Round]) -> str:
    slowdowns = [r.slowdown for r in rounds]
    waits = [r.deepspeed_s / r.waited_s for r in rounds]
    undisturbed = statistics.median(s for r in rounds for s in r.undisturbed_s)
    rows = [
        (
            "training waits, s",
            [r.waited_s for r in rounds],
            [r.deepspeed_s for r in rounds],
            "{:.2f}",
        ),
        ("until it counts, s", [r.written_s for r in rounds], None, "{:.2f}"),
        (
            "size, MiB",
            [r.num_bytes / MIB for r in rounds],
            [r.deepspeed_bytes / MIB for r in rounds],
            "{:.0f}",
        ),
    ]
    return "\n".join(
        [
            "# Checkpoints in the background, against DeepSpeed's own",
            "",
            f"{SETUP.describe()}; merged, two replicas, ZeRO-1; {len(rounds)} rounds in turn.",
            "",
            f"**A step while a checkpoint is written ÷ a step otherwise ({undisturbed:.2f} s): "
            f"{_spread(slowdowns, '{:.2f}')}**. **DeepSpeed's wait ÷ ours: "
            f"{_spread(waits, '{:.1f}')}**.",
            "",
            "| | ours | DeepSpeed's |",
            "|---|---|---|",
            *(
                f"| {name} | {_spread(ours, form)} | {_spread(theirs, form) if theirs else '–'} |"
                for name, ours, theirs, form in rows
            ),
            "",
        ]
    )


def _spread(values: list[float], form: str) -> str:
    return f"{form} ({form} – {form})".format(statistics.median(values), min(values), max(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="checkpoints of each kind (default: 5)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        metavar="N",
        help="undisturbed steps in each round (default: 4)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where to write, to measure that disk (default: the one for temporary files)",
    )
    arguments = parser.parse_args()
    from ranks import run_ranks

    import bench.checkpoint as this  # so that the ranks find `measure` by name

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rounds = run_ranks(
            2, this.measure, Path(folder), arguments.rounds, arguments.steps, timeout_s=1800
        )[0]
    text = report(rounds)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "checkpoint.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
