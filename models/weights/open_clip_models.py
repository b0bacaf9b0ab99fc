"""OpenCLIP's models in folders and files: which there are, and what one says of a run.

A folder has `open_clip_config.json` and a file of weights beside it. OpenCLIP's `hf-hub:` and
`local-dir:` may stand before a name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from models.towers.libraries.open_clip import CONFIG, PREFIX, model_config
from models.towers.libraries.transformers_text import CATALOGUE
from models.towers.names import TWO_LAYERS, split_name
from models.weights.names import TEXT_FOLDER

HUB, LOCAL = "hf-hub:", "local-dir:"
# the names that belong to OpenCLIP, and those that a folder may have instead, in OpenCLIP's order
OWN_WEIGHTS: tuple[str, ...]
OWN_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")
OWN_WEIGHTS += ("open_clip_pytorch_model.bin", "open_clip_pytorch_model.pth")
OTHER_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
CONTEXT_LENGTH = 77  # OpenCLIP's, where a configuration does not say another
# OpenCLIP's pooling of a tower of transformers -> ours
POOLS = {"mean_pooler": "mean", "cls_pooler": "pooler", "cls_last_hidden_state_pooler": "first"}
# where a configuration does not name it (OpenCLIP's `hf_configs.py`)
POOL_OF = {"bert": "cls_pooler", "m2m_100": "cls_pooler"}
# what a tokenizer is made of
WORDS = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model")
PROJECTION = "mlp"  # of a text tower of transformers, where a configuration does not say another
NOT_BUILT = "{name}: {what}, which is not built; {remedy}"


def folder_of(where: Path) -> Path | None:
    """The folder of the OpenCLIP model that `where` is: itself, or that of a file of weights with
    one of OpenCLIP's names; None: of no such model."""
    where = where.expanduser()
    folder = where if where.is_dir() else where.parent
    is_one = where.is_dir() or (where.is_file() and where.name in OWN_WEIGHTS)
    return folder.absolute() if is_one and (folder / CONFIG).is_file() else None


def weights_of(folder: Path) -> Path | None:
    """The file that OpenCLIP loads of a folder."""
    files = (folder / name for name in (*OWN_WEIGHTS, *OTHER_WEIGHTS))
    return next((file for file in files if file.is_file()), None)


def local_model(where: str) -> str:
    """What `local-dir:` or `hf-hub:` stands before as a file of weights, which says that OpenCLIP's
    model is meant where a folder also holds one of transformers; everything else as it is. Errors:
    FileNotFoundError."""
    if where.startswith(HUB):
        folder = _download(where.removeprefix(HUB))
    elif where.startswith(LOCAL):
        folder = Path(where.removeprefix(LOCAL)).expanduser()
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"--import {where}: there is no {CONFIG} in that folder; give a folder that "
                "OpenCLIP wrote, or a file of weights"
            )
    else:
        return where
    file = weights_of(folder)
    if file is None:
        raise FileNotFoundError(
            f"--import {where}: the folder has none of {', '.join(OWN_WEIGHTS + OTHER_WEIGHTS)}"
        )
    return str(file if file.name in OWN_WEIGHTS else folder)


def _download(hub_id: str) -> Path:
    """The folder of a model that is on the hub in OpenCLIP's form. Errors: FileNotFoundError."""
    safe = [name for name in OWN_WEIGHTS if name.endswith(".safetensors")]
    try:
        for names in (safe, OWN_WEIGHTS):  # torch files only where there are no others
            folder = Path(snapshot_download(hub_id, allow_patterns=[CONFIG, *names, *WORDS]))
            if (folder / CONFIG).is_file() and weights_of(folder):
                return folder
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise FileNotFoundError(
            f"OpenCLIP's model {hub_id!r} could not be had from the Hugging Face hub; check the id "
            "and the network, or download the model and give local-dir:FOLDER"
        ) from error
    raise FileNotFoundError(
        f"OpenCLIP's model {hub_id!r}: on the hub there is no {CONFIG} with one of "
        f"{', '.join(OWN_WEIGHTS)} beside it; give a folder or a file of weights"
    )


