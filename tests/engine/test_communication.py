"""What ranks say to each other, over gloo: named tensors along an edge, rows among unequal numbers
of replicas."""

import itertools
import math
from dataclasses import replace

import communication_cases
import pytest
import torch
from communication_cases import OBJECTIVE
from cost_models import BRANCHES, proportional
from ranks import run_all, run_cases, run_ranks
from split_training import Case

from engine.communication import gradients_of, signature_of
from engine.objective import Branch, Objective, Pair
from engine.planning.simulator import room_bytes
from engine.topology import StageGraph, fork, merged
from models.losses import InfoNCE, Matching


def test_every_dtype_and_changing_shapes_in_both_directions_at_once():
    assert run_ranks(4, communication_cases.both_directions_at_once, 6) == [True] * 4


@pytest.fixture(scope="module")
def of_two():
    """What two ranks return of each of these, by its name."""
    functions = (
        communication_cases.announced_messages,
        communication_cases.messages_in_order,
        communication_cases.refused_message,
        communication_cases.copies_before_sends,
        communication_cases.posted_receives_overlap,
        communication_cases.sends_in_flight,
        communication_cases.warmed_up,
    )
    ran = run_cases(2, communication_cases.call, [(function,) for function in functions])
    return dict(zip((function.__name__ for function in functions), ran, strict=True))


def test_what_was_announced_arrives_and_may_be_nothing(of_two):
    assert of_two["announced_messages"] == [[], [["a [2]"], [], ["b [0, 7]"]]]


def test_a_message_that_is_not_what_the_receiver_expects_is_refused_before_it_leaves(of_two):
    said, arrived = of_two["refused_message"]
    assert "a message of a float32 [2, 3], b int64 [2] for micro-batch 3 of slice 0" in said
    assert "this stage made a float32 [2, 4], b int64 [2]" in said and arrived == "True"


def test_messages_are_received_in_the_order_in_which_they_were_made_ready_for(of_two):
    sender, (too_early, *came, too_many) = of_two["messages_in_order"]
    assert sender == [] and came == ["[0.0, 0.0]", "[1.0, 1.0]"]
    assert "micro-batch 1 of slice 0 is to be received from rank 0" in too_early
    assert "ready for micro-batch 0 of slice 0, then micro-batch 1 of slice 0" in too_early
    assert "micro-batch 2 of slice 0" in too_many and "ready for no message" in too_many


@pytest.mark.parametrize(
    "turned, kind", [("forwards", "RecvActivation"), ("backwards", "SendGrad")]
)
def test_stages_that_handle_micro_batches_in_unlike_orders_end_the_run(turned, kind):
    """Before the first message: of equal shapes one would be taken for the other, and of others gloo
    aborts the process."""
    unlike = communication_cases.stages_in_unlike_orders
    said = (
        rf"(?s)rank 1 failed.*message 1 of {kind} is micro-batch 0 of slice 0 here, "
        "and micro-batch 5 of slice 0 at the stage before"
    )
    with pytest.raises(RuntimeError, match=said):
        run_ranks(2, unlike, Case("merged", {"merged": 2}, 1, 4), turned, timeout_s=60)


def test_all_of_a_message_is_ready_before_any_of_it_is_sent(of_two):
    """On a device memory for a copy may wait for all that is under way, sends included."""
    assert of_two["copies_before_sends"][0] == ["clone", "clone", "send", "send", "send"]


def test_small_values_arrive_exactly_on_the_ranks_that_they_are_for():
    values = {
        "floats": [0.1, 5e-324, 1 / 3, -0.0, math.inf, -math.inf, math.nan],
        "text": ["", "狗 \u2028", "a\udcff", "x" * 100_000],
        "others": [None, True, 2**63, {}, []],
    }
    told = run_ranks(3, communication_cases.tell, values)
    # repr: the shortest digits that give the same bits, and nan equals itself
    assert {repr(one["first"]) for one in told} == {repr(told[1]["sent"])} == {repr(values)}
    assert [one["all"] for one in told] == [[[0, ""], [1, "x" * 1000], [2, "x" * 2000]]] * 3
    assert told[0]["to first"] == [{"rank": [rank, None]} for rank in range(3)]
    assert told[1]["to first"] is told[2]["to first"] is None


def test_what_is_no_data_is_not_told():
    with pytest.raises(RuntimeError, match="not JSON serializable"):
        run_ranks(1, communication_cases.tell_a_function)


