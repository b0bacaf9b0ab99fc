"""The simulator against sums done by hand, and against its own rules on graphs drawn at random.

Most costs here are whole numbers of seconds on a machine whose other parts are free (`FREE`), so
that a test reads as a sum.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from cost_models import BRANCHES
from deepspeed.runtime.pipe.schedule import (
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    SendActivation,
)

from engine.batch import BranchBatch
from engine.planning.costs import (
    CostModel,
    Curve,
    FurtherRows,
    LayerCost,
    Loading,
    Machine,
    StateBytes,
)
from engine.planning.simulator import Simulation, Span, StageResult, bounds, most_kept, simulate
from engine.planning.stage_costs import ELEMENTWISE_FLOPS, stage_costs
from engine.schedule import SCHEDULES, BatchSync, ComputeLoss
from engine.topology import StageGraph, fork, merged

INF = float("inf")
FREE = Machine("free", INF, INF, 0.0, INF, 0.0, 0.0, 0.0)
WEIGHTLESS = StateBytes(0, 0, 0)


def layer(
    forward_s=0.0, backward_s=0.0, activation_bytes=0.0, output_bytes=0.0, num_parameters=0
) -> LayerCost:
    """Costs of one sample, all in proportion to the micro-batch size."""
    curves = (
        Curve((1,), (value,)) for value in (forward_s, backward_s, activation_bytes, output_bytes)
    )
    return LayerCost("layer", num_parameters, *curves)


def model(
    image: list[LayerCost],
    text: list[LayerCost],
    machine=FREE,
    state=WEIGHTLESS,
    embed_dim=0,
    **options,
) -> CostModel:
    return CostModel({"image": image, "text": text}, machine, state, embed_dim, **options)


def line(stages: int, replicas: int = 1) -> StageGraph:
    """merged, one layer of each branch per stage"""
    return merged({branch: one_each(stages) for branch in BRANCHES}, replicas)


def one_each(stages: int) -> list[range]:
    return [range(i, i + 1) for i in range(stages)]


def equal_stages(
    stages: int, machine=FREE, forward_s=1.0, backward_s=2.0, **layer_costs
) -> CostModel:
    """For `line`: every stage costs what is given, all of it in its image layer."""
    return model(
        [layer(forward_s, backward_s, **layer_costs)] * stages, [layer()] * stages, machine
    )


def both(replicas: int, size: int, number: int) -> dict[str, BranchBatch]:
    return dict.fromkeys(BRANCHES, BranchBatch(replicas, size, number))


def by_name(simulation: Simulation) -> dict[str, StageResult]:
    return {stage.name: stage for stage in simulation.stages}


def of(simulation: Simulation, stage_id: int, name: str) -> list[Span]:
    return [span for span in simulation.spans if span.stage_id == stage_id and span.name == name]


ONE_STAGE = {branch: [range(1)] for branch in BRANCHES}
ONE_EACH = dict.fromkeys(BRANCHES, 1)

# -- seconds of a pipeline


def test_one_stage_is_a_sum():
    machine = replace(
        FREE, gradient_s_per_parameter=0.5, optimizer_s_per_parameter=0.25, instruction_s=0.125
    )
    costs = model(
        [layer(1, 2, num_parameters=3), layer(4, 5)], [layer(7, 11, num_parameters=5)], machine
    )
    graph = merged({"image": [range(2)], "text": [range(1)]}, 1)
    result = simulate(graph, both(1, 2, 3), "batch_sync", costs, timeline=True)
    passes = 3 * 2 * (1 + 4 + 7 + 2 + 5 + 11)  # micro-batches, samples, layers
    step = passes + 8 * 0.5 + 8 * 0.25
    host = 0.125 * (3 * 3 + 3)  # load, forward, backward of each; loss, reduce, step
    assert result.step_s == pytest.approx(step + host)
    assert result.stages[0].busy_s == pytest.approx(step + host - 3 * 0.125)  # loading is no work
    idle = [result.stages[0].idle_fraction, result.bubble_fraction]
    assert idle == pytest.approx([3 * 0.125 / (step + host)] * 2)
    first = [(span.name, span.micro_batch, span.start_s, span.end_s) for span in result.spans[:3]]
    assert first == [
        ("LoadMicroBatch", 0, 0.0, 0.125),
        ("ForwardPass", 0, 0.125, 0.25 + 24.0),
        ("LoadMicroBatch", 1, 24.25, 24.375),
    ]


def test_batch_sync_of_equal_stages():
    """Fill and empty the pipeline once forwards, once backwards."""
    for stages, number in itertools.product((1, 2, 3, 5), (1, 2, 4, 9)):
        result = simulate(line(stages), both(1, 1, number), "batch_sync", equal_stages(stages))
        filled = number + stages - 1
        assert result.step_s == pytest.approx(filled * 1 + filled * 2)
        idle = [result.bubble_fraction, *(stage.idle_fraction for stage in result.stages)]
        assert idle == pytest.approx([(stages - 1) / filled] * (stages + 1))


def test_replay_of_equal_stages():
    """M + S − 1 forwards to the loss; then the last stage runs forward and backward in turn, and
    the last gradient goes S − 1 stages up."""
    for stages, extra in itertools.product((1, 2, 3, 5), (0, 1, 4)):
        number = stages + extra
        result = simulate(line(stages), both(1, 1, number), "replay", equal_stages(stages))
        forwards = number + stages - 1
        assert result.step_s == pytest.approx(forwards + number * (1 + 2) + (stages - 1) * 2)
        assert result.stages[0].busy_s == pytest.approx(number * (1 + 1 + 2))


def test_a_loss_per_micro_batch_fills_and_empties_once():
    """1F1B (Narayanan et al. 2021): (M + S − 1)(f + b)."""
    for stages in (1, 2, 4):
        result = simulate(line(stages), both(1, 1, 6), "per_micro_batch", equal_stages(stages))
        assert result.step_s == pytest.approx((6 + stages - 1) * 3)


def test_the_slowest_stage_sets_the_pace():
    costs = model([layer(1, 2), layer(3, 4), layer(1, 2)], [layer()] * 3)
    result = simulate(line(3), both(1, 1, 5), "batch_sync", costs)
    assert result.step_s == pytest.approx((1 + 5 * 3 + 1) + (2 + 5 * 4 + 2))
    assert [stage.busy_s for stage in result.stages] == pytest.approx([15, 35, 15])


def test_the_faster_branch_of_a_fork_waits():
    graph = fork(ONE_STAGE, {"image": 3, "text": 1})
    batches = {"image": BranchBatch(3, 2, 2), "text": BranchBatch(1, 4, 3)}
    costs = model([layer(4, 8)], [layer(1, 2)])
    result = simulate(graph, batches, "batch_sync", costs, timeline=True)
    image, text = 2 * 2 * (4 + 8), 4 * 3 * (1 + 2)
    assert result.step_s == pytest.approx(2 * 2 * 4 + 2 * 2 * 8) == image
    assert by_name(result)["text 0"].idle_fraction == pytest.approx(1 - text / image)
    assert by_name(result)["image 0"].idle_fraction == 0
    # three image ranks, one text rank
    assert result.bubble_fraction == pytest.approx((3 * 0 + 1 * (image - text)) / (4 * image))
    (loss,) = of(result, 1, "ComputeLoss")
    # comes after 12 samples, goes on when the images are there
    assert (loss.start_s, loss.end_s) == pytest.approx((12, 16))


def test_forwards_are_waited_for_at_the_loss_and_backwards_at_the_optimizer_step():
    """Image is slow forwards, text backwards: the step is the sum of both, not the slower
    branch."""
    machine = replace(FREE, optimizer_s_per_parameter=1)
    costs = model([layer(5, 1, num_parameters=2)], [layer(1, 5, num_parameters=8)], machine)
    result = simulate(fork(ONE_STAGE, ONE_EACH), both(1, 1, 2), "batch_sync", costs)
    assert result.step_s == pytest.approx(2 * 5 + 2 * 5 + 8)


def test_costs_follow_the_curve():
    """From 1 to 4 samples 2 s, so no sample is free and none costs the average."""
    costs = model([replace(layer(), forward_s=Curve((1, 4), (1.0, 3.0)))], [layer()])
    assert simulate(line(1), both(1, 1, 1), "batch_sync", costs).step_s == 1.0
    assert simulate(line(1), both(1, 4, 1), "batch_sync", costs).step_s == 3.0
    assert simulate(line(1), both(1, 7, 1), "batch_sync", costs).step_s == pytest.approx(5.0)


# -- messages


def test_a_message_takes_latency_and_its_bytes():
    machine = replace(FREE, link_bytes_per_s=10.0, link_latency_s=0.5)
    costs = model([layer(1, 2, output_bytes=30)] * 2, [layer(output_bytes=10)] * 2, machine)
    result = simulate(line(2), both(1, 2, 1), "batch_sync", costs)
    message = 0.5 + 2 * (30 + 10) / 10
    assert result.step_s == pytest.approx(2 + message + 2 + 4 + message + 4)
    assert [stage.sent_bytes for stage in result.stages] == [80, 80]


def test_messages_of_one_direction_travel_one_after_the_other():
    machine = replace(FREE, link_bytes_per_s=10.0, link_latency_s=0.5)
    costs = equal_stages(2, machine, output_bytes=30)
    result = simulate(line(2), both(1, 1, 3), "batch_sync", costs, timeline=True)
    # made at 1, 2, 3; each holds the link for 3 s; half a second later it is there
    arrived = [span.end_s for span in of(result, 1, "RecvActivation")]
    assert arrived == pytest.approx([4.5, 7.5, 10.5])
    # a send returns at once
    assert [span.end_s for span in of(result, 0, "SendActivation")] == pytest.approx([1, 2, 3])


def test_the_two_directions_do_not_share_a_link():
    """Gradients go up while activations come down: 1F1B with messages as long as a pass takes what
    it does with no other traffic."""
    machine = replace(FREE, link_bytes_per_s=10.0)
    costs = equal_stages(2, machine, 1.0, 1.0, output_bytes=10)
    result = simulate(line(2), both(1, 1, 4), "per_micro_batch", costs, timeline=True)
    # stage 0: F0 F1 at 1, 2; stage 1: F0 from 2 to 3, B0 to 4; its gradient is there at 5
    assert of(result, 0, "RecvGrad")[0].end_s == pytest.approx(5)
    # F1 came at 3, so stage 1 goes on with it at 4, with B1 at 5; B1's gradient is there at 7, F2
    # was made at 7 (after B0) and comes at 8
    assert of(result, 0, "RecvGrad")[1].end_s == pytest.approx(7)
    assert of(result, 1, "RecvActivation")[2].end_s == pytest.approx(8)


def test_what_a_stage_sends_is_what_its_layers_put_out():
    graph = merged({"image": one_each(3), "text": one_each(3)}, 1)
    layers = [layer(output_bytes=100), layer(output_bytes=10), layer()]
    down = [2 * (100 + 100), 2 * (10 + 10), 0]
    up = [0, *down[:2]]
    # replay sends activations twice, gradients once
    for schedule, times in (("batch_sync", 1), ("replay", 2)):
        result = simulate(graph, both(1, 2, 3), schedule, model(layers, layers))
        expected = [3 * (times * d + u) for d, u in zip(down, up)]
        assert [stage.sent_bytes for stage in result.stages] == expected


def test_between_nodes_the_nodes_link_counts():
    """3 replicas, 4 ranks per node: the pair 0–3 is within a node, 1–4 is not, and the slowest
    counts."""
    links = {"link_bytes_per_s": 10.0, "node_bytes_per_s": 1.0, "node_latency_s": 0.25}
    ways = ((0, "SendActivation", 1, "RecvActivation"), (1, "SendGrad", 0, "RecvGrad"))
    for replicas, own, across in ((1, 2, 0), (1, 1, 1), (2, 4, 0), (2, 2, 1), (3, 4, 1)):
        machine = replace(FREE, **links, ranks_per_node=own)
        costs = equal_stages(2, machine, output_bytes=10)
        result = simulate(
            line(2, replicas), both(replicas, 1, 1), "batch_sync", costs, timeline=True
        )
        for sender, sends, receiver, receives in ways:
            way = of(result, receiver, receives)[0].end_s - of(result, sender, sends)[0].end_s
            assert way == pytest.approx(0.25 + 10 if across else 1), (replicas, own)


# -- the loss


THREE_AND_ONE = (
    fork(ONE_STAGE, {"image": 3, "text": 1}),
    {"image": BranchBatch(3, 2, 4), "text": BranchBatch(1, 6, 4)},
)


def loss_span(graph, batches, machine, schedule="batch_sync", embed_dim=8, stage_id=0) -> Span:
    costs = model([layer()], [layer()], machine, embed_dim=embed_dim)
    return of(simulate(graph, batches, schedule, costs, timeline=True), stage_id, "ComputeLoss")[0]


def test_the_arithmetic_of_the_loss():
    slow = replace(FREE, flops_per_s=100.0)
    for graph, flops_per_logit in (
        (merged(ONE_STAGE, 1), 8 * 8 + 10),  # one matrix, made twice, and two gradients
        (merged(ONE_STAGE, 3), 2 * (6 * 8 + 10)),  # two of its own rows
        (THREE_AND_ONE[0], 6 * 8 + 10),
    ):
        replicas, others = (stage.replicas for stage in (graph.stages[0], graph.stages[-1]))
        batches = {
            "image": BranchBatch(replicas, 2, 4),
            "text": BranchBatch(others, 2, 12 // others),
        }
        whole = loss_span(graph, batches, slow).end_s
        assert whole == pytest.approx(flops_per_logit * 8 * (8 * replicas) / 100)
        own = loss_span(graph, both(replicas, 2, 4), slow, "per_micro_batch").end_s
        assert own == pytest.approx(flops_per_logit * 2 * (2 * replicas) / 100)
    # every last stage computes its own rows
    image, text = (loss_span(*THREE_AND_ONE, slow, stage_id=stage_id) for stage_id in (0, 1))
    assert text.end_s == pytest.approx(3 * image.end_s)


def test_the_exchange_of_a_fork():
    """3 image replicas gather, then both wholes cross over, rows and log-sum-exps, and
    `logit_scale`."""
    rows, statistics = 24 * (4 * 8 + 16), 24 * 4
    gathers = 2 * (rows / 3 / 10 + 0.5) + 2 * (statistics / 3 / 10 + 0.5)
    crossings = 2 * (rows / 10 + 0.5) + 2 * (statistics / 10 + 0.5) + 0.5
    machine = replace(FREE, link_bytes_per_s=10.0, link_latency_s=0.5)
    assert loss_span(*THREE_AND_ONE, machine).end_s == pytest.approx(gathers + crossings)
    costs = model([layer()], [layer()], machine, embed_dim=8)
    result = simulate(*THREE_AND_ONE, "batch_sync", costs)
    # the images' reduction; nobody works while rows travel
    assert [stage.busy_s for stage in result.stages] == [2 * 2 * 0.5, 0]
    sent = {name: stage.sent_bytes for name, stage in by_name(result).items()}
    once = rows + statistics
    assert sent["text 0"] == pytest.approx(3 * once)  # one to each image stage
    assert 3 * sent["image 0"] == pytest.approx(3 * 2 / 3 * once + once)  # gathering, one crossing
    # the images share a node, the text stage is in another
    apart = replace(machine, ranks_per_node=3, node_latency_s=9.0)
    assert loss_span(*THREE_AND_ONE, apart).end_s == pytest.approx(gathers + 5 * 9)


def test_the_branches_of_a_fork_gather_at_the_same_time():
    """Of 5 and 2 replicas, the 5 take longer: 2 gathers of 4 rounds, then 5 crossings."""
    graph = fork(ONE_STAGE, {"image": 2, "text": 5})
    batches = {"image": BranchBatch(2, 5, 1), "text": BranchBatch(5, 2, 1)}
    assert loss_span(graph, batches, replace(FREE, link_latency_s=1.0)).end_s == 2 * 4 + 5


def test_the_exchange_among_the_replicas_of_a_line():
    machine = replace(FREE, link_bytes_per_s=10.0, link_latency_s=0.5)
    both_branches = 2 * (2 * (24 * (4 * 8 + 16) / 3 / 10 + 0.5) + 2 * (24 * 4 / 3 / 10 + 0.5))
    assert loss_span(line(1, 3), both(3, 2, 4), machine).end_s == pytest.approx(both_branches)
    assert loss_span(line(1, 1), both(1, 6, 4), machine).end_s == 0  # nobody to exchange with


# -- replicas and the optimizer


def last_two(machine: Machine, replicas: int, sharded: bool, gradient_bytes: int = 4):
    """Seconds of ReduceGrads and OptimizerStep of a stage of 12 parameters."""
    state, own = StateBytes(8, 12, gradient_bytes), [layer(num_parameters=12)]
    costs = model(own, [layer()], machine, state, sharded_optimizer=sharded)
    result = simulate(line(1, replicas), both(replicas, 1, 1), "batch_sync", costs, timeline=True)
    (reduce,), (step,) = of(result, 0, "ReduceGrads"), of(result, 0, "OptimizerStep")
    return pytest.approx(reduce.end_s - reduce.start_s), pytest.approx(step.end_s - step.start_s)


def test_reduction_and_step():
    machine = replace(
        FREE,
        gradient_s_per_parameter=0.5,
        optimizer_s_per_parameter=3.0,
        link_bytes_per_s=10.0,
        link_latency_s=0.25,
    )
    assert last_two(machine, 1, True) == (12 * 0.5, 12 * 3.0)
    ring = 3 * (12 * 4 / 4 / 10 + 0.25)  # 4 replicas, 4 bytes per gradient
    assert last_two(machine, 4, False) == (12 * 0.5 + 2 * ring, 12 * 3.0)
    assert last_two(machine, 4, True) == (12 * 0.5 + 2 * ring, 12 / 4 * 3.0 + ring)
    assert last_two(machine, 4, True, gradient_bytes=2) == (12 * 0.5 + ring + 3 * 0.25, 9.0 + ring)


def test_bytes_sent_over_the_replicas():
    """A ring of 4 replicas: gradients twice, under ZeRO-1 the new weights once."""
    state, own = StateBytes(8, 12, 4), [layer(num_parameters=12)]
    exchanged = 2 * 3 * (16 + 4)  # both branches: 3 × the own row's labels and log-sum-exp
    for sharded, times in ((False, 2), (True, 3)):
        costs = model(own, [layer()], FREE, state, sharded_optimizer=sharded)
        (stage,) = run(line(1, 4), 1, "batch_sync", costs)
        assert stage.sent_bytes == pytest.approx(times * 12 * 4 * 3 / 4 + exchanged)


def test_under_zero_2_every_backward_averages_its_gradients():
    """A ring of 4 replicas, 3 micro-batches: 12 gradients of 4 bytes go round twice in each
    backward, which brings them into the buffers, too; the new weights once behind the last."""
    machine = replace(
        FREE, gradient_s_per_parameter=0.5, link_bytes_per_s=10.0, link_latency_s=0.25
    )
    own, found = [layer(num_parameters=12)], {}
    for sharded in (False, True):
        costs = model(own, [layer()], machine, StateBytes(4, 16, 4), sharded_gradients=sharded)
        result = simulate(line(1, 4), both(4, 1, 3), "batch_sync", costs, timeline=True)
        spans = [of(result, 0, name) for name in ("BackwardPass", "ReduceGrads")]
        found[sharded] = [sum(span.end_s - span.start_s for span in each) for each in spans]
        found[sharded].append(result.stages[0].sent_bytes)
    averages_s = 12 * 0.5 + 2 * 3 * (12 * 4 / 4 / 10 + 0.25)
    (before_s, _, few), (backward_s, reduce_s, many) = found[False], found[True]
    assert backward_s - before_s == pytest.approx(3 * averages_s) and reduce_s == 0
    assert many - few == pytest.approx((3 - 1) * 2 * 12 * 4 * 3 / 4)


def test_under_zero_3_every_pass_gathers_the_weights():
    """A ring of 4 replicas, 3 micro-batches: 12 weights of 2 bytes go round once in each of 3
    forwards and 3 backwards, which also send the gradients once; nothing is sent at the end."""
    machine = replace(FREE, link_bytes_per_s=10.0, link_latency_s=0.25)
    own = [layer(num_parameters=8), layer(num_parameters=4)]
    text = [layer(), layer()]
    costs = model(own, text, machine, StateBytes(0, 16, 4, 2), sharded_gradients=True)
    costs = replace(costs, sharded_weights=True)
    graph = merged({branch: [range(2)] for branch in BRANCHES}, 4)
    result = simulate(graph, both(4, 1, 3), "batch_sync", costs, timeline=True)
    names = ("ForwardPass", "BackwardPass", "ReduceGrads", "OptimizerStep")
    took = {n: sum(span.end_s - span.start_s for span in of(result, 0, n)) for n in names}
    gather_s, average_s = (3 * (12 * each / 4 / 10 + 0.25) for each in (2, 4))
    assert took["ForwardPass"] == pytest.approx(3 * gather_s)
    assert took["BackwardPass"] == pytest.approx(3 * (gather_s + average_s))
    assert took["ReduceGrads"] == took["OptimizerStep"] == 0
    (stage,) = result.stages
    exchanged = 2 * 3 * 3 * (16 + 4)  # both branches: 3 × the own rows' labels and log-sum-exps
    assert stage.sent_bytes == pytest.approx(3 / 4 * 12 * (6 * 2 + 3 * 4) + exchanged)
    plain = replace(costs, sharded_weights=False)
    bytes_of = [simulate(graph, both(4, 1, 3), "batch_sync", c).stages[0] for c in (costs, plain)]
    # of the larger layer: its weights twice, its gradients, and these in fp32
    assert bytes_of[0].activation_bytes - bytes_of[1].activation_bytes == 8 * (3 * 2 + 4)


def test_hops_of_a_ring_within_a_node_and_between_nodes():
    """A part passes all other ranks, so of the hops between nodes all but one."""
    machine = replace(FREE, link_latency_s=1.0, node_latency_s=100.0, ranks_per_node=4)
    for replicas, between_nodes in ((2, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        within = replicas - 1 - between_nodes
        assert last_two(machine, replicas, False) == (2 * (within + 100.0 * between_nodes), 0)


def test_the_ranks_of_a_node_use_its_network_together():
    """As NCCL's rings do: bench/EVIDENCE.md has the same over limited links."""
    machine = replace(FREE, link_bytes_per_s=100.0, node_bytes_per_s=1.0, ranks_per_node=4)
    for ranks, bytes_per_s in (
        (range(4), 100.0),  # one node: its links
        (range(8), 4.0),  # four ranks of each node use its network together
        (range(2, 10), 2.0),  # as many rings as the node with the fewest has ranks
        (range(3, 8), 1.0),
        (range(5), 1.0),
    ):
        moved = (len(ranks) - 1) / len(ranks) * 64
        assert machine.ring(ranks).seconds(64) == pytest.approx(moved / bytes_per_s), ranks
    fast = replace(machine, node_bytes_per_s=60.0)  # and no faster than what comes over the links
    assert fast.ring(range(8)).seconds(64) == pytest.approx(7 / 8 * 64 / 100)


