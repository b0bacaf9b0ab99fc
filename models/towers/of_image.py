"""An image tower in a tower of another branch: of audio, which shows it a spectrogram, or of video,
which shows it frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.towers.layers import Layer, LayerSpec, Tower


class OfImage(Layer):
    """A layer of an image tower whose tensors are called after another branch: `renamed` says how.
    The first one is of a subclass: it reads the tensors `given`, of which `pixels` makes
    `pixel_values`."""

    given: tuple[str, ...] = ()

    def __init__(self, inner: Layer, renamed: Callable[[str], str]) -> None:
        super().__init__()
        self.inner = inner
        self.reads = self.given or tuple(map(renamed, inner.reads))
        self.drops = self.given or tuple(map(renamed, inner.drops))
        self.makes = tuple(map(renamed, inner.makes))
        self.canonical_names = {
            f"inner.{local}": renamed(name) for local, name in inner.canonical_names.items()
        }
        self.unsaved_names = {f"inner.{key}": name for key, name in inner.unsaved_names.items()}
        self.added = inner.added and (f"inner.{inner.added[0]}", inner.added[1])

    # Any: the first layer of each branch has a signature of its own
    def pixels(self, *given: Any, **_: Any) -> Tensor:
        """`pixel_values` [B, 3, H, W], or what else the layer inside reads."""
        raise NotImplementedError

    def compute(self, *tensors: Any, **given: Any) -> Tensor | tuple[Tensor, ...]:
        return self.inner.compute(*((self.pixels(*tensors, **given),) if self.given else tensors))


def renamed_specs(
    tower: Tower,
    branch: str,
    first: Callable[[Layer, Callable[[str], str]], OfImage],
    features: str | None = None,
) -> tuple[LayerSpec, ...]:
    """The recipes of an image tower in a tower of `branch`; `first` makes its first layer.
    `features`: the name of what its last layer makes, if not `{branch}_features`."""

    def renamed(name: str) -> str:
        if name == "image_features" and features is not None:
            return features
        return branch + name.removeprefix("image") if name.startswith("image") else name

    def of(spec: LayerSpec, make: Callable[..., OfImage]) -> LayerSpec:
        with torch.device("meta"):
            template = make(spec.template, renamed)

        def initialise(layer: OfImage) -> None:
            spec.initialise(layer.inner)

        return LayerSpec(renamed(spec.name), branch, template, initialise, spec.original)

    return tuple(of(spec, OfImage if n else first) for n, spec in enumerate(tower.specs))


def holds_image(tower: Tower) -> bool:
    """Is an image tower inside it?"""
    return any(isinstance(spec.template, OfImage) for spec in tower.specs)


def image_inside(tower: Tower) -> Tower:
    """The image tower inside a tower of another branch, with the layers behind it as they are; any
    other tower is itself."""
    if not holds_image(tower):
        return tower
    inner = (
        replace(spec, template=spec.template.inner) if isinstance(spec.template, OfImage) else spec
        for spec in tower.specs
    )
    return replace(tower, branch="image", specs=tuple(inner))
