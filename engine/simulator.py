"""The same instruction lists under a cost model: seconds and bytes where the executor has tensors. Plain Python.

The replicas of a stage are alike, so one rank per stage is simulated: 1,024 ranks cost what 8 do. What is modelled:

    any instruction    takes `instruction_s` of host time and what it works; a rank does one after the other
    send               returns at once; the messages of one direction of an edge travel one after the other
    receive            waits for its message
    ComputeLoss        all tails wait for each other, exchange embeddings, then each computes its block of the logits
    ReduceGrads        a ring over the replicas of the stage
    OptimizerStep      all stages wait for each other (overflow and norms concern all), then owners step and hand back weights

Where replicas differ (one pair of ranks within a node, another across), the slowest counts for all. Not modelled: links that
several pairs of ranks share, a send that waits because too many are under way, the memory of the loaded inputs.

Two phases. `_compile` puts the instructions of a shape of graph into one flat list in which everything comes after what it waits
for; it knows no costs and is remembered. `_run` is one pass over that list, which is all that a planner pays for each of
thousands of candidates.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
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

from engine.costs import CostModel, Machine
from engine.schedule import SCHEDULES, ComputeLoss, EmbedPass, ReplayPass, StageSchedule
from engine.topology import Stage, StageGraph

if TYPE_CHECKING:
    from engine.planner import BranchBatch  # which asks the simulator: at run time it imports this module, not the reverse

FLOAT_BYTES = 4  # embeddings and logits are fp32
ELEMENTWISE_FLOPS = 10  # of the loss per logit: two exponentials, their sums and differences
LABEL_BYTES = 16  # place in the batch and index in the data, int64 each
LOGITS_COPIES = 3  # of a block of logits that exist at once: itself, its gradient, a temporary


@dataclass(frozen=True)
class Span:
    """One instruction of one stage, from when the rank comes to it until it goes on; waiting is inside."""

    stage_id: int
    name: str  # of the instruction's class
    micro_batch: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageResult:
    """One rank of a stage over one step.

    `busy_s`: passes, the loss's arithmetic, reduction and optimizer step, without waiting. `peak_bytes` is everything: state,
    activations (at their peak: `activation_bytes`), messages, embeddings and logits. `sent_bytes`: along edges, in the loss's exchange
    and over the replicas.
    """

    name: str
    busy_s: float
    idle_fraction: float
    peak_bytes: float
    state_bytes: float
    activation_bytes: float
    sent_bytes: float


@dataclass(frozen=True)
class Simulation:
    """One step. `bubble_fraction`: idle rank-time ÷ rank-time, every replica of a stage counted."""

    step_s: float
    stages: tuple[StageResult, ...]
    bubble_fraction: float
    spans: tuple[Span, ...]  # those of one stage in order; empty unless asked for


def simulate(graph: StageGraph, batches: Mapping[str, BranchBatch], schedule: str, costs: CostModel, timeline: bool = False) -> Simulation:
    """One step of `schedule` on `graph`. `timeline` adds the spans.

    Raises RuntimeError when instructions wait for each other for ever (`per_micro_batch` with numbers of micro-batches that differ
    between the branches). `costs` must not be changed after its first use: sums over its layers are remembered.
    """
    program = _compile(_shape(graph, batches), SCHEDULES[schedule])
    bill = _bill(graph, batches, costs, program.loss_per_micro_batch)
    seconds = _durations(program, bill.times)
    ends = _run(program, seconds, bill.links)
    step_s = max(ends)
    busy = [_busy_s(times, counts) for times, counts in zip(bill.times, program.counts)]
    idle_s = sum(stage.replicas * (step_s - busy_s) for stage, busy_s in zip(graph.stages, busy))
    return Simulation(
        step_s,
        tuple(_stage_result(stage, bill, program.counts[stage.stage_id], busy[stage.stage_id], step_s, costs) for stage in graph.stages),
        idle_s / (graph.world_size * step_s) if step_s else 0.0,
        _spans(program, seconds, ends, bill.times) if timeline else (),
    )


def bounds(graph: StageGraph, batches: Mapping[str, BranchBatch], schedule: str, costs: CostModel) -> tuple[float, float]:
    """Seconds that a step takes at least, and the bytes that the fullest rank holds (exact), without ordering the instructions.

    At least what the busiest stage works, and one micro-batch's way to it and back: before a stage's first forward every stage
    above it ran one; after its last backward every stage above it runs one more. Then comes the optimizer step of the slowest.
    """
    every = [_counts_of(place, SCHEDULES[schedule]) for place in _shape(graph, batches)]
    bill = _bill(graph, batches, costs, any(counts.losses > 1 for counts in every))
    longest, above = 0.0, []  # by stage: a forward and a backward of all stages above it, the reduction of the first of them
    for stage, own, counts in zip(graph.stages, bill.times, every):
        fill_s, drain_s, reduce_s = above[stage.previous] if stage.previous is not None else (0.0, 0.0, own.reduce_s)
        works_s = counts.forwards * own.forward_s + counts.backwards * own.backward_s + counts.losses * own.loss_s
        longest = max(longest, fill_s + works_s + max(own.reduce_s, drain_s + reduce_s))
        above.append((fill_s + own.forward_s, drain_s + own.backward_s, reduce_s))
    return longest + max(own.step_s for own in bill.times), max(
        map(_peak_bytes, graph.stages, [bill] * len(every), every, [costs] * len(every))
    )


def most_kept(graph: StageGraph, batches: Mapping[str, BranchBatch], costs: CostModel) -> dict[str, int]:
    """Of how many micro-batches `replay` can keep the activations within the memory of the ranks, by branch; 0 where nothing fits."""
    bill = _bill(graph, batches, costs, per_micro_batch=False)
    most = {branch: batch.num_micro_batches for branch, batch in batches.items()}
    for stage, layers, loss in zip(graph.stages, bill.layers, bill.losses):
        free_bytes = costs.machine.memory_bytes - _fixed_bytes(stage, bill, costs) - (loss.rows_bytes if loss else 0.0)
        free_bytes -= max(layers.working_bytes, loss.logits_bytes if loss else 0.0)
        room = int(max(0.0, free_bytes) // layers.kept_bytes) if layers.kept_bytes else max(most.values())
        for branch in stage.layers if graph.layout == "fork" else batches:
            most[branch] = min(most[branch], room)
    return most


# -- from instruction lists to one flat list ---------------------------------------------------------------------------

_NOTHING, _FORWARD, _BACKWARD, _LOSS, _REDUCE, _STEP = range(6)  # kinds of work; the order of `_Times`
_WORK = {
    ForwardPass: _FORWARD,
    EmbedPass: _FORWARD,
    ReplayPass: _FORWARD,
    BackwardPass: _BACKWARD,
    ComputeLoss: _LOSS,
    ReduceGrads: _REDUCE,
    OptimizerStep: _STEP,
}
_COLLECTIVES = (ComputeLoss, OptimizerStep)  # between stages; the replicas of one stage are alike and wait for nobody
_DOWNSTREAM, _UPSTREAM = 0, 1  # the two links that leave stage s have the numbers 2 s and 2 s + 1
_SENDS = {SendActivation: _DOWNSTREAM, SendGrad: _UPSTREAM}
_RECEIVES = (RecvActivation, RecvGrad)


class _Place(NamedTuple):
    """What the instructions of a stage depend on. A graph's shape is the tuple of its places."""

    name: str
    previous: int | None
    next: int | None
    loads: tuple[str, ...]
    tail_of: tuple[str, ...]
    num_downstream: int
    num_micro_batches: int
    num_kept: int


