"""What transformers' models of two modalities share: a tower as the library configures it, and how
their files call towers, projections and the scale."""

from typing import Any

from models.towers.layers import Tower
from models.weights.translation import Pair

OF_TRANSFORMERS = "transformers"
# the scale has one dimension of size 1 here and none elsewhere
SCALE = "head.logit_scale = logit_scale | number"
HEADS = f"""
head.image_projection.weight = visual_projection.weight
head.text_projection.weight = text_projection.weight
{SCALE}
"""


def library_config(tower: Tower) -> dict[str, Any]:
    """The configuration of transformers' model that is the tower."""
    config = {
        key: value
        for key, value in tower.config["config"].items()
        if key not in ("dtype", "transformers_version", "_name_or_path")
    }
    eos_token_id = tower.config.get("eos_token_id")
    return {**config, "architectures": [tower.config["architecture"]]} | (
        {"eos_token_id": eos_token_id} if eos_token_id is not None else {}
    )


def same_pairs(tower: Tower, there: str) -> list[Pair]:
    """Of a tower that is called as in transformers' files."""
    return [
        Pair((name,), (f"{there}.{name.removeprefix(f'{tower.branch}.')}",))
        for spec in tower.specs[:-1]
        for name in spec.template.canonical_names.values()
    ]
