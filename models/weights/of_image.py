"""Pretrained weights of towers of audio and video that may have an image tower inside."""

from models.towers.layers import Layer, Tower, Weights
from models.towers.of_image import OfImage, holds_image, image_inside
from models.weights.reading import open_weights


def open_inner_weights(where: str, tower: Tower) -> Weights:
    """As `open_weights`, of any tower; where an image tower is inside, of that one. Errors: as
    there."""
    if not holds_image(tower):
        return open_weights(tower.branch, where, tower)
    return OfImageWeights(open_weights("image", where, image_inside(tower)))


class OfImageWeights:
    """A reader of an image tower's weights, for layers of `OfImage`; the others keep their
    values."""

    def __init__(self, reader: Weights) -> None:
        self.reader = reader

    def fill(self, layer: Layer) -> None:
        if isinstance(layer, OfImage):
            self.reader.fill(layer.inner)
