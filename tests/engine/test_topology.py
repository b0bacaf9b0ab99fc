"""The stage graph: who runs what, fed by whom; and the cut of a line of layers, exact against
trying everything."""

import itertools
import json
import random

import pytest
from cost_models import BRANCHES

from engine.topology import Stage, StageGraph, balanced_cuts, fork, merged

DEEP = {"image": [range(0, 3), range(3, 5)], "text": [range(0, 4)]}


def graphs() -> list[StageGraph]:
    """Forks with every mixture of depths and replicas up to 3, and lines."""
    found = []
    for image_stages, text_stages in itertools.product((1, 2, 3), repeat=2):
        depths = {"image": image_stages, "text": text_stages}
        cuts = {b: [range(i, i + 1) for i in range(depth)] for b, depth in depths.items()}
        found += [
            fork(cuts, {"image": i, "text": t}) for i, t in itertools.product((1, 2, 3), repeat=2)
        ]
    for count, replicas in itertools.product((1, 2, 3), repeat=2):
        line = {branch: [range(i, i + 1) for i in range(count)] for branch in BRANCHES}
        found.append(merged(line, replicas))
    return found


def test_fork_with_unequal_stages_and_replicas():
    graph = fork(DEEP, {"image": 2, "text": 3})
    image_0, image_1, text_0 = graph.stages
    assert [stage.name for stage in graph.stages] == ["image 0", "image 1", "text 0"]
    assert [stage.ranks for stage in graph.stages] == [(0, 1), (2, 3), (4, 5, 6)]
    assert [stage.replicas for stage in graph.stages] == [2, 2, 3]
    lines = [(stage.previous, stage.next) for stage in graph.stages]
    assert lines == [(None, 1), (0, None), (None, None)]
    assert [stage.loads for stage in graph.stages] == [("image",), (), ("text",)]
    assert [stage.last_of for stage in graph.stages] == [(), ("image",), ("text",)]
    assert [image_0.layers, image_1.layers] == [{"image": range(0, 3)}, {"image": range(3, 5)}]
    assert text_0.layers == {"text": range(0, 4)}
    assert graph.world_size == 7
    assert graph.edges() == [(0, 2), (1, 3)]  # replica by replica; nothing between the branches
    assert graph.last_stages == (image_1, text_0)
    assert graph.last_stage("image") is image_1 and graph.entry("image") is image_0
    assert graph.last_stage("text") is text_0 and graph.entry("text") is text_0
    assert graph.stage_of(3) is image_1 and graph.replica_of(3) == 1
    assert graph.stage_of(6) is text_0 and graph.replica_of(6) == 2


def test_merged_stages_hold_a_slice_of_both_branches():
    graph = merged({"image": [range(0, 3), range(3, 5)], "text": [range(0, 1), range(1, 4)]}, 2)
    first, last = graph.stages
    assert first.layers == {"image": range(0, 3), "text": range(0, 1)}
    assert last.layers == {"image": range(3, 5), "text": range(1, 4)}
    assert (first.loads, first.last_of, last.loads, last.last_of) == (BRANCHES, (), (), BRANCHES)
    assert (
        graph.edges() == [(0, 2), (1, 3)] and graph.world_size == 4 and graph.last_stages == (last,)
    )


def test_merged_of_one_stage_is_plain_data_parallel_training():
    graph = merged({"image": [range(0, 5)], "text": [range(0, 4)]}, 4)
    (stage,) = graph.stages
    assert stage.ranks == (0, 1, 2, 3) and stage.loads == stage.last_of == BRANCHES
    assert (stage.previous, stage.next) == (None, None) and graph.edges() == []


