"""The reference of the site, made from the code: the flags of every program, from its parser, and
the keys of the JSON file, from the dataclasses that read them.

A program is a file with a function `make_parser`. A block of the JSON file is a dataclass that a
reader of a key of `branches` returns. Both are found, so what is added to the code is on the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.config.deepspeed_keys import DEEPSPEED_KEYS
from engine.config.reading import NOT_WITH_A_PIPELINE, BranchesBlock
from launch.config.blocks import READERS

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("train.py", "evaluate.py", "export.py")  # the programs that people start with


def flags() -> str:
    """The page of all flags."""
    lines = [
        "# Flags of all programs",
        "",
        "This page is made from the parsers of the programs. `--help` prints the same.",
        "",
    ]
    for parser in parsers():
        lines += [f"## {parser.prog}", "", parser.description or "", "", *_usage(parser)]
        groups = [group for group in parser._action_groups if any(map(_shown, _flags(group)))]
        for group in groups:
            if len(groups) > 1 and group.title not in ("options", "positional arguments"):
                lines += [f"### {parser.prog}: {group.title}", ""]
            for action in filter(_shown, _flags(group)):
                lines += [_name(action), f":   {_plain(_help(parser, action))}", ""]
        lines += [parser.epilog or "", ""]
    return "\n".join(lines)


def parsers() -> list[argparse.ArgumentParser]:
    """Of every program of the project: of each file that defines `make_parser`."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("launch/**/*.py"), *ROOT.glob("data/**/*.py")]
    found = []
    for file in files:
        if re.search(r"^def make_parser\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found.append(importlib.import_module(module).make_parser())
    rank = {name: number for number, name in enumerate(FIRST)}
    return sorted(found, key=lambda parser: (rank.get(parser.prog, len(rank)), parser.prog))


def _usage(parser: argparse.ArgumentParser) -> list[str]:
    needed = [
        _written(action)
        for action in parser._actions
        if action.required and action.help is not argparse.SUPPRESS
    ]
    start = parser.prog if parser.prog.startswith("python") else f"python {parser.prog}"
    if parser.prog == "train.py":
        start = "deepspeed train.py"
    return ["```bash", " ".join([start, *needed, "…"]), "```", ""]


def _flags(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return group._group_actions


def _shown(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and action.dest != "help"


def _written(action: argparse.Action) -> str:
    """As it is typed: `--seed N`, `RUN_DIR`."""
    value = action.metavar if isinstance(action.metavar, str) else None
    if value is None and action.choices is not None:
        value = "|".join(map(str, action.choices))
    if not action.option_strings:
        return value or action.dest
    takes_value = action.nargs != 0
    value = value or action.dest.upper()
    return f"{action.option_strings[-1]} {value}" if takes_value else action.option_strings[-1]


def _name(action: argparse.Action) -> str:
    return f"`{_written(action)}`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return text.replace(str(Path.home()), "~")


def _plain(text: str) -> str:
    """Text without meaning to Markdown."""
    return re.sub(r"([\\`*_\[\]#|])", r"\\\1", html.escape(text, quote=False))


def keys() -> str:
    """The page of all keys of the JSON file."""
    meanings = meanings_of(ROOT / "ds_configs" / "README.md")
    lines = [
        "# Keys of the JSON file",
        "",
        "This page is made from the code that reads the file: names, types and defaults from the "
        "dataclasses, meanings from [ds_configs](../ds_configs/README.md), which also has examples.",
        "",
        "## `branches`",
        "",
        *_table(BranchesBlock, meanings.get("branches", {})),
    ]
    for key, block in blocks():
        lines += [f"## `branches.{key}`", "", _docstring(block), ""]
        lines += _table(block, _meanings_of_block(key, block, meanings))
    deepspeed = meanings.get("DeepSpeed's keys", {})
    lines += ["## DeepSpeed's keys", "", "| key | meaning here |", "|---|---|"]
    lines += [f"| `{key}` | {deepspeed.get(key, '')} |" for key in DEEPSPEED_KEYS]
    lines += ["", "## DeepSpeed's keys that are refused", "", "| key | instead |", "|---|---|"]
    lines += [f"| `{key}` | {_plain(why)} |" for key, why in NOT_WITH_A_PIPELINE.items()]
    return "\n".join(lines) + "\n"


def blocks() -> list[tuple[str, type]]:
    """(key, dataclass) of every key of `branches` whose value is an object of a dataclass: what a
    reader of the key returns, or a method of `BranchesBlock` that reads the field; then the
    dataclasses inside these."""
    fields = [field.name for field in dataclasses.fields(BranchesBlock)]
    hints = [(key, _hints(reader).get("return")) for key, reader in READERS.items()]
    for _, method in inspect.getmembers(BranchesBlock, inspect.isfunction):
        read = set(method.__code__.co_names) & set(fields)
        hints += [(key, _hints(method).get("return")) for key in read]
    hints.sort(key=lambda hint: fields.index(hint[0]))
    return list(dict.fromkeys(row for key, hint in hints for row in _nested(key, hint)))


def _nested(key: str, hint: Any) -> Iterator[tuple[str, type]]:
    """The dataclasses in a type such as `Block | None`; those of a mapping have a key per group."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield key, hint
        for name, inner in _hints(hint).items():
            yield from _nested(key if _is_mapping(inner) else f"{key}.{name}", inner)
    else:
        for inner in typing.get_args(hint):
            yield from _nested(f"{key}.GROUP" if _is_mapping(hint) else key, inner)


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _hints(thing: Any) -> dict[str, Any]:
    return typing.get_type_hints(thing)


def _table(block: type, meanings: dict[str, str]) -> list[str]:
    hints = inspect.get_annotations(block)  # as written
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(block):
        kind = re.sub(r"^Annotated\[(.+?), .*\]$", r"\1", str(hints.get(field.name, "")))
        kind = kind.replace("|", "or")
        kind = "" if kind == "Any" else f"`{kind}`"
        meaning = meanings.get(field.name, "")
        lines.append(f"| `{field.name}` | {kind} | {_default(field)} | {meaning} |")
    return [*lines, ""]


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return "none" if field.default in (None, ()) else f"`{json.dumps(field.default)}`"
    return "empty" if field.default_factory is not dataclasses.MISSING else "required"


def _docstring(block: type) -> str:
    return inspect.cleandoc(block.__doc__ or "")


def _meanings_of_block(
    key: str, block: type, meanings: dict[str, dict[str, str]]
) -> dict[str, str]:
    """Those under the heading of the key, else under one whose table has most keys of the block."""
    if key in meanings:
        return meanings[key]
    fields = {field.name for field in dataclasses.fields(block)}
    near = max(meanings.values(), key=lambda rows: len(fields & rows.keys()))
    return near if len(fields & near.keys()) > len(fields) / 2 else {}


def meanings_of(page: Path) -> dict[str, dict[str, str]]:
    """heading -> key -> meaning, the last cell of the key's row, of the tables of a page."""
    found: dict[str, dict[str, str]] = {}
    heading = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if title := re.match(r"#+ (.*)", line):
            heading = title[1].strip("`")
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for key in re.findall(r"\w+", cells[0].replace("`", "")):
                found.setdefault(heading, {})[key] = cells[-1]
    return found
