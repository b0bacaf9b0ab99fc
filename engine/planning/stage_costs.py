"""What one rank of each stage pays under a cost model: seconds of its instructions, bytes that it
holds and sends. Plain Python.

    passes             the stage's layers; a rank that loads by itself does it before the forward
    ComputeLoss        the exchange of embeddings, which is no work of this rank, then its block of
                       the logits
    ReduceGrads        a ring over the replicas of the stage (`engine/planning/costs.py`, `Ring`);
                       under ZeRO-2 in each BackwardPass
    OptimizerStep      owners step and hand back weights

Where replicas differ (one pair of ranks within a node, another across), the slowest counts for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.backend.gradient_reducer import BUCKET_BYTES
from engine.batch import Batches, BranchBatch
from engine.planning.costs import CostModel, FurtherRows, Loading, Machine, Ring
from engine.planning.instructions import Counts
from engine.topology import Stage, StageGraph

FLOAT_BYTES = 4  # embeddings and logits are fp32
ELEMENTWISE_FLOPS = 10  # of the loss per logit: two exponentials, their sums and differences
LABEL_BYTES = 16  # place in the batch and index in the data, int64 each
# of a block of logits that exist at once: itself, which are positives, what is made of them
LOGITS_COPIES = 4


class LayersCost(NamedTuple):
    """The layers of one stage, one micro-batch. `replay_s`: of a second forward; `num_parameters`
    that learn, `num_muon` of these in matrices that Muon steps, `num_frozen` that do not.

    `kept_bytes`: from its forward to its backward; `working_bytes`: during a pass only.
    """

    forward_s: float
    replay_s: float
    backward_s: float
    num_parameters: int
    num_muon: int
    num_frozen: int
    largest_layer: int  # its parameters
    kept_bytes: float
    working_bytes: float
    output_bytes: float


class Matching(NamedTuple):
    """What a last stage has to do with the pairs of one ComputeLoss, as in
    `engine/loss/matching.py`; all zero where there are none."""

    seconds: float = 0.0  # to score and differentiate those of its own texts
    # own tokens and their gradients, a micro-batch of images, and what some pairs keep for their
    # backward
    held_bytes: float = 0.0
    # tokens of all images, and their gradients in fp32, to and from each replica where the texts
    # end; none where it is alone
    moved_bytes: float = 0.0


class Rows(NamedTuple):
    """Of one name, in one ComputeLoss: those of a replica, if the last stage makes them, and all of
    the batch."""

    own: float
    everyone: float
    here: bool


class Compared(NamedTuple):
    """A pair that the last stage takes part in; `receivers`: replicas of the other last stage,
    where the other side is there."""

    sides: tuple[Rows, Rows]
    receivers: int


class Loss(NamedTuple):
    """One ComputeLoss of one last stage. The cases are those of `engine/loss/exchange.py`.

    Priced as InfoNCE with one row per sample, beside which there may be further rows; the sigmoid
    loss makes each matrix once and exchanges no statistics.
    """

    known: tuple[Rows, ...]  # its own, and those that they are compared with
    pairs: tuple[Compared, ...]
    replicas: int
    width: int  # D
    matching: Matching
    block_bytes: float  # of logits that exist at once, at most

    @property
    def here(self) -> list[Rows]:
        return [rows for rows in self.known if rows.here]

    def _matrices(self) -> list[tuple[int, float]]:
        """(how many sides it serves, its elements) of each matrix of logits [own, everyone]. Where
        one rank has everything, one serves both sides."""
        found = []
        for (first, second), _ in self.pairs:
            if first.here and second.here and self.replicas == 1:
                found.append((2, first.own * second.everyone))
            else:
                ways = ((first, second), (second, first))
                found += [(1, side.own * other.everyone) for side, other in ways if side.here]
        return found

    @property
    def flops(self) -> float:
        """Of each matrix, which is made twice, for the log-sum-exps and for the gradient; and of
        the gradient of the own rows of each side."""
        return sum(
            (2 * self.width * (2 + sides) + ELEMENTWISE_FLOPS) * size
            for sides, size in self._matrices()
        )

    @property
    def rows_bytes(self) -> float:
        """All embeddings that it knows."""
        return FLOAT_BYTES * self.width * sum(rows.everyone for rows in self.known)

    @property
    def work_bytes(self) -> float:
        """What is gone before the first backward: a block of logits; the embeddings once more, as
        they came and not yet in order; own rows, and their gradients, a few times; where one rank
        has all of them, those of the other branch, too; tokens and pairs."""
        largest = max(size for _, size in self._matrices())
        logits_bytes = min(self.block_bytes, LOGITS_COPIES * FLOAT_BYTES * largest)
        copies = (1 if self.replicas > 1 else 2) * sum(rows.everyone for rows in self.known)
        copies += 4 * max(
            sum(side.own for side in sides if side.here) / sum(side.here for side in sides)
            for sides, _ in self.pairs
        )
        return logits_bytes + copies * FLOAT_BYTES * self.width + self.matching.held_bytes

    def _row_bytes(self, rows: Rows) -> float:
        """Of all rows with their labels, as they are gathered and cross over."""
        return rows.everyone * (FLOAT_BYTES * self.width + LABEL_BYTES)

    def gathered(self) -> list[float]:
        """Bytes of each message that goes round the replicas: rows, and a log-sum-exp per row for
        each pair."""
        statistics = [s.everyone * FLOAT_BYTES for sides, _ in self.pairs for s in sides if s.here]
        return [*map(self._row_bytes, self.here), *statistics]

    def crossing(self) -> list[tuple[int, float]]:
        """(replicas of the other last stage, bytes) of each whole that crosses over."""
        return [
            (receivers, num_bytes)
            for sides, receivers in self.pairs
            for side in sides
            if side.here and receivers
            for num_bytes in (self._row_bytes(side), side.everyone * FLOAT_BYTES)
        ]

    @property
    def sent_bytes(self) -> float:
        """By one replica: its part of the ring; in a fork of the wholes, one to every last stage of
        a partner."""
        around = (self.replicas - 1) * sum(self.gathered())
        across = sum(receivers * num_bytes for receivers, num_bytes in self.crossing())
        return (self.matching.moved_bytes + around + across) / self.replicas


class Message(NamedTuple):
    """From a stage to a neighbour: its bytes, seconds that it holds the link, and its latency after
    that."""

    num_bytes: float = 0.0
    holds_s: float = 0.0
    latency_s: float = 0.0


class StageCosts(NamedTuple):
    """One rank of a stage: seconds of an instruction by kind of work, and bytes."""

    instruction_s: float  # host time, which is in all others too
    forward_s: float
    replay_s: float
    backward_s: float
    loss_s: float
    exchange_s: float  # the part of `loss_s` that is no work of this rank
    reduce_s: float
    step_s: float
    layers: LayersCost
    loss: Loss | None
    down: Message  # an activation to the next stage, and its gradient back
    up: Message  # a gradient to the stage before, and its activation from there
    state_bytes: float
    # that it sends to other replicas: in a step, gradients, and weights under ZeRO; in each backward,
    # gradients under ZeRO-2 and ZeRO-3; in each pass, weights under ZeRO-3
    averaged_bytes: float
    backward_bytes: float
    pass_bytes: float
    whole_bytes: float  # of layers that are whole for a while under ZeRO-3

    def works_s(self, counts: Counts) -> float:
        """Of the passes and the losses of a step."""
        return (
            counts.forwards * self.forward_s
            + counts.replays * self.replay_s
            + counts.backwards * self.backward_s
            + counts.losses * self.loss_s
        )

    def busy_s(self, counts: Counts) -> float:
        return (
            self.works_s(counts)
            - counts.losses * self.exchange_s
            + counts.reductions * self.reduce_s
            + counts.steps * self.step_s
        )

    @property
    def fixed_bytes(self) -> float:
        """State, and two messages of each direction of an edge: one travels while the other is made
        or used."""
        return self.state_bytes + 4 * (self.up.num_bytes + self.down.num_bytes)

    def activation_bytes(self, counts: Counts) -> float:
        """At most."""
        kept_bytes = counts.in_flight * self.layers.kept_bytes
        return kept_bytes + self.layers.working_bytes + self.whole_bytes

    def peak_bytes(self, counts: Counts) -> float:
        """Everything. A last stage has the loss's embeddings throughout; logits and pairs are gone
        before the first backward."""
        held_bytes = self.activation_bytes(counts)
        if self.loss is not None:
            at_loss_bytes = counts.in_flight_at_loss * self.layers.kept_bytes + self.loss.work_bytes
            held_bytes = self.loss.rows_bytes + max(held_bytes, at_loss_bytes)
        return self.fixed_bytes + held_bytes

    def sent_bytes(self, counts: Counts) -> float:
        exchanged = counts.losses * self.loss.sent_bytes if self.loss else 0.0
        down = counts.activations_sent * self.down.num_bytes
        up = counts.gradients_sent * self.up.num_bytes
        averaged = self.averaged_bytes + counts.backwards * self.backward_bytes
        passes = counts.forwards + counts.replays + counts.backwards
        averaged += passes * self.pass_bytes
        return down + up + exchanged + averaged


def stage_costs(
    graph: StageGraph, batches: Batches, costs: CostModel, per_micro_batch: bool
) -> list[StageCosts]:
    """Of each stage, in order. `per_micro_batch`: the loss is computed for each by itself."""
    machine = costs.machine
    rings = [machine.ring(stage.ranks) for stage in graph.stages]
    layers = [_layers_cost(stage, batches, costs) for stage in graph.stages]
    losses = [
        _loss(graph, stage, batches, costs, per_micro_batch) if stage.is_last else None
        for stage in graph.stages
    ]
    exchange_s = _exchange_s(graph, losses, rings, machine)
    # last stages without texts wait for the pairs of the others
    pairs_s = max(loss.matching.seconds for loss in losses if loss)
    messages = _messages(graph, costs, layers)
    found = []
    for stage, own, loss, ring in zip(graph.stages, layers, losses, rings, strict=True):
        gradient_bytes = own.num_parameters * costs.state.gradient
        handed_round = costs.sharded_optimizer and not costs.sharded_weights
        weight_bytes = own.num_parameters * costs.state.weight if handed_round else 0.0
        pass_bytes, fetch_s = 0.0, 0.0
        if costs.sharded_weights:
            pass_bytes = (own.num_parameters + own.num_frozen) * costs.state.weight
            fetch_s = ring.seconds(pass_bytes)
        owned = own.num_parameters / (stage.replicas if costs.sharded_optimizer else 1)
        # under ZeRO-3 each has the sums of its share, and is done
        times = 1 if costs.sharded_weights else 2
        averages_s = times * ring.seconds(gradient_bytes)
        backward_s, others = own.backward_s + fetch_s, (stage.replicas - 1) / stage.replicas
        gather_s = machine.gradient_s_per_parameter * own.num_parameters
        if costs.sharded_gradients:
            backward_s += gather_s + averages_s
            gather_s = averages_s = 0.0
        elif costs.early_averages:
            # they begin when a bucket is complete, and the last bucket when the backward is over
            bucket = min(1.0, BUCKET_BYTES / max(1.0, gradient_bytes))
            averages_s = max(bucket * averages_s, averages_s - (1 - bucket) * own.backward_s)
        waits_s = exchange_s + pairs_s - loss.matching.seconds if loss else 0.0
        loss_s = loss.flops / machine.flops_per_s + loss.matching.seconds if loss else 0.0
        load_s = 0.0
        if costs.loading and not costs.loading.workers:
            load_s = loading_s({b: batches[b].micro_batch_size for b in stage.loads}, costs.loading)
        host_s = machine.instruction_s
        found.append(
            StageCosts(
                instruction_s=host_s,
                forward_s=host_s + own.forward_s + fetch_s + load_s,
                replay_s=host_s + own.replay_s + fetch_s,
                backward_s=host_s + backward_s,
                loss_s=host_s + waits_s + loss_s,
                exchange_s=waits_s,
                reduce_s=host_s + gather_s + averages_s,
                step_s=host_s
                + machine.optimizer_s_per_parameter * owned
                + (ring.seconds(weight_bytes) if weight_bytes else 0.0),
                layers=own,
                loss=loss,
                down=messages[stage.stage_id],
                up=Message() if stage.previous is None else messages[stage.previous],
                state_bytes=_state_bytes(stage, own, costs),
                averaged_bytes=others
                * (weight_bytes + (0.0 if costs.sharded_gradients else 2 * gradient_bytes)),
                backward_bytes=others * times * gradient_bytes if costs.sharded_gradients else 0.0,
                pass_bytes=others * pass_bytes,
                whole_bytes=_whole_bytes(own, costs),
            )
        )
    return found


def _state_bytes(stage: Stage, own: LayersCost, costs: CostModel) -> float:
    """What a rank holds throughout."""
    state, owners = costs.state, stage.replicas if costs.sharded_optimizer else 1
    learned = own.num_parameters * (state.whole + state.sharded / stage.replicas)
    learned -= own.num_muon * state.muon_saves / owners
    if not costs.sharded_weights:
        return learned + own.num_frozen * state.weight
    return learned + own.num_frozen * FLOAT_BYTES / stage.replicas


def _whole_bytes(own: LayersCost, costs: CostModel) -> float:
    """Of a layer its weights, as they came and in their places, and its gradients, as they were made
    and in fp32, as they travel."""
    if not costs.sharded_weights:
        return 0.0
    return own.largest_layer * (3 * costs.state.weight + FLOAT_BYTES)


def loading_s(samples: Mapping[str, float], loading: Loading) -> float:
    """Of one core, for so many samples of each branch."""
    return sum(number * loading.sample_s[branch] for branch, number in samples.items())


def _layers_cost(stage: Stage, batches: Batches, costs: CostModel) -> LayersCost:
    key = tuple(
        (branch, layers, batches[branch].micro_batch_size)
        for branch, layers in stage.layers.items()
    )
    if key not in costs.sums:
        costs.sums[key] = _sum_of_layers(key, costs)
    return costs.sums[key]


def _sum_of_layers(pieces: Sequence[tuple[str, range, int]], costs: CostModel) -> LayersCost:
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
    return LayersCost(
        forward_s=forward_s,
        replay_s=replay_s,
        backward_s=backward_s,
        num_parameters=sum(layer.num_trained for layer, _ in layers),
        num_muon=sum(layer.num_muon for layer, _ in layers if layer.trainable),
        num_frozen=sum(layer.num_parameters - layer.num_trained for layer, _ in layers),
        largest_layer=max((layer.num_parameters for layer, _ in layers), default=0),
        kept_bytes=kept_bytes,
        working_bytes=working_bytes,
        output_bytes=sum(
            costs.layers[branch][where.stop - 1].output_bytes.at(size)
            for branch, where, size in pieces
        ),
    )


def _loss(
    graph: StageGraph, stage: Stage, batches: Batches, costs: CostModel, per_micro_batch: bool
) -> Loss:
    batch = batches[stage.last_of[0]]
    own = batch.micro_batch_size * (1 if per_micro_batch else batch.num_micro_batches)

    def of(branch: str, each: float = 1.0) -> Rows:
        return Rows(own * each, own * batch.replicas * each, branch in stage.last_of)

    known, pairs = [of(branch) for branch in stage.last_of], []
    partners: set[str] = set()
    of_samples = [FurtherRows(*pair, rows=(1.0, 1.0)) for pair in costs.all_compared]
    for pair in (*of_samples, *costs.further):
        elsewhere = {pair.first, pair.second} - set(stage.last_of)
        if len(elsewhere) == 2:
            continue
        sides = of(pair.first, pair.rows[0]), of(pair.second, pair.rows[1])
        pairs.append(
            Compared(sides, sum(graph.last_stage(branch).replicas for branch in elsewhere))
        )
        if pair in costs.further:
            known += sides
        else:
            partners |= elsewhere
    return Loss(
        known=(*known, *map(of, sorted(partners))),
        pairs=tuple(pairs),
        replicas=batch.replicas,
        width=costs.embed_dim,
        matching=_matching(stage, batch, own, costs),
        block_bytes=costs.machine.block_bytes,
    )


def _matching(stage: Stage, batch: BranchBatch, own: int, costs: CostModel) -> Matching:
    pairs = costs.pairs
    if pairs is None:
        return Matching()
    first, second = costs.matched
    size = batch.micro_batch_size
    alone = {first, second} <= set(stage.last_of) and batch.replicas == 1
    with_sums = 1 + FLOAT_BYTES / costs.state.weight  # gradients are added up in fp32
    tokens = {first: 0.0, second: 0.0, **costs.token_bytes}
    held_bytes = 2 * own * tokens[first] if first in stage.last_of else 0.0
    if second not in stage.last_of:
        # a micro-batch of another replica passes through
        passing_bytes = with_sums * size * tokens[first] if batch.replicas > 1 else 0.0
        return Matching(held_bytes=held_bytes + passing_bytes)
    held_bytes += (2 + with_sums) * own * tokens[second]  # a second time, padded to the longest
    held_bytes += with_sums * size * tokens[first] + pairs.activation_bytes.at(size)
    moved_bytes = 0.0 if alone else with_sums * own * batch.replicas * tokens[first]
    return Matching(own / size * pairs.training_s(size), held_bytes, moved_bytes)


def _messages(graph: StageGraph, costs: CostModel, layers: Sequence[LayersCost]) -> list[Message]:
    """To the next stage, of each. An edge is as slow as its slowest pair of replicas."""
    found = []
    for stage, own in zip(graph.stages, layers, strict=True):
        if stage.next is None:
            found.append(Message())
            continue
        num_bytes = own.output_bytes
        near = costs.machine.link(stage.ranks[:1])
        links = map(costs.machine.link, zip(stage.ranks, graph.stages[stage.next].ranks))
        link = next((link for link in links if link != near), near)
        found.append(Message(num_bytes, num_bytes / link.bytes_per_s, link.latency_s))
    return found


def _exchange_s(
    graph: StageGraph, losses: Sequence[Loss | None], rings: Sequence[Ring], machine: Machine
) -> float:
    """Replicas gather their rows, the branches of a fork at the same time; then each whole crosses
    over, one after the other.

    The log-sum-exps go the same ways, `logit_scale` crosses once.
    """
    held = [loss for loss in losses if loss is not None]
    seconds = max(
        sum(map(rings[stage.stage_id].seconds, loss.gathered()))
        for stage, loss in zip(graph.last_stages, held)
    )
    crossing = machine.link([rank for stage in graph.last_stages for rank in stage.ranks])
    seconds += max(loss.matching.moved_bytes for loss in held) / crossing.bytes_per_s
    if len(held) > 1:
        seconds += crossing.latency_s
        for loss in held:
            seconds += sum(crossing.message_s(num_bytes) for _, num_bytes in loss.crossing())
    return seconds
