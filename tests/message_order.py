"""What ranks ask of their communicators, in which order, read from the instruction lists without a
process; and who then waits for ever.

A communicator is a process group of NCCL: its operations run in the order in which a rank has
issued them, and each of them occupies the communicator until all its members have come to it. Here
a receive that is posted, and a send that has been issued, hold up all that is behind them on their
communicator; a send leaves only when its receive is posted.

On a device each of them is a kernel that spins until then. What waits for the whole device waits
for all of them, and a device has room for so many at a time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from split_training import (
    global_batch,
    make_engine,
    micro_batch,
    micro_batches_of_rank,
    shares_of_step,
)

from engine import communication, json_messages
from engine.communication import Channel, Communicator
from engine.executor import StepSpec
from engine.objective import Comparison, Objective, Pair, Term
from engine.schedule import PASSES, ComputeLoss, ForwardOnly, receives_to_post
from engine.topology import StageGraph
from models.losses import InfoNCE, SimilarityKL, Views


class Group(NamedTuple):
    """A communicator; `ranks` are its members."""

    name: str
    ranks: tuple[int, ...]


class Operation(NamedTuple):
    """`kind`: post, wait, send; drain: wait until all sends have left; together: a collective, in
    which a rank stays until all members have come; pass: a forward or backward, which may wait for
    the whole device. `what`: the micro-batch, or the collective."""

    kind: str
    group: Group | None
    what: object = None


@dataclass(frozen=True)
class Work:
    """What the ranks are to do. `programs`: their instructions."""

    graph: StageGraph
    objective: Objective
    programs: Mapping[int, Sequence[PipeInstruction]]
    early_averages: bool = False  # ours, during the last backward; else DeepSpeed's
    equal_shares: bool = True
    statistics: bool = True  # are there running statistics to average?
    evaluates: bool = False


def operations(work: Work, rank: int, posts_ahead: bool = True) -> list[Operation]:
    """Of one rank in one step, or in the evaluation of one set. `posts_ahead`: as channels of gloo,
    not of NCCL."""
    return list(_Walk(work, rank, posts_ahead).step())


class _Walk:
    def __init__(self, work: Work, rank: int, posts_ahead: bool = True):
        self.posts_ahead = posts_ahead
        self.work, self.graph, self.rank = work, work.graph, rank
        self.stage = self.graph.stage_of(rank)
        self.own = Group("stage", self.stage.ranks)
        self.world = Group("world", tuple(range(self.graph.world_size)))
        below, above = dict(self.graph.edges()), {b: a for a, b in self.graph.edges()}
        self.below, self.above = below.get(rank), above.get(rank)

    def step(self) -> Iterator[Operation]:
        if self.above is not None:
            yield Operation("together", Group("announcement", (self.above, self.rank)))
        if self.below is not None:
            yield Operation("together", Group("announcement", (self.rank, self.below)))
        program = self.work.programs[self.rank]
        last = max((n for n, i in enumerate(program) if isinstance(i, BackwardPass)), default=None)
        for n, (instruction, receives) in enumerate(zip(program, receives_to_post(program))):
            for receive in receives if self.posts_ahead else ():
                yield Operation("post", self.channel(receive), receive.buffer_id)
            yield from self.of(instruction)
            if n == last:  # gradients may begin here to be averaged
                ours = self.work.early_averages and len(self.own.ranks) > 1
                yield Operation("together", self.own, "gradients" if ours else "DeepSpeed")
        yield Operation("drain", None)
        if self.work.evaluates:
            yield from self.evaluation()
            return
        if self.work.statistics:
            yield from self.gathered("running statistics")
        yield Operation("together", self.world, "metrics")

    def of(self, instruction: PipeInstruction) -> Iterator[Operation]:
        if isinstance(instruction, (RecvActivation, RecvGrad)):
            if not self.posts_ahead:
                yield Operation("post", self.channel(instruction), instruction.buffer_id)
            yield Operation("wait", self.channel(instruction), instruction.buffer_id)
        elif isinstance(instruction, PASSES):
            yield Operation("pass", None, instruction.name)
        elif isinstance(instruction, (SendActivation, SendGrad)):
            yield Operation("send", self.channel(instruction), instruction.buffer_id)
        elif isinstance(instruction, ComputeLoss):
            yield from self.loss(instruction.kwargs.get("buffer_id"))
        elif isinstance(instruction, ReduceGrads):
            yield Operation("together", self.own, "DeepSpeed")
        elif isinstance(instruction, OptimizerStep):
            yield Operation("together", self.world, "DeepSpeed")
            yield Operation("together", self.world, "norms")
            yield Operation("together", self.own, "DeepSpeed")

    def channel(self, instruction: PipeInstruction) -> Group:
        if isinstance(instruction, RecvActivation):
            return Group("activations", (self.above, self.rank))
        if isinstance(instruction, SendActivation):
            return Group("activations", (self.rank, self.below))
        if isinstance(instruction, RecvGrad):
            return Group("gradients", (self.below, self.rank))
        return Group("gradients", (self.rank, self.above))

    def collective(self, ranks: Collection[int]) -> Group:
        """There is one for each set of ranks."""
        stages = {stage.ranks for stage in self.graph.stages}
        members = tuple(sorted(ranks))
        return Group("stage" if members in stages else "last stages", members)

    # -- the loss, as `engine/loss` has it

    def gathered(self, what: str) -> Iterator[Operation]:
        if self.stage.replicas > 1:
            yield Operation("together", self.own, what)

    def crossed(self, source: str, target: str, what: str) -> Iterator[Operation]:
        sources, receivers = (self.graph.last_stage(branch).ranks for branch in (source, target))
        for n, rank in enumerate(sources if sources != receivers else ()):
            audience = [r for i, r in enumerate(receivers) if i % len(sources) == n]
            if audience and self.rank in (rank, *audience):
                group = self.collective({rank, *audience})
                yield Operation("together", group, f"{what} from {source}")

    def exchanged(self, compared: Sequence[Comparison]) -> Iterator[Operation]:
        for branch in self.stage.last_of:
            yield from self.gathered(f"embeddings of {branch}")
            yield from self.gathered(f"labels of {branch}")
        if len(self.stage.last_of) == 1:
            ends = [permutations(zip(each.rows, each.branches), 2) for each in compared]
            links = dict.fromkeys((*one, other) for each in ends for one, (_, other) in each)
            for _, source, target in links:
                if self.stage.last_of[0] in (source, target):
                    yield from self.crossed(source, target, "embeddings")
                    yield from self.crossed(source, target, "labels")

    def loss(self, m: int | None) -> Iterator[Operation]:
        if not self.work.equal_shares or any(p.matching for p in self.work.objective.terms):
            ranks = sorted({rank for stage in self.graph.last_stages for rank in stage.ranks})
            yield Operation("together", Group("sizes", tuple(ranks)), "sizes")
        yield from self.exchanged(self.work.objective.terms)
        for pair in self.work.objective.terms:
            mine = [branch for branch in self.stage.last_of if branch in pair.branches]
            if not mine:
                continue
            first, *others = pair.branches
            are_all = len(mine) == len(pair.branches)
            for other in others if pair.loss.parameters and not are_all else ():
                if {first, other} & {*mine}:
                    yield from self.crossed(first, other, "scalars")
            if not are_all or self.stage.replicas > 1:
                yield from self.of_statistics(pair, mine)
                if pair.loss.parameters and first in mine:
                    yield from self.gathered("gradients of what the loss learns")
            if pair.matching:
                yield from self.matching(pair, mine)

    def of_statistics(self, pair: Term, mine: list[str]) -> Iterator[Operation]:
        if not isinstance(pair.loss, InfoNCE | Views | SimilarityKL):
            return
        for branch in mine:
            yield from self.gathered(f"statistics of {branch}")
        for source, target in permutations(pair.branches, 2) if len(mine) == 1 else ():
            if mine[0] in (source, target):
                yield from self.crossed(source, target, "statistics")

    def matching(self, pair: Pair, mine: list[str]) -> Iterator[Operation]:
        first, second = (self.graph.last_stage(branch) for branch in pair.branches)
        group = self.collective({*first.ranks, *second.ranks})
        if len(group.ranks) > 1:
            for rank in first.ranks:
                yield Operation("together", group, f"places of rank {rank}")
        if pair.second in mine:
            yield from self.gathered("drawn")
        for rank in first.ranks if len(group.ranks) > 1 else ():
            loss = next(n for n, i in enumerate(self.work.programs[rank]) if type(i) is ComputeLoss)
            before = {getattr(i, "buffer_id", None) for i in self.work.programs[rank][:loss]}
            for block in range(len(before - {None})):
                for what in ("tokens", *(["gradient"] if first.has_backward else [])):
                    yield Operation("together", group, f"{what} {rank} {block}")

    def evaluation(self) -> Iterator[Operation]:
        if self.stage.is_last:
            for branch in self.stage.last_of:
                yield from self.gathered(f"counts of {branch}")
            yield from self.exchanged(self.work.objective.comparisons)
        for pair in self.work.objective.comparisons:
            for what in ("one direction", "other direction", "numbers"):
                yield Operation("together", self.world, f"{pair.name}, {what}")


# -- who waits for whom


def disagreements(lists: Mapping[int, Sequence[Operation]]) -> list[Group]:
    """Communicators whose members do not issue the same operations in the same order."""
    issued: dict[Group, dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in lists.items():
        for kind, group, what in own:
            if kind in ("post", "send", "together"):
                issued[group][rank].append(what)
    return [
        group
        for group, by_rank in issued.items()
        if any(by_rank[rank] != by_rank[group.ranks[0]] for rank in group.ranks)
    ]


def waiting(
    lists: Mapping[int, Sequence[Operation]],
    sends_in_flight: int,
    passes_wait: bool = False,
    kernels: float = math.inf,
) -> dict[int, str]:
    """Run all ranks as far as they come. Returns rank -> the operation in which it waits for ever;
    {}: all came to their end.

    The k-th operation of a communicator is over when it runs on all its members, a send on one side
    for a receive on the other. Nothing that was possible becomes impossible later, so the order in
    which ranks are looked at does not matter: {} means that the waits have no cycle. `passes_wait`:
    every pass begins when no operation of its rank is under way. `kernels`: how many operations run
    at the same time on a rank, in the order in which they were issued.
    """
    ranks = [_Rank(list(own), sends_in_flight, passes_wait, kernels) for own in lists.values()]
    by_rank = dict(zip(lists, ranks))
    over: Counter[Group] = Counter()

    def end_what_runs() -> bool:
        changed = [rank.start(over) for rank in ranks]
        running = {group for rank in ranks for group in rank.running}
        for group in running:
            members = [by_rank[member] for member in group.ranks]
            if all(group in member.running for member in members):
                kinds = {member.running[group] for member in members}
                if kinds in ({"together"}, {"send", "post"}):
                    over[group] += 1
                    for member in members:
                        del member.running[group]
                    changed.append(True)
        return any(changed)

    while any([rank.go_on(over) for rank in ranks]) | end_what_runs():
        pass
    return {number: rank.stands_at() for number, rank in by_rank.items() if rank.plan}


class _Rank:
    """Where one rank stands: `plan`, what it has still to issue; `queue`, what it has issued, in
    this order; `running`, of each communicator the kind of what runs."""

    def __init__(self, plan, sends_in_flight, passes_wait, kernels):
        self.plan, self.queue, self.running = deque(plan), [], {}
        self.sends_in_flight, self.passes_wait, self.kernels = sends_in_flight, passes_wait, kernels
        self.issued, self.posted = Counter(), defaultdict(deque)
        self.is_issued = False  # what stands first in the plan

    def go_on(self, over: Mapping[Group, int]) -> bool:
        moved = False
        while self.plan:
            kind, group, _ = self.plan[0]
            if kind in ("post", "send", "together") and not self.is_issued:
                if kind == "post":
                    self.posted[group].append(self.issued[group])
                self.issued[group] += 1
                self.queue.append((kind, group))
                self.is_issued = moved = True
            if not self._ends(kind, group, over):
                break
            if kind == "wait":
                self.posted[group].popleft()
            self.plan.popleft()
            self.is_issued, moved = False, True
        return moved

    def _ends(self, kind: str, group: Group | None, over: Mapping[Group, int]) -> bool:
        under_way = [*self.queue, *((kind, group) for group, kind in self.running.items())]
        if kind == "drain":
            return all(kind != "send" for kind, _ in under_way)
        if kind == "pass":
            return not (self.passes_wait and under_way)
        if kind == "send":
            return under_way.count(("send", group)) <= self.sends_in_flight
        if kind == "wait":
            return over[group] > self.posted[group][0]
        return kind == "post" or over[group] == self.issued[group]

    def start(self, over: Mapping[Group, int]) -> bool:
        before = len(self.queue)
        for each in list(self.queue):
            kind, group = each
            if len(self.running) < self.kernels and group not in self.running:
                self.running[group] = kind
                self.queue.remove(each)
        return len(self.queue) < before

    def stands_at(self) -> str:
        kind, group, what = self.plan[0]
        return " ".join(str(part) for part in (kind, group and group.name, what))


# -- what the executor does


def recorded(case: Any, posts_ahead: bool) -> list[tuple[list[tuple], list[tuple]]]:
    """On each rank: (the operations as they were called, the operations of the model) of a step and
    of an evaluation in which the first replicas have all samples; without passes and DeepSpeed's
    own."""
    engine, plan, image_size = make_engine(case)
    for channel in (engine.comm.activations_in, engine.comm.gradients_in):
        if channel is not None:
            channel.posts_ahead = posts_ahead
    graph, rank = engine.graph, engine.comm.rank
    batch_of = {
        of: plan.batches[next(iter(graph.stage_of(of).layers))] for of in range(graph.world_size)
    }

    def programs(schedule: Any, numbers: dict[int, tuple[int, ...]]) -> dict[int, list]:
        return {
            of: [i for group in schedule(graph.stage_of(of), *own) for i in group]
            for of, own in numbers.items()
        }

    given = {of: (batch.num_micro_batches, batch.num_kept) for of, batch in batch_of.items()}
    work = Work(
        graph,
        engine.objective,
        programs(engine.schedule_type, given),
        engine.backend.averages_early,
        True,  # or known beforehand
        bool(engine.module.running_statistics()),
    )
    with _noting(engine.comm) as in_step:
        shares = shares_of_step(case, engine, 0) if case.deals else {}
        batches = micro_batches_of_rank(case, engine, 0, image_size)
        engine.train_batch(batches, StepSpec(shares=shares))
    whole = global_batch(case, 1, image_size)
    shares = [
        torch.arange(case.global_batch_size).split(plan.batches[b].micro_batch_size)
        for b in engine.stage.loads
    ]
    held_out = [
        {
            name: tensor
            for branch, places in zip(engine.stage.loads, share)
            for name, tensor in micro_batch(case, whole, branch, places).items()
        }
        for share in zip(*shares)
    ]
    number = {
        of: 0 if graph.replica_of(of) else case.global_batch_size // batch.micro_batch_size
        for of, batch in batch_of.items()
    }
    evaluation = programs(ForwardOnly, {of: (own,) for of, own in number.items()})
    with _noting(engine.comm) as in_evaluation:
        engine.evaluate(
            iter(held_out if engine.comm.replica == 0 else []),
            number[rank],
            case.global_batch_size,
            lambda sides, branch, _: sides[branch].embeds.sum()[None],
        )
    works = (work, replace(work, programs=evaluation, evaluates=True))
    found = []
    for noted, own in zip((in_step, in_evaluation), works):
        expected = [
            (each.kind, each.group)
            for each in operations(own, rank, posts_ahead)
            if each.what != "DeepSpeed" and each.kind != "pass"
        ]
        found.append((noted, expected))
    return found


@contextmanager
def _noting(comm: Communicator) -> Iterator[list[tuple[str, Group | None]]]:
    """What is called in here, as (kind, communicator)."""
    noted: list[tuple[str, Group | None]] = []
    names: dict[int, Group] = {id(None): Group("world", tuple(range(comm.graph.world_size)))}
    for stage in comm.graph.stages:
        names[id(comm._stage_groups[stage.stage_id])] = Group("stage", stage.ranks)
    known = set(names)
    for (ranks, _), group in comm._groups.items():
        if comm.rank in ranks and id(group) not in known:
            names[id(group)] = Group("last stages", ranks)
    channels = ("activations_in", "activations_out", "gradients_in", "gradients_out")
    for name, _, way in (each.partition("_") for each in channels):
        channel = getattr(comm, f"{name}_{way}")
        if channel is not None:
            ranks = (comm.rank, channel.peer) if way == "out" else (channel.peer, comm.rank)
            names[id(channel.group)] = Group(name, ranks)

    class Noting:
        """torch.distributed, with a note of what is called."""

        def __getattr__(self, name: str) -> Any:
            call = getattr(dist, name)

            def collective(*args: Any, group: Any = None, **kwargs: Any) -> Any:
                noted.append(("together", names[id(group)]))
                return call(*args, group=group, **kwargs)

            together = ("all_gather_into_tensor", "all_reduce", "broadcast", "reduce")
            return collective if name in together else call

    def send_json(value: Any, peer: int, group: Any) -> None:
        noted.append(("together", Group("announcement", (comm.rank, peer))))
        json_messages.send_json(value, peer, group)

    def receive_json(peer: int, group: Any) -> Any:
        noted.append(("together", Group("announcement", (peer, comm.rank))))
        return json_messages.receive_json(peer, group)

    def from_all_ranks(value: Any, group: Any) -> Any:
        noted.append(("together", Group("sizes", tuple(dist.get_process_group_ranks(group)))))
        return json_messages.from_all_ranks(value, group)

    def note(kind: str, method: Any) -> Any:
        def noting(channel: Channel, *args: Any) -> Any:
            result = method(channel, *args)
            noted.append((kind, names[id(channel.group)]))
            return result

        return noting

    def drain(self: Communicator) -> None:
        noted.append(("drain", None))
        original_drain(self)

    original_drain = Communicator.drain
    with (
        mock.patch.object(communication, "dist", Noting()),
        mock.patch.object(communication, "send_json", send_json),
        mock.patch.object(communication, "receive_json", receive_json),
        mock.patch.object(communication, "from_all_ranks", from_all_ranks),
        mock.patch.object(Channel, "_post", note("post", Channel._post)),
        mock.patch.object(Channel, "receive", note("wait", Channel.receive)),
        mock.patch.object(Channel, "send", note("send", Channel.send)),
        mock.patch.object(Communicator, "drain", drain),
    ):
        yield noted
