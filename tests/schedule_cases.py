"""Stage graphs with numbers of micro-batches, and the instruction lists of all their ranks."""

import itertools
import random

from cost_models import BRANCHES
from deepspeed.runtime.pipe.schedule import PipeInstruction

from engine.schedule import BatchSync, Replay
from engine.topology import StageGraph, fork, merged


def cases() -> list[tuple[StageGraph, dict[str, int]]]:
    """(graph, micro-batches by branch): lines with 1..6, forks with a draw of depths, replicas and
    counts of their own."""
    found = []
    for stages, replicas, number in itertools.product((1, 2, 3), (1, 2), range(1, 7)):
        line = {branch: [range(i, i + 1) for i in range(stages)] for branch in BRANCHES}
        found.append((merged(line, replicas), dict.fromkeys(BRANCHES, number)))
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
        layout = draw.choice(("fork", "fork", "merged"))
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
            graph = merged(cuts, draw.randint(1, 4))
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


def keeping(kept: int):
    """Replay in which the first `kept` micro-batches, at most all, keep their activations."""
    return lambda stage, number: Replay(stage, number, num_kept=min(kept, number))
