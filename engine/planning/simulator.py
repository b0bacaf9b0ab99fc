"""The same instruction lists under a cost model: seconds and bytes where the executor has tensors.
Plain Python.

The replicas of a stage are alike, so one rank per stage is simulated: 1,024 ranks cost what 8 do.
What is modelled:

    any instruction    takes `instruction_s` of host time and what it works; a rank does one after
                       the other
    send               returns at once; the messages of one direction of an edge travel one after
                       the other
    receive            waits for its message
    ComputeLoss        all last stages wait for each other
    OptimizerStep      all stages wait for each other (overflow and norms concern all)
    loading            where the rank does it, part of a forward; else a step lasts at least as
                       long as the processes that load, and the cores that they share, need for it

What an instruction works is in `engine/planning/stage_costs.py`. A rank has its share of its node's
network, whatever the others of the node do. Not modelled: a send that waits because too many are
under way, the memory of the loaded inputs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Batches
from engine.planning.costs import CostModel
from engine.planning.instructions import counted, counts_of, instructions_of, micro_batch_of
from engine.planning.stage_costs import StageCosts, loading_s, stage_costs
from engine.schedule import (
    SCHEDULES,
    BackwardPass,
    ComputeLoss,
    EmbedPass,
    ForwardPass,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReplayPass,
    SendActivation,
    SendGrad,
    StageSchedule,
)
from engine.topology import Stage, StageGraph

# by kind of instruction the field of `StageCosts`
_WORK = {
    ForwardPass: "forward_s",
    EmbedPass: "forward_s",
    ReplayPass: "replay_s",
    BackwardPass: "backward_s",
    ComputeLoss: "loss_s",
    ReduceGrads: "reduce_s",
    OptimizerStep: "step_s",
}
# between stages; the replicas of one stage are alike and wait for nobody
COLLECTIVES = (ComputeLoss, OptimizerStep)
_Link = tuple[int, bool]  # one direction of an edge: (sender, is it an activation?)


@dataclass(frozen=True)
class Span:
    """One instruction of one stage, from when the rank comes to it until it goes on; waiting is
    inside."""

    stage_id: int
    name: str  # of the instruction's class
    micro_batch: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageResult:
    """One rank of a stage over one step.

    `busy_s`: passes, the loss's arithmetic, reduction and optimizer step, without waiting.
    `peak_bytes` is everything: state, activations (at their peak: `activation_bytes`), messages,
    embeddings and logits. `sent_bytes`: along edges, in the loss's exchange and over the replicas.
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


def simulate(
    graph: StageGraph, batches: Batches, schedule: str, costs: CostModel, timeline: bool = False
) -> Simulation:
    """One step of `schedule` on `graph`. `timeline` adds the spans.

    Raises RuntimeError when instructions wait for each other for ever (a loss per micro-batch with
    numbers of micro-batches that differ between the branches).
    """
    kind = SCHEDULES[schedule]
    paid = stage_costs(graph, batches, costs, kind.loss_per_micro_batch)
    spans: list[Span] | None = [] if timeline else None
    ends = _run(graph, batches, kind, paid, spans)
    counts = [counted(*_list_of(stage, batches, kind)) for stage in graph.stages]
    busy = [own.busy_s(number) for own, number in zip(paid, counts)]
    step_s = max(*ends, _loading_s(graph, batches, busy, costs))
    idle_s = sum(stage.replicas * (step_s - busy_s) for stage, busy_s in zip(graph.stages, busy))
    return Simulation(
        step_s,
        tuple(
            StageResult(
                name=stage.name,
                busy_s=busy_s,
                idle_fraction=1 - busy_s / step_s if step_s else 0.0,
                peak_bytes=own.peak_bytes(number),
                state_bytes=own.state_bytes,
                activation_bytes=own.activation_bytes(number),
                sent_bytes=own.sent_bytes(number),
            )
            for stage, own, number, busy_s in zip(graph.stages, paid, counts, busy, strict=True)
        ),
        idle_s / (graph.world_size * step_s) if step_s else 0.0,
        tuple(spans or ()),
    )


