"""Any library's modules in bf16 and fp16, as the engine keeps them: parameters in half precision,
buffers in fp32."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from models.towers.derived import with_kinds


def with_exact_statistics(model: nn.Module) -> nn.Module:
    """The model, whose batch norms compute in fp32 where the engine keeps parameters in bf16 or
    fp16.

    Half-precision running statistics would lose their small updates, and no kernel takes
    half-precision weights beside fp32 statistics. The class of each is one derived from its own,
    so that a library's variants (with an activation, split, synchronised) keep what they add. In
    fp32 it is the library's own forward.
    """

    def kind_of(module: nn.Module) -> type[nn.Module] | None:
        if not isinstance(module, _BatchNorm):
            return None
        # typeshed wants a hashable argument, and mypy does not see that a class is
        return _exact(type(module))  # type: ignore[arg-type]

    return with_kinds(model, kind_of)


@functools.cache
def _exact(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    def forward(self: _BatchNorm, *args: Any, **kwargs: Any) -> Tensor:
        if self.weight is None or self.weight.dtype == torch.float32:
            return kind.forward(self, *args, **kwargs)
        affine = {name: p.float() for name, p in self.named_parameters(recurse=False)}
        return functional_call(self, affine, args, kwargs)

    named = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), named)


def run(body: nn.Module, *args: Any) -> Any:
    """`body(*args)`. In half precision, modules that compute with a table of their own beside their
    weights (relative positions, masks of windows) find it in the dtype of the weights, as after
    `model.to(torch.bfloat16)`. Statistics of batch norms and what stands by itself stay in fp32.
    """
    dtype = next((p.dtype for p in body.parameters() if p.is_floating_point()), torch.float32)
    if dtype == torch.float32:
        return body(*args)
    tables = {
        f"{path}.{name}": buffer.to(dtype)
        for path, module in body.named_children()
        if any(True for _ in module.parameters())
        for name, buffer in _tables(module)
    }
    # where there are none, without what putting them in place costs the host
    return functional_call(body, tables, args) if tables else body(*args)


def _tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            for name, buffer in part.named_buffers(path, recurse=False):
                if buffer.is_floating_point():
                    yield name, buffer
