"""Small values that ranks tell each other, as JSON.

torch's collectives of objects unpickle what arrives, which runs whatever code a message asks for.
JSON is data only. Tuples arrive as lists and keys as strings, on the sending rank too, so that all
ranks have the same. Floats arrive bit for bit, infinity and not-a-number included.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"


def from_first_rank(value: Json) -> Any:
    """The first rank's `value` on every rank."""
    first, wire = dist.get_rank() == 0, _wire(None)
    message = _encoded(value if first else None).to(wire)
    size = torch.tensor([message.numel()], device=wire)
    dist.broadcast(size, 0)
    message = message if first else message.new_empty(int(size))
    dist.broadcast(message, 0)
    return _decoded(message)


def from_all_ranks(value: Json, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a group (default: of the run), in order, on each of them."""
    message, sizes = _padded(value, group)
    parts = [torch.empty_like(message) for _ in sizes]
    dist.all_gather(parts, message, group=group)
    return [_decoded(part[:size]) for part, size in zip(parts, sizes)]


def to_first_rank(value: Json) -> list[Any] | None:
    """The values of all ranks, in order, on rank 0; None elsewhere, where nobody waits. All ranks
    call it together.

    Through the store: a gather of NCCL's would connect rank 0 with each other rank, in the middle
    of the run.
    """
    store, turn = _get_default_store(), next(_turns)
    keys = [f"told/{turn}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], json.dumps(value))
    if dist.get_rank() > 0:
        return None
    told = [json.loads(one) for one in store.multi_get(keys)]
    for key in keys:
        store.delete_key(key)
    return told


_turns = itertools.count()  # of `to_first_rank`, the same on every rank


def send_json(value: Json, peer: int, group: dist.ProcessGroup) -> None:
    message = _encoded(value).to(_wire(group))
    dist.send(torch.tensor([message.numel()], device=message.device), peer, group=group)
    dist.send(message, peer, group=group)


def receive_json(peer: int, group: dist.ProcessGroup) -> Any:
    size = torch.empty(1, dtype=torch.int64, device=_wire(group))
    dist.recv(size, peer, group=group)
    message = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.recv(message, peer, group=group)
    return _decoded(message)


def wait_for_all(group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank of a group (default: of the run) has come here.

    A barrier of torch's on a group that is bound to no device takes the GPU whose number is the
    rank's, modulo those that are visible: another one than this rank's wherever hosts have unequal
    numbers of GPUs or of ranks, and it then waits for ever (pytorch#124714).
    """
    arrived = torch.zeros(1, device=_wire(group))
    dist.all_reduce(arrived, group=group)
    arrived.item()  # which waits for the GPU, too


def _padded(value: Json, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """This rank's message, as long as the longest, and the lengths of all."""
    message = _encoded(value).to(_wire(group))
    own = torch.tensor([message.numel()], device=message.device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    lengths = [int(size) for size in sizes]
    padding = message.new_zeros(max(lengths) - message.numel())
    return torch.cat((message, padding)), lengths


def _wire(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group moves tensors from; None: the group of all ranks."""
    on_host = dist.get_backend(group) == "gloo"
    return torch.device("cpu" if on_host else get_accelerator().current_device_name())


def _encoded(value: Json) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(message: Tensor) -> Any:
    return json.loads(message.cpu().numpy().tobytes())
