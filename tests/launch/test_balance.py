"""launch.tools.balance: what a run wrote of its balance, as a plot and as tables; what is
missing is said in one line."""

import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from data.batching.branch_cost import BranchCost
from data.batching.load_control import FeedRates
from data.batching.settings import Setting
from launch.tools.balance import (
    MOST_LISTED,
    MOST_POINTS,
    STYLES,
    Decision,
    curve,
    decisions,
    draw,
    listed,
    panels_of,
    read_measurements,
    read_steps,
    run,
)

FIRST = Setting(
    0, {"image": 4, "text": 4}, {"text": BranchCost(0.1, 0.0, 1e-4)}, FeedRates(image_size=64)
)
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
        "text_tokens": 700.0 if half else 350.0,
        "padded_text_tokens": 1000.0 if half else 700.0,
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
        "num_micro_batches": {"image": 4, "text": 4},
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
    lines = [
        {"step": 0, "held_out": "validation", "image_to_text_R@1": 0.1},
        *map(step, range(1, 121)),
    ]
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
    assert row(out, "text 0, idle") == ["75%", "25%"] and row(out, "image 0, idle") == ["2%", "10%"]
    assert row(out, "text 0, busy") == ["125", "ms", "375", "ms"]
    assert row(out, "images per second") == ["100", "200"] and row(
        out, "text tokens per second"
    ) == ["700", "1,400"]
    assert row(out, "padding share of the texts") == ["50%", "30%"] and row(
        out, "captions_per_image"
    ) == ["1", "2"]
    assert row(out, "text, predicted / measured") == ["0.25", "1.10"]
    assert out.splitlines()[-1] == str(run_dir / "balance.png")


def test_every_decision_is_reported_with_its_step_and_reason(run_dir, capsys):
    run([str(run_dir)])
    out = capsys.readouterr().out
    assert decisions(MEASUREMENTS) == [
        Decision(20, 24, WAITS),
        Decision(40, 41, BOUND),
    ]  # the first holds when no loader has begun with the step
    assert row(out, "1") == ["20", "24", *WAITS.split()] and BOUND in " ".join(out.split())
    assert "costs refitted in 2 of 4 measurements, after steps 10, 20" in out


def test_weights_of_data_sets_that_were_moved_are_reported_beside_feed_rates(run_dir, capsys):
    words = "weights a 1 -> 1.03 (loss 2.6, -1.2%), b 2 -> 1.91 (loss 1.9, -6.0%)"
    both = {**MEASUREMENTS[1], "mix": {"from_step": 40, "weights": [1.03, 1.91], "reason": words}}
    (run_dir / "balance.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in (MEASUREMENTS[0], both, *MEASUREMENTS[2:]))
    )
    assert decisions(read_measurements(run_dir)) == [
        Decision(20, 24, WAITS),
        Decision(20, 41, words),
        Decision(40, 41, BOUND),
    ]
    run([str(run_dir)])
    assert words in " ".join(capsys.readouterr().out.split())


def test_panels_over_the_steps(run_dir):
    panels = panels_of(read_steps(run_dir), read_measurements(run_dir))
    of = {panel.title.partition(",")[0]: panel for panel in panels}
    assert list(of) == [
        "idle share of a step",
        "text: seconds of the micro-batches of a measurement",
        "padding share of the texts",
        "images per second",
        "text tokens per second",
        "captions_per_image",
    ]
    times = of["text: seconds of the micro-batches of a measurement"]
    assert times.curves["measured"] == ([10, 20, 30, 40], [0.6] * 4)
    assert times.curves["predicted"][1] == [0.15, 0.3, 0.6, 0.66] and times.marked == [10, 20]
    _, rates = of["captions_per_image"].curves[""]
    assert rates == [1] * 23 + [2] * 97
    assert set(of["padding share of the texts"].curves[""][1]) == {0.5, 0.3}


def test_curves_are_distinguishable_without_colour(run_dir):
    axes = Figure().subplots()
    draw(axes, panels_of(read_steps(run_dir), [])[0], last=True)
    assert len({(line.get_linestyle(), line.get_marker()) for line in axes.lines}) == 2
    for look in zip(*STYLES):
        assert len(set(look)) == len(STYLES)


def test_many_steps_are_drawn_as_medians():
    lines = [{"step": n, "a": float(n % 10 == 0)} for n in range(1, 1001)]
    steps, values = curve(lines, "a")
    assert len(steps) == MOST_POINTS and steps[:2] == [5.5, 15.5] and set(values) == {0.0}
    assert curve(lines[:3], "a") == ([1, 2, 3], [0.0, 0.0, 0.0]) and curve(lines, "b") == ([], [])


def test_long_lists_of_decisions_are_cut_in_the_plot():
    words = listed([Decision(n, n + 4, "moved") for n in range(MOST_LISTED + 3)])
    assert (
        len(words) == MOST_LISTED + 1
        and words[0] == "1   step 4: moved"
        and words[-1] == "… and 3 more, in the table"
    )
    assert listed([]) == []


@pytest.mark.parametrize("name", ["own.png", "own.svg"])
def test_the_plot_has_something_in_it(run_dir, name):
    assert run([str(run_dir), "--output", str(run_dir / name)]) == 0
    if name.endswith("png"):
        pixels = imread(run_dir / name)[..., :3]
        assert pixels.shape[0] > 700 and 0.005 < (pixels < 0.5).all(axis=2).mean() < 0.2
    else:
        assert (run_dir / name).stat().st_size > 10_000


def test_without_measurements_it_draws_what_there_is_and_says_what_to_do(run_dir, capsys):
    (run_dir / "balance.jsonl").unlink()
    assert run([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "no balance.jsonl" in out and '"strategy": "deal"' in out and "Decisions" not in out
    assert (run_dir / "balance.png").is_file()
    assert not any("predicted" in panel.title for panel in panels_of(read_steps(run_dir), []))


def test_a_line_that_is_being_written_is_passed_over(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 121, "lo')
    assert len(read_steps(run_dir)) == 120


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "metrics.jsonl",
            None,
            "metrics.jsonl: no such file; give the folder of a run of train.py",
        ),
        (
            "metrics.jsonl",
            '{"step": 0, "held_out": "validation"}\n',
            "metrics.jsonl: has no step yet; train on",
        ),
        ("metrics.jsonl", "{\n", "metrics.jsonl:1: not valid JSON"),
        ("balance.jsonl", "{}\n]\n", "balance.jsonl:2: not valid JSON"),
    ],
)
def test_what_is_missing_or_broken_is_named_in_one_line(run_dir, capsys, name, content, message):
    (run_dir / name).unlink()
    if content is not None:
        (run_dir / name).write_text(content)
    assert run([str(run_dir)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_figure_of_no_known_kind_is_refused(run_dir, capsys):
    with pytest.raises(SystemExit) as exit:
        run([str(run_dir), "--output", "balance.txt"])
    assert exit.value.code == 2 and "its name ends in .png" in capsys.readouterr().err
