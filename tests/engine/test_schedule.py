"""The instruction lists, read without a process: complete, in order, and matched at both ends. That
nobody waits for ever: `test_message_order.py`."""

import re
from collections import Counter

import pytest
from cost_models import BRANCHES
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from schedule_cases import cases, keeping, lists, name, random_cases

import engine.schedule
from engine.schedule import (
    SCHEDULES,
    BatchSync,
    ComputeLoss,
    EmbedPass,
    ForwardOnly,
    PerMicroBatch,
    ReloadMicroBatch,
    Replay,
    ReplayPass,
)
from engine.topology import StageGraph, fork, merged


def of(program: list[PipeInstruction], kind: type) -> list[int]:
    return [i.buffer_id for i in program if type(i) is kind]


def at(program: list[PipeInstruction], kind: type, m: int | None = None) -> int:
    (place,) = [
        n for n, i in enumerate(program) if type(i) is kind and (m is None or i.buffer_id == m)
    ]
    return place


def in_flight(program: list[PipeInstruction]) -> int:
    """The most micro-batches between their forward with gradient and their backward."""
    alive = most = 0
    for instruction in program:
        alive += (type(instruction) in (ForwardPass, ReplayPass)) - (
            type(instruction) is BackwardPass
        )
        most = max(most, alive)
    return most


def every_micro_batch(graph: StageGraph, numbers: dict[str, int], rank: int) -> list[int]:
    return list(range(numbers[next(iter(graph.stage_of(rank).layers))]))


FORWARD = dict.fromkeys(SCHEDULES.values(), ForwardPass) | {Replay: ReplayPass}


@pytest.mark.parametrize("schedule", SCHEDULES.values())
@pytest.mark.parametrize("case", cases(), ids=name)
def test_every_micro_batch_once_and_in_order(case, schedule):
    graph, numbers = case
    for rank, program in lists(graph, numbers, schedule).items():
        stage, every = graph.stage_of(rank), every_micro_batch(graph, numbers, rank)
        times = 2 if schedule is Replay else 1  # activations travel again
        assert of(program, FORWARD[schedule]) == of(program, BackwardPass) == every
        assert of(program, EmbedPass) == (every if schedule is Replay else [])
        assert of(program, LoadMicroBatch) == (every if stage.loads else [])
        assert of(program, ReloadMicroBatch) == (
            every if stage.loads and schedule is Replay else []
        )
        assert of(program, RecvActivation) == (every * times if stage.previous is not None else [])
        assert of(program, SendActivation) == (every * times if stage.next is not None else [])
        assert of(program, SendGrad) == (every if stage.previous is not None else [])
        assert of(program, RecvGrad) == (every if stage.next is not None else [])
        for m in every:
            needs = [n for n, i in enumerate(program) if type(i) in INPUTS and i.buffer_id == m]
            forwards = [
                n
                for n, i in enumerate(program)
                if type(i) in (EmbedPass, ForwardPass, ReplayPass) and i.buffer_id == m
            ]
            each = len(needs) // len(forwards)
            assert each >= 1 and len(forwards) == times
            for k, forward in enumerate(forwards):
                assert max(needs[k * each : (k + 1) * each]) < forward
            backward = at(program, BackwardPass, m)
            assert forwards[-1] < backward
            if stage.next is not None:
                sent = [
                    n
                    for n, i in enumerate(program)
                    if type(i) is SendActivation and i.buffer_id == m
                ]
                assert all(forward < send for forward, send in zip(forwards, sent, strict=True))
                assert sent[-1] < at(program, RecvGrad, m) < backward
            if stage.previous is not None:
                assert backward < at(program, SendGrad, m)


INPUTS = (LoadMicroBatch, ReloadMicroBatch, RecvActivation)


@pytest.mark.parametrize("schedule", [BatchSync, Replay])
@pytest.mark.parametrize("case", cases(), ids=name)
def test_one_loss_after_all_forwards_and_before_every_backward(case, schedule):
    graph, numbers = case
    for rank, program in lists(graph, numbers, schedule).items():
        kinds = Counter(type(i) for i in program)
        assert kinds[ComputeLoss] == (1 if graph.stage_of(rank).is_tail else 0)
        if graph.stage_of(rank).is_tail:
            before = program[: at(program, ComputeLoss)]
            assert of(
                before, EmbedPass if schedule is Replay else ForwardPass
            ) == every_micro_batch(graph, numbers, rank)
            assert of(before, BackwardPass) == of(before, ReplayPass) == []


@pytest.mark.parametrize("case", cases(), ids=name)
def test_per_micro_batch_has_a_loss_between_each_forward_and_its_backward(case):
    graph, numbers = case
    for rank, program in lists(graph, numbers, PerMicroBatch).items():
        every = every_micro_batch(graph, numbers, rank)
        assert of(program, ComputeLoss) == (every if graph.stage_of(rank).is_tail else [])
        for m in of(program, ComputeLoss):
            assert (
                at(program, ForwardPass, m)
                < at(program, ComputeLoss, m)
                < at(program, BackwardPass, m)
            )


@pytest.mark.parametrize("schedule", SCHEDULES.values())
def test_a_step_ends_with_reduction_and_optimizer(schedule):
    for graph, numbers in cases():
        for program in lists(graph, numbers, schedule).values():
            kinds = Counter(type(i) for i in program)
            assert [type(i) for i in program[-2:]] == [ReduceGrads, OptimizerStep]
            assert kinds[ReduceGrads] == kinds[OptimizerStep] == 1


