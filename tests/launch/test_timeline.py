"""launch.tools.timeline: a run's traced step beside its prediction; what is missing is said in one
line."""

import json
from dataclasses import asdict

import pytest
from cost_models import proportional

from engine.planning.costs import cost_model_from_json, cost_model_to_json
from engine.planning.planner import BranchBatch
from engine.planning.simulator import simulate
from engine.topology import StageGraph, chain, fork, merged
from engine.trace import Span
from launch.run.trace_file import TraceFile, read_trace
from launch.tools.drawing import busy_s, predicted_timeline
from launch.tools.timeline import choose_step, measured_tracks, prediction, run

COSTS = proportional(
    {"image": [0.004] * 6, "text": [0.003] * 4},
    optimizer_s_per_parameter=2e-9,
    gradient_s_per_parameter=1e-9,
)
CUTS = {"image": [range(0, 3), range(3, 6)], "text": [range(0, 4)]}
GRAPH = fork(CUTS, {"image": 2, "text": 1})
BATCHES = {"image": BranchBatch(2, 2, 4), "text": BranchBatch(1, 4, 4)}


@pytest.fixture
def run_dir(tmp_path):
    """A run whose every instruction took 1.25 times as long as predicted."""
    record = {
        "stage_graph": GRAPH.record(),
        "trainable": {"image": [True] * 99, "text": [True] * 99},
        "batches": {branch: asdict(batch) for branch, batch in BATCHES.items()},
        "schedule": "batch_sync",
    }
    (tmp_path / "config.json").write_text(json.dumps(record))
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(COSTS), allow_nan=False))
    predicted = predicted_timeline(
        "", GRAPH, simulate(GRAPH, BATCHES, "batch_sync", COSTS, timeline=True)
    )
    slower = [
        [Span(s.name, s.micro_batch, 1.25 * s.start_s, 1.25 * s.end_s) for s in spans]
        for spans in predicted.tracks.values()
    ]
    ranks = [
        (GRAPH.describe_rank(rank), slower[GRAPH.stage_of(rank).stage_id])
        for rank in range(GRAPH.world_size)
    ]
    trace = TraceFile(tmp_path / "trace.json")
    for step in (3, 100):
        trace.add(step, float(step), ranks)
    return tmp_path


def draw(run_dir, *arguments: object) -> int:
    return run([str(run_dir), *map(str, arguments)])


def test_predicted_above_measured(run_dir, capsys):
    draw(run_dir)
    out = capsys.readouterr().out
    predicted_s = simulate(GRAPH, BATCHES, "batch_sync", COSTS).step_s
    last = next(line for line in out.splitlines() if "step, all of it" in line)
    assert (
        f"{1e3 * predicted_s:.3g} ms" in last
        and f"{1.25e3 * predicted_s:.3g} ms" in last
        and "Step 100" in out
    )
    assert (
        out.splitlines()[-1] == str(run_dir / "timeline.png")
        and (run_dir / "timeline.png").stat().st_size > 10_000
    )


def test_the_table_has_a_row_per_stage_with_both_idle_shares(run_dir, capsys):
    draw(run_dir, "--step", 3)
    out = capsys.readouterr().out
    for stage in simulate(GRAPH, BATCHES, "batch_sync", COSTS).stages:
        row = next(line for line in out.splitlines() if line.strip().startswith(stage.name))
        assert (
            row.split()[-2:] == [f"{stage.idle_fraction:.0%}"] * 2
        )  # everything took 1.25 times as long: the same shares


def test_the_prediction_is_of_the_runs_own_stages_batches_and_schedule(run_dir):
    timeline, reason = prediction(run_dir, json.loads((run_dir / "config.json").read_text()))
    simulation = simulate(GRAPH, BATCHES, "batch_sync", COSTS)
    assert reason is None and timeline.step_s == simulation.step_s
    assert [busy_s(spans) for spans in timeline.tracks.values()] == pytest.approx(
        [stage.busy_s for stage in simulation.stages]
    )


