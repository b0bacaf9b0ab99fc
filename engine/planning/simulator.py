"""The same instruction lists under a cost model: seconds and bytes where the executor has tensors.
Plain Python.

The replicas of a stage are alike, so one rank per stage is simulated: 1,024 ranks cost what 8 do.
What is modelled:

    any instruction    takes `instruction_s` of host time and what it works; a rank does one after the other
    send               returns at once; the messages of one direction of an edge travel one after the other
    receive            waits for its message
    ComputeLoss        all tails wait for each other, exchange embeddings, then each computes its block of the logits
    ReduceGrads        a ring over the replicas of the stage (`engine/planning/costs.py`, `Ring`)
    OptimizerStep      all stages wait for each other (overflow and norms concern all), then owners step and hand back weights
    loading            where the rank does it, part of a forward; else a step lasts at least as long as the
                       processes that load, and the cores that they share, need for it

Where replicas differ (one pair of ranks within a node, another across), the slowest counts for all.
A rank has its share of its node's network, whatever the others of the node do. Not modelled: a send that waits because too many are under
way, the memory of the loaded inputs.

The instructions come in an order that `engine/planning/ordering.py` has found; here is what they
cost, and one pass over them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, OptimizerStep, ReduceGrads

from engine.optimizer.gradient_averages import BUCKET_BYTES
from engine.planning.costs import CostModel, LayerCost, Loading, Machine, Ring
from engine.planning.ordering import (
    Counts,
    Order,
    counts_of,
    micro_batch_of,
    put_in_order,
    shape_of,
)
from engine.schedule import SCHEDULES, ComputeLoss, EmbedPass, ReplayPass
from engine.topology import Stage, StageGraph

if TYPE_CHECKING:
    from engine.planning.planner import (
        BranchBatch,
    )  # which asks the simulator: at run time it imports this module, not the reverse

FLOAT_BYTES = 4  # embeddings and logits are fp32
ELEMENTWISE_FLOPS = 10  # of the loss per logit: two exponentials, their sums and differences
LABEL_BYTES = 16  # place in the batch and index in the data, int64 each
LOGITS_COPIES = (
    4  # of a block of logits that exist at once: itself, which are positives, what is made of them
)
LOGITS_BYTES = 64 * 2**20  # what they take at most: the loss makes larger ones in blocks of rows


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
    graph: StageGraph,
    batches: Mapping[str, BranchBatch],
    schedule: str,
    costs: CostModel,
    timeline: bool = False,
) -> Simulation:
    """One step of `schedule` on `graph`. `timeline` adds the spans.

    Raises RuntimeError when instructions wait for each other for ever (a loss per micro-batch with
    numbers of micro-batches that differ between the branches). `costs` must not be changed after
    its first use: sums over its layers are remembered.
    """
    order = put_in_order(shape_of(graph, batches), SCHEDULES[schedule])
    bill = _bill(graph, batches, costs, SCHEDULES[schedule].loss_per_micro_batch)
    spans: list[Span] | None = [] if timeline else None
    ends = _run(order, bill, spans)
    busy = [_busy_s(times, counts) for times, counts in zip(bill.times, order.counts)]
    step_s = max(*ends, _loading_s(graph, batches, busy, costs))
    idle_s = sum(stage.replicas * (step_s - busy_s) for stage, busy_s in zip(graph.stages, busy))
    return Simulation(
        step_s,
        tuple(
            _stage_result(
                stage,
                bill,
                order.counts[stage.stage_id],
                busy_s=busy[stage.stage_id],
                step_s=step_s,
                costs=costs,
            )
            for stage in graph.stages
        ),
        idle_s / (graph.world_size * step_s) if step_s else 0.0,
        tuple(spans or ()),
    )


def bounds(
    graph: StageGraph, batches: Mapping[str, BranchBatch], schedule: str, costs: CostModel
) -> tuple[float, float]:
    """Seconds that a step takes at least, and the bytes that the fullest rank holds (exact),
    without ordering the instructions.

    At least what the busiest stage works, and one micro-batch's way to it and back: before a
    stage's first forward every stage above it ran one; after its last backward every stage above it
    runs one more. Then comes the optimizer step of the slowest.
    """
    every = [counts_of(place, SCHEDULES[schedule]) for place in shape_of(graph, batches)]
    bill = _bill(graph, batches, costs, SCHEDULES[schedule].loss_per_micro_batch)
    longest = 0.0
    # by stage: a forward and a backward of all stages above it, the reduction of the first of them
    above: list[tuple[float, float, float]] = []
    for stage, own, counts in zip(graph.stages, bill.times, every):
        fill_s, drain_s, reduce_s = (
            above[stage.previous] if stage.previous is not None else (0.0, 0.0, own.reduce_s)
        )
        works_s = (
            counts.forwards * own.forward_s
            + counts.replays * own.replay_s
            + counts.backwards * own.backward_s
            + counts.losses * own.loss_s
        )
        longest = max(
            longest, fill_s + works_s + own.reduce_s, fill_s + works_s + drain_s + reduce_s
        )
        above.append((fill_s + own.forward_s, drain_s + own.backward_s, reduce_s))
    return longest + max(own.step_s for own in bill.times), max(
        map(_peak_bytes, graph.stages, [bill] * len(every), every, [costs] * len(every))
    )


def room_bytes(graph: StageGraph, costs: CostModel) -> float:
    """What a rank may use of its memory beside the buffers of NCCL's communicators: those of the
    world, of its stage and, in a fork, of what its last stages have with each other. The four
    channels of an edge count as one, since they have few blocks each."""
    if graph.world_size == 1:
        return costs.machine.memory_bytes
    partners = len(graph.tails) - 1
    number = 2 + bool(graph.edges()) + (1 + 2 * partners if partners else 0)
    return costs.machine.memory_bytes - number * costs.machine.communicator_bytes


def most_kept(
    graph: StageGraph, batches: Mapping[str, BranchBatch], costs: CostModel
) -> dict[str, int]:
    """Of how many micro-batches a schedule that recomputes can keep the activations within the
    memory of the ranks, by branch; 0 where nothing fits."""
    bill = _bill(graph, batches, costs, per_micro_batch=False)
    most = {branch: batch.num_micro_batches for branch, batch in batches.items()}
    for stage, layers, loss in zip(graph.stages, bill.layers, bill.losses):
        free_bytes = (
            room_bytes(graph, costs)
            - _fixed_bytes(stage, bill, costs)
            - (loss.rows_bytes if loss else 0.0)
        )
        free_bytes -= max(layers.working_bytes, loss.work_bytes if loss else 0.0)
        # without activations or without a limit (costs that were estimated, where the layout is
        # given) all of them fit
        bounded = layers.kept_bytes and free_bytes < float("inf")
        room = int(max(0.0, free_bytes) // layers.kept_bytes) if bounded else max(most.values())
        for branch in stage.layers if graph.layout == "fork" else batches:
            most[branch] = min(most[branch], room)
    return most


# -- what a graph costs


class _LayersCost(NamedTuple):
    """The layers of one stage, one micro-batch. `replay_s`: of a second forward; `num_parameters`
    that learn, `num_locked` that do not.

    `kept_bytes`: from its forward to its backward; `working_bytes`: during a pass only.
    """

    forward_s: float
    replay_s: float
    backward_s: float
    num_parameters: int
    num_locked: int
    kept_bytes: float
    working_bytes: float
    output_bytes: float


class _Times(NamedTuple):
    """Seconds of one instruction on a stage's rank, by kind of work. The exchange is part of the
    loss, but no work of this rank."""

    instruction_s: float  # and nothing else; it is in all others too
    forward_s: float
    replay_s: float
    backward_s: float
    loss_s: float
    reduce_s: float
    step_s: float
    exchange_s: float


@dataclass(frozen=True)
class _Bill:
    """All costs of a candidate, by stage id; `links` by (sender, is it an activation?): seconds a message holds the link,
    and its latency after that."""

    layers: Sequence[_LayersCost]
    losses: Sequence[_Loss | None]
    message_bytes: Sequence[float]  # to the next stage, and of its gradient back; 0 behind a tail
    links: Mapping[tuple[int, bool], tuple[float, float]]
    times: Sequence[_Times]


class _Link(NamedTuple):
    bytes_per_s: float
    latency_s: float

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class _Matching(NamedTuple):
    """What a tail has to do with the pairs of one ComputeLoss, as in `engine/loss/matching.py`; all
    zero where there are none."""

    seconds: float = 0.0  # to score and differentiate those of its own texts
    # own tokens and their gradients, a micro-batch of images, and what some pairs keep for their
    # backward
    held_bytes: float = 0.0
    # tokens of all images, and their gradients in fp32, to and from each text tail; none where it
    # is alone
    moved_bytes: float = 0.0


class _Loss(NamedTuple):
    """One ComputeLoss of one tail: b own rows and the B rows of its batch, width D. The cases are
    those of `engine/loss/exchange.py`.

    Priced as InfoNCE with one row per sample; the sigmoid loss makes each matrix once and exchanges
    no statistics.
    """

    branches: int  # that end in this tail
    known: int  # branches whose rows it knows: these and their partners
    pairs: int  # that it takes part in
    sides: int  # of these pairs, that end here
    receivers: tuple[
        int, ...
    ]  # replicas of each tail that it sends its rows to, a number for each pair with the other side there
    replicas: int
    own: int  # b
    everyone: int  # B
    width: int  # D
    matching: _Matching

    @property
    def blocks(self) -> int:
        """How many matrices of logits [b, B]; where one rank has everything, one serves both
        sides."""
        return self.pairs if self.replicas == 1 else self.sides

    @property
    def flops(self) -> float:
        """Of each matrix, which is made twice, for the log-sum-exps and for the gradient; and of
        the gradient of the own rows of each side."""
        products = 2 * self.width * (2 * self.blocks + self.sides)
        return (products + ELEMENTWISE_FLOPS * self.blocks) * self.own * self.everyone

    @property
    def logits_bytes(self) -> float:
        return min(LOGITS_BYTES, LOGITS_COPIES * FLOAT_BYTES * self.own * self.everyone)

    @property
    def rows_bytes(self) -> float:
        """The embeddings of all branches that it knows."""
        return self.known * FLOAT_BYTES * self.everyone * self.width

    @property
    def work_bytes(self) -> float:
        """What is gone before the first backward: a block of logits; the embeddings once more, as
        they came and not yet in order; own rows, and their gradients, a few times; where one rank
        has all of them, those of the other branch, too; tokens and pairs."""
        copies = (1 if self.replicas > 1 else 2) * self.known * self.everyone + 4 * self.own
        return self.logits_bytes + copies * FLOAT_BYTES * self.width + self.matching.held_bytes

    @property
    def messages(self) -> tuple[float, float]:
        """Bytes that a branch's replicas gather and that cross over: rows with their labels; one
        log-sum-exp per row, for each pair."""
        return self.everyone * (FLOAT_BYTES * self.width + LABEL_BYTES), self.everyone * FLOAT_BYTES

    def gather_s(self, ring: Ring) -> float:
        rows, statistics = (ring.seconds(num_bytes) for num_bytes in self.messages)
        return self.branches * rows + self.sides * statistics


def _bill(
    graph: StageGraph, batches: Mapping[str, BranchBatch], costs: CostModel, per_micro_batch: bool
) -> _Bill:
    layers = _layers_costs(graph, batches, costs)
    losses = [
        _loss(graph, stage, batches, costs, per_micro_batch) if stage.is_tail else None
        for stage in graph.stages
    ]
    message_bytes = _message_bytes(graph, batches, costs, layers)
    rings = [costs.machine.ring(stage.ranks) for stage in graph.stages]
    exchange_s = _exchange_s(graph, losses, rings, costs.machine)
    pairs_s = max(
        loss.matching.seconds for loss in losses if loss
    )  # for which tails without texts wait
    times = [
        _times(
            stage,
            costs,
            own,
            loss=loss,
            ring=ring,
            exchange_s=exchange_s + (pairs_s - loss.matching.seconds if loss else 0.0),
        )
        for stage, own, loss, ring in zip(graph.stages, layers, losses, rings)
    ]
    return _Bill(layers, losses, message_bytes, _edges(graph, costs.machine, message_bytes), times)


def _layers_costs(
    graph: StageGraph, batches: Mapping[str, BranchBatch], costs: CostModel
) -> list[_LayersCost]:
    known, found = _remembered(costs), []
    for stage in graph.stages:
        pieces = tuple(
            (branch, layers, batches[branch].micro_batch_size)
            for branch, layers in stage.layers.items()
        )
        if pieces not in known:
            known[pieces] = _layers_cost(pieces, costs)
        own = known[pieces]
        if costs.loading and not costs.loading.workers:
            sizes = {branch: batches[branch].micro_batch_size for branch in stage.loads}
            own = own._replace(forward_s=own.forward_s + _load_s(sizes, costs.loading))
        found.append(own)
    return found


def _load_s(samples: Mapping[str, float], loading: Loading) -> float:
    """Of one core, for so many samples of each branch."""
    return sum(number * loading.sample_s[branch] for branch, number in samples.items())


def _loading_s(
    graph: StageGraph,
    batches: Mapping[str, BranchBatch],
    busy: Sequence[float],
    costs: CostModel,
) -> float:
    """How long a step lasts at least for the processes that load. `busy`: seconds that a rank of
    each stage computes."""
    loading = costs.loading
    if loading is None or not loading.workers:
        return 0.0
    of_ranks = [
        _load_s({b: batches[b].global_batch_size / stage.replicas for b in stage.loads}, loading)
        for stage in graph.stages
    ]
    on_cores = sum(
        stage.replicas * (load_s + (busy_s if loading.shared else 0.0))
        for stage, load_s, busy_s in zip(graph.stages, of_ranks, busy)
    )
    nodes = -(-graph.world_size // costs.machine.ranks_per_node)
    return max(max(of_ranks) / loading.workers, on_cores / (nodes * loading.cores))


def _layers_cost(pieces: Sequence[tuple[str, range, int]], costs: CostModel) -> _LayersCost:
    """Add up the layers. With checkpoints only what leaves each group of layers is kept, and a
    group at a time is worked out again."""
    layers = [
        (layer, size)
        for branch, where, size in pieces
        for layer in costs.layers[branch][where.start : where.stop]
    ]
    learning = [(layer, size) for layer, size in layers if layer.differentiated]
    forward_s = sum(layer.forward_s.at(size) for layer, size in layers)
    replay_s = sum(layer.forward_s.at(size) for layer, size in learning)
    backward_s = sum(layer.backward_s.at(size) for layer, size in learning)
    kept_bytes = sum(layer.activation_bytes.at(size) for layer, size in learning)
    working_bytes = max(
        (layer.activation_bytes.at(size) for layer, size in layers if not layer.differentiated),
        default=0.0,
    )
    if costs.checkpoint_interval and learning:
        groups = [
            learning[i : i + costs.checkpoint_interval]
            for i in range(0, len(learning), costs.checkpoint_interval)
        ]
        backward_s += replay_s
        kept_bytes = sum(group[-1][0].output_bytes.at(group[-1][1]) for group in groups)
        working_bytes = max(
            working_bytes,
            *(sum(layer.activation_bytes.at(size) for layer, size in group) for group in groups),
        )
    return _LayersCost(
        forward_s=forward_s,
        replay_s=replay_s,
        backward_s=backward_s,
        num_parameters=sum(layer.num_trained for layer, _ in layers),
        num_locked=sum(layer.num_parameters - layer.num_trained for layer, _ in layers),
        kept_bytes=kept_bytes,
        working_bytes=working_bytes,
        output_bytes=sum(
            costs.layers[branch][where.stop - 1].output_bytes.at(size)
            for branch, where, size in pieces
        ),
    )


_REMEMBERED: dict[int, dict] = {}


def _remembered(costs: CostModel) -> dict:
    """The sums of this very cost model, forgotten with it. (By identity: comparing all its layers
    would cost more than adding them up.)"""
    if id(costs) not in _REMEMBERED:
        _REMEMBERED[id(costs)] = {}
        weakref.finalize(costs, _REMEMBERED.pop, id(costs), None)
    return _REMEMBERED[id(costs)]


def _loss(
    graph: StageGraph,
    stage: Stage,
    batches: Mapping[str, BranchBatch],
    costs: CostModel,
    per_micro_batch: bool,
) -> _Loss:
    here = set(stage.tail_of)
    pairs = [set(pair) for pair in costs.all_compared if here & set(pair)]
    elsewhere = [branch for pair in pairs for branch in pair - here]
    receivers = tuple(graph.tail(branch).replicas for branch in elsewhere)
    sides = sum(len(pair & here) for pair in pairs)
    batch = batches[stage.tail_of[0]]
    own = batch.micro_batch_size * (1 if per_micro_batch else batch.num_micro_batches)
    matching = _matching(stage, batch, own, costs, costs.pairs) if costs.pairs else _Matching()
    return _Loss(
        branches=len(here),
        known=len(here | set(elsewhere)),
        pairs=len(pairs),
        sides=sides,
        receivers=receivers,
        replicas=batch.replicas,
        own=own,
        everyone=own * batch.replicas,
        width=costs.embed_dim,
        matching=matching,
    )


def _matching(
    stage: Stage, batch: BranchBatch, own: int, costs: CostModel, pairs: LayerCost
) -> _Matching:
    first, second = tuple(costs.token_bytes) or costs.all_compared[0]
    size, alone = (
        batch.micro_batch_size,
        {first, second} <= set(stage.tail_of) and batch.replicas == 1,
    )
    with_sums = 1 + FLOAT_BYTES / costs.state.weight  # gradients are added up in fp32
    tokens = {first: 0.0, second: 0.0, **costs.token_bytes}
    held_bytes = 2 * own * tokens[first] if first in stage.tail_of else 0.0
    if second not in stage.tail_of:
        return _Matching(held_bytes=held_bytes)
    held_bytes += (2 + with_sums) * own * tokens[second]  # a second time, padded to the longest
    held_bytes += with_sums * size * tokens[first] + pairs.activation_bytes.at(size)
    moved_bytes = 0.0 if alone else with_sums * own * batch.replicas * tokens[first]
    return _Matching(own / size * pairs.training_s(size), held_bytes, moved_bytes)


def _message_bytes(
    graph: StageGraph,
    batches: Mapping[str, BranchBatch],
    costs: CostModel,
    layers: Sequence[_LayersCost],
) -> list[float]:
    """A stage sends what its layers put out, and in a chain the embeddings of the branch that ended
    above it."""
    found = []
    passed: list[set[str]] = []  # branches whose layers a message has gone through, by stage
    for stage, own in zip(graph.stages, layers):
        above = passed[stage.previous] if stage.previous is not None else set()
        ended = above - stage.layers.keys()
        carried = sum(
            FLOAT_BYTES * costs.embed_dim * batches[branch].micro_batch_size for branch in ended
        )
        passed.append(above | stage.layers.keys())
        found.append(0.0 if stage.is_tail else own.output_bytes + carried)
    return found


def _link(machine: Machine, ranks: Collection[int]) -> _Link:
    """The slowest between two of these ranks."""
    size = machine.ranks_per_node
    if min(ranks) // size != max(ranks) // size:
        return _Link(machine.node_bytes_per_s, machine.node_latency_s)
    return _Link(machine.link_bytes_per_s, machine.link_latency_s)


def _edges(
    graph: StageGraph, machine: Machine, message_bytes: Sequence[float]
) -> dict[tuple[int, bool], tuple[float, float]]:
    """The links of the stages, two for each edge. An edge is as slow as its slowest pair of replicas."""
    links = {}
    size, one_node = machine.ranks_per_node, graph.world_size <= machine.ranks_per_node
    for stage in graph.stages:
        if stage.next is None:
            continue
        pairs = () if one_node else zip(stage.ranks, graph.stages[stage.next].ranks)
        link = _link(
            machine,
            next((pair for pair in pairs if pair[0] // size != pair[1] // size), stage.ranks[:1]),
        )
        both = (message_bytes[stage.stage_id] / link.bytes_per_s, link.latency_s)
        links[stage.stage_id, True] = links[stage.next, False] = both
    return links


def _exchange_s(
    graph: StageGraph, losses: Sequence[_Loss | None], rings: Sequence[Ring], machine: Machine
) -> float:
    """Replicas gather their rows, the branches of a fork at the same time; then each whole crosses
    over, one after the other.

    The log-sum-exps go the same ways, `logit_scale` crosses once.
    """
    tails = [loss for loss in losses if loss is not None]
    gather_s = max(loss.gather_s(rings[stage.stage_id]) for stage, loss in zip(graph.tails, tails))
    crossing = _link(
        machine, {rank for stage in graph.tails for rank in (min(stage.ranks), max(stage.ranks))}
    )
    gather_s += max(loss.matching.moved_bytes for loss in tails) / crossing.bytes_per_s
    if len(tails) == 1:
        return gather_s
    return (
        gather_s
        + crossing.latency_s
        + sum(
            crossing.message_s(num_bytes)
            for loss in tails
            for _ in loss.receivers
            for num_bytes in loss.messages
        )
    )


def _times(
    stage: Stage,
    costs: CostModel,
    layers: _LayersCost,
    loss: _Loss | None,
    ring: Ring,
    exchange_s: float,
) -> _Times:
    machine, replicas = costs.machine, stage.replicas
    host_s = machine.instruction_s
    owned = layers.num_parameters / replicas if costs.sharded_optimizer else layers.num_parameters
    gradients, weights = _reduced_bytes(stage, costs, layers)
    reduced_s = 2 * ring.seconds(gradients)
    if costs.early_averages:
        # they begin when a bucket is complete, and the last bucket when the backward is over
        bucket = min(1.0, BUCKET_BYTES / max(1.0, gradients))
        reduced_s = max(bucket * reduced_s, reduced_s - (1 - bucket) * layers.backward_s)
    return _Times(
        instruction_s=host_s,
        forward_s=host_s + layers.forward_s,
        replay_s=host_s + layers.replay_s,
        backward_s=host_s + layers.backward_s,
        loss_s=host_s + exchange_s + loss.flops / machine.flops_per_s + loss.matching.seconds
        if loss
        else 0.0,
        reduce_s=host_s + machine.gradient_s_per_parameter * layers.num_parameters + reduced_s,
        step_s=host_s
        + machine.optimizer_s_per_parameter * owned
        + (ring.seconds(weights) if weights else 0.0),
        exchange_s=exchange_s,
    )


def _reduced_bytes(stage: Stage, costs: CostModel, layers: _LayersCost) -> tuple[float, float]:
    """Gradients that replicas average, and updated weights that their owners hand back under
    ZeRO-1."""
    weights = layers.num_parameters * costs.state.weight if costs.sharded_optimizer else 0.0
    return layers.num_parameters * costs.state.gradient, weights


# -- one pass


# by kind of instruction the field of `_Times`
_WORK = {
    ForwardPass: "forward_s",
    EmbedPass: "forward_s",
    ReplayPass: "replay_s",
    BackwardPass: "backward_s",
    ComputeLoss: "loss_s",
    ReduceGrads: "reduce_s",
    OptimizerStep: "step_s",
}


def _run(order: Order, bill: _Bill, spans: list[Span] | None = None) -> list[float]:
    """When each stage is done, in seconds from the start of the step. `spans`: gets one for each
    instruction of each stage."""
    clock = [0.0] * len(bill.times)
    free: dict[tuple[int, bool], float] = defaultdict(float)  # when a link can take a message
    arrivals: dict[tuple[int, bool], deque[float]] = defaultdict(deque)
    for stages, instruction, receives, sends in order.events:
        kind = type(instruction)
        together = max([clock[stage] for stage in stages])
        for stage in stages:
            came, now = clock[stage], together
            if receives:
                now = max(now, arrivals[receives].popleft())
            now += getattr(bill.times[stage], _WORK.get(kind, "instruction_s"))
            clock[stage] = now
            if sends:
                holds_s, latency_s = bill.links[sends]
                free[sends] = max(now, free[sends]) + holds_s
                arrivals[sends].append(free[sends] + latency_s)
            if spans is not None:
                spans.append(Span(stage, instruction.name, micro_batch_of(instruction), came, now))
    return clock


def _busy_s(times: _Times, counts: Counts) -> float:
    return (
        counts.forwards * times.forward_s
        + counts.replays * times.replay_s
        + counts.backwards * times.backward_s
        + counts.losses * (times.loss_s - times.exchange_s)
        + counts.reductions * times.reduce_s
        + counts.steps * times.step_s
    )


def _stage_result(
    stage: Stage, bill: _Bill, counts: Counts, busy_s: float, step_s: float, costs: CostModel
) -> StageResult:
    layers = bill.layers[stage.stage_id]
    gradients, weights = _reduced_bytes(stage, costs, layers)
    bytes_in, bytes_out = _bytes_in_and_out(stage, bill)
    return StageResult(
        name=stage.name,
        busy_s=busy_s,
        idle_fraction=1 - busy_s / step_s if step_s else 0.0,
        peak_bytes=_peak_bytes(stage, bill, counts, costs),
        state_bytes=_state_bytes(stage, layers, costs),
        activation_bytes=_held_bytes(layers, counts),
        sent_bytes=counts.activations_sent * bytes_out
        + counts.gradients_sent * bytes_in
        + counts.losses * _exchanged_bytes(stage, bill.losses)
        + (stage.replicas - 1) / stage.replicas * (2 * gradients + weights),
    )


def _peak_bytes(stage: Stage, bill: _Bill, counts: Counts, costs: CostModel) -> float:
    loss = bill.losses[stage.stage_id]
    return _fixed_bytes(stage, bill, costs) + _activations_and_loss_bytes(
        bill.layers[stage.stage_id], loss, counts
    )


def _fixed_bytes(stage: Stage, bill: _Bill, costs: CostModel) -> float:
    """State, and two messages of each direction of an edge: one travels while the other is made or
    used."""
    return _state_bytes(stage, bill.layers[stage.stage_id], costs) + 4 * sum(
        _bytes_in_and_out(stage, bill)
    )


def _state_bytes(stage: Stage, layers: _LayersCost, costs: CostModel) -> float:
    learning = layers.num_parameters * (costs.state.whole + costs.state.sharded / stage.replicas)
    return learning + layers.num_locked * costs.state.weight


def _bytes_in_and_out(stage: Stage, bill: _Bill) -> tuple[float, float]:
    return bill.message_bytes[
        stage.previous
    ] if stage.previous is not None else 0.0, bill.message_bytes[stage.stage_id]


def _activations_and_loss_bytes(layers: _LayersCost, loss: _Loss | None, counts: Counts) -> float:
    """Activations and, on a tail, the loss's embeddings throughout; logits and pairs are gone
    before the first backward."""
    activation_bytes = _held_bytes(layers, counts)
    if loss is None:
        return activation_bytes
    at_loss_bytes = counts.in_flight_at_loss * layers.kept_bytes + loss.work_bytes
    return loss.rows_bytes + max(activation_bytes, at_loss_bytes)


def _held_bytes(layers: _LayersCost, counts: Counts) -> float:
    """Activations at most."""
    return counts.in_flight * layers.kept_bytes + layers.working_bytes


def _exchanged_bytes(stage: Stage, losses: Sequence[_Loss | None]) -> float:
    """Sent in one ComputeLoss: a replica's part of the ring; in a fork the wholes, one to every
    tail of a partner."""
    loss = losses[stage.stage_id]
    if loss is None:
        return 0.0
    rows, statistics = loss.messages
    around = (loss.replicas - 1) * (loss.branches * rows + loss.sides * statistics)
    return (
        loss.matching.moved_bytes + around + sum(loss.receivers) * (rows + statistics)
    ) / loss.replicas
