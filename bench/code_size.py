"""How large is the code, and how much of it must one know to change one thing?

    python bench/code_size.py                  this checkout
    python bench/code_size.py ../other         another one

Prints tables in Markdown, made from the source alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import networkx

SCRIPTS = ["train.py", "evaluate.py", "export.py"]
FOLDERS = ["common", "data", "models", "engine", "launch"]
OPTIONS = ["image_size", "audio_seconds", "image_tower", "wandb_project", "eval_every"]
COLUMNS = ["folder", "lines", "files", "functions", "their lines: median / 90 % / most"]
COLUMNS += ["their parameters", "longest class", "comments", "lines over 100 columns"]


def measure(root: Path) -> list[str]:
    """Lines of the tables."""
    groups = {"scripts": SCRIPTS, **{name: [name] for name in FOLDERS}}
    groups |= {"product": SCRIPTS + FOLDERS, "bench": ["bench"], "tests": ["tests"]}
    lines = table(COLUMNS, [sizes(name, read(root, where)) for name, where in groups.items()])

    product = read(root, SCRIPTS + FOLDERS)
    arrows = [(a, b) for a in product for b in imports(ast.parse(product[a])) if b in product]
    # a file outside the second-level folders stands for itself
    of_folders = [("/".join(a.split("/")[:2]), "/".join(b.split("/")[:2])) for a, b in arrows]
    for what, graph in (("files", arrows), ("folders", of_folders)):
        parts = networkx.strongly_connected_components(networkx.DiGraph(graph))
        circles = sorted(" · ".join(sorted(part)) for part in parts if len(part) > 1)
        lines += ["", f"Import circles between {what}: {len(circles)}"]
        lines += [f"- {circle}" for circle in circles]

    rows = []
    for option in OPTIONS:
        word = re.compile(rf"\b({option}|{option.replace('_', '-')})\b")
        named = [path for path, source in product.items() if word.search(source)]
        near = [path for path in named if path.startswith((*SCRIPTS, "launch/"))]
        rows.append([option, len(named), len(near)])
    return [*lines, "", *table(["option", "files that name it", "in launch/ and scripts"], rows)]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of Markdown."""
    every = (columns, ["---"] * len(columns), *rows)
    return [f"| {' | '.join(map(str, each))} |" for each in every]


def read(root: Path, where: Sequence[str]) -> dict[str, str]:
    """The Python files of these files and folders: path below `root` -> source."""
    found = [path for each in where for path in [root / each, *(root / each).rglob("*.py")]]
    return {str(p.relative_to(root)): p.read_text("utf-8") for p in sorted(found) if p.is_file()}


def sizes(name: str, sources: dict[str, str]) -> list[object]:
    """A row of the first table."""

    def num_lines(node: Any) -> int:
        return node.end_lineno - node.lineno + 1

    def num_parameters(function: ast.FunctionDef) -> int:
        names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        return len(names - {"self", "cls"})

    lines = [line for source in sources.values() for line in source.splitlines()]
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline)
    nodes = [(path, node) for path in sources for node in ast.walk(ast.parse(sources[path]))]
    functions = [each for each in nodes if isinstance(each[1], ast.FunctionDef)]
    classes = [each for each in nodes if isinstance(each[1], ast.ClassDef)]
    comments = sum(token.type == tokenize.COMMENT for token in tokens)
    return [
        name,
        f"{len(lines):,}",
        len(sources),
        f"{len(functions):,}",
        spread(functions, num_lines),
        spread(functions, num_parameters),
        spread(classes, num_lines).rpartition(" / ")[2],
        f"{comments / max(1, len(lines)):.1%}",
        sum(len(line) > 100 for line in lines),
    ]


def spread(nodes: Sequence[tuple[str, Any]], number: Callable[[Any], int]) -> str:
    """Median, 90 % and the most of a number, with the function or class that has the most."""
    found = sorted((number(node), path, node.name) for path, node in nodes) or [(0, "none", "")]
    median, high = (found[int(part * (len(found) - 1))][0] for part in (0.5, 0.9))
    most, path, name = found[-1]
    return f"{median} / {high} / {most} ({path}: {name})"


def imports(tree: ast.AST) -> Iterator[str]:
    """Paths that a module may import, also inside functions; not those for the type checker."""
    for node in ast.iter_child_nodes(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
        for name in names:
            yield from (name.replace(".", "/") + end for end in (".py", "/__init__.py"))
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imports(node)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how large the code is, in tables.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent)
    print("\n".join(measure(parser.parse_args().folder.resolve())))


if __name__ == "__main__":
    main()
