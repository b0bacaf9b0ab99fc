"""The page of data/ tells the truth: its Python snippets run, and it leaves out no reason, no kind
of data set, no flag and no file."""

import re
from pathlib import Path

import pytest

from data.bad_samples import REASONS
from data.index.sources import KINDS
from data.stored.kinds import STORED
from launch.config.options import make_parser

ROOT = Path(__file__).parents[2]
README = ROOT / "data" / "README.md"
PAGE = README.read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_snippets():
    assert len(SNIPPETS) == PAGE.count("```python") >= 2


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet, emoji_set, monkeypatch):
    monkeypatch.chdir(emoji_set(4).parent)
    monkeypatch.setattr("data.stored.kinds.STORED", {**STORED})  # what one registers ends with it
    exec(compile(snippet, str(README), "exec"), {})


def test_every_reason_and_every_kind_is_documented():
    section = PAGE.partition("## Bad samples")[2].partition("\n## ")[0]
    assert re.findall(
        r"`([a-z-]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    ) and all(f"`{r}`" in section for r in REASONS)
    assert all(re.search(rf"`{kind}[:`]", PAGE) for kind in KINDS)


def test_every_flag_it_names_exists():
    known = {option for action in make_parser()._actions for option in action.option_strings}
    # of data.cache, data.inspect, data.streams.unseen and evaluate.py
    of_commands = {
        "--by",
        "--out",
        "--rate",
        "--image-size",
        "--sheet",
        "--speed",
        "--gpus",
        "--picture",
        "--classify",
        "--benchmark",
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known | of_commands


def test_every_room_is_in_the_figure():
    figure = PAGE.partition("\n    ")[2].partition("\nNothing here")[0]
    elsewhere = {
        "__init__",
        "options",
        "spec_files",
        "processes",
        "fork_server",
        "inspect",
        "speed",
        "modules",
        "fonts",
        "draws",
        "lengths",
        "branch_cost",
    }
    assert {file.stem for file in (ROOT / "data").glob("*.py")} - elsewhere <= set(
        re.findall(r"(\w+)\.py", figure)
    )
