"""What must be the same on all ranks is compared before anything is built by it: ranks that plan
differently make different groups, and wait for each other for ever."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from engine.json_messages import Json, from_all_ranks

SHOWN = 8  # differences
FEW_RANKS = 4
LONGEST_VALUE = 160  # characters


def refuse_differences(record: Mapping[str, Json], remedy: str = "") -> None:
    """Compare the `record` of this rank with those of all others; all ranks call it together.
    Errors: ValueError on every rank, as `refuse_different`."""
    text = json.dumps(record, sort_keys=True, default=list)
    digests = from_all_ranks(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) > 1:
        refuse_different(from_all_ranks(json.loads(text)), remedy)


def refuse_different(records: Sequence[Mapping[str, Any]], remedy: str = "") -> None:
    """Raise ValueError where the records of the ranks, in their order, are not the same: with each
    key, its values and the ranks that have them, and behind them the `remedy`."""
    found = list(_differences("", records))
    if found:
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        lines = "".join(
            f"\n    {line}" for line in [*found[:SHOWN], *more, *filter(None, [remedy])]
        )
        raise ValueError(
            "the ranks are not started alike; all of them need the same code, packages, options "
            f"and files:{lines}"
        )


def _differences(path: str, values: Sequence[Any]) -> Iterator[str]:
    """`values`: by rank, of the key at `path`."""
    if all(isinstance(value, Mapping) for value in values):
        for key in sorted(set(chain(*values))):
            inner = f"{path}.{key}" if path else key
            yield from _differences(inner, [value.get(key) for value in values])
        return
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(json.dumps(value), []).append(rank)
    if len(ranks) > 1:
        same = len(os.path.commonprefix([*ranks]))
        shown = (f"{_around(text, same)} on {_named(of)}" for text, of in ranks.items())
        yield f"{path}: " + "; ".join(shown)


def _around(text: str, place: int) -> str:
    """The part of a long text that shows what is at `place`."""
    begin = max(0, min(place - LONGEST_VALUE // 2, len(text) - LONGEST_VALUE))
    end = begin + LONGEST_VALUE
    return f"{'…' * (begin > 0)}{text[begin:end]}{'…' * (end < len(text))}"


def _named(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:FEW_RANKS]))
    more = f" and {len(ranks) - FEW_RANKS} more" if len(ranks) > FEW_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {few}{more}"