VARYING = [
    Case("merged", {"merged": 3}, 1, 4, schedule="batch_sync"),
    Case("merged", {"merged": 2}, 1, 4, schedule="replay", precision="bf16"),
    Case("merged", {"merged": 3}, 1, 4, schedule="per_micro_batch"),
    Case("fork", {"image": 2, "text": 2}, {"image": 1, "text": 1}, 4),
]


def test_messages_of_changing_shapes_are_their_tensors_and_nothing_else():
    """That a step has one announcement along an edge is in `test_message_order.py`.

    Outlined micro-batches are loaded when their turn comes, others all before the first is used.
    The losses are the same, to the last bit."""
    steps = communication_cases.steps_of_one_engine
    outlined, ahead = (run_all(steps, VARYING, way, 2) for way in (True, False))
    for (case, ones), (_, others) in zip(outlined, ahead):
        times = 2 if case.schedule == "replay" else 1
        for one, other in zip(ones, others):
            assert one["sent"] == [times * number for number in one["tensors"]], case
            assert one["losses"] == other["losses"], case
            assert len(one["loads"]) == len(other["loads"]), case
            if one["sent"]:
                assert len(set(one["loads"])) == len(one["loads"]) // 2, case
                assert set(other["loads"]) <= {0}, case


def test_a_layer_that_makes_other_tensors_than_its_template_ends_the_run():
    """One clear error, from its rank, and no rank that waits."""
    case = Case("merged", {"merged": 2}, 1, 8)
    broken = communication_cases.a_layer_that_breaks_its_word
    with pytest.raises(
        RuntimeError,
        match=r"(?s)rank 0 failed.*rank 1 expects a message of .*image_hidden float32 \[8, 17, 48\].*"
        r"but this stage made .*image_hidden float32 \[8, 16, 48\]",
    ):
        run_ranks(
            2, broken, case, "image.encoder.layers.encoder_layer_1", "image_hidden", timeout_s=60
        )


def test_a_weight_that_no_message_carries_is_refused():
    case = Case("merged", {"merged": 1}, 1, 24, weighted=("image",))
    for weight in (torch.tensor(2**31 - 1), torch.tensor(-1), torch.tensor(1.0)):
        said = rf"{weight.dtype} and values from .*weights are int64 from 0 to {2**31 - 2}"
        with pytest.raises(RuntimeError, match=f"(?s)ValueError: image_weight has dtype {said}"):
            run_ranks(1, communication_cases.a_weight_that_does_not_fit, case, weight)


def test_a_fast_stage_does_not_fill_the_memory_with_messages(of_two):
    """The third waits until the first has arrived."""
    assert of_two["sends_in_flight"] == [[1, 2, 2, 2, 2], []]


def test_a_posted_receive_takes_the_message_while_its_rank_is_busy(of_two):
    """Without a posted receive gloo holds the message back: the sender would wait for a receiver
    that waits for it."""
    assert of_two["posted_receives_overlap"] == [True, True]


def test_replicas_gather_and_branches_cross():
    """Unequal numbers of replicas and of rows: at the end every last stage has every row of both
    branches, in order."""
    gather = communication_cases.gathering_and_crossing
    for replicas, rows in (
        ({"image": 3, "text": 1}, {"image": [2, 5, 1], "text": [8]}),
        ({"image": 1, "text": 3}, {"image": [8], "text": [0, 4, 4]}),
        ({"image": 2, "text": 3}, {"image": [7, 0], "text": [1, 5, 1]}),
        ({"image": 3, "text": 2}, {"image": [0, 0, 0], "text": [0, 0]}),
    ):
        whole = {
            branch: [[offset + i, offset + 10 * i] for i in range(sum(rows["image"]))]
            for branch, offset in (("image", 0), ("text", 1000))
        }
        number = sum(replicas.values())
        for rank, result in enumerate(run_ranks(number, gather, replicas, rows)):
            branch = "image" if rank < replicas["image"] else "text"
            mean = (replicas[branch] - 1) / 2
            assert result["branch"] == branch and result["counts"] == rows[branch]
            assert result["whole"] == whole[branch] and result["crossed"] == whole
            assert result["sum"] == number
            assert result["averages"] == [[mean, mean], 10 * mean]
            assert result["dtypes"] == ["torch.float32", "torch.float64"]


# -- signatures, without processes


