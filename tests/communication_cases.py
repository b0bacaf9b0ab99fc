"""What each rank does in the communication tests; a module of its own, because ranks import it by
name."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cost_models import BRANCHES
from deepspeed.runtime.pipe.module import PipelineModule
from split_training import Case, make_engine, micro_batches_of_rank
from torch.distributed.distributed_c10d import _get_default_store
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from engine import groups
from engine.communication import (
    DTYPES,
    Announcement,
    Channel,
    Communicator,
    MessageKey,
    signature_of,
)
from engine.groups import ALONE, warm_up
from engine.json_messages import (
    from_all_ranks,
    from_first_rank,
    receive_json,
    send_json,
    to_first_rank,
)
from engine.objective import Branch, Objective, Pair
from engine.schedule import (
    ComputeLoss,
    OptimizerStep,
    PipeInstruction,
    ReduceGrads,
    StageSchedule,
)
from engine.topology import StageGraph, fork, merged
from models.losses import InfoNCE

TIMEOUT = timedelta(seconds=120)
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "broadcast", "reduce")
OBJECTIVE = Objective(tuple(map(Branch, BRANCHES)), (Pair(*BRANCHES, InfoNCE()),))


def communicator(graph: StageGraph) -> Communicator:
    return Communicator(graph, OBJECTIVE, dist.get_rank(), torch.device("cpu"), TIMEOUT)


def key(micro_batch: int) -> MessageKey:
    return MessageKey(stage_slice=0, micro_batch=micro_batch)


def message(number: int, replica: int) -> dict[str, torch.Tensor]:
    """Every dtype; shapes, number of tensors and even the rank of a tensor change from message to
    message."""
    generator = torch.Generator().manual_seed(1000 * replica + number)
    shapes = [(number + 1, 3), (2, number + 1, 2), (5,), (), (0,), (number % 2, 4), (3, 0)]
    tensors = {}
    for i, dtype in enumerate(DTYPES.values()):
        shape = shapes[(i + number) % len(shapes)]
        tensors[f"tensor {i}"] = torch.randint(0, 100, shape, generator=generator).to(dtype)
    tensors["turned"] = torch.randn(4, 3 + number, generator=generator).T  # not contiguous
    return dict(list(tensors.items())[: 10 - number % 3])


def equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(expected) and all(
        got[name].dtype == tensor.dtype
        and got[name].shape == tensor.shape
        and got[name].equal(tensor)
        for name, tensor in expected.items()
    )


def call(function: Callable[[], object]) -> object:
    return function()


def line_of_two(replicas: int) -> StageGraph:
    return merged({branch: [range(0, 1), range(1, 2)] for branch in BRANCHES}, replicas)


def both_directions_at_once(number: int) -> bool:
    """Two stages × 2 replicas: each end sends as much as may be on its way, then receives;
    no send waits for a receive."""
    comm = communicator(line_of_two(2))
    upstream = comm.stage.next is not None
    out, back = (
        (comm.activations_out, comm.gradients_in)
        if upstream
        else (comm.gradients_out, comm.activations_in)
    )
    mine, theirs = (0, 500) if upstream else (500, 0)
    received = []
    for start in range(0, number, Channel.SENDS_IN_FLIGHT):
        batch = range(start, min(start + Channel.SENDS_IN_FLIGHT, number))
        for m in batch:
            sent = message(mine + m, comm.replica)
            out.send(key(m), sent, signature_of(sent))
        for m in batch:
            back.expect(key(m), signature_of(message(theirs + m, comm.replica)))
            received.append(back.receive(key(m)))
    comm.drain()
    channels = {comm.activations_in, comm.activations_out, comm.gradients_in, comm.gradients_out}
    nothing_else = channels == {out, back, None}
    return nothing_else and all(
        equal(got, message(theirs + m, comm.replica)) for m, got in enumerate(received)
    )


def announced_messages() -> list[list[str]]:
    """A step's announcement, then its messages; one has no tensors at all."""
    comm = communicator(line_of_two(1))
    sent = [{"a": torch.ones(2)}, {}, {"b": torch.zeros(0, 7)}]
    keys = [key(1), key(0), MessageKey(stage_slice=1, micro_batch=0)]
    announcement = Announcement(
        {each: signature_of(tensors) for each, tensors in zip(keys, sent)}, keys, keys[1:]
    )
    if comm.activations_out is not None:
        comm.announce(announcement)
        for each, tensors in zip(keys, sent):
            comm.activations_out.send(each, tensors, signature_of(tensors))
        comm.drain()
        return []
    assert comm.announced() == announcement
    for each, signature in announcement.signatures.items():
        comm.activations_in.expect(each, signature)
    came = [comm.activations_in.receive(each) for each in keys]
    return [[f"{name} {list(tensor.shape)}" for name, tensor in one.items()] for one in came]


