"""An allocation that failed: what the error's text says of it, and what was held on the device.

The texts are those of torch's allocators (`c10/cuda/CUDACachingAllocator.cpp`,
`c10/core/impl/alloc_cpu.cpp`), of CUDA's libraries, of NCCL and of NumPy.
"""

from __future__ import annotations

import contextlib
import re
import resource
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

_UNITS = {
    unit: 1024**power
    for power, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"
# Not all of them come as torch.OutOfMemoryError: only torch's own allocator raises that.
_ON_A_GPU = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUDA ran out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure( \d+)? 'out of memory'"
)
_ON_THE_HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|std::bad_alloc"
)


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed. All numbers are bytes; None: not known.

    `own` is all that this process held of `total`, `others` what other processes held. Of a GPU,
    torch's allocator held `allocated` in tensors and `cached` besides. `can_expand`: torch suggests
    expandable segments, which are not in use. `limited`: `total` is the limit of this process's
    address space (`ulimit -v`), not what the machine has.
    """

    on_gpu: bool
    text: str = ""  # the first line of the error's own
    device: str = "the GPU"
    asked: float | None = None
    total: float | None = None
    free: float | None = None
    own: float | None = None
    others: float | None = None
    allocated: float | None = None
    cached: float | None = None
    can_expand: bool = False
    limited: bool | None = None

    @property
    def would_fit_alone(self) -> bool:
        """Would it have fitted without the other processes? False where that is not known."""
        if self.asked is None or self.own is None or self.total is None:
            return False
        return self.asked + self.own <= self.total


def shortage_of(error: BaseException) -> Shortage | None:
    """What `error` says, if it is an allocation that failed; None for any other error."""
    text = str(error)
    line = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _ON_A_GPU.search(text)
    ):
        return replace(_of_gpu(text), text=line)
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _ON_THE_HOST.search(text)
    ):
        asked = re.search(r"tried to allocate (\d+) bytes", text)
        of_numpy = _bytes_in(text, rf"Unable to allocate {_SIZE}")
        return Shortage(False, line, asked=float(asked[1]) if asked else of_numpy)
    return None


def with_what_is_held(shortage: Shortage, device: torch.device) -> Shortage:
    """Add what the text did not say, as far as `device` and the system tell. The text's own numbers
    are of the moment of the failure; by now, some tensors may be gone."""
    with contextlib.suppress(
        RuntimeError, ValueError, OSError, psutil.Error
    ):  # a message that knows less is better than another error
        found: dict[str, Any] = _held_on_gpu(device) if shortage.on_gpu else _held_on_host()
        return replace(
            shortage,
            **{name: value for name, value in found.items() if getattr(shortage, name) is None},
        )
    return shortage


def size_in_words(num_bytes: float) -> str:
    """Such as `20.00 GiB`."""
    unit = max((u for u in _UNITS if _UNITS[u] <= max(num_bytes, 1)), key=_UNITS.__getitem__)
    return f"{num_bytes / _UNITS[unit]:.{0 if unit == 'bytes' else 2}f} {unit}"


def _bytes(found: re.Match[str]) -> float:
    return float(found[1]) * _UNITS[found[2]]


def _bytes_in(text: str, *patterns: str) -> float | None:
    """As the first of the patterns that is in the text has it; None: there is none."""
    matches = (re.search(pattern, text) for pattern in patterns)
    return next((_bytes(found) for found in matches if found), None)


def _of_gpu(text: str) -> Shortage:
    number = re.search(r"GPU (\d+) has", text)
    total, free, this, allocated, cached = (
        _bytes_in(text, pattern)
        for pattern in (
            rf"total capac\w+ of {_SIZE}",  # "capacty" in some versions
            rf"of which {_SIZE} is free",
            rf"this process has {_SIZE} memory in use",
            rf"{_SIZE} is allocated by PyTorch",
            rf"{_SIZE} is reserved by PyTorch but unallocated",
        )
    )
    asked = _bytes_in(text, rf"Tried to allocate {_SIZE}", rf"Requested size: {_SIZE}")
    processes = sorted(
        _bytes(found) for found in re.finditer(rf"Process \d+ has {_SIZE} memory in use", text)
    )
    if this is None and allocated is not None:
        # In a container the numbers of processes are not those that the driver knows, and this
        # process is named like the others.
        this = next((each for each in processes if each >= allocated + (cached or 0.0)), None)
        if this is not None:
            processes.remove(this)
    return Shortage(
        True,
        device=f"GPU {number[1]}" if number else "the GPU",
        asked=asked,
        total=total,
        free=free,
        own=this,
        others=sum(processes) if this is not None else None,
        allocated=allocated,
        cached=cached,
        can_expand="try setting PYTORCH" in text and "expandable_segments:True" in text,
    )


def _held_on_gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"total": total, "free": free, "allocated": allocated, "cached": reserved - allocated}


def _held_on_host() -> dict[str, Any]:
    """Of the machine; or of the address space, where that is limited: it ends first."""
    used = psutil.Process().memory_info()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return {"total": limit, "free": max(0, limit - used.vms), "own": used.vms, "limited": True}
    machine = psutil.virtual_memory()
    return {"total": machine.total, "free": machine.available, "own": used.rss}