def test_a_ring_of_one_is_free():
    machine = replace(FREE, link_latency_s=1.0, collective_s_per_byte=1.0)
    assert machine.ring([3]).seconds(64) == 0


def test_a_stage_may_lie_across_nodes_where_another_does_not():
    """3 + 3 ranks, 4 per node: ranks 0–2 share a node, 3–5 do not."""
    machine = replace(FREE, node_latency_s=1.0, ranks_per_node=4)
    costs = equal_stages(2, machine)
    result = simulate(line(2, 3), both(3, 1, 1), "batch_sync", costs, timeline=True)
    spans = [of(result, stage_id, "ReduceGrads")[0] for stage_id in (0, 1)]
    seconds = [span.end_s - span.start_s for span in spans]
    assert seconds == pytest.approx([0, 2 * 1.0])  # one of two hops, there and back


def test_replicas_are_simulated_once():
    """1,024 ranks are the same program as 4, and with free links the same seconds; only the batch
    is larger."""
    few, many = (
        simulate(line(4, r), both(r, 1, 6), "replay", equal_stages(4), timeline=True)
        for r in (1, 256)
    )
    assert few.spans == many.spans


# -- bytes


def in_flight(graph: StageGraph, number: int, schedule: str) -> list[float]:
    costs = model([layer(activation_bytes=1)] * 9, [layer(activation_bytes=1)] * 9)
    return [
        stage.activation_bytes / sum(map(len, s.layers.values()))
        for stage, s in zip(run(graph, number, schedule, costs), graph.stages)
    ]