def messages_in_order() -> list[str]:
    """What is said to a receiver that asks for the second of two messages of the same shapes
    first, and for a third; then what it got."""
    comm = communicator(line_of_two(1))
    sent = [{"a": torch.full((2,), float(m))} for m in range(2)]
    if comm.activations_out is not None:
        for m, tensors in enumerate(sent):
            comm.activations_out.send(key(m), tensors, signature_of(tensors))
        comm.drain()
        return []
    channel, said = comm.activations_in, []

    def refused(m: int) -> None:
        with pytest.raises(RuntimeError) as error:
            channel.receive(key(m))
        said.append(str(error.value))

    for m, tensors in enumerate(sent):
        channel.expect(key(m), signature_of(tensors))
    refused(1)
    said += [str(channel.receive(key(m))["a"].tolist()) for m in range(2)]
    refused(2)
    return said


def stages_in_unlike_orders(case: Case, turned: str) -> None:
    """The first stage runs its "forwards" or its "backwards" from the last micro-batch to the
    first, the second stage all of them the other way. RuntimeError on the second."""

    class Unlike(StageSchedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            def order(passes: str) -> range:
                numbers, above = range(self.micro_batches), self.own_stage.previous is None
                return numbers[::-1] if above and passes == turned else numbers

            for m in order("forwards"):
                yield self.forward(m)
            if self.own_stage.is_last:
                yield [ComputeLoss()]
            for m in order("backwards"):
                yield self.backward(m)
            yield [ReduceGrads(), OptimizerStep()]

    engine, _, image_size = make_engine(case)
    engine.schedule_type = Unlike
    engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))


def refused_message() -> str:
    """What the sender says of a message that is not what was announced; the one that was arrives
    after it."""
    comm = communicator(line_of_two(1))
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int64)}
    if comm.activations_in is not None:
        comm.activations_in.expect(key(3), signature_of(tensors))
        return str(equal(comm.activations_in.receive(key(3)), tensors))
    try:
        comm.activations_out.send(key(3), tensors | {"a": torch.zeros(2, 4)}, signature_of(tensors))
    except RuntimeError as error:
        comm.activations_out.send(key(3), tensors, signature_of(tensors))
        comm.drain()
        return str(error)
    return "nothing"


