"""Where a run goes on: the checkpoint that --resume asks for, where that is in the data, and what
to say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.batching.order import BatchSizes, GlobalOrder
from engine.checkpoint.layout import BrokenCheckpoint, checkpoints_in, manifest_of, newest_of
from engine.checkpoint.together import load_checkpoint, verify_together
from engine.executor import ForkEngine
from engine.json_messages import from_first_rank

STATE = {"step", "batch_sizes", "balance", "loss_weights"}


def find_checkpoint(
    asked: str,
    checkpoints: Path,
    verify: Callable[[Path], Any] = verify_together,
    agreed: Callable[[list[str]], list[str]] = from_first_rank,
) -> tuple[Path | None, list[str]]:
    """The checkpoint's folder, and a notice for each newer one that is broken. `verify`, `agreed`:
    how one is checked, and who says which there are; by default all ranks do it together."""
    if asked == "never":
        return None, []
    there = agreed([checkpoint.name for checkpoint in checkpoints_in(checkpoints)])
    checkpoint, notices = Path(asked), []
    if asked != "auto" and there and checkpoint.resolve().parent != checkpoints.resolve():
        notices = [f"--resume {asked} is where this run began; it has checkpoints of its own now"]
        asked = "auto"
    if asked == "auto":
        newest, broken = newest_of([checkpoints / name for name in there], verify)
        if newest is None and broken:
            listed = "\n".join(f"    {reason}" for reason in broken)
            raise ValueError(
                "--resume auto: no checkpoint can be used; give a whole one with --resume PATH, or "
                f"another --run-dir:\n{listed}"
            )
        return newest, [*notices, *(f"passed over: {reason}" for reason in broken)]
    if not checkpoint.is_dir():
        raise FileNotFoundError(
            f"--resume {checkpoint}: no such folder; give auto, never, or a folder such as "
            "RUN_DIR/checkpoints/step-00000100"
        )
    try:
        verify(checkpoint)
    except BrokenCheckpoint as error:
        raise ValueError(
            f"--resume {error}; give auto for the newest whole checkpoint, or another one"
        ) from error
    return checkpoint, []


def state_of(checkpoint: Path | None) -> Mapping[str, Any]:
    """What train.py saved with it; None: of a run that begins. Errors: ValueError when it was not
    train.py as it is now."""
    if checkpoint is None:
        return {"step": 0, "batch_sizes": ()}
    state = manifest_of(checkpoint).state
    if not state.keys() >= STATE:
        raise ValueError(
            f"--resume {checkpoint}: its state has {', '.join(state)}, and "
            f"{', '.join(sorted(STATE))} are needed, so another program wrote it; go on with that "
            "one, or export.py its model and begin another run with --import"
        )
    return state


def earlier_sizes(batch_sizes: Sequence[Sequence[int]], now: int) -> BatchSizes:
    """Of `(number of steps, samples of each), ...` so far: those before the size that a run goes on
    with."""
    sizes = tuple((number, size) for number, size in batch_sizes)
    return sizes[:-1] if sizes and sizes[-1][1] == now else sizes


def resume(engine: ForkEngine, checkpoint: Path, order: GlobalOrder, total_steps: int) -> list[str]:
    """Fill `engine` from a checkpoint; notices of what differs since, or that nothing does. `order`,
    `total_steps`: of the run from here on. All ranks call it together."""
    state, changes = load_checkpoint(engine, checkpoint)
    return announced(checkpoint, state["step"], changes, order, total_steps)


def announced(
    checkpoint: Path, step: int, changes: Sequence[str], order: GlobalOrder, total_steps: int
) -> list[str]:
    """As `resume`. `changes`: of what is split and computed."""
    changes = [*changes, *filter(None, [change_of_size(order, step, total_steps)])]
    same = f"step {step:,} of {total_steps:,}, split and computed as before"
    return [f"goes on from {checkpoint.name}, {change}" for change in changes or [same]]


def change_of_size(order: GlobalOrder, step: int, total_steps: int) -> str | None:
    """What it means that global batches have another size from `step` on; None when they have
    not."""
    if not order.earlier or step != order.changed_at:
        return None
    epoch = order.epoch(step)
    visited = order.samples_before(step) - order.samples_before(order.first_step(epoch))
    left = order.epoch_samples - visited
    return (
        f"{order.global_batch_size:,} samples a step, and before {order.earlier[-1][1]:,}: the "
        f"{left:,} samples left of epoch {epoch + 1} follow in their order; the learning "
        f"rate's schedule counts steps, {total_steps:,} in all"
    )
