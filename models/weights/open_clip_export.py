"""Both towers as a model of OpenCLIP: whether OpenCLIP has one that is exactly this, its
configuration, and its tensors.

| side | OpenCLIP's module | from the towers |
|---|---|---|
| images | `VisionTransformer`, `ModifiedResNet`, `TimmModel` | `open_clip:MODEL`, `timm:NAME` |
| texts | `TextTransformer`, `HFTextEncoder` | `open_clip:MODEL`; BERT, RoBERTa, XLM-R, mT5 |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.losses import LOSSES
from models.towers.layers import Tower
from models.towers.libraries.open_clip import library
from models.towers.names import TWO_LAYERS
from models.towers.tracing.towers import on_meta, refusals
from models.weights.of_transformers import library_config
from models.weights.open_clip import (
    MT5,
    SIDES,
    is_identity,
    last_linear,
    projection_of,
    scalar_pairs,
    side_pairs,
)
from models.weights.translation import Pair, to_theirs

# transformers' text models that OpenCLIP knows (its `hf_configs.py`), and its poolings by ours
HF_TEXTS = ("BertModel", "RobertaModel", "XLMRobertaModel", MT5)
POOLERS = {"mean": "mean_pooler", "first": "cls_last_hidden_state_pooler", "pooler": "cls_pooler"}
# of timm's constructors, that OpenCLIP's `TimmModel` can say in its configuration
TIMM_KEYS = {"drop_path_rate": "timm_drop_path", "global_pool": "timm_pool", "img_size": None}
# of a configuration, written also where they are OpenCLIP's defaults
SIZES = ("image_size", "layers", "width", "patch_size", "context_length", "vocab_size", "heads")
NO_TEXTS = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode")
TEXT_SIDE: tuple[str, ...]
TEXT_SIDE = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.")
TEXT_SIDE += ("text_projection", "cls_emb")


def what_open_clip_lacks(image: Tower, text: Tower) -> list[str]:
    """Why OpenCLIP has no model of these towers, a reason each; none: it may have."""
    projection = image.config.get("projection", "linear")
    reasons = []
    if projection not in ("linear", "none"):
        reasons.append(f"OpenCLIP has no --projection {projection}")
    for tower, libraries in ((image, SIDES), (text, ("open_clip", "transformers"))):
        if tower.config["library"] not in libraries:
            reasons.append(
                f"OpenCLIP has no {tower.branch} tower that is {tower.config['architecture']} of "
                f"{tower.config['library']}"
            )
        if tower.config.get("added_pool"):
            reasons.append(
                f"OpenCLIP has no pool={tower.config['added_pool']['pool']} behind "
                f"{tower.config['architecture']}"
            )
    if reasons:
        return reasons
    if image.config["library"] == "timm":
        if other := sorted(set(image.config["arguments"]) - set(TIMM_KEYS)):
            reasons.append(f"OpenCLIP makes timm's {image.name} without {', '.join(other)}")
    if text.config["library"] == "transformers":
        architecture, pool = text.config["architecture"], text.config["pool"]
        if architecture not in HF_TEXTS:
            reasons.append(f"OpenCLIP has no {architecture} of transformers")
        elif TWO_LAYERS in text.config and text.config[TWO_LAYERS] != text.config["embed_dim"]:
            reasons.append(
                f"OpenCLIP projects to --embed-dim {text.config['embed_dim']}, not to "
                f"{TWO_LAYERS}={text.config[TWO_LAYERS]}"
            )
        elif text.config["config"].get("pad_token_id") == text.config["eos_token_id"]:
            reasons.append(
                f"OpenCLIP hides every padding token from {architecture}, and this tokenizer pads "
                "with the token that ends a text"
            )
        elif pool not in POOLERS:
            reasons.append(f"OpenCLIP pools {architecture} by {', '.join(POOLERS)}, not by {pool}")
    flags = {t.config["quick_gelu"] for t in (image, text) if _has_activation(t)}
    if len(flags) > 1:
        reasons.append("OpenCLIP has one quick_gelu for both towers, and these differ in it")
    return reasons


def open_clip_model(
    image: Tower,
    text: Tower,
    state: Mapping[str, Tensor],
    tokens: Mapping[str, Any],
    config_at: Path,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`model_cfg`, tensors by OpenCLIP's names) of towers that OpenCLIP does not lack.

    `state`: ours by canonical names. `tokens`: `max_text_tokens` and what `text_cfg` says of the
    tokenizer. `config_at`: folder with the configuration of a text tower of transformers; the
    caller writes its lasting name. Raises ValueError where OpenCLIP's model of that configuration
    has other tensors.
    """
    state, heads = dict(state), {}
    pairs = list(scalar_pairs())
    for tower in (image, text):
        name = f"head.{tower.branch}_projection.weight"
        heads[tower.branch] = state.get(name, torch.eye(tower.width))
        pairs += _head_pairs(tower, heads[tower.branch], side_pairs(tower))
        projection = projection_of(tower)
        if name not in state and projection is not None:
            # without a projection the features are the embeddings: OpenCLIP's is the identity
            state[name] = heads[tower.branch]
            pairs += _projection(name, projection)
    named = {name for pair in pairs for name in pair.ours}
    pairs = [pair for pair in pairs if "head.logit_bias" not in pair.ours or pair.ours[0] in state]
    if unknown := sorted(set(state) - named):
        raise ValueError(f"--format open_clip: OpenCLIP has no place for {', '.join(unknown)}")
    tensors = to_theirs(pairs, state)
    config: dict[str, Any] = {
        "embed_dim": len(heads["image"]),
        "vision_cfg": _vision(image, heads["image"]),
        "text_cfg": _texts(text, heads["text"], tokens, config_at),
    }
    bias = LOSSES["sigmoid"]().parameters["logit_bias"] if "logit_bias" in tensors else None
    custom = text.config["library"] == "transformers" or any(
        tower.config.get("custom_text") for tower in (image, text)
    )
    flags = [t.config["quick_gelu"] for t in (image, text) if _has_activation(t)]
    config |= {"init_logit_bias": bias} if bias is not None else {}
    config |= {"custom_text": True} if custom else {}
    config |= {"quick_gelu": True} if any(flags) else {}
    length = config["text_cfg"]["context_length"]
    if text.config["library"] == "open_clip":
        # positions behind the longest text were never seen, and OpenCLIP pads texts to the last one
        tensors["positional_embedding"] = tensors["positional_embedding"][:length].contiguous()
        if custom:
            tensors = {
                f"text.{name}" if name.startswith(TEXT_SIDE) else name: tensor
                for name, tensor in tensors.items()
            }
    return config, _complete(config, tensors, (image, text))


