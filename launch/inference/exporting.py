"""A trained model as a folder that needs nothing of ours: weights, tokenizer, preprocessing, and a
page that says how to load it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPImageProcessor

from data.modalities.preprocessing import Preprocessing
from launch.inference.adapters import page_of_adapters, taken_off, write_all
from launch.inference.export_page import export_page
from launch.inference.trained import Trained
from launch.run.records import IMAGE_FOLDER, OPTIONS, RECORD, TEXT_FOLDER, WEIGHTS, read_export
from models.losses import LOGIT_SCALE_LIMIT
from models.towers.head import FUSION_NAMES
from models.towers.layers import Layer, Tower
from models.towers.names import join_name, split_name
from models.weights.dual_encoder import (
    dual_encoder_config,
    dual_encoder_pairs,
    library_config,
    what_differs,
)
from models.weights.translation import to_theirs
from models.weights.whole_models import whole_model_config, whole_model_of, whole_model_pairs

PACKAGES = ("torch", "torchvision", "transformers")
ADAPTED = {"timm": "timm", "open_clip": "open_clip_torch"}  # library -> package
DUAL_ENCODER, STATE_DICT = "VisionTextDualEncoderModel", "state dict"
FORMATS = ("auto", "transformers", "state_dict")


def write_export(
    trained: Trained,
    folder: Path,
    overwrite: bool = False,
    form: str = "auto",
    keep_adapters: bool = False,
) -> list[str]:
    """Write the model to `folder`, which appears whole or not at all; returns why it is not one of
    transformers' models, if it is not. `form`: one of `FORMATS`. Adapters are added to the weights;
    `keep_adapters`: they are written beside these, as peft's files.

    Weights are in fp32, whatever they were trained in: no number changes, but that a scale beyond
    the limit at which the loss reads it is written as the limit. Raises ValueError for a folder
    that is not empty, unless `overwrite` says that an earlier export may go, and for a form that the
    model cannot have.
    """
    folder = folder.expanduser().resolve()
    refuse_to_overwrite(folder, overwrite)
    trained, adapters = taken_off(images_and_texts(trained), merge=not keep_adapters)
    if keep_adapters and not adapters:
        raise ValueError(f"--keep-adapters: {trained.checkpoint} has no adapters; leave it out")
    key = whole_model_of(*trained.towers)
    differences = [] if key else what_differs(*trained.towers)
    if differences and form == "transformers":
        raise ValueError(
            f"--format transformers: {'; '.join(differences)}; leave it out for a state dict"
        )
    if form == "state_dict":
        key, differences = None, differences or ["--format state_dict was asked for"]
    beside = folder.with_name(folder.name + ".writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)

    # towers, heads and scalars: what scores pairs in training has no place in an encoder of either
    state = {
        name: tensor
        for name, tensor in canonical_state(trained.layers).items()
        if not name.startswith(FUSION_NAMES) and not _is_of_another_pair(name)
    }
    state["head.logit_scale"] = state["head.logit_scale"].clamp(max=LOGIT_SCALE_LIMIT)
    config, own_pairs = None, []
    if not differences:
        scale = state["head.logit_scale"].item()
        if key:
            config, pairs = whole_model_config(key, *trained.towers, scale), whole_model_pairs
        else:
            config, pairs = dual_encoder_config(*trained.towers, scale), dual_encoder_pairs
        config.save_pretrained(beside)
        own_pairs = pairs(*trained.towers)
        state = to_theirs(own_pairs, state)
    save_file(state, beside / WEIGHTS, metadata={"format": "pt"})
    for tower, folder_of in zip(trained.towers, (IMAGE_FOLDER, TEXT_FOLDER)):
        if tower.config["library"] == "transformers":
            (beside / folder_of).mkdir()
            _write_json(beside / folder_of / "config.json", library_config(tower))
    tokenizer = copy.deepcopy(trained.tokenizer)
    tokenizer.model_max_length = trained.options["max_text_tokens"]
    tokenizer.padding_side = "right"  # as in training, whatever its class does by itself
    tokenizer.save_pretrained(str(beside))
    image_processor(trained.preprocessing, trained.options["image_size"]).save_pretrained(beside)
    kind = STATE_DICT if differences else config.architectures[0]
    record, page = _record(trained, kind, differences), export_page(trained, kind, differences)
    if keep_adapters:
        record["adapters"] = write_all(adapters, trained.towers, config, own_pairs, beside)
        page += page_of_adapters(list(record["adapters"]), whole=config is not None)
    _write_json(beside / RECORD, record)
    (beside / "README.md").write_text(page, encoding="utf-8")

    if folder.exists():
        shutil.rmtree(folder)
    os.replace(beside, folder)
    return differences


def images_and_texts(trained: Trained) -> Trained:
    """The image and the text tower of a model that may have more branches.

    Raises ValueError for a model that was trained without that pair, and for one that other
    programs could not load: with a tower or a loss of its own.
    """
    if ("image", "text") not in [pair.modalities for pair in trained.pairs]:
        raise ValueError(
            f"{trained.checkpoint}: was trained with --pairs {trained.options['pairs']}; an export "
            "holds an image and a text tower that were compared with each other"
        )
    if trained.options["loss"] not in ("infonce", "sigmoid"):
        raise ValueError(
            f"{trained.checkpoint}: was trained with --loss {trained.options['loss']}; an export "
            "needs the scale that infonce and sigmoid learn"
        )
    parts = {tower.branch: (tower, []) for tower in trained.towers}
    for branch, layer in zip(trained.branch_of_layers, trained.layers):
        parts[branch][1].append(layer)
    towers = [parts[branch][0] for branch in ("image", "text")]
    unknown = [tower.name for tower in towers if "library" not in tower.config]
    if unknown:
        raise ValueError(
            f"{trained.checkpoint}: its tower {unknown[0]} is in no library that another program "
            "could load it with; take its weights from the checkpoint"
        )
    layers = [layer for branch in ("image", "text") for layer in parts[branch][1]]
    return replace(trained, towers=tuple(towers), layers=layers)


def _is_of_another_pair(name: str) -> bool:
    """Is this a learned scalar of a pair other than images and texts, such as head.image_sound_logit_scale?"""
    return name.endswith(("_logit_scale", "_logit_bias"))


def refuse_to_overwrite(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: a file of this name exists; give a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ValueError(
            f"{folder}: is not empty; give another folder, or replace an earlier export with "
            "--overwrite"
        )
    if read_export(folder) is None:
        raise ValueError(
            f"{folder}: holds no {RECORD}, so it is no earlier export, and --overwrite would "
            "delete what it holds; give another folder"
        )


def canonical_state(layers: list[Layer]) -> dict[str, Tensor]:
    """Every tensor of the run by its canonical name, floating-point ones in fp32, on the CPU."""
    tensors = {
        layer.canonical_names[local]: tensor.cpu()
        for layer in layers
        for local, tensor in layer.state_dict().items()
    }
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def image_processor(preprocessing: Preprocessing, image_size: int) -> CLIPImageProcessor:
    """transformers' nearest to `data.modalities.transforms.eval_transform`. Other are: images
    over 1.25 times as large as they are resized to, which are shrunk in two steps in training;
    those where the margin around the centre is odd; transparent ones."""
    return CLIPImageProcessor(
        size={"shortest_edge": preprocessing.options(image_size)["image_resize"]},
        crop_size={"height": image_size, "width": image_size},
        resample=Image.Resampling[preprocessing.interpolation.upper()],
        image_mean=list(preprocessing.mean),
        image_std=list(preprocessing.std),
    )


def _record(trained: Trained, kind: str, differences: list[str]) -> dict[str, object]:
    options = trained.options
    return {
        "kind": kind,
        "differences": differences,
        **{key: options[key] for key in OPTIONS},
        **trained.preprocessing.options(options["image_size"]),
        "text_tower": _with_vocabulary(trained.towers[1], options["text_tower"]),
        "image_pool": trained.towers[0].config["pool"],
        "text_pool": trained.towers[1].config["pool"],
        "loss": options["loss"],
        "projection": options.get("projection", "linear"),
        "step": trained.step,
        "trained_in": str(next(trained.layers[-1].parameters()).dtype).removeprefix("torch."),
        "versions": {name: version(name) for name in (*PACKAGES, *_adapters(trained))},
    }


def _with_vocabulary(text: Tower, name: str) -> str:
    """The name of a text tower that is made again by its name: how many tokens it knows may be
    other than what the tokenizer has."""
    if text.config["library"] == "transformers":
        return name
    base, overrides = split_name(name)
    return join_name(base, {**overrides, "vocab_size": str(text.config["config"]["vocab_size"])})


def _adapters(trained: Trained) -> list[str]:
    """The further packages that the towers come from."""
    libraries = {tower.config["library"] for tower in trained.towers}
    return [name for library, name in ADAPTED.items() if library in libraries]


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
