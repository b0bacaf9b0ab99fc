"""`--set KEY=VALUE`: a key of the JSON file or a flag, given on the command line. For trying a
value without a file of its own, and for sweeps. Plain Python.

A key with dots, such as `optimizer.params.lr`, is a path into the JSON file; without one it is a
flag where there is a flag of that name, else a key of the JSON file's first level.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.shell import REMEDY

NOT_BY_SET = ("set", "help", "local_rank")
# as the agent of a W&B sweep writes values
PYTHONS = {"True": True, "False": False, "None": None}


def split_settings(
    parser: argparse.ArgumentParser, given: Sequence[str]
) -> tuple[list[str], dict[str, bool], tuple[str, ...]]:
    """The flags among `given` as command-line arguments; the switches that are put off, by name;
    and the others, for the JSON file. A key that is given twice is an error of `parser`."""
    flags = {action.dest: action for action in parser._actions if action.dest not in NOT_BY_SET} | {
        action.option_strings[-1].lstrip("-").replace("-", "_"): action
        for action in parser._actions
        if action.option_strings and action.dest not in NOT_BY_SET
    }
    arguments: list[str] = []
    off: dict[str, bool] = {}
    others: list[str] = []
    seen: set[str] = set()
    for text in given:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or "" in key.split("."):
            parser.error(
                f"argument --set: {text!r} is not written KEY=VALUE; for example "
                "optimizer.params.lr=3e-4"
            )
        if key in seen:
            parser.error(
                f"argument --set: {key} is given twice; give it once. If a shell has made two words of "
                f"{{…}}, {REMEDY}"
            )
        if value[:1] in ("{", "[") and isinstance(parsed(value), str):
            parser.error(
                f"argument --set: {key}: {value} is no JSON; if a shell has taken its quotes, {REMEDY}"
            )
        seen.add(key)
        action = flags.get(key.lstrip("-").replace("-", "_"))
        # `wandb` is a flag and a block of the JSON file, whose value is an object
        if action is None or "." in key or isinstance(parsed(value), dict):
            others.append(text)
        elif action.nargs == 0:  # a switch
            switch = parsed(value)
            if not isinstance(switch, bool):
                parser.error(f"argument --set: {key}: got {value!r}; it takes true or false")
            if switch:
                arguments.append(action.option_strings[-1])
            else:
                off[action.dest] = False
        else:
            arguments.append(f"{action.option_strings[-1]}={value}")
    return arguments, off, tuple(others)


def parsed(value: str) -> Any:
    """JSON, where it is JSON; else the words themselves."""
    if value in PYTHONS:
        return PYTHONS[value]
    try:
        return json.loads(value)
    except ValueError:
        return value


def with_settings(config: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The JSON file's content with `settings` (KEY=VALUE) in it; what they hold is checked with the
    rest of the file. Objects on the way are made. Errors: ValueError for a key below a value that
    is no object."""
    changed = json.loads(json.dumps(config))
    for text in settings:
        key, _, value = text.partition("=")
        *above, last = key.strip().split(".")
        place, path = changed, []
        for name in above:
            path.append(name)
            inner = place.get(name)
            if inner is None:
                inner = place[name] = {}
            if not isinstance(inner, dict):
                example = {last: parsed(value)}
                raise ValueError(
                    f"--set {text}: {'.'.join(path)} is {json.dumps(inner)}, which has no keys; "
                    f"give all of it, --set '{'.'.join(path)}={json.dumps(example)}'"
                )
            place = inner
        place[last] = parsed(value)
    return changed
