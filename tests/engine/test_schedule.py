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
    ReplayPass,
)
from engine.topology import StageGraph, fork, merged

CASES = cases()
INPUTS = (LoadMicroBatch, ReloadMicroBatch, RecvActivation)
FORWARDS = (EmbedPass, ForwardPass, ReplayPass)


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
        alive += type(instruction) in (ForwardPass, ReplayPass)
        alive -= type(instruction) is BackwardPass
        most = max(most, alive)
    return most


def every_micro_batch(graph: StageGraph, numbers: dict[str, int], rank: int) -> list[int]:
    return list(range(numbers[next(iter(graph.stage_of(rank).layers))]))


@pytest.mark.parametrize("schedule", [BatchSync, PerMicroBatch, *map(keeping, (0, 1, 2, 5))])
def test_every_micro_batch_once_and_in_order(schedule):
    """Under replay those that are not kept run and travel twice, and keep what they need for it."""
    for case in CASES:
        graph, numbers = case
        programs = lists(graph, numbers, schedule)
        for rank, program in programs.items():
            stage, every = graph.stage_of(rank), every_micro_batch(graph, numbers, rank)
            own = schedule(stage, len(every))
            twice = every[own.num_kept :] if own.recomputes else []
            where = f"{name(case)}, rank {rank}"
            expected = {
                ForwardPass: every[: len(every) - len(twice)],
                EmbedPass: twice,
                ReplayPass: twice,
                BackwardPass: every,
                LoadMicroBatch: every if stage.loads else [],
                ReloadMicroBatch: twice if stage.loads else [],
                RecvActivation: every + twice if stage.previous is not None else [],
                SendActivation: every + twice if stage.next is not None else [],
                SendGrad: every if stage.previous is not None else [],
                RecvGrad: every if stage.next is not None else [],
            }
            assert {kind: of(program, kind) for kind in expected} == expected, where
            loads = [i.kwargs.get("keep", False) for i in program if type(i) is LoadMicroBatch]
            assert loads == ([m in twice for m in every] if stage.loads else []), where
            for m in every:
                places = {
                    kinds: [
                        n for n, i in enumerate(program) if type(i) in kinds and i.buffer_id == m
                    ]
                    for kinds in (INPUTS, FORWARDS, (SendActivation,))
                }
                needs, forwards, sent = places.values()
                each = len(needs) // len(forwards)
                assert each >= 1 and len(forwards) == (2 if m in twice else 1), where
                for k, forward in enumerate(forwards):
                    assert max(needs[k * each : (k + 1) * each]) < forward, where
                backward = at(program, BackwardPass, m)
                assert forwards[-1] < backward, where
                if stage.next is not None:
                    assert all(a < b for a, b in zip(forwards, sent, strict=True)), where
                    assert sent[-1] < at(program, RecvGrad, m) < backward, where
                if stage.previous is not None:
                    assert backward < at(program, SendGrad, m), where
            assert [type(i) for i in program[-2:]] == [ReduceGrads, OptimizerStep], where
            kinds = Counter(type(i) for i in program)
            assert kinds[ReduceGrads] == kinds[OptimizerStep] == 1, where
        for source, target in graph.edges():
            down = of(programs[source], SendActivation), of(programs[target], RecvActivation)
            up = of(programs[target], SendGrad), of(programs[source], RecvGrad)
            assert down[0] == down[1] != [] and up[0] == up[1] != [], name(case)


@pytest.mark.parametrize("schedule", [BatchSync, *map(keeping, (0, 1, 2, 5))])
def test_one_loss_after_all_forwards_and_before_every_backward(schedule):
    for graph, numbers in CASES:
        for rank, program in lists(graph, numbers, schedule).items():
            where = f"{name((graph, numbers))}, rank {rank}"
            if not graph.stage_of(rank).is_last:
                assert not any(type(i) is ComputeLoss for i in program), where
                continue
            before = program[: at(program, ComputeLoss)]
            forwards = of(before, ForwardPass) + of(before, EmbedPass)
            assert forwards == every_micro_batch(graph, numbers, rank), where
            assert of(before, BackwardPass) == of(before, ReplayPass) == [], where


def test_per_micro_batch_has_a_loss_between_each_forward_and_its_backward():
    for case in CASES:
        graph, numbers = case
        for rank, program in lists(graph, numbers, PerMicroBatch).items():
            every = every_micro_batch(graph, numbers, rank)
            losses = of(program, ComputeLoss)
            assert losses == (every if graph.stage_of(rank).is_last else []), name(case)
            for m in losses:
                places = [at(program, kind, m) for kind in (ForwardPass, ComputeLoss, BackwardPass)]
                assert places == sorted(places), name(case)


def test_replay_that_keeps_everything_is_batch_sync():
    for case in CASES:
        every, other = (
            [[(type(i), i.kwargs) for i in program] for program in lists(*case, way).values()]
            for way in (BatchSync, keeping(20))
        )
        assert every == other, name(case)


def test_activations_in_flight():
    """batch_sync holds all micro-batches; the others one more than there are stages behind, however
    many there are, or those that they keep."""
    for case in CASES + random_cases(40):
        graph, numbers = case
        for schedule, kept in (
            (BatchSync, 99),
            (PerMicroBatch, 0),
            *((keeping(n), n) for n in (0, 2)),
        ):
            for rank, program in lists(graph, numbers, schedule).items():
                number = len(every_micro_batch(graph, numbers, rank))
                held = max(kept, graph.stage_of(rank).num_downstream + 1)
                assert in_flight(program) == min(held, number), name(case)


def test_forward_only_is_the_forward_half():
    forward = (LoadMicroBatch, RecvActivation, ForwardPass, SendActivation)
    for case in CASES:
        training, evaluation = lists(*case), lists(*case, ForwardOnly)
        for rank in training:
            assert [(type(i), i.buffer_id) for i in evaluation[rank]] == [
                (type(i), i.buffer_id) for i in training[rank] if isinstance(i, forward)
            ], name(case)


def test_a_replica_without_held_out_samples_does_nothing():
    graph = fork({branch: [range(1)] for branch in BRANCHES}, {"image": 2, "text": 1})
    assert lists(graph, {"image": 0, "text": 0}, ForwardOnly) == {0: [], 1: [], 2: []}


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
