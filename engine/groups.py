"""Kinds of process groups: of ranks that are connected when it is made, of the ends of a channel,
of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

# Of what groups move: a number, statistics, embeddings, a bucket of gradients.
WARM_UP_BYTES = (8, 32 << 10, 2 << 20, 25 << 20)
# of a kernel that waits for the other end of a channel; NCCL would give it 16 and more of the
# device's multiprocessors, which the passes need
CHANNEL_CTAS = 4
ALONE = "alone"  # the backend of `OneRank`


class OneRank(dist.ProcessGroup):
    """The group of a rank by itself, in which nothing moves and nothing is connected.

    NCCL makes a communicator of one rank, too, with its first operation, and that may take half a
    GiB of the device (NCCL#2363). DeepSpeed has such operations for the replicas of a stage,
    however many there are.
    """

    def __init__(self, store: dist.Store):
        super().__init__(store, 0, 1)

    def getBackendName(self) -> str:
        return ALONE

    def allreduce(self, *tensors: Any, **options: Any) -> dist.Work:
        return _Over()

    def broadcast(self, *tensors: Any, **options: Any) -> dist.Work:
        return _Over()

    def reduce(self, *tensors: Any, **options: Any) -> dist.Work:
        return _Over()


class _Over(dist.Work):
    """An operation that was over when it began."""

    def wait(self, timeout: Any = None) -> bool:
        return True


dist.Backend.register_backend(
    ALONE, lambda store, *_: OneRank(store), devices=[*dist.Backend.default_device_backend_map]
)


def warm_up(group: dist.ProcessGroup, device: torch.device, operations: Iterable[str]) -> None:
    """Run these collectives once, for NCCL small and large. All members call it together.

    gloo connects two ranks, and NCCL makes a communicator, with the first operation; NCCL connects
    it for an algorithm when it first chooses that, which it does by size. They do so here, and not
    in the middle of a step.
    """
    size, root = dist.get_world_size(group), dist.get_process_group_ranks(group)[0]
    sizes = WARM_UP_BYTES[:1] if dist.get_backend(group) == "gloo" else WARM_UP_BYTES
    for num_bytes, operation in itertools.product(sizes, operations):
        values = torch.zeros(num_bytes // 4, device=device)
        if operation == "all_reduce":
            dist.all_reduce(values, group=group)
        elif operation == "all_gather_into_tensor":
            part = values[: -(-len(values) // size)]
            dist.all_gather_into_tensor(part.new_empty(size * len(part)), part, group=group)
        elif operation == "broadcast":
            dist.broadcast(values, root, group=group)
        elif operation == "reduce":
            dist.reduce(values, root, group=group)


def channel_options() -> Any:
    """Of a group that only sends and receives; None where the backend is not NCCL."""
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = CHANNEL_CTAS
    return options
