"""Where a run goes on: the checkpoint that --resume asks for, and what to say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.layout import BrokenCheckpoint
from engine.checkpoint.together import load_checkpoint, newest_checkpoint, verify_together
from engine.executor import ForkEngine


def resume(engine: ForkEngine, asked: str, checkpoints: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Fill `engine` from the checkpoint that is asked for: (the state saved with it, notices); None: the run begins.

    `asked`: "auto" for the newest whole one in the folder `checkpoints`, "never", or a checkpoint's folder. All ranks call it together.
    Raises FileNotFoundError or ValueError when what is asked for cannot be had.
    """
    checkpoint, notices = find_checkpoint(asked, checkpoints)
    if checkpoint is None:
        return None, notices
    state, changes = load_checkpoint(engine, checkpoint)
    return state, [*notices, *(f"goes on from {checkpoint.name}, {change}" for change in changes)]


def find_checkpoint(asked: str, checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint's folder, and a notice for each newer one that is broken."""
    if asked == "never":
        return None, []
    if asked == "auto":
        newest, broken = newest_checkpoint(checkpoints)
        if newest is None and broken:
            listed = "\n".join(f"    {reason}" for reason in broken)
            raise ValueError(
                f"--resume auto: no checkpoint can be used; give a whole one with --resume PATH, or another --run-dir:\n{listed}"
            )
        return newest, [f"passed over: {reason}" for reason in broken]
    checkpoint = Path(asked)
    if not checkpoint.is_dir():
        raise FileNotFoundError(
            f"--resume {checkpoint}: no such folder; give auto, never, or a folder such as RUN_DIR/checkpoints/step-00000100"
        )
    try:
        verify_together(checkpoint)
    except BrokenCheckpoint as error:
        raise ValueError(f"--resume {error}; give auto for the newest whole checkpoint, or another one") from error
    return checkpoint, []
