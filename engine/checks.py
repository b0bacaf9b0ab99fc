"""Checks of single values of the `branches` block, each with an error that names the key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.spelling import nearest

AUTO = "auto"


def check_choice(name: str, value: Any, valid: Sequence[str]) -> None:
    """Raise ValueError for a value that is not one of `valid`."""
    if value not in valid:
        raise ValueError(f"branches.{name}: unknown value {value!r}{nearest(str(value), valid)}")


def check_counts(
    name: str,
    value: Any,
    keys: Sequence[str] | None,
    auto_inside: bool = False,
    least: int = 1,
    merged: bool = False,
) -> None:
    """`value` is "auto", a whole number of at least `least`, or an object of those by branch.
    `keys`: those that it may have; None: names of branches, which are checked elsewhere, and with
    `merged` that word."""
    if value == AUTO:
        return
    entries = value if isinstance(value, dict) else {"": value}
    for key, count in entries.items():
        if key == "merged" and not merged:
            raise ValueError(
                f'branches.{name}: got {json.dumps(value)}, but only "stages" has the key "merged"; a merged stage holds a slice of every branch, '
                f'so write one number: "{name}": {json.dumps(count)}'
            )
        if key and keys is not None:
            check_choice(f"{name}: key", key, keys)
        if auto_inside and count == AUTO:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(
                f"branches.{name}{'.' + key if key else ''}: got {count!r}; it takes whole numbers "
                f"of at least {least}"
            )
