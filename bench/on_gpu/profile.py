"""Where the time of a step goes on a GPU, and where the host waits for the device.

`summary` reads a trace of torch.profiler, whose events have the categories that are asked for here;
`waits_by_line` counts, line by line, where a step synchronises.
"""

from __future__ import annotations

import json
import linecache
import re
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT

PROFILED_STEPS = 3
# The first that is found in a kernel's name, in small letters, says what it does. Triton's are made
# by torch.compile of pointwise operations, norms and sums together.
CLASSES = (
    ("compiled", r"^triton_(?!tem)"),
    ("optimizer", r"multi_tensor_apply|adam"),
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|attention|sdpa"),
    (
        "convolution",
        r"conv|fprop|dgrad|wgrad|implicit_gemm|winograd|nchwtonhwc|nhwctonchw|im2col|col2im",
    ),
    ("matmul", r"gemm|nvjet|cutlass|cublas|splitk|gemv|matmul|triton_tem"),
    ("norm", r"layer_?norm|batch_?norm|bn_[fb]w|gammabeta|rowwisemoments|softmax"),
    ("elementwise", r"elementwise|vectorized|reduce|copy|cat|index|scatter|gather|fill|gelu"),
)
COPIES = {"gpu_memcpy": "memcpy", "gpu_memset": "memset"}
# Calls of CUDA in which the host waits for the device, and operations of torch that end in one.
WAITING_CALL = re.compile(r"^cu(da)?\w*Synchronize$|^cudaMemcpy$")
WAITING_OPERATIONS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero")


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name)), "other")


def summary(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Per step, from the events of a trace in Chrome's format: seconds in kernels by class, seconds
    in which any kernel or copy ran and in which copies ran alone, kernels launched, and how often
    the host waited, by call."""
    kernel_s: dict[str, float] = defaultdict(float)
    kernels: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    waits = Counter[str]()
    for event in events:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat"), str(event.get("name", ""))
        if category == "kernel" or category in COPIES:
            start, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
            (kernels if category == "kernel" else copies).append((start, start + seconds))
            kernel_s[COPIES.get(category) or kind_of(name)] += seconds
        elif (category in ("cuda_runtime", "cuda_driver") and WAITING_CALL.match(name)) or (
            category == "cpu_op" and name in WAITING_OPERATIONS
        ):
            waits[name] += 1
    busy_s = covered(kernels + copies)
    return {
        "kernel_s": {k: v / steps for k, v in sorted(kernel_s.items(), key=lambda item: -item[1])},
        "busy_s": busy_s / steps,
        "copies_alone_s": (busy_s - covered(kernels)) / steps,
        "kernels": len(kernels) / steps,
        "waits": {name: number / steps for name, number in waits.most_common()},
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans (start, end) lies."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Profiled:
    """torch.profiler between `start` and `stop`."""

    def start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self, steps: int) -> dict[str, Any]:
        """The `summary` of what ran since, in so many steps."""
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            trace = json.loads(file.read_text(encoding="utf-8", errors="replace"))
        return summary(trace["traceEvents"], steps)


# -- which lines wait


@contextmanager
def waits_by_line(device: torch.device) -> Iterator[Counter[str]]:
    """Counts what runs inside by `file:line: code`, of the innermost line of this repository: torch
    itself reports each synchronising call but those of events. Nothing on a CPU, where
    `tests/engine/test_device_waits.py` finds what would wait."""
    waits: Counter[str] = Counter()
    if device.type != "cuda":
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        previous = warnings.showwarning

        def note(message: Any, category: Any, *rest: Any, **more: Any) -> None:
            if "synchroniz" in str(message):
                waits[_here()] += 1
            else:
                previous(message, category, *rest, **more)

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _here() -> str:
    """The innermost line of this repository that is being run, else the innermost of all, and from
    where in a library."""
    frames = traceback.extract_stack(limit=80)[:-1]
    frames = [f for f in frames if f.filename not in (__file__, warnings.__file__)]
    own = [f for f in frames if f.filename.startswith(f"{ROOT}/")]
    own = [f for f in own if "site-packages" not in f.filename]
    frame, innermost = (own or frames)[-1], frames[-1]
    name = frame.filename.removeprefix(f"{ROOT}/")
    said = f"{name}:{frame.lineno}: {linecache.getline(frame.filename, frame.lineno or 0).strip()}"
    if innermost is frame:
        return said
    return f"{said} → {innermost.filename.split('site-packages/')[-1]}:{innermost.lineno}"