def run(graph: StageGraph, number: int, schedule: str, costs: CostModel) -> tuple[StageResult, ...]:
    batches = {b: BranchBatch(graph.last_stage(b).replicas, 1, number) for b in BRANCHES}
    return simulate(graph, batches, schedule, costs).stages


def test_micro_batches_in_flight():
    cuts = {"image": one_each(3), "text": one_each(1)}
    graphs = (line(4), fork(cuts, ONE_EACH))
    for graph, number in itertools.product(graphs, (1, 2, 3, 8)):
        downstream = [stage.num_downstream for stage in graph.stages]
        assert in_flight(graph, number, "batch_sync") == [number] * len(downstream)
        for schedule in ("replay", "per_micro_batch"):
            assert in_flight(graph, number, schedule) == [min(d + 1, number) for d in downstream]


class TwoThenOne(BatchSync):
    """Not one of ours: two micro-batches, then one, so that the most is not held at the end."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for pair in ((0, 1), (2,)):
            for part in (self.forward, self.backward):
                for m in pair:
                    yield part(m)


def test_the_peak_is_the_most_at_any_time(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "two, then one", TwoThenOne)
    assert in_flight(line(1), 3, "two, then one") == [2]


def work_bytes(own: int, everyone: int, width: int, replicas: int = 1) -> int:
    """Of the loss, while it is computed: logits, and copies of embeddings. Less than a block of
    logits may be."""
    return 4 * own * everyone * 4 + ((4 if replicas == 1 else 2) * everyone + 4 * own) * width * 4


def test_the_memory_of_replay_does_not_grow_with_the_number_of_micro_batches():
    """Only the loss does, on the last stage: it is over more samples."""
    layers = [layer(activation_bytes=100, output_bytes=10, num_parameters=7)] * 3
    costs = model(layers, [layer()] * 3, FREE, StateBytes(8, 12, 4), 4)
    few, many = (run(line(3), number, "replay", costs) for number in (4, 400))
    for stages in (few, many):
        assert [s.activation_bytes for s in stages] == [300, 200, 100]
        assert [s.peak_bytes for s in stages[:2]] == [140 + 300 + 40, 140 + 200 + 80]
    assert many[2].peak_bytes == 140 + 40 + 400 * 4 * 4 * 2 + work_bytes(400, 400, 4)
    few, many = (run(line(3), number, "batch_sync", costs) for number in (4, 400))
    assert [s.activation_bytes for s in few] == [400] * 3
    assert [s.activation_bytes for s in many] == [40000] * 3


def test_what_replay_keeps_costs_memory_and_spares_forwards():
    costs = model([layer(1, 2, activation_bytes=100)] * 2, [layer()] * 2, FREE, embed_dim=4)
    embeds, work = 2 * 6 * 4 * 4, work_bytes(6, 6, 4)
    for kept in range(7):
        batches = dict.fromkeys(BRANCHES, BranchBatch(1, 1, 6, kept))
        first, last = simulate(line(2), batches, "replay", costs).stages
        assert first.activation_bytes == 100 * max(kept, 2)
        assert last.activation_bytes == 100 * max(kept, 1)
        assert first.busy_s == last.busy_s == 6 * (1 + 2) + (6 - kept)
        assert last.peak_bytes == embeds + max(100 * max(kept, 1), 100 * kept + work)


def test_most_kept_fits_and_one_more_does_not():
    """In random graphs, between the memory that replay needs at least and that of batch_sync."""
    partly = 0
    for graph, batches, _, costs in draws(200, ("batch_sync",)):
        least, most = (
            bounds(graph, batches, schedule, costs)[1] for schedule in ("replay", "batch_sync")
        )
        if least == most:
            continue  # all micro-batches are in flight either way
        memory_bytes = least + 0.47 * (most - least)
        costs = replace(costs, machine=replace(costs.machine, memory_bytes=memory_bytes))
        kept = most_kept(graph, batches, costs)
        assert graph.layout == "fork" or kept["image"] == kept["text"]
        all_kept = {b: replace(batch, num_kept=kept[b]) for b, batch in batches.items()}
        assert bounds(graph, all_kept, "replay", costs)[1] <= memory_bytes
        for branches in (("image",), ("text",)) if graph.layout == "fork" else (BRANCHES,):
            if all(kept[branch] < batches[branch].num_micro_batches for branch in branches):
                partly += 1
                more = {
                    b: replace(batch, num_kept=kept[b] + (b in branches))
                    for b, batch in all_kept.items()
                }
                assert bounds(graph, more, "replay", costs)[1] > memory_bytes
    assert partly > 20


def test_everything_a_rank_holds():
    """State, two messages of each direction of each edge, activations, and on the last stage
    embeddings and what the loss makes of them."""
    layers = [layer(activation_bytes=100, output_bytes=10, num_parameters=30)] * 3
    costs = model(layers, [layer()] * 3, FREE, StateBytes(8, 12, 4), embed_dim=16)
    first, middle, last = simulate(line(3, 2), both(2, 4, 5), "batch_sync", costs).stages
    state, activations, message = 30 * (8 + 12 / 2), 5 * 4 * 100, 4 * 10
    assert first.state_bytes == middle.state_bytes == last.state_bytes == state
    assert first.peak_bytes == state + activations + 4 * message
    assert middle.peak_bytes == state + activations + 8 * message
    embeds, work = 40 * 16 * 4 * 2, work_bytes(20, 40, 16, 2)  # 20 rows of its own, 40 of all
    assert last.peak_bytes == state + activations + 4 * message + embeds + work


def test_logits_of_a_large_batch_come_in_blocks():
    costs = model([layer()], [layer()], embed_dim=8)
    assert run(line(1), 4096, "replay", costs)[0].peak_bytes == pytest.approx(
        2 * 4096 * 8 * 4 + work_bytes(4096, 0, 8) + 4 * 4096 * 8 * 4 + 64 * 2**20
    )
    larger = replace(costs, machine=replace(costs.machine, block_bytes=100 * 2**20))
    more = run(line(1), 4096, "replay", larger)[0].peak_bytes
    assert more == run(line(1), 4096, "replay", costs)[0].peak_bytes + 36 * 2**20


def test_rows_beside_those_of_samples_count_as_what_they_are():
    """Two replicas of four samples; three rows of images and five of texts for each sample."""
    plain = model([layer()], [layer()], FREE, StateBytes(0, 0, 0), 8)
    more = replace(plain, further=(FurtherRows(*BRANCHES, (3.0, 5.0)),))
    graph, deal = merged({b: [range(1)] for b in BRANCHES}, 2), both(2, 4, 1)
    costs = [
        stage_costs(graph, deal, each, per_micro_batch=False)[0].loss for each in (plain, more)
    ]
    before, with_rows = costs
    assert with_rows.rows_bytes == before.rows_bytes + 8 * (3 + 5) * 8 * 4
    # the rows once more, as they came; own ones of either side four times; a block of logits
    own = 4 * (4 * (3 + 5) / 2 - 4) * 8 * 4
    logits = 4 * 4 * ((4 * 5) * (8 * 3) - 4 * 8)
    assert with_rows.work_bytes == before.work_bytes + 8 * (3 + 5) * 8 * 4 + own + logits
    matrices = (4 * 3) * (8 * 5) + (4 * 5) * (8 * 3)
    assert with_rows.flops == before.flops + (2 * 8 * 3 + ELEMENTWISE_FLOPS) * matrices
    # to the other replica, rows with their labels and a log-sum-exp
    assert with_rows.sent_bytes == before.sent_bytes + 8 * (3 + 5) * (8 * 4 + 16 + 4) / 2


def test_logits_and_activations_need_not_be_there_together():
    """batch_sync holds all activations while it computes the loss; replay holds none, so the larger
    of both counts."""
    layers, embeds, work = [layer(activation_bytes=5000)], 2 * 10 * 8 * 4, work_bytes(10, 10, 8)
    costs = model(layers, [layer()], embed_dim=8)
    assert run(line(1), 10, "batch_sync", costs)[0].peak_bytes == 10 * 5000 + embeds + work
    assert run(line(1), 10, "replay", costs)[0].peak_bytes == embeds + max(5000, work)
    per_micro_batch = run(line(1), 10, "per_micro_batch", costs)[0]
    # one sample is its own batch
    assert per_micro_batch.peak_bytes == 5000 + 2 * 8 * 4 + work_bytes(1, 1, 8)


def test_checkpoints_keep_the_ends_of_groups_and_work_one_group_out_again():
    layers = [
        layer(2**i, 2 * 2**i, activation_bytes=100 * 2**i, output_bytes=10**i) for i in range(5)
    ]
    graph = merged({"image": [range(5)], "text": [range(1)]}, 1)
    for interval, kept, working in (
        (1, 11111 + 7, 1600),
        (2, 10 + 1000 + 7, 1600),
        (3, 100 + 7, 800 + 1600),
        (9, 7, 3100),
    ):
        costs = model(layers, [layer(output_bytes=7)], checkpoint_interval=interval)
        result = simulate(graph, both(1, 1, 4), "batch_sync", costs)
        assert result.stages[0].activation_bytes == 4 * kept + working, interval
        assert result.step_s == pytest.approx(4 * (31 + 62 + 31))
        assert bounds(graph, both(1, 1, 4), "batch_sync", costs)[0] == result.step_s
    whole = simulate(graph, both(1, 1, 4), "batch_sync", model(layers, [layer(output_bytes=7)]))
    assert whole.stages[0].activation_bytes == 4 * 3100
    assert whole.step_s == pytest.approx(4 * (31 + 62))


# -- what cannot end


class BackToFront(BatchSync):
    """Wrong on purpose: the last stage asks for its inputs in another order than they are sent."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        groups = list(super().steps())
        forwards = groups[: self.micro_batches]
        yield from reversed(forwards) if self.own_stage.is_last else forwards
        yield from groups[self.micro_batches :]


