"""The keys of a tower that a library's constructor or dataclass takes: what a command line can say
of them."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from models.towers.names import parse_overrides

Parameters = Mapping[str, tuple[Any, Any]]  # name -> annotation, default


def of_constructor(kind: type) -> dict[str, tuple[Any, Any]]:
    """Of a class that takes a dataclass as `cfg` and further keywords, also the dataclass's
    fields."""
    made_by = kind.__init__  # type: ignore[misc]  # mypy takes the class for an instance
    try:
        hints = typing.get_type_hints(made_by)
    except NameError:  # a name that is imported for type checkers only
        hints = {}
    found, takes_others = {}, False
    for key, parameter in list(inspect.signature(made_by).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_others = True
        else:
            found[key] = hints.get(key, parameter.annotation), parameter.default
    described = found.get("cfg", (None, None))[0]
    if takes_others and isinstance(described, type) and dataclasses.is_dataclass(described):
        found |= of_annotations(described)
    return found


def of_annotations(kind: type, below: type = object) -> dict[str, tuple[Any, Any]]:
    """What a class and its bases declare, but for what `below` and its bases do."""
    bases = [each for each in kind.__mro__ if not issubclass(below, each)]
    found: dict[str, Any] = {}
    for each in reversed(bases):
        found |= inspect.get_annotations(each, eval_str=True)
    return {key: (annotation, inspect.Parameter.empty) for key, annotation in found.items()}


def read_keys(
    name: str,
    overrides: Mapping[str, str],
    parameters: Parameters,
    not_keys: Collection[str],
    further: Mapping[str, type],
) -> dict[str, Any]:
    """The values of the overrides in a tower's name. `not_keys`: of the parameters, what is said in
    another way. `further`: keys that are no parameters, with their kinds. Errors: ValueError for an
    unknown key, with the nearest one, and for a value of another kind."""
    kinds = {
        key: kind
        for key, described in parameters.items()
        if key not in not_keys and (kind := _kind(described)) is not None
    }
    values = parse_overrides(name, overrides, {**kinds, **further})
    return {
        # one integer where the library takes either that or several
        key: value[0]
        if isinstance(value, tuple) and len(value) == 1 and int in _types(parameters[key])
        else value
        for key, value in values.items()
    }


def _kind(described: tuple[Any, Any]) -> type | None:
    """What is written on a command line: int, float, bool, str or tuple (of integers); None: it
    cannot be written there."""
    found = _types(described)
    return next((kind for kind in (bool, tuple, float, int, str) if kind in found), None)


def _types(described: tuple[Any, Any]) -> set[type]:
    annotation, default = described
    if annotation is inspect.Parameter.empty:
        return {type(default)}
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    found: set[type] = set()
    for part in typing.get_args(annotation) if union else (annotation,):
        if typing.get_origin(part) in (tuple, list) or part in (tuple, list):
            if all(one in (int, Ellipsis) for one in typing.get_args(part)):
                found.add(tuple)
        elif isinstance(part, type):
            found.add(part)
    return found
