"""How large is the code, and how much of it must one know to change one thing?

    python bench/code_size.py                  this checkout, in about 20 seconds
    python bench/code_size.py ../other         another one
    python bench/code_size.py --static         from the source alone

Prints tables in Markdown. To see which files a sample passes on its way into a micro-batch, two
training steps on 64 lines of JSONL are followed call by call, with both towers on one rank.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import networkx
from PIL import Image

SCRIPTS = ["train.py", "evaluate.py", "export.py"]
FOLDERS = ["common", "data", "models", "engine", "launch"]
OPTIONS = ["image_size", "audio_seconds", "image_tower", "wandb_project", "eval_every"]
# Callers of data/ that hand no training sample on: they read options, describe the data as a whole,
# or evaluate. Any other caller counts, so that a new file is not overlooked.
ASIDE = re.compile(
    r"engine/|launch/(settings|config|terminal|inference|setup)/|launch/(evaluating|model|costing|journal)\.py"
    r"|launch/run/(queries|journal)\.py"
)
RUN = "--steps 2 --workers 0 --wandb disabled --set train_batch_size=16 branches.layout=merged "
RUN += "--image-tower resnet18:layers=1-1-1-1 --image-size 32 --text-tower bert-tiny --embed-dim 32"
COLUMNS = ["folder", "lines", "files", "functions", "their lines: median / 90 % / most"]
COLUMNS += ["their parameters", "longest class", "comments", "lines over 100 columns"]


def measure(root: Path) -> list[str]:
    """The tables that are read from the source."""
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


def follow(root: Path) -> list[list[tuple[str, str]]]:
    """Train, and return all different call stacks in the order in which they first occurred.

    A stack is (file, function) of the product's own frames, innermost first. What runs while a
    module is imported is left out.
    """
    files = {str(root / path): path for path in read(root, SCRIPTS + FOLDERS)}
    stacks: dict[tuple[tuple[str, str], ...], None] = {}

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call" or frame is None or frame.f_code.co_filename not in files:
            return
        stack = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename in files:
                stack.append((files[code.co_filename], f"{code.co_name}:{code.co_firstlineno}"))
            frame = frame.f_back
        if all(file == "train.py" or not name.startswith("<module>") for file, name in stack):
            stacks[tuple(stack)] = None

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        lines = [{"image_path": f"{i}.png", "text": f"colour number {i}"} for i in range(64)]
        for i, line in enumerate(lines):
            Image.new("RGB", (24, 24), (4 * i, 255 - 4 * i, i)).save(f"{name}/{line['image_path']}")
        Path(name, "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.environ |= {"DS_ACCELERATOR": "cpu", "WYE_CACHE": f"{name}/cache"}
        sys.argv = ["train.py", *RUN.split(), "--data", f"jsonl:{name}/pairs.jsonl"]
        sys.argv += ["--run-dir", f"{name}/run"]
        sys.path[0] = str(root)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            runpy.run_path(str(root / "train.py"), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    return [list(stack) for stack in stacks]


def describe(stacks: list[list[tuple[str, str]]]) -> list[str]:
    """What the stacks show of the way of a sample and of a step."""
    passed: set[str] = set()
    callers: set[str] = set()
    of_step: set[tuple[str, str]] = set()
    depths, loading = [], True
    for stack in stacks:
        files, names = [file for file, _ in stack], [name.partition(":")[0] for _, name in stack]
        in_step = "train_batch" in names
        # the first micro-batch is there when a tower computes in a step
        loading = loading and not (in_step and files[0].startswith("models/"))
        of_data = [n for n, file in enumerate(files) if file.startswith("data/")]
        if loading and of_data:
            passed.update(files[: of_data[-1] + 1])
            callers.update(files[of_data[-1] + 1 :])
        if in_step:
            of_step.update(stack[: names.index("train_batch") + 1])
            if files[0].startswith("models/losses/"):
                depths.append(names.index("main") - 1)
    aside = {file for file in callers - passed if ASIDE.match(file)}
    passed |= callers - aside
    of_engine = [each for each in of_step if each[0].startswith("engine/")]
    rows: list[list[object]] = [
        ["files that a line of JSONL passes on its way into a micro-batch", len(passed)],
        ["files of engine/ in a step", len({file for file, _ in of_engine})],
        ["functions of engine/ in a step", sum("<" not in name for _, name in of_engine)],
        ["calls between main and the losses, first to deepest", f"{min(depths)} to {max(depths)}"],
    ]
    return [
        *("", *table(["followed call by call", ""], rows), ""),
        f"A line of JSONL passes {' · '.join(sorted(passed))}.",
        *("", f"Not counted, though they call data/: {' · '.join(sorted(aside))}."),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how large the code is, in tables.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--static", action="store_true", help="follow no training run")
    given = parser.parse_args()
    root = given.folder.resolve()
    lines = measure(root)
    print("\n".join(lines if given.static else lines + describe(follow(root))))


if __name__ == "__main__":
    main()
