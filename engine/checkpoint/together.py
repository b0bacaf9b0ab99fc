"""What all ranks do together: save in the background, agree on a checkpoint that is whole, go on
from it.

    step 100 ─ copy ─ step 101 ─ step 102 ─ … ─ step 200 ─ wait for step-00000100, copy ─ step 201
                 └─ write, flush, read again; then the first rank renames

Training waits for the copy to host memory. One checkpoint is in flight at most. No thread calls a
collective: what the writers found is reported when the next checkpoint is asked for, or at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from common.files import remove_folder
from engine.checkpoint import writing
from engine.checkpoint.engine_state import changes, num_bytes, restore, snapshot, topology_of
from engine.checkpoint.layout import (
    BrokenCheckpoint,
    FileRecord,
    Fragment,
    Manifest,
    checkpoints_in,
    newest_of,
    read_manifest,
    step_folder,
    verify,
)
from engine.checkpoint.reading import CheckpointReader
from engine.checkpoint.retention import Keep, too_little_room
from engine.executor import ForkEngine
from engine.json_messages import from_all_ranks, from_first_rank
from engine.processes.out_of_memory import RESUMING, SAVING
from engine.streams import runs_behind

NICENESS = 10  # of the threads that write, to the scheduler


class CheckpointWriter:
    """Saves a run's checkpoints below `folder`. All ranks make one, and call its methods together.

    `configuration`: what the run decided, as JSON. A checkpoint that fails is warned of, by the
    first rank, and training goes on. `limit_s`: how long the first rank waits for the parts of the
    others, and how long writing counts as a sign of life.
    """

    def __init__(
        self, folder: Path, configuration: Mapping[str, Any], keep: Keep, limit_s: float = 1800.0
    ):
        self.folder, self.configuration = folder, configuration
        self.keep, self.limit_s = keep, limit_s
        self._first = dist.get_rank() == 0
        self._step = 0  # of the checkpoint asked for last,
        self._refused: str | None = None  # why it was not begun,
        self._warned = False  # and whether it was warned of
        self._files: Future | None = None  # what this rank has in flight,
        self._commit: Future | None = None  # and the first rank's part
        self._cancelled = threading.Event()
        # the newest checkpoint that this process wrote, and its file of frozen parameters there
        self._frozen: tuple[Path, FileRecord] | None = None
        self._begun_s, self._signs = 0.0, 0
        self._owner = ""
        if self._first:
            # a disk that is full or read-only is warned of when there is something to lose
            with contextlib.suppress(OSError):
                self._owner = writing.claim(folder)
        # memory for the copy, by key: used again from one checkpoint to the next
        self._host: dict[str, Tensor] = {}

    def save(self, engine: ForkEngine, state: Mapping[str, Any]) -> None:
        """Save what the engine is after the current step. `state`: the caller's, small, as JSON,
        equal on all ranks.

        Waits for the checkpoint before, if it is still being written, and for the copy. Raises
        ValueError for an optimizer whose state cannot be saved; what goes wrong with the disk is
        only warned of.
        """
        if reason := self._landed():
            self._warn(reason)
        taken = snapshot(engine)
        copied_state = json.loads(json.dumps(state))  # the caller goes on changing its own
        once = {} if self._frozen else taken.frozen  # else a second name of what is there
        room = sum(from_all_ranks(num_bytes(taken.tensors) + num_bytes(once)))
        self._step, self._warned = engine.global_steps, False
        self._refused = from_first_rank(self._prepare(room) if self._first else None)
        if self._refused:
            self._warn(self._refused)
            return
        self._begun_s = time.monotonic()
        folder, rank = writing.writing_folder(self.folder, self._step), engine.comm.rank
        linked = self._linked(folder, rank)
        with engine.memory_explained(SAVING):
            tensors = _copied_to_host(taken.tensors, self._host)
            frozen = linked or _copied_to_host(taken.frozen, {})
        parts = (taken.scalars, taken.stateless, taken.progress, frozen)
        write = partial(writing.write_rank, folder, rank, tensors, *parts)
        self._files = self._in_background("checkpoint files", write)
        if self._first:
            self._cancelled = threading.Event()
            about = {"topology": topology_of(engine), "state": copied_state}
            commit = partial(
                writing.commit,
                self.folder,
                self._step,
                engine.graph.world_size,
                about={**about, "configuration": self.configuration},
                keep=self.keep,
                limit_s=self.limit_s,
                cancelled=self._cancelled,
                owner=self._owner,
            )
            self._commit = self._in_background("checkpoint manifest", commit)

    def signs_of_life(self) -> int:
        """Goes up with each call while this rank writes, for `limit_s` at most: whoever waits for a
        checkpoint is not stuck."""
        in_flight = any(future and not future.done() for future in (self._files, self._commit))
        if in_flight and time.monotonic() < self._begun_s + self.limit_s:
            self._signs += 1
        return self._signs

    def newest(self) -> Path | None:
        """The newest whole one, when what is in flight has landed."""
        if reason := self._landed():
            self._warn(reason)
        newest = newest_of(checkpoints_in(self.folder), read_manifest)[0] if self._first else None
        name = from_first_rank(newest.name if newest else None)
        return self.folder / name if name else None

    def finish(self) -> None:
        """Wait until the checkpoint asked for last is there. Raises OSError on all ranks when it
        could not be written."""
        if reason := self._landed() or self._refused:
            raise OSError(self._message(reason))

    def _linked(self, folder: Path, rank: int) -> FileRecord | None:
        """The file of frozen parameters, with a second name in `folder`; None: there is none yet,
        or it cannot have one."""
        if self._frozen is None:
            return None
        checkpoint, record = self._frozen
        return record if writing.link_frozen(checkpoint, folder, rank, record) else None

    def _prepare(self, room: int) -> str | None:
        """An empty folder to write to; why there is none, in words. Raises ValueError when another
        run writes here."""
        try:
            self._owner = self._owner or writing.claim(self.folder)
            writing.refuse_other_owner(self.folder, self._owner)
            writing.make_folder(self.folder, self._step)
            reason = too_little_room(self.folder, room)
            if reason:
                writing.writing_folder(self.folder, self._step).rmdir()
            return reason
        except OSError as error:
            return str(error)

    def _landed(self) -> str | None:
        """Wait until what is in flight has landed on all ranks; why it has not, in words."""
        if self._files is None:
            return None
        reasons = [reason for reason in from_all_ranks(_reason(self._files)) if reason]
        if self._first:
            if reasons:
                self._cancelled.set()
            committed = None if self._commit is None else _reason(self._commit)
            reasons += [committed] if committed else []
            if reasons:
                remove_folder(writing.writing_folder(self.folder, self._step), self.folder)
        written = None if _reason(self._files) else self._files.result()
        self._files = self._commit = None
        reason = from_first_rank(reasons[0] if reasons else None)
        if reason is None and written is not None and written.frozen is not None:
            self._frozen = self.folder / step_folder(self._step), written.frozen
        return reason

    def _in_background(self, name: str, work: Callable[[], Any]) -> Future:
        """In a thread that dies with the process: what it was writing does not count yet."""
        future: Future = Future()

        def run() -> None:
            _give_way()
            try:
                future.set_result(work())
            except Exception as error:
                # all ranks learn it when the next checkpoint is asked for; here it is said at once
                self._warn(_in_words(error))
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name=name).start()
        return future

    def _warn(self, reason: str) -> None:
        """Once for a checkpoint, on the first rank."""
        if self._first and not self._warned:
            self._warned = True
            warning = f"wye: warning: {self._message(reason)}. Training goes on"
            print(warning, file=sys.stderr, flush=True)

    def _message(self, reason: str) -> str:
        newest, _ = newest_of(checkpoints_in(self.folder), read_manifest)
        return (
            f"checkpoint {self.folder / step_folder(self._step)} was not written: {reason}. "
            "Nothing was deleted, and the newest one is "
            f"{newest.name if newest else 'not there yet'}; make room on that disk: one more than "
            "are kept must fit"
        )


def _give_way() -> None:
    """Let this thread have about a tenth of a core that another one wants: the steps that go on
    meanwhile. Linux alone counts threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _copied_to_host(
    tensors: Mapping[Fragment, Tensor], host: dict[str, Tensor]
) -> dict[Fragment, Tensor]:
    """Copies in the memory of `host`. From a GPU into pinned memory, all at once."""
    on_gpu = any(runs_behind(tensor.device) for tensor in tensors.values())
    copies = {}
    for fragment, tensor in tensors.items():
        copy = host.get(fragment.key)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        copies[fragment] = host[fragment.key] = copy.copy_(tensor, non_blocking=True)
    if on_gpu:
        get_accelerator().synchronize()
    return copies