class Names(TorchDispatchMode):
    """Of the operations, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.found.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def copies_before_sends() -> list[str]:
    """What the sender of a message of three tensors does, of which two lie as they cannot be
    sent."""
    comm = communicator(line_of_two(1))
    turned = torch.arange(6.0).view(2, 3).T
    tensors = {"a": turned, "b": torch.ones(2), "c": turned + 1}
    if comm.activations_in is not None:
        comm.activations_in.expect(key(0), signature_of(tensors))
        assert equal(comm.activations_in.receive(key(0)), tensors)
        return []
    with Names() as names:
        comm.activations_out.send(key(0), tensors, signature_of(tensors))
    comm.drain()
    return [name for name in names.found if name in ("clone", "send")]


def sends_in_flight() -> list[int]:
    """Rank 0: how many of its messages are under way behind each of five sends."""
    first = dist.get_rank() == 0
    channel = Channel(int(first), dist.group.WORLD, torch.device("cpu"), sends=first)
    tensors = {"a": torch.ones(3)}
    known, found = signature_of(tensors), []
    for m in range(5):
        if first:
            channel.send(key(m), tensors, known)
            found.append(len(channel._in_flight))
        else:
            channel.expect(key(m), known)
            channel.receive(key(m))
    channel.drain()
    return found


def posted_receives_overlap() -> bool:
    """The receiver posts, and is busy until the message has left the sender: else both wait for
    each other. Is it the message?"""
    comm = communicator(line_of_two(1))
    tensors = {"a": torch.arange(1_000_000.0)}
    if comm.activations_out is not None:
        comm.activations_out.send(key(0), tensors, signature_of(tensors))
        comm.drain()
        dist.barrier()
        return True
    comm.activations_in.expect(key(0), signature_of(tensors))
    dist.barrier()
    return equal(comm.activations_in.receive(key(0)), tensors)


def steps_of_one_engine(case: Case, outlined: bool, steps: int) -> dict[str, list]:
    """On each rank, step by step: the loss, what went to the next stage in bytes, and in how many
    bytes of tensors; and for every load how many instructions came before it."""
    engine, _, image_size = make_engine(case)
    found: dict[str, list] = {"losses": [], "sent": [], "tensors": [], "loads": []}

    def loading(micro_batches: list[dict[str, torch.Tensor]], before: int):
        if outlined:
            yield [{n: t.to("meta") for n, t in tensors.items()} for tensors in micro_batches]
        for tensors in micro_batches:
            found["loads"].append(engine.instructions_done - before)
            yield tensors

    out, before = engine.comm.activations_out, 0
    for step in range(steps):
        mine = micro_batches_of_rank(case, engine, step, image_size)
        batches = mine and loading(list(mine), engine.instructions_done)
        found["losses"].append(engine.train_batch(batches).loss)
        if out is not None:
            found["sent"].append(out.sent_bytes - before)
            before = out.sent_bytes
            found["tensors"].append(
                sum(
                    torch.Size(shape).numel() * dtype.itemsize
                    for signature in engine.runner._sent.values()
                    for _, dtype, shape in signature
                )
            )
    return found


def a_weight_that_does_not_fit(case: Case, weight: torch.Tensor) -> None:
    """The first sample's. ValueError on the ranks that load it."""
    engine, _, image_size = make_engine(case)

    def changed(micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights = micro_batch["image_weight"].to(weight.dtype)
        weights[0] = weight
        return micro_batch | {"image_weight": weights}

    engine.train_batch(map(changed, micro_batches_of_rank(case, engine, 0, image_size)))


def a_layer_that_breaks_its_word(case: Case, layer: str, tensor: str) -> None:
    """It makes this tensor narrower than its template does. On its rank: RuntimeError."""

    def build_layer(spec):
        built = spec.build(case.seed)
        if spec.name == layer:
            built.register_forward_hook(
                lambda _, __, made: {
                    name: own[:, :-1] if name == tensor else own for name, own in made.items()
                }
            )
        return built

    engine, _, image_size = make_engine(case, build_layer)
    engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))


def gathering_and_crossing(replicas: dict[str, int], rows: dict[str, list[int]]) -> dict:
    """A fork of one stage per branch: replicas gather their rows, then the wholes cross over."""
    comm = communicator(fork({branch: [range(0, 1)] for branch in BRANCHES}, replicas))
    (branch,) = comm.stage.layers
    counts = comm.gather_counts(rows[branch][comm.replica])
    first = sum(rows[branch][: comm.replica])
    own = torch.arange(first, first + rows[branch][comm.replica])[:, None] * torch.tensor(
        [1, 10]
    ) + (1000 if branch == "text" else 0)
    whole = comm.gather_replicas(own, counts)
    crossed = {
        source: comm.cross(source, target, whole if source == branch else torch.empty_like(whole))
        for pair in OBJECTIVE.terms
        for source, target in (pair.branches, pair.branches[::-1])
    }
    buffers = [
        torch.full((2,), float(comm.replica)),
        torch.tensor(10.0 * comm.replica, dtype=torch.float64),
    ]
    comm.average_over_replicas(buffers)
    return {
        "branch": branch,
        "counts": counts,
        "whole": whole.tolist(),
        "crossed": {b: tensor.tolist() for b, tensor in crossed.items()},
        "sum": comm.sum_over(torch.ones(1)).item(),
        "averages": [buffer.tolist() for buffer in buffers],
        "dtypes": [str(buffer.dtype) for buffer in buffers],
    }


def tell(values: object) -> dict[str, object]:
    """What arrives on this rank of three, in every way in which ranks tell each other small
    values."""
    rank = dist.get_rank()
    told = {
        "first": from_first_rank(values if rank == 0 else "of no use"),
        "all": from_all_ranks([rank, "x" * 1000 * rank]),
        "to first": [_without_collectives({"rank": (rank, None)}) for _ in range(2)][1],
    }
    if rank == 0:
        send_json(values, 1, dist.group.WORLD)
    elif rank == 1:
        told["sent"] = receive_json(0, dist.group.WORLD)
    return told


def _without_collectives(value: Any) -> list[Any] | None:
    """To the first rank, in the middle of a run: over no connection that NCCL would have to make,
    and what was read does not stay in the store."""
    names = ("gather", "all_gather", "send", "recv")
    with contextlib.ExitStack() as patched:
        for name in names:
            patched.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(name)))
        told = to_first_rank(value)
    dist.barrier()
    store = _get_default_store()
    assert not any(store.check([f"told/{turn}/{dist.get_rank()}"]) for turn in range(9))
    return told


