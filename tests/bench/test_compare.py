"""The harness: ways in turn, ratios within a round, a table that is there after each measurement."""

import pytest

from bench.compare import Column, Study, Way, chosen, compare, main

COLUMNS = (
    Column("s", "ms", "{:.0f}", 1e3),
    Column("s", "speed", inverse=True),
    Column("held", "most", "{:.0f}", pick=max),
    Column("held", "÷ slow"),
)


def study(**given) -> Study:
    return Study("A study", columns=COLUMNS, reference="slow", **given)


def turns(seconds, held, loss=1.0):
    values = iter(seconds)
    return lambda: {"s": next(values), "held": held, "loss": loss}


def test_a_ratio_is_taken_within_a_round(tmp_path):
    """The machine is twice as slow in the second round, and the ratio is the same."""
    ways = {
        "slow": Way(turns([0.4, 0.8, 0.4], [4.0, 8.0])),
        "fast": Way(turns([0.2, 0.4, 0.1], [2.0, 2.0]), once=lambda: {"held": [1.0, 2.0]}),
        "alone": Way(lambda: {"s": 1.0}, exact=False),
    }
    seen = compare(study(ways=ways, equal=("loss", 1e-6)), tmp_path / "out" / "a.md", 3)
    rows = (tmp_path / "out" / "a.md").read_text().splitlines()
    assert seen.median("fast", "s") == 0.2
    assert "| slow | 400 (400 – 800) | 1.00 | 8 | 1.00 / 1.00 |" in rows
    assert "| fast | 200 (100 – 400) | 2.00 (2.00 – 4.00) | 2 | 0.50 / 0.25 |" in rows
    assert "| alone (another objective) | 1000 | 0.40 (0.40 – 0.80) | – | – |" in rows


def test_what_was_measured_is_kept_when_a_way_fails(tmp_path):
    ways = {"slow": Way(turns([0.4], [1.0])), "broken": Way(lambda: 1 / 0)}
    with pytest.raises(ZeroDivisionError):
        compare(study(ways=ways), tmp_path / "a.md", 3)
    assert "| slow | 400 |" in (tmp_path / "a.md").read_text()


def test_ways_that_must_end_alike_do(tmp_path):
    ways = {"slow": Way(turns([1], [1.0], 2.0)), "fast": Way(turns([1], [1.0], 2.1))}
    with pytest.raises(SystemExit, match="loss"):
        compare(study(ways=ways, equal=("loss", 1e-3)), tmp_path / "a.md", 1)


def test_only_takes_a_name_or_all_that_hold_a_word():
    ways = dict.fromkeys(("ddp", "ddp_cached", "fork-a", "fork-b"), Way(dict))
    for words, names in ((["ddp"], ["ddp"]), (["cached", "fork"], list(ways)[1:]), (["x"], [])):
        assert list(chosen(study(ways=ways), words).ways) == names


@pytest.mark.parametrize(
    "given, named",
    [
        ("strategies --ranks 3 --global-batch 64", "multiple"),
        ("memory --points 8 0", "--points"),
        ("split --rounds 0", "--rounds"),
        ("split --only forks", "fork"),
        ("split --points 8", "--points"),
    ],
)
def test_a_wrong_command_is_one_error(monkeypatch, capsys, given, named):
    monkeypatch.setattr("sys.argv", ["bench/steps.py", *given.split()])
    with pytest.raises(SystemExit) as ended:
        main("bench.steps")
    assert ended.value.code == 2 and named in capsys.readouterr().err.splitlines()[-1]
