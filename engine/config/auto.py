"""Numbers that the JSON may leave "auto": which ones, and how they are filled in before anything is
planned. Plain Python."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.config.reading import AUTO, AUTO_PLACES, BranchesBlock, check_config


def asked(config: Mapping[str, Any], block: BranchesBlock) -> list[str]:
    """Which of `AUTO_PLACES` are "auto" in a configuration."""
    whole = {**config, "branches": asdict(block)}
    return [place for place in AUTO_PLACES if _found(whole, place) == AUTO]


def filled(
    config: Mapping[str, Any],
    block: BranchesBlock,
    values: Mapping[str, Any],
    branches: Sequence[str],
) -> tuple[dict[str, Any], BranchesBlock]:
    """The configuration with `values`, by place, where it says "auto"; checked anew. A place
    without a value is left to its default: its key goes."""
    whole = copy.deepcopy({**config, "branches": asdict(block)})
    for place in asked(config, block):
        *outer, key = place.split(".")
        inner = _found(whole, ".".join(outer))
        if place in values:
            inner[key] = values[place]
        else:
            del inner[key]
    return check_config(whole, branches)


def recorded(training: Mapping[str, Any]) -> dict[str, Any]:
    """By place, what a run was trained with; `training` is what it recorded. A place that it did
    not have is left out."""
    whole = {**training["deepspeed_config"], "branches": training["branches"]}
    found = {place: _found(whole, place) for place in AUTO_PLACES}
    return {place: value for place, value in found.items() if value is not None}


def _found(whole: Any, place: str) -> Any:
    for key in place.split("."):
        whole = whole.get(key) if isinstance(whole, Mapping) else None
    return whole
