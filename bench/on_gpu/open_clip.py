"""OpenCLIP's own trainer on one GPU, for bench/gpu.py."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import open_clip
import torch
from open_clip_train import data
from open_clip_train.main import main
from torch import Tensor

from bench.common import flags
from bench.on_gpu.jobs import NUM_TOKENS, Job, write_tiny
from bench.on_gpu.timing import (
    Device,
    Note,
    example,
    filled,
    largest_foretold,
    measured_steps,
    sizes_of,
)

TIMES_TO_ENLARGE = 3


class Timed(Exception):
    """All that was to be timed is done: leaves OpenCLIP's program, which would go on to the end of
    its epoch."""


class Batches:
    """In the place of OpenCLIP's loader: hands out batches, and times what happens between them.

    OpenCLIP takes `per_step` of them for an optimizer step.
    """

    num_batches, num_samples = 1_000_000, 1_000_000_000

    def __init__(self, job: Job, device: Device, note: Note) -> None:
        self.job, self.device, self.note = job, device, note
        self.images, self.texts = example(*sizes_of(job), NUM_TOKENS)
        self.micro_batch = job.micro_batch
        self.per_step = accumulated(job)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.micro_batch is None:
            yield from self._enlarge()
        yield from self._time(self._made(self.micro_batch or 1))
        raise Timed

    def _made(self, number: int) -> tuple[Tensor, Tensor]:
        on_gpu = self.device.on_gpu
        return filled(self.images, number, on_gpu), filled(self.texts, number, on_gpu)

    def _enlarge(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Look for the largest batch that fits. One that does not ends the program; then `note` has
        been told what was tried."""
        small, size = self.job.probes
        peaks: list[tuple[int, float]] = []
        for number in (small, size):
            yield from self._probe(number, peaks)
        total = self.device.memory["total_bytes"]
        if total is None:
            self.micro_batch = 2 * size
            return
        for _ in range(TIMES_TO_ENLARGE):
            number = largest_foretold(peaks[-2], peaks[-1], total)
            if number < 1.03 * peaks[-1][0]:
                break
            yield from self._probe(number, peaks)
        self.micro_batch = peaks[-1][0]

    def _probe(self, number: int, peaks: list[tuple[int, float]]) -> Iterator[Any]:
        self.note(trying=number)
        batch = self._made(number)
        if self.device.on_gpu:
            torch.cuda.empty_cache()  # blocks of smaller batches would be in the way
        yield batch
        self.device.forget_peak()
        yield batch
        self.device.now()
        peaks.append((number, self.device.memory["peak_bytes"] or 0.0))

    def _time(self, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        size = len(batch[0]) * self.per_step
        for _ in measured_steps(self.job, size, self.device, self.note):
            yield from [batch] * self.per_step


def accumulated(job: Job) -> int:
    """Batches of an optimizer step."""
    return (job.batch or 1) // (job.micro_batch or 1) if job.of.accumulates else 1


def train(job: Job, note: Note) -> None:
    """What is learned of noise is of no interest, and neither is the rate."""
    device, name = Device(job.device), job.model
    if job.tiny:
        write_tiny(Path(job.tower), open_clip.get_model_config(job.model))
        open_clip.add_model_config(Path(job.tower).with_suffix(".json"))
        name = Path(job.tower).name
    batches = data.DataInfo(Batches(job, device, note))  # not black images, decoded each time
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(data, "get_synthetic_dataset", lambda *_, **__: batches),
        contextlib.suppress(Timed),
    ):
        options = {
            "model": name,
            "precision": "amp_bf16",
            "device": job.device,
            "batch-size": job.micro_batch or job.probes[1],
            "accum-freq": accumulated(job),
            "lr": 1e-4,
            "warmup": 1000,
            "epochs": 1,
            "save-frequency": 0,
            "logs": folder,
            "name": "run",
            "seed": 0,
            "dataset-type": "synthetic",
            "train-num-samples": 1,
            "workers": 0,
        }
        main([*flags(options), *(["--torchcompile"] if job.of.compiled else [])])
