"""Schedules are distinguished by what they say of themselves: their names stand in
`engine/schedule.py` and nowhere else in the code."""

import re
from pathlib import Path

import pytest
from sources import strings_in

from engine.schedule import SCHEDULES

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "engine" / "schedule.py"
FILES = [
    ROOT / "train.py",
    *(
        file
        for folder in ("engine", "launch", "data", "models")
        for file in (ROOT / folder).rglob("*.py")
    ),
]


def names_in(source: str) -> list[str]:
    """Names of schedules in the strings that are not docstrings: whole words, also inside a
    message."""
    return [
        name
        for text in strings_in(source)
        for name in re.findall(r"\w+", text)
        if name in SCHEDULES
    ]


@pytest.mark.parametrize(
    "file", sorted({*FILES} - {REGISTRY}), ids=lambda file: str(file.relative_to(ROOT))
)
def test_no_schedule_is_named(file):
    assert names_in(file.read_text(encoding="utf-8")) == []


def test_the_registry_names_each_once():
    assert names_in(REGISTRY.read_text(encoding="utf-8")) == list(SCHEDULES)


def test_a_schedule_that_is_named_is_found():
    assert names_in(
        '"""replay"""\nx = s == "replay"\ny = f"or use {z} or batch_sync"\nw = "replayed"'
    ) == ["replay", "batch_sync"]
