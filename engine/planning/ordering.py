"""The instructions of all stages in one order in which everything comes after what it waits for.
Plain Python, without costs.

The order depends on the shape of a graph and on the schedule alone, so it is remembered: a planner
that compares thousands of candidates orders each shape once and pays one pass over a flat list
(`engine/planning/simulator.py`) for each.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)

from engine.schedule import (
    ComputeLoss,
    EmbedPass,
    ReplayPass,
    StageSchedule,
)
from engine.topology import Stage, StageGraph

if TYPE_CHECKING:
    from engine.planning.planner import BranchBatch

# kinds of work; the order of `_Times`
_NOTHING, _FORWARD, _AGAIN, _BACKWARD, _LOSS, _REDUCE, _STEP = range(7)
_WORK = {
    ForwardPass: _FORWARD,
    EmbedPass: _FORWARD,
    ReplayPass: _AGAIN,
    BackwardPass: _BACKWARD,
    ComputeLoss: _LOSS,
    ReduceGrads: _REDUCE,
    OptimizerStep: _STEP,
}
_COLLECTIVES = (
    ComputeLoss,
    OptimizerStep,
)  # between stages; the replicas of one stage are alike and wait for nobody
DOWNSTREAM, UPSTREAM = 0, 1  # the two links that leave stage s have the numbers 2 s and 2 s + 1
_SENDS = {SendActivation: DOWNSTREAM, SendGrad: UPSTREAM}
_RECEIVES = (RecvActivation, RecvGrad)


class Place(NamedTuple):
    """What the instructions of a stage depend on. A graph's shape is the tuple of its places."""

    name: str
    previous: int | None
    next: int | None
    loads: tuple[str, ...]
    tail_of: tuple[str, ...]
    num_downstream: int
    num_micro_batches: int
    num_kept: int
    has_backward: bool
    sends_gradients: bool


class Counts(NamedTuple):
    """What a stage's list holds, and how many micro-batches have activations: at most, and when the
    loss is computed."""

    forwards: int
    replays: int
    backwards: int
    losses: int
    reductions: int
    steps: int
    activations_sent: int
    gradients_sent: int
    in_flight: int
    in_flight_at_loss: int


@dataclass(frozen=True)
class Program:
    """The instructions of all stages in one order in which everything comes after what it waits
    for.

    An operation is a run of instructions that waits only at its start and sends only at its end. As
    tuples of integers, for speed: (stage, message it waits for, its duration's index, link it sends
    on or −1, message it sends). Message 0 is there from the start. A segment is a run of operations
    and then one collective: (stage, its duration's index) of its members. `durations` says what an
    index stands for: (stage, kind of work, number of instructions). `labels` names the
    instructions, (name, micro-batch, kind of work), of every operation and member in the order of
    the segments.
    """

    segments: tuple[
        tuple[tuple[tuple[int, int, int, int, int], ...], tuple[tuple[int, int], ...]], ...
    ]
    durations: tuple[tuple[int, int, int], ...]
    labels: tuple[tuple[int, int, tuple[tuple[str, int | None, int], ...]], ...]
    counts: tuple[Counts, ...]
    num_messages: int


def shape_of(graph: StageGraph, batches: Mapping[str, BranchBatch]) -> tuple[Place, ...]:
    return tuple(
        Place(
            name=s.name,
            previous=s.previous,
            next=s.next,
            loads=s.loads,
            tail_of=s.tail_of,
            num_downstream=s.num_downstream,
            num_micro_batches=batch.num_micro_batches,
            num_kept=batch.num_kept,
            has_backward=s.has_backward,
            sends_gradients=s.sends_gradients,
        )
        for s in graph.stages
        for batch in (batches[next(iter(s.layers))],)
    )


@lru_cache(maxsize=512)  # some 0.1 MB each
def put_in_order(shape: tuple[Place, ...], schedule: type[StageSchedule]) -> Program:
    """Order the instructions of all stages. Raises RuntimeError that names where each stage is
    stuck, if it cannot be done, and ValueError where the losses in the lists are not those that the
    schedule says it has."""
    lists = [_listed(_nameless(place), schedule) for place in shape]
    losses = {
        o.meets[1] is not None
        for operations, _ in lists
        for o in operations
        if o.meets and o.meets[0] is ComputeLoss
    }
    if losses - {schedule.loss_per_micro_batch}:
        raise ValueError(
            f"{schedule.__name__}: its ComputeLoss has {'a' if True in losses else 'no'} "
            f"buffer_id, and its loss_per_micro_batch is {schedule.loss_per_micro_batch}; a loss "
            "per micro-batch has one, a loss over the global batch has none"
        )
    linker = _Linker(shape, [operations for operations, _ in lists])
    stuck = linker.link()
    if stuck:
        raise RuntimeError(
            f"{schedule.__name__}: these instructions wait for ever: " + "; ".join(stuck)
        )
    return Program(
        tuple(linker.segments),
        tuple(linker.durations),
        tuple(linker.labels),
        tuple(counts for _, counts in lists),
        linker.num_messages,
    )


