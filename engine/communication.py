"""Everything ranks say to each other: named tensors along an edge, embeddings among last stages,
sums over groups.

Nothing outside `engine/` calls a collective, and inside it the pipeline's own traffic goes through
this module.

An edge carries a message per slice of a stage and micro-batch (`MessageKey`): the tensors in their
true dtypes, so that token ids and masks travel beside activations. Both ends know their names,
dtypes and shapes beforehand, because each stage announces all messages of a step, and their order,
to the next one before the first. Each direction of an edge has a process group of its own, so that a
receive never stands behind the other direction. The order of all operations: `engine/README.md`,
"Order of messages".

The last stages of a fork exchange their rows in two moves, both without padding to a common size
across branches:

    1. the replicas of one last stage gather their rows:       images 0, 1, 2  ->  each of them has all B rows
    2. for each pair the whole crosses over, both ways, one    texts t  ->  the images i with i mod n_text = t
       source per set of receivers:
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from engine.groups import ALONE, channel_options, warm_up
from engine.json_messages import Json, from_all_ranks, receive_json, send_json
from engine.objective import Objective, Pair
from engine.streams import SideStream
from engine.topology import StageGraph
from engine.trace import WAIT, HostClock, Recorder

# name, dtype, shape of each tensor of a message
Signature = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class MessageKey(NamedTuple):
    """Which message it is. `stage_slice`: which of a rank's slices of its branches; a rank has one,
    number 0. A micro-batch that runs forward twice is sent twice under the same key."""

    stage_slice: int
    micro_batch: int

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch} of slice {self.stage_slice}"


class Announcement(NamedTuple):
    """The messages of a step along an edge, as the stage above announces them: the signatures of
    its activations, and the keys of the activations that it sends and of the gradients that it
    receives, each in its order."""

    signatures: dict[MessageKey, Signature]
    activations: list[MessageKey]
    gradients: list[MessageKey]


# What both gloo and NCCL move. Masks travel as integers.
DTYPES = {
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
    """One direction between two ranks. `send` returns at once; `expect` makes ready for a message,
    `receive` waits for it.

    Both ends know the signature of a message and the order of the keys, so a message is its tensors
    and nothing else. Both ends make the channel at the same time.

    gloo's receives are posted by `expect`: they cost nothing but memory until their message comes.
    A receive of NCCL is a kernel that spins on the device until then, so that nothing which waits
    for the whole device returns meanwhile: the allocator where it frees memory, the first load of a
    module. It is posted by `receive`, when the passes in front of it have been issued, but runs
    beside them: the stream it runs in waits for what came before `expect` and no more.
    """

    # messages; a third waits until the first has left, so that a fast stage does not fill the
    # memory
    SENDS_IN_FLIGHT = 2

    def __init__(self, peer: int, group: dist.ProcessGroup, device: torch.device, sends: bool):
        self.peer, self.group, self.device = peer, group, device
        # gloo's messages lie in host memory: those of a GPU are staged there, in pinned memory
        self.wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._staged = self.wire != device
        self.posts_ahead = self.wire.type == "cpu"
        self._beside = SideStream(self.wire)
        self.sent_bytes = 0
        self._in_flight: deque[list[tuple[dist.Work, Tensor]]] = deque()
        self._expected: deque[_Expected] = deque()
        # NCCL makes the communicator of a pair with its first message, and both ends wait for each
        # other meanwhile: now, not in the middle of a step.
        (dist.send if sends else dist.recv)(torch.zeros(1, device=self.wire), peer, group=group)

    def send(self, key: MessageKey, tensors: Mapping[str, Tensor], known: Signature) -> None:
        """Send a message. Raises RuntimeError, before anything leaves, where it is not what the
        receiver expects."""
        signature = signature_of(tensors)
        if signature != known:
            raise RuntimeError(
                f"rank {self.peer} expects a message of {_in_words(known)} for {key}, but this "
                f"stage made {_in_words(signature)}; a layer must make tensors of the same shapes and dtypes "
                "as its template does on the meta device, and so must an outline of a micro-batch"
            )
        # all of them before the first one leaves: memory for a copy may have to be freed first,
        # which waits for the whole device, and a send waits there until the other end receives
        parts = [tensor.detach().contiguous() for tensor in tensors.values() if tensor.numel()]
        parts = [_on_host(part) for part in parts] if self._staged else parts
        message = []
        for part in parts:
            message.append((_started(dist.isend(part, self.peer, group=self.group)), part))
            self.sent_bytes += _bytes(part)
        self._in_flight.append(message)
        while len(self._in_flight) > self.SENDS_IN_FLIGHT:
            self._wait_for_oldest()

    def expect(self, key: MessageKey, known: Signature) -> None:
        """Make ready for the next message. Messages arrive in the order of these calls."""
        tensors = empty_tensors(known, self.wire, self._staged)
        works = self._post(tensors) if self.posts_ahead else []
        self._expected.append(_Expected(key, tensors, works, self._beside.here()))

    def _post(self, tensors: Mapping[str, Tensor]) -> list[dist.Work]:
        return [
            _started(dist.irecv(tensor, self.peer, group=self.group))
            for tensor in tensors.values()
            if tensor.numel()
        ]

    def receive(self, key: MessageKey) -> dict[str, Tensor]:
        """Wait for a message. Raises RuntimeError where it is not the first that was made ready
        for."""
        if not self._expected or self._expected[0].key != key:
            ready_for = ", then ".join(str(each.key) for each in self._expected) or "no message"
            raise RuntimeError(
                f"{key} is to be received from rank {self.peer}, but the channel is ready for "
                f"{ready_for}; messages are received in the order in which they were made ready for"
            )
        _, tensors, works, ready = self._expected.popleft()
        if not self.posts_ahead:
            with self._beside.after(ready):
                works = self._post(tensors)
        for work in works:
            work.wait()  # NCCL: the present stream waits, not the host; gloo: has arrived
        # torch keeps pinned memory for as long as a copy from it is under way
        return {
            name: tensor.to(self.device, non_blocking=self._staged)
            for name, tensor in tensors.items()
        }

    def drain(self) -> None:
        """Wait until every send has left; only then may their memory be reused."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._in_flight.popleft():
            work.wait()


