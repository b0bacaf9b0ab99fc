"""What the processes of bench/gpu.py share: clock and memory of the device, batches in page-locked
memory, and how steps are timed."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.on_gpu.jobs import Job
from bench.on_gpu.profile import PROFILED_STEPS, Profiled

WARMUP_STEPS = 3  # memory is allocated, kernels are chosen and, where asked, compiled in them
WINDOWS = 3  # between waits for the device; their median is what is reported
FILLED = 0.94  # of the memory, that the largest batch is foretold to take
DISTINCT = 64  # images and texts, repeated to fill a batch: the work does not depend on them

Note = Callable[..., None]


class Device:
    """The clock and the memory of a GPU, or of a CPU, of which only the clock is true."""

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind)
        self.on_gpu = kind == "cuda"
        self.name = torch.cuda.get_device_name() if self.on_gpu else "CPU"

    def now(self) -> float:
        """Seconds, when all work so far is done."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def forget_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    @property
    def memory(self) -> dict[str, float | None]:
        """Bytes: most of tensors since `forget_peak`, most that torch has taken for them, and what
        it could take: other processes have a context on the GPU, too."""
        if not self.on_gpu:
            return {"peak_bytes": None, "reserved_bytes": None, "total_bytes": None}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "total_bytes": torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(),
        }

    @property
    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0


def filled(values: Tensor, number: int, on_gpu: bool, channels_last: bool = False) -> Tensor:
    """[DISTINCT, ...] repeated to [number, ...], in page-locked memory where there is a GPU."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(
        (number, *values.shape[1:]), dtype=values.dtype, pin_memory=on_gpu, memory_format=form
    )
    for start in range(0, number, len(values)):
        out[start : start + len(values)] = values[: number - start]
    return out


def example(image_size: int, vocab_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Images [DISTINCT, 3, H, W] and texts [DISTINCT, L], which end with the highest token, as
    CLIP's do."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(DISTINCT, 3, image_size, image_size, generator=generator)
    texts = torch.randint(1, vocab_size - 2, (DISTINCT, num_tokens), generator=generator)
    texts[:, 0], texts[:, -1] = vocab_size - 2, vocab_size - 1
    return images, texts


def sizes_of(job: Job) -> tuple[int, int]:
    """(pixels a side, size of the vocabulary)."""
    if not job.tiny:
        return 224, 49408
    config = json.loads((Path(job.tower) / "open_clip_config.json").read_text(encoding="utf-8"))
    return config["vision_cfg"]["image_size"], config["text_cfg"]["vocab_size"]


def measured_steps(job: Job, batch: int, device: Device, note: Note) -> Iterator[None]:
    """Lets steps of `batch` samples happen, one for each value that is drawn, and notes what they
    took: WARMUP_STEPS, a first one, WINDOWS windows of `job.seconds` together, and a profile."""
    yield from [None] * WARMUP_STEPS
    device.forget_peak()
    windows: list[float] = []
    number = 1
    for window in range(WINDOWS + 1):
        start = device.now()
        yield from [None] * number
        took = (device.now() - start) / number
        if window:
            windows.append(took)
        else:
            number = max(1, math.ceil(job.seconds / WINDOWS / max(1e-6, took)))
    step_s = statistics.median(windows)
    note(
        status="ok",
        batch=batch,
        micro_batch=job.micro_batch or batch,
        step_s=step_s,
        samples_per_s=batch / step_s,
        windows_s=windows,
        **device.memory,
    )
    profiled = Profiled()
    profiled.start()
    yield from [None] * PROFILED_STEPS
    device.now()
    note(profile=profiled.stop(PROFILED_STEPS))


def largest_foretold(small: tuple[int, float], large: tuple[int, float], total: float) -> int:
    """How many samples fill FILLED of the memory, by the peaks of two batches (samples, bytes)."""
    per_sample = (large[1] - small[1]) / (large[0] - small[0])
    fits = large[0] + (FILLED * total - large[1]) / max(per_sample, 1.0)
    step = 8 if fits < 512 else 32
    return max(step, int(fits) // step * step)
