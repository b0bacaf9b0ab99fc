"""torchvision's classifiers as image towers, under their own names: `efficientnet_b0`, `swin_t`;
and those of clips: `r3d_18`.

Those that were cut by hand before (`torchvision_by_hand.py`) stay as they are; this is for all
others. The features are the model's output with the last layer of the classifier left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
import torchvision
from torch import nn

from models.towers.layers import Tower
from models.towers.names import alike, join_name, refuse, split_name
from models.towers.tracing.keys import of_constructor, read_keys
from models.towers.tracing.towers import Traceable, on_meta, refusals, spelled, traced_tower
from models.towers.tracing.trace import SAMPLES

NOT_KEYS = (
    *("num_classes", "image_size", "input_size", "aux_logits", "transform_input"),
    *("spatial_size", "temporal_size"),  # of MViT, which torchvision makes of one size
)


@cache
def names() -> tuple[str, ...]:
    """Of all classifiers."""
    return tuple(torchvision.models.list_models(module=torchvision.models))


@cache
def clip_names() -> tuple[str, ...]:
    """Of all classifiers of clips."""
    return tuple(torchvision.models.list_models(module=torchvision.models.video))


def image_tower(name: str, image_size: int, num_frames: int | None = None) -> Tower:
    """The tower of `name` for images of `image_size` pixels a side; it has no head yet. With
    `num_frames` one of `clip_names`, whose `pixel_values` are clips [B, 3, num_frames, H, W].

    Errors: ValueError for an unknown key, and with torchvision's own words for what its constructor
    or its forward refuses.
    """
    architecture, overrides = split_name(name)
    parameters = of_constructor(type(on_meta(partial(torchvision.models.get_model, architecture))))
    arguments = read_keys(name, overrides, parameters, NOT_KEYS, {"pool": str})
    pool = arguments.pop("pool", "avg")
    if "image_size" in parameters:
        arguments["image_size"] = image_size
    if "input_size" in parameters:
        arguments["input_size"] = (image_size, image_size)
    if "aux_logits" in parameters:
        arguments["aux_logits"] = False
    frames = () if num_frames is None else (num_frames,)
    what = "images" if num_frames is None else f"clips of {num_frames} frames"
    traceable = Traceable(
        "image",
        partial(_make, name, architecture, arguments, pool),
        ("pixel_values", (SAMPLES, 3, *frames, image_size, image_size), torch.float32),
        not_taken=f"image tower {name!r}: torchvision's {architecture} does not take {what} of "
        f"{image_size} pixels a side",
        remedy="give another size, or number of frames" if frames else "give another --image-size",
    )
    config = {
        "library": "torchvision",
        "architecture": architecture,
        "pool": pool,
        "image_size": image_size,
        "arguments": arguments,
    }
    return traced_tower(traceable, name, config)


def clip_tower(name: str, image_size: int, num_frames: int) -> Tower:
    """As `image_tower`, of one of `clip_names`, written with `-` for `_` too."""
    base, overrides = split_name(name)
    (known,) = alike(base, clip_names())
    return image_tower(join_name(known, overrides), image_size, num_frames)


def _make(name: str, architecture: str, arguments: Mapping[str, Any], pool: str) -> nn.Module:
    what = f"image tower {name!r}: torchvision cannot make {architecture} with {spelled(arguments)}"
    with refusals(what, "change what does not fit"):
        # the constructors of the Inception networks warn unless they are told how to begin
        own = {"init_weights": True} if "aux_logits" in arguments else {}
        model = torchvision.models.get_model(architecture, **own, **arguments)
    for path, module in _replacements(name, model, pool).items():
        model.set_submodule(path, module)
    return model


def replaced(tower: Tower) -> dict[str, nn.Module]:
    """By path, what stands in the tower instead of a part of torchvision's model."""
    config = tower.config
    make = partial(torchvision.models.get_model, config["architecture"], **config["arguments"])
    return _replacements(tower.name, on_meta(make), config["pool"])


def _replacements(name: str, model: nn.Module, pool: str) -> dict[str, nn.Module]:
    """Nothing instead of the last layer of the classifier; and where the model has one mean over
    its last map, `pool` instead of it."""
    _, num_classes = of_constructor(type(model))["num_classes"]
    classifier = [
        path
        for path, module in model.named_modules()
        if num_classes in (getattr(module, "out_features", 0), getattr(module, "out_channels", 0))
    ][-1]
    means = [
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d))
        and module.output_size in (1, (1, 1), (1, 1, 1))
        and path.count(".") < 2  # deeper ones are of blocks
    ]
    known = ["avg", "max"] if len(means) == 1 else ["avg"]
    if pool not in known:
        raise refuse(f"image tower {name!r}: pool", pool, known)
    found: dict[str, nn.Module] = {classifier: nn.Identity()}
    if pool == "max":
        flat = isinstance(model.get_submodule(means[0]), nn.AdaptiveAvgPool2d)
        found[means[0]] = nn.AdaptiveMaxPool2d(1) if flat else nn.AdaptiveMaxPool3d(1)
    return found