def test_what_comes_back_are_gradients_of_the_branches_that_learn():
    signature = signature_of(
        {
            "text_β": torch.zeros(2, 0, 3, dtype=torch.bfloat16),
            "text_position": torch.zeros((), dtype=torch.int64),
            "image_hidden": torch.zeros(4),
        }
    )
    assert signature == (
        ("text_β", torch.bfloat16, (2, 0, 3)),
        ("text_position", torch.int64, ()),
        ("image_hidden", torch.float32, (4,)),
    )
    assert gradients_of(signature, OBJECTIVE, ("image", "text")) == (signature[0], signature[2])
    assert gradients_of(signature, OBJECTIVE, ("image",)) == (signature[2],)


def test_a_dtype_that_does_not_travel():
    with pytest.raises(TypeError, match="tensor 'mask' has dtype torch.bool.*torch.int64"):
        signature_of({"mask": torch.zeros(2, dtype=torch.bool)})


def test_groups_are_warmed_up_with_every_kind_of_collective_in_four_sizes(of_two):
    for ran in of_two["warmed_up"]:
        for kind in communication_cases.COLLECTIVES:
            numbers = [number for name, number in ran if name == kind]
            assert numbers == [2, 8 << 10, 512 << 10, 25 << 18]


def test_groups_are_made_that_are_used():
    """And nothing is missing that DeepSpeed's constructors, which make more of them, set."""
    # three stages; an edge, both ways and for announcements; embeddings, both ways in one
    of_fork = [(0,), (1,), (2,), *[(0, 1)] * 3, (1, 2)]
    for case, groups in (
        (Case("merged", {"merged": 1}, 4, 6), [(0, 1, 2, 3)]),
        (Case("fork", {"image": 2, "text": 1}, {"image": 1, "text": 1}, 4), of_fork),
    ):
        ran = run_ranks(case.world_size, communication_cases.groups_made, case)
        for made, of_module, of_grid in ran:
            assert sorted(made, key=lambda ranks: (len(ranks), ranks)) == groups, case
            assert of_module == ["parts"]  # of `_partition_layers`, in whose place ours is
            assert of_grid == []


def layouts(replicas: tuple[int, int]) -> list[StageGraph]:
    cuts, longer = ({b: [range(1)] * n for b in BRANCHES} for n in (1, 2))
    of = dict(zip(BRANCHES, replicas))
    return [
        *(merged(each, replicas[0]) for each in (cuts, longer)),
        *(fork(each, of) for each in (cuts, longer)),
    ]


@pytest.mark.parametrize("matching", [None, Matching()])
def test_the_planner_counts_the_communicators_that_are_made(matching):
    """The world's counts; channels of an edge, which have few blocks, count as one."""
    objective = Objective(
        tuple(map(Branch, BRANCHES)), (Pair(*BRANCHES, InfoNCE(), matching=matching),)
    )
    costs = proportional({b: [1.0] for b in BRANCHES}, memory_bytes=0.0, communicator_bytes=-1.0)
    if matching:
        costs = replace(costs, pairs=costs.layers["text"][0])
    for graph in itertools.chain(*map(layouts, itertools.product((1, 2, 3), repeat=2))):
        if graph.world_size > 1:
            made = communication_cases.communicators_made(graph, objective)
            assert max(made) == room_bytes(graph, costs), graph.describe()
            assert max(made) <= 6, graph.describe()  # however many replicas there are


ALONE = [
    Case("fork", {"image": 1, "text": 1}, {"image": 1, "text": 1}, 12),
    Case("fork", {"image": 1, "text": 1}, {"image": 1, "text": 1}, 12, precision="bf16"),
    Case("fork", {"image": 1, "text": 1}, {"image": 2, "text": 1}, 12),
    Case("merged", {"merged": 1}, 1, 12),
    Case("merged", {"merged": 1}, 1, 12, zero_stage=0),
    # which tells itself numbers through a group of the host
    Case("merged", {"merged": 1}, 1, 12, fusion=1),
]


def test_a_rank_by_itself_connects_nothing_and_copies_no_gradients():
    """NCCL makes a communicator of one rank, too, with its first operation."""
    for case, of_ranks in run_all(communication_cases.groups_used, ALONE):
        for alone, averaged in of_ranks:
            assert alone == [], case
            # DeepSpeed's ZeRO-1 of fp32 takes them out of their tensors whatever the replicas
            if case.zero_stage == 0 or case.precision == "bf16" or case.replicas == 1:
                assert [name for name, numbers in averaged if numbers > 1] == [], case


def test_what_was_handed_on_is_freed_before_its_backward():
    case = Case("merged", {"merged": 2}, 1, 4)
    (num_sent, num_alive), _ = run_ranks(case.world_size, communication_cases.outputs_alive, case)
    assert num_sent == 2 * 6 and num_alive == 0