def bounds(
    graph: StageGraph, batches: Batches, schedule: str, costs: CostModel
) -> tuple[float, float]:
    """Seconds that a step takes at least, and the bytes that the fullest rank holds (exact),
    without running the instructions.

    At least what the busiest stage works, and one micro-batch's way to it and back: before a
    stage's first forward every stage above it ran one; after its last backward every stage above it
    runs one more. Then comes the optimizer step of the slowest.
    """
    kind = SCHEDULES[schedule]
    paid = stage_costs(graph, batches, costs, kind.loss_per_micro_batch)
    longest_s = most_bytes = 0.0
    # by stage: a forward and a backward of all stages above it, the reduction of the first of them
    above: list[tuple[float, float, float]] = []
    for stage, own in zip(graph.stages, paid):
        counts = counts_of(stage, batches[next(iter(stage.layers))], kind)
        fill_s, drain_s, reduce_s = (
            above[stage.previous] if stage.previous is not None else (0.0, 0.0, own.reduce_s)
        )
        works_s = fill_s + own.works_s(counts)
        longest_s = max(longest_s, works_s + own.reduce_s, works_s + drain_s + reduce_s)
        most_bytes = max(most_bytes, own.peak_bytes(counts))
        above.append((fill_s + own.forward_s, drain_s + own.backward_s, reduce_s))
    return longest_s + max(own.step_s for own in paid), most_bytes


def room_bytes(graph: StageGraph, costs: CostModel) -> float:
    """What a rank may use of its memory beside the buffers of NCCL's communicators."""
    if graph.world_size == 1:
        return costs.machine.memory_bytes
    number = max(_num_communicators(graph, stage, costs) for stage in graph.stages)
    return costs.machine.memory_bytes - number * costs.machine.communicator_bytes


def _num_communicators(graph: StageGraph, stage: Stage, costs: CostModel) -> int:
    """Of the first rank of a stage, which has the most: those of the world, of its replicas, and of
    what last stages have with each other, as `Communicator` makes them. The four channels of an edge
    count as one, since they have few blocks each."""
    has_edges = stage.previous is not None or stage.next is not None
    number = 1 + (stage.replicas > 1) + has_edges
    for other in graph.last_stages if stage.is_last else ():
        if other is not stage:
            number += 1 if other.replicas == stage.replicas else 2  # each way, in the same group
    if costs.pairs is not None:
        ends = {
            graph.last_stage(branch).stage_id: graph.last_stage(branch) for branch in costs.matched
        }
        # else the group is that of the replicas, or that in which one rank gives to all others
        if stage.stage_id in ends and len(ends) > 1:
            number += min(end.replicas for end in ends.values()) > 1
    return number