class SendsTwice(BatchSync):
    """Wrong on purpose: a message too many."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield from super().steps()
        if self.own_stage.previous is None:
            yield [SendActivation(2)]


class ReceivesFromNobody(BatchSync):
    """Wrong on purpose: the first stage waits for activations."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        if self.own_stage.previous is None:
            yield [RecvActivation(0)]
        yield from super().steps()


class GradientsFirst(BatchSync):
    """Wrong on purpose: waits for gradients before it has sent activations."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            own = [self.forward(m), self.backward(m)]
            yield from own if self.own_stage.is_last else reversed(own)


def test_what_waits_for_ever_is_named(monkeypatch):
    for schedule, says in (
        (BackToFront, "in RecvGrad of micro-batch 0; merged 1 in RecvActivation of micro-batch 2"),
        (SendsTwice, "merged 0 sends micro-batch 2 and nobody receives it$"),
        (ReceivesFromNobody, "merged 0 in RecvActivation of micro-batch 0"),
        (GradientsFirst, "in RecvGrad of micro-batch 0; merged 1 in Recv"),
    ):
        monkeypatch.setitem(SCHEDULES, "wrong", schedule)
        with pytest.raises(RuntimeError, match=f"{schedule.__name__}: .*{says}"):
            simulate(line(2), both(1, 1, 3), "wrong", equal_stages(2))


class NothingBetween(BatchSync):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield [*([ComputeLoss(), ComputeLoss()] if self.own_stage.is_last else []), OptimizerStep()]


def test_collectives_may_follow_each_other(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "nothing between", NothingBetween)
    costs = equal_stages(2, replace(FREE, instruction_s=1.0))
    assert simulate(line(2), both(1, 1, 1), "nothing between", costs).step_s == 3


def test_branches_that_do_not_meet_are_named():
    graph = fork(ONE_STAGE, ONE_EACH)
    batches = {"image": BranchBatch(1, 3, 2), "text": BranchBatch(1, 2, 3)}
    words = "PerMicroBatch: .*: image 0 in OptimizerStep; text 0 in ComputeLoss of micro-batch 2"
    with pytest.raises(RuntimeError, match=words):
        simulate(graph, batches, "per_micro_batch", model([layer()], [layer()]))


# -- rules that hold everywhere


def drawn(draw: random.Random) -> tuple[StageGraph, dict[str, BranchBatch], CostModel]:
    """Any layout, up to 4 stages a line, unequal layers, up to 3 replicas, 1 to 3 ranks per
    node."""

    def figure() -> float:
        return draw.choice((0.0, draw.random(), draw.randint(1, 9)))

    def one() -> LayerCost:
        return layer(*(figure() for _ in range(4)), num_parameters=draw.randint(0, 9))

    layers = {branch: [one() for _ in range(draw.randint(4, 7))] for branch in BRANCHES}
    machine = Machine(
        *("drawn", 0.0, draw.choice((INF, draw.uniform(0.5, 20))), draw.random()),
        *(draw.choice((INF, 1e4)), draw.random(), draw.random()),
        *(
            draw.choice((0.0, draw.random())),
            draw.randint(1, 8),
            draw.uniform(0.5, 5),
            draw.random(),
        ),
    )
    seconds = {branch: draw.random() for branch in BRANCHES}
    loading = Loading(seconds, draw.randint(0, 2), draw.randint(1, 4), draw.random() < 0.5)
    costs = CostModel(
        *(layers, machine, StateBytes(8, 12, 4), draw.randint(1, 9)),
        *(draw.choice((0, 1, 2)), draw.random() < 0.5),
        loading=draw.choice((None, loading)),
    )
    layout = draw.choice(("fork", "merged"))
    replicas = {branch: draw.randint(1, 3) for branch in BRANCHES}

    def batch(branch: str) -> BranchBatch:
        return BranchBatch(replicas[branch], draw.randint(1, 3), draw.randint(1, 6))

    if layout == "fork":
        cuts = {branch: cut(draw, len(layers[branch]), draw.randint(1, 3)) for branch in BRANCHES}
        return fork(cuts, replicas), {branch: batch(branch) for branch in BRANCHES}, costs
    stages = draw.randint(1, 4)
    cuts = {branch: cut(draw, len(layers[branch]), stages) for branch in BRANCHES}
    graph = merged(cuts, replicas["image"])
    return graph, dict.fromkeys(BRANCHES, batch("image")), costs


def cut(draw: random.Random, layers: int, parts: int) -> list[range]:
    ends = [0, *sorted(draw.sample(range(1, layers), parts - 1)), layers]
    return [range(start, stop) for start, stop in zip(ends, ends[1:])]


def draws(
    number: int, schedules=tuple(SCHEDULES)
) -> Iterator[tuple[StageGraph, dict[str, BranchBatch], str, CostModel]]:
    draw = random.Random(0)
    for _ in range(number):
        graph, batches, costs = drawn(draw)
        for schedule in schedules:
            if schedule == "per_micro_batch":  # the branches meet after each micro-batch
                number = batches["image"].num_micro_batches
                batches = {b: replace(own, num_micro_batches=number) for b, own in batches.items()}
            own = keep(draw, graph, batches) if schedule == "replay" else batches
            yield graph, own, schedule, costs


def keep(
    draw: random.Random, graph: StageGraph, batches: dict[str, BranchBatch]
) -> dict[str, BranchBatch]:
    """Every other time some micro-batches keep their activations."""
    kept = {
        branch: draw.choice((0, draw.randint(0, batch.num_micro_batches)))
        for branch, batch in batches.items()
    }
    return {
        branch: replace(batch, num_kept=kept[branch if graph.layout == "fork" else "image"])
        for branch, batch in batches.items()
    }


def test_the_timeline_keeps_the_rules():
    """Every instruction once, in its list's order, one after the other, each ending when the
    simulator's docstring says."""
    for graph, batches, schedule, costs in draws(150):
        result = simulate(graph, batches, schedule, costs, timeline=True)
        timelines = [
            [span for span in result.spans if span.stage_id == stage.stage_id]
            for stage in graph.stages
        ]
        for stage, spans in zip(graph.stages, timelines):
            batch = batches[next(iter(stage.layers))]
            groups = SCHEDULES[schedule](stage, batch.num_micro_batches, batch.num_kept)
            listed = [(i.name, i.kwargs.get("buffer_id")) for group in groups for i in group]
            assert [(s.name, s.micro_batch) for s in spans] == listed
            assert spans[0].start_s == 0
            assert all(earlier.end_s == later.start_s for earlier, later in zip(spans, spans[1:]))
            ends = expected_ends(graph, batches, costs, timelines, stage)
            assert [span.end_s for span in spans] == pytest.approx(ends)
        last = max(span.end_s for span in result.spans)
        loads_ahead = costs.loading is not None and costs.loading.workers > 0
        assert result.step_s == last or (loads_ahead and result.step_s > last)


