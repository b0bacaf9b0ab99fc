"""Pretrained weights of towers of audio and video that may have an image tower inside."""

import copy
import re
from collections.abc import Iterable
from dataclasses import replace

from models.towers.head import Head
from models.towers.layers import Layer, Tower, Weights
from models.towers.of_image import OfImage, holds_image, image_inside
from models.weights.reading import open_model, open_weights


def open_inner_weights(where: str, tower: Tower) -> Weights:
    """As `open_weights`, of any tower; where an image tower is inside, of that one. Errors: as
    there."""
    if not holds_image(tower):
        return open_weights(tower.branch, where, tower)
    return OfImageWeights(open_weights("image", where, image_inside(tower)))


def open_model_weights(where: str, *towers: Tower) -> dict[str, Weights]:
    """As `open_model`, by branch. A tower of video has the tower of images and its head. Errors: as
    there, and ValueError for one that is no image tower on each frame."""
    for tower in towers:
        if tower.branch == "video" and "time" not in tower.config:
            raise ValueError(
                f"--import {where}: its tower of images sees single frames, and --video-tower "
                f"{tower.name} sees whole clips; leave one of them out"
            )
    model = open_model(where, *(as_image_tower(t) if t.branch == "video" else t for t in towers))
    return {
        tower.branch: OfImageWeights(model) if tower.branch == "video" else model
        for tower in towers
    }


class OfImageWeights:
    """A reader of an image tower's weights, for layers of `OfImage`, and of its head's, if it reads
    these, for the head of the branch; others keep their values."""

    def __init__(self, reader: Weights) -> None:
        self.reader = reader

    def given(self, layer: Layer) -> set[str]:
        if isinstance(layer, OfImage):
            return {f"inner.{local}" for local in self.reader.given(layer.inner)}
        return {*self.reader.given(_head_of_images(layer))} if isinstance(layer, Head) else set()

    def fill(self, layer: Layer) -> None:
        if isinstance(layer, OfImage):
            self.reader.fill(layer.inner)
        elif isinstance(layer, Head):
            self.reader.fill(_head_of_images(layer))


def as_image_tower(tower: Tower) -> Tower:
    """The image tower inside, with the head of the branch as its own and nothing in between."""
    specs = [
        replace(spec, branch="image", template=layer)
        for spec in tower.specs
        for layer in as_image_layers([spec.template])
    ]
    return replace(image_inside(tower), specs=tuple(specs))


def as_image_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Those of an image tower and its head."""
    return [
        layer.inner if isinstance(layer, OfImage) else _head_of_images(layer)
        for layer in layers
        if isinstance(layer, OfImage | Head)
    ]


def beside_images(layer: Layer) -> Layer:
    """A layer of another tower, where the tower of films is that of images: a head may own what the
    loss of a pair with films learns."""
    return _head_of_images(layer) if isinstance(layer, Head) else layer


def _head_of_images(head: Head) -> Head:
    """The same tensors, called as the head of images calls its own; it is read and not run."""
    renamed = copy.copy(head)
    renamed.canonical_names = {
        local: f"head.{_as_of_images(name.removeprefix('head.'))}"
        for local, name in head.canonical_names.items()
    }
    renamed.scalars = {_as_of_images(name): value for name, value in head.scalars.items()}
    return renamed


def _as_of_images(name: str) -> str:
    """`video_projection.weight` -> `image_projection.weight`, `video_text_logit_scale` ->
    `logit_scale`, `depth_video_logit_scale` -> `depth_image_logit_scale`"""
    name = re.sub("^video_|(?<=_)video_(?=logit_)", "image_", name)
    return name.replace("image_text_logit_", "logit_")
