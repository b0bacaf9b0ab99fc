"""The same weights under the names of other libraries: which tensors of theirs make which of ours,
and back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# What a file of weights answers: the names in it, the shape of one, the tensor of one.
Source = tuple[list[str], Callable[[str], tuple[int, ...]], Callable[[str], Tensor]]


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


def renamed(ours: str, theirs: str, *ends: str) -> list[Pair]:
    """Pairs of equal tensors: `ours` + end and `theirs` + end, for each of `ends`."""
    return [Pair((ours + end,), (theirs + end,)) for end in ends or ("",)]


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
    """A file with their names, read as one with ours. Tensors are read when they are asked for;
    shapes come from the header alone.

    What the file lacks is lacking here too. Raises ValueError, naming them, for tensors whose
    shapes do not fit each other.
    """
    names, shape_of, tensor_of = source
    there = set(names)
    pair_of = {name: pair for pair in pairs if there.issuperset(pair.theirs) for name in pair.ours}

    def made(name: str, tensors: list[Tensor]) -> Tensor:
        pair = pair_of[name]
        try:
            return pair.here(*tensors)[pair.ours.index(name)]
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(
                f"{theirs} {tuple(tensor.shape)}" for theirs, tensor in zip(pair.theirs, tensors)
            )
            raise ValueError(
                f"{name} cannot be made of {shapes}: their shapes do not fit; the file is of "
                "another architecture"
            ) from error

    def shape(name: str) -> tuple[int, ...]:
        return tuple(
            made(
                name,
                [torch.empty(shape_of(theirs), device="meta") for theirs in pair_of[name].theirs],
            ).shape
        )

    return (
        list(pair_of),
        shape,
        lambda name: made(name, [tensor_of(theirs) for theirs in pair_of[name].theirs]),
    )


def plain_names(source: Source) -> Source:
    """A file of OpenCLIP weights without the prefixes that a wrapper for several GPUs, or a text tower
    kept as a module of its own, puts before names."""
    names, shape_of, tensor_of = source
    inside = {name.removeprefix("module."): name for name in names}
    exported = any(name.startswith("head.") for name in inside)  # by us, under our names
    own = "text.token_embedding.weight" in inside and not exported
    inside = {name.removeprefix("text.") if own else name: full for name, full in inside.items()}
    return list(inside), lambda name: shape_of(inside[name]), lambda name: tensor_of(inside[name])