def test_without_costs_only_what_was_measured_is_drawn_and_a_line_says_what_to_do(run_dir, capsys):
    (run_dir / "costs.json").unlink()
    draw(run_dir, "--output", run_dir / "own.png")
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "costs.json" in line]
    assert '"layout": "auto"' in line and (run_dir / "own.png").is_file()


def test_a_record_of_an_older_version_is_drawn_without_a_prediction(run_dir, capsys):
    record = json.loads((run_dir / "config.json").read_text())
    del record["schedule"]
    (run_dir / "config.json").write_text(json.dumps(record))
    draw(run_dir)
    assert "names no schedule" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json: no such file; give the folder of a run"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("trace.json", None, "trace.json: no such file; the run has traced no step yet"),
        ("trace.json", "{", "trace.json: not a trace"),
        ("trace.json", '{"traceEvents": []}', "trace.json: holds no step"),
        ("costs.json", '{"layers": {}}', "not a cost model of this version"),
    ],
)
def test_what_is_missing_or_broken_is_named_in_one_line(run_dir, capsys, name, content, message):
    (run_dir / name).unlink()
    if content is not None:
        (run_dir / name).write_text(content)
    assert draw(run_dir) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_step_that_was_not_traced_is_refused_with_those_that_were(run_dir, capsys):
    assert draw(run_dir, "--step", 4) == 2
    assert "--step 4: not in" in (err := capsys.readouterr().err) and "there are: 3, 100" in err


def test_tracks_are_ranks_and_in_a_large_world_one_of_each_stage(run_dir):
    step, ranks = choose_step(run_dir / "trace.json", None)
    assert step == 100 and ranks == read_trace(run_dir / "trace.json")[100]
    stages = {stage.name: stage.ranks for stage in GRAPH.stages}
    assert list(measured_tracks(stages, ranks)) == [
        "image 0, rank 0",
        "image 0, rank 1",
        "image 1, rank 2",
        "image 1, rank 3",
        "text 0, rank 4",
    ]
    large = {"image 0": range(512), "text 0": range(512, 1024)}
    assert list(measured_tracks(large, dict.fromkeys(range(1024), ()))) == [
        "image 0, rank 0",
        "text 0, rank 512",
    ]


def test_a_cost_model_survives_json():
    machine = {"ranks_per_node": 4, "node_bytes_per_s": 1e9}
    for costs in (
        COSTS,
        proportional({"image": [0.1], "text": [0.2]}, memory_bytes=float("inf"), **machine),
    ):
        assert (
            cost_model_from_json(json.loads(json.dumps(cost_model_to_json(costs), allow_nan=False)))
            == costs
        )


@pytest.mark.parametrize(
    "change",
    [
        {"layers": {"image": [{"name": "a"}]}},
        {"speed": 1},
        {"machine": {"name": "x"}},
        {"state": None},
    ],
)
def test_what_is_no_cost_model_is_refused(change):
    with pytest.raises(ValueError, match="not a cost model of this version"):
        cost_model_from_json({**cost_model_to_json(COSTS), **change})


@pytest.mark.parametrize(
    "graph",
    [
        GRAPH,
        chain(CUTS, 3),
        merged({"image": [range(0, 2), range(2, 6)], "text": [range(0, 1), range(1, 4)]}, 2),
    ],
    ids=lambda graph: graph.layout,
)
def test_a_graph_survives_its_record(graph):
    assert StageGraph.from_record(json.loads(json.dumps(graph.record()))) == graph


def test_a_graphs_record_of_an_older_version_is_refused():
    with pytest.raises(ValueError, match="the record has no 'previous'; an older version wrote it"):
        StageGraph.from_record(
            [{"layout": "fork", "name": "image 0", "ranks": [0], "layers": {"image": [0, 3]}}]
        )
