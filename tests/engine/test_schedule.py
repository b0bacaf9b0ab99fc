"""The instruction lists, read without a process: complete, in order, matched at both ends, and free of deadlock."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
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

from engine.schedule import SCHEDULES, BatchSync, ComputeLoss, ForwardOnly, StageSchedule
from engine.topology import BRANCHES, StageGraph, chain, fork, merged

MATCH = {SendActivation: RecvActivation, SendGrad: RecvGrad}


def cases() -> list[tuple[StageGraph, dict[str, int]]]:
    """(graph, micro-batches by branch): lines with 1..6, forks with a draw of depths, replicas and counts of their own."""
    found = []
    for stages, replicas, number in itertools.product((1, 2, 3), (1, 2), range(1, 7)):
        line = {branch: [range(i, i + 1) for i in range(stages)] for branch in BRANCHES}
        found.append((merged(line, replicas), dict.fromkeys(BRANCHES, number)))
        found.append((chain(line, replicas), dict.fromkeys(BRANCHES, number)))
    draw = random.Random(0)
    for numbers in itertools.product(range(1, 7), repeat=2):
        cuts = {branch: [range(i, i + 1) for i in range(draw.randint(1, 3))] for branch in BRANCHES}
        replicas = {branch: draw.randint(1, 3) for branch in BRANCHES}
        found.append((fork(cuts, replicas), dict(zip(BRANCHES, numbers))))
    return found


def name(case: tuple[StageGraph, dict[str, int]]) -> str:
    return f"{case[0].describe()} M={case[1]['image']},{case[1]['text']}"


def lists(graph: StageGraph, numbers: dict[str, int], schedule=BatchSync) -> dict[int, list[PipeInstruction]]:
    """rank -> its instructions, as the executor asks for them: micro-batches are those of the stage's first branch."""
    programs = {}
    for rank in range(graph.world_size):
        stage = graph.stage_of(rank)
        programs[rank] = [i for group in schedule(stage, numbers[next(iter(stage.layers))]) for i in group]
    return programs


def of(program: list[PipeInstruction], kind: type) -> list[int]:
    return [i.buffer_id for i in program if type(i) is kind]


def at(program: list[PipeInstruction], kind: type, m: int | None = None) -> int:
    (place,) = [n for n, i in enumerate(program) if type(i) is kind and (m is None or i.buffer_id == m)]
    return place


@pytest.mark.parametrize("case", cases(), ids=name)
def test_every_micro_batch_once_and_in_order(case):
    graph, numbers = case
    for rank, program in lists(graph, numbers).items():
        stage = graph.stage_of(rank)
        every = list(range(numbers[next(iter(stage.layers))]))
        assert of(program, ForwardPass) == of(program, BackwardPass) == every
        assert of(program, LoadMicroBatch) == (every if stage.loads else [])
        assert of(program, RecvActivation) == of(program, SendGrad) == (every if stage.previous is not None else [])
        assert of(program, SendActivation) == of(program, RecvGrad) == (every if stage.next is not None else [])
        for m in every:
            inputs = [at(program, kind, m) for kind in (LoadMicroBatch, RecvActivation) if m in of(program, kind)]
            assert inputs and max(inputs) < at(program, ForwardPass, m) < at(program, BackwardPass, m)
            if stage.next is not None:
                assert (
                    at(program, ForwardPass, m) < at(program, SendActivation, m) < at(program, RecvGrad, m) < at(program, BackwardPass, m)
                )
            if stage.previous is not None:
                assert at(program, BackwardPass, m) < at(program, SendGrad, m)


@pytest.mark.parametrize("case", cases(), ids=name)
def test_one_loss_between_the_last_forward_and_the_first_backward(case):
    graph, numbers = case
    for rank, program in lists(graph, numbers).items():
        kinds = Counter(type(i) for i in program)
        assert kinds[ComputeLoss] == (1 if graph.stage_of(rank).is_tail else 0)
        if graph.stage_of(rank).is_tail:
            last = max(n for n, i in enumerate(program) if type(i) is ForwardPass)
            first = min(n for n, i in enumerate(program) if type(i) is BackwardPass)
            assert last < at(program, ComputeLoss) < first
        assert [type(i) for i in program[-2:]] == [ReduceGrads, OptimizerStep]
        assert kinds[ReduceGrads] == kinds[OptimizerStep] == 1


@pytest.mark.parametrize("case", cases(), ids=name)
def test_sends_match_receives_along_every_edge(case):
    graph, numbers = case
    programs = lists(graph, numbers)
    for source, target in graph.edges():
        assert of(programs[source], SendActivation) == of(programs[target], RecvActivation) != []
        assert of(programs[target], SendGrad) == of(programs[source], RecvGrad) != []


