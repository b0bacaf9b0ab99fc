"""A library's model as a tower: traced, cut, and with first values from the library itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.towers.attention import with_self_attention
from models.towers.layers import (
    Layer,
    LayerSpec,
    LibraryModel,
    Tower,
    cut,
    reset,
    runs,
    without_parameters,
)
from models.towers.names import refuse
from models.towers.patches import kept_tokens, patch_side
from models.towers.pooling import ADDED, AttentionPool, pooling
from models.towers.tracing.partitioning import Partition, TracedLayer, partitioned
from models.towers.tracing.precision import with_exact_statistics
from models.towers.tracing.trace import SAMPLES, CannotRun

OWN_POOLS = ("avg", "max", "attention")


@dataclass(frozen=True)
class Traceable:
    """What is traced of a model. `make`: the library's constructor, on the ambient device;
    `given`: the name of the tensor that enters, and its shape and dtype; `not_taken`, `remedy`:
    what to say where the model does not take it; `call`, `leaf_functions`, `leaf_modules` and
    `drop_last` as in `partitioned`."""

    branch: str
    make: Callable[[], nn.Module]
    given: tuple[str, tuple[int, ...], torch.dtype]
    not_taken: str
    remedy: str
    call: Callable[[nn.Module, Any], Tensor] = lambda model, tensor: model(tensor)
    leaf_functions: Sequence[Callable] = ()
    leaf_modules: tuple[type[nn.Module], ...] = ()
    drop_last: tuple[str, ...] = ()


def traced_tower(
    traceable: Traceable, name: str, config: dict[str, Any], pool: str | None = None
) -> Tower:
    """The tower called `name`; it has no head yet. `config`: for the run's record, to which are
    added the pooling behind the library's model (`added_pool`), the library's tensors that are
    `unused`, and `notes` on what could not be cut.

    A model whose features are a map or tokens gets one of `OWN_POOLS` behind it, `avg` where `pool`
    is None. Errors: ValueError for an input that the model does not take, and for a pooling that is
    not there.
    """
    tensor, shape, dtype = traceable.given
    model = with_self_attention(with_exact_statistics(on_meta(traceable.make)))
    example = torch.empty(shape, dtype=dtype, device="meta")
    try:
        partition = partitioned(
            model,
            traceable.branch,
            (tensor, example),
            call=traceable.call,
            leaf_functions=traceable.leaf_functions,
            leaf_modules=traceable.leaf_modules,
            drop_last=traceable.drop_last,
        )
    except CannotRun as error:
        raise ValueError(f"{traceable.not_taken} ({error}); {traceable.remedy}") from error
    layers, width = partition.layers, partition.features[-1]
    added: dict[str, Any] | None = None
    if len(partition.features) > 2:
        # timm says which of its maps have their channels last
        first = len(partition.features) == 4 and getattr(model, "output_fmt", "NCHW") == "NCHW"
        added = {"pool": pool or "avg", "channels": 1 if first else -1}
        layers, width = _with_pool(name, partition, **added)
    specs = cut(
        traceable.branch,
        model,
        layers,
        _initialise_added,
        partition.unused,
        original=LibraryModel(traceable.make),
    )
    record = {
        **config,
        "added_pool": added,
        "unused": list(partition.unused),
        "notes": partition.notes,
    }
    if tensor == "pixel_values" and (side := _leaves_out_patches(specs, example)):
        record["patch_size"] = side
    return Tower(traceable.branch, name, width, specs, record)


def _leaves_out_patches(specs: Sequence[LayerSpec], example: Tensor) -> int | None:
    """Where the layers are those of a ViT, let the first one leave out patches, in place, and
    return their side in pixels; None: they are of another network.

    The first layer of a ViT makes one sequence of tokens, some of no patch and then one of each,
    and all others take any number of them. That is tried on the meta device with a prime number of
    patches, which no map and no window has. A ViT that takes images of other sizes is left as it
    is: their sides are multiples of `patch_size` where a tower has it, and would change.
    """
    first, side = specs[0].template, patch_side(specs[0].template)
    if not isinstance(first, TracedLayer) or side is None or example.dim() != 4:
        return None
    rows, columns = (length // side for length in example.shape[2:])
    tokens = first({"pixel_values": example}).get("image_hidden")
    if first.makes != ("image_hidden",) or tokens is None or tokens.dim() != 3:
        return None
    prefix, fewer = tokens.shape[1] - rows * columns, _prime_below(rows * columns)
    whole = (rows * side, columns * side) == example.shape[2:]
    wider = torch.cat([example, example[..., :side]], dim=-1)
    if not whole or prefix < 0 or fewer is None or runs(specs, {"pixel_values": wider}):
        return None
    kept = torch.empty(SAMPLES, fewer, dtype=torch.int64, device="meta")
    made = {"image_hidden": kept_tokens(tokens, kept, prefix)}
    if not runs(specs[1:], made):
        return None
    first.let_leave_out_patches(prefix)
    return side


def _prime_below(number: int) -> int | None:
    below = range(number - 1, 2, -1)
    return next((n for n in below if all(n % each for each in range(2, math.isqrt(n) + 1))), None)


@contextlib.contextmanager
def refusals(what: str, remedy: str) -> Iterator[None]:
    """Within it, whatever a library's constructor raises becomes a ValueError with its words."""
    try:
        yield
    except NotImplementedError:  # see `on_meta`
        raise
    except Exception as error:
        raise ValueError(f"{what} ({type(error).__name__}: {error}); {remedy}") from error


def spelled(arguments: Mapping[str, Any]) -> str:
    """The arguments of a constructor, for a message."""
    return ", ".join(f"{key}={value}" for key, value in arguments.items()) or "its defaults"


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without memory. A constructor that computes with tensors (torchvision's RegNet) is
    run on the CPU, but for its parameters."""
    try:
        with torch.device("meta"):
            return make()
    except NotImplementedError:  # torch's, for the numbers of a tensor that has none
        with torch.random.fork_rng(devices=[]):
            return without_parameters(make).to("meta")


class MapPool(Layer):
    """`image_hidden` -> `image_features` [B, W]: one of our poolings over all places or tokens.
    `channels`: the dimension of `image_hidden` that holds them."""

    reads, makes, drops = ("image_hidden",), ("image_features",), ("image_hidden",)

    def __init__(self, pool: nn.Module, channels: int) -> None:
        super().__init__()
        self.pool, self.channels = pool, channels
        self.added = ADDED if isinstance(pool, AttentionPool) else None

    def compute(self, image_hidden: Tensor) -> Tensor:
        return self.pool(image_hidden.movedim(self.channels, -1).flatten(1, -2))


def _with_pool(
    name: str, partition: Partition, pool: str, channels: int
) -> tuple[list[tuple[str, Layer]], int]:
    """The layers and one of our poolings behind them, and the width of what that makes."""
    if pool not in OWN_POOLS:
        raise refuse(f"image tower {name!r}: pool", pool, OWN_POOLS)
    width = partition.features[channels]
    own = on_meta(partial(pooling, pool, width))
    last = partition.layers[-1][1]
    last.makes = ("image_hidden",)
    last.drops = tuple(each for each in last.drops if each != "image_hidden")
    taken = {layer_name for layer_name, _ in partition.layers}
    layer_name = "pool" if "pool" not in taken else "last_pool"
    return [*partition.layers, (layer_name, MapPool(own, channels))], width


def _initialise_added(layer: Layer) -> None:
    for module in layer.modules():
        if isinstance(module, AttentionPool):
            reset(module)