class _Counts(NamedTuple):
    """What a stage's list holds, and how many micro-batches have activations: at most, and when the loss is computed."""

    forwards: int
    backwards: int
    losses: int
    reductions: int
    steps: int
    activations_sent: int
    gradients_sent: int
    in_flight: int
    in_flight_at_loss: int


@dataclass(frozen=True)
class _Program:
    """The instructions of all stages in one order in which everything comes after what it waits for.

    An operation is a run of instructions that waits only at its start and sends only at its end. As tuples of integers, for speed:
    (stage, message it waits for, its duration's index, link it sends on or −1, message it sends). Message 0 is there from the start.
    A segment is a run of operations and then one collective: (stage, its duration's index) of its members.
    `durations` says what an index stands for: (stage, kind of work, number of instructions).
    `labels` names the instructions, (name, micro-batch, kind of work), of every operation and member in the order of the segments.
    """

    segments: tuple[tuple[tuple[tuple[int, int, int, int, int], ...], tuple[tuple[int, int], ...]], ...]
    durations: tuple[tuple[int, int, int], ...]
    labels: tuple[tuple[int, int, tuple[tuple[str, int | None, int], ...]], ...]
    counts: tuple[_Counts, ...]
    num_messages: int
    loss_per_micro_batch: bool


def _shape(graph: StageGraph, batches: Mapping[str, BranchBatch]) -> tuple[_Place, ...]:
    return tuple(
        _Place(s.name, s.previous, s.next, s.loads, s.tail_of, s.num_downstream, batch.num_micro_batches, batch.num_kept)
        for s in graph.stages
        for batch in (batches[next(iter(s.layers))],)
    )