def expected_ends(graph, batches, costs, timelines, stage) -> list[float]:
    """When each instruction of a stage ends, given when those before it do. Collectives and
    reduction: their seconds have their own tests."""
    host = costs.machine.instruction_s
    layers = [
        (each, batches[b].micro_batch_size)
        for b, part in stage.layers.items()
        for each in costs.layers[b][part.start : part.stop]
    ]
    forward = sum(each.forward_s.at(size) for each, size in layers)
    backward = sum(each.backward_s.at(size) for each, size in layers) + (
        forward if costs.checkpoint_interval else 0
    )
    first = forward  # a rank that has nobody to load for it does that now
    if costs.loading and not costs.loading.workers:
        first += sum(costs.loading.sample_s[b] * batches[b].micro_batch_size for b in stage.loads)
    works = dict.fromkeys(("ForwardPass", "EmbedPass"), first)
    works |= {"ReplayPass": forward, "BackwardPass": backward}
    own = (graph, batches, costs, timelines)
    arrivals = {
        "RecvActivation": arriving(*own, stage.previous, stage.stage_id, "SendActivation"),
        "RecvGrad": arriving(*own, stage.next, stage.stage_id, "SendGrad"),
    }
    ends = []
    for span in timelines[stage.stage_id]:
        if span.name in arrivals:
            ends.append(max(span.start_s, arrivals[span.name].popleft()) + host)
        elif span.name in ("ComputeLoss", "ReduceGrads", "OptimizerStep"):
            ends.append(span.end_s)
        else:
            ends.append(span.start_s + host + works.get(span.name, 0))
    return ends


