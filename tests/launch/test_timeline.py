"""The timeline of a step: what is drawn is what was simulated or measured, in the report, by
launch.tools.plan and by launch.tools.timeline, which says in one line what is missing."""

import json
from dataclasses import asdict

import pytest
from cost_models import proportional

from common import __version__
from engine.batch import BranchBatch
from engine.planning.costs import cost_model_from_json, cost_model_to_json
from engine.planning.simulator import simulate
from engine.topology import fork, merged
from engine.trace import COMPUTE, WAIT, Span
from launch.reporting.timelines import (
    COMPUTING,
    IDLE,
    MOVED,
    Timeline,
    busy_s,
    describe_graph,
    idle_fraction,
    measured_step,
    predicted_step,
    seconds_by_label,
    timeline_figure,
)
from launch.run.trace_file import TraceFile, read_trace
from launch.terminal.tables import duration
from launch.tools.timeline import choose_step, run

COSTS = proportional(
    {"image": [0.004] * 6, "text": [0.003] * 4},
    optimizer_s_per_parameter=2e-9,
    gradient_s_per_parameter=1e-9,
)
CUTS = {"image": [range(0, 3), range(3, 6)], "text": [range(0, 4)]}
GRAPH = fork(CUTS, {"image": 2, "text": 1})
BATCHES = {"image": BranchBatch(2, 2, 4), "text": BranchBatch(1, 4, 4)}
ALL_LEARN = {"image": [True] * 99, "text": [True] * 99}
SPANS = [
    Span("RecvActivation", 0, 0.0, 0.25),
    Span("ForwardPass", 0, 0.25, 0.5),
    Span("ComputeLoss", None, 0.5, 1.0),
    Span(WAIT, None, 0.5, 0.75),
]


@pytest.fixture
def run_dir(tmp_path):
    """A run whose every instruction took 1.25 times as long as predicted."""
    record = {
        "training": {},
        "version": __version__,
        "stage_graph": GRAPH.record(),
        "trainable": ALL_LEARN,
        "batches": {branch: asdict(batch) for branch, batch in BATCHES.items()},
        "schedule": "batch_sync",
    }
    (tmp_path / "config.json").write_text(json.dumps(record))
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(COSTS), allow_nan=False))
    predicted = predicted_step(GRAPH, BATCHES, "batch_sync", COSTS)
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
    """Of the run's own stages, batches and schedule; a row per track with its idle share."""
    for step, given in ((100, ()), (3, ("--step", 3))):
        draw(run_dir, *given)
        lines = capsys.readouterr().out.splitlines()
        simulation = simulate(GRAPH, BATCHES, "batch_sync", COSTS)
        titles = f"Predicted: {duration(simulation.step_s)} a step", f"Measured, step {step}: "
        titles += (f"{duration(1.25 * simulation.step_s)} a step",)
        assert all(words in "\n".join(lines) for words in titles)
        for stage in simulation.stages:
            # everything took 1.25 times as long: the same shares
            for track in (
                f"Predicted, {stage.name} ×",
                f"Measured, step {step}, {stage.name}, rank",
            ):
                rows = [line for line in lines if line.strip().startswith(track)]
                assert rows and all(r.split()[-1] == f"{stage.idle_fraction:.0%}" for r in rows)
        assert lines[-1] == str(run_dir / "timeline.html")
        assert (run_dir / "timeline.html").stat().st_size > 10_000


def test_without_costs_only_what_was_measured_is_drawn_and_a_line_says_what_to_do(run_dir, capsys):
    (run_dir / "costs.json").unlink()
    draw(run_dir, "--output", run_dir / "own.html")
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "costs.json" in line]
    assert '"layout": "auto"' in line and (run_dir / "own.html").is_file()


def test_what_is_missing_or_broken_is_named_in_one_line(run_dir, capsys):
    assert draw(run_dir, "--step", 4) == 2
    assert "--step 4: not in" in (err := capsys.readouterr().err) and "there are: 3, 100" in err
    for name, content, message in (
        ("costs.json", '{"layers": {}}', "not a cost model of this version"),
        ("trace.json", '{"traceEvents": []}', "trace.json: holds no step"),
        ("trace.json", "{", "trace.json: not a trace"),
        ("trace.json", None, "trace.json: no such file; the run has traced no step yet"),
        ("config.json", "{", "config.json: is damaged"),
        ("config.json", None, "holds no config.json; give the folder of a run"),
    ):
        (run_dir / name).unlink()
        if content is not None:
            (run_dir / name).write_text(content)
        assert draw(run_dir) == 2, message
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1, message


def test_tracks_are_ranks_and_in_a_large_world_one_of_each_stage(run_dir):
    step, ranks = choose_step(run_dir / "trace.json", None)
    assert step == 100 and ranks == read_trace(run_dir / "trace.json")[100]
    stages = {stage.name: stage.ranks for stage in GRAPH.stages}
    assert list(measured_step(step, stages, ranks).tracks) == [
        *("image 0, rank 0", "image 0, rank 1", "image 1, rank 2", "image 1, rank 3"),
        "text 0, rank 4",
    ]
    large = {"image 0": range(512), "text 0": range(512, 1024)}
    tracks = measured_step(step, large, dict.fromkeys(range(1024), ())).tracks
    assert list(tracks) == ["image 0, rank 0", "text 0, rank 512"]