class _Operation(NamedTuple):
    """A run of instructions as long as it can be timed as one: a receive only at the start, one
    piece of work, a send only at the end."""

    receives: tuple[bool, int] | None  # (is it an activation?, micro-batch)
    sends: tuple[int, int] | None  # (direction, micro-batch)
    meets: (
        tuple[type[PipeInstruction], int | None] | None
    )  # the collective that it is, and of which micro-batch
    work: int
    instructions: tuple[tuple[str, int | None, int], ...]  # (name, micro-batch, kind of work)


def _nameless(place: Place) -> Place:
    """All that decides the instructions of a stage: stages alike in this have equal lists."""
    return place._replace(name="", previous=place.previous and 0, next=place.next and 0)


@lru_cache(maxsize=4096)
def _listed(place: Place, schedule: type[StageSchedule]) -> tuple[list[_Operation], Counts]:
    instructions = _instructions(place, schedule)
    runs: list[list[PipeInstruction]] = []
    ended, worked = True, False
    for instruction in instructions:
        kind = type(instruction)
        if ended or kind in _RECEIVES or kind in _COLLECTIVES or (worked and kind in _WORK):
            runs.append([])
            worked = False
        runs[-1].append(instruction)
        worked = worked or kind in _WORK
        ended = kind in _SENDS or kind in _COLLECTIVES
    return [_operation(run) for run in runs], _count(instructions)


def _operation(run: Sequence[PipeInstruction]) -> _Operation:
    first, last = type(run[0]), type(run[-1])
    works = [_WORK.get(type(instruction), _NOTHING) for instruction in run]
    return _Operation(
        (first is RecvActivation, run[0].buffer_id) if first in _RECEIVES else None,
        (_SENDS[last], run[-1].buffer_id) if last in _SENDS else None,
        (first, _micro_batch(run[0])) if first in _COLLECTIVES else None,
        max(works),
        tuple((i.name, _micro_batch(i), work) for i, work in zip(run, works)),
    )


def _instructions(place: Place, schedule: type[StageSchedule]) -> list[PipeInstruction]:
    trained = (
        (place.name,) if place.has_backward else ()
    )  # all that a schedule asks of it is whether there is anything
    stage = Stage(
        stage_id=0,
        name=place.name,
        layers={},
        ranks=(0,),
        previous=place.previous,
        next=place.next,
        loads=place.loads,
        tail_of=place.tail_of,
        num_downstream=place.num_downstream,
        trained=trained,
        sends_gradients=place.sends_gradients,
    )
    return [
        instruction
        for group in schedule(stage, place.num_micro_batches, place.num_kept)
        for instruction in group
    ]


def _count(instructions: Sequence[PipeInstruction]) -> Counts:
    kinds = Counter(type(instruction) for instruction in instructions)
    held = peak = at_loss = 0
    for kind in map(type, instructions):
        if kind is ForwardPass or kind is ReplayPass:
            held += 1
            peak = max(peak, held)
        elif kind is BackwardPass:
            held -= 1
        elif kind is ComputeLoss:
            at_loss = max(at_loss, held)
    return Counts(
        forwards=kinds[ForwardPass] + kinds[EmbedPass],
        replays=kinds[ReplayPass],
        backwards=kinds[BackwardPass],
        losses=kinds[ComputeLoss],
        reductions=kinds[ReduceGrads],
        steps=kinds[OptimizerStep],
        activations_sent=kinds[SendActivation],
        gradients_sent=kinds[SendGrad],
        in_flight=peak,
        in_flight_at_loss=at_loss,
    )


def counts_of(place: Place, schedule: type[StageSchedule]) -> Counts:
    """The counts of a stage, without writing down long lists: beyond what fills the pipeline each
    micro-batch adds the same."""
    filled = max(place.num_downstream, place.num_kept) + 3
    place = _nameless(place)
    if place.num_micro_batches <= filled:
        return _few_counts(place, schedule)
    last, before = (
        _few_counts(place._replace(num_micro_batches=number), schedule)
        for number in (filled, filled - 1)
    )
    return Counts(
        *(
            end + (place.num_micro_batches - filled) * (end - start)
            for end, start in zip(last, before)
        )
    )


