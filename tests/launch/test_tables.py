"""What a person sees in the terminal."""

import re

from launch.terminal.tables import DIRECTIONS, retrieval_report, retrieval_table, show
from models.metrics.retrieval import FIGURES, RECALL_AT


def test_a_table_loses_no_number_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    figures = (*(f"R@{k}" for k in RECALL_AT), "median_rank")
    keys = [f"composition/{direction}_{what}" for direction in DIRECTIONS for what in figures]
    before, after = (dict.fromkeys(keys, value) for value in (0.1234, 0.5678))
    show(retrieval_table("Before and after", [before, after], {"composition": 394}))
    said = capsys.readouterr().out
    assert said.count("12.3 → 56.8") == 6 and said.count("0.1234 → 0.5678") == 2 and "…" not in said


def test_without_held_out_samples_one_line_says_so_and_no_table_is_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    show(retrieval_report("Before and after", [{}, {}], {}))
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no samples were held out (--val-fraction 0)" in said
    values = {f"validation/{direction}_R@{k}": 0.5 for direction in DIRECTIONS for k in RECALL_AT}
    show(retrieval_report("Before and after", [values], {"validation": 20}))
    assert "validation (20)" in capsys.readouterr().out


def test_chance_is_of_the_samples_that_have_both_halves_of_a_pair(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    values = {
        f"validation/{key}_R@{k}": 0.5
        for key in ("image_to_text", "text_to_image", "palette_to_text", "text_to_palette")
        for k in RECALL_AT
    }
    values |= {"validation/num_samples/image_text": 300, "validation/num_samples/palette_text": 200}
    show(retrieval_table("", [values], {"validation": 300}))
    lines = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert [[line[0], line[1], line[-1]] for line in lines if "validation" in line[0]] == [
        ["validation (300)", "image → text", "3.3"],
        ["validation (300)", "text → image", "3.3"],
        ["validation (200)", "palette → text", "5.0"],
        ["validation (200)", "text → palette", "5.0"],
    ]


def test_answers_have_columns_where_queries_have_several(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    values = {f"validation/{direction}_R@{k}": 0.5 for direction in DIRECTIONS for k in RECALL_AT}
    for answers, columns in ((1.01, False), (5.0, True)):
        figures = dict(zip(FIGURES, (20, 96, answers, 0.1)))
        of_all = {f"validation/{d}_{n}": v for d in DIRECTIONS for n, v in figures.items()}
        show(retrieval_table("", [values | of_all], {"validation": 20}))
        said = capsys.readouterr().out
        assert ("queries → candidates" in said) == ("20 → 96" in said) == columns


def test_what_users_write_is_no_markup(capsys):
    show("an apple [/b] :apple: [bold] of [link]4")
    assert capsys.readouterr().out == "an apple [/b] :apple: [bold] of [link]4\n"
