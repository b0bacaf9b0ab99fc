"""timm's classifiers as image towers: `timm:NAME[.TAG][:key=value,...]`.

The model is timm's own without its classifier (`num_classes=0`), so its features are what the
classifier would read. The keys are those of the constructor of its class.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.towers.layers import Layer, Tower, WholeModel, cut, reset
from models.towers.libraries.norms import with_exact_statistics
from models.towers.libraries.tracing import SAMPLES, CannotRun, record_layers
from models.towers.names import nearest, parse_overrides, refuse, split_name
from models.towers.pooling import ADDED, AttentionPool, MaxPool, MeanPool

PREFIX = "timm:"
# said in other ways (`--image-size`, `pool=`), or the same for every tower
NOT_KEYS = (
    "num_classes",
    "in_chans",
    "global_pool",
    "img_size",
    "device",
    "dtype",
    "strict_img_size",
)
OWN_POOLS = {"avg": MeanPool, "max": MaxPool, "attention": AttentionPool}


def library() -> types.ModuleType:
    """timm, imported when it is needed. Errors: ImportError that says what to install."""
    try:
        import timm
    except ImportError as error:
        raise ImportError(
            "image towers timm:NAME need the package timm; install it with "
            "pip install -r requirements-models.txt"
        ) from error
    return timm


def split_tag(name: str) -> tuple[str, str]:
    """`vit_base_patch16_224.augreg_in21k` -> architecture and tag of its weights, "" where there is
    none. `name`: of a tower, with or without its prefix and keys."""
    base = split_name(name)[0].removeprefix(PREFIX)
    architecture, _, tag = base.partition(".")
    return architecture, tag


def is_known(architecture: str) -> bool:
    return library().is_model(architecture)


def image_tower(name: str, image_size: int) -> Tower:
    """The tower of `name` for images of `image_size` pixels a side; it has no head yet.

    Errors: ImportError without timm; ValueError for an unknown name or key, and with timm's own
    words for what its constructor or its forward refuses.
    """
    timm = library()
    architecture, tag = split_tag(name)
    if not timm.is_model(architecture):
        known = timm.list_models()
        raise ValueError(
            f"image tower {name!r}: timm has no {architecture!r}; did you mean "
            f"{PREFIX}{nearest(architecture, known)}? timm.list_models() lists all {len(known)}"
        )
    arguments, pool = _arguments(name, architecture, image_size)
    if pool in ("attention",):
        call, arguments = _unpooled, arguments
    elif pool is not None:
        call, arguments = _whole, {**arguments, "global_pool": pool}
    else:
        call = _whole
    with torch.device("meta"):
        model = with_exact_statistics(_make(name, architecture, arguments))
        example = torch.empty(SAMPLES, 3, image_size, image_size)
    try:
        recipe = record_layers(
            model,
            "image",
            ("pixel_values", example),
            call,
            timm.models.get_notrace_functions(),
            tuple(timm.models.get_notrace_modules()),
        )
    except CannotRun as error:
        raise ValueError(
            f"image tower {name!r}: timm's {architecture} does not take images of {image_size} "
            f"pixels a side ({error}); give another --image-size"
        ) from error
    layers, width = list(recipe.layers), recipe.features[-1]
    if len(recipe.features) > 2:
        layers, width = _with_pool(name, layers, recipe.features, pool or "avg", model)
    whole = WholeModel(partial(_make, name, architecture, arguments))
    specs = cut("image", model, layers, _initialise_added, recipe.unused, whole)
    config = {
        "library": "timm",
        "architecture": architecture,
        "pool": pool or "library",
        "image_size": image_size,
        "arguments": arguments,
        "notes": recipe.notes,
    }
    return Tower("image", name, width, specs, config)


def _make(name: str, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
    try:
        return library().create_model(architecture, num_classes=0, **arguments)
    except Exception as error:  # whatever the constructor raises
        raise ValueError(
            f"image tower {name!r}: timm's {architecture} cannot be made with "
            f"{dict(arguments)}: {type(error).__name__}: {error}"
        ) from error


def _whole(model: nn.Module, pixel_values: Tensor) -> Tensor:
    return model(pixel_values)


def _unpooled(model: nn.Module, pixel_values: Tensor) -> Tensor:
    return model.forward_features(pixel_values)


# -- keys


def _arguments(name: str, architecture: str, image_size: int) -> tuple[dict[str, Any], str | None]:
    """What the constructor is given, and the pooling that is asked for."""
    with torch.device("meta"):
        kind = type(_make(name, architecture, {}))
    overrides = split_name(name)[1]
    found = _parameters(kind)
    given = parse_overrides(name, overrides, {**_kinds(found), "pool": str})
    pool = given.pop("pool", None)
    if pool is not None and pool != "attention" and "global_pool" not in found:
        raise refuse(f"image tower {name!r}: pool", pool, ["attention"])
    arguments = {key: _unwrapped(value, _candidates(found[key])) for key, value in given.items()}
    if "img_size" in found:
        arguments["img_size"] = image_size
    return arguments, {"cls": "token"}.get(pool, pool)


def _parameters(kind: type[nn.Module]) -> dict[str, tuple[Any, Any]]:
    """Of a constructor: name -> annotation and default. A model that is described by a dataclass
    takes the dataclass's fields too."""
    try:
        hints = typing.get_type_hints(kind.__init__)
    except NameError:  # imported for type checkers only
        hints = {}
    found, takes_others = {}, False
    for key, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        takes_others |= parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind is not parameter.VAR_KEYWORD:
            found[key] = hints.get(key, parameter.annotation), parameter.default
    described = found.get("cfg", (None, None))[0]
    if takes_others and dataclasses.is_dataclass(described):
        hints = typing.get_type_hints(described)
        found |= {f.name: (hints[f.name], f.default) for f in dataclasses.fields(described)}
    return found


