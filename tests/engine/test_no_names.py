"""Names that stand in one place: those of schedules in `engine/schedule.py`, those of modalities
outside `engine/`, which knows branches as records, and hardly anywhere in comparisons."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sources import strings_in

from data.stored.derived import DERIVED
from engine.schedule import SCHEDULES

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "engine" / "schedule.py"
MODALITIES = ("image", "text", "audio", "video")


COMPARED = {
    "data/decoding/containers.py": 1,  # PyAV's word for a stream of sound
    "launch/config/options.py": 1,  # an export of three towers goes on with two of them
    "launch/exporting/modeling_regions.py": 1,  # of a file that stands alone beside weights
    "launch/exporting/writing.py": 1,  # films without images are exported as a model of images
    "models/towers/building.py": 1,  # the scale is owned by images where nobody says by whom
    "models/weights/of_image.py": 3,  # weights of images in a tower of films
}
"""Files of data, models and launch that compare a branch with a modality's name, and how often. What
is asked there is no fact of a record; elsewhere it stands in one (data/stored/, launch/modalities.py)."""


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


def compared_in(source: str) -> list[int]:
    """The lines of comparisons with a modality's name, or of membership of some."""

    def is_name(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and node.value in (*MODALITIES, *DERIVED)

    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        for side in [[node.left, *node.comparators]]
        if any(is_name(each) or any(map(is_name, getattr(each, "elts", ()))) for each in side)
    ]


def test_records_are_asked_instead_of_comparing_names():
    own = {"evaluate.py": (ROOT / "evaluate.py").read_text(encoding="utf-8")}
    sources = {**own, **dict(files("common", "data", "launch", "models"))}
    found = {file: lines for file, source in sources.items() if (lines := compared_in(source))}
    assert len(sources) > 250
    assert {file: len(lines) for file, lines in found.items()} == COMPARED, found
    assert compared_in(
        '"""image"""\na == "text"\nb in ("x", "audio")\nc["image"]\n"image" + d'
    ) == [2, 3]


def test_pages_treat_all_modalities_alike():
    """Templates are no Python, so that comparisons in them are looked for by their text."""
    compared = re.compile(rf"""([!=]=|\bin)\s*\[?["']({"|".join((*MODALITIES, *DERIVED))})["']""")
    pages = [
        file for ending in ("html", "css", "js") for file in (ROOT / "launch").rglob(f"*.{ending}")
    ]
    assert {"section.html", "page.js"} <= {file.name for file in pages}
    assert [file for file in pages if compared.search(file.read_text(encoding="utf-8"))] == []
    assert all(map(compared.search, ('{% if a != "image" %}', "m === 'audio'", 'x in ["video"]')))


def test_what_is_named_is_found():
    assert schedules_in(
        '"""replay"""\nx = s == "replay"\ny = f"or use {z} or batch_sync"\nw = "replayed"'
    ) == ["replay", "batch_sync"]
    assert modalities_in(
        '"""image"""\nx = f"{y}" "text"\nz = {"image_embeds": 1, "images": 2}'
    ) == ["text", "image_embeds"]
