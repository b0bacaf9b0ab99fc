"""Layers run through torch.compile, one by one: `"compile"` in the `branches` block.

Layers of equal structure share one compilation. The first call of a shape compiles for it; when a
second shape comes, torch compiles once more for sizes that vary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from engine.checks import AUTO

# Compilations of one function before torch falls back to running it as it is. All layers run
# through one `forward`, which is compiled for each structure, for fixed and for varying sizes, with
# and without gradients, in training and in evaluation; torch's limit of 8 is for one of these.
MOST_COMPILATIONS = 256
WORTH = 0.95  # "auto" compiles where layers take at most this share of their time


def compiles(choice: str, share: float | None = None) -> bool:
    """Whether the layers of a branch are compiled, by what `branches.compile` says of it and, for
    "auto", the share of their time that they then take, where it was measured."""
    return choice == "layers" or (choice == AUTO and share is not None and share <= WORTH)


def compile_layer(layer: nn.Module) -> None:
    """Calls of this layer run compiled from now on, inside `compiling`. Its parameters, buffers and
    their names stay what they are."""
    layer.compile()


@contextmanager
def compiling() -> Iterator[None]:
    """Layers that `compile_layer` was asked for run in here. Raises RuntimeError where one cannot
    be compiled."""
    with torch._dynamo.config.patch(
        cache_size_limit=MOST_COMPILATIONS, accumulated_cache_size_limit=16 * MOST_COMPILATIONS
    ):
        try:
            yield
        except TorchDynamoException as error:
            raise RuntimeError(
                f"a layer could not be compiled: {type(error).__name__}: {error}\n"
                'branches.compile: write "off", or name only the branches whose layers compile; on '
                "a CPU torch needs a C++ compiler, on a GPU Triton"
            ) from error
