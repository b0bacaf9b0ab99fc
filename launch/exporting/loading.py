"""What `modeling_export.py` reads in an export: how each tower is made by its library, how its
output is pooled and projected, and how images, texts and sounds are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import ClapFeatureExtractor, SequenceFeatureExtractor

from data.stored.kinds import is_text
from launch.inference.adapters import TOWER_IN
from launch.inference.trained import Trained
from launch.records import OPEN_CLIP, STATE_DICT, WEIGHTS
from models.towers.audio import QUIET_DB, SPREAD_DB
from models.towers.head import read_projection
from models.towers.layers import Tower
from models.towers.libraries import open_clip, torchvision, transformers_image, transformers_text
from models.towers.libraries.layers import Pool
from models.towers.names import TWO_LAYERS
from models.towers.of_image import holds_image, image_inside
from models.towers.pooling import num_heads
from models.towers.regions import MapTap
from models.weights.names import AUDIO, REGIONS

Record = dict[str, Any]
# what the model's own classifier or mean becomes, in modeling_export.py's words
APART = ("audio",)
"""Branches whose towers are written beside the model of images and texts."""
NOTHING, MAX = "Identity", "AdaptiveMaxPool2d"


def loading_record(trained: Trained, kind: str) -> Record:
    """Of an export of this kind."""
    towers = trained.by_branch
    whole = None if kind == STATE_DICT else kind
    images, sounds = towers.get("image"), towers.get("audio")
    # beside images they have no place in any model
    apart = APART if images else ()
    own = {name: tower for name, tower in towers.items() if not whole or name in apart}
    return {
        "model": whole,
        "file": AUDIO if whole else WEIGHTS,
        "images": _images(images) if images else None,
        "texts": _texts(towers["text"]) if kind != OPEN_CLIP else None,
        "sounds": _sounds(sounds) if sounds else None,
        "towers": {name: tower_record(tower) for name, tower in own.items()},
        **_regions(images, kind),
        **_clips(trained),
    }


def _clips(trained: Trained) -> Record:
    """How many frames `modeling_clips.py` shows to the image tower, of a model of clips."""
    image, options = trained.by_branch.get("image"), trained.options
    if image is None or "time" not in image.config:
        return {}
    return {"clips": {"frames": options["video_frames"], "rate": options.get("video_rate")}}


def _regions(image: Tower | None, kind: str) -> Record:
    """Where `modeling_regions.py` finds the maps that regions are cut out of; nothing where no
    region is embedded, or some map is made by no module of the library by itself."""
    if image is None or "regions" not in image.config:
        return {}
    maps: list[Record] = []
    layer = ""
    for spec in image.specs:
        if isinstance(spec.template, MapTap):
            module = _module_of(layer, image, kind)
            maps.append({"module": module, "channels_last": spec.template.last})
        layer = spec.name.partition(".")[2]
    if not all(each["module"] for each in maps):
        return {}
    return {"regions": {"file": REGIONS, "maps": maps}}


def _module_of(layer: str, image: Tower, kind: str) -> str:
    """What the export calls the module whose output is that of a layer of the image tower; "": none
    has it."""
    if layer in ("pool", "stem") or (kind == OPEN_CLIP and image.config["library"] != OPEN_CLIP):
        return ""
    if kind == OPEN_CLIP:
        return f"visual.{layer}"
    return layer if kind == STATE_DICT else f"{TOWER_IN['image']}.{layer}"


def _images(image: Tower) -> Record:
    in_patches = image.config["architecture"] == "Siglip2VisionModel"
    return {"patch_size": image.config["config"]["patch_size"] if in_patches else None}


def _texts(text: Tower) -> Record:
    config = text.config
    full_length = config["pool"] == "head"  # where padding is read as any other token
    padding: Record = {"padding": True}
    if full_length:
        # SigLIP 2's tokenizer pads on the left by itself
        padding = {"padding": "max_length", "max_length": config["max_text_tokens"]}
        padding["padding_side"] = "right"
    if config["library"] == "open_clip":
        own = config["config"]
        return {"padding": padding, "length": own["context_length"], "pad_id": own["pad_id"]}
    language = {"language": config["languages"]["default"]} if "languages" in config else {}
    return {"padding": padding, "masked": not full_length, **language}


def _sounds(audio: Tower) -> Record:
    reads = audio.config["audio_input"]
    own_length = {"max_length": reads["num_samples"], "truncation": "rand_trunc"}
    grey = {"quiet_db": QUIET_DB, "spread_db": SPREAD_DB}
    return {
        "num_samples": reads["num_samples"],
        "arguments": own_length if reads["extractor"] == "ClapFeatureExtractor" else {},
        "grey": grey if holds_image(audio) else None,
    }


def feature_extractor(audio: Tower) -> SequenceFeatureExtractor:
    """transformers' one for what the tower reads. CLAP's has whole seconds; the length of a clip in
    samples is in the export's record."""
    reads = audio.config["audio_input"]
    make = getattr(transformers, reads["extractor"])
    if make is not ClapFeatureExtractor:
        return make(**reads["values"])
    rate = make(**reads["values"]).sampling_rate
    return make(**{**reads["values"], "max_length_s": max(1, reads["num_samples"] // rate)})


def seconds_of_clip(audio: Tower) -> float:
    """Of what the tower reads of a sound."""
    return audio.config["audio_input"]["num_samples"] / feature_extractor(audio).sampling_rate


# -- towers


def tower_record(tower: Tower) -> Record:
    """How `modeling_export.py` makes a tower, pools its output and projects that."""
    branch, config = tower.branch, tower.config
    head = f"head.{branch}_projection"
    kind, activation = read_projection(config.get("projection", "linear"))
    heads = {"none": [], "linear": [head]}
    heads["mlp"] = [f"{head}.linear1", activation, f"{head}.linear2"]
    inner = [f"{branch}.proj.0", "gelu", f"{branch}.proj.2"] if TWO_LAYERS in config else []
    made = {"projection": [*inner, *heads[kind]], **_of_library(image_inside(tower))}
    if made.get("pool") == "attention":
        made |= {"width": tower.width, "heads": num_heads(tower.width)}
    if made.get("pool") == "eos":
        made["eos_token_id"] = config["eos_token_id"]
    if config.get("unused"):
        made["strict"] = False
    return {"library": config["library"], "architecture": config["architecture"], **made}


def _of_library(tower: Tower) -> Record:
    """Its module, where that is made with arguments, and what is done with its output."""
    config = tower.config
    if config["library"] == "transformers":
        makers = {"image": _transformers_image, "text": _transformers_text}
        return {"unused": [], **makers.get(tower.branch, _transformers_audio)(tower)}
    if config["library"] == "open_clip":
        return _open_clip_text(config) if is_text(tower.branch) else _open_clip_image(config)
    if config["library"] == "timm":
        unpooled = {"method": "forward_features"} if config["pool"] == "attention" else {}
        return {"arguments": config["arguments"], **unpooled, **_added_pool(config)}
    if "arguments" not in config:
        return _torchvision_by_hand(tower)
    replaced = {path: type(new).__name__ for path, new in torchvision.replaced(tower).items()}
    return {"arguments": config["arguments"], "replaced": replaced, **_added_pool(config)}


def _added_pool(config: Mapping[str, Any]) -> Record:
    """Of a tower whose library leaves a map or tokens."""
    added = config["added_pool"]
    return {name: added[name] for name in ("pool", "channels")} if added else {}


def _open_clip_image(config: Mapping[str, Any]) -> Record:
    taken_off = {
        "visual.proj": {"proj": None},
        "visual.head.proj.weight": {"head.proj": NOTHING},
    }
    return {
        "architecture": "CLIP",
        "arguments": _open_clip_arguments(config, config["config"], open_clip.SMALL_TEXT),
        "replaced": taken_off.get(config["library_projection"], {}),
        **_added_pool(config),
    }


def _open_clip_text(config: Mapping[str, Any]) -> Record:
    return {
        "architecture": "CustomTextCLIP",
        "arguments": _open_clip_arguments(config, open_clip.SMALL_IMAGE, config["config"]),
        "replaced": {"text_projection": None} if config["library_projection"] else {},
    }


def _open_clip_arguments(config: Mapping[str, Any], image: Any, text: Any) -> Record:
    sizes = {"embed_dim": config["output_dim"], "quick_gelu": config["quick_gelu"]}
    return {**sizes, "vision_cfg": image, "text_cfg": text}


def _torchvision_by_hand(tower: Tower) -> Record:
    """`layers`, `dims` or `patch_size` say whether it is a ResNet, a ConvNeXt or a ViT."""
    sizes, pool = tower.config, tower.config["pool"]
    largest = {"avgpool": MAX} if pool == "max" else {}
    pooled = {"pool": pool, "channels": 1}
    if "layers" in sizes:
        names = ("layers", "width_per_group", "groups")
        block = "Bottleneck" if sizes["bottleneck"] else "BasicBlock"
        return {
            "architecture": "ResNet",
            "arguments": {"block": block, **{name: sizes[name] for name in names}},
            "replaced": {"fc": NOTHING, **largest},
            **({"inner": "layer4", **pooled} if pool == "attention" else {}),
        }
    if "dims" in sizes:
        blocks = zip(sizes["dims"], [*sizes["dims"][1:], None], sizes["depths"])
        # the norm of the map itself, and not of what was pooled
        unpooled = {"avgpool": NOTHING, "classifier.1": NOTHING} if pool == "attention" else {}
        return {
            "architecture": "ConvNeXt",
            "arguments": {"blocks": [list(block) for block in blocks]},
            "replaced": {"classifier.2": NOTHING, **largest, **unpooled},
            **(pooled if pool == "attention" else {}),
        }
    keys = ("image_size", "patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
    tokens = {"inner": "encoder", "skipped": 0 if pool == "attention" else 1}
    return {
        "architecture": "VisionTransformer",
        "arguments": {key: sizes[key] for key in keys},
        "replaced": {"heads": NOTHING},
        **({**pooled, **tokens, "channels": -1} if pool != "cls" else {}),
    }


def _transformers_audio(audio: Tower) -> Record:
    architecture, pool = audio.config["architecture"], audio.config["pool"]
    if architecture == "ClapAudioModel" or pool == "pooler":
        return {"output": "pooler_output"}
    # AST: without the class and the distillation token
    skipped = 2 if architecture != "WhisperEncoder" and pool != "attention" else 0
    return {"output": "last_hidden_state", "pool": pool, "skipped": skipped}


def _transformers_text(text: Tower) -> Record:
    pool, ends = text.config["pool"], text.config["eos_token_id"] is not None
    made = _of_family(text, transformers_text.FAMILIES)
    if pool in ("pooler", "head") or (pool == "eos" and not ends):
        return {**made, "output": "pooler_output"}
    return {**made, "output": "last_hidden_state", "pool": pool}


def _transformers_image(image: Tower) -> Record:
    config, last = image.config, image.specs[-2].template
    pool, architecture = config["pool"], config["architecture"]
    families = transformers_image.FAMILIES
    made = _of_family(image, families)
    if pool == families[config["config"]["model_type"]].pools[0]:
        return {**made, "output": "pooler_output"}
    # states of these and of CLIP come without the final norm
    has_maps = architecture.startswith("ConvNext")
    norm = "layernorm" if has_maps else None
    return {
        **made,
        "output": "last_hidden_state",
        "pool": pool,
        "channels": 1 if has_maps else -1,
        "skipped": last.skipped if isinstance(last, Pool) else 0,
        "norm": "post_layernorm" if "CLIP" in architecture else norm,
    }


def _of_family(tower: Tower, families: Mapping[str, Any]) -> Record:
    """The arguments of its module, and how the names begin of what it has no weights for."""
    family, pool = families[tower.config["config"]["model_type"]], tower.config["pool"]
    unpooled = "pooler" in family.pools and pool != "pooler"
    return {
        "arguments": {"add_pooling_layer": False} if unpooled else {},
        "unused": list(family.unused(pool)),
    }
