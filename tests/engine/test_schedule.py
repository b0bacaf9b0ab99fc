"""The instruction lists, read without a process: complete, in order, matched at both ends, and free
of deadlock."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator

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

import engine.schedule
from engine.communication import Channel
from engine.schedule import (
    SCHEDULES,
    BackwardInputs,
    BackwardWeights,
    BatchSync,
    ComputeLoss,
    EmbedPass,
    ForwardOnly,
    PerMicroBatch,
    ReloadMicroBatch,
    Replay,
    ReplayPass,
    StageSchedule,
    ZeroBubble,
)
from engine.topology import StageGraph, chain, fork, merged

MATCH = {SendActivation: RecvActivation, SendGrad: RecvGrad}


def cases() -> list[tuple[StageGraph, dict[str, int]]]:
    """(graph, micro-batches by branch): lines with 1..6, forks with a draw of depths, replicas and
    counts of their own."""
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


def random_cases(count: int) -> list[tuple[StageGraph, dict[str, int]]]:
    """Lines and forks of up to 8 stages a branch, up to 4 replicas, up to 20 micro-batches."""
    draw, found = random.Random(1), []
    for _ in range(count):
        layout = draw.choice(("fork", "fork", "chain", "merged"))
        depth = {branch: draw.randint(1, 8) for branch in BRANCHES}
        cuts = {
            branch: [
                range(i, i + 1)
                for i in range(depth["image"] if layout == "merged" else depth[branch])
            ]
            for branch in BRANCHES
        }
        if layout == "fork":
            graph = fork(cuts, {branch: draw.randint(1, 4) for branch in BRANCHES})
            found.append((graph, {branch: draw.randint(1, 20) for branch in BRANCHES}))
        else:
            graph = (merged if layout == "merged" else chain)(cuts, draw.randint(1, 4))
            found.append((graph, dict.fromkeys(BRANCHES, draw.randint(1, 20))))
    return found


def name(case: tuple[StageGraph, dict[str, int]]) -> str:
    return f"{case[0].describe()} M={case[1]['image']},{case[1]['text']}"


def lists(
    graph: StageGraph, numbers: dict[str, int], schedule=BatchSync
) -> dict[int, list[PipeInstruction]]:
    """rank -> its instructions, as the executor asks for them: micro-batches are those of the
    stage's first branch."""
    programs = {}
    for rank in range(graph.world_size):
        stage = graph.stage_of(rank)
        programs[rank] = [
            i for group in schedule(stage, numbers[next(iter(stage.layers))]) for i in group
        ]
    return programs


def of(program: list[PipeInstruction], kind: type) -> list[int]:
    return [i.buffer_id for i in program if type(i) is kind]


def at(program: list[PipeInstruction], kind: type, m: int | None = None) -> int:
    (place,) = [
        n for n, i in enumerate(program) if type(i) is kind and (m is None or i.buffer_id == m)
    ]
    return place


def backward_of(program: list[PipeInstruction]) -> type:
    """What makes the gradients that are sent."""
    return BackwardInputs if of(program, BackwardInputs) else BackwardPass