def _kinds(parameters: Mapping[str, tuple[Any, Any]]) -> dict[str, type]:
    """Those that a command line can say: key -> int, float, bool, str or tuple (of integers)."""
    kinds = {}
    for key, described in parameters.items():
        candidates = _candidates(described)
        kind = next((k for k in (bool, tuple, float, int, str) if k in candidates), None)
        if kind is not None and key not in NOT_KEYS:
            kinds[key] = kind
    return kinds


def _candidates(described: tuple[Any, Any]) -> set[type]:
    annotation, default = described
    if annotation is inspect.Parameter.empty:
        return {type(default)}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = typing.get_args(annotation)
    else:
        parts = (annotation,)
    found = set()
    for part in parts:
        of = typing.get_args(part)
        if typing.get_origin(part) in (tuple, list) or part in (tuple, list):
            found |= {tuple} if all(one in (int, Ellipsis) for one in of) else set()
        elif isinstance(part, type):
            found.add(part)
    return found


def _unwrapped(value: Any, candidates: set[type]) -> Any:
    """One integer where the constructor takes either that or several."""
    single = isinstance(value, tuple) and len(value) == 1 and int in candidates
    return value[0] if single else value


# -- pooling that timm does not have


class _MapPool(Layer):
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
    name: str,
    layers: list[tuple[str, Layer]],
    features: tuple[int, ...],
    pool: str,
    model: nn.Module,
) -> tuple[list[tuple[str, Layer]], int]:
    """The layers and one of our poolings behind them, and the width of what that makes."""
    if pool not in OWN_POOLS:
        raise refuse(f"image tower {name!r}: pool", pool, OWN_POOLS)
    channels = 1 if getattr(model, "output_fmt", "NCHW") == "NCHW" and len(features) == 4 else -1
    width = features[channels]
    with torch.device("meta"):
        own = OWN_POOLS[pool](width) if pool == "attention" else OWN_POOLS[pool]()
    layers[-1][1].makes = ("image_hidden",)
    layers[-1][1].drops = tuple(n for n in layers[-1][1].drops if n != "image_hidden")
    names = {layer_name for layer_name, _ in layers}
    return [
        *layers,
        ("pool" if "pool" not in names else "last_pool", _MapPool(own, channels)),
    ], width


def _initialise_added(layer: Layer) -> None:
    for module in layer.modules():
        if isinstance(module, AttentionPool):
            reset(module)
