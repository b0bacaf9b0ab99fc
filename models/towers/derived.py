"""Modules of a library's model as those of a class derived from theirs."""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)


def as_kind(module: nn.Module, kind: type[Kind]) -> Kind:
    """A module of `kind`, a class derived from that of `module`, with its tensors, modules inside,
    hooks and settings. The given one is not to be used any more."""
    made = kind.__new__(kind)
    vars(made).update(vars(module))
    return made


def with_kinds(
    model: nn.Module, kind_of: Callable[[nn.Module], type[nn.Module] | None]
) -> nn.Module:
    """The model, in which a module of the class that `kind_of` names takes the place of each for
    which it names one."""
    root = nn.ModuleList([model])
    made: dict[int, nn.Module] = {}  # one that has several places stays one
    for parent in list(root.modules()):
        for name, module in parent._modules.items():
            if module is not None and (kind := kind_of(module)) is not None:
                parent.add_module(name, made.setdefault(id(module), as_kind(module, kind)))
    return root[0]
