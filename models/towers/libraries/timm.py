"""timm's classifiers as image towers: `timm:NAME[.TAG][:key=value,...]`.

The model is timm's own without its classifier (`num_classes=0`), so its features are what the
classifier would read. The keys are those of the constructor of its class.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.towers.layers import Tower
from models.towers.names import nearest, refuse, split_name
from models.towers.tracing.keys import of_constructor, read_keys
from models.towers.tracing.towers import Traceable, on_meta, refusals, spelled, traced_tower
from models.towers.tracing.trace import SAMPLES

PREFIX = "timm:"
# said in other ways (`--image-size`, `pool=`), or the same for every tower
NOT_KEYS = (
    "num_classes",
    "in_chans",
    "global_pool",
    "img_size",
    "strict_img_size",
    "device",
    "dtype",
)


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


def names() -> tuple[str, ...]:
    """Of all models; none where timm is not installed."""
    if importlib.util.find_spec("timm") is None:
        return ()
    return tuple(library().list_models())


def split_tag(name: str) -> tuple[str, str]:
    """The architecture of a tower and the tag of its weights, "" where it names none:
    `timm:vit_base_patch16_224.augreg_in21k` -> `vit_base_patch16_224`, `augreg_in21k`."""
    architecture, _, tag = split_name(name)[0].removeprefix(PREFIX).partition(".")
    return architecture, tag


def image_tower(name: str, image_size: int) -> Tower:
    """The tower of `name` for images of `image_size` pixels a side; it has no head yet.

    Errors: ImportError without timm; ValueError for an unknown name or key, and with timm's own
    words for what its constructor or its forward refuses.
    """
    timm = library()
    architecture, tag = split_tag(name)
    _check_name(name, architecture, tag)
    arguments, pool = _arguments(name, architecture, image_size)
    traceable = Traceable(
        branch="image",
        make=partial(_make, name, architecture, arguments),
        given=("pixel_values", (SAMPLES, 3, image_size, image_size), torch.float32),
        not_taken=f"image tower {name!r}: timm's {architecture} does not take images of "
        f"{image_size} pixels a side",
        remedy="give another --image-size",
        call=_unpooled if pool == "attention" else _pooled,
        leaf_functions=timm.models.get_notrace_functions(),
        leaf_modules=tuple(timm.models.get_notrace_modules()),
    )
    config = {
        "library": "timm",
        "architecture": architecture,
        "tag": tag,
        "pool": pool or "library",
        "image_size": image_size,
        "arguments": arguments,
    }
    return traced_tower(traceable, name, config, pool)


def _check_name(name: str, architecture: str, tag: str) -> None:
    timm = library()
    if not timm.is_model(architecture):
        known = timm.list_models()
        raise ValueError(
            f"image tower {name!r}: timm has no {architecture!r}; did you mean "
            f"{PREFIX}{nearest(architecture, known)}? timm.list_models() lists all {len(known)}"
        )
    if tag and tag not in tags(architecture):
        raise refuse(f"image tower {name!r}: tag", tag, tags(architecture) or ["none"])


def _make(name: str, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
    what = f"image tower {name!r}: timm cannot make {architecture} with {spelled(arguments)}"
    with refusals(what, "change what does not fit"):
        return library().create_model(architecture, num_classes=0, **arguments)


def _arguments(name: str, architecture: str, image_size: int) -> tuple[dict[str, Any], str | None]:
    """What the constructor is given, and the pooling that is asked for."""
    parameters = of_constructor(type(on_meta(partial(_make, name, architecture, {}))))
    overrides = split_name(name)[1]
    arguments = read_keys(name, overrides, parameters, NOT_KEYS, {"pool": str})
    pool = arguments.pop("pool", None)
    if "img_size" in parameters:
        arguments["img_size"] = image_size
    if pool not in (None, "attention"):
        if "global_pool" not in parameters:
            raise refuse(f"image tower {name!r}: pool", pool, ["attention"])
        arguments["global_pool"] = "token" if pool == "cls" else pool
    return arguments, pool


def _pooled(model: nn.Module, pixel_values: Tensor) -> Tensor:
    return model(pixel_values)


def _unpooled(model: Any, pixel_values: Tensor) -> Tensor:
    return model.forward_features(pixel_values)


# -- weights


def tags(architecture: str) -> list[str]:
    """Of the weights that timm publishes for it, the default first."""
    found = [
        each.partition(".")[2] for each in library().models.list_pretrained(f"{architecture}.*")
    ]
    default = library().get_pretrained_cfg(architecture)
    return sorted(found, key=lambda tag: default is None or tag != default.tag)


def hub_id(architecture: str, tag: str) -> str:
    """Where these weights are on the Hugging Face hub."""
    config = library().get_pretrained_cfg(f"{architecture}.{tag}")
    return config.hf_hub_id or config.url or f"timm/{architecture}.{tag}"


def loaded(
    architecture: str,
    arguments: Mapping[str, Any],
    tag: str = "",
    state: dict[str, Tensor] | None = None,
) -> nn.Module:
    """timm's whole model on the CPU with its published weights, or with those of `state`, converted
    by timm: other writers' names, position embeddings of another image size. Raises what timm and
    the hub's client raise; RuntimeError for weights that do not fit."""
    name = f"{architecture}.{tag}" if tag else architecture
    with torch.random.fork_rng(devices=[]):
        if state is None:
            return library().create_model(name, pretrained=True, **arguments)
        known = library().get_pretrained_cfg(name)
        classifier = (known.classifier if known else None) or "head"
        first = classifier if isinstance(classifier, str) else classifier[0]
        weight = state.get(f"{first}.weight")
        # as many classes as the file has, so that timm refuses whatever is missing
        num_classes = 0 if weight is None else len(weight)
        overlay = {"state_dict": state, "num_classes": num_classes, "label_offset": 0}
        return library().create_model(
            name,
            pretrained=True,
            pretrained_cfg_overlay=overlay,
            num_classes=num_classes,
            **arguments,
        )
