"""Every figure that README.md quotes has a command that makes it: bench/README.md names it beside the
same figure, bench/EVIDENCE.md has how it was seen, and the command is understood."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
ON_GPU = re.compile(r"([\d.]+) × as fast[^(]*\(([\d,]+) and ([\d,]+) samples/s")
COMMANDS = re.compile(r"`((?:bash bench/)?\w+\.(?:py|sh)[^`]*)`")


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text, heading):
    """The cells of the tables of a section."""
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = [each for each in section if each.startswith(heading)]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(*cells):
    return {found.replace(",", "") for cell in cells for found in NUMBER.findall(cell)}


FIGURES = [row for row in rows(page("bench/README.md"), "Figures") if COMMANDS.search(row[1])]


def made_by(command):
    """All numbers of bench/README.md that this command makes."""
    return numbers(*(cell for row in FIGURES if f"`{command}`" in row[1] for cell in row[2:4]))


def test_the_figures_of_the_first_page_are_those_of_the_table():
    results = rows(page("README.md"), "Results")
    by_script = [row for row in results if COMMANDS.fullmatch(row[0])]
    assert len(by_script) >= 7
    for script, _, figures in by_script:
        assert numbers(figures) <= made_by(script.strip("`")), script
    learned = results[
        1 : results.index(["script in [bench/](bench/README.md)", "compared", "result"])
    ]
    found = numbers(*(cell for row in learned for cell in row[1:]))
    assert len(learned) >= 5 and found <= made_by("open_clip.py learn")
    (on_gpu,) = ON_GPU.findall(page("README.md"))
    assert numbers(*on_gpu) <= made_by("gpu.py")


def test_each_figure_is_where_it_is_told_how_it_was_seen():
    told = numbers(page("bench/EVIDENCE.md"), page("engine/README.md"), page("ARCHITECTURE.md"))
    for row in FIGURES + rows(page("bench/README.md"), "Studies that are over"):
        missing = numbers(*row[2:4]) - told
        assert not missing, (row, missing)


@pytest.mark.parametrize(
    "command", sorted({c for row in FIGURES for c in COMMANDS.findall(row[1])})
)
def test_each_command_is_understood(command, monkeypatch, capsys):
    words = command.replace("EXPERIMENT", "split").removeprefix("bash bench/").split()
    script = ROOT / "bench" / words[0].replace(".sh", ".py")
    monkeypatch.setattr(sys, "argv", [str(script), *words[1:], "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(word in said for word in words[1:] if word.startswith("--"))
