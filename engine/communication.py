"""Everything ranks say to each other: named tensors along an edge, embeddings among tails, sums over groups.

Nothing outside `engine/` calls a collective, and inside it the pipeline's own traffic goes through this module.

An edge carries a message per micro-batch: a header of fixed size (names, dtypes, shapes) and then the tensors in their
true dtypes, so that token ids and masks travel beside activations and shapes may differ from message to message. Each
direction of an edge has a process group of its own, so that a blocking receive never stands behind the other direction.

The tails of a fork meet in two moves, both without padding to a common size across branches:

    1. the replicas of one tail gather their rows:            image tail 0, 1, 2  ->  every image tail has all B rows
    2. the whole crosses over, one source per receiver set:   text tail t broadcasts to the image tails i with i mod n_text = t
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.topology import BRANCHES, StageGraph

HEADER_BYTES = 1024
# What both gloo and NCCL move. Masks travel as integers.
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    )
}


class Channel:
    """One direction between two ranks. `send` returns at once and keeps its tensors until `drain`; `receive` waits."""

    def __init__(self, peer: int, group: dist.ProcessGroup, header_group: dist.ProcessGroup, device: torch.device):
        self.peer, self.group, self.header_group, self.device = peer, group, header_group, device
        # gloo moves host memory only; with it, tensors of a GPU are staged through the host.
        self.wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._in_flight: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        self._post(pack_header(tensors), self.header_group)
        for tensor in tensors.values():
            if tensor.numel():
                self._post(tensor.detach().to(self.wire).contiguous(), self.group)

    def receive(self) -> dict[str, Tensor]:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.recv(header, self.peer, group=self.header_group)
        tensors = {}
        for name, (dtype, shape) in unpack_header(header).items():
            tensor = torch.empty(shape, dtype=dtype, device=self.wire)
            if tensor.numel():
                dist.recv(tensor, self.peer, group=self.group)
            tensors[name] = tensor.to(self.device)
        return tensors

    def drain(self) -> None:
        """Wait until every send has left; only then may their memory be reused."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def _post(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self._in_flight.append((dist.isend(tensor, self.peer, group=group), tensor))


def pack_header(tensors: Mapping[str, Tensor]) -> Tensor:
    """Names, dtypes and shapes as uint8 [HEADER_BYTES], zero-padded JSON."""
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in _DTYPES:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which does not travel between stages; use one of {sorted(_DTYPES)}")
    text = json.dumps([[name, str(t.dtype), list(t.shape)] for name, t in tensors.items()], separators=(",", ":")).encode()
    if len(text) > HEADER_BYTES:
        raise ValueError(
            f"a message of {len(tensors)} tensors needs a header of {len(text)} bytes; at most {HEADER_BYTES} fit: send fewer tensors"
        )
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return header


def unpack_header(header: Tensor) -> dict[str, tuple[torch.dtype, list[int]]]:
    text = bytes(header.tolist()).rstrip(b"\0").decode()
    return {name: (_DTYPES[dtype], shape) for name, dtype, shape in json.loads(text)}


class Communicator:
    """The groups and channels of one rank. Every rank makes its own, at the same time, from the same graph.

    `groups_of` names further groups of ranks (the clipping groups); a rank outside a group never calls on it.
    """

    def __init__(self, graph: StageGraph, rank: int, device: torch.device, timeout: timedelta, groups_of: Mapping[str, Sequence[int]]):
        self.graph, self.rank, self.device = graph, rank, device
        self._timeout = timeout
        self.stage, self.replica = graph.stage_of(rank), graph.replica_of(rank)
        self._stage_groups = {stage.stage_id: self._group(stage.ranks) for stage in graph.stages}
        self.stage_group = self._stage_groups[self.stage.stage_id]
        self.group_members = {name: tuple(ranks) for name, ranks in groups_of.items()}
        self.named_groups = {name: self._group(ranks) for name, ranks in groups_of.items()}
        self._make_channels()
        self._crossings = self._make_crossings() if graph.layout == "fork" else {}

    def _group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        return dist.new_group(list(ranks), timeout=self._timeout, backend=backend)

    def _make_channels(self) -> None:
        self.activations_in = self.activations_out = self.gradients_in = self.gradients_out = None
        host_headers = dist.get_backend() != "gloo"  # a header is read on the host: no device synchronisation for it
        for source, target in self.graph.edges():
            for downstream in (True, False):
                group = self._group((source, target))
                header_group = self._group((source, target), backend="gloo") if host_headers else group
                if self.rank == source:
                    channel = Channel(target, group, header_group, self.device)
                    self.activations_out, self.gradients_in = (
                        (channel, self.gradients_in) if downstream else (self.activations_out, channel)
                    )
                elif self.rank == target:
                    channel = Channel(source, group, header_group, self.device)
                    self.activations_in, self.gradients_out = (
                        (channel, self.gradients_out) if downstream else (self.activations_in, channel)
                    )

    def _make_crossings(self) -> dict[str, tuple[int, dist.ProcessGroup]]:
        """branch -> (source rank, group) of the broadcast that brings, or takes, what that branch's tails have."""
        crossings = {}
        for branch, other in (BRANCHES, BRANCHES[::-1]):
            sources, receivers = self.graph.tail(branch).ranks, self.graph.tail(other).ranks
            for position, source in enumerate(sources):
                audience = [rank for i, rank in enumerate(receivers) if i % len(sources) == position]
                if audience:
                    group = self._group((source, *audience))
                    if self.rank == source or self.rank in audience:
                        crossings[branch] = (source, group)
        return crossings

    def drain(self) -> None:
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.drain()

    def _wire(self, group: dist.ProcessGroup) -> torch.device:
        return torch.device("cpu") if dist.get_backend(group) == "gloo" else self.device

    def gather_replicas(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of all replicas of this stage, replica by replica. Shapes [rows[r], ...] -> [sum(rows), ...]. No gradient."""
        if self.stage.replicas == 1:
            return tensor
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]), device=self._wire(self.stage_group))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(gathered, padded, group=self.stage_group)
        return torch.cat([block[:count] for block, count in zip(gathered, rows)]).to(self.device)

    def gather_counts(self, count: int) -> list[int]:
        """How many rows each replica of this stage has."""
        return self.gather_replicas(torch.tensor([count], device=self.device), [1] * self.stage.replicas).tolist()

    def cross(self, branch: str, tensor: Tensor) -> Tensor:
        """Tails of a fork: the tails of `branch` give `tensor`; the others pass an empty one of its shape and get the content."""
        if branch not in self._crossings:  # more sources than receivers: this source has no audience
            return tensor
        source, group = self._crossings[branch]
        wired = tensor.to(self._wire(group)).contiguous()
        dist.broadcast(wired, source, group=group)
        return wired.to(self.device)

    def sum_over(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Sum over a group (default: all ranks)."""
        wired = tensor.to(self._wire(group if group is not None else dist.group.WORLD))
        dist.all_reduce(wired, group=group)
        return wired.to(self.device)

    def average_over_replicas(self, tensors: Sequence[Tensor]) -> None:
        """Mean of each floating-point tensor over the replicas of this stage, in place, in one message."""
        if self.stage.replicas == 1 or not tensors:
            return
        flat = torch.cat([t.reshape(-1).float() for t in tensors])
        flat = self.sum_over(flat, self.stage_group) / self.stage.replicas
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(piece.view_as(tensor))