@lru_cache(maxsize=512)  # some 0.1 MB each
def _compile(shape: tuple[_Place, ...], schedule: type[StageSchedule]) -> _Program:
    """Order the instructions of all stages. Raises RuntimeError that names where each stage is stuck, if it cannot be done."""
    lists = [_listed(_nameless(place), schedule) for place in shape]
    linker = _Linker(shape, [operations for operations, _ in lists])
    stuck = linker.link()
    if stuck:
        raise RuntimeError(f"{schedule.__name__}: these instructions wait for ever: " + "; ".join(stuck))
    return _Program(
        tuple(linker.segments),
        tuple(linker.durations),
        tuple(linker.labels),
        tuple(counts for _, counts in lists),
        linker.num_messages,
        any(o.meets and o.meets[0] is ComputeLoss and o.meets[1] is not None for operations, _ in lists for o in operations),
    )


class _Operation(NamedTuple):
    """A run of instructions as long as it can be timed as one: a receive only at the start, one piece of work, a send only at the end."""

    receives: tuple[bool, int] | None  # (is it an activation?, micro-batch)
    sends: tuple[int, int] | None  # (direction, micro-batch)
    meets: tuple[type[PipeInstruction], int | None] | None  # the collective that it is, and of which micro-batch
    work: int
    instructions: tuple[tuple[str, int | None, int], ...]  # (name, micro-batch, kind of work)


def _nameless(place: _Place) -> _Place:
    """All that decides the instructions of a stage: stages alike in this have equal lists."""
    return place._replace(name="", previous=place.previous and 0, next=place.next and 0)


@lru_cache(maxsize=4096)
def _listed(place: _Place, schedule: type[StageSchedule]) -> tuple[list[_Operation], _Counts]:
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
        (first is RecvActivation, _micro_batch(run[0])) if first in _RECEIVES else None,
        (_SENDS[last], _micro_batch(run[-1])) if last in _SENDS else None,
        (first, _micro_batch(run[0])) if first in _COLLECTIVES else None,
        max(works),
        tuple((i.name, _micro_batch(i), work) for i, work in zip(run, works)),
    )


def _instructions(place: _Place, schedule: type[StageSchedule]) -> list[PipeInstruction]:
    stage = Stage(0, place.name, {}, (0,), place.previous, place.next, place.loads, place.tail_of, place.num_downstream)
    return [instruction for group in schedule(stage, place.num_micro_batches, place.num_kept) for instruction in group]


def _count(instructions: Sequence[PipeInstruction]) -> _Counts:
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
    return _Counts(
        kinds[ForwardPass] + kinds[EmbedPass] + kinds[ReplayPass],
        kinds[BackwardPass],
        kinds[ComputeLoss],
        kinds[ReduceGrads],
        kinds[OptimizerStep],
        kinds[SendActivation],
        kinds[SendGrad],
        peak,
        at_loss,
    )


def _counts_of(place: _Place, schedule: type[StageSchedule]) -> _Counts:
    """The counts of a stage, without writing down long lists: beyond what fills the pipeline each micro-batch adds the same."""
    filled = max(place.num_downstream, place.num_kept) + 3
    place = _nameless(place)
    if place.num_micro_batches <= filled:
        return _few_counts(place, schedule)
    last, before = (_few_counts(place._replace(num_micro_batches=number), schedule) for number in (filled, filled - 1))
    return _Counts(*(end + (place.num_micro_batches - filled) * (end - start) for end, start in zip(last, before)))


@lru_cache(maxsize=4096)
def _few_counts(place: _Place, schedule: type[StageSchedule]) -> _Counts:
    return _count(_instructions(place, schedule))


def _micro_batch(instruction: PipeInstruction) -> int | None:
    return instruction.kwargs.get("buffer_id")


