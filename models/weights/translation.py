"""The same weights under the names of other libraries: which tensors of theirs make which of ours,
and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from braceexpand import braceexpand
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, which a header says, and itself, read when it is asked for."""

    shape: Callable[[], Sequence[int]]
    tensor: Callable[[], Tensor]


Source = Mapping[str, Stored]  # a file of weights by the names in it


def in_memory(state: Mapping[str, Any]) -> Source:
    """Of a dictionary as training scripts save them."""
    for wrapper in ("state_dict", "model"):  # which save more than the weights
        if isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    return {
        name: Stored(partial(getattr, value, "shape"), partial(_itself, value))
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def unchanged(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


@dataclass(frozen=True)
class Pair:
    """Tensors that hold the same: `here(*theirs)` gives those of `ours`, `there(*ours)` those of
    `theirs`, each in the order of the names.

    Both are made of torch's functions alone, so that shapes come out of them on the meta device.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    here: Callable[..., tuple[Tensor, ...]] = unchanged
    there: Callable[..., tuple[Tensor, ...]] = unchanged


# how tensors of one library are made of another's: to ours, and back where models are written
HOW: Mapping[str, tuple[Callable[..., tuple[Tensor, ...]], ...]] = {
    "": (unchanged, unchanged),
    "transposed": (lambda matrix: (matrix.t(),), lambda matrix: (matrix.t(),)),
    # queries, keys and values: one tensor here, or one there
    "joined": (lambda *three: (torch.cat(three),),),
    "parted": (lambda one: one.chunk(3),),
    # behind a linear of theirs each output is scaled
    "scaled": (lambda weight, bias, scale: (scale[:, None] * weight, scale * bias),),
    "of places": (lambda scale: (scale[:, None, None],),),
    "number": (lambda number: (number.reshape(1),), lambda number: (number.reshape(()),)),
}


def pairs_of(table: str, ours: str = "", theirs: str = "") -> list[Pair]:
    """Of a table with a line `our names = their names | how` for each pair, `how` of `HOW`. `*`
    stands for weight and bias, a pair each; names in braces are of one pair. `ours`, `theirs`: how
    all names begin."""
    pairs = []
    for line in filter(None, map(str.strip, table.splitlines())):
        for text in (line.replace("*", end) for end in ("weight", "bias")[: 1 + ("*" in line)]):
            names, _, how = text.partition(" | ")
            own, there = (
                [name for word in side.split() for name in braceexpand(word)]
                for side in names.split(" = ")
            )
            named = tuple(ours + name for name in own), tuple(theirs + name for name in there)
            pairs.append(Pair(*named, *HOW[how]))
    return pairs


def to_theirs(pairs: Iterable[Pair], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by name as theirs by name. Every one of `state` must be in exactly one pair."""
    pairs = list(pairs)
    used = sorted(name for pair in pairs for name in pair.ours)
    if used != sorted(state):
        raise RuntimeError(
            "the pairs do not cover the tensors once each: "
            f"{sorted(set(used) ^ set(state)) or 'one is in two pairs'}"
        )
    theirs: dict[str, Tensor] = {}
    for pair in pairs:
        theirs |= dict(
            zip(pair.theirs, pair.there(*(state[name] for name in pair.ours)), strict=True)
        )
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


def as_ours(pairs: Iterable[Pair], source: Source) -> Source:
    """A file with their names, read as one with ours. What it lacks is lacking here too."""
    return {
        name: Stored(
            partial(_shape_of_ours, pair, name, source),
            partial(_tensor_of_ours, pair, name, source),
        )
        for pair in pairs
        if source.keys() >= set(pair.theirs)
        for name in pair.ours
    }


def _shape_of_ours(pair: Pair, name: str, source: Source) -> Sequence[int]:
    shapes = (source[theirs].shape() for theirs in pair.theirs)
    return _made(pair, name, [torch.empty(tuple(shape), device="meta") for shape in shapes]).shape


def _tensor_of_ours(pair: Pair, name: str, source: Source) -> Tensor:
    return _made(pair, name, [source[theirs].tensor() for theirs in pair.theirs])


def _made(pair: Pair, name: str, tensors: list[Tensor]) -> Tensor:
    """Errors: ValueError, naming them, for tensors whose shapes do not fit each other."""
    try:
        return pair.here(*tensors)[pair.ours.index(name)]
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(
            f"{theirs} {tuple(tensor.shape)}" for theirs, tensor in zip(pair.theirs, tensors)
        )
        raise ValueError(
            f"{name} cannot be made of {shapes}: their shapes do not fit; the file is of another "
            "architecture"
        ) from error


def plain_names(source: Source) -> Source:
    """A file of OpenCLIP weights without the prefixes that a wrapper for several GPUs, or a text
    tower kept as a module of its own, puts before names."""
    inside = {name.removeprefix("module."): stored for name, stored in source.items()}
    exported = any(name.startswith("head.") for name in inside)  # by us, under our names
    own = "text.token_embedding.weight" in inside and not exported
    return {name.removeprefix("text.") if own else name: each for name, each in inside.items()}
