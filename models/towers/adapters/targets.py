"""Which modules of a tower have an adapter, in every library: by their names there, and by the
classes around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from models.towers.adapters.lora import TARGETS, LoRA
from models.towers.layers import Layer, Tower


@dataclass(frozen=True)
class Module:
    """A module of a layer: its path there, its name in the library, and the classes around it."""

    path: str
    name: str
    module: nn.Module
    around: tuple[str, ...]

    @property
    def takes_adapter(self) -> bool:
        return isinstance(self.module, (nn.Linear, nn.MultiheadAttention))


def modules_of(layer: Layer) -> list[Module]:
    """Those that hold parameters, in themselves or below, but for the insides of an
    nn.MultiheadAttention, which is adapted as a whole; a shared module under its first path."""
    names: dict[str, str] = {}
    for local, _ in layer.named_parameters():
        path, canonical = local, layer.canonical_names[local].partition(".")[2]
        while "." in path and path.rpartition(".")[2] == canonical.rpartition(".")[2]:
            path, canonical = path.rpartition(".")[0], canonical.rpartition(".")[0]
            if canonical:
                names.setdefault(path, canonical)
    found: list[Module] = []
    whole: list[str] = []
    classes = {"": type(layer).__name__}
    for path, module in layer.named_modules():
        classes[path] = type(module).__name__
        if path not in names or path.startswith(tuple(f"{other}." for other in whole) or "\0"):
            continue
        if isinstance(module, nn.MultiheadAttention):
            whole.append(path)
        above = [path.rsplit(".", depth)[0] for depth in range(1, path.count(".") + 1)]
        around = tuple(classes[each] for each in above if each in classes)
        found.append(Module(path, names[path], module, around))
    return found


_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|dense_?relu_?dense", re.IGNORECASE)
# BERT's and its kin's, DistilBERT's, T5's, ConvNeXt's, and what a bare block may call them
_OF_MLP = re.compile(r"intermediate|output|pwconv\d*|(c_)?fc\d*|lin\d+|w[io](_\d+)?|linear\d+")


def kind_of(module: Module) -> str:
    """ "attention", "mlp" or "other": the innermost part of its name that says which (an MLP may
    lie in a module of attention), else the class around it."""
    if isinstance(module.module, nn.MultiheadAttention):
        return "attention"
    parts = module.name.split(".")
    for part in reversed(parts):
        if _MLP.search(part):
            return "mlp"
        if _ATTENTION.search(part):
            return "attention"
    if any(_OF_MLP.fullmatch(part) for part in parts[-2:]):
        return "mlp"
    # a block may be called after the attention in it (ResidualAttentionBlock)
    if module.around and re.search(r"(Attention|Attn)\w{0,3}$", module.around[0]):
        return "attention"
    return "other"


def _is_meant(module: Module, target: str | tuple[str, ...]) -> bool:
    if isinstance(target, str):
        return module.takes_adapter and (target == "all" or kind_of(module) == target)
    return any(module.name == end or module.name.endswith(f".{end}") for end in target)


def targets_of(tower: Tower, lora: LoRA) -> list[list[Module]]:
    """Of each layer but the head the modules that get an adapter. Errors: ValueError."""
    where = f"branches.train.{tower.branch}.lora.target"
    lines = [modules_of(spec.template) for spec in tower.specs[:-1]]
    meant = [[module for module in line if _is_meant(module, lora.target)] for line in lines]
    found = [module for line in meant for module in line]
    there = [module for line in lines for module in line if module.takes_adapter]
    for end in (lora.target,) if isinstance(lora.target, str) else lora.target:
        own = end if end == lora.target else (end,)
        if not any(_is_meant(module, own) for module in found):
            raise ValueError(f"{where}: {end!r} matches no {_what_there_is(tower, there)}")
    for module in found:
        if not module.takes_adapter:
            raise ValueError(
                f"{where}: {module.name!r} of {tower.branch} tower {tower.name} is a "
                f"{type(module.module).__name__}; adapters go into linear layers and "
                f"nn.MultiheadAttention. It matches no {_what_there_is(tower, there)}"
            )
        if isinstance(module.module, nn.MultiheadAttention):
            _refuse_attention(tower, module, lora)
    return meant


def _refuse_attention(tower: Tower, module: Module, lora: LoRA) -> None:
    if not module.module._qkv_same_embed_dim:
        raise ValueError(
            f"branches.train.{tower.branch}.lora.target: {module.name!r} of tower {tower.name} has "
            "queries, keys and values of different widths, which peft does not adapt; name other "
            "modules"
        )
    if lora.dropout:
        raise ValueError(
            f"branches.train.{tower.branch}.lora.dropout: {module.name!r} of tower {tower.name} is "
            "an nn.MultiheadAttention, whose adapters have no dropout in peft; set dropout to 0"
        )


def _what_there_is(tower: Tower, there: Sequence[Module]) -> str:
    """`linear layer of ...`, and what could be written instead."""
    kind = f"linear layer of {tower.branch} tower {tower.name}"
    if not there:
        return (
            f"{kind}, which has none (convolutions take no adapters here); remove the block, or "
            f'lock the tower with "locked": {{"{tower.branch}": true}}'
        )
    kinds = {kind_of(module) for module in there} & set(TARGETS)
    groups = [f'"{name}"' for name in (*sorted(kinds), "all")]
    ends = dict.fromkeys(
        module.name.rpartition(".")[2]
        if not module.name.rpartition(".")[2].isdigit()
        else module.name
        for module in there
    )
    return f"{kind}; there are {', '.join(groups)}, or a list of names: {', '.join([*ends][:12])}"