def test_every_graph_is_whole():
    for graph in graphs():
        stages, where = graph.stages, graph.describe()
        ranks = sorted(rank for stage in stages for rank in stage.ranks)
        assert ranks == list(range(graph.world_size)), where
        for rank in ranks:
            assert graph.stage_of(rank).ranks[graph.replica_of(rank)] == rank, where
        assert [stage.stage_id for stage in stages] == list(range(len(stages))), where
        for branch in BRANCHES:
            layers = [i for stage in stages for i in stage.layers.get(branch, ())]
            assert layers == list(range(len(layers))) and layers, where  # each once, in order
            assert sum(branch in stage.loads for stage in stages) == 1, where
            assert sum(branch in stage.last_of for stage in stages) == 1, where
            at = graph.entry(branch)  # an entry reaches its last stage
            while branch not in at.last_of:
                at = stages[at.next]
        for stage in stages:
            assert stage.next is None or stages[stage.next].previous == stage.stage_id, where
            assert stage.previous is None or stages[stage.previous].next == stage.stage_id, where
        for source, target in graph.edges():
            assert graph.stage_of(source).next == graph.stage_of(target).stage_id, where
            assert graph.replica_of(source) == graph.replica_of(target), where
        fed = [stage for stage in stages if stage.next is not None]
        assert len(graph.edges()) == sum(stage.replicas for stage in fed), where


def stage(
    stage_id: int, ranks: tuple[int, ...], previous: int | None = None, next: int | None = None
) -> Stage:
    layers = {"image": range(stage_id, stage_id + 1)}
    return Stage(stage_id, f"image {stage_id}", layers, ranks, previous, next, 0, ("image",))


def test_graphs_that_are_refused():
    for ranks in ((0, 1), (1, 2)), ((0,), (2,)), ((1,), (2,)):
        with pytest.raises(ValueError, match="do not number the world"):
            StageGraph("fork", tuple(stage(i, r) for i, r in enumerate(ranks)))
    with pytest.raises(ValueError, match="image 0 has 2 replicas and feeds image 1, which has 1"):
        StageGraph("fork", (stage(0, (0, 1), next=1), stage(1, (2,), previous=0)))


def test_describe_reads_as_a_line():
    forked = fork(DEEP, {"image": 3, "text": 2})
    assert forked.describe() == "fork: image 0 ×3 ─ image 1 ×3 | text 0 ×2"
    assert forked.describe_rank(5) == "rank 5 (image 1, replica 2)"
    one = {"image": [range(0, 2)], "text": [range(0, 3)]}
    assert merged(one, 4).describe() == "merged: merged 0 ×4"


def test_record_is_json_and_gives_the_graph_back():
    for graph in (
        fork(DEEP, {"image": 1, "text": 2}),
        merged({b: DEEP["image"] for b in DEEP}, 3),
    ):
        record = json.loads(json.dumps(graph.record()))
        assert StageGraph.from_record(record) == graph
    first = fork(DEEP, {"image": 1, "text": 2}).record()[0]
    assert (first["name"], first["ranks"], first["layers"]) == ("image 0", [0], {"image": [0, 3]})


def test_a_record_that_lacks_something_is_refused():
    record = fork(DEEP, {"image": 1, "text": 2}).record()
    del record[1]["trained"]
    with pytest.raises(ValueError, match="no 'trained'; an older version wrote it"):
        StageGraph.from_record(record)


def best_of_all(costs: list[float], parts: int) -> float:
    """The smallest possible cost of the costliest run, by trying every set of cuts."""
    count = len(costs)
    cuts = itertools.combinations(range(1, count), parts - 1)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *inner, count))) for inner in cuts
    )


def test_balanced_cuts_is_optimal():
    draw = random.Random(0)
    lines = [[0] * 5]  # zeros and ties on purpose; sums are exact
    lines += [[draw.choice([0, 1, 1, 2, 5, 20]) for _ in range(n % 9 + 1)] for n in range(40)]
    for costs in lines:
        for parts in range(1, len(costs) + 1):
            cuts = balanced_cuts(costs, parts)
            assert len(cuts) == parts and all(len(cut) > 0 for cut in cuts), costs
            assert [i for cut in cuts for i in cut] == list(range(len(costs))), costs
            costliest = max(sum(costs[i] for i in cut) for cut in cuts)
            assert costliest == best_of_all(costs, parts), (costs, parts)


def test_more_stages_than_layers():
    for parts in (0, 4, -1):
        with pytest.raises(ValueError, match=f"{parts} stages for 3 layers.*use 1 to 3"):
            balanced_cuts([1.0, 1.0, 1.0], parts)