def options_of_open_clip(name: str) -> dict[str, Any]:
    """train.py's options that go on with the model of a tower's name `open_clip:MODEL` or
    `open_clip:FOLDER`: towers, sizes, tokenizer, loss. Errors: ValueError for a model that towers
    here cannot be."""
    config, base = model_config(name), split_name(name)[0]
    images, texts = config["vision_cfg"], config["text_cfg"]
    if "multimodal_cfg" in config:
        raise ValueError(
            NOT_BUILT.format(
                name=name,
                what="a CoCa model has a decoder that writes captions",
                remedy="its image and text side alone are --image-tower and --text-tower, with "
                "--image-weights and --text-weights",
            )
        )
    projected = _images_are_projected(images) or _texts_are_projected(name, texts)
    return {
        "image_tower": name,
        "text_tower": _text_tower(name, texts, config["embed_dim"]),
        "embed_dim": config["embed_dim"],
        "image_size": _side(name, images.get("image_size", 224)),
        "max_text_tokens": texts.get("context_length", CONTEXT_LENGTH),
        "tokenizer": base,
        "loss": "infonce" if config.get("init_logit_bias") is None else "sigmoid",
        "projection": "linear" if projected else "none",
    }


def model_of_towers(image_tower: str | None, text_tower: str | None) -> str | None:
    """`open_clip:MODEL` where that is what both names of towers begin with; None: they do not."""
    bases = {split_name(name or "")[0] for name in (image_tower, text_tower)}
    (base, *others) = bases
    return base if not others and base.startswith(PREFIX) else None


def _images_are_projected(config: dict[str, Any]) -> bool:
    """By a plain matrix at the end, which is our head."""
    if config.get("timm_model_name"):
        return config.get("timm_proj", "linear") == "linear" and not config.get("timm_proj_bias")
    return not isinstance(config.get("layers"), (list, tuple))  # CLIP's ResNet: by its pooling


def _texts_are_projected(name: str, config: dict[str, Any]) -> bool:
    if not config.get("hf_model_name"):
        return config.get("proj_type", "linear") != "none" and not config.get("proj_bias")
    kind = config.get("hf_proj_type", PROJECTION)
    if kind not in ("linear", PROJECTION):
        raise ValueError(
            NOT_BUILT.format(
                name=name,
                what=f"its projection of texts is hf_proj_type={kind}",
                remedy="models with hf_proj_type=linear or mlp are read",
            )
        )
    return kind == "linear"


def _text_tower(name: str, config: dict[str, Any], embed_dim: int) -> str:
    model = config.get("hf_model_name")
    if not model:
        return name
    inside = Path(split_name(name)[0].removeprefix(PREFIX)).expanduser() / TEXT_FOLDER
    if (inside / "config.json").is_file():  # an export of ours, which may have been moved
        model = str(inside)
    pooler = config.get("hf_pooler_type", "mean_pooler")
    if pooler is None:
        pooler = POOL_OF.get(CATALOGUE.find(model)[0].model_type, "mean_pooler")
    if pooler not in POOLS:
        raise ValueError(
            NOT_BUILT.format(
                name=name,
                what=f"its texts are pooled by {pooler}",
                remedy=f"models with one of {', '.join(POOLS)} are read",
            )
        )
    two_layers = config.get("hf_proj_type", PROJECTION) == PROJECTION
    return f"{model}:pool={POOLS[pooler]}" + (f",{TWO_LAYERS}={embed_dim}" if two_layers else "")


def _side(name: str, size: Any) -> int:
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise ValueError(
            NOT_BUILT.format(
                name=name,
                what=f"it takes images of {height} × {width} pixels",
                remedy="give a model of square images",
            )
        )
    return height
