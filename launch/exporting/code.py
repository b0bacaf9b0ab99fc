"""Python code that makes the towers of an export by public libraries alone, for its README.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers import ClapFeatureExtractor, SequenceFeatureExtractor

from models.towers.audio import QUIET_DB, SPREAD_DB, OfImage
from models.towers.head import read_projection
from models.towers.layers import Tower
from models.towers.libraries import open_clip, torchvision, transformers_image, transformers_text
from models.towers.libraries.transformers_image import PlacePool
from models.towers.names import TWO_LAYERS
from models.towers.pooling import num_heads


@dataclass(frozen=True)
class TowerCode:
    """`imports` and `constructor`: lines that make `image`, `text` or `audio`, with its weights;
    `features`: an expression of `pixel_values`, of `ids` and `mask` [B, L] or of `input_features`,
    which may read what `before`, lines of their own, has made of them."""

    imports: str
    constructor: str
    features: str
    before: str = ""


def tower_code(tower: Tower) -> TowerCode:
    """Of any tower that an export may hold."""
    if tower.branch == "audio":
        return _audio(tower)
    if code := adapted(tower):
        return code
    if tower.branch == "text":
        full_length = tower.config["pool"] == "head"  # where padding is read as any other token
        given = "" if full_length else f", attention_mask=mask{_languages(tower)}"
        made = _from_transformers(tower)
        before = f"output = text(input_ids=ids{given})"
        features = _text_features(tower)
        if TWO_LAYERS in tower.config:
            features = f"text_proj({features})"
        return TowerCode(_import(tower), made, features, before)
    imports, constructor = _constructor(tower)
    return TowerCode(imports, constructor, _image_features(tower))


def helpers(towers: tuple[Tower, ...]) -> str:
    """Classes and functions that the code of the towers reads."""
    learned = [tower for tower in towers if tower.config["pool"] == "attention"]
    pools = "".join(
        ATTENTION_OF.format(branch=tower.branch, width=tower.width, heads=num_heads(tower.width))
        for tower in learned
    )
    two_layers = "".join(_two_layers(tower) for tower in towers if TWO_LAYERS in tower.config)
    return (ATTENTION + pools if learned else "") + two_layers + "".join(map(_patches, towers))


PROJECTED = {
    "linear": 'projected = features @ weights["weight"].T',
    "none": "projected = features",
    "mlp": """inner = ACT2FN["{activation}"](features @ weights["linear1.weight"].T + weights["linear1.bias"])
    projected = inner @ weights["linear2.weight"].T + weights["linear2.bias"]""",
}


def projection_code(projection: str) -> tuple[str, str]:
    """The import, if one is needed, and the lines from `features` [B, W] of a tower and the `weights`
    of its projection to `projected` [B, D]."""
    kind, activation = read_projection(projection)
    line = "from transformers.activations import ACT2FN" if kind == "mlp" else ""
    return line, PROJECTED[kind].format(activation=activation)


# -- audio towers

WHISPER = """audio = WhisperEncoder(AutoConfig.from_pretrained("audio"))
audio.load_state_dict(of("audio."))"""


def _audio(tower: Tower) -> TowerCode:
    if any(isinstance(spec.template, OfImage) for spec in tower.specs):
        return _audio_of_image(tower)
    architecture, pool = tower.config["architecture"], tower.config["pool"]
    states = "audio(input_features).last_hidden_state"
    if architecture == "WhisperEncoder":
        module = "transformers.models.whisper.modeling_whisper"
        imports = f"from {module} import WhisperEncoder\nfrom transformers import AutoConfig"
        made, skipped = WHISPER, ""
    else:
        imports, made, skipped = _import(tower), _from_transformers(tower), "[:, 2:]"
    own = "audio(input_features).pooler_output"
    if architecture == "ClapAudioModel" or pool == "pooler":
        return TowerCode(imports, made, own)
    features = {
        "avg": f"{states}{skipped}.mean(1)",  # AST: without the class and the distillation token
        "max": f"{states}{skipped}.amax(1)",
        "attention": f"audio_pool({states})",
    }[pool]
    return TowerCode(imports, made, features)


def _audio_of_image(tower: Tower) -> TowerCode:
    """The code of the image tower, which is called `audio`, on the spectrogram as a grey image."""
    inner = [
        replace(spec, template=spec.template.inner) if isinstance(spec.template, OfImage) else spec
        for spec in tower.specs
    ]
    code = tower_code(replace(tower, branch="image", specs=tuple(inner)))
    named = {
        key: re.sub(r"\bimage(?=\b|_pool\b)", "audio", getattr(code, key))
        for key in ("constructor", "features")
    }
    grey = (
        f"pixel_values = (input_features.transpose(2, 3) - ({QUIET_DB})) / {SPREAD_DB}\n"
        "pixel_values = pixel_values.expand(-1, 3, -1, -1)  # decibels as a grey image"
    )
    return TowerCode(code.imports, named["constructor"], named["features"], grey)


def feature_extractor(audio: Tower) -> SequenceFeatureExtractor:
    """transformers' one for what the tower reads. CLAP's has whole seconds; the length of a clip in
    samples is in the export's README.md."""
    reads = audio.config["audio_input"]
    make = getattr(transformers, reads["extractor"])
    if make is not ClapFeatureExtractor:
        return make(**reads["values"])
    rate = make(**reads["values"]).sampling_rate
    return make(**{**reads["values"], "max_length_s": max(1, reads["num_samples"] // rate)})


def seconds_of_clip(audio: Tower) -> float:
    """Of what the tower reads of a sound."""
    return audio.config["audio_input"]["num_samples"] / feature_extractor(audio).sampling_rate


# -- towers of the adapters


def adapted(tower: Tower) -> TowerCode | None:
    """Of a tower that an adapter made (`models/towers/libraries`); None: another kind of tower."""
    if "arguments" not in tower.config and tower.config["library"] != "open_clip":
        return None
    makers = {"timm": _timm, "torchvision": _torchvision, "open_clip": _open_clip_image}
    make = _open_clip_text if tower.branch == "text" else makers[tower.config["library"]]
    imports, constructor, features = make(tower)
    strict = ", strict=False" if tower.config["unused"] else ""  # without what a tower does not use
    weights = f'{tower.branch}.load_state_dict(of("{tower.branch}."){strict})'
    return TowerCode(imports, f"{constructor}\n{weights}", features)


def _timm(image: Tower) -> tuple[str, str, str]:
    config = image.config
    pooled = config["pool"] == "attention"
    return (
        "import timm",
        f"image = timm.create_model({config['architecture']!r}, num_classes=0"
        f"{_keywords(config['arguments'])})",
        _pooled(image, f"image{'.forward_features' if pooled else ''}(pixel_values)"),
    )


def _torchvision(image: Tower) -> tuple[str, str, str]:
    config = image.config
    parts = "".join(
        f"\nimage.set_submodule({path!r}, torch.nn.{module!r})"
        for path, module in torchvision.replaced(image).items()
    )
    return (
        "import torchvision",
        f"image = torchvision.models.get_model({config['architecture']!r}"
        f"{_keywords(config['arguments'])}){parts}",
        _pooled(image, "image(pixel_values)"),
    )


def _open_clip_image(image: Tower) -> tuple[str, str, str]:
    config = image.config
    model = f"{config['output_dim']}, {config['config']}, {open_clip.SMALL_TEXT}"
    taken_off = {
        "visual.proj": "\nimage.proj = None",
        "visual.head.proj.weight": "\nimage.head.proj = torch.nn.Identity()",
    }
    return (
        "import open_clip",
        f"image = open_clip.CLIP({model}, {config['quick_gelu']}).visual"
        f"{taken_off.get(config['library_projection'], '')}",
        _pooled(image, "image(pixel_values)"),
    )


def _open_clip_text(text: Tower) -> tuple[str, str, str]:
    config = text.config
    model = f"{config['output_dim']}, {open_clip.SMALL_IMAGE}, {config['config']}"
    taken_off = "\ntext.text_projection = None" if config["library_projection"] else ""
    length = config["config"]["context_length"]
    return (
        "import open_clip",
        f"text = open_clip.CustomTextCLIP({model}, {config['quick_gelu']}).text{taken_off}",
        # it takes texts of its whole length, and may read what they are padded with
        f"text(torch.nn.functional.pad(ids.masked_fill(mask == 0, {config['config']['pad_id']}), "
        f"(0, {length} - ids.shape[1]), value={config['config']['pad_id']}))",
    )


def _keywords(arguments: dict[str, object]) -> str:
    return "".join(f", {key}={value!r}" for key, value in arguments.items())


def _pooled(image: Tower, features: str) -> str:
    added = image.config["added_pool"]
    if added is None:
        return features
    tokens = f"{features}.movedim({added['channels']}, -1).flatten(1, -2)"
    ends = {"avg": f"{tokens}.mean(1)", "max": f"{tokens}.amax(1)"}
    return ends.get(added["pool"], f"image_pool({tokens})")


# -- towers that no adapter made

FROM_TRANSFORMERS = """{branch} = {architecture}.from_pretrained(
    None, config=AutoConfig.from_pretrained("{branch}"), state_dict=of("{branch}."){no_pooler}
)"""

IN_PATCHES = """


def in_patches(pixel_values, side={side}):
    \"\"\"What Siglip2VisionModel takes: patches with their channels last, which of them to attend to, and
    their rows and columns.\"\"\"
    rows, columns = (length // side for length in pixel_values.shape[2:])
    cropped = pixel_values[..., : rows * side, : columns * side]
    patches = cropped.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 3, 5, 1)
    patches = patches.flatten(3).flatten(1, 2)
    return patches, torch.ones(patches.shape[:2]), torch.tensor([[rows, columns]] * len(patches))


"""

ATTENTION = """


class AttentionPool(torch.nn.Module):
    def __init__(self, branch, width, heads):
        super().__init__()
        self.probe = torch.nn.Parameter(torch.empty(1, 1, width))
        self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.layernorm = torch.nn.LayerNorm(width, eps=1e-6)
        self.mlp = torch.nn.ModuleDict({"fc1": torch.nn.Linear(width, 4 * width), "fc2": torch.nn.Linear(4 * width, width)})
        self.load_state_dict({name: tensors.pop(f"{branch}.attention_pool.{name}") for name in self.state_dict()})

    def forward(self, tokens, padded=None):
        found, _ = self.attention(self.probe.expand(len(tokens), -1, -1), tokens, tokens, key_padding_mask=padded)
        inner = torch.nn.functional.gelu(self.mlp["fc1"](self.layernorm(found)), approximate="tanh")
        return (found + self.mlp["fc2"](inner))[:, 0]


"""
ATTENTION_OF = """{branch}_pool = AttentionPool("{branch}", {width}, {heads})
"""
TWO_LAYERS_OF = """
text_proj = torch.nn.Sequential(
    torch.nn.Linear({width}, {inner}, bias=False), torch.nn.GELU(), torch.nn.Linear({inner}, {out}, bias=False)
)
text_proj.load_state_dict({{name: tensors.pop(f"text.proj.{{name}}") for name in text_proj.state_dict()}})
"""
OTHER_POOL = {
    "max": "\nimage.avgpool = torch.nn.AdaptiveMaxPool2d(1)",
    "attention": "\nimage.avgpool = torch.nn.Identity()",
}  # of maps


def _of_transformers(tower: Tower) -> bool:
    return tower.config["library"] == "transformers"


def _import(tower: Tower) -> str:
    return f"from transformers import AutoConfig, {tower.config['architecture']}"


def _from_transformers(tower: Tower) -> str:
    architecture, pool = tower.config["architecture"], tower.config["pool"]
    families: Mapping[str, Mapping[str, Any]] = {
        "image": transformers_image.FAMILIES,
        "text": transformers_text.FAMILIES,
    }
    family = families.get(tower.branch, {}).get(tower.config["config"]["model_type"])
    has_pooler = family is not None and "pooler" in family.pools
    return FROM_TRANSFORMERS.format(
        branch=tower.branch,
        architecture=architecture,
        no_pooler=", add_pooling_layer=False" if has_pooler and pool != "pooler" else "",
    )


def _languages(text: Tower) -> str:
    if "languages" not in text.config:
        return ""
    return f", langs=torch.full_like(ids, {text.config['languages']['default']})"


def _two_layers(text: Tower) -> str:
    shapes = text.specs[-2].canonical_parameters
    (inner, width), out = shapes["text.proj.0.weight"], text.config[TWO_LAYERS]
    return TWO_LAYERS_OF.format(width=width, inner=inner, out=out)


def _patches(image: Tower) -> str:
    if image.config["architecture"] != "Siglip2VisionModel" or image.branch != "image":
        return ""
    return IN_PATCHES.format(side=image.config["patch_size"])


def _features_of_transformers(image: Tower) -> str:
    """As `ImagePool` does: the library's pooled output, or its last states pooled otherwise."""
    last, pool = image.specs[-2].template, image.config["pool"]
    given = "*in_patches(pixel_values)" if _patches(image) else "pixel_values"
    if pool == transformers_image.FAMILIES[image.config["config"]["model_type"]].pools[0]:
        return f"image({given}).pooler_output"
    states = f"image({given}).last_hidden_state"
    norm = image.config["architecture"].startswith(("CLIP", "ChineseCLIP", "ConvNext"))
    name = "post_layernorm" if "CLIP" in image.config["architecture"] else "layernorm"
    if isinstance(last, PlacePool):
        return f"image.layernorm({states}.amax((-2, -1)))"
    if image.config["architecture"].startswith("ConvNext"):
        states = f"{states}.flatten(2).transpose(1, 2)"
    if pool == "attention":
        return f"image_pool(image.{name}({states}))" if norm else f"image_pool({states})"
    pooled = {
        "cls": f"{states}[:, 0]",
        "avg": f"{states}[:, {last.skipped}:].mean(1)",
        "max": f"{states}[:, {last.skipped}:].amax(1)",
    }[pool]
    return f"image.{name}({pooled})" if norm else pooled


def _image_features(image: Tower) -> str:
    if code := adapted(image):
        return code.features
    if _of_transformers(image):
        return _features_of_transformers(image)
    pool = image.config["pool"]
    if "patch_size" in image.config and pool != "cls":
        patches = "torch.cat([image.class_token.expand(len(pixel_values), -1, -1), image._process_input(pixel_values)], 1)"
        behind = {
            "avg": "image.encoder({})[:, 1:].mean(1)",
            "max": "image.encoder({})[:, 1:].amax(1)",
            "attention": "image_pool(image.encoder({}))",
        }
        return behind[pool].format(patches)
    if "layers" in image.config and pool == "attention":
        return f"image_pool(image(pixel_values).unflatten(1, ({image.width}, -1)).transpose(1, 2))"
    if pool == "attention":
        return "image_pool(image.classifier[0](image.features(pixel_values)).flatten(2).transpose(1, 2))"
    return "image(pixel_values)"


def _text_features(text: Tower) -> str:
    pool, eos_token_id = text.config["pool"], text.config["eos_token_id"]
    if pool == "eos" and eos_token_id is not None:
        return (
            f"output.last_hidden_state[range(len(ids)), (ids == {eos_token_id}).int().argmax(-1)]"
        )
    return {
        "mean": "(output.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
        "first": "output.last_hidden_state[:, 0]",
        "last": "output.last_hidden_state[range(len(ids)), ids.shape[1] - 1 - mask.flip(1).argmax(1)]",
        "max": "output.last_hidden_state.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)",
        "attention": "text_pool(output.last_hidden_state, mask == 0)",
        "pooler": "output.pooler_output",
        "head": "output.pooler_output",
        "eos": "output.pooler_output",
    }[pool]


def _constructor(image: Tower) -> tuple[str, str]:
    """The import and the lines that make the library's model of these sizes, without its
    classifier, as `image`, with its weights."""
    if code := adapted(image):
        return code.imports, code.constructor
    if _of_transformers(image):
        return _import(image), _from_transformers(image)
    imports, made = _constructor_of_torchvision(image)
    return imports, f'{made}\nimage.load_state_dict(of("image."))'


def _constructor_of_torchvision(image: Tower) -> tuple[str, str]:
    sizes = image.config
    if "layers" in sizes:
        block = "Bottleneck" if sizes["bottleneck"] else "BasicBlock"
        return (
            f"from torchvision.models.resnet import {block}, ResNet",
            f"image = ResNet({block}, {list(sizes['layers'])}, "
            f"width_per_group={sizes['width_per_group']}, groups={sizes['groups']})\n"
            "image.fc = torch.nn.Identity()" + OTHER_POOL.get(sizes["pool"], ""),
        )
    if "patch_size" in sizes:
        keys = ("image_size", "patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
        arguments = ", ".join(f"{key}={sizes[key]}" for key in keys)
        return (
            "from torchvision.models import VisionTransformer",
            f"image = VisionTransformer({arguments})\nimage.heads = torch.nn.Identity()",
        )
    settings = zip(sizes["dims"], [*sizes["dims"][1:], None], sizes["depths"])
    blocks = ", ".join(f"CNBlockConfig({a}, {b}, {depth})" for a, b, depth in settings)
    return (
        "from torchvision.models.convnext import CNBlockConfig, ConvNeXt",
        f"image = ConvNeXt([{blocks}])\nimage.classifier[2] = torch.nn.Identity()"
        + OTHER_POOL.get(sizes["pool"], ""),
    )