def tell_a_function() -> object:
    return from_first_rank(print)


def warmed_up() -> list[tuple[str, int]]:
    """(collective, its numbers) of a group, which pretends to be of NCCL."""
    ran = []

    class Noting:
        def __getattr__(self, name: str) -> object:
            call = getattr(dist, name)

            def collective(*args: object, **kwargs: object) -> object:
                tensors = [each for each in args if isinstance(each, torch.Tensor)]
                ran.append((name, tensors[0].numel()))
                return call(*args, **kwargs)

            if name == "get_backend":
                return lambda group: "nccl"
            return collective if name in COLLECTIVES else call

    with mock.patch.object(groups, "dist", Noting()):
        warm_up(dist.group.WORLD, torch.device("cpu"), COLLECTIVES)
    return ran


def groups_made(case: Case) -> tuple[list[tuple[int, ...]], list[str], list[str]]:
    """(the ranks of every process group that is made for an engine; what DeepSpeed's constructors
    set of a module and of a grid, and ours do not)."""
    made = []

    def new_group(ranks: list[int], **options: object) -> object:
        made.append(tuple(ranks))
        return original(ranks=list(ranks), **options)

    original = dist.new_group
    with mock.patch.object(dist, "new_group", new_group):
        engine, _, _ = make_engine(case)
    theirs = PipelineModule([torch.nn.Linear(1, 1)], num_stages=1)
    return (
        made,
        sorted(set(vars(theirs)) - set(vars(engine.module))),
        sorted(set(vars(theirs._grid)) - set(vars(engine.module._grid))),
    )


def communicators_made(graph: StageGraph, objective: Objective) -> list[int]:
    """Of the first and last rank of each stage, with torch's fake groups in this process: those
    that NCCL would make; the world counts, and the channels of edges as one."""
    found = []
    for rank in sorted(
        {rank for stage in graph.stages for rank in stage.ranks[:: len(stage.ranks) - 1 or 1]}
    ):
        dist.init_process_group("fake", rank=rank, world_size=graph.world_size, store=FakeStore())
        made = []

        class Noted(Communicator):
            def _new_group(self, ranks, backend=None, options=None):
                if self.rank in ranks and len(ranks) > 1 and backend is None:
                    made.append(tuple(ranks))
                return dist.new_group(list(ranks), backend="fake")

        try:
            Noted(graph, objective, rank, torch.device("cpu"), TIMEOUT)
        finally:
            dist.destroy_process_group()
        edges = sum(ranks in graph.edges() for ranks in made)
        found.append(1 + len(made) - edges + (edges > 0))
    return found


def groups_used(case: Case) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Of every collective in a group of one rank, beside that of the run, (its name, how many
    numbers it moves): those of an engine and a step in groups that make a communicator, and those
    of the step in others."""
    alone, averaged = [], []

    def noting(name: str) -> object:
        call = getattr(dist, name)

        def collective(*args: object, **kwargs: object) -> object:
            tensors = [each for each in (*args, *kwargs.values()) if torch.is_tensor(each)]
            group = kwargs.get("group") or dist.group.WORLD
            if dist.get_world_size(group) == 1 and group is not dist.group.WORLD:
                found = (name, tensors[0].numel())
                (averaged if dist.get_backend(group) == ALONE else alone).append(found)
            return call(*args, **kwargs)

        return mock.patch.object(dist, name, collective)

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(noting(name))
        engine, _, image_size = make_engine(case)
        averaged.clear()
        engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))
    return alone, averaged


def outputs_alive(case: Case) -> tuple[int, int]:
    """(tensors that a stage has handed on in a step, of these those that are there when the first
    gradient comes)."""
    engine, _, image_size = make_engine(case)
    sent: list[weakref.ref] = []
    alive: list[int] = []
    send, receive = Channel.send, Channel.receive

    def sending(channel: Channel, key: MessageKey, tensors: dict, known: object) -> None:
        if channel is engine.comm.activations_out:
            sent.extend(weakref.ref(tensor) for tensor in tensors.values() if tensor.requires_grad)
        send(channel, key, tensors, known)

    def receiving(channel: Channel, key: MessageKey) -> dict[str, torch.Tensor]:
        if channel is engine.comm.gradients_in:
            alive.append(sum(tensor() is not None for tensor in sent))
        return receive(channel, key)

    with (
        mock.patch.object(Channel, "send", sending),
        mock.patch.object(Channel, "receive", receiving),
    ):
        engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))
    return len(sent), sum(alive[:1])
