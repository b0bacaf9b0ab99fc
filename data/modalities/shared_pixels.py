"""Pixels on their way from a loader's worker to the process that asked, in shared memory that is
used again and again.

Fresh shared memory costs a page fault for every 4 KiB, on both sides. So a worker keeps its blocks. A block carries a mark: 1 from when the
worker fills it until the last tensor on it, wherever it went, is gone in the other process; then
the worker may fill it again. There are as many blocks as are ever in use at once.

The mark is the last byte of the block. Blocks have no name in the file system, so nothing is left
behind when a process is killed.
"""

import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MARK_BYTES = 64
FREE, USED = 0, 1

Token = tuple[str, int, int]  # loader, process id of the worker, number of the block
_RECEIVED: dict[Token, Tensor] = {}  # in the process that asked: blocks that it has already seen


@dataclass
class Block:
    """`memory`: uint8, shared: pixels, then MARK_BYTES."""

    number: int
    memory: Tensor
    is_known: bool = False  # has been sent to the other process

    @property
    def mark(self) -> Tensor:
        return self.memory[-1]

    @property
    def capacity(self) -> int:
        return len(self.memory) - MARK_BYTES


@dataclass
class Blocks:
    """A worker's side."""

    loader: str
    blocks: list[Block] = field(default_factory=list)
    number: int = 0
    retired: list[Token] = field(default_factory=list)

    def take(self, num_bytes: int) -> "SharedPixels":
        """Memory for so many bytes, marked as used."""
        free = [block for block in self.blocks if block.mark.item() == FREE]
        fitting = [block for block in free if block.capacity >= num_bytes]
        if fitting:
            block = min(fitting, key=lambda block: block.capacity)
        else:
            for small in free:  # instead of keeping every size there ever was
                self.blocks.remove(small)
                self.retired.append((self.loader, os.getpid(), small.number))
            block = Block(
                self.number, torch.empty(num_bytes + MARK_BYTES, dtype=torch.uint8).share_memory_()
            )
            self.blocks.append(block)
            self.number += 1
        block.memory[-1] = USED
        return SharedPixels(self, block, num_bytes)


@dataclass
class SharedPixels:
    """Goes to another process as a tensor of the shape that `shape` was set to."""

    owner: Blocks
    block: Block
    num_bytes: int
    shape: tuple[int, int, int] = (0, 0, 0)  # b, H, W

    @property
    def out(self) -> Tensor:
        """Flat: where the values go."""
        return self.block.memory[: self.num_bytes]

    def __reduce__(self) -> tuple[Any, ...]:
        memory = None if self.block.is_known else self.block.memory
        retired, self.owner.retired = tuple(self.owner.retired), []
        self.block.is_known = True
        return _receive, (
            (self.owner.loader, os.getpid(), self.block.number),
            memory,
            self.num_bytes,
            self.shape,
            retired,
        )


def _receive(
    token: Token,
    memory: Tensor | None,
    num_bytes: int,
    shape: tuple[int, int, int],
    retired: tuple[Token, ...],
) -> Tensor:
    """uint8 [b, 3, H, W], channels-last, on the block itself."""
    for old in retired:
        _RECEIVED.pop(old, None)
    if memory is None:
        memory = _RECEIVED[token]
    else:
        _RECEIVED[token] = memory
    block = memory.numpy()
    values = block[:num_bytes]
    # The storage of the tensor below, and with it every view of it, keeps this very array alive.
    weakref.finalize(values, block.__setitem__, -1, FREE).atexit = False
    return torch.from_numpy(values).view(*shape, 3).permute(0, 3, 1, 2)


def forget(loader: str) -> None:
    """The blocks of a loader that has ended; what tensors still lie on stays until they are
    gone."""
    for token in [token for token in _RECEIVED if token[0] == loader]:
        _RECEIVED.pop(token, None)
