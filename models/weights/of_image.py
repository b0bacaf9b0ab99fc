"""Pretrained weights of towers of audio and video that may have an image tower inside."""

import copy
import re
from dataclasses import replace

from models.towers.head import Head
from models.towers.layers import Layer, LayerSpec, Tower, Weights
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
    model = open_model(where, *(_as_image(t) if t.branch == "video" else t for t in towers))
    return {
        tower.branch: OfImageWeights(model) if tower.branch == "video" else model
        for tower in towers
    }


class OfImageWeights:
    """A reader of an image tower's weights, for layers of `OfImage`, and of its head's, if it reads
    these, for the head of the branch; others keep their values."""

    def __init__(self, reader: Weights) -> None:
        self.reader = reader

    def fill(self, layer: Layer) -> None:
        if isinstance(layer, OfImage):
            self.reader.fill(layer.inner)
        elif isinstance(layer, Head):
            self.reader.fill(_head_of_images(layer))


def _as_image(tower: Tower) -> Tower:
    """The image tower inside, with the head of the branch as its own."""

    def of(spec: LayerSpec) -> LayerSpec:
        head = isinstance(spec.template, Head)
        return replace(spec, template=_head_of_images(spec.template)) if head else spec

    inside = image_inside(tower)
    known = {id(spec.template) for spec in tower.specs}  # as they were: behind the image tower
    specs = [
        of(spec)
        for spec in inside.specs
        if id(spec.template) not in known or isinstance(spec.template, Head)
    ]
    return replace(inside, specs=tuple(specs))


def _head_of_images(head: Layer) -> Layer:
    """The same tensors, called as the head of images calls its own."""
    renamed = copy.copy(head)
    renamed.canonical_names = {
        local: re.sub(r"^head\.\w+?_(logit_\w+)$", r"head.\1", name).replace(
            "head.video_projection", "head.image_projection"
        )
        for local, name in head.canonical_names.items()
    }
    return renamed