@pytest.mark.parametrize("kept", [1, 2, 5])
@pytest.mark.parametrize("case", cases(), ids=name)
def test_replay_runs_the_micro_batches_it_keeps_once_and_the_others_twice(case, kept):
    graph, numbers = case
    programs, loss = lists(graph, numbers, keeping(kept)), ComputeLoss
    for rank, program in programs.items():
        stage, every = graph.stage_of(rank), every_micro_batch(graph, numbers, rank)
        first, others = every[:kept], every[kept:]
        assert of(program, ForwardPass) == first
        assert of(program, EmbedPass) == of(program, ReplayPass) == others
        assert of(program, BackwardPass) == every
        assert of(program, LoadMicroBatch) == (every if stage.loads else [])
        assert of(program, ReloadMicroBatch) == (others if stage.loads else [])
        assert [i.kwargs.get("keep", False) for i in program if type(i) is LoadMicroBatch] == (
            [m in others for m in every] if stage.loads else []
        )
        assert in_flight(program) == max(len(first), min(stage.num_downstream + 1, len(every)))
        for m in others:
            assert at(program, ReplayPass, m) < at(program, BackwardPass, m)
        if stage.is_tail:
            assert (
                of(program[: at(program, loss)], ForwardPass)
                + of(program[: at(program, loss)], EmbedPass)
                == every
            )
    for source, target in graph.edges():
        assert of(programs[source], SendActivation) == of(programs[target], RecvActivation) != []
        assert of(programs[target], SendGrad) == of(programs[source], RecvGrad) != []


@pytest.mark.parametrize("case", cases(), ids=name)
def test_replay_that_keeps_everything_is_batch_sync(case):
    graph, numbers = case
    ways = [lists(graph, numbers, schedule) for schedule in (BatchSync, keeping(20))]
    every, other = (
        [[(type(i), i.kwargs) for i in program] for program in way.values()] for way in ways
    )
    assert every == other


@pytest.mark.parametrize("case", cases() + random_cases(100), ids=name)
def test_activations_in_flight(case):
    """batch_sync holds all micro-batches; the others one more than there are stages behind, however
    many there are."""
    graph, numbers = case
    for rank in range(graph.world_size):
        stage, number = graph.stage_of(rank), len(every_micro_batch(graph, numbers, rank))
        assert in_flight(lists(graph, numbers, BatchSync)[rank]) == number
        for schedule in (Replay, PerMicroBatch):
            assert in_flight(lists(graph, numbers, schedule)[rank]) == min(
                stage.num_downstream + 1, number
            )


@pytest.mark.parametrize("schedule", SCHEDULES.values())
@pytest.mark.parametrize("case", cases(), ids=name)
def test_sends_match_receives_along_every_edge(case, schedule):
    graph, numbers = case
    programs = lists(graph, numbers, schedule)
    for source, target in graph.edges():
        assert of(programs[source], SendActivation) == of(programs[target], RecvActivation) != []
        assert of(programs[target], SendGrad) == of(programs[source], RecvGrad) != []


@pytest.mark.parametrize("case", cases(), ids=name)
def test_forward_only_is_the_forward_half(case):
    graph, numbers = case
    training, evaluation = lists(graph, numbers), lists(graph, numbers, ForwardOnly)
    forward = (LoadMicroBatch, RecvActivation, ForwardPass, SendActivation)
    for rank in training:
        assert [(type(i), i.buffer_id) for i in evaluation[rank]] == [
            (type(i), i.buffer_id) for i in training[rank] if isinstance(i, forward)
        ]


def test_a_replica_without_held_out_samples_does_nothing():
    graph = fork({branch: [range(1)] for branch in BRANCHES}, {"image": 2, "text": 1})
    assert lists(graph, {"image": 0, "text": 0}, ForwardOnly) == {0: [], 1: [], 2: []}


def test_the_names_of_the_configuration():
    assert list(SCHEDULES.items()) == [
        ("batch_sync", BatchSync),
        ("replay", Replay),
        ("per_micro_batch", PerMicroBatch),
    ]


@pytest.mark.parametrize("word, schedule", [*SCHEDULES.items(), ("num_kept", keeping(2))])
def test_the_diagrams_in_the_documentation(word, schedule):
    graph = merged({branch: [range(0, 1), range(1, 2)] for branch in BRANCHES}, 1)
    letters = {
        EmbedPass: "E",
        ForwardPass: "F",
        ReplayPass: "F",
        BackwardPass: "B",
        ComputeLoss: "L",
        ReduceGrads: "R",
        OptimizerStep: "S",
    }
    programs = lists(graph, {"image": 4, "text": 4}, schedule)
    diagram = re.findall(
        rf"^(?:`{word}`:|[^\n]*`{word}` micro-batches).*?\n\n(.*?)\n(?:\n|$)",
        engine.schedule.__doc__,
        flags=re.DOTALL | re.MULTILINE,
    )[0]
    for rank, line in enumerate(diagram.splitlines()):
        drawn = re.findall(r"\b([A-Z]\d*)\b", re.sub(r" F forward.*| E forward.*", "", line))
        kinds = [
            (letters[type(i)], getattr(i, "buffer_id", None))
            for i in programs[rank]
            if type(i) in letters
        ]
        assert drawn == [letter + ("" if m is None else str(m)) for letter, m in kinds]
