"""Pretrained weights of audio towers."""

from models.towers.layers import Tower, Weights
from models.weights.of_image import open_inner_weights


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
    return open_inner_weights(where, tower)
