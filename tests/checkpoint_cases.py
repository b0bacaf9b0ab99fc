"""What the processes of a checkpoint's tests do: train, save, go on elsewhere; write until they are
killed."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from split_training import Case, make_engine, micro_batches_of_rank
from torch import Tensor

from engine.checkpoint.layout import (
    MANIFEST,
    OWNER,
    Fragment,
    checksum_of_file,
    read_manifest,
    replace_text,
    tensors_file,
)
from engine.checkpoint.retention import Keep
from engine.checkpoint.writing import commit, make_folder, write_rank, writing_folder


def train_from(
    case: Case, steps: int, source: Path | None = None, folder: Path | None = None, save_at: int = 0
) -> dict[str, Any]:
    """On each rank: train `steps` steps from the beginning or from the checkpoint `source`, and
    save after step `save_at` into `folder` while training goes on. Tells losses and learning rates
    by step, and the state before the first step, at the save and at the end."""
    from engine.checkpoint.together import CheckpointWriter, load_checkpoint

    engine, _, image_size = make_engine(case)
    state, changes = load_checkpoint(engine, source) if source else ({"step": 0}, [])
    result = {"start": state_of(engine), "changes": changes, "losses": {}, "lr": {}, "buffers": {}}
    writer = CheckpointWriter(folder, {"made": "for a test"}, KEEP) if folder else None
    for step in range(state["step"], state["step"] + steps):
        metrics = engine.train_batch(micro_batches_of_rank(case, engine, step, image_size))
        assert engine.global_steps == step + 1
        result["losses"][step + 1], result["lr"][step + 1] = metrics.loss, metrics.lr
        result["buffers"][step + 1] = {
            name: buffer.clone().cpu() for name, buffer in engine.module.canonical_buffers.items()
        }
        if step + 1 == save_at:
            result["saved"] = state_of(engine)
            writer.save(engine, {"step": step + 1})
    if writer:
        writer.finish()
    return {**result, "end": state_of(engine), "optimizer": engine.backend.wrapper}


def state_of(engine) -> dict[str, Any]:
    """This rank's part of everything that a checkpoint holds."""
    from engine.checkpoint.engine_state import snapshot

    taken = snapshot(engine)
    whole = {**taken.tensors, **taken.frozen}
    tensors = {fragment: tensor.clone() for fragment, tensor in whole.items()}
    return {"tensors": tensors, "scalars": taken.scalars, "progress": taken.progress}


def as_0_1_0_wrote(checkpoint: Path) -> None:
    """Add what 0.1.0 also saved: the state of each rank's generators."""
    manifest, records = read_manifest(checkpoint), []
    for rank, record in enumerate(manifest.ranks):
        file, drawn = checkpoint / tensors_file(rank), Fragment("random", str(rank), (5,), 0, 5)
        save_file({**load_file(file), drawn.key: torch.zeros(5, dtype=torch.uint8)}, file)
        size, fragments = file.stat().st_size, (*record.fragments, drawn)
        record = replace(record, num_bytes=size, fragments=fragments)
        records.append(replace(record, checksum=checksum_of_file(file)))
    replace_text(checkpoint / MANIFEST, replace(manifest, ranks=tuple(records)).to_text())


def whole(states: list[dict[str, Any]]) -> dict[tuple[str, str], Tensor]:
    """(kind, name) -> the tensor, put together from the states of all ranks."""
    found: dict[tuple[str, str], Tensor] = {}
    for state in states:
        for fragment, tensor in state["tensors"].items():
            into = found.setdefault(
                (fragment.kind, fragment.name),
                torch.full((torch.Size(fragment.shape).numel(),), float("nan")).double(),
            )
            into[fragment.offset : fragment.offset + fragment.numel] = tensor.double()
    return found


# -- disks that are full


@contextlib.contextmanager
def largest_file(num_bytes: int):
    """Writing more than that into one file fails in here, as it does on a full disk: in the middle
    of the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def train_on_a_disk_that_fills_up(case: Case, folder: Path, full_on: int) -> dict[str, Any]:
    """On each rank: save after steps 1, 2, 3 and 4. The disk of rank `full_on` has no room for 2
    and 4. What is there after 3 and 4."""
    from engine.checkpoint.together import CheckpointWriter

    engine, _, image_size = make_engine(case)
    writer, there = CheckpointWriter(folder, {}, KEEP), {}
    with contextlib.redirect_stderr(io.StringIO()) as warned:
        for step in range(1, 5):
            engine.train_batch(micro_batches_of_rank(case, engine, step - 1, image_size))
            with (
                largest_file(10_000)
                if engine.comm.rank == full_on and step in (2, 4)
                else contextlib.nullcontext()
            ):
                writer.save(engine, {"step": step})
                there[step] = sorted(path.name for path in folder.iterdir() if path.name != OWNER)
                # where there is room also the manifest, or the next limit might meet it
                written = ("checkpoint files", *("checkpoint manifest",) * (step % 2))
                for thread in threading.enumerate():
                    if thread.name in written:
                        thread.join()
        with pytest.raises(OSError) as failure:
            writer.finish()
    return {
        "there": {**there, 4: sorted(path.name for path in folder.iterdir() if path.name != OWNER)},
        "warned": warned.getvalue(),
        "failure": str(failure.value),
    }


# -- without an engine

TENSORS = {
    "image.weight": torch.arange(600.0).view(20, 30),
    "text.bias": torch.arange(7.0),
    "head.logit_scale": torch.tensor([2.5]),
}
KEEP = Keep()


def write_small(
    folder: Path, step: int, keep: Keep = KEEP, num_ranks: int = 2, owner: str = ""
) -> Path:
    """A checkpoint of `TENSORS` + step, cut evenly over ranks, with one kind of optimizer state."""
    make_folder(folder, step)
    for rank in range(num_ranks):
        tensors, scalars = {}, {}
        for name, tensor in TENSORS.items():
            first, last = (
                tensor.numel() * rank // num_ranks,
                tensor.numel() * (rank + 1) // num_ranks,
            )
            for kind, values in (("parameter", tensor + step), ("optimizer.exp_avg", -tensor)):
                if first < last:
                    tensors[Fragment(kind, name, tuple(tensor.shape), first, last - first)] = (
                        values.flatten()[first:last].clone()
                    )
            scalars[name] = {"step": {"dtype": "float32", "value": float(step)}}
        progress = {"counters": {"global_steps": step}, f"of rank {rank}": {"seen": rank}}
        write_rank(writing_folder(folder, step), rank, tensors, scalars, (), progress)
    about = {"topology": {"precision": "float32"}, "state": {"step": step}, "configuration": {}}
    commit(folder, step, num_ranks, about, keep, 10.0, threading.Event(), owner)
    return folder / f"step-{step:08d}"


def write_for_ever(folder: Path, first_step: int, pipe: Any) -> None:
    """One checkpoint after the other; `pipe` gets the step of each that counts."""
    step = first_step
    while True:
        write_small(folder, step, Keep(2))
        pipe.send(step)
        step += 1


def write_until(folder: Path, step: int, operation: int) -> int:
    """In a process of its own: write one checkpoint, and be killed before that operation on the
    disk, counted from 0. Its exit status."""
    left = operation

    def on_event(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod") or (
            event == "open" and arguments[1] not in ("r", "rb")
        ):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(on_event)
            write_small(folder, step, Keep(2))
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def found(asked: str, checkpoints: Path) -> tuple[Path | None, list[str]]:
    """What a run goes on from."""
    from launch.run.resuming import find_checkpoint

    return find_checkpoint(asked, checkpoints)
