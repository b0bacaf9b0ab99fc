"""transformers' models of images and texts, and of sounds and texts: which of them two towers with
their heads are, what one in a folder says of a run, and its names. A tower is written as a part of
such a model only where the model has that very tower.

| model | image and text tower | head | loss |
|---|---|---|---|
| `CLIPModel` | CLIP's | projections | infonce |
| `ChineseCLIPModel` | Chinese-CLIP's | projections | infonce |
| `SiglipModel`, `Siglip2Model` | SigLIP's, SigLIP 2's | none: features are embeddings | sigmoid |
| `VisionTextDualEncoderModel` | any two; read only (also `dual_encoder.py`) | projections | infonce |
| `ClapModel` (`clap.py`) | CLAP's of sounds and texts | projections of two layers | infonce |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    ChineseCLIPModel,
    CLIPModel,
    PreTrainedConfig,
    PreTrainedModel,
    Siglip2Model,
    SiglipModel,
)

from common.files import read_json
from common.model_sizes import read_model_config
from models.towers.layers import Tower
from models.towers.libraries.transformers_text import first_position
from models.towers.names import TWO_LAYERS
from models.weights import clap
from models.weights.of_transformers import HEADS, library_config, same_pairs
from models.weights.translation import Pair, pairs_of

DUAL_ENCODER = "vision-text-dual-encoder"
CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
MOST_TOKENS = 77  # of texts, where the towers have room for more than a caption: CLIP's length


@dataclass(frozen=True)
class WholeModel:
    """`model`: transformers' class. `image`, `text`: the types of its towers, each with the pooling
    that it has there. `projected`: its heads are projections."""

    model: type[PreTrainedModel]
    image: tuple[str, str]
    text: tuple[str, str]
    projected: bool = True

    @property
    def loss(self) -> str:
        return "infonce" if self.projected else "sigmoid"


WHOLE_MODELS = {  # by the model_type of the configuration
    "clip": WholeModel(CLIPModel, ("clip_vision_model", "cls"), ("clip_text_model", "eos")),
    "chinese_clip": WholeModel(
        ChineseCLIPModel,
        ("chinese_clip_vision_model", "cls"),
        ("chinese_clip_text_model", "first"),
    ),
    "siglip": WholeModel(
        SiglipModel, ("siglip_vision_model", "head"), ("siglip_text_model", "head"), False
    ),
    "siglip2": WholeModel(
        Siglip2Model, ("siglip2_vision_model", "head"), ("siglip2_text_model", "head"), False
    ),
}


def is_whole_model(folder: Path) -> bool:
    """Does the folder hold one of transformers' models of images and texts, or of sounds and
    texts?"""
    try:
        config = read_json(folder / CONFIG)
    except (OSError, ValueError):
        return False
    known = (*WHOLE_MODELS, DUAL_ENCODER, clap.MODEL_TYPE)
    return isinstance(config, dict) and config.get("model_type") in known


def options_of_model(folder: Path) -> dict[str, Any]:
    """train.py's options that go on with the model in `folder`: towers, sizes, tokenizer, loss; the
    pairs, where it is not of images and texts. Errors: as `options_of_clap`; ValueError for sizes
    that the weights beside it do not have."""
    read_model_config(folder / CONFIG)  # some configurations make long lists as they are read
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type == clap.MODEL_TYPE:
        tokens = {"max_text_tokens": _text_tokens(folder, config.text_config)}
        return {**clap.options_of_clap(folder, config), **tokens, "tokenizer": str(folder)}
    kind = WHOLE_MODELS.get(config.model_type)
    text = config.text_config
    if kind is None:  # the dual encoder takes what each of its towers pools by itself
        image_pool, text_pool = "", "eos" if text.model_type == "clip_text_model" else "pooler"
        text_pool = f":pool={text_pool}"
    else:
        image_pool, text_pool = (f":pool={pool}" for _, pool in (kind.image, kind.text))
    projected = kind is None or kind.projected
    return {
        "image_tower": f"hf:{folder}{image_pool}",
        "text_tower": f"{folder}{text_pool}",
        "embed_dim": config.projection_dim if projected else config.vision_config.hidden_size,
        "image_size": _image_size(config.vision_config),
        "max_text_tokens": _text_tokens(folder, text),
        "tokenizer": str(folder),
        "loss": "infonce" if kind is None else kind.loss,
        "projection": "linear" if projected else "none",
    }


def _image_size(config: PreTrainedConfig) -> int:
    if getattr(config, "image_size", None):
        return config.image_size
    return math.isqrt(config.num_patches) * config.patch_size  # SigLIP 2


def _text_tokens(folder: Path, config: PreTrainedConfig) -> int:
    """As many as the tower, its tokenizer and captions ask for."""
    lengths = [MOST_TOKENS, getattr(config, "max_position_embeddings", MOST_TOKENS)]
    lengths[1] -= first_position(config.to_dict())
    file = folder / TOKENIZER
    if file.is_file():
        lengths.append(read_json(file).get("model_max_length") or MOST_TOKENS)
    return int(min(lengths))


def whole_model_of(image: Tower, text: Tower) -> tuple[str, list[str]]:
    """The key in `WHOLE_MODELS` of the model that has these towers, "" for none; and why they are
    not that model with their heads and scalars, a reason each."""
    types = [tower.config.get("config", {}).get("model_type") for tower in (image, text)]
    keys = [key for key, kind in WHOLE_MODELS.items() if types == [kind.image[0], kind.text[0]]]
    if not keys:
        towers = (f"{t.config['architecture']} of {t.config['library']}" for t in (image, text))
        return "", [f"transformers has no model with the towers {' and '.join(towers)}"]
    kind = WHOLE_MODELS[keys[0]]
    name, reasons = kind.model.__name__, []
    for tower, (_, pool) in zip((image, text), (kind.image, kind.text)):
        if tower.config["pool"] != pool:
            found = tower.config["pool"]
            reasons.append(f"{name} pools {tower.branch}s by pool={pool}, not {found}")
    if TWO_LAYERS in text.config:
        reasons.append(f"{name} has no {TWO_LAYERS} behind its text tower")
    # 2 stands in old configurations, and there for something else
    if kind.text[1] == "eos" and text.config["eos_token_id"] == 2:
        reasons.append(f"{name} takes eos_token_id 2 for 'the highest id of the text'")
    expected = "linear" if kind.projected else "none"
    if (projection := image.config.get("projection", "linear")) != expected:
        reasons.append(f"{name} has --projection {expected}, not {projection}")
    if ("logit_bias" in image.specs[-1].template.scalars) == kind.projected:
        reasons.append(f"{name} has {'no' if kind.projected else 'a'} logit_bias")
    return keys[0], reasons


def whole_model_config(key: str, image: Tower, text: Tower, logit_scale: float) -> PreTrainedConfig:
    """Of the model that `whole_model_of` names, where nothing differs."""
    kind = WHOLE_MODELS[key]
    heads: Mapping[str, Any] = (
        {"projection_dim": image.config["embed_dim"], "logit_scale_init_value": logit_scale}
        if kind.projected
        else {}
    )
    return kind.model.config_class(
        vision_config=library_config(image),
        text_config=library_config(text),
        architectures=[kind.model.__name__],
        dtype="float32",
        **heads,
    )


def whole_model_pairs(image: Tower, text: Tower) -> list[Pair]:
    """Our names of two towers of transformers with their heads, and those in the folder of a model
    that holds both."""
    pairs = [*same_pairs(image, "vision_model"), *same_pairs(text, "text_model")]
    if image.config.get("projection") == "none":
        return [
            *pairs,
            *pairs_of("""
            head.logit_scale = logit_scale
            head.logit_bias = logit_bias
        """),
        ]
    return [*pairs, *pairs_of(HEADS)]
