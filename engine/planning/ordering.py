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

from engine.schedule import ComputeLoss, EmbedPass, ReplayPass, StageSchedule
from engine.topology import Stage, StageGraph

if TYPE_CHECKING:
    from engine.planning.planner import BranchBatch

# between stages; the replicas of one stage are alike and wait for nobody
COLLECTIVES = (ComputeLoss, OptimizerStep)


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


class Event(NamedTuple):
    """One instruction of a stage, or a collective, to which all `stages` come. Messages of a link
    `(sender, is it an activation?)` arrive in the order in which they were sent."""

    stages: tuple[int, ...]
    instruction: PipeInstruction
    receives: tuple[int, bool] | None = None
    sends: tuple[int, bool] | None = None


@dataclass(frozen=True)
class Order:
    """The events of a step, each after those that it waits for, and the counts of each stage."""

    events: tuple[Event, ...]
    counts: tuple[Counts, ...]


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
def put_in_order(shape: tuple[Place, ...], schedule: type[StageSchedule]) -> Order:
    """Order the instructions of all stages. Raises RuntimeError that names where each stage is
    stuck, if it cannot be done, and ValueError where the losses in the lists are not those that the
    schedule says it has."""
    listed = [_listed(_nameless(place), schedule) for place in shape]
    losses = {
        micro_batch_of(i) is not None for own, _ in listed for i in own if type(i) is ComputeLoss
    }
    if losses - {schedule.loss_per_micro_batch}:
        raise ValueError(
            f"{schedule.__name__}: its ComputeLoss has {'a' if True in losses else 'no'} "
            f"buffer_id, and its loss_per_micro_batch is {schedule.loss_per_micro_batch}; a loss "
            "per micro-batch has one, a loss over the global batch has none"
        )
    left = [deque(own) for own, _ in listed]
    links: dict[tuple[int, bool], deque[int]] = defaultdict(deque)  # micro-batches on their way
    events: list[Event] = []
    moved = True
    while moved:
        moved = False
        for number, place in enumerate(shape):
            while left[number] and type(left[number][0]) not in COLLECTIVES:
                event = _event(number, place, left[number][0])
                if event.receives:
                    queue = links[event.receives]
                    if not queue or queue[0] != micro_batch_of(event.instruction):
                        break  # not there yet, another one comes before it, or nobody sends it
                    queue.popleft()
                if event.sends:
                    links[event.sends].append(event.instruction.buffer_id)
                events.append(event)
                left[number].popleft()
                moved = True
        if (meeting := _meeting(shape, left)) is not None:
            events.append(meeting)
            for number in meeting.stages:
                left[number].popleft()
            moved = True
    stuck = [
        f"{place.name} in {own[0].name}{_of_micro_batch(own[0])}"
        for place, own in zip(shape, left)
        if own
    ]
    stuck += [
        f"{shape[sender].name} sends micro-batch {m} and nobody receives it"
        for (sender, _), queue in links.items()
        for m in queue
    ]
    if stuck:
        raise RuntimeError(
            f"{schedule.__name__}: these instructions wait for ever: {'; '.join(stuck)}"
        )
    return Order(tuple(events), tuple(counts for _, counts in listed))


def _event(number: int, place: Place, instruction: PipeInstruction) -> Event:
    kind = type(instruction)
    receives = sends = None
    if kind is RecvActivation or kind is RecvGrad:
        sender = place.previous if kind is RecvActivation else place.next
        receives = (-1 if sender is None else sender, kind is RecvActivation)
    elif kind is SendActivation or kind is SendGrad:
        sends = (number, kind is SendActivation)
    return Event((number,), instruction, receives, sends)


def _meeting(shape: Sequence[Place], left: Sequence[deque[PipeInstruction]]) -> Event | None:
    """A collective to which all of its stages have come: of a loss the last stages, of the
    optimizer step all."""
    heads = [own[0] if own and type(own[0]) in COLLECTIVES else None for own in left]
    for first in filter(None, heads):
        kind, m = type(first), micro_batch_of(first)
        members = tuple(
            number for number, place in enumerate(shape) if place.tail_of or kind is OptimizerStep
        )
        if all(
            (own := heads[number]) is not None and (type(own), micro_batch_of(own)) == (kind, m)
            for number in members
        ):
            return Event(members, first)
    return None


def _nameless(place: Place) -> Place:
    """All that decides the instructions of a stage: stages alike in this have equal lists."""
    return place._replace(name="", previous=place.previous and 0, next=place.next and 0)


@lru_cache(maxsize=4096)
def _listed(
    place: Place, schedule: type[StageSchedule]
) -> tuple[tuple[PipeInstruction, ...], Counts]:
    instructions = _instructions(place, schedule)
    return tuple(instructions), _count(instructions)


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


def micro_batch_of(instruction: PipeInstruction) -> int | None:
    return instruction.kwargs.get("buffer_id")


def _of_micro_batch(instruction: PipeInstruction) -> str:
    m = micro_batch_of(instruction)
    return "" if m is None else f" of micro-batch {m}"
