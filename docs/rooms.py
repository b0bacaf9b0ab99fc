"""The figure of ARCHITECTURE.md: the folders and files of the code.

    python docs/rooms.py            writes docs/rooms.svg

A room stands above those of its box that it imports, and a box above those that it imports.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from networkx import DiGraph, condensation, topological_generations

ROOT = Path(__file__).resolve().parents[1]
# from left to right: left edge, width, rooms beside each other
BOXES = {
    "scripts": (0.0, 12.0, 6),
    "launch": (0.0, 12.0, 6),
    "data": (0.0, 4.0, 3),
    "models": (4.2, 2.6, 2),
    "engine": (7.0, 5.0, 3),
    "common": (0.0, 12.0, 7),
}
STOREYS = (("scripts",), ("launch",), ("data", "models", "engine"), ("common",))
ROW, HEAD, GAP = 0.42, 0.45, 0.45  # heights
SCRIPTS = ("train.py", "evaluate.py", "export.py")
COLOURS = {"scripts": "#EEEEEE", "launch": "#DCE9F7", "data": "#E3F1DF", "models": "#FBEBD5"}
COLOURS |= {"engine": "#F7DEDE", "common": "#EEEEEE"}


def rooms() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The rooms of each box, and which rooms each room imports."""
    own: dict[str, set[str]] = {box: set() for box in BOXES}
    found: dict[str, set[str]] = defaultdict(set)
    files = [ROOT / name for name in SCRIPTS]
    files += [file for box in BOXES for file in (ROOT / box).rglob("*.py") if box != "scripts"]
    for file in files:
        parts = file.relative_to(ROOT).parts
        if parts[-1] == "__init__.py" and len(parts) == 2:
            continue
        box, room = (parts[0], "/".join(parts[:2])) if len(parts) > 1 else ("scripts", parts[0])
        source = file.read_text(encoding="utf-8")
        own[box].add(room)
        found[room] |= {other for other in map(room_of, imported(ast.parse(source))) if other}
    return own, {room: others - {room} for room, others in found.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules, and names in modules, that are imported at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imported(node)


def room_of(name: str) -> str:
    """The folder, or file, directly below a box; empty for what is not ours."""
    box, *inner = name.split(".")
    if box not in BOXES or not inner:
        return ""
    folder = f"{box}/{inner[0]}"
    return folder if (ROOT / folder).is_dir() else f"{folder}.py"


def rows_of(
    own: Mapping[str, int], imports: Mapping[str, set[str]], number: int
) -> list[list[str]]:
    """The rooms of a box in rows of at most `number`: each stands above those that it imports."""
    graph = DiGraph()
    graph.add_nodes_from(own)
    graph.add_edges_from((a, b) for a in own for b in imports[a] if b in own)
    parts = condensation(graph)  # rooms that import each other stand in one row
    levels = [
        sorted(room for part in level for room in parts.nodes[part]["members"])
        for level in topological_generations(parts)
    ]
    return [level[i : i + number] for level in levels for i in range(0, len(level), number)]


def draw() -> Figure:
    own, imports = rooms()
    rows = {box: rows_of(own[box], imports, number) for box, (_, _, number) in BOXES.items()}
    heights = [HEAD + ROW * max(len(rows[box]) for box in storey) for storey in STOREYS]
    whole = sum(heights) + GAP * (len(STOREYS) - 1)
    figure = Figure(figsize=(9.9, 9.9 * whole / 12.2))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-0.1, 12.1), ylim=(-0.1, whole + 0.1))
    axes.axis("off")
    top = whole
    for storey, height in zip(STOREYS, heights):
        for box in storey:
            left, width, number = BOXES[box]
            style = "round,pad=0,rounding_size=0.08"
            frame = FancyBboxPatch((left, top - height), width, height, boxstyle=style)
            frame.set(facecolor=COLOURS[box], edgecolor="#777777", linewidth=0.8)
            axes.add_patch(frame)
            axes.text(left + 0.12, top - 0.12, box, va="top", weight="bold", size=9)
            for row, level in enumerate(rows[box]):
                for column, room in enumerate(level):
                    name = room.removeprefix(f"{box}/") + ("" if room.endswith(".py") else "/")
                    x = left + 0.12 + column * (width - 0.1) / number
                    axes.text(x, top - HEAD - ROW * row, name, va="top", size=7)
            if storey != STOREYS[-1]:  # what all of them import is in the storeys below
                at = (left + width / 2, top - height)
                arrow = {"arrowstyle": "-|>", "color": "#444444"}
                axes.annotate("", (at[0], at[1] - GAP), at, arrowprops=arrow)
        top -= height + GAP
    refuse_upward(imports)
    return figure


def refuse_upward(imports: Mapping[str, set[str]]) -> None:
    """Raise ValueError where a room imports one that the figure has above it or beside its box."""
    storey = {box: number for number, boxes in enumerate(STOREYS) for box in boxes}
    boxes = {room: room.split("/")[0] if "/" in room else "scripts" for room in imports}
    for room, others in imports.items():
        for other in others:
            box = other.split("/")[0]
            if box != boxes[room] and storey[box] <= storey[boxes[room]]:
                raise ValueError(f"{room} imports {other}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with rc_context({"svg.hashsalt": "wye", "svg.fonttype": "none"}):
        draw().savefig(ROOT / "docs" / "rooms.svg", facecolor="white", metadata={"Date": None})
    print(ROOT / "docs" / "rooms.svg", file=sys.stderr)