class _Expected(NamedTuple):
    key: MessageKey
    tensors: dict[str, Tensor]
    works: list[dist.Work]  # of the receives that were posted
    ready: Any  # when the memory of the tensors is free, see `SideStream.here`


def _started(work: dist.Work | None) -> dist.Work:
    """What torch returns for a message. Raises RuntimeError for None: nothing moves then."""
    if work is None:
        raise RuntimeError("a message in a process group that this rank is not in")
    return work


def existing(channel: Channel | None) -> Channel:
    """The channel itself. Raises RuntimeError where the line of this stage ends and has none."""
    if channel is None:
        raise RuntimeError(
            "this stage is at the end of its line, beyond which its schedule sends or receives; "
            "check `previous` and `next` in the schedule's `steps`"
        )
    return channel


def signature_of(tensors: Mapping[str, Tensor]) -> Signature:
    """Names, dtypes and shapes of a message, in its order. Raises TypeError for a dtype that does
    not travel."""
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in DTYPES:
            raise TypeError(
                f"tensor {name!r} has dtype {tensor.dtype}, which does not travel between stages; "
                f"use one of {sorted(DTYPES)}"
            )
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def empty_tensors(
    signature: Signature, device: torch.device | str, pinned: bool = False
) -> dict[str, Tensor]:
    return {
        name: torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        for name, dtype, shape in signature
    }


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, complete: gloo reads it as soon as it is given."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    get_accelerator().current_stream().synchronize()
    return copy


def gradients_of(signature: Signature, objective: Objective, trained: Collection[str]) -> Signature:
    """What comes back for a message: its floating-point tensors of the branches that need gradients
    where it comes from."""
    return tuple(
        entry
        for entry in signature
        if entry[1].is_floating_point and objective.branch_of(entry[0]) in trained
    )


def _in_words(signature: Signature) -> str:
    return (
        ", ".join(
            f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"
            for name, dtype, shape in signature
        )
        or "nothing"
    )


