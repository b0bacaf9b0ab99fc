"""Memory for the tensors of micro-batches. A loader's worker shares it with the process that asked,
and uses it again.

Fresh shared memory costs a page fault for every 4 KiB, on both sides: images come 1.4 times as fast
out of a cache when memory is used again. So a worker keeps its blocks. The last byte of a block is
a mark: USED from when the worker takes it until the last tensor on it is gone in the other process.
There are as many blocks as are ever in use at once. They have no name in the file system, so
nothing is left behind when a process is killed.
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
        self.lent: dict[int, int] = {}  # address of a tensor that is not sent yet -> its block
        self.next_number = 0

    def take(self, num_bytes: int) -> Tensor:
        free = [number for number, block in self.all.items() if block[-1] == FREE]
        fitting = [number for number in free if len(self.all[number]) >= num_bytes + MARK_BYTES]
        if fitting:
            number = min(fitting, key=lambda number: len(self.all[number]))
        else:
            for too_small in free:  # instead of keeping every size there ever was
                del self.all[too_small]
            number, self.next_number = self.next_number, self.next_number + 1
            self.all[number] = torch.empty(
                num_bytes + MARK_BYTES, dtype=torch.uint8
            ).share_memory_()
        block = self.all[number]
        block[-1] = USED
        self.lent[block.data_ptr()] = number
        return block[:num_bytes]


_blocks: _Blocks | None = None  # of this process, if it is a worker
# (process, number) -> the block of a worker that was received before
_received: dict[tuple[int, int], np.ndarray] = {}


def share_from_now_on() -> None:
    """Make `empty` return shared memory, in a worker."""
    global _blocks
    _blocks = _Blocks()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like `torch.empty`; in a worker, memory that reaches the other process without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if _blocks is None or num_bytes < SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    return _blocks.take(num_bytes).view(dtype).view(shape)


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
        self.number = blocks.lent.pop(tensor.data_ptr(), None)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.number is None:
            return torch.from_numpy, (self.tensor.numpy(),)
        new = None if self.number in self.blocks.known else self.blocks.all[self.number]
        self.blocks.known.add(self.number)
        where = (os.getpid(), self.number)
        return _receive, (where, new, self.tensor.dtype, self.tensor.shape, self.tensor.stride())


def _receive(
    where: tuple[int, int],
    new: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    if new is not None:
        _received[where] = new.numpy()
    block = _received[where]
    values = block[: math.prod(shape) * dtype.itemsize]
    # The storage of the tensor below, and with it every view of it, keeps this very array alive.
    weakref.finalize(values, block.__setitem__, -1, FREE).atexit = False
    return torch.from_numpy(values).view(dtype).as_strided(shape, stride)
