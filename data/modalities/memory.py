"""Memory for the tensors of micro-batches. A loader's worker shares it with the process that asked,
and uses it again.

Fresh shared memory costs a page fault for every 4 KiB, on both sides: images come 1.4 times as fast
out of a cache when memory is used again. So a worker keeps its blocks. The last byte of a block is
a mark: USED from when the worker takes it until the last tensor on it is gone in the other process,
or until the next micro-batch where no tensor on it was sent. There are as many blocks as are ever
in use at once. They have no name in the file system, so nothing is left behind when a process is
killed.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

FREE, USED = 0, 1
MARK_BYTES = 64  # one would do; so tensors begin and end at cache lines
SMALL_BYTES = 64 << 10  # a smaller tensor is copied into the message, which is faster


class _Blocks:
    """A worker's blocks by number, each uint8 and shared: the values, then MARK_BYTES."""

    def __init__(self) -> None:
        self.all: dict[int, Tensor] = {}
        self.known: set[int] = set()  # to the other process
        self.lent: list[int] = []  # to the micro-batch that is being made, and not sent yet
        self.retired: list[int] = []  # which the other process still holds
        self.next_number = 0

    def take(self, num_bytes: int) -> Tensor:
        size = MARK_BYTES * (math.ceil(num_bytes / MARK_BYTES) + 1)
        free = [number for number, block in self.all.items() if block[-1] == FREE]
        fitting = [number for number in free if len(self.all[number]) >= size]
        if fitting:
            number = min(fitting, key=lambda number: len(self.all[number]))
        else:
            for too_small in free:  # instead of keeping every size there ever was
                del self.all[too_small]
            self.retired += free
            number, self.next_number = self.next_number, self.next_number + 1
            self.all[number] = torch.empty(size, dtype=torch.uint8).share_memory_()
        block = self.all[number]
        block[-1] = USED
        self.lent.append(number)
        return block[:num_bytes]

    def send(self, tensor: Tensor) -> tuple[int, int] | None:
        """The block that a tensor lies on, which leaves with it, and where; None: it is not on one,
        or that left with another tensor."""
        for number in self.lent:
            offset = tensor.data_ptr() - self.all[number].data_ptr()
            if 0 <= offset < len(self.all[number]):
                self.lent.remove(number)
                return number, offset
        return None


_blocks: _Blocks | None = None  # of this process, if it is a worker
# (process, number) -> the block of a worker that was received before
_received: dict[tuple[int, int], np.ndarray] = {}


def share_from_now_on() -> None:
    """Make `empty` return shared memory, in a worker."""
    global _blocks
    _blocks = _Blocks()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like `torch.empty`; in a worker, memory that reaches the other process without a copy. It is
    for the micro-batch that is being made, and no other."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if _blocks is None or num_bytes < SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    return _blocks.take(num_bytes).view(dtype).view(shape)


def reclaim() -> None:
    """Begin another micro-batch: use the memory again that was made for the one before, and not
    sent, as where a tensor was calculated further, or its shape alone was asked for."""
    if _blocks is not None:
        for number in _blocks.lent:
            _blocks.all[number][-1] = FREE
        _blocks.lent.clear()


def sendable(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Replace tensors by what a worker puts into its message; elsewhere return them as they are."""
    if _blocks is None:
        return dict(tensors)
    return {name: _Sent(tensor, _blocks) for name, tensor in tensors.items()}


def forget(processes: Collection[int]) -> None:
    """Let go of the blocks of workers that have ended. Those that tensors still lie on stay until
    these are gone."""
    for key in [key for key in _received if key[0] in processes]:
        del _received[key]


class _Sent:
    """A tensor on its way: on a block, else by its values. Torch's own way would open a connection
    to the worker for each tensor."""

    def __init__(self, tensor: Tensor, blocks: _Blocks) -> None:
        self.tensor, self.blocks = tensor, blocks
        self.place = blocks.send(tensor)
        self.retired: list[int] = []
        if self.place is not None:
            self.retired, blocks.retired = blocks.retired, []

    def __reduce__(self) -> tuple[Any, ...]:
        if self.place is None:
            return torch.from_numpy, (self.tensor.numpy(),)
        number, offset = self.place
        new = None if number in self.blocks.known else self.blocks.all[number]
        self.blocks.known.add(number)
        form = self.tensor.dtype, self.tensor.shape, self.tensor.stride()
        return _receive, (os.getpid(), self.retired, number, new, offset, *form)


def _receive(
    process: int,
    retired: list[int],
    number: int,
    new: Tensor | None,
    offset: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    for gone in retired:  # no tensor lies on them any more, here either
        _received.pop((process, gone), None)
    if new is not None:
        _received[process, number] = new.numpy()
    block = _received[process, number]
    values = block[offset:-MARK_BYTES]
    # The storage of the tensor below, and with it every view of it, keeps this very array alive.
    weakref.finalize(values, block.__setitem__, -1, FREE).atexit = False
    return torch.from_numpy(values).view(dtype).as_strided(shape, stride)
