"""How much memory a step takes, seen from two sides: tensors, byte by byte, and the process, as the
kernel counts it.

`TensorBytes` counts what torch's CPU allocator gives out. torch.profiler records every allocation
and release with its size (`[memory]` events); their running sum is what is held, and its largest
value after a mark is the peak. The recording begins before the model is built, so nothing has to be
added that was there before: also what only C++ holds is in the sum (the buckets of DDP, what
autograd saved), which a search through Python's objects would miss. Not seen: memory that is not a
tensor's (libraries' scratch space, gloo's buffers) and tensors made in threads other than the
caller's.

`ProcessGrowth` sees all of that, and also what the allocator keeps after it was given back: the
most the process has held in physical memory since, less what it held then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from itertools import accumulate
from pathlib import Path

from bench.common import resident_bytes

# the profiler's own log; read when torch is first imported, in the ranks
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
MARK = "memory_probe.mark"


class TensorBytes:
    """Record tensors' bytes in a `with` block; afterwards `peak_bytes` is the most held after the
    last `mark`, `marked_bytes` what was held at it.

    Recording slows the block down several times: measure time elsewhere.
    """

    def __enter__(self) -> TensorBytes:
        from torch.autograd.profiler import profile

        self.peak_bytes = self.marked_bytes = 0
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def mark(self) -> None:
        from torch.profiler import record_function

        with record_function(MARK):
            pass

    def __exit__(self, *failure) -> None:
        self._profile.__exit__(*failure)
        if failure[0] is None:
            events = self._profile.kineto_results.events()
            moments = [e.start_ns() for e in events if e.name() == MARK]
            changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
            self.marked_bytes, self.peak_bytes = peak_after(changes, max(moments, default=0))
        del self._profile


def peak_after(changes: list[tuple[int, int]], moment: int) -> tuple[int, int]:
    """(bytes held at `moment`, most bytes held from then on) of `changes` (time, bytes more or
    fewer), in order of time."""
    held = list(accumulate((nbytes for _, nbytes in changes), initial=0))
    before = sum(time < moment for time, _ in changes)
    return held[before], max(held[before:])


class ProcessGrowth:
    """Bytes of physical memory the process has taken at most since this object was made."""

    def __init__(self) -> None:
        _forget_peak()
        self._before = resident_bytes(field="VmRSS")

    def peak_bytes(self) -> int:
        return resident_bytes() - self._before

    def held_bytes(self) -> int:
        """Bytes it has now, after the allocator has given back what it keeps."""
        with contextlib.suppress(AttributeError):  # a C library that is not glibc has none
            ctypes.CDLL(None).malloc_trim(0)
        return resident_bytes(field="VmRSS") - self._before

    def mark(self) -> None:
        """The peak counts from here on."""
        self.held_bytes()
        _forget_peak()


def _forget_peak() -> None:
    """VmHWM begins again at VmRSS; where that is not allowed, an earlier peak may hide a lower
    one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
