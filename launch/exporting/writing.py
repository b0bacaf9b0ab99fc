"""A trained model as a folder that needs nothing of ours: weights, tokenizer, preprocessing, code
that loads it, and a page about it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import ClapConfig, PreTrainedConfig

from common.files import replacing_folder, write_text
from data.modalities.tokenizer_open_clip import PREFIX
from data.options import IMAGE_TEXT, as_given, loss_for, loss_names
from data.stored.kinds import is_text, text_of
from launch.config.groups import OF_BRANCH, tower_names
from launch.config.imported import FUSION_OPTIONS, HERE
from launch.exporting.inputs import (
    CLAP,
    is_read_otherwise,
    preprocess_cfg,
    tokens_of_open_clip,
    write_inputs,
)
from launch.exporting.loading import APART, loading_record, seconds_of_clip
from launch.exporting.page import export_page
from launch.inference.adapters import TOWER_IN, taken_off, write_all
from launch.inference.own_towers import own_branches, own_record, own_tensors
from launch.inference.trained import Trained
from launch.records import FORMAT, OPEN_CLIP, RECORD, STATE_DICT, WEIGHTS
from models.losses import LOGIT_SCALE_LIMIT
from models.towers.annotations import learned_names
from models.towers.head import FUSION_NAMES
from models.towers.layers import Layer, Tower
from models.towers.libraries.open_clip import model_config
from models.towers.libraries.open_clip import names as names_of_open_clip
from models.towers.names import TWO_LAYERS, join_name, split_name
from models.towers.video import frames_tower
from models.weights.clap import clap_config, clap_pairs, scale_of, what_clap_lacks
from models.weights.names import ANNOTATIONS, AUDIO, FUSION, OWN_TOWERS, TEXT_FOLDER
from models.weights.of_image import as_image_layers, as_image_tower, beside_images
from models.weights.of_transformers import library_config
from models.weights.open_clip_export import config_of_text, open_clip_model, what_open_clip_lacks
from models.weights.translation import to_theirs
from models.weights.whole_models import (
    WHOLE_MODELS,
    whole_model_config,
    whole_model_of,
    whole_model_pairs,
)

CODE = Path(__file__).with_name("modeling_export.py")
CODE_OF = {  # by what the record of loading has
    part: Path(__file__).with_name(f"modeling_{part}.py") for part in ("regions", "clips")
}
PACKAGES = {"timm": "timm", "open_clip": "open_clip_torch"}  # of a library, where it is optional
OPEN_CLIP_FILES = "open_clip_config.json", "open_clip_model.safetensors"


def write_export(
    trained: Trained,
    folder: Path,
    overwrite: bool = False,
    form: str = "auto",
    averaged: bool = False,
    keep_adapters: bool = False,
) -> list[str]:
    """Write the model to `folder`, which appears whole or not at all; returns why it is a state
    dict under the towers' own names, if it is one. `form`: one of `FORMS` of launch/records.py. `averaged`: the
    weights are the run's moving average, which the model card says. Adapters are added to the
    weights; `keep_adapters`: they are written beside these, as peft's files.

    Weights are in fp32, whatever they were trained in: no number changes, but that a scale beyond
    the limit at which the loss reads it is written as the limit. Raises ValueError for a folder
    that is not empty, unless `overwrite` says that an earlier export may go, and for a form that
    the model cannot have.
    """
    folder = folder.expanduser().resolve()
    refuse_to_overwrite(folder, overwrite)
    whole = _of_frames(trained)
    trained, adapters = taken_off(exported(whole), merge=not keep_adapters)
    # in the weights in any case: only towers of a library have a form for adapters apart
    ours, adapters_of_ours = taken_off(_of(whole, own_branches(whole.towers)), merge=True)
    towers = trained.by_branch
    further = own_record(whole.options, [*ours.by_branch], [*towers])
    kind, differences = choose_form(trained, form)
    if keep_adapters:
        adapted = [each.branch for each in (*adapters, *adapters_of_ours)]
        _refuse_adapters_apart(trained, kind, adapted)
    with replacing_folder(folder) as beside:
        state = _of_these_pairs(trained, canonical_state(trained.layers))
        # what scores pairs in training has no place in an encoder of either
        _save(beside / FUSION, _taken_out(state, FUSION_NAMES))
        for name, file in ANNOTATIONS.items():
            _save(beside / file, _taken_out(state, learned_names(name)))
        # and sounds have none in a model of images and texts
        if kind not in (STATE_DICT, CLAP):
            _save(beside / AUDIO, _taken_out(state, _names_of_sounds(state)))
        for branch, tower in towers.items():
            if tower.config["library"] == "transformers":
                (beside / branch).mkdir()
                own = config_of_text(tower) if is_text(branch) and kind == OPEN_CLIP else None
                _write_json(beside / branch / "config.json", own or library_config(tower))
            elif _lacks_config(tower) and (kind != OPEN_CLIP or branch in APART):
                (beside / branch).mkdir()
                _write_json(beside / branch / OPEN_CLIP_FILES[0], model_config(tower.name))
        if ours.layers:
            every = canonical_state(whole.layers)
            _save(beside / OWN_TOWERS, own_tensors(further, ours.layers, every))
        config = _write_weights(trained, state, kind, beside)
        write_inputs(trained, kind, beside)
        apart = adapters if keep_adapters else ()
        loading = loading_record(trained, kind)
        record = {
            "format": FORMAT,
            "kind": kind,
            "differences": differences,
            "options": _options(trained, kind),
            "fusion": _fusion_options(towers),
            "adapters": write_all(apart, towers, config, beside),
            "step": trained.step,
            "trained_in": _trained_in(trained.layers),
            "versions": _versions(trained.towers),
            "loading": loading,
            **({"own": further} if ours.layers else {}),
        }
        _write_json(beside / RECORD, record)
        write_text(beside / "README.md", export_page(trained, record, averaged))
        for code in (CODE, *(code for part, code in CODE_OF.items() if part in loading)):
            write_text(beside / code.name, code.read_text(encoding="utf-8"))
        # safetensors makes them for their owner alone
        for weights in beside.rglob("*.safetensors"):
            weights.chmod(beside.stat().st_mode & 0o666)
    return differences


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
    if not (folder / RECORD).is_file():
        raise ValueError(
            f"{folder}: holds no {RECORD}, so it is no earlier export, and --overwrite would "
            "delete what it holds; give another folder"
        )


# -- what is exported


def exported(trained: Trained) -> Trained:
    """The image, the text and the audio tower of a model, as far as it has them; towers of other
    modalities are no part of it (`launch/inference/own_towers.py` keeps those of one's own), nor is an
    audio tower of one's own beside an image tower. Without pairs of images and texts, the tower of
    the frames of films is the image tower.

    Raises ValueError for a model that was trained without pairs of images, sounds or films and
    texts, and for one that other programs could not load: with a tower or a loss of its own.
    """
    trained = _of_frames(trained)
    images = _compares(trained, "image")
    if not images and not _compares(trained, "audio"):
        raise ValueError(
            f"{trained.checkpoint}: was trained with --pairs {trained.options['pairs']}; an export "
            "holds a text tower and an image or audio tower that was compared with it, or a video "
            "tower where there are no images"
        )
    losses = loss_names(trained.options["loss"], trained.options.get("pairs", IMAGE_TEXT))
    if not {*losses} <= {"infonce", "sigmoid"}:
        raise ValueError(
            f"{trained.checkpoint}: was trained with --loss {trained.options['loss']}; an export "
            "needs the scale that infonce and sigmoid learn"
        )
    towers = trained.by_branch
    for branch in APART if images else ():
        if branch in towers and "library" not in towers[branch].config:
            del towers[branch]
    chosen = [branch for branch in ("image", "audio", "text") if branch in towers]
    for tower in map(towers.__getitem__, chosen):
        if "library" not in tower.config:
            raise ValueError(
                f"{trained.checkpoint}: its tower {tower.name} is in no library that another "
                "program could load it with; take its weights from the checkpoint"
            )
    trained = _of(trained, chosen)
    loss = loss_for(trained.options["loss"], _pairs(trained))
    return replace(trained, record=trained.record | {"options": trained.options | {"loss": loss}})


def _of(trained: Trained, branches: Sequence[str]) -> Trained:
    """The model with the towers of these branches alone."""
    towers = tuple(trained.by_branch[branch] for branch in branches)
    layers = [layer for branch in branches for layer in trained.layers_of(branch)]
    return replace(trained, towers=towers, layers=layers)


def _of_frames(trained: Trained) -> Trained:
    """Of films and texts without images: the model of images that the frames are shown to. Raises
    ValueError where a clip is more than the mean of its frames."""
    if "image" in trained.by_branch or not _compares(trained, "video"):
        return trained
    video, options = trained.by_branch["video"], trained.options
    projection = options.get("projection", "linear")
    if video.config.get("time") != "mean" or projection.startswith("mlp"):
        raise ValueError(
            f"{trained.checkpoint}: no other program has the tower {video.name} with the "
            f"projection {projection}; an export needs an image tower with time=mean and a linear projection, "
            "of which a clip is the mean of its frames; take these weights from the checkpoint"
        )
    if "lora" in video.config:
        raise ValueError(
            f"{trained.checkpoint}: the adapters of the video tower cannot be exported; take its "
            "weights from the checkpoint"
        )
    renamed = {
        name: re.sub(r"\bvideo\b(?=[:=,]|$)", "image", options[name]) for name in ("pairs", "loss")
    }
    options = options | renamed | {"image_tower": frames_tower(options["video_tower"])}
    layers = [
        layer
        for tower in trained.towers
        for own in (trained.layers_of(tower.branch),)
        for layer in (as_image_layers(own) if tower is video else map(beside_images, own))
    ]
    towers = tuple(as_image_tower(each) if each is video else each for each in trained.towers)
    record = trained.record | {"options": options}
    return replace(trained, record=record, towers=towers, layers=layers)


def _compares(trained: Trained, branch: str) -> bool:
    """Was it compared with texts?"""
    return {branch, text_of(trained.by_branch)} in [
        {*pair.branches} for pair in trained.pairs if not pair.made
    ]


def canonical_state(layers: Sequence[Layer]) -> dict[str, Tensor]:
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


def _of_these_pairs(trained: Trained, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the learned scalars of pairs with a branch that is not exported, such as
    head.image_tone_logit_scale; the scales are at most what the loss reads."""
    left_out = tuple(
        f"head.{pair.name}_logit_"
        for pair in trained.pairs
        if not pair.made and not trained.by_branch.keys() >= {*pair.branches}
    )
    return {
        name: tensor.clamp(max=LOGIT_SCALE_LIMIT) if name.endswith("logit_scale") else tensor
        for name, tensor in state.items()
        if not name.startswith(left_out)
    }


def _names_of_sounds(state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """How those of the audio tower, its head and the scalars of its pairs begin."""
    of_pairs = [name for name in state if name.startswith("head.") and "_audio_logit_" in name]
    return ("audio.", "head.audio_", *of_pairs)


def _taken_out(state: dict[str, Tensor], starts: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: state.pop(name) for name in list(state) if name.startswith(starts)}


# -- forms


def choose_form(trained: Trained, form: str) -> tuple[str, list[str]]:
    """(the class of transformers, `open_clip` or `STATE_DICT`; for the last why it is no model of
    transformers). Raises ValueError for a form that the towers cannot have."""
    towers, kind = trained.by_branch, CLAP
    text = towers["text"]
    if _compares(trained, "image"):
        model_type, of_transformers = whole_model_of(towers["image"], text)
        kind = WHOLE_MODELS[model_type].model.__name__ if model_type else ""
        of_open_clip = what_open_clip_lacks(towers["image"], text)
    else:
        of_transformers = what_clap_lacks(towers["audio"], text)
        if towers.get("image"):
            of_transformers.append("transformers' ClapModel has no images")
        of_open_clip = ["OpenCLIP has no models of sounds and texts"]
        model_type = ClapConfig.model_type
    if not of_transformers and is_read_otherwise(trained.text_tokenizer, model_type):
        of_transformers.append(
            f"transformers takes a tokenizer of its own for a {kind}, which makes other tokens of "
            "texts than this one"
        )
    # by --format, why the model cannot have that form
    lacking = {"transformers": of_transformers, "open_clip": of_open_clip, "state_dict": []}
    if lacking.get(form):
        possible = " or ".join(f"--format {other}" for other in lacking if not lacking[other])
        raise ValueError(
            f"--format {form}: {'; '.join(lacking[form])}; this model can be exported with "
            f"{possible}"
        )
    if form == "open_clip":
        return OPEN_CLIP, []
    if form == "state_dict":
        return STATE_DICT, ["--format state_dict was asked for"]
    if not of_transformers:
        return kind, []
    hint = "OpenCLIP may have this model: give --format open_clip"
    return STATE_DICT, of_transformers + ([] if of_open_clip else [hint])


def _refuse_adapters_apart(trained: Trained, kind: str, adapted: Sequence[str]) -> None:
    """Raise ValueError where the adapters of these branches cannot stay apart from the weights."""
    if not adapted:
        raise ValueError(f"--keep-adapters: {trained.checkpoint} has no adapters; leave it out")
    if kind == OPEN_CLIP:
        raise ValueError(
            "--keep-adapters: peft's files name the modules of the tower's own library, and "
            "--format open_clip has others; leave out one of the two"
        )
    for branch in sorted({*adapted} - TOWER_IN.keys()):
        raise ValueError(
            f"--keep-adapters: those of the {branch} tower are not written apart from its weights; "
            "leave it out, and they are added to them"
        )


def _write_weights(
    trained: Trained, state: dict[str, Tensor], kind: str, beside: Path
) -> PreTrainedConfig | None:
    """Weights and configuration as `kind` has them, in `beside`. Returns the configuration of
    transformers' model of both towers, if it is one."""
    if kind == STATE_DICT:
        _save(beside / WEIGHTS, state)
        return None
    pair = trained.by_branch["audio" if kind == CLAP else "image"], trained.by_branch["text"]
    if kind == OPEN_CLIP:
        tokens, at = tokens_of_open_clip(trained), beside / TEXT_FOLDER
        model, tensors = open_clip_model(*pair, state, tokens, at)
        if "hf_model_name" in model["text_cfg"]:
            model["text_cfg"]["hf_model_name"] = f"./{TEXT_FOLDER}"
        pixels = preprocess_cfg(trained.preprocessing)
        _write_json(beside / OPEN_CLIP_FILES[0], {"model_cfg": model, "preprocess_cfg": pixels})
        _save(beside / OPEN_CLIP_FILES[1], tensors)
        return None
    learned = scale_of(*pair) if kind == CLAP else None
    scale = state[learned or "head.logit_scale"].item()
    if kind == CLAP:
        config, pairs = clap_config(*pair, scale), clap_pairs(*pair)
    else:
        key, _ = whole_model_of(*pair)
        config, pairs = whole_model_config(key, *pair, scale), whole_model_pairs(*pair)
    config.save_pretrained(beside)
    _save(beside / WEIGHTS, to_theirs(pairs, state))
    return config


# -- the record


def _options(trained: Trained, kind: str) -> dict[str, object]:
    """train.py's options that go on with the model; `HERE` stands for its folder."""
    options, towers = trained.options, trained.by_branch
    found = {name: options[name] for name in ("embed_dim", "max_text_tokens", "loss")}
    found["projection"] = options.get("projection", "linear")
    found["tokenizer"] = f"open_clip:{HERE}" if kind == OPEN_CLIP else HERE
    names = tower_names(options)
    for branch, tower in towers.items():
        # the option of its modality, also where a module replaced that and --tower named this one
        found[OF_BRANCH[branch].tower] = _tower_name(tower, names[branch], kind)
    if "regions" in towers.get("image", towers["text"]).config:
        found["pairs"] = _pairs(trained)
    if towers.get("image"):
        size = found["image_size"] = options["image_size"]
        found |= trained.preprocessing.options(size)
    if audio := towers.get("audio"):
        found |= {"pairs": _pairs(trained), "audio_size": options["audio_size"]}
        # the extractor of CLAP's tower is written in whole seconds
        is_clap = audio.config["architecture"] == "ClapAudioModel"
        found["audio_seconds"] = seconds_of_clip(audio) if is_clap else options["audio_seconds"]
    return found


def _tower_name(tower: Tower, name: str, kind: str) -> str:
    """A tower of transformers is in a folder of its own, and one of OpenCLIP in the whole model;
    others are made again by their names."""
    config, branch = tower.config, tower.branch
    if config["library"] == "transformers":
        more = f",{TWO_LAYERS}={config[TWO_LAYERS]}" if TWO_LAYERS in config else ""
        prefix = "" if is_text(branch) else "hf:"
        return f"{prefix}{HERE}/{branch}:pool={config['pool']}{more}"
    if kind == OPEN_CLIP and branch not in APART:
        return f"open_clip:{HERE}"
    base, overrides = split_name(name)
    if _lacks_config(tower):
        base = f"{PREFIX}{HERE}/{branch}"
    if not is_text(branch):
        return join_name(base, overrides)
    # its table of tokens may be of another size than the tokenizer
    return join_name(base, {**overrides, "vocab_size": str(config["config"]["vocab_size"])})


def _lacks_config(tower: Tower) -> bool:
    """Is it of OpenCLIP, which does not know it by its name, but from a folder or the hub?"""
    return (
        tower.config["library"] == OPEN_CLIP and tower.config["model"] not in names_of_open_clip()
    )


def _pairs(trained: Trained) -> str:
    """Those of what is exported, as in --pairs."""
    return as_given(pair for pair in trained.pairs if trained.by_branch.keys() >= {*pair.branches})


def _fusion_options(towers: Mapping[str, Tower]) -> dict[str, object]:
    """train.py's, of a model that was trained with fusion."""
    image = towers.get("image")
    sizes = image.config.get("fusion") if image else None
    keys = ("layers", "width", "heads", "scales")
    return dict(zip(FUSION_OPTIONS, map(sizes.get, keys))) if sizes else {}


def _trained_in(layers: Sequence[Layer]) -> str:
    """The dtype of the weights. From the last layer that has some: a head without a projection has
    none, and weights that adapters were added to are in fp32."""
    weights = (weight for layer in reversed(layers) for weight in layer.parameters())
    return str(next(weights).dtype).removeprefix("torch.")


def _versions(towers: Sequence[Tower]) -> dict[str, str]:
    libraries = {tower.config["library"] for tower in towers}
    optional = [package for library, package in PACKAGES.items() if library in libraries]
    return {name: version(name) for name in ("torch", "torchvision", "transformers", *optional)}


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    if tensors:
        save_file(tensors, file, metadata={"format": "pt"})


def _write_json(file: Path, value: object) -> None:
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
