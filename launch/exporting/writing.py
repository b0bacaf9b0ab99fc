"""A trained model as a folder that needs nothing of ours: weights, tokenizer, preprocessing, and a
page that says how to load it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    ClapProcessor,
    CLIPImageProcessor,
    PreTrainedConfig,
)

from common.files import replacing_folder, write_text
from data.modalities.preprocessing import Preprocessing
from data.modalities.tokenizer_open_clip import PREFIX, is_clips, text_config
from launch.exporting.adapters import page_of_adapters, taken_off, write_all
from launch.exporting.code import feature_extractor, seconds_of_clip
from launch.exporting.model_card import model_card_data, training_section
from launch.exporting.page import CLAP, STATE_DICT, export_page
from launch.inference.trained import Trained
from launch.run.records import (
    AUDIO,
    AUDIO_FOLDER,
    AUDIO_OPTIONS,
    FUSION,
    FUSION_OPTIONS,
    OPEN_CLIP,
    OPTIONS,
    RECORD,
    TEXT_FOLDER,
    WEIGHTS,
    read_export,
)
from models.losses import LOGIT_SCALE_LIMIT
from models.towers.head import FUSION_NAMES
from models.towers.layers import Layer, Tower
from models.towers.names import TWO_LAYERS, join_name, split_name
from models.weights.clap import clap_config, clap_pairs, scale_of, what_clap_lacks
from models.weights.dual_encoder import (
    dual_encoder_config,
    dual_encoder_pairs,
    library_config,
    what_differs,
)
from models.weights.open_clip_export import (
    config_of_text,
    open_clip_model,
    what_open_clip_lacks,
)
from models.weights.translation import Pair, to_theirs
from models.weights.whole_models import (
    WHOLE_MODELS,
    whole_model_config,
    whole_model_of,
    whole_model_pairs,
)

PACKAGES = ("torch", "torchvision", "transformers")
ADAPTED = {"timm": "timm", "open_clip": "open_clip_torch"}  # library -> package
DUAL_ENCODER = "VisionTextDualEncoderModel"
FORMATS = ("auto", "transformers", "open_clip", "state_dict")
OPEN_CLIP_FILES = "open_clip_config.json", "open_clip_model.safetensors"


def write_export(
    trained: Trained,
    folder: Path,
    overwrite: bool = False,
    form: str = "auto",
    averaged: bool = False,
    keep_adapters: bool = False,
) -> list[str]:
    """Write the model to `folder`, which appears whole or not at all; returns why it is a state dict
    under the towers' own names, if it is one. `form`: one of `FORMATS`. `averaged`: the weights
    are the run's moving average, which the model card says. Adapters are added to the weights;
    `keep_adapters`: they are written beside these, as peft's files.

    Weights are in fp32, whatever they were trained in: no number changes, but that a scale beyond
    the limit at which the loss reads it is written as the limit. Raises ValueError for a folder
    that is not empty, unless `overwrite` says that an earlier export may go, and for a form that the
    model cannot have.
    """
    folder = folder.expanduser().resolve()
    refuse_to_overwrite(folder, overwrite)
    trained, adapters = taken_off(exported(trained), merge=not keep_adapters)
    towers = {tower.branch: tower for tower in trained.towers}
    kind, differences = choose_form(trained, form)
    if keep_adapters:
        _refuse_adapters_apart(trained, kind, [own.branch for own in adapters])
    with replacing_folder(folder) as beside:
        # towers, heads and scalars; what scores pairs in training has no place in an encoder of
        # either
        state = _of_these_pairs(trained, canonical_state(trained.layers))
        fusion = {name: state.pop(name) for name in list(state) if name.startswith(FUSION_NAMES)}
        sounds = {} if kind in (STATE_DICT, CLAP) else _of_sounds(state)
        for file, tensors in ((FUSION, fusion), (AUDIO, sounds)):
            if tensors:
                save_file(tensors, beside / file, metadata={"format": "pt"})
        for branch, tower in towers.items():
            if tower.config["library"] == "transformers":
                (beside / branch).mkdir()
                own = config_of_text(tower) if (branch, kind) == ("text", OPEN_CLIP) else None
                _write_json(beside / branch / "config.json", own or library_config(tower))
        config, pairs = _write_weights(trained, state, kind, beside, folder)
        _write_inputs(trained, kind, beside)
        record = _record(trained, kind, differences)
        page = export_page(
            trained, kind, differences, training_section(trained, averaged), bool(fusion)
        )
        if keep_adapters:
            written = write_all(adapters, trained.towers, config, pairs, beside)
            record["adapters"] = written
            page += page_of_adapters(list(written), whole=config is not None)
        _write_json(beside / RECORD, record)
        write_text(beside / "README.md", model_card_data(trained, kind) + page)
        # safetensors makes them for their owner alone
        for weights in beside.rglob("*.safetensors"):
            weights.chmod(beside.stat().st_mode & 0o666)
    return differences


def _write_inputs(trained: Trained, kind: str, beside: Path) -> None:
    """The tokenizer, and what prepares sounds and images, as transformers writes them."""
    towers = {tower.branch: tower for tower in trained.towers}
    tokenizer = copy.deepcopy(trained.text_tokenizer)
    tokenizer.model_max_length = trained.options["max_text_tokens"]
    # as in training, whatever its class does by itself; the file is written from the second one
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
    tokenizer.save_pretrained(str(beside))
    if "audio" in towers:
        extractor = feature_extractor(towers["audio"])
        extractor.save_pretrained(beside / AUDIO_FOLDER)
        if kind == CLAP:  # in both files, for all versions of transformers
            extractor.save_pretrained(beside)
            ClapProcessor(extractor, tokenizer).save_pretrained(beside)
    if "image" in towers:
        image_processor(trained.preprocessing, trained.options["image_size"]).save_pretrained(
            beside
        )


def _refuse_adapters_apart(trained: Trained, kind: str, adapted: Sequence[str]) -> None:
    """Raise ValueError where the adapters of these branches cannot stay apart from the weights."""
    if not adapted:
        raise ValueError(f"--keep-adapters: {trained.checkpoint} has no adapters; leave it out")
    if kind == OPEN_CLIP:
        raise ValueError(
            "--keep-adapters: peft's files name the modules of the tower's own library, and "
            "--format open_clip has others; leave out one of the two"
        )
    if "audio" in adapted:
        raise ValueError(
            "--keep-adapters: those of the audio tower are not written apart from its weights; "
            "leave it out, and they are added to them"
        )


def choose_form(trained: Trained, form: str) -> tuple[str, list[str]]:
    """(the class of transformers, `open_clip` or `STATE_DICT`; for the last why it is no model of
    transformers). Raises ValueError for a form that the towers cannot have."""
    towers = {tower.branch: tower for tower in trained.towers}
    key = None
    if _compares(trained, "image", "text"):
        pair = towers["image"], towers["text"]
        key = whole_model_of(*pair)
        of_transformers = [] if key else what_differs(*pair)
        of_open_clip = what_open_clip_lacks(*pair)
    else:
        of_transformers = what_clap_lacks(towers["audio"], towers["text"])
        if "image" in towers:
            of_transformers.append("transformers' ClapModel has no images")
        of_open_clip = ["OpenCLIP has no models of sounds and texts"]
    lacking = {"transformers": of_transformers, "open_clip": of_open_clip, "state_dict": []}
    if lacking.get(form):
        possible = " or ".join(f"--format {other}" for other in lacking if not lacking[other])
        raise ValueError(
            f"--format {form}: {'; '.join(lacking[form])}; this model can be exported with {possible}"
        )
    if form == "open_clip":
        return OPEN_CLIP, []
    if form == "state_dict":
        return STATE_DICT, ["--format state_dict was asked for"]
    if lacking["transformers"]:
        hint = "OpenCLIP may have this model: give --format open_clip"
        return STATE_DICT, lacking["transformers"] + ([] if lacking["open_clip"] else [hint])
    if not _compares(trained, "image", "text"):
        return CLAP, []
    return WHOLE_MODELS[key].model.__name__ if key else DUAL_ENCODER, []


def _write_weights(
    trained: Trained, state: dict[str, Tensor], kind: str, beside: Path, folder: Path
) -> tuple[PreTrainedConfig | None, Sequence[Pair]]:
    """Weights and configuration as `kind` has them, in `beside`, which will be `folder`. Returns
    the configuration of transformers' model of both towers, if it is one, and the tensors' pairs."""
    towers = {tower.branch: tower for tower in trained.towers}
    if kind == STATE_DICT:
        save_file(state, beside / WEIGHTS, metadata={"format": "pt"})
        return None, ()
    first, text = towers["audio" if kind == CLAP else "image"], towers["text"]
    if kind == OPEN_CLIP:
        tokens = _tokens_of_open_clip(trained, folder)
        model, tensors = open_clip_model(first, text, state, tokens, beside / TEXT_FOLDER)
        if "hf_model_name" in model["text_cfg"]:
            model["text_cfg"]["hf_model_name"] = str(folder / TEXT_FOLDER)
        names = OPEN_CLIP_FILES
        _write_json(
            beside / names[0],
            {"model_cfg": model, "preprocess_cfg": _preprocess(trained.preprocessing)},
        )
        save_file(tensors, beside / names[1], metadata={"format": "pt"})
        return None, ()
    if kind == CLAP:
        learned = scale_of(first, text)
        if learned is None:
            raise ValueError(
                f"{trained.checkpoint}: has no scale of sounds and texts, which ClapModel needs; "
                "export a state dict"
            )
        config = clap_config(first, text, state[learned].item())
        pairs = clap_pairs(first, text)
    elif (key := whole_model_of(first, text)) is None:
        config = dual_encoder_config(first, text, state["head.logit_scale"].item())
        pairs = dual_encoder_pairs(first, text)
    else:
        config = whole_model_config(key, first, text, state["head.logit_scale"].item())
        pairs = whole_model_pairs(first, text)
    config.save_pretrained(beside)
    save_file(to_theirs(pairs, state), beside / WEIGHTS, metadata={"format": "pt"})
    return config, pairs


def _tokens_of_open_clip(trained: Trained, folder: Path) -> dict[str, object]:
    """What OpenCLIP's `text_cfg` says of the tokenizer, and `max_text_tokens`. Without any name of a
    tokenizer OpenCLIP has CLIP's; else it takes that of the folder of the model, and the name is
    read only where the model is not in a folder."""
    tokens = {"max_text_tokens": trained.options["max_text_tokens"]}
    source = trained.options.get("tokenizer") or ""
    named = {"hf_tokenizer_name": str(folder)}
    if source.startswith(PREFIX):  # as in the model that it came from
        texts = text_config(source.removeprefix(PREFIX))
        named = {
            key: texts[key] for key in ("hf_tokenizer_name", "tokenizer_kwargs") if key in texts
        }
        if Path(named.get("hf_tokenizer_name", "")).is_absolute():
            named["hf_tokenizer_name"] = str(folder)
    elif _text(trained).config["library"] == "open_clip" and is_clips(trained.text_tokenizer):
        named = {}
    return {**tokens, **named}


def _preprocess(preprocessing: Preprocessing) -> dict[str, object]:
    if preprocessing.crop_pct != 1:
        raise ValueError(
            f"--format open_clip: OpenCLIP resizes images to the tower's input, and this model was "
            f"evaluated with {preprocessing.crop_pct:.3g} of what they were resized to "
            "(--image-resize); export a state dict"
        )
    return {
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "interpolation": preprocessing.interpolation,
        "resize_mode": preprocessing.resize_mode,
    }


def exported(trained: Trained) -> Trained:
    """The image, the text and the audio tower of a model, as far as it has them; towers of other
    modalities stay behind, and an audio tower of one's own beside an image tower does too.

    Raises ValueError for a model that was trained without pairs of images and texts or of sounds
    and texts, and for one that other programs could not load: with a tower or a loss of its own.
    """
    images = _compares(trained, "image", "text")
    if not images and not _compares(trained, "audio", "text"):
        raise ValueError(
            f"{trained.checkpoint}: was trained with --pairs {trained.options['pairs']}; an export "
            "holds a text tower and an image or audio tower that was compared with it"
        )
    if trained.options["loss"] not in ("infonce", "sigmoid"):
        raise ValueError(
            f"{trained.checkpoint}: was trained with --loss {trained.options['loss']}; an export "
            "needs the scale that infonce and sigmoid learn"
        )
    parts: dict[str, tuple[Tower, list[Layer]]] = {
        tower.branch: (tower, []) for tower in trained.towers
    }
    for branch, layer in zip(trained.branch_of_layers, trained.layers):
        parts[branch][1].append(layer)
    of_library = {branch: "library" in tower.config for branch, (tower, _) in parts.items()}
    branches = [
        branch
        for branch in ("image", "audio", "text")
        if branch in parts and (of_library[branch] or branch != "audio" or not images)
    ]
    unknown = [parts[branch][0].name for branch in branches if not of_library[branch]]
    if unknown:
        raise ValueError(
            f"{trained.checkpoint}: its tower {unknown[0]} is in no library that another program "
            "could load it with; take its weights from the checkpoint"
        )
    layers = [layer for branch in branches for layer in parts[branch][1]]
    return replace(trained, towers=tuple(parts[branch][0] for branch in branches), layers=layers)


def _compares(trained: Trained, first: str, second: str) -> bool:
    return {first, second} in [set(pair.modalities) for pair in trained.pairs]


def _text(trained: Trained) -> Tower:
    return next(tower for tower in trained.towers if tower.branch == "text")


def _of_these_pairs(trained: Trained, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the learned scalars of pairs with a branch that is not exported, such as
    head.image_tone_logit_scale; the scales are at most what the loss reads."""
    branches = {tower.branch for tower in trained.towers}
    left_out = tuple(
        f"head.{pair.first}_{pair.second}_logit_"
        for pair in trained.pairs
        if not branches.issuperset(pair.modalities)
    )
    return {
        name: tensor.clamp(max=LOGIT_SCALE_LIMIT) if name.endswith("logit_scale") else tensor
        for name, tensor in state.items()
        if not name.startswith(left_out or ("\0",))
    }


