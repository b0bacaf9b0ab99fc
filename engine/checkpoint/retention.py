"""Which checkpoints stay, which are put aside, and whether there is room for another."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.files import move, remove, remove_folder
from common.sizes import sized
from engine.checkpoint.layout import (
    DELETING,
    LATEST,
    OWNER,
    SET_ASIDE,
    WRITING,
    BrokenCheckpoint,
    checkpoints_in,
    read_manifest,
    step_of,
)

SPARE_BYTES = 64 << 20  # beside what is written: metrics, traces, other processes


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the `last` newest ones, and with `every` N the first one at or after
    each multiple of N steps."""

    last: int = 3
    every: int | None = None

    def __post_init__(self):
        if self.last < 1 or (self.every is not None and self.every < 1):
            raise ValueError(
                f"keep the last {self.last} checkpoints and one every {self.every} steps: both "
                "take whole numbers of at least 1"
            )

    def goes(self, steps: Sequence[int]) -> list[int]:
        """Of checkpoints of these steps, those that do not stay."""
        steps, gone, multiple = sorted(steps), [], 0
        for step in steps:
            if self.every and step // self.every > multiple:
                multiple = step // self.every
            elif step not in steps[-self.last :]:
                gone.append(step)
        return gone


def delete_old(folder: Path, newest: Path, keep: Keep) -> None:
    """Delete older checkpoints than `newest`, which was just written and checked. Broken ones do
    not count as kept; those older than all that stay go too."""
    older = [path for path in checkpoints_in(folder) if step_of(path) <= step_of(newest)]
    whole = [step_of(path) for path in older if not _is_broken(path)]
    goes = set(keep.goes(whole))
    oldest_that_stays = min(step for step in whole if step not in goes)
    for path in older:
        if step_of(path) in goes or step_of(path) < oldest_that_stays:
            going = path.with_name(path.name + DELETING)
            move(path, going)
            remove_folder(going, folder)


def clear_away(folder: Path) -> None:
    """What is left of checkpoints whose writing or deleting was broken off. What a network's disk
    still holds open goes another time."""
    for ending in (WRITING, DELETING):
        for left in folder.glob(f"step-*{ending}"):
            remove_folder(left, folder)
    for name in (LATEST, OWNER):
        for left in folder.glob(f".{name}.*"):  # of `replacing`, which was killed
            remove(left, folder)


def _is_broken(checkpoint: Path) -> bool:
    with contextlib.suppress(BrokenCheckpoint):
        read_manifest(checkpoint)
        return False
    return True


def set_aside_from(folder: Path, step: int) -> None:
    """Rename checkpoints of `step` and later ones: the run went on from an older one, so their
    steps are undone, or they are broken."""
    for path in checkpoints_in(folder):
        if step_of(path) >= step:
            aside, number = path.with_name(path.name + SET_ASIDE), 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}{SET_ASIDE}-{number}")
            move(path, aside)


def too_little_room(folder: Path, num_bytes: int) -> str | None:
    """Why `num_bytes` do not fit on the disk of `folder`, in words; None: they do. A quota is not
    seen."""
    free = shutil.disk_usage(folder).free
    if free >= num_bytes + SPARE_BYTES:
        return None
    return f"it takes {sized(num_bytes)}, and the disk of {folder} has {sized(free)} left"
