"""launch.tools.drawing: what is drawn is what was simulated, in plots with something in them."""

import pytest
from cost_models import proportional
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread

from engine.planning.planner import BranchBatch, Candidate
from engine.planning.simulator import simulate
from engine.topology import chain, fork, merged
from engine.trace import WAIT, Span
from launch.tools.drawing import (
    COLOURS,
    Timeline,
    busy_s,
    draw_timeline,
    idle_fraction,
    predicted_timeline,
    save_comparison_png,
    save_plan_png,
    seconds,
    shape,
)

COSTS = proportional(
    {"image": [0.004] * 8, "text": [0.003] * 8},
    link_bytes_per_s=1e9,
    link_latency_s=1e-4,
    flops_per_s=1e9,
    optimizer_s_per_parameter=2e-9,
    gradient_s_per_parameter=1e-9,
    instruction_s=1e-5,
)
SPANS = [
    Span("RecvActivation", 0, 0.0, 0.25),
    Span("ForwardPass", 0, 0.25, 0.5),
    Span("ComputeLoss", None, 0.5, 1.0),
    Span(WAIT, None, 0.5, 0.75),
]


def cuts(parts: int) -> list[range]:
    return [range(i * 8 // parts, (i + 1) * 8 // parts) for i in range(parts)]


def candidate(graph, schedule: str, number: int) -> Candidate:
    batches = {
        branch: BranchBatch(graph.tail(branch).replicas, 2, number) for branch in ("image", "text")
    }
    return Candidate(graph, batches, schedule, simulate(graph, batches, schedule, COSTS))


CANDIDATES = [
    candidate(fork({"image": cuts(1), "text": cuts(1)}, {"image": 2, "text": 2}), "batch_sync", 4),
    candidate(fork({"image": cuts(5), "text": cuts(3)}, {"image": 64, "text": 64}), "replay", 8),
    candidate(
        fork({"image": cuts(2), "text": cuts(1)}, {"image": 1, "text": 1}), "per_micro_batch", 4
    ),
    candidate(chain({"image": cuts(2), "text": cuts(2)}, 2), "replay", 4),
    candidate(merged({"image": cuts(1), "text": cuts(1)}, 4), "batch_sync", 2),
]


def drawn(tracks, step_s: float = 1.0, **options):
    axes = Figure(figsize=(15, 3)).subplots()
    draw_timeline(axes, tracks, step_s, **options)
    return axes


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_busy_and_idle_are_those_of_a_recorded_step():
    assert busy_s(SPANS) == 0.5 and idle_fraction(SPANS, 2.0) == 0.75


@pytest.mark.parametrize("best", CANDIDATES, ids=lambda c: f"{c.graph.layout}-{c.schedule}")
def test_a_track_per_stage_whose_idle_share_is_the_simulators(best):
    simulation = simulate(best.graph, best.batches, best.schedule, COSTS, timeline=True)
    timeline = predicted_timeline("", best.graph, simulation)
    assert list(timeline.tracks) == [
        f"{stage.name} ×{stage.replicas}" for stage in best.graph.stages
    ]
    for spans, stage in zip(timeline.tracks.values(), simulation.stages):
        assert busy_s(spans) == pytest.approx(stage.busy_s, rel=1e-9)
        assert idle_fraction(spans, timeline.step_s) == pytest.approx(stage.idle_fraction, abs=1e-9)
        for wait in (span for span in spans if span.name == WAIT):
            assert any(
                s.start_s <= wait.start_s <= wait.end_s <= s.end_s
                for s in spans
                if s.name in ("ComputeLoss", "OptimizerStep")
            )


def test_bars_have_their_colours_times_and_numbers():
    axes = drawn({"image 0 ×2": SPANS, "text 0 ×1": SPANS[:2]}, title="fork")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["image 0 ×2", "text 0 ×1"]
    assert (
        texts(axes) == ["0", "50% idle", "0", "75% idle"]
        and axes.get_title(loc="left") == "fork: 1.00 s a step"
    )
    forward = [
        bars
        for bars in axes.collections
        if isinstance(bars, PolyCollection)
        and tuple(bars.get_facecolor()[0][:3])
        == pytest.approx((0x56 / 255, 0xB4 / 255, 0xE9 / 255))
    ]
    assert len(forward) == 2 and all(
        bars.get_paths()[0].get_extents().intervalx.tolist() == [0.25, 0.5] for bars in forward
    )
    assert any(getattr(bars, "get_hatch", lambda: None)() for bars in axes.collections)


def test_numbers_only_where_there_is_room():
    bars = [Span("ForwardPass", m, m / 1000, (m + 1) / 1000) for m in range(1000)]
    assert texts(drawn({"a": bars})) == ["0% idle"]
    assert texts(drawn({"a": bars[:4]}, 0.004)) == ["0", "1", "2", "3", "0% idle"]


def test_the_time_axis_has_a_unit_and_two_drawings_can_share_it():
    assert drawn({"a": SPANS}, 1.0).get_xlabel() == "time since the step began (s)"
    short = drawn({"a": SPANS}, 0.5)
    assert short.get_xlabel() == "time since the step began (ms)" and short.get_xlim() == (0, 500)
    assert drawn({"a": SPANS}, 0.5, end_s=2.0).get_xlim() == (0, 2)


def test_every_computing_instruction_has_a_colour_of_its_own():
    from engine.trace import COMPUTE

    assert COLOURS.keys() == set(COMPUTE) and len(
        {colour for _, colour in COLOURS.values()}
    ) == len(COMPUTE)


def test_plots_are_not_empty(tmp_path):
    save_plan_png(tmp_path / "plan.png", CANDIDATES[1], COSTS)
    long = Timeline("Measured: step 3", {"rank 0": SPANS}, 1.0)
    save_comparison_png(
        tmp_path / "both.png", Timeline("Predicted", {"image 0": SPANS[:2]}, 0.5), long
    )
    for name, colours in (
        ("plan.png", ["EmbedPass", "ReplayPass", "BackwardPass"]),
        ("both.png", ["ForwardPass", "ComputeLoss"]),
    ):
        pixels = (imread(tmp_path / name)[..., :3] * 255).round().astype(int).reshape(-1, 3)
        present = {
            f"#{r:02X}{g:02X}{b:02X}"
            for r, g, b in {tuple(pixel) for pixel in pixels[::7].tolist()}
        }
        assert {COLOURS[kind][1] for kind in colours} <= present
        assert len(present) > 20


def test_titles_are_short():
    assert [shape(c.graph) for c in (CANDIDATES[1], CANDIDATES[3], CANDIDATES[4])] == [
        "fork, image 5 × 64 | text 3 × 64 (stages × replicas)",
        "chain, image 2 × 2 | text 2 × 2 (stages × replicas)",
        "merged, 1 × 4 (stages × replicas)",
    ]
    assert (seconds(2.5), seconds(0.01234)) == ("2.50 s", "12.3 ms")