def _of_sounds(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The audio tower with its head and the scalars of its pairs, taken out of `state`."""
    names = [
        name
        for name in state
        if name.startswith(("audio.", "head.audio_"))
        or (name.startswith("head.") and "_audio_logit_" in name)
    ]
    return {name: state.pop(name) for name in names}


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
    """transformers' nearest to `data.modalities.transforms.eval_transform`. Other are transparent
    images, and those where the margin around the centre is odd."""
    resize = preprocessing.options(image_size)["image_resize"]
    squashed = preprocessing.resize_mode == "squash"
    return CLIPImageProcessor(
        size={"height": resize, "width": resize} if squashed else {"shortest_edge": resize},
        crop_size={"height": image_size, "width": image_size},
        resample=Image.Resampling[preprocessing.interpolation.upper()],
        image_mean=list(preprocessing.mean),
        image_std=list(preprocessing.std),
    )


def _record(trained: Trained, kind: str, differences: list[str]) -> dict[str, object]:
    options, text = trained.options, _text(trained)
    towers = {tower.branch: tower for tower in trained.towers}
    of_images = trained.preprocessing.options(options["image_size"]) if "image" in towers else {}
    known = [key for key in OPTIONS if "image" in towers or not key.startswith("image_")]
    return {
        "kind": kind,
        "differences": differences,
        **{key: options[key] for key in known},
        **of_images,
        "text_tower": _with_vocabulary(text, options["text_tower"]),
        **{f"{branch}_pool": tower.config["pool"] for branch, tower in towers.items()},
        **({f"text_{TWO_LAYERS}": text.config[TWO_LAYERS]} if TWO_LAYERS in text.config else {}),
        **(_audio_options(trained, towers["audio"]) if "audio" in towers else {}),
        "loss": options["loss"],
        "projection": options.get("projection", "linear"),
        **(_fusion_options(towers["image"]) if "image" in towers else {}),
        "step": trained.step,
        "trained_in": _trained_in(trained.layers),
        "versions": {name: version(name) for name in (*PACKAGES, *_adapters(trained))},
    }


def _audio_options(trained: Trained, audio: Tower) -> dict[str, object]:
    """train.py's, of a model with sounds: pairs of what is exported, tower, length of a clip."""
    branches = {tower.branch for tower in trained.towers}
    pairs = [pair for pair in trained.pairs if branches.issuperset(pair.modalities)]
    written = [
        f"{pair.first}:{pair.second}" + (f":{pair.weight:g}" if pair.weight != 1 else "")
        for pair in pairs
    ]
    given = {key: trained.options[key] for key in AUDIO_OPTIONS if key != "pairs"}
    if (
        audio.config["architecture"] == "ClapAudioModel"
    ):  # its extractor is written in whole seconds
        given["audio_seconds"] = seconds_of_clip(audio)
    return {"pairs": ",".join(written), **given}


def _trained_in(layers: Sequence[Layer]) -> str:
    """The dtype of the weights. From the last layer that has some: a head without a projection has
    none, and weights that adapters were added to are in fp32."""
    weights = (weight for layer in reversed(layers) for weight in layer.parameters())
    return str(next(weights).dtype).removeprefix("torch.")


def _fusion_options(image: Tower) -> dict[str, object]:
    """train.py's, of a model that was trained with it."""
    sizes = image.config.get("fusion", {})
    return (
        dict(zip(FUSION_OPTIONS, map(sizes.get, ("layers", "width", "heads", "scales"))))
        if sizes
        else {}
    )


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
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