def config_of_text(text: Tower) -> dict[str, Any]:
    """Of a text tower of transformers, as OpenCLIP asks for it: it takes the encoder out of mT5."""
    config = library_config(text)
    return {**config, "is_encoder_decoder": True} if text.config["architecture"] == MT5 else config


def _has_activation(tower: Tower) -> bool:
    """Does `quick_gelu` say which activation it has?"""
    return tower.config["library"] == "open_clip" and tower.config["architecture"] in (
        "VisionTransformer",
        "TextTransformer",
    )


def _projection(name: str, theirs: str) -> list[Pair]:
    if theirs.endswith(".weight"):
        return [Pair((name,), (theirs,))]
    return [Pair((name,), (theirs,), there=lambda head: (head.t(),))]  # there [W, D]


def _head_pairs(tower: Tower, head: Tensor, pairs: list[Pair]) -> list[Pair]:
    """`pairs` with a place for a head that has learned, where the side has no projection."""
    name = f"head.{tower.branch}_projection.weight"
    if projection_of(tower) is not None or last_linear(tower) or is_identity(head):
        return pairs
    added = _added_projection(tower)
    if added is None:
        raise ValueError(
            f"--format open_clip: OpenCLIP has no projection behind {tower.name}, which ends with "
            "its own; train it with --projection none, or export a state dict"
        )
    return [pair for pair in pairs if name not in pair.ours] + _projection(name, added)


# by branch: the key that says whether a side has a projection of its own, and the name of the one
# that it may get
ADDED_PROJECTIONS = {
    "image": ("timm_proj", "visual.head.proj.weight"),
    "text": ("proj_type", "text_projection"),
}