def most_kept(graph: StageGraph, batches: Batches, costs: CostModel) -> dict[str, int]:
    """Of how many micro-batches a schedule that recomputes can keep the activations within the
    memory of the ranks, by branch; 0 where nothing fits."""
    most = {branch: batch.num_micro_batches for branch, batch in batches.items()}
    for stage, own in zip(graph.stages, stage_costs(graph, batches, costs, False)):
        layers, loss = own.layers, own.loss
        free_bytes = room_bytes(graph, costs) - own.fixed_bytes - own.whole_bytes
        free_bytes -= max(layers.working_bytes, loss.work_bytes if loss else 0.0)
        free_bytes -= loss.rows_bytes if loss else 0.0
        # without activations or without a limit (costs that were estimated, where the layout is
        # given) all of them fit
        if layers.kept_bytes and free_bytes < float("inf"):
            room = int(max(0.0, free_bytes) // layers.kept_bytes)
            for branch in stage.layers if graph.layout == "fork" else batches:
                most[branch] = min(most[branch], room)
    return most


def _list_of(
    stage: Stage, batches: Batches, schedule: type[StageSchedule]
) -> tuple[Stage, int, int, type[StageSchedule]]:
    """What its instructions depend on."""
    batch = batches[next(iter(stage.layers))]
    return stage.kind, batch.num_micro_batches, batch.num_kept, schedule


def _loading_s(
    graph: StageGraph, batches: Batches, busy: Sequence[float], costs: CostModel
) -> float:
    """How long a step lasts at least for the processes that load. `busy`: seconds that a rank of
    each stage computes."""
    loading = costs.loading
    if loading is None or not loading.workers:
        return 0.0
    of_ranks = [
        loading_s({b: batches[b].global_batch_size / stage.replicas for b in stage.loads}, loading)
        for stage in graph.stages
    ]
    on_cores = sum(
        stage.replicas * (load_s + (busy_s if loading.shared else 0.0))
        for stage, load_s, busy_s in zip(graph.stages, of_ranks, busy)
    )
    nodes = -(-graph.world_size // costs.machine.ranks_per_node)
    return max(max(of_ranks) / loading.workers, on_cores / (nodes * loading.cores))


# -- the instructions of all stages


def _run(
    graph: StageGraph,
    batches: Batches,
    schedule: type[StageSchedule],
    paid: Sequence[StageCosts],
    spans: list[Span] | None = None,
) -> list[float]:
    """When each stage is done, in seconds from the start of the step. `spans`: gets one for each
    instruction of each stage."""
    left = [deque(instructions_of(*_list_of(s, batches, schedule))) for s in graph.stages]
    clock = [0.0] * len(left)
    free: dict[_Link, float] = defaultdict(float)  # when a link can take a message
    # (micro-batch, seconds of its arrival)
    arrivals: dict[_Link, deque[tuple[int, float]]] = defaultdict(deque)

    def work(number: int, start_s: float) -> PipeInstruction:
        """The next instruction of this stage, from `start_s` on."""
        instruction, came_s = left[number].popleft(), clock[number]
        end_s = start_s + getattr(paid[number], _WORK.get(type(instruction), "instruction_s"))
        clock[number] = end_s
        if spans is not None:
            spans.append(Span(number, instruction.name, micro_batch_of(instruction), came_s, end_s))
        return instruction

    moved = True
    while moved:
        moved = False
        for stage in graph.stages:
            number = stage.stage_id
            while left[number] and type(left[number][0]) not in COLLECTIVES:
                start_s = clock[number]
                if (link := _receives(stage, left[number][0])) is not None:
                    on_way, m = arrivals[link], left[number][0].buffer_id
                    if not on_way or on_way[0][0] != m:
                        break  # not there yet, another one comes before it, or nobody sends it
                    start_s = max(start_s, on_way.popleft()[1])
                done, moved = work(number, start_s), True
                if type(done) is SendActivation or type(done) is SendGrad:
                    link = (number, type(done) is SendActivation)
                    message = paid[number].down if link[1] else paid[number].up
                    free[link] = max(clock[number], free[link]) + message.holds_s
                    arrivals[link].append((done.buffer_id, free[link] + message.latency_s))
        if members := _met(graph, left):
            start_s, moved = max(clock[number] for number in members), True
            for number in members:
                work(number, start_s)
    waits = [
        f"{stage.name} in {own[0].name}{_of_micro_batch(own[0])}"
        for stage, own in zip(graph.stages, left)
        if own
    ]
    waits += [
        f"{graph.stages[sender].name} sends micro-batch {m} and nobody receives it"
        for (sender, _), on_way in arrivals.items()
        for m, _ in on_way
    ]
    if waits:
        raise RuntimeError(
            f"{schedule.__name__}: these instructions wait for ever: {'; '.join(waits)}"
        )
    return clock


def _receives(stage: Stage, instruction: PipeInstruction) -> _Link | None:
    """What the message of this instruction comes on; -1: from nobody."""
    kind = type(instruction)
    if kind is not RecvActivation and kind is not RecvGrad:
        return None
    sender = stage.previous if kind is RecvActivation else stage.next
    return (-1 if sender is None else sender, kind is RecvActivation)


def _met(graph: StageGraph, left: Sequence[deque[PipeInstruction]]) -> list[int]:
    """The members of a collective to which all of them have come: of a loss the last stages, of the
    optimizer step all. None where there is no such."""
    heads = [(type(own[0]), micro_batch_of(own[0])) if own else None for own in left]
    for first in dict.fromkeys(head for head in heads if head and head[0] in COLLECTIVES):
        stages = graph.last_stages if first[0] is ComputeLoss else graph.stages
        if all(heads[stage.stage_id] == first for stage in stages):
            return [stage.stage_id for stage in stages]
    return []


def _of_micro_batch(instruction: PipeInstruction) -> str:
    m = micro_batch_of(instruction)
    return "" if m is None else f" of micro-batch {m}"
