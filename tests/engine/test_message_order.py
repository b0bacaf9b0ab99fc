"""The order of messages, collectives and waits on all communicators, read from the instruction
lists: the same at both ends, and without a cycle of waits (`engine/README.md`, "Order of
messages")."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from unittest import mock

import pytest
from cost_models import BRANCHES
from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeInstruction, ReduceGrads
from message_order import Group, Operation, Work, disagreements, operations, recorded, waiting
from ranks import run_all
from schedule_cases import cases, keeping, lists, name, random_cases
from split_training import Case

from engine.communication import Channel
from engine.objective import Branch, Joint, Objective, Pair
from engine.optimizer.locking import lock_graph
from engine.schedule import (
    SCHEDULES,
    BatchSync,
    ComputeLoss,
    ForwardOnly,
    PerMicroBatch,
    Replay,
    StageSchedule,
    receives_to_post,
)
from engine.topology import StageGraph, fork, merged
from models.losses import InfoNCE, Matching, Views

with mock.patch.dict(SCHEDULES), mock.patch.dict(sys.modules):  # it registers itself
    OneByOne = importlib.import_module("examples.schedule").OneByOne
TWO = Objective(tuple(map(Branch, BRANCHES)), (Pair(*BRANCHES, InfoNCE()),))
MATCHED = replace(TWO, terms=(replace(TWO.terms[0], matching=Matching()),))
THREE = Objective(
    tuple(map(Branch, (*BRANCHES, "sound"))),
    (
        Pair("image", "text", InfoNCE()),
        Pair("sound", "text", InfoNCE(), prefix="sound_text_"),
        Pair("image", "sound", InfoNCE(), prefix="image_sound_"),
    ),
)

WITHOUT_A_LOSS = replace(THREE, terms=THREE.terms[:2])  # image and sound are evaluated only


TAUGHT = replace(  # beside its pairs a term over one branch, and one over all three
    WITHOUT_A_LOSS,
    terms=(
        *WITHOUT_A_LOSS.terms,
        Joint(("text",), Views(InfoNCE()), prefix="text_text_"),
        Joint(("image", "text", "sound"), InfoNCE(), prefix="three_", kind="likeness"),
    ),
)

UNEQUAL = tuple(
    tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:])) for ends in ((0, 5, 10), (10, 17, 24))
)  # of two replicas


def check(work: Work, case: str) -> None:
    through_host = {rank: operations(work, rank) for rank in work.programs}
    on_device = {rank: operations(work, rank, posts_ahead=False) for rank in work.programs}
    assert disagreements(through_host) == disagreements(on_device) == [], case
    # stricter than a channel, on which `SENDS_IN_FLIGHT` sends may be on their way
    assert waiting(through_host, sends_in_flight=0) == {}, case
    assert waiting(on_device, Channel.SENDS_IN_FLIGHT, passes_wait=True, kernels=2) == {}, case


def check_schedules(graph: StageGraph, numbers: Mapping[str, int], objective: Objective) -> None:
    schedules: list[Callable] = [BatchSync, OneByOne, *map(keeping, (0, 1, 3, 9))]
    if len(set(numbers.values())) == 1:  # the losses of a micro-batch need all branches
        schedules.append(PerMicroBatch)
    for number, schedule in enumerate(schedules):
        programs = lists(graph, numbers, schedule)
        case = f"{graph.describe()} {numbers} {schedule}"
        check(Work(graph, objective, programs, equal_shares=number % 2 == 0), case)
    # evaluation: the last replicas have fewer micro-batches, or none
    programs = {
        rank: [
            i
            for group in ForwardOnly(stage, max(0, number - 2 * graph.replica_of(rank)))
            for i in group
        ]
        for rank in range(graph.world_size)
        for stage in (graph.stage_of(rank),)
        for number in (numbers[next(iter(stage.layers))],)
    }
    check(Work(graph, objective, programs, evaluates=True), graph.describe())


def test_nothing_waits_for_ever():
    """Every layout under every schedule."""
    for case in cases()[::4] + random_cases(40):
        check_schedules(*case, TWO)


def test_nothing_waits_for_ever_where_tokens_are_exchanged():
    for case in cases()[::4]:
        for schedule in (BatchSync, Replay):
            check(Work(case[0], MATCHED, lists(*case, schedule)), name(case))


@pytest.mark.parametrize("locked", [{"image"}, {"text"}, {"image", "first text"}])
def test_nothing_waits_for_ever_where_towers_are_locked(locked):
    """Stages without a backward, and stages whose gradients nobody wants."""
    for graph, numbers in cases()[::7]:
        learns = {}
        for branch in graph.branches:
            last = max(s.layers[branch].stop for s in graph.stages if branch in s.layers) - 1
            first_is_locked = f"first {branch}" in locked
            learns[branch] = tuple(
                branch not in locked and not (first_is_locked and i < last) for i in range(last + 1)
            )
        check_schedules(lock_graph(graph, learns), numbers, TWO)


def graphs_of_three() -> Iterator[tuple[StageGraph, dict[str, int]]]:
    cuts = {branch: [range(i, i + 1) for i in range(2)] for branch in THREE.names}
    for replicas in (1, 2, 3):
        yield merged(cuts, replicas), dict.fromkeys(THREE.names, 4)
    for depths, replicas in (
        ((1, 1, 1), (1, 1, 1)),
        ((2, 1, 1), (1, 2, 1)),
        ((1, 2, 3), (3, 1, 2)),
        ((2, 2, 2), (2, 3, 4)),
        ((3, 1, 2), (1, 4, 3)),
    ):
        own = {
            branch: [range(i, i + 1) for i in range(depth)]
            for branch, depth in zip(THREE.names, depths)
        }
        for numbers in ((4, 4, 4), (6, 2, 3)):
            yield fork(own, dict(zip(THREE.names, replicas))), dict(zip(THREE.names, numbers))


def test_nothing_waits_for_ever_with_three_branches():
    for graph, numbers in graphs_of_three():
        is_even = len(set(numbers.values())) == 1
        check_schedules(graph, numbers, THREE if is_even else WITHOUT_A_LOSS)
        check_schedules(graph, numbers, TAUGHT)


@pytest.mark.parametrize("schedule", [BatchSync, Replay, PerMicroBatch, OneByOne])
def test_a_receive_is_posted_one_pass_ahead(schedule):
    """Once each, in the order of the waits, and at most one of a channel beside the one that is
    waited for."""
    for case in cases()[::5]:
        for program in lists(*case, schedule).values():
            posted, awaited = [], []
            for instruction, receives in zip(program, receives_to_post(program), strict=True):
                posted += receives
                if type(instruction).__name__.startswith("Recv"):
                    awaited.append(instruction)
                for kind in {type(receive) for receive in posted}:
                    mine = [receive for receive in posted if type(receive) is kind]
                    done = [receive for receive in awaited if type(receive) is kind]
                    assert mine[: len(done)] == done, name(case)
                    assert len(mine) - len(done) <= 2, name(case)
            assert len(posted) == len(awaited), name(case)


# -- what the test above is there to see


class WaitsForBoth(StageSchedule):
    """Wrong on purpose: asks for the gradient of a micro-batch before its neighbour can have the
    loss."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            yield [*self.forward(m), *self.backward(m)]
        if self.own_stage.is_last:
            yield [ComputeLoss()]
        yield [ReduceGrads(), OptimizerStep()]