def arriving(
    graph, batches, costs, timelines, source: int | None, target: int, sends: str
) -> deque[float]:
    """When the messages that `source` sends to `target` are there: first come, first on the
    link."""
    if source is None:
        return deque()
    upper = graph.stages[min(source, target)]
    node = costs.machine.ranks_per_node
    across = any(
        a // node != b // node
        for a, b in zip(graph.stages[source].ranks, graph.stages[target].ranks)
    )
    speed = costs.machine.node_bytes_per_s if across else costs.machine.link_bytes_per_s
    latency = costs.machine.node_latency_s if across else costs.machine.link_latency_s
    num_bytes = sum(
        costs.layers[b][part.stop - 1].output_bytes.at(batches[b].micro_batch_size)
        for b, part in upper.layers.items()
    )
    arrivals, free = deque(), 0.0
    for span in timelines[source]:
        if span.name == sends:
            free = max(free, span.end_s) + num_bytes / speed
            arrivals.append(free + latency)
    return arrivals


def test_collectives_begin_when_the_last_has_come():
    """And then take each member equally long every time."""
    for graph, batches, schedule, costs in draws(100):
        result = simulate(graph, batches, schedule, costs, timeline=True)
        for name, members in (("ComputeLoss", graph.last_stages), ("OptimizerStep", graph.stages)):
            spans = [of(result, stage.stage_id, name) for stage in members]
            begins = [max(span.start_s for span in together) for together in zip(*spans)]
            for own in spans:
                assert len(own) == len(begins)
                seconds = [span.end_s - begin for span, begin in zip(own, begins)]
                assert min(seconds) >= costs.machine.instruction_s * (1 - 1e-9)
                assert seconds == pytest.approx([seconds[0]] * len(seconds))


