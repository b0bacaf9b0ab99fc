"""Names that stand in one place: those of schedules in `engine/schedule.py`, those of modalities
outside `engine/`, which knows branches as records."""

import re
from collections.abc import Iterator
from pathlib import Path

from sources import strings_in

from engine.schedule import SCHEDULES

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "engine" / "schedule.py"
MODALITIES = ("image", "text", "audio", "video")


def files(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file != REGISTRY:
                yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def schedules_in(source: str) -> list[str]:
    """Names of schedules in the strings that are not docstrings: whole words, also inside a
    message."""
    words = (word for text in strings_in(source) for word in re.findall(r"\w+", text))
    return [word for word in words if word in SCHEDULES]


def modalities_in(source: str) -> list[str]:
    """The strings that are not docstrings and are a modality or begin with one."""
    return [
        word
        for word in strings_in(source)
        if any(word == name or word.startswith(f"{name}_") for name in MODALITIES)
    ]


def test_schedules_are_distinguished_by_what_they_say_of_themselves():
    program = [("train.py", (ROOT / "train.py").read_text(encoding="utf-8"))]
    found = {
        file: schedules_in(source)
        for file, source in [*program, *files("engine", "launch", "data", "models")]
    }
    assert len(found) > 100 and {file: names for file, names in found.items() if names} == {}
    assert schedules_in(REGISTRY.read_text(encoding="utf-8")) == list(SCHEDULES)


def test_the_engine_names_no_modality():
    found = {file: modalities_in(source) for file, source in files("engine")}
    assert len(found) > 30 and {file: words for file, words in found.items() if words} == {}
    assert modalities_in(REGISTRY.read_text(encoding="utf-8")) == []


def test_what_is_named_is_found():
    assert schedules_in(
        '"""replay"""\nx = s == "replay"\ny = f"or use {z} or batch_sync"\nw = "replayed"'
    ) == ["replay", "batch_sync"]
    assert modalities_in(
        '"""image"""\nx = f"{y}" "text"\nz = {"image_embeds": 1, "images": 2}'
    ) == ["text", "image_embeds"]
