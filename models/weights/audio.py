"""Pretrained weights of audio towers."""

from models.towers.audio import OfImage, OfImageWeights
from models.towers.image import image_tower
from models.towers.layers import Tower, Weights
from models.weights.reading import open_weights


def open_audio_weights(where: str, tower: Tower) -> Weights:
    """As `open_weights`, of an audio tower; where it is an image tower over a spectrogram, of that
    image tower. Errors: as there."""
    if not isinstance(tower.specs[0].template, OfImage):
        return open_weights("audio", where, tower)
    size = tower.config["audio_input"]["shape"][-1]
    return OfImageWeights(open_weights("image", where, image_tower(tower.name, size)))