class LastFirst(BatchSync):
    """Wrong on purpose: the last stage asks for its inputs in another order than they are sent."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        groups = list(super().steps())
        forwards = groups[: self.micro_batches]
        yield from reversed(forwards) if self.own_stage.is_last else forwards
        yield from groups[self.micro_batches :]


LINE = merged({branch: [range(0, 1), range(1, 2)] for branch in BRANCHES}, 1)
NUMBERS = dict.fromkeys(BRANCHES, 5)


def of_ranks(schedule, graph=LINE, numbers=NUMBERS, posts_ahead=True) -> dict[int, list[Operation]]:
    work = Work(graph, TWO, lists(graph, numbers, schedule))
    return {rank: operations(work, rank, posts_ahead) for rank in work.programs}


def test_another_order_at_the_other_end_is_seen():
    assert disagreements(of_ranks(LastFirst)) == [Group("activations", (0, 1))]


def test_a_cycle_of_waits_is_seen():
    found = of_ranks(BatchSync) | {0: of_ranks(WaitsForBoth)[0]}
    assert waiting(found, 0) == {0: "wait gradients 0", 1: "wait activations 1"}


def test_a_message_too_many_is_seen():
    fewer = of_ranks(BatchSync, numbers=dict.fromkeys(BRANCHES, 4))
    found = {0: of_ranks(BatchSync)[0], 1: fewer[1]}
    assert Group("activations", (0, 1)) in disagreements(found)
    assert waiting(found, 0)[0] == "send activations 4"


def test_both_directions_need_a_communicator_each():
    """With one for both, a receive that is posted ahead holds up the message for which the other
    side waits."""

    def shared(operation: Operation) -> Operation:
        group = operation.group
        if group is not None and group.name in ("activations", "gradients"):
            return operation._replace(group=Group("edge", tuple(sorted(group.ranks))))
        return operation

    for schedule in (Replay, PerMicroBatch, BatchSync):
        found = {rank: list(map(shared, own)) for rank, own in of_ranks(schedule).items()}
        assert waiting(found, 0) != {}


def test_receives_that_are_posted_ahead_let_every_send_leave():
    """Where they are posted only when they are waited for, both ends of an edge may send, and
    nobody receives, unless a send may be on its way."""
    found = of_ranks(PerMicroBatch)
    late: dict[int, list[Operation]] = {}
    for rank, own in found.items():
        late[rank] = [
            each
            for operation in own
            if operation.kind != "post"
            for each in (
                [operation._replace(kind="post"), operation]
                if operation.kind == "wait"
                else [operation]
            )
        ]
    assert waiting(late, 0) == {0: "send activations 1", 1: "send gradients 0"}
    assert waiting(late, 1) == waiting(found, 0) == {}


@pytest.mark.parametrize("schedule", [BatchSync, Replay, PerMicroBatch, OneByOne, keeping(3)])
def test_receives_posted_ahead_wait_for_ever_where_a_pass_waits_for_the_device(schedule):
    """A gradient's receive spins on the device, a pass in front of it waits for the device, and
    the gradient needs this pass: in `batch_sync` that of the first one needs the last forward."""
    found = of_ranks(schedule)
    assert waiting(found, Channel.SENDS_IN_FLIGHT) == {}
    assert waiting(found, Channel.SENDS_IN_FLIGHT, passes_wait=True)[0].startswith("pass ")


@pytest.mark.parametrize("schedule", [Replay, PerMicroBatch])
def test_a_device_must_have_room_for_two_operations(schedule):
    """Both ends of an edge send, and neither has room for what the other sends."""
    found = of_ranks(schedule, posts_ahead=False)
    assert waiting(found, Channel.SENDS_IN_FLIGHT, kernels=1) != {}
    assert waiting(found, Channel.SENDS_IN_FLIGHT, kernels=2) == {}


# -- the model and the executor


@pytest.mark.parametrize(
    "posts_ahead", [True, pytest.param(False, marks=pytest.mark.all("as on GPUs"))]
)
def test_the_executor_does_what_the_model_says(posts_ahead):
    """In a step and in an evaluation, in which later replicas have fewer micro-batches."""
    one, plain = {"image": 1, "text": 1}, {"towers": "resnet+bert", "zero_stage": 0}
    cases = [
        Case("merged", {"merged": 2}, 2, 4, schedule="replay", kept_micro_batches=1),
        Case("merged", {"merged": 2}, 1, 6, schedule="per_micro_batch", zero_stage=0),
        Case("merged", {"merged": 3}, 1, 6, loss="sigmoid"),
        Case("fork", {"image": 2, "text": 1}, {"image": 1, "text": 2}, {"image": 6, "text": 4}),
        # two scalars, one message for both
        Case("merged", {"merged": 1}, 2, 4, loss="sigmoid"),
        Case("fork", {"image": 1, "text": 2}, {"image": 2, "text": 1}, 6, fusion=1),
        Case("fork", one, {"image": 2, "text": 2}, 6, fusion=1),
        Case("merged", {"merged": 1}, 2, 6, fusion=1),
        Case("fork", one, {"image": 1, "text": 2}, 6, **plain),
        # unequal shares, of which all know beforehand
        Case(
            "fork", one, {"image": 1, "text": 2}, {"image": 4, "text": 6}, deals={"text": UNEQUAL}
        ),
    ]
    for case, of_ranks in run_all(recorded, cases, posts_ahead):
        for called, expected in (each for of_rank in of_ranks for each in of_rank):
            assert called == expected, case
