"""ARCHITECTURE.md names files and functions that exist, and its picture is that of the code."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from neighbours import neighbour

from bench.code_size import imports
from engine.module import layer_seed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
NAMES = sorted(
    set(re.findall(r"`(\w+/[\w/]+\.py|\w+\.py):([\w.]+)`", PAGE)) - {("file.py", "name")}
)


def defined(file: Path) -> set[str]:
    """Functions and classes of a file, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_every_name_is_there():
    assert len(NAMES) > 40
    missing = [f"{file}:{name}" for file, name in NAMES if name not in defined(ROOT / file)]
    assert not missing


def test_every_dictionary_is_there():
    named = re.findall(r"`([A-Z_]+)` of `([\w/]+\.py)`", PAGE)
    assert len(named) >= 7
    for name, file in named:
        assigned = [
            ast.unparse(target)
            for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        assert name in assigned, file


def test_the_reading_order_is_closed():
    """What a file of it imports within the engine stands before it, or where it may be skipped; and
    nothing else may be skipped."""
    section = PAGE.split("## Read the engine in this order")[1].split("\n## ")[0]
    order, skipped = section.split("You may skip")
    reading = re.findall(r"`(engine/[\w/]+\.py)`", order)
    may_skip = set(re.findall(r"`(engine/[\w/]+(?:\.py|/))`", skipped))
    assert {"engine/executor.py", "engine/build.py"} < set(reading)
    assert len(set(reading)) == len(reading)
    used, missing = set(), []
    for number, file in enumerate(reading):
        for imported in imports(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            path = ROOT / imported
            if not imported.startswith("engine/") or not path.is_file() or not path.stat().st_size:
                continue
            skips = {each for each in may_skip if imported.startswith(each)}
            if imported not in reading[:number] and not skips:
                missing.append(f"{file} imports {imported}")
            used |= skips
    assert not missing and used == may_skip


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/.]+(?:\.py|/|\.svg))`", PAGE))))
def test_every_path_is_there(path):
    assert (ROOT / path).exists()


def test_the_picture_is_that_of_the_code():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rooms = neighbour("../docs/rooms.py")
    own, imports = rooms.rooms()
    rooms.refuse_upward(imports)
    drawn = re.findall(r"<text [^>]*>([^<]+)</text>", (ROOT / "docs/rooms.svg").read_text("utf-8"))
    names = [
        f"{room.split('/')[-1]}{'' if room.endswith('.py') else '/'}"
        for box in own.values()
        for room in box
    ]
    assert sorted(drawn) == sorted([*names, *own]), "python docs/rooms.py draws it anew"


def test_what_dropout_is_a_function_of():
    """Invariant 4 names all that `layer_seed` is given."""
    sentence = " ".join(
        PAGE.split("are functions of seed, step and sample.")[1].split("),")[0].split()
    )
    for given in inspect.signature(layer_seed).parameters:
        assert given.replace("_", "-") in sentence


def test_no_object_gets_another_class():
    """Invariant 7: neither by assignment nor by `setattr`."""
    found = []
    for folder in ("common", "data", "models", "engine", "launch", "bench", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                is_attribute = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_attribute and node.attr in ("__class__", "__bases__", "__dict__"):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
                if isinstance(node, ast.Call) and any(
                    isinstance(given, ast.Constant) and given.value == "__class__"
                    for given in node.args
                ):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found
