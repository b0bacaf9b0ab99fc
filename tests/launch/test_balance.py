"""launch.tools.balance: what a run wrote of its balance, as tables here and as curves in the
report; what is missing is said in one line."""

import json
from dataclasses import replace

import pytest

from common import __version__
from data.batching.branch_cost import BranchCost
from data.batching.load_control import FeedRates
from data.batching.settings import Setting
from launch.reporting.balance import Decision, decisions
from launch.reporting.reading import read_folder
from launch.reporting.sections import build_sections, charts_of
from launch.tools.balance import run

NUMBERS = {"image": 4, "text": 4}
FIRST = Setting(0, NUMBERS, BranchCost(0.1, 0.0, 1e-4), FeedRates(image_size=64))
REFITTED = replace(FIRST, from_step=14, reason="costs refitted")
MOVED = replace(
    FIRST,
    from_step=23,
    feed_rates=FeedRates(captions_per_image=2, image_size=64),
    reason="captions_per_image 1 -> 2: it waits; costs refitted",
)
WAITS, BOUND = (
    "captions_per_image 1 -> 2: it waits",
    "bound reached: it waits, and no feed rate improves it",
)


def step(number: int, **more) -> dict:
    half = number > 60
    return {
        "step": number,
        "loss": 3.0,
        "samples_per_s": 200.0 if half else 100.0,
        "step_s": 0.5,
        "idle/image 0": 0.1 if half else 0.02,
        "idle/text 0": 0.25 if half else 0.75,
        "busy_s/image 0": 0.45,
        "busy_s/text 0": 0.375 if half else 0.125,
        "text_tokens_per_s": 1400.0 if half else 700.0,
        "padding_share/text": 0.3 if half else 0.5,
        "captions_per_image": 2 if number > 23 else 1,
        **more,
    }


def measurement(
    number: int, predicted_s: float, reason: str | None = None, following: Setting | None = None
) -> dict:
    return {
        "step": number,
        "busy_s": {"image": 0.45, "text": 0.2},
        "measured_s": {"text": 0.6},
        "predicted_s": {"text": predicted_s},
        "knobs": {"captions_per_image": 1, "kept_patches": 1.0, "image_size": 64},
        "num_micro_batches": NUMBERS,
        "reason": reason,
        "next": following and following.record(),
    }


MEASUREMENTS = [
    measurement(10, 0.15, None, REFITTED),
    measurement(20, 0.3, WAITS, MOVED),
    measurement(30, 0.6),
    measurement(40, 0.66, BOUND),
]


@pytest.fixture
def run_dir(tmp_path):
    """120 steps and an evaluation; four measurements, of which one moved a feed rate."""
    lines = [{"step": 0, "held_out": "validation", "num_samples": 9}, *map(step, range(1, 121))]
    config = {"training": {}, "version": __version__, "stage_graph": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, records in (("metrics", lines), ("balance", MEASUREMENTS)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return tmp_path


def row(out: str, name: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if line.strip().startswith(name + "  ")]
    return line.strip().removeprefix(name).split()


def test_the_table_says_how_it_began_and_how_it_ended(run_dir, capsys):
    assert run([str(run_dir)]) == 0
    out = capsys.readouterr().out
    for name, words in {
        "Idle time by stage: text 0": "75.0% 25.0%",
        "Idle time by stage: image 0": "2.0% 10.0%",
        "Computing time of a step by stage: text 0": "125 ms 375 ms",
        "Duration of a step: step": "500 ms 500 ms",
        "Throughput: samples/s": "100.0 200.0",
        "Text tokens per second: tokens/s": "700 1,400",
        "Padding: text": "50.00% 30.00%",
        "Feed rate captions_per_image: captions_per_image": "1 2",
        "Predicted ÷ measured time of a branch: text": "0.25 1.10",
    }.items():
        assert row(out, name) == words.split()
    assert str(run_dir / "report.html") in out.splitlines()[-1]


def test_every_decision_is_reported_with_its_step_and_reason(run_dir, capsys):
    run([str(run_dir)])
    out = capsys.readouterr().out
    # the first holds when no loader has begun with the step
    assert decisions(MEASUREMENTS) == [
        Decision(20, 24, WAITS),
        Decision(40, 41, BOUND),
    ]
    assert row(out, "1") == ["20", "24", *WAITS.split()] and BOUND in " ".join(out.split())
    assert "Costs refitted in 2 of 4 measurements, after steps 10, 20" in out


def test_weights_of_data_sets_that_were_moved_are_reported_beside_feed_rates(run_dir, capsys):
    words = "weights a 1 -> 1.03 (loss 2.6, -1.2%), b 2 -> 1.91 (loss 1.9, -6.0%)"
    both = {**MEASUREMENTS[1], "mix": {"from_step": 40, "weights": [1.03, 1.91], "reason": words}}
    (run_dir / "balance.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in (MEASUREMENTS[0], both, *MEASUREMENTS[2:]))
    )
    assert decisions(read_folder(run_dir, "").measurements) == [
        Decision(20, 24, WAITS),
        Decision(20, 41, words),
        Decision(40, 41, BOUND),
    ]
    run([str(run_dir)])
    assert words in " ".join(capsys.readouterr().out.split())


def test_the_report_draws_it_over_the_steps(run_dir):
    drawn = {
        chart.name: chart.figure for chart in charts_of(build_sections([read_folder(run_dir, "a")]))
    }
    seconds = {curve.name: curve for curve in drawn["branches"].data}
    assert seconds["text measured"].x.tolist() == [10, 20, 30, 40]
    assert seconds["text measured"].y == pytest.approx([0.6] * 4)
    assert seconds["text predicted"].y == pytest.approx([0.15, 0.3, 0.6, 0.66])
    assert set(drawn["captions_per_image"].data[0].y.tolist()) == {1, 2}
    marks = [(line.x0, line.y0) for line in drawn["padding"].layout.shapes]
    assert [step for step, _ in marks] == [24, 41]


def test_without_measurements_it_says_what_to_do(run_dir, capsys):
    (run_dir / "balance.jsonl").unlink()
    assert run([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "no balance.jsonl" in out and '"strategy": "deal"' in out and "Decisions" not in out
    assert row(out, "Throughput: samples/s") == ["100.0", "200.0"] and "÷" not in out


@pytest.mark.parametrize("text, said", [('{"step": 121, "lo', 0), ("{\n", 1)])
def test_a_line_that_is_broken_is_left_out_and_said(run_dir, capsys, text, said):
    """One without its end is being written."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(text)
    assert len(read_folder(run_dir, "a").steps["step"]) == 120
    assert run([str(run_dir)]) == 0
    assert capsys.readouterr().out.count("metrics.jsonl: 1 lines cannot be read") == said


def test_what_is_missing_is_named_in_one_line(run_dir, capsys):
    for name, content, message in (
        ("metrics.jsonl", '{"step": 0, "held_out": "validation"}\n', "has no step yet; train on"),
        ("metrics.jsonl", None, "metrics.jsonl: has no step yet; train on"),
        ("config.json", None, "holds no config.json; give the folder of a run of train.py"),
    ):
        (run_dir / name).unlink()
        if content is not None:
            (run_dir / name).write_text(content)
        assert run([str(run_dir)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1, name


def test_a_figure_of_its_own_is_refused_with_where_it_is_drawn(run_dir, capsys):
    assert run([str(run_dir), "--output", "balance.png"]) == 2
    assert "--output balance.png" in (err := capsys.readouterr().err) and "tools.report" in err