GRAPHS = {
    "batch_sync": fork(CUTS, {"image": 2, "text": 2}),
    "replay": merged({"image": [range(3), range(3, 6)], "text": [range(2), range(2, 4)]}, 3),
    "per_micro_batch": GRAPH,
}


def test_a_track_per_stage_whose_idle_share_is_the_simulators():
    for schedule, graph in GRAPHS.items():
        batches = {branch: BranchBatch(graph.last_stage(branch).replicas, 2, 4) for branch in CUTS}
        simulation = simulate(graph, batches, schedule, COSTS)
        predicted = predicted_step(graph, batches, schedule, COSTS)
        names = [f"{stage.name} ×{stage.replicas}" for stage in graph.stages]
        assert list(predicted.tracks) == names and predicted.step_s == simulation.step_s
        for spans, stage in zip(predicted.tracks.values(), simulation.stages):
            assert busy_s(spans) == pytest.approx(stage.busy_s, rel=1e-9), schedule
            idle = idle_fraction(spans, predicted.step_s)
            assert idle == pytest.approx(stage.idle_fraction, abs=1e-9), schedule
            around = [s for s in spans if s.name in ("ComputeLoss", "OptimizerStep")]
            for wait in (span for span in spans if span.name == WAIT):
                assert any(s.start_s <= wait.start_s <= wait.end_s <= s.end_s for s in around)


def test_the_parts_of_a_step_add_up_and_compute_as_long_as_the_timeline_says():
    spans = [
        Span("LoadMicroBatch", 0, 0.0, 1.0),
        Span(WAIT, None, 0.2, 0.4),  # is loading already
        Span("ForwardPass", 0, 1.0, 3.0),
        Span("ComputeLoss", None, 3.0, 6.0),
        Span(WAIT, None, 3.5, 5.5),
        Span("BackwardPass", 0, 6.0, 9.0),
    ]
    parts = seconds_by_label(spans, 12.0)
    assert sum(parts.values()) == pytest.approx(12.0)
    assert (parts[MOVED], parts["forward"], parts["loss"], parts[IDLE]) == (1.0, 2.0, 1.0, 3.0)
    assert busy_s(spans) == pytest.approx(6.0)
    assert busy_s(SPANS) == 0.5 and idle_fraction(SPANS, 2.0) == 0.75


def test_bars_have_their_colours_times_numbers_and_idle_shares():
    named = [*SPANS[:2], Span("<b>Load", "<i>", 0.0, 0.1)]  # no markup
    steps = [Timeline("a", {"image 0": SPANS}, 2.0), Timeline("b", {"<b>": named}, 1.0)]
    figure = timeline_figure(steps)
    bars = {(bar.name, bar.xaxis): bar for bar in figure.data}
    forward = bars["forward", "x"]
    assert (forward.base, forward.x, forward.text) == ((0.25,), (0.25,), ("0",))
    assert forward.marker.color == COMPUTING["ForwardPass"][1] and forward.y == (
        "image 0<br>75% idle",
    )
    assert bars["forward", "x2"].y == ("&lt;b&gt;<br>75% idle",)
    assert "&lt;b&gt;Load &lt;i&gt;" in [own[0] for own in bars[MOVED, "x2"].customdata]
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert titles == ["a: 2 s a step", "b: 1 s a step"]
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range == (0, 2.0)  # one time axis
    # each kind of instruction stands in the legend once
    assert sum(bar.showlegend for bar in figure.data) == len({bar.name for bar in figure.data})


def test_more_bars_than_can_be_seen_are_merged():
    spans = [Span("ForwardPass", i, i / 1000, (i + 0.99) / 1000) for i in range(1000)]
    (bar,) = timeline_figure([Timeline("", {"a": [*spans, Span("x", 0, 0, 0)]}, 1.0)], 100).data[1:]
    assert len(bar.x) == 1 and bar.x[0] == pytest.approx(1.0, abs=1e-3)


def test_every_computing_instruction_has_a_colour_of_its_own():
    assert COMPUTING.keys() == set(COMPUTE)
    assert len(dict(COMPUTING.values())) == len({c for _, c in COMPUTING.values()}) == len(COMPUTE)


def test_titles_are_short():
    graphs = [
        GRAPHS["batch_sync"],
        GRAPHS["replay"],
        merged({"image": [range(6)], "text": [range(4)]}, 4),
    ]
    assert [describe_graph(graph) for graph in graphs] == [
        "fork, image 2 × 2 | text 1 × 2 (stages × replicas)",
        "merged, 2 × 3 (stages × replicas)",
        "merged, 1 × 4 (stages × replicas)",
    ]


def test_a_cost_model_survives_json_and_nothing_else_is_one():
    machine = {"ranks_per_node": 4, "node_bytes_per_s": 1e9}
    endless = proportional({"image": [0.1], "text": [0.2]}, memory_bytes=float("inf"), **machine)
    for costs in (COSTS, endless):
        written = json.dumps(cost_model_to_json(costs), allow_nan=False)
        assert cost_model_from_json(json.loads(written)) == costs
    for change in (
        {"layers": {"image": [{"name": "a"}]}},
        {"speed": 1},
        {"machine": {"name": "x"}},
        {"state": None},
        {"compared": None},
    ):
        with pytest.raises(ValueError, match="not a cost model of this version"):
            cost_model_from_json({**cost_model_to_json(COSTS), **change})
