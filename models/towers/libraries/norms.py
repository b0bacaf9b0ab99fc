"""Batch normalisation of any library in half precision: statistics and affine stay in fp32."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm


def with_exact_statistics(model: nn.Module) -> nn.Module:
    """The model, whose batch norms compute in fp32 where the engine keeps parameters in bf16 or
    fp16.

    Half-precision running statistics would lose their small updates, and no kernel takes
    half-precision weights beside fp32 statistics. The class of each is one derived from its own,
    so that a library's variants (with an activation, split, synchronised) keep what they add. In
    fp32 it is the library's own forward.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = _exact(type(module))
    return model


@functools.cache
def _exact(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    def forward(self: _BatchNorm, *args: Any, **kwargs: Any) -> Tensor:
        if self.weight is None or self.weight.dtype == torch.float32:
            return kind.forward(self, *args, **kwargs)
        affine = {name: p.float() for name, p in self.named_parameters(recurse=False)}
        return functional_call(self, affine, args, kwargs)

    named = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), named)