class _Linker:
    """Walks all stages forward together and writes down what they do, in the order it becomes possible."""

    def __init__(self, shape: Sequence[_Place], operations: Sequence[Sequence[_Operation]]):
        self.shape, self.operations = shape, operations
        self.position = [0] * len(shape)
        self.links: dict[int, deque[tuple[int | None, int]]] = defaultdict(deque)  # (micro-batch, message) on their way
        self.num_messages = 1
        self.durations: dict[tuple[int, int, int], int] = {}
        self.segments: list = []
        self.labels: list = []
        self._open: list = []  # the segment being written

    def link(self) -> list[str]:
        """Everything, in order. Returns what is left over, in words: [] when all stages came to their end."""
        moved = True
        while moved:
            moved = any([self._advance(stage) for stage in range(len(self.shape))])
            moved = self._meet() or moved
        self._close(())
        return [self._describe(stage, operation) for stage in range(len(self.shape)) if (operation := self._now(stage))] + [
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
            self._open.append((stage, message_in, self._write_down(stage, operation), link, message_out))
        return self.position[stage] > start

    def _take(self, stage: int, receives: tuple[bool, int] | None) -> int | None:
        """The message an operation starts with; 0: it needs none; None: it is not there yet, or another comes before it."""
        if receives is None:
            return 0
        activation, m = receives
        place = self.shape[stage]
        queue = self.links[2 * place.previous + _DOWNSTREAM if activation else 2 * place.next + _UPSTREAM]
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
            members = [stage for stage, place in enumerate(self.shape) if place.tail_of or collective[0] is OptimizerStep]
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
        self.segments.append((tuple(operations), tuple((stage, self._write_down(stage, self._now(stage))) for stage in members)))

    def _write_down(self, stage: int, operation: _Operation) -> int:
        """Label the operation, leave it behind, and return the index of its duration."""
        duration = self.durations.setdefault((stage, operation.work, len(operation.instructions)), len(self.durations))
        self.labels.append((stage, duration, operation.instructions))
        self.position[stage] += 1
        return duration


# -- what a graph costs ------------------------------------------------------------------------------------------------


class _LayersCost(NamedTuple):
    """The layers of one stage, one micro-batch. `kept_bytes`: from its forward to its backward; `working_bytes`: during a backward only."""

    forward_s: float
    backward_s: float
    num_parameters: int
    kept_bytes: float
    working_bytes: float
    output_bytes: float


class _Times(NamedTuple):
    """Seconds of one instruction on a stage's rank, by kind of work. The exchange is part of the loss, but no work of this rank."""

    instruction_s: float  # and nothing else; it is in all others too
    forward_s: float
    backward_s: float
    loss_s: float
    reduce_s: float
    step_s: float
    exchange_s: float


@dataclass(frozen=True)
class _Bill:
    """All costs of a candidate, by stage id; `links` by number: seconds a message holds the link, and its latency after that."""

    layers: Sequence[_LayersCost]
    losses: Sequence[_Loss | None]
    message_bytes: Sequence[float]  # to the next stage, and of its gradient back; 0 behind a tail
    links: Sequence[tuple[float, float]]
    times: Sequence[_Times]


class _Link(NamedTuple):
    bytes_per_s: float
    latency_s: float
    collective_s_per_byte: float

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def ring_s(self, replicas: int, num_bytes: float) -> float:
        """Around a ring until all have the `num_bytes` that each had a part of: an all-gather, or either half of an all-reduce."""
        return (replicas - 1) * self.message_s(num_bytes / replicas) + (num_bytes * self.collective_s_per_byte if replicas > 1 else 0.0)


class _Loss(NamedTuple):
    """One ComputeLoss of one tail: b own rows and the B rows of its batch, width D. The cases are those of `engine/exchange.py`."""

    branches: int  # that end in this tail
    replicas: int
    own: int  # b
    everyone: int  # B
    width: int  # D

    @property
    def blocks(self) -> int:
        """How many blocks of logits [b, B]; where one rank has everything, one matrix serves both sides."""
        return 1 if self.replicas == 1 else self.branches

    @property
    def flops(self) -> float:
        """Of each block, and of the gradient of the own rows of each branch."""
        products = 2 * self.width * (self.blocks + self.branches)
        return (products + ELEMENTWISE_FLOPS * self.blocks) * self.own * self.everyone

    @property
    def logits_bytes(self) -> float:
        return LOGITS_COPIES * FLOAT_BYTES * self.blocks * self.own * self.everyone

    @property
    def rows_bytes(self) -> float:
        """The embeddings of both branches."""
        return 2 * FLOAT_BYTES * self.everyone * self.width

    @property
    def messages(self) -> tuple[float, float]:
        """Bytes that a branch's replicas gather and that cross over: rows with their labels; one log-sum-exp per row."""
        return self.everyone * (FLOAT_BYTES * self.width + LABEL_BYTES), self.everyone * FLOAT_BYTES

    def gather_s(self, ring: _Link) -> float:
        return self.branches * sum(ring.ring_s(self.replicas, num_bytes) for num_bytes in self.messages)


def _bill(graph: StageGraph, batches: Mapping[str, BranchBatch], costs: CostModel, per_micro_batch: bool) -> _Bill:
    layers = _layers_costs(graph, batches, costs)
    losses = [_loss(stage, batches, costs, per_micro_batch) if stage.is_tail else None for stage in graph.stages]
    message_bytes = _message_bytes(graph, batches, costs, layers)
    rings = [_link(costs.machine, stage.ranks) for stage in graph.stages]
    exchange_s = _exchange_s(graph, losses, rings, costs.machine)
    times = [_times(stage, costs, *priced, exchange_s) for stage, *priced in zip(graph.stages, layers, losses, rings)]
    return _Bill(layers, losses, message_bytes, _edges(graph, costs.machine, message_bytes), times)


def _layers_costs(graph: StageGraph, batches: Mapping[str, BranchBatch], costs: CostModel) -> list[_LayersCost]:
    known, found = _remembered(costs), []
    for stage in graph.stages:
        pieces = tuple((branch, layers, batches[branch].micro_batch_size) for branch, layers in stage.layers.items())
        if pieces not in known:
            known[pieces] = _layers_cost(pieces, costs)
        found.append(known[pieces])
    return found


def _layers_cost(pieces: Sequence[tuple[str, range, int]], costs: CostModel) -> _LayersCost:
    """Add up the layers. With checkpoints only what leaves each group of layers is kept, and a group at a time is worked out again."""
    layers = [(layer, size) for branch, where, size in pieces for layer in costs.layers[branch][where.start : where.stop]]
    forward_s = sum(layer.forward_s.at(size) for layer, size in layers)
    backward_s = sum(layer.backward_s.at(size) for layer, size in layers)
    kept_bytes, working_bytes = sum(layer.activation_bytes.at(size) for layer, size in layers), 0.0
    if costs.checkpoint_interval:
        groups = [layers[i : i + costs.checkpoint_interval] for i in range(0, len(layers), costs.checkpoint_interval)]
        backward_s += forward_s
        kept_bytes = sum(group[-1][0].output_bytes.at(group[-1][1]) for group in groups)
        working_bytes = max(sum(layer.activation_bytes.at(size) for layer, size in group) for group in groups)
    return _LayersCost(
        forward_s,
        backward_s,
        sum(layer.num_parameters for layer, _ in layers),
        kept_bytes,
        working_bytes,
        sum(costs.layers[branch][where.stop - 1].output_bytes.at(size) for branch, where, size in pieces),
    )


_REMEMBERED: dict[int, dict] = {}


def _remembered(costs: CostModel) -> dict:
    """The sums of this very cost model, forgotten with it. (By identity: comparing all its layers would cost more than adding them up.)"""
    if id(costs) not in _REMEMBERED:
        _REMEMBERED[id(costs)] = {}
        weakref.finalize(costs, _REMEMBERED.pop, id(costs), None)
    return _REMEMBERED[id(costs)]


def _loss(stage: Stage, batches: Mapping[str, BranchBatch], costs: CostModel, per_micro_batch: bool) -> _Loss:
    batch = batches[stage.tail_of[0]]
    own = batch.micro_batch_size * (1 if per_micro_batch else batch.num_micro_batches)
    return _Loss(len(stage.tail_of), batch.replicas, own, own * batch.replicas, costs.embed_dim)


def _message_bytes(graph: StageGraph, batches: Mapping[str, BranchBatch], costs: CostModel, layers: Sequence[_LayersCost]) -> list[float]:
    """A stage sends what its layers put out, and in a chain the embeddings of the branch that ended above it."""
    found, passed = [], []  # passed: branches whose layers a message has gone through, by stage
    for stage, own in zip(graph.stages, layers):
        above = passed[stage.previous] if stage.previous is not None else set()
        ended = above - stage.layers.keys()
        carried = sum(FLOAT_BYTES * costs.embed_dim * batches[branch].micro_batch_size for branch in ended)
        passed.append(above | stage.layers.keys())
        found.append(0.0 if stage.is_tail else own.output_bytes + carried)
    return found


def _link(machine: Machine, ranks: Collection[int]) -> _Link:
    """The slowest link among these ranks, each named once."""
    size = machine.ranks_per_node
    across = len(ranks) > size or min(ranks) // size != max(ranks) // size
    speed = (machine.node_bytes_per_s, machine.node_latency_s) if across else (machine.link_bytes_per_s, machine.link_latency_s)
    return _Link(*speed, machine.collective_s_per_byte)


def _edges(graph: StageGraph, machine: Machine, message_bytes: Sequence[float]) -> list[tuple[float, float]]:
    """The two links that leave each stage. An edge is as slow as its slowest pair of replicas."""
    links = [(0.0, 0.0)] * (2 * len(graph.stages))
    size, one_node = machine.ranks_per_node, graph.world_size <= machine.ranks_per_node
    for stage in graph.stages:
        if stage.next is None:
            continue
        pairs = () if one_node else zip(stage.ranks, graph.stages[stage.next].ranks)
        link = _link(machine, next((pair for pair in pairs if pair[0] // size != pair[1] // size), stage.ranks[:1]))
        both = (message_bytes[stage.stage_id] / link.bytes_per_s, link.latency_s)
        links[2 * stage.stage_id + _DOWNSTREAM] = links[2 * stage.next + _UPSTREAM] = both
    return links


def _exchange_s(graph: StageGraph, losses: Sequence[_Loss | None], rings: Sequence[_Link], machine: Machine) -> float:
    """Replicas gather their rows, the branches of a fork at the same time; then each whole crosses over, one after the other.

    The log-sum-exps go the same ways, `logit_scale` crosses once.
    """
    tails = [losses[stage.stage_id] for stage in graph.tails]
    gather_s = max(loss.gather_s(rings[stage.stage_id]) for stage, loss in zip(graph.tails, tails))
    if len(tails) == 1:
        return gather_s
    crossing = _link(machine, {rank for stage in graph.tails for rank in (min(stage.ranks), max(stage.ranks))})
    return gather_s + crossing.latency_s + sum(crossing.message_s(num_bytes) for loss in tails for num_bytes in loss.messages)


def _times(stage: Stage, costs: CostModel, layers: _LayersCost, loss: _Loss | None, ring: _Link, exchange_s: float) -> _Times:
    machine, replicas = costs.machine, stage.replicas
    host_s = machine.instruction_s
    owned = layers.num_parameters / replicas if costs.sharded_optimizer else layers.num_parameters
    gradients, weights = _reduced_bytes(stage, costs, layers)
    return _Times(
        host_s,
        host_s + layers.forward_s,
        host_s + layers.backward_s,
        host_s + exchange_s + loss.flops / machine.flops_per_s if loss else 0.0,
        host_s + machine.gradient_s_per_parameter * layers.num_parameters + 2 * ring.ring_s(replicas, gradients),
        host_s + machine.optimizer_s_per_parameter * owned + (ring.ring_s(replicas, weights) if weights else 0.0),
        exchange_s,
    )


def _reduced_bytes(stage: Stage, costs: CostModel, layers: _LayersCost) -> tuple[float, float]:
    """Gradients that replicas average, and updated weights that their owners hand back under ZeRO-1."""
    weights = layers.num_parameters * costs.state.weight if costs.sharded_optimizer else 0.0
    return layers.num_parameters * costs.state.gradient, weights


# -- one pass ----------------------------------------------------------------------------------------------------------


def _durations(program: _Program, times: Sequence[_Times]) -> list[float]:
    """Seconds of every kind of operation of every stage, waiting not counted."""
    host_s = times[0].instruction_s
    return [times[stage][work] + host_s * (number - 1) for stage, work, number in program.durations]


def _run(program: _Program, seconds: Sequence[float], links: Sequence[tuple[float, float]]) -> list[float]:
    """When each operation ends, in seconds from the start of the step, in the program's order."""
    clock = [0.0] * len(program.counts)
    free = [0.0] * len(links)
    arrival = [0.0] * program.num_messages
    ends: list[float] = []
    for operations, members in program.segments:
        for stage, message_in, duration, link, message_out in operations:
            now = clock[stage]
            if arrival[message_in] > now:
                now = arrival[message_in]
            now += seconds[duration]
            clock[stage] = now
            ends.append(now)
            if link >= 0:
                holds_s, latency_s = links[link]
                left = (now if now > free[link] else free[link]) + holds_s
                free[link] = left
                arrival[message_out] = left + latency_s
        together = max((clock[stage] for stage, _ in members), default=0.0)
        for stage, duration in members:
            clock[stage] = together + seconds[duration]
            ends.append(clock[stage])
    return ends


def _busy_s(times: _Times, counts: _Counts) -> float:
    return (
        counts.forwards * times.forward_s
        + counts.backwards * times.backward_s
        + counts.losses * (times.loss_s - times.exchange_s)
        + counts.reductions * times.reduce_s
        + counts.steps * times.step_s
    )


def _stage_result(stage: Stage, bill: _Bill, counts: _Counts, busy_s: float, step_s: float, costs: CostModel) -> StageResult:
    layers = bill.layers[stage.stage_id]
    gradients, weights = _reduced_bytes(stage, costs, layers)
    bytes_in, bytes_out = _bytes_in_and_out(stage, bill)
    return StageResult(
        stage.name,
        busy_s,
        1 - busy_s / step_s if step_s else 0.0,
        _peak_bytes(stage, bill, counts, costs),
        _state_bytes(stage, layers, costs),
        counts.in_flight * layers.kept_bytes + layers.working_bytes,
        counts.activations_sent * bytes_out
        + counts.gradients_sent * bytes_in
        + counts.losses * _exchanged_bytes(stage, bill.losses)
        + (stage.replicas - 1) / stage.replicas * (2 * gradients + weights),
    )


def _peak_bytes(stage: Stage, bill: _Bill, counts: _Counts, costs: CostModel) -> float:
    loss = bill.losses[stage.stage_id]
    return _fixed_bytes(stage, bill, costs) + _activations_and_loss_bytes(bill.layers[stage.stage_id], loss, counts)


def _fixed_bytes(stage: Stage, bill: _Bill, costs: CostModel) -> float:
    """State, and two messages of each direction of an edge: one travels while the other is made or used."""
    return _state_bytes(stage, bill.layers[stage.stage_id], costs) + 4 * sum(_bytes_in_and_out(stage, bill))


def _state_bytes(stage: Stage, layers: _LayersCost, costs: CostModel) -> float:
    return layers.num_parameters * (costs.state.whole + costs.state.sharded / stage.replicas)


def _bytes_in_and_out(stage: Stage, bill: _Bill) -> tuple[float, float]:
    return bill.message_bytes[stage.previous] if stage.previous is not None else 0.0, bill.message_bytes[stage.stage_id]


def _activations_and_loss_bytes(layers: _LayersCost, loss: _Loss | None, counts: _Counts) -> float:
    """Activations and, on a tail, the loss's embeddings throughout; logits are gone before the first backward."""
    activation_bytes = counts.in_flight * layers.kept_bytes + layers.working_bytes
    if loss is None:
        return activation_bytes
    return loss.rows_bytes + max(activation_bytes, counts.in_flight_at_loss * layers.kept_bytes + loss.logits_bytes)


def _exchanged_bytes(stage: Stage, losses: Sequence[_Loss | None]) -> float:
    """Sent in one ComputeLoss: a replica's part of the ring; in a fork the wholes, one to every tail of the other branch."""
    loss = losses[stage.stage_id]
    if loss is None:
        return 0.0
    receivers = sum(other.replicas for other in losses if other is not None) - loss.replicas
    return sum(loss.messages) * (loss.branches * (loss.replicas - 1) + receivers) / loss.replicas


def _spans(program: _Program, seconds: Sequence[float], ends: Sequence[float], times: Sequence[_Times]) -> tuple[Span, ...]:
    """Take the operations apart again. An operation waits before its own seconds, in its first instruction."""
    clock, spans = [0.0] * len(times), []
    for (stage, duration, instructions), end in zip(program.labels, ends):
        now = end - seconds[duration]
        for position, (name, m, work) in enumerate(instructions):
            now = end if position == len(instructions) - 1 else min(now + times[stage][work], end)
            spans.append(Span(stage, name, m, clock[stage], now))
            clock[stage] = now
    return tuple(spans)