def test_a_step_is_never_shorter_than_its_lower_bound():
    tight = 0
    for graph, batches, schedule, costs in draws(300):
        result = simulate(graph, batches, schedule, costs)
        bound, peak_bytes = bounds(graph, batches, schedule, costs)
        assert peak_bytes == pytest.approx(max(stage.peak_bytes for stage in result.stages))
        step = result.step_s
        assert 0 < bound <= step * (1 + 1e-9)
        tight += bound > 0.8 * step
    assert tight > 300  # of 900: it is worth asking


def test_the_lower_bound_is_exact_where_nothing_travels_and_stages_are_equal():
    for stages, number in ((1, 3), (3, 1), (4, 7)):
        machine = replace(FREE, instruction_s=0.0, optimizer_s_per_parameter=1.0)
        given = (line(stages), both(1, 1, number))
        costs = equal_stages(stages, machine, num_parameters=5)
        for schedule in ("batch_sync", "per_micro_batch"):
            step = simulate(*given, schedule, costs).step_s
            assert bounds(*given, schedule, costs)[0] == pytest.approx(step)
            assert step == pytest.approx((number + stages - 1) * 3 + 5)


def test_idle_and_busy_make_the_step():
    for graph, batches, schedule, costs in draws(100):
        result = simulate(graph, batches, schedule, costs)
        for stage in result.stages:
            assert 0 <= stage.busy_s <= result.step_s * (1 + 1e-9)
            idle = pytest.approx(result.step_s - stage.busy_s, abs=1e-6)
            assert stage.idle_fraction * result.step_s == idle
            assert stage.peak_bytes >= stage.state_bytes + stage.activation_bytes
        stages = zip(result.stages, graph.stages)
        idle = sum(own.idle_fraction * place.replicas for own, place in stages)
        assert result.bubble_fraction == pytest.approx(idle / graph.world_size, abs=1e-9)


