"""Pretrained weights of audio towers."""

from models.towers.audio import OfImage, OfImageWeights
from models.towers.image import image_tower
from models.towers.layers import Tower, Weights
from models.weights.reading import open_weights


def open_audio_weights(where: str, tower: Tower) -> Weights:
    """As `open_weights`, of an audio tower; where it is an image tower over a spectrogram, of that
    image tower. Errors: as there; ValueError for a tower of which it is not known what sounds it
    was trained on."""
    if not tower.config.get("extractor_found", True):
        raise ValueError(
            f"weights {where!r}: audio tower {tower.name} has no feature extractor beside its "
            "config.json (preprocessor_config.json), so the rate and the spectrogram of its sounds "
            "are not known; save it there"
        )
    if not isinstance(tower.specs[0].template, OfImage):
        return open_weights("audio", where, tower)
    size = tower.config["audio_input"]["shape"][-1]
    return OfImageWeights(open_weights("image", where, image_tower(tower.name, size)))