def in_flight(program: list[PipeInstruction]) -> int:
    """The most micro-batches between their forward with gradient and their backward."""
    alive = most = 0
    for instruction in program:
        alive += (type(instruction) in (ForwardPass, ReplayPass)) - (
            type(instruction) in (BackwardPass, BackwardWeights)
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
        assert of(program, FORWARD[schedule]) == of(program, backward_of(program)) == every
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
            backward = at(program, backward_of(program), m)
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


@pytest.mark.parametrize("case", cases() + random_cases(100), ids=name)
def test_in_two_parts_come_the_backwards_that_another_stage_waits_for(case):
    """Every gradient of an input before any of a weight; where nobody waits, backwards stay
    whole."""
    graph, numbers = case
    for rank, program in lists(graph, numbers, ZeroBubble).items():
        every = every_micro_batch(graph, numbers, rank)
        splits = graph.stage_of(rank).previous is not None
        assert of(program, BackwardInputs) == of(program, BackwardWeights) == every * splits
        assert of(program, BackwardPass) == every * (not splits)
        if splits:
            assert at(program, BackwardInputs, every[-1]) < at(program, BackwardWeights, 0)
        assert in_flight(program) == len(every)


@pytest.mark.parametrize("schedule", [BatchSync, ZeroBubble, Replay])
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
            assert of(before, backward_of(program)) == of(before, ReplayPass) == []


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


def keeping(kept: int):
    """Replay in which the first `kept` micro-batches, at most all, keep their activations."""
    return lambda stage, number: Replay(stage, number, num_kept=min(kept, number))


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


@pytest.mark.parametrize("case", cases() + random_cases(300), ids=name)
def test_nothing_waits_for_ever(case):
    """Stricter than the executor, which lets two messages of a channel be on their way: here a send
    waits for its receive (batch_sync, evaluation), or for the receive of the message before (the
    others)."""
    graph, numbers = case
    assert blocked(graph, lists(graph, numbers, BatchSync), on_their_way=0) == {}
    assert blocked(graph, lists(graph, numbers, ZeroBubble), on_their_way=0) == {}
    assert blocked(graph, lists(graph, numbers, ForwardOnly), on_their_way=0) == {}
    for kept in (0, 1, 3, 9):
        assert blocked(graph, lists(graph, numbers, keeping(kept)), on_their_way=1) == {}
    if numbers["image"] == numbers["text"]:
        assert blocked(graph, lists(graph, numbers, PerMicroBatch), on_their_way=1) == {}


def test_the_executor_allows_what_the_model_needs():
    assert Channel.SENDS_IN_FLIGHT >= 1


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
        ("zero_bubble", ZeroBubble),
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
        BackwardInputs: "I",
        BackwardWeights: "W",
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
        drawn = re.findall(
            r"\b([A-Z]\d*)\b", re.sub(r" F forward.*| E forward.*| I gradients.*", "", line)
        )
        kinds = [
            (letters[type(i)], getattr(i, "buffer_id", None))
            for i in programs[rank]
            if type(i) in letters
        ]
        assert drawn == [letter + ("" if m is None else str(m)) for letter, m in kinds]


# -- the model of blocking ranks


class WaitsForBoth(StageSchedule):
    """Wrong on purpose: asks for the gradient of a micro-batch before its neighbour can have the
    loss."""

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
        yield from (
            reversed(groups[: self.micro_batches])
            if self.place.is_tail
            else groups[: self.micro_batches]
        )
        yield from groups[self.micro_batches :]


def test_the_model_sees_what_it_is_there_to_see():
    graph = merged({branch: [range(0, 1), range(1, 2)] for branch in BRANCHES}, 1)
    numbers = {"image": 3, "text": 3}
    assert blocked(graph, lists(graph, numbers, GradientsFirst), 0) == {
        0: "SendActivation 0",
        1: "RecvActivation 2",
    }
    assert blocked(graph, lists(graph, numbers, Replay), 0) == {
        0: "SendActivation 1",
        1: "SendGrad 0",
    }  # 1F1B needs one on its way
    assert blocked(graph, lists(graph, numbers, Replay), 1) == {}
    assert blocked(
        graph, {0: lists(graph, numbers, WaitsForBoth)[0], 1: lists(graph, numbers)[1]}, 0
    ) == {
        0: "RecvGrad 0",
        1: "RecvActivation 1",
    }
    unequal = lists(graph, numbers) | {1: lists(graph, {"image": 2, "text": 2})[1]}
    assert blocked(graph, unequal, 0) == {0: "SendActivation 2", 1: "SendGrad 0"}


def blocked(
    graph: StageGraph, programs: dict[int, list[PipeInstruction]], on_their_way: int
) -> dict[int, str]:
    """Run all ranks' lists; returns rank -> the instruction it waits in for ever ({}: all ended).

    A send ends when its message is received or at most `on_their_way` messages of its channel are
    not; 0 is rendezvous. The loss waits for all tails, the reduction for the replicas of the stage,
    the optimizer step for the world.
    """
    place = dict.fromkeys(programs, 0)
    downstream, upstream = dict(graph.edges()), {target: source for source, target in graph.edges()}
    tails = [rank for stage in graph.tails for rank in stage.ranks]
    channels: dict[tuple[int, int], list[int]] = {}  # (from, to) -> messages sent and not received

    def now(rank: int) -> PipeInstruction | None:
        return programs[rank][place[rank]] if place[rank] < len(programs[rank]) else None

    def move(rank: int) -> bool:
        instruction = now(rank)
        kind, m = type(instruction), getattr(instruction, "buffer_id", None)
        if instruction is None:
            return False
        if kind in MATCH:
            other = downstream[rank] if kind is SendActivation else upstream[rank]
            sent, theirs = channels.setdefault((rank, other), []), now(other)
            if len(sent) < on_their_way:
                sent.append(m)
                place[rank] += 1
                return True
            if not sent and type(theirs) is MATCH[kind] and theirs.buffer_id == m:  # together
                place[rank] += 1
                place[other] += 1
                return True
            return False
        if kind in MATCH.values():
            sent = channels.get(
                (upstream[rank] if kind is RecvActivation else downstream[rank], rank), []
            )
            if not sent or sent[0] != m:
                return False
            sent.pop(0)
            place[rank] += 1
            return True
        together = {
            ComputeLoss: tails,
            ReduceGrads: graph.stage_of(rank).ranks,
            OptimizerStep: list(programs),
        }.get(kind, [rank])
        if any(
            type(now(other)) is not kind or getattr(now(other), "buffer_id", None) != m
            for other in together
            if other != rank
        ):
            return False
        for other in together:
            place[other] += 1
        return True

    while any([move(rank) for rank in programs]):
        pass
    return {
        rank: f"{type(i).__name__} {i.buffer_id}" if hasattr(i, "buffer_id") else type(i).__name__
        for rank in programs
        if (i := now(rank))
    }