class Communicator:
    """The groups and channels of one rank. Every rank makes its own, at the same time, from the
    same graph.

    `clock`: the recorder's.
    """

    def __init__(
        self,
        graph: StageGraph,
        objective: Objective,
        rank: int,
        device: torch.device,
        timeout: timedelta,
        clock: HostClock = time.perf_counter,
    ):
        self.graph, self.objective, self.rank, self.device = graph, objective, rank, device
        self.recorder = Recorder(device, clock)
        self._sent_bytes = 0.0
        self._timeout = timeout
        self.stage, self.replica = graph.stage_of(rank), graph.replica_of(rank)
        self._groups: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}
        self._stage_groups = {
            stage.stage_id: self._group(
                stage.ranks, "all_reduce", "all_gather_into_tensor", "broadcast"
            )
            for stage in graph.stages
        }
        self.stage_group = self._stage_groups[self.stage.stage_id]
        self._make_channels()
        self._crossings = self._make_crossings()
        self._joins = {
            pair.branches: self._make_join(*pair.branches)
            for pair in objective.terms
            if pair.matching
        }

    def _group(
        self, ranks: Sequence[int], *operations: str, backend: str | None = None
    ) -> dist.ProcessGroup:
        """A group for these collectives, which has had its first ones: that of the same ranks
        where there is one already. Each takes memory of the device, of its own."""
        key = tuple(sorted(ranks)), backend
        if key not in self._groups:
            self._groups[key] = self._new_group(ranks, backend)
        group = self._groups[key]
        if self.rank in ranks and len(ranks) > 1:
            warm_up(group, self._wire(group), operations)
        return group

    def _new_group(
        self, ranks: Sequence[int], backend: str | None = None, options: Any = None
    ) -> dist.ProcessGroup:
        backend = ALONE if backend is None and len(ranks) == 1 else backend
        # on a rank outside the group: torch's GroupMember.NON_GROUP_MEMBER, which is never used
        group: Any = dist.new_group(
            list(ranks), timeout=self._timeout, backend=backend, pg_options=options
        )
        return group

    def _make_channels(self) -> None:
        # with the stage before this one and with the next; None where there is none
        self.activations_in: Channel | None = None
        self.activations_out: Channel | None = None
        self.gradients_in: Channel | None = None
        self.gradients_out: Channel | None = None
        for source, target in self.graph.edges():
            options = channel_options()
            down, up = (self._new_group((source, target), options=options) for _ in range(2))
            # announcements are read on the host: no device synchronisation for them
            announcing = self._group((source, target), "all_reduce", backend="gloo")
            if self.rank == source:
                self.activations_out = Channel(target, down, self.device, sends=True)
                self.gradients_in = Channel(target, up, self.device, sends=False)
                self._announcing_out = announcing
            elif self.rank == target:
                self.activations_in = Channel(source, down, self.device, sends=False)
                self.gradients_out = Channel(source, up, self.device, sends=True)
                self._announcing_in = announcing

    def _make_crossings(self) -> dict[tuple[str, str], tuple[int, dist.ProcessGroup]]:
        """(from, to) of two branches -> (source rank, group) of the broadcast that brings, or
        takes, what the first one's last stage has. None where both end in one stage."""
        crossings = {}
        compared = [each.branches for each in self.objective.comparisons]
        links = [link for two in compared for link in (two, two[::-1])]
        for link in dict.fromkeys(links):
            sources, receivers = (self.graph.last_stage(branch).ranks for branch in link)
            if sources == receivers:
                continue
            for position, source in enumerate(sources):
                audience = [
                    rank for i, rank in enumerate(receivers) if i % len(sources) == position
                ]
                if audience:
                    group = self._group((source, *audience), "broadcast")
                    if self.rank == source or self.rank in audience:
                        crossings[link] = (source, group)
        return crossings

    def _make_join(self, first: str, second: str) -> dist.ProcessGroup:
        """All ranks where one of the two branches ends. One group for all sources: in a group for
        each, ranks would have more of them, the more replicas there are."""
        ends = {*self.graph.last_stage(first).ranks, *self.graph.last_stage(second).ranks}
        return self._group(sorted(ends), "broadcast", "reduce")

    def announce(self, announcement: Announcement) -> None:
        """Tell the next stage what all messages of a step will be, and in which order."""
        peer = existing(self.activations_out).peer
        signatures: list[Json] = [
            [key, [(name, str(dtype), shape) for name, dtype, shape in signature]]
            for key, signature in announcement.signatures.items()
        ]
        told: Json = [signatures, announcement.activations, announcement.gradients]
        send_json(told, peer, self._announcing_out)

    def announced(self) -> Announcement:
        """What the stage before announces."""
        signatures, *orders = receive_json(existing(self.activations_in).peer, self._announcing_in)
        activations, gradients = ([MessageKey(*key) for key in order] for order in orders)
        return Announcement(
            {
                MessageKey(*key): tuple(
                    (name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in told
                )
                for key, told in signatures
            },
            activations,
            gradients,
        )

    def drain(self) -> None:
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.drain()

    @property
    def sent_bytes(self) -> float:
        """Bytes this rank has sent so far: its messages, and its part of the collectives, counted
        as rings."""
        return self._sent_bytes + sum(
            c.sent_bytes for c in (self.activations_out, self.gradients_out) if c is not None
        )

    def _wire(self, group: dist.ProcessGroup | None) -> torch.device:
        """Where the group moves tensors from; None: the group of all ranks."""
        return torch.device("cpu") if dist.get_backend(group) == "gloo" else self.device

    def gather_replicas(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of all replicas of this stage, replica by replica. Shapes [rows[r], ...] ->
        [sum(rows), ...]. No gradient."""
        return self.without_padding(self.gather_padded(tensor, rows), rows)

    def gather_padded(self, tensor: Tensor, rows: Sequence[int], fill: int = 0) -> Tensor:
        """As `gather_replicas`, in the one tensor that they arrive in: behind the rows of each
        replica stands `fill`, so that each has as many as the one with most."""
        if self.stage.replicas == 1 or not max(rows):
            return tensor
        wire, shape = self._wire(self.stage_group), (max(rows), *tensor.shape[1:])
        part = tensor.to(wire).contiguous()
        if len(part) < max(rows):
            part = part.new_full(shape, fill)
            part[: len(tensor)] = tensor
        gathered = part.new_empty(len(rows) * max(rows), *shape[1:])
        with self.recorder.span(WAIT):
            dist.all_gather_into_tensor(gathered, part, group=self.stage_group)
        self._sent_bytes += _bytes(part) * (self.stage.replicas - 1)
        return gathered.to(self.device)

    def without_padding(self, gathered: Tensor, rows: Sequence[int]) -> Tensor:
        """[replicas · max(rows), ...] of `gather_padded` -> [sum(rows), ...]."""
        if len(gathered) == sum(rows):
            return gathered
        return torch.cat([own[:count] for own, count in zip(gathered.split(max(rows)), rows)])

    def from_replica(self, replica: int, tensor: Tensor) -> None:
        """All replicas of this stage get that one's `tensor`, in place and to the last bit."""
        if self.stage.replicas == 1 or not tensor.numel():
            return
        wired = tensor.detach().to(self._wire(self.stage_group)).contiguous()
        with self.recorder.span(WAIT):
            # as bytes: what dtypes a backend moves does not matter
            moved = wired.view(-1).view(torch.uint8)
            dist.broadcast(moved, self.stage.ranks[replica], group=self.stage_group)
        tensor.copy_(wired)

    def trade_with_replicas(
        self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]
    ) -> Tensor:
        """Parts of a flat tensor change hands among the replicas of this stage, which call it
        together: the first `sent[0]` elements go to replica 0, the next `sent[1]` to replica 1, and
        so on; returns the `got[r]` elements that come from each replica r, in their order, to the
        last bit."""
        wired = tensor.to(self._wire(self.stage_group)).contiguous()
        came = wired.new_empty(sum(got))
        size = tensor.element_size()
        with self.recorder.span(WAIT):
            # as bytes: what dtypes a backend moves does not matter
            dist.all_to_all_single(
                came.view(torch.uint8),
                wired.view(torch.uint8),
                [size * number for number in got],
                [size * number for number in sent],
                group=self.stage_group,
            )
        self._sent_bytes += size * (sum(sent) - sent[self.replica])
        return came.to(self.device)

    def gather_counts(self, count: int) -> list[int]:
        """How many rows each replica of this stage has."""
        return self.gather_replicas(
            torch.tensor([count], device=self.device), [1] * self.stage.replicas
        ).tolist()

    def make_last_stages_group(self) -> None:
        """Make the group of `gather_last_stages`. All ranks of the run call it together."""
        ranks = {rank for stage in self.graph.last_stages for rank in stage.ranks}
        self._last_ranks = sorted(ranks)
        self._last_stages_group = self._group(
            self._last_ranks, "all_gather_into_tensor", backend="gloo"
        )

    def gather_last_stages(self, value: Json) -> dict[int, Any]:
        """What every rank where a branch ends tells the others, by rank. It goes through host
        memory, so that no rank waits for its device."""
        if len(self._last_ranks) == 1:
            return {self.rank: value}
        with self.recorder.span(WAIT):
            return dict(zip(self._last_ranks, from_all_ranks(value, self._last_stages_group)))

    def cross(self, source_branch: str, target_branch: str, tensor: Tensor) -> Tensor:
        """Last stages of a fork: that of the first branch gives `tensor`; that of the second passes
        an empty one of its shape and gets the content."""
        # more sources than receivers: this source has no audience
        if (source_branch, target_branch) not in self._crossings or not tensor.numel():
            return tensor
        return self._broadcast(tensor, *self._crossings[source_branch, target_branch])

    def _broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        """From `source`; others pass an empty one of its shape and dtype and get the content."""
        wired = tensor.to(self._wire(group)).contiguous()
        with self.recorder.span(WAIT):
            dist.broadcast(wired, source, group=group)
        self._sent_bytes += (
            _bytes(wired) * (dist.get_world_size(group) - 1) if source == self.rank else 0
        )
        return wired.to(self.device)

    def from_first(self, pair: Pair, replica: int, tensor: Tensor) -> Tensor:
        """That replica where the first branch ends gives `tensor`; the others, and those of the
        second, pass an empty one of its shape and dtype and get the content."""
        group = self._joins[pair.branches]
        if dist.get_world_size(group) == 1 or not tensor.numel():
            return tensor
        return self._broadcast(tensor, self.graph.last_stage(pair.first).ranks[replica], group)

    def sum_to_first(self, pair: Pair, replica: int, tensor: Tensor) -> Tensor:
        """Sum over where the two branches end, for that replica of the first; what others get back
        is of no use."""
        group, target = self._joins[pair.branches], self.graph.last_stage(pair.first).ranks[replica]
        if dist.get_world_size(group) == 1 or not tensor.numel():
            return tensor
        wired = tensor.to(self._wire(group)).contiguous()
        with self.recorder.span(WAIT):
            dist.reduce(wired, target, group=group)
        self._sent_bytes += 0 if target == self.rank else _bytes(wired)
        return wired.to(self.device)

    def sum_over(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Sum over a group (default: all ranks)."""
        if dist.get_world_size(group) == 1:
            return tensor
        wired = tensor.to(self._wire(group))
        with self.recorder.span(WAIT):
            dist.all_reduce(wired, group=group)
        members = dist.get_world_size(group)
        # a ring: reduce-scatter, then all-gather
        self._sent_bytes += 2 * (members - 1) / members * _bytes(wired)
        return wired.to(self.device)

    def sum_parts(self, parts: Mapping[str, Tensor | Sequence[float]]) -> dict[str, list[float]]:
        """Several vectors, of the same lengths on all ranks, each summed over all ranks: one
        message, in float64."""
        lengths = {
            name: part.numel() if isinstance(part, Tensor) else len(part)
            for name, part in parts.items()
        }
        # one copy to the device for all numbers of the host
        of_host = [
            [0.0] * lengths[name] if isinstance(part, Tensor) else part
            for name, part in parts.items()
        ]
        numbers = list(itertools.chain.from_iterable(of_host))
        pinned = self.device.type != "cpu"  # then the host does not wait for the copy
        vector = torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned)
        vector = vector.to(self.device, non_blocking=True)
        for place, part in zip(vector.split(list(lengths.values())), parts.values()):
            if isinstance(part, Tensor):
                place.copy_(part.flatten())
        sums = iter(self.sum_over(vector).tolist())
        return {name: list(itertools.islice(sums, length)) for name, length in lengths.items()}

    def start_sum_over_replicas(self, tensor: Tensor) -> dist.Work:
        """Start to add `tensor` up over the replicas of this stage, in place. Every replica starts
        its sums in the same order."""
        return dist.all_reduce(tensor, group=self.stage_group, async_op=True)

    def average_over_replicas(self, tensors: Sequence[Tensor]) -> None:
        """Mean of each floating-point tensor over the replicas of this stage, in place, in one
        message."""
        if self.stage.replicas == 1 or not tensors:
            return
        flat = torch.cat([t.reshape(-1).float() for t in tensors])
        flat = self.sum_over(flat, self.stage_group) / self.stage.replicas
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(piece.view_as(tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