def test_the_same_question_has_the_same_answer():
    """Also of costs of which nothing is remembered, and whether or not spans are asked for."""
    for graph, batches, schedule, costs in draws(20):
        first = simulate(graph, batches, schedule, costs, timeline=True)
        assert simulate(graph, batches, schedule, replace(costs), timeline=True) == first
        assert simulate(graph, batches, schedule, costs) == replace(first, spans=())


def test_pairs_are_scored_at_the_text_stage_and_image_stages_wait():
    """Two samples a micro-batch, four of them: 8 texts of 1 + 2 s each at the loss, shared by the
    replicas of the text stage."""
    sides = model([layer(1.0, 2.0)], [layer(1.0, 2.0)])
    pairs = replace(sides, pairs=layer(1.0, 2.0))
    one = fork(ONE_STAGE, ONE_EACH)
    for replicas, number, more in ((1, 4, 24), (2, 2, 12)):
        given = (fork(ONE_STAGE, dict.fromkeys(BRANCHES, replicas)), both(replicas, 2, number))
        without, found = (simulate(*given, "batch_sync", costs) for costs in (sides, pairs))
        assert found.step_s == pytest.approx(without.step_s + more)
        image, text = by_name(found)["image 0"], by_name(found)["text 0"]
        assert text.busy_s == pytest.approx(image.busy_s + more)
        assert image.idle_fraction * found.step_s == pytest.approx(more)
        assert bounds(*given, "batch_sync", pairs)[0] == pytest.approx(found.step_s)
    # the image stage goes on when the last pair is scored: 8 images forward, 24 s of pairs, 8
    # images backward
    slow = replace(model([layer(1.0, 20.0)], [layer(1.0, 2.0)]), pairs=layer(1.0, 2.0))
    assert simulate(one, both(1, 2, 4), "batch_sync", slow).step_s == pytest.approx(8 + 24 + 160)
    # 8 images' tokens of 100 bytes to the one text stage, and as many gradients in fp32 back
    machine, state = replace(FREE, link_bytes_per_s=10.0), StateBytes(0, 0, 0, weight=2)
    sides = model([layer()], [layer()], machine, state)
    moved = replace(sides, pairs=layer(), token_bytes={"image": 100.0, "text": 10.0})
    steps = [simulate(one, both(1, 2, 4), "batch_sync", costs) for costs in (sides, moved)]
    assert steps[1].step_s - steps[0].step_s == pytest.approx((8 * 100 + 8 * 200) / 10)
    # held: own tokens and their gradients; texts also padded, and their sums in fp32; the two
    # images of a micro-batch with theirs
    two = fork(ONE_STAGE, dict.fromkeys(BRANCHES, 2))
    passing = 2 * (1 + 2) * 100  # of two replicas each takes part in the messages of the other
    for graph, batches, others in ((one, both(1, 2, 4), 0), (two, both(2, 2, 4), passing)):
        less, more = (
            by_name(simulate(graph, batches, "batch_sync", costs)) for costs in (sides, moved)
        )
        held = {name: own.peak_bytes - less[name].peak_bytes for name, own in more.items()}
        assert held == {
            "image 0": 8 * 2 * 100 + others,
            "text 0": 8 * (3 + 2) * 10 + 2 * (1 + 2) * 100,
        }


def test_a_rank_that_loads_by_itself_takes_longer_for_the_forwards_of_what_enters():
    costs = model([layer(1.0, 2.0)] * 2, [layer(1.0, 2.0)])
    graph = fork({"image": one_each(2), "text": one_each(1)}, ONE_EACH)
    loads = replace(costs, loading=Loading({"image": 0.5, "text": 4.0}, 0, 1, shared=True))
    without, with_it = (
        [stage.busy_s for stage in simulate(graph, both(1, 3, 2), "batch_sync", each).stages]
        for each in (costs, loads)
    )
    more = [b - a for a, b in zip(without, with_it, strict=True)]
    assert more == [3 * 2 * 0.5, 0, 3 * 2 * 4.0]  # image 0, image 1, text 0


def test_a_step_lasts_as_long_as_the_processes_that_load_need():
    """One stage, 2 replicas, each 3 micro-batches of 4 samples."""
    for image_s, text_s, *others, step_s in (
        (0.25, 0.0, 1, 8, False, 9),  # hidden: 6 s beside 9
        (2.0, 0.0, 1, 64, False, 24),  # 2 replicas of 12 samples each
        (2.0, 0.0, 2, 64, False, 12),
        (2.0, 0.0, 64, 4, False, 12),  # 48 s on 4 cores
        (1.0, 0.5, 2, 2, True, (24 + 12 + 2 * 9) / 2),
    ):
        loading = Loading({"image": image_s, "text": text_s}, *others)
        costs = model([layer(0.25, 0.5)], [layer()], loading=loading)
        simulation = simulate(line(1, 2), both(2, 4, 3), "batch_sync", costs)
        assert simulation.step_s == step_s, loading
        assert simulation.bubble_fraction == pytest.approx(1 - 9 / step_s)


def test_nothing_costs_nothing():
    costs = equal_stages(2, forward_s=0.0, backward_s=0.0)
    result = simulate(line(2), both(1, 1, 3), "batch_sync", costs)
    assert result.step_s == result.bubble_fraction == 0
    assert [stage.idle_fraction for stage in result.stages] == [0, 0]