def _reason(future: Future) -> str | None:
    """Waits; what went wrong, in words."""
    error = future.exception()
    return None if error is None else _in_words(error)


def _in_words(error: BaseException) -> str:
    known = isinstance(error, (OSError, ValueError))
    return str(error) if known else f"{type(error).__name__}: {error}"


# -- going on


def verify_together(
    checkpoint: Path, check: Callable[[Path, int, int], Manifest] = verify
) -> Manifest:
    """The manifest. Raises BrokenCheckpoint on all ranks when one of them finds something wrong;
    each looks at its part of the files."""
    manifest, found = None, None
    try:
        manifest = check(checkpoint, dist.get_rank(), dist.get_world_size())
    except BrokenCheckpoint as error:
        found = str(error)
    wrong = next((reason for reason in from_all_ranks(found) if reason), None)
    if wrong or manifest is None:
        raise BrokenCheckpoint(wrong)
    return manifest


def load_checkpoint(engine: ForkEngine, checkpoint: Path) -> tuple[dict[str, Any], list[str]]:
    """Go on from `checkpoint`, whatever topology wrote it: (the caller's state, what differs and
    may change the numbers).

    All ranks call it, with an engine that has not trained yet. Raises ValueError when the
    checkpoint is of other towers or of another optimizer, BrokenCheckpoint when it is not whole.
    """
    manifest = verify_together(checkpoint, read_manifest)
    with CheckpointReader(checkpoint, manifest) as reader:
        with engine.memory_explained(RESUMING):
            restore(engine, reader)
        return dict(reader.manifest.state), changes(reader.manifest.topology, topology_of(engine))
