"""Writing a checkpoint so that at every moment there is a whole one: all files beside, flushed and
read again, then one rename.

    every rank          write_rank    its tensors, flushed, compared with what is in memory, their checksum; last its marker
    the first rank      commit        waits for all markers, checks the sizes, writes the manifest, renames the folder, then `latest`

A process that is killed leaves a folder `step-NNNNNNNN.writing` behind, which nobody reads and
`make_folder` clears away.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import files
from engine.checkpoint.layout import (
    LATEST,
    MANIFEST,
    OWNER,
    WRITING,
    BrokenCheckpoint,
    FileRecord,
    Fragment,
    Manifest,
    RankRecord,
    checksum_of_file,
    flush,
    frozen_file,
    marker_file,
    replace_text,
    sealed,
    step_folder,
    tensors_file,
    unsealed,
)
from engine.checkpoint.retention import Keep, clear_away, delete_old, set_aside_from

POLL_EVERY_S = 0.05  # for markers of other ranks


def writing_folder(folder: Path, step: int) -> Path:
    return folder / (step_folder(step) + WRITING)


def claim(folder: Path) -> str:
    """From now on checkpoints in `folder` are those of this process; the words that say so. On the
    first rank."""
    files.make_folder(folder, within=folder.parent)
    owner = f"process {os.getpid()} of {socket.gethostname()}, {uuid.uuid4().hex}"
    replace_text(folder / OWNER, owner)
    return owner


def refuse_other_owner(folder: Path, owner: str) -> None:
    """Raise ValueError when another run has claimed `folder` since: two would mix their files."""
    file = folder / OWNER
    found = file.read_text(encoding="utf-8") if file.is_file() else owner
    if found != owner:
        raise ValueError(
            f"{folder}: {found.split(',')[0]} has begun to write checkpoints here, too. This run "
            "ends so that the files of two do not mix; the other one goes on. If neither should, "
            "stop that process as well"
        )


def make_folder(folder: Path, step: int) -> None:
    """An empty folder for `step`; what killed writers left behind is cleared away. On the first
    rank."""
    files.make_folder(folder, within=folder.parent)
    clear_away(folder)
    writing_folder(folder, step).mkdir()


def write_rank(
    folder: Path,
    rank: int,
    tensors: Mapping[Fragment, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
    stateless: tuple[str, ...],
    progress: Mapping[str, Any],
    frozen: Mapping[Fragment, Tensor] | FileRecord | None = None,
) -> RankRecord:
    """This rank's part of the checkpoint that is written in `folder`. `tensors`: flat, in host
    memory, unchanged until this returns; `frozen`: those that never change, or the record of the
    file with them that is there already (`link_frozen`).

    Raises OSError or safetensors' error when it cannot be written, BrokenCheckpoint when it reads
    back differently.
    """
    # The first rank has made it, but on a network's disk another host may go on not seeing what it
    # has looked for in vain, half a minute with NFS: until it is told to make it.
    folder.mkdir(parents=True, exist_ok=True)
    try:
        own = _write_file(folder / tensors_file(rank), tensors)
        if frozen is not None and not isinstance(frozen, FileRecord):
            frozen = _write_file(folder / frozen_file(rank), frozen) if frozen else None
        record = RankRecord(
            **vars(own), scalars=scalars, stateless=stateless, progress=progress, frozen=frozen
        )
        replace_text(folder / marker_file(rank), sealed(record.to_json()))
        return record
    except Exception:
        for name in (tensors_file(rank), frozen_file(rank)):
            files.remove(folder / name, folder)  # the disk may be full, and others write to it too
        raise


def _write_file(file: Path, tensors: Mapping[Fragment, Tensor]) -> FileRecord:
    save_file({fragment.key: tensor for fragment, tensor in tensors.items()}, file)
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors makes it for its owner alone
    flush(file, forget=True)
    _refuse_other_content(file, tensors)  # a checksum of the file alone would not see it
    return FileRecord(file.stat().st_size, checksum_of_file(file), tuple(tensors))


def link_frozen(checkpoint: Path, folder: Path, rank: int, record: FileRecord) -> bool:
    """Give the file of frozen parameters of an earlier checkpoint a second name in `folder`, where
    one is written: each folder is whole, and the disk holds the file once. Whether that worked; not
    all file systems know second names."""
    file = checkpoint / frozen_file(rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.lstat().st_size != record.num_bytes:
            return False
        files.name_again(file, folder)
        return True
    except OSError:
        return False


def _refuse_other_content(file: Path, tensors: Mapping[Fragment, Tensor]) -> None:
    """Raise BrokenCheckpoint unless each tensor reads back bit for bit."""
    with safe_open(file, framework="pt") as written:
        for fragment, tensor in tensors.items():
            if _digest(written.get_tensor(fragment.key)) != _digest(tensor):
                raise BrokenCheckpoint(
                    f"{file} reads back differently in {fragment.key}; the disk or the memory is "
                    "faulty"
                )


def _digest(tensor: Tensor) -> bytes:
    """Of its bits, also where they are no numbers; several times as fast as comparing."""
    bits: Any = tensor.view(torch.uint8).numpy()  # a buffer, as Python before 3.12 cannot say
    return xxhash.xxh3_128_digest(bits)


def commit(
    folder: Path,
    step: int,
    num_ranks: int,
    about: Mapping[str, Mapping[str, Any]],
    keep: Keep,
    limit_s: float,
    cancelled: threading.Event,
    owner: str,
) -> None:
    """Make the checkpoint of `step` count, when all ranks have written theirs. `about`: the
    manifest's topology, state and configuration.

    Checkpoints of this step and of later ones belong to steps that were undone, and are put aside.
    Nothing happens when `cancelled` before all ranks are done. Raises TimeoutError when they are
    not within `limit_s`, ValueError when what they wrote is no whole checkpoint, or another than
    `owner` writes here.
    """
    writing = writing_folder(folder, step)
    if not _await_markers(writing, num_ranks, limit_s, cancelled):
        return
    markers = [writing / marker_file(rank) for rank in range(num_ranks)]
    records = tuple(
        RankRecord.from_json(unsealed(marker.read_text(encoding="utf-8"))) for marker in markers
    )
    written = [each for rank, record in enumerate(records) for each in record.files(rank).items()]
    for name, file in written:
        if (found := (writing / name).stat().st_size) != file.num_bytes:
            raise BrokenCheckpoint(
                f"{writing}: {name} has {found:,} bytes, and its rank wrote {file.num_bytes:,}"
            )
    manifest = Manifest(
        step, datetime.now(timezone.utc).isoformat(timespec="seconds"), ranks=records, **about
    )
    replace_text(writing / MANIFEST, manifest.to_text())
    for marker in markers:
        files.remove(marker, writing)
    flush(writing)
    refuse_other_owner(folder, owner)
    set_aside_from(folder, step)
    checkpoint = folder / step_folder(step)
    files.move(writing, checkpoint)
    flush(folder)
    replace_text(folder / LATEST, checkpoint.name + "\n")
    delete_old(folder, checkpoint, keep)


def _await_markers(
    writing: Path, num_ranks: int, limit_s: float, cancelled: threading.Event
) -> bool:
    deadline, missing = time.monotonic() + limit_s, list(range(num_ranks))
    while missing := [rank for rank in missing if not (writing / marker_file(rank)).is_file()]:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"ranks {missing} have not written their part within {limit_s:.0f} s; all nodes "
                f"must see the same folder {writing.parent}"
            )
        if cancelled.wait(POLL_EVERY_S):
            return False
    return True
