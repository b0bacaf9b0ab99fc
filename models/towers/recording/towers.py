"""A library's model as a tower: recorded, cut, and with first values from the library itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.towers.layers import Layer, LibraryModel, Tower, cut, reset
from models.towers.names import refuse
from models.towers.pooling import ADDED, AttentionPool, MaxPool, MeanPool
from models.towers.recording.cutting import Recipe, record_layers
from models.towers.recording.precision import with_exact_statistics
from models.towers.recording.tracing import CannotRun

OWN_POOLS = {"avg": MeanPool, "max": MaxPool, "attention": AttentionPool}


@dataclass(frozen=True)
class Recording:
    """What is recorded of a model. `make`: the library's constructor, on the ambient device;
    `given`: the name of the tensor that enters, and its shape and dtype; `not_taken`, `remedy`: what
    to say where the model does not take it; `call`, `leaf_functions`, `leaf_modules` and
    `drop_last` as in `record_layers`."""

    branch: str
    make: Callable[[], nn.Module]
    given: tuple[str, tuple[int, ...], torch.dtype]
    not_taken: str
    remedy: str
    call: Callable[[nn.Module, Any], Tensor] = lambda model, tensor: model(tensor)
    leaf_functions: Sequence[Callable] = ()
    leaf_modules: tuple[type[nn.Module], ...] = ()
    drop_last: tuple[str, ...] = ()


def recorded_tower(
    recording: Recording, name: str, config: dict[str, Any], pool: str | None = None
) -> Tower:
    """The tower called `name`; it has no head yet. `config`: for the run's record, to which are
    added the pooling behind the library's model (`added_pool`), the library's tensors that are
    `unused`, and `notes` on what could not be cut.

    A model whose features are a map or tokens gets one of `OWN_POOLS` behind it, `avg` where `pool`
    is None. Errors: ValueError for an input that the model does not take, and for a pooling that is
    not there.
    """
    tensor, shape, dtype = recording.given
    model = with_exact_statistics(on_meta(recording.make))
    example = torch.empty(shape, dtype=dtype, device="meta")
    try:
        recipe = record_layers(
            model,
            recording.branch,
            (tensor, example),
            call=recording.call,
            leaf_functions=recording.leaf_functions,
            leaf_modules=recording.leaf_modules,
            drop_last=recording.drop_last,
        )
    except CannotRun as error:
        raise ValueError(f"{recording.not_taken} ({error}); {recording.remedy}") from error
    layers, width = recipe.layers, recipe.features[-1]
    added: dict[str, Any] | None = None
    if len(recipe.features) > 2:
        # timm says which of its maps have their channels last
        first = len(recipe.features) == 4 and getattr(model, "output_fmt", "NCHW") == "NCHW"
        added = {"pool": pool or "avg", "channels": 1 if first else -1}
        layers, width = _with_pool(name, recipe, **added)
    specs = cut(
        recording.branch,
        model,
        layers,
        _initialise_added,
        recipe.unused,
        original=LibraryModel(recording.make),
    )
    record = {
        **config,
        "added_pool": added,
        "unused": list(recipe.unused),
        "notes": recipe.notes,
    }
    return Tower(recording.branch, name, width, specs, record)


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
    run on the CPU first."""
    try:
        with torch.device("meta"):
            return make()
    except NotImplementedError:  # torch's, for the numbers of a tensor that has none
        with torch.random.fork_rng(devices=[]):
            return make().to("meta")


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
    name: str, recipe: Recipe, pool: str, channels: int
) -> tuple[list[tuple[str, Layer]], int]:
    """The layers and one of our poolings behind them, and the width of what that makes."""
    if pool not in OWN_POOLS:
        raise refuse(f"image tower {name!r}: pool", pool, OWN_POOLS)
    width = recipe.features[channels]
    own = on_meta(partial(AttentionPool, width) if pool == "attention" else OWN_POOLS[pool])
    last = recipe.layers[-1][1]
    last.makes = ("image_hidden",)
    last.drops = tuple(each for each in last.drops if each != "image_hidden")
    taken = {layer_name for layer_name, _ in recipe.layers}
    layer_name = "pool" if "pool" not in taken else "last_pool"
    return [*recipe.layers, (layer_name, MapPool(own, channels))], width


def _initialise_added(layer: Layer) -> None:
    for module in layer.modules():
        if isinstance(module, AttentionPool):
            reset(module)
