"""Towers of modalities of one's own in an export: their weights under their own names, in a file
beside the model that libraries load, and what makes them again with the module that registers
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from data.options import IMAGE_TEXT, as_given, loss_for, read_pairs
from launch.config.groups import by_modality
from launch.modalities import OWN
from models.towers.layers import Layer, Tower


def own_branches(towers: Sequence[Tower]) -> list[str]:
    """Those of a model whose modality a module added."""
    return [each.branch for each in towers if each.branch not in OWN]


def own_record(
    options: Mapping[str, Any], branches: Sequence[str], others: Sequence[str]
) -> dict[str, Any]:
    """What an export says of them. `others`: branches that are exported, too."""
    every = {*branches, *others}
    given = read_pairs(options.get("pairs", IMAGE_TEXT))
    pairs = as_given(pair for pair in given if {*pair.branches} <= every)
    named = by_modality(options.get("tower"))
    return {
        "modules": list(options.get("import_module") or ()),
        "branches": list(branches),
        "pairs": pairs,
        "loss": loss_for(options["loss"], pairs),
        "tower": [f"{name}={value}" for name, value in named.items() if name in branches],
    }


def own_tensors(
    record: Mapping[str, Any], layers: Sequence[Layer], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of the state of a run those of their `layers`, and the scalars of their pairs, which may be
    of another branch."""
    names = {name for layer in layers for name in layer.canonical_names.values()}
    pairs = [
        pair for pair in read_pairs(record["pairs"]) if {*pair.branches} & {*record["branches"]}
    ]
    scalars = tuple(f"head.{pair.name}_logit_" for pair in pairs)
    return {name: each for name, each in state.items() if name in names or name.startswith(scalars)}


def fill_own(layers: Sequence[Layer], branches: Sequence[str], file: Path) -> None:
    """Give them the weights of the file. `layers`: of all branches. Errors: ValueError, OSError."""
    starts = tuple(start for name in branches for start in (f"{name}.", f"head.{name}_"))
    with safe_open(file, "pt") as opened:
        there = {*opened.keys()}
        for layer in layers:
            for local, target in layer.state_dict().items():
                if (name := layer.canonical_names[local]) not in there:
                    if name.startswith(starts):
                        raise ValueError(f"{file}: holds no {name}; its module makes another tower")
                    continue
                tensor = opened.get_tensor(name)
                if tensor.shape != target.shape:
                    raise ValueError(
                        f"{file}: {name} is {[*tensor.shape]} and the tower of its module has "
                        f"{[*target.shape]}; give the module that it was trained with"
                    )
                target.copy_(tensor)