@pytest.mark.parametrize("case", cases(), ids=name)
def test_nothing_waits_for_ever_with_rendezvous_sends(case):
    """Stricter than the executor, whose sends return at once: here a send waits until its receiver has come."""
    graph, numbers = case
    assert blocked(graph, lists(graph, numbers)) == {}
    assert blocked(graph, lists(graph, numbers, ForwardOnly)) == {}


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
    assert list(SCHEDULES.items()) == [("batch_sync", BatchSync)]


def test_the_picture_in_the_documentation():
    graph = merged({branch: [range(0, 1), range(1, 2)] for branch in BRANCHES}, 1)
    letters = {ForwardPass: "F{}", BackwardPass: "B{}", ComputeLoss: "L", ReduceGrads: "R", OptimizerStep: "S"}

    def line(rank: int) -> str:
        return " ".join(letters[type(i)].format(getattr(i, "buffer_id", "")) for i in programs[rank] if type(i) in letters)

    programs = lists(graph, {"image": 4, "text": 4})
    assert line(0) == "F0 F1 F2 F3 B0 B1 B2 B3 R S"
    assert line(1) == "F0 F1 F2 F3 L B0 B1 B2 B3 R S"


# -- the model of blocking ranks ---------------------------------------------------------------------------------------


class WaitsForBoth(StageSchedule):
    """Wrong on purpose: asks for the gradient of a micro-batch before its neighbour can have the loss."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for m in range(self.micro_batches):
            yield [*self.forward(m), *self.backward(m)]
        if self.place.is_tail:
            yield [ComputeLoss()]
        yield [ReduceGrads(), OptimizerStep()]


class GradientsFirst(BatchSync):
    """Wrong on purpose: the last stage asks for its inputs in another order than they are sent."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        groups = list(super().steps())
        yield from reversed(groups[: self.micro_batches]) if self.place.is_tail else groups[: self.micro_batches]
        yield from groups[self.micro_batches :]


def test_the_model_sees_what_it_is_there_to_see():
    graph = merged({branch: [range(0, 1), range(1, 2)] for branch in BRANCHES}, 1)
    numbers = {"image": 3, "text": 3}
    assert blocked(graph, lists(graph, numbers, GradientsFirst)) == {0: "SendActivation 0", 1: "RecvActivation 2"}
    assert blocked(graph, {0: lists(graph, numbers, WaitsForBoth)[0], 1: lists(graph, numbers)[1]}) == {
        0: "RecvGrad 0",
        1: "RecvActivation 1",
    }
    unequal = lists(graph, numbers) | {1: lists(graph, {"image": 2, "text": 2})[1]}
    assert blocked(graph, unequal) == {0: "SendActivation 2", 1: "SendGrad 0"}


def blocked(graph: StageGraph, programs: dict[int, list[PipeInstruction]]) -> dict[int, str]:
    """Run all ranks' lists under rendezvous; returns rank -> the instruction it waits in for ever ({}: all ended).

    A send and its receive happen together. The loss waits for all tails, the reduction for the replicas of the stage,
    the optimizer step (overflow check, clipping) for the world.
    """
    place = dict.fromkeys(programs, 0)
    downstream, upstream = dict(graph.edges()), {target: source for source, target in graph.edges()}
    tails = [rank for stage in graph.tails for rank in stage.ranks]

    def now(rank: int) -> PipeInstruction | None:
        return programs[rank][place[rank]] if place[rank] < len(programs[rank]) else None

    def partners(rank: int, instruction: PipeInstruction) -> list[int] | None:
        """Everyone who moves on together with `rank`, or None when somebody is not there yet."""
        kind = type(instruction)
        if kind in MATCH:
            other = downstream[rank] if kind is SendActivation else upstream[rank]
            theirs = now(other)
            return [rank, other] if type(theirs) is MATCH[kind] and theirs.buffer_id == instruction.buffer_id else None
        if kind in MATCH.values():
            return None  # moved on by its sender
        together = {ComputeLoss: tails, ReduceGrads: graph.stage_of(rank).ranks, OptimizerStep: programs}.get(kind, [rank])
        return list(together) if all(type(now(other)) is kind for other in together) else None

    moved = True
    while moved:
        moved = False
        for rank in programs:
            instruction = now(rank)
            together = partners(rank, instruction) if instruction is not None else None
            for member in together or ():
                place[member] += 1
                moved = True
    return {
        rank: f"{type(i).__name__} {i.buffer_id}" if hasattr(i, "buffer_id") else type(i).__name__ for rank in programs if (i := now(rank))
    }