def _added_projection(tower: Tower) -> str | None:
    """Where OpenCLIP would have a projection behind a side that has none; None: nowhere."""
    key, added = ADDED_PROJECTIONS[tower.branch]
    return added if tower.config["config"].get(key) == "none" else None


def _vision(image: Tower, head: Tensor) -> dict[str, Any]:
    if image.config["library"] == "timm":
        arguments = image.config["arguments"]
        named = {theirs: value for key, value in arguments.items() if (theirs := TIMM_KEYS[key])}
        return {
            "timm_model_name": image.config["architecture"],
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": "linear",
            "image_size": image.config["image_size"],
            **named,
        }
    from open_clip.model import CLIPVisionCfg

    config = _short(image.config["config"], CLIPVisionCfg())
    if config.get("timm_model_name"):
        config["timm_model_pretrained"] = False
        if not is_identity(head) and config.get("timm_proj") == "none":
            config["timm_proj"] = "linear"
    return config


def _texts(text: Tower, head: Tensor, tokens: Mapping[str, Any], config_at: Path) -> dict[str, Any]:
    tokens = dict(tokens)
    most = tokens.pop("max_text_tokens")
    if text.config["library"] == "transformers":
        return {
            "hf_model_name": str(config_at),
            **tokens,
            "hf_proj_type": "mlp" if TWO_LAYERS in text.config else "linear",
            "hf_pooler_type": POOLERS[text.config["pool"]],
            "context_length": most,
        }
    from open_clip.model import CLIPTextCfg

    config = {**text.config["config"], **dict.fromkeys(NO_TEXTS), **tokens}
    by_end = config["pool_type"] in ("argmax", "eos")
    if by_end and config["eos_id"] == config["vocab_size"] - 1:
        config |= {"pool_type": "argmax", "eos_id": CLIPTextCfg().eos_id}
    if by_end and not config["no_causal_mask"] and not config["embed_cls"]:
        config["context_length"] = most
    if not is_identity(head) and config["proj_type"] == "none":
        config["proj_type"] = "linear"
    return _short(config, CLIPTextCfg())


def _short(config: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Without what OpenCLIP takes by itself; a key alone tells OpenCLIP that a tower is another
    library's."""
    own = dataclasses.asdict(defaults)
    of_timm = "timm_model_name" in config and config["timm_model_name"] is not None
    sizes = ("image_size",) if of_timm else SIZES
    return {
        key: value
        for key, value in config.items()
        if value is not None
        and (key in sizes or value != own[key])
        # timm_pool, timm_proj: their defaults are said, for they decide what a tower is
        or (of_timm and key in ("timm_pool", "timm_proj"))
    }


def _complete(
    config: Mapping[str, Any], tensors: dict[str, Tensor], towers: tuple[Tower, Tower]
) -> dict[str, Tensor]:
    """`tensors`, and zeros for those that OpenCLIP loads and no tower reads. Raises ValueError
    where OpenCLIP's model of `config` has others."""
    kind = library().CustomTextCLIP if config.get("custom_text") else library().CLIP
    arguments = {key: value for key, value in config.items() if key != "custom_text"}
    texts = dict(config["text_cfg"])
    if "hf_model_name" in texts:
        texts["hf_model_pretrained"] = False
    with refusals("--format open_clip: OpenCLIP cannot make the model", "export a state dict"):
        model = on_meta(lambda: kind(**{**arguments, "text_cfg": texts}))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ends = [name for tower in towers for name in tower.config.get("unused", ())]
    for name in shapes.keys() - tensors.keys():
        if any(name == end or name.endswith(f".{end}") for end in ends):
            tensors[name] = torch.zeros(shapes[name])
    made = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    other = sorted(
        name for name in shapes.keys() | made.keys() if shapes.get(name) != made.get(name)
    )
    if other:
        raise ValueError(
            f"--format open_clip: OpenCLIP's model of these towers has other tensors: {other[0]} "
            f"has shape {shapes.get(other[0])} there and {made.get(other[0])} here"
            + (f", and {len(other) - 1} more differ" if len(other) > 1 else "")
        )
    return {name: tensors[name] for name in shapes}