@lru_cache(maxsize=4096)
def _few_counts(place: Place, schedule: type[StageSchedule]) -> Counts:
    return _count(_instructions(place, schedule))


def _micro_batch(instruction: PipeInstruction) -> int | None:
    return instruction.kwargs.get("buffer_id")


class _Linker:
    """Walks all stages forward together and writes down what they do, in the order it becomes
    possible."""

    def __init__(self, shape: Sequence[Place], operations: Sequence[Sequence[_Operation]]):
        self.shape, self.operations = shape, operations
        self.position = [0] * len(shape)
        self.links: dict[int, deque[tuple[int | None, int]]] = defaultdict(
            deque
        )  # (micro-batch, message) on their way
        self.num_messages = 1
        self.durations: dict[tuple[int, int, int], int] = {}
        self.segments: list = []
        self.labels: list = []
        self._open: list = []  # the segment being written

    def link(self) -> list[str]:
        """Everything, in order. Returns what is left over, in words: [] when all stages came to
        their end."""
        moved = True
        while moved:
            moved = any([self._advance(stage) for stage in range(len(self.shape))])
            moved = self._meet() or moved
        self._close(())
        return [
            self._describe(stage, operation)
            for stage in range(len(self.shape))
            if (operation := self._now(stage))
        ] + [
            f"{self.shape[link // 2].name} sends micro-batch {m} and nobody receives it"
            for link, queue in self.links.items()
            for m, _ in queue
        ]

    def _now(self, stage: int) -> _Operation | None:
        position = self.position[stage]
        return self.operations[stage][position] if position < len(self.operations[stage]) else None

    def _describe(self, stage: int, operation: _Operation) -> str:
        name, m, _ = operation.instructions[0]
        return f"{self.shape[stage].name} in {name}" + ("" if m is None else f" of micro-batch {m}")

    def _advance(self, stage: int) -> bool:
        """One stage as far as it comes. False: not at all."""
        start = self.position[stage]
        while (operation := self._now(stage)) and not operation.meets:
            message_in = self._take(stage, operation.receives)
            if message_in is None:
                break
            link, message_out = self._give(stage, operation.sends)
            self._open.append(
                (stage, message_in, self._write_down(stage, operation), link, message_out)
            )
        return self.position[stage] > start

    def _take(self, stage: int, receives: tuple[bool, int] | None) -> int | None:
        """The message an operation starts with; 0: it needs none; None: it is not there yet,
        another comes before it, or there is no stage that could send it."""
        if receives is None:
            return 0
        activation, m = receives
        place = self.shape[stage]
        sender = place.previous if activation else place.next
        if sender is None:
            return None
        queue = self.links[2 * sender + (DOWNSTREAM if activation else UPSTREAM)]
        return queue.popleft()[1] if queue and queue[0][0] == m else None

    def _give(self, stage: int, sends: tuple[int, int] | None) -> tuple[int, int]:
        if sends is None:
            return -1, 0
        direction, m = sends
        link, message = 2 * stage + direction, self.num_messages
        self.links[link].append((m, message))
        self.num_messages += 1
        return link, message

    def _meet(self) -> bool:
        """One collective whose members have all come to it. False: there is none."""
        collectives = [self._collective(stage) for stage in range(len(self.shape))]
        for collective in filter(None, collectives):
            members = [
                stage
                for stage, place in enumerate(self.shape)
                if place.tail_of or collective[0] is OptimizerStep
            ]
            if all(collectives[stage] == collective for stage in members):
                self._close(members)
                return True
        return False

    def _collective(self, stage: int) -> tuple[type[PipeInstruction], int | None] | None:
        """What this stage has come to, if that is a collective."""
        operation = self._now(stage)
        return operation.meets if operation else None

    def _close(self, members: Sequence[int]) -> None:
        operations, self._open = self._open, []
        self.segments.append(
            (
                tuple(operations),
                tuple(
                    (stage, self._write_down(stage, self.operations[stage][self.position[stage]]))
                    for stage in members
                ),
            )
        )

    def _write_down(self, stage: int, operation: _Operation) -> int:
        """Label the operation, leave it behind, and return the index of its duration."""
        duration = self.durations.setdefault(
            (stage, operation.work, len(operation.instructions)), len(self.durations)
        )
        self.labels.append((stage, duration, operation.instructions))
        self.position[stage] += 1
        return duration
