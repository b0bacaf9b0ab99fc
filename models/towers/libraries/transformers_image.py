"""Image towers of transformers, `hf:WHERE`: CLIP, SigLIP, ViT, DINOv2, ConvNeXt and Swin, cut into
layers.

B micro-batch, C channels, H, W height and width, N tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.towers.layers import Layer, Tower, cut
from models.towers.libraries.configurations import (
    Catalogue,
    Family,
    Preset,
    initialise,
    remade,
    saved_state,
)
from models.towers.libraries.layers import (
    Block,
    Named,
    PatchStart,
    PlacePool,
    Pool,
    Start,
    takes,
    tokens_of,
)
from models.towers.pooling import pooling

# -- layers


class PatchEmbeddings(PatchStart):
    """By the library's `embeddings`. Images of another size than `image_size` get positions
    interpolated as the library does."""

    def __init__(
        self, embeddings: Any, image_size: int, prefix: int, norm: nn.Module | None
    ) -> None:
        super().__init__(embeddings, prefix, norm)
        self.image_size = image_size
        self.interpolates = takes(embeddings, "interpolate_pos_encoding")

    def embedded(self, given: Tensor) -> Tensor:
        if not self.interpolates:  # DINOv2 does so by itself
            return self.embeddings(given)
        other = tuple(given.shape[-2:]) != (self.image_size, self.image_size)
        return self.embeddings(given, interpolate_pos_encoding=other)


class FlexibleEmbeddings(PatchEmbeddings):
    """SigLIP 2's, which take images in patches, with the number of rows and columns. All images of
    a micro-batch are of one size here, so that one set of positions serves them all."""

    def embedded(self, given: Tensor) -> Tensor:
        side = self.embeddings.patch_size
        rows, columns = (length // side for length in given.shape[-2:])
        cropped = given[..., : rows * side, : columns * side]
        patches = cropped.unflatten(2, (rows, side)).unflatten(4, (columns, side))
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # [B, N, 3 side²]
        # on the CPU, where the library reads it
        return self.embeddings(patches, torch.tensor([[rows, columns]], device="cpu"))


class SwinStart(Start):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, C, H/4, W/4]."""

    def embedded(self, given: Tensor) -> Tensor:
        return _map(*self.embeddings(given))


class WindowBlock(Block):
    """A block of Swin, or what lies between two groups of them, which take tokens and the size of
    the map. In the layout in memory that they leave, a map is a view of its tokens."""

    SIZES = ("window_size", "shift_size")

    def __init__(self, block: nn.Module) -> None:
        super().__init__("image", block)
        self.sizes = {name: getattr(block, name) for name in self.SIZES if hasattr(block, name)}

    def compute(self, hidden: Tensor) -> Tensor:
        height, width = hidden.shape[2:]
        for name, value in self.sizes.items():  # a small map makes the library change them for good
            setattr(self.block, name, value)
        made = self.block(tokens_of(hidden), (height, width))
        if isinstance(made, Tensor):  # a merging of patches, two by two
            return _map(made, (-(-height // 2), -(-width // 2)))
        return _map(made[0], (height, width))


class TransposedPool(nn.Module):
    """Swin's pooler, which takes [B, C, N]."""

    def __init__(self, pooler: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, tokens: Tensor) -> Tensor:
        return self.pooler(tokens.transpose(1, 2)).flatten(1)


def _map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, HW, C] -> [B, C, H, W]."""
    return tokens.transpose(1, 2).unflatten(2, size)


# -- where each model is cut

TOKEN_POOLS = ("cls", "avg", "max", "attention")
MAP_POOLS = ("avg", "max", "attention")


@dataclass(frozen=True, kw_only=True)
class ImageFamily(Family):
    """`layers`: how it is cut, of the model, a pool and the image size; `antialias`: of the
    library's interpolation of positions."""

    layers: Callable[[Any, str, int], Named]
    antialias: bool = False

    def initialise(self, layer: Layer, model: Any) -> None:
        initialise(layer, model)

    def state(self, model: Any) -> dict[str, Tensor]:
        """The model's tensors by the names that they have in files."""
        return saved_state(model)

    def width(self, config: PreTrainedConfig, pool: str) -> int:
        """Of the features."""
        if pool == "pooler":
            return config.pooler_output_size or config.hidden_size
        return config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size


def _of_tokens(
    model: Any,
    pool: str,
    image_size: int,
    blocks: str,
    norm: str,
    prefix: Callable[[PreTrainedConfig], int] = lambda config: 1,
    called: str | None = None,
    norm_behind: bool = False,
    start: type[PatchEmbeddings] = PatchEmbeddings,
) -> Named:
    """A model of tokens: `blocks` and `norm` say where it keeps them, `prefix` how many tokens come
    before those of patches, `called` how the blocks are named in its files; `norm_behind`: it
    normalises what was pooled."""
    embeddings, final, first = model.embeddings, getattr(model, norm), prefix(model.config)
    if getattr(embeddings, "mask_token", None) is not None:  # which no configuration leaves out
        del embeddings.mask_token
        embeddings.mask_token = torch.empty(0)
    own = {"pooler": lambda: model.pooler, "head": lambda: model.head}
    behind = norm_behind and pool != "attention"
    last = Pool(
        "image",
        pooling(pool, model.config.hidden_size, **own),
        norm=None if behind else final,
        behind=final if behind else None,
        skipped=first if pool in ("avg", "max") else 0,
    )
    return [
        ("embeddings", start(embeddings, image_size, first, getattr(model, "pre_layrnorm", None))),
        *(
            (f"{called or blocks}.{i}", Block("image", block))
            for i, block in enumerate(model.get_submodule(blocks))
        ),
        ("pool", last),
    ]


def _convnext(model: Any, pool: str, image_size: int) -> Named:
    layers: Named = [("embeddings", Start("image", model.embeddings))]
    for i, stage in enumerate(model.encoder.stages):
        name = f"encoder.stages.{i}"
        if len(stage.downsampling_layer):
            between = Block("image", nn.Sequential(*stage.downsampling_layer))
            layers.append((f"{name}.downsampling_layer", between))
        blocks = enumerate(stage.layers)
        layers += [(f"{name}.layers.{j}", Block("image", block)) for j, block in blocks]
    if pool in ("attention", "max"):
        # "max" of tokens: nn.AdaptiveMaxPool2d has no deterministic backward on a GPU
        where = {"norm" if pool == "attention" else "behind": model.layernorm}
        own = pooling(pool, model.config.hidden_sizes[-1])
        return [*layers, ("pool", Pool("image", own, **where))]
    behind = nn.Sequential(nn.Flatten(), model.layernorm)
    return [*layers, ("pool", PlacePool("image", nn.AdaptiveAvgPool2d(1), behind=behind))]


def _swin(model: Any, pool: str, image_size: int) -> Named:
    layers: Named = [("embeddings", SwinStart("image", model.embeddings))]
    for i, stage in enumerate(model.encoder.layers):
        name = f"encoder.layers.{i}"
        layers += [
            (f"{name}.blocks.{j}", WindowBlock(block)) for j, block in enumerate(stage.blocks)
        ]
        if stage.downsample is not None:
            layers.append((f"{name}.downsample", WindowBlock(stage.downsample)))
    own = pooling(pool, model.num_features, avg=lambda: TransposedPool(model.pooler))
    return [*layers, ("pool", Pool("image", own, norm=model.layernorm))]


_CLIP = partial(_of_tokens, blocks="encoder.layers", norm="post_layernorm", norm_behind=True)
_SIGLIP = partial(
    _of_tokens, blocks="encoder.layers", norm="post_layernorm", prefix=lambda config: 0
)
_VIT = partial(_of_tokens, blocks="layers", norm="layernorm", called="encoder.layer")
_DINO = partial(_of_tokens, blocks="encoder.layer", norm="layernorm")
_REGISTERS = partial(_DINO, prefix=lambda config: 1 + config.num_register_tokens)
TIMESFORMER = _DINO  # whose tokens are of all frames
_SIGLIP_POOLS = ("head", "avg", "max")


FAMILIES = {  # by the model_type of the configuration
    "clip_vision_model": ImageFamily("CLIPVisionModel", TOKEN_POOLS, layers=_CLIP),
    "chinese_clip_vision_model": ImageFamily("ChineseCLIPVisionModel", TOKEN_POOLS, layers=_CLIP),
    "siglip_vision_model": ImageFamily("SiglipVisionModel", _SIGLIP_POOLS, layers=_SIGLIP),
    "siglip2_vision_model": ImageFamily(
        "Siglip2VisionModel", _SIGLIP_POOLS, layers=partial(_SIGLIP, start=FlexibleEmbeddings)
    ),
    "vit": ImageFamily("ViTModel", ("pooler", *TOKEN_POOLS), pooled_by="pooler", layers=_VIT),
    "dinov2": ImageFamily("Dinov2Model", TOKEN_POOLS, layers=_DINO),
    "dinov2_with_registers": ImageFamily(
        "Dinov2WithRegistersModel", TOKEN_POOLS, layers=_REGISTERS, antialias=True
    ),
    "convnext": ImageFamily("ConvNextModel", MAP_POOLS, layers=_convnext),
    "convnextv2": ImageFamily("ConvNextV2Model", MAP_POOLS, layers=_convnext),
    "swin": ImageFamily("SwinModel", MAP_POOLS, layers=_swin),
}

# -- published models


def _vit(layers: int, width: int, inner: int, heads: int, patch: int, size: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": size,
    }


def _dino(layers: int, width: int, heads: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {**sizes, "image_size": 518}


def _convnext_sizes(width: int, depths: tuple[int, ...]) -> dict[str, list[int]]:
    return {"hidden_sizes": [width, 2 * width, 4 * width, 8 * width], "depths": list(depths)}


_LARGE, _SO400M = (24, 1024, 4096, 16), (27, 1152, 4304, 16)
_CLIP_TYPE, _SIGLIP_TYPE = "clip_vision_model", "siglip_vision_model"
_BASE_CONVNEXT = _convnext_sizes(128, (3, 3, 27, 3))


def _presets(*presets: Preset) -> dict[str, Preset]:
    """By their names on the hub."""
    return {preset.hub_id.rpartition("/")[2]: preset for preset in presets}


PRESETS = _presets(
    Preset("openai/clip-vit-base-patch32", _CLIP_TYPE),
    Preset("openai/clip-vit-base-patch16", _CLIP_TYPE, {"patch_size": 16}),
    Preset("openai/clip-vit-large-patch14", _CLIP_TYPE, _vit(*_LARGE, 14, 224)),
    Preset("openai/clip-vit-large-patch14-336", _CLIP_TYPE, _vit(*_LARGE, 14, 336)),
    Preset("google/siglip-base-patch16-224", _SIGLIP_TYPE),
    Preset("google/siglip-large-patch16-256", _SIGLIP_TYPE, _vit(*_LARGE, 16, 256)),
    Preset("google/siglip-so400m-patch14-384", _SIGLIP_TYPE, _vit(*_SO400M, 14, 384)),
    Preset("google/siglip2-base-patch16-224", _SIGLIP_TYPE),
    Preset("google/siglip2-base-patch16-naflex", "siglip2_vision_model"),
    Preset("google/vit-base-patch16-224", "vit"),
    Preset("google/vit-large-patch16-224", "vit", _vit(*_LARGE, 16, 224)),
    Preset("facebook/dinov2-small", "dinov2", _dino(12, 384, 6)),
    Preset("facebook/dinov2-base", "dinov2", _dino(12, 768, 12)),
    Preset("facebook/dinov2-large", "dinov2", _dino(24, 1024, 16)),
    Preset(
        "facebook/dinov2-with-registers-base",
        "dinov2_with_registers",
        {"image_size": 518, "num_register_tokens": 4},
    ),
    Preset("facebook/convnext-tiny-224", "convnext"),
    Preset("facebook/convnext-base-224", "convnext", _BASE_CONVNEXT),
    Preset("facebook/convnextv2-atto-1k-224", "convnextv2", _convnext_sizes(40, (2, 2, 6, 2))),
    Preset("facebook/convnextv2-tiny-1k-224", "convnextv2"),
    Preset("facebook/convnextv2-base-1k-224", "convnextv2", _BASE_CONVNEXT),
    Preset("microsoft/swin-tiny-patch4-window7-224", "swin"),
)

ALIASES = {  # what people type -> the preset; in small letters
    "clip-vit-b-32": "clip-vit-base-patch32",
    "clip-vit-b-16": "clip-vit-base-patch16",
    "clip-vit-l-14": "clip-vit-large-patch14",
    "vit-base": "vit-base-patch16-224",
    "vit-large": "vit-large-patch16-224",
    "siglip-base": "siglip-base-patch16-224",
    "dinov2": "dinov2-base",
    "convnextv2-tiny": "convnextv2-tiny-1k-224",
    "convnextv2-base": "convnextv2-base-1k-224",
    "swin-tiny": "swin-tiny-patch4-window7-224",
}

CATALOGUE = Catalogue(
    "image", "vision_config", FAMILIES, PRESETS, ALIASES, example="openai/clip-vit-base-patch32"
)
hub_id_of = CATALOGUE.hub_id_of

# -- the tower


def image_tower(name: str, image_size: int) -> Tower:
    """The tower of `name` = hf:WHERE[:key=value,...] for images of `image_size` pixels a side; it
    has no head yet.

    WHERE: a preset, a local folder with a config.json, or a Hugging Face id, of an image model or
    of a model of images and texts that holds one. Without `pool` its features are the library's
    pooled output. Errors: ValueError, FileNotFoundError.
    """
    return tower_of(CATALOGUE, name, image_size)


def tower_of(catalogue: Catalogue, name: str, image_size: int, **more: Any) -> Tower:
    """As `image_tower`, of one of `catalogue`; `more`: further values of its configuration."""
    config, hub_id, family, pool, values = catalogue.read(name)
    values |= more
    if hasattr(config, "image_size"):  # SigLIP 2 takes images of any size
        values["image_size"] = image_size
    if pool != "head" and "head" in family.pools:  # a key that older configurations do not declare
        values["vision_use_head"] = False
    if hasattr(config, "use_mask_token"):  # of pretraining; it would wait for a gradient
        values["use_mask_token"] = False
    config = _remade(name, config, values)
    _check(name, config, image_size)
    with torch.device("meta"):
        model = family.made(config)
        layers = family.layers(model, pool, image_size)
    specs = cut(
        "image",
        model,
        layers,
        initialise=partial(family.initialise, model=model),
        dropped=family.unused(pool),
        state=family.state(model),
    )
    has_patches = isinstance(layers[0][1], PatchStart)  # of which some may be left out
    record = {
        "library": "transformers",
        "architecture": family.model,
        "pool": pool,
        "image_size": image_size,
        **({"patch_size": config.patch_size} if has_patches else {}),
        "hub_id": hub_id,
        "config": config.to_dict(),
    }
    return Tower("image", name, family.width(config, pool), specs, record)


# what configurations of networks with stages work out of others
_DERIVED = {"stage_names", "out_features", "out_indices", "_out_features", "_out_indices"}


def _remade(name: str, config: PreTrainedConfig, values: dict[str, Any]) -> PreTrainedConfig:
    derived = set(_DERIVED)
    if config.model_type == "swin":
        derived |= {"hidden_size", "num_layers"}
    if "hidden_size" in values:
        derived.add("pooler_output_size")
    if hasattr(config, "num_stages"):
        values = {**values, "num_stages": len(values.get("depths", config.depths))}
    return remade(name, config, values, derived)


def _check(name: str, config: PreTrainedConfig, image_size: int) -> None:
    """Raise ValueError for an image that the architecture cannot take."""
    kind = config.model_type
    least = getattr(config, "patch_size", 1)
    if not isinstance(least, int):
        raise ValueError(f"image tower {name!r}: patch_size={least} must be one number: a square")
    for key in ("hidden_sizes", "num_heads"):
        per_stage = getattr(config, key, None)
        if isinstance(per_stage, (list, tuple)) and len(per_stage) != len(config.depths):
            raise ValueError(
                f"image tower {name!r}: {key} and depths must be equally many integers, not "
                f"{list(per_stage)} and {list(config.depths)}"
            )
    if kind.startswith("convnext"):
        least = config.patch_size * 2 ** (len(config.depths) - 1)
    if kind == "swin":
        # a window that is larger than the map would be cut to it, and its table of positions not
        least = config.patch_size * config.window_size * 2 ** (len(config.depths) - 1)
        least -= config.patch_size * 2 ** (len(config.depths) - 1) - 1
    if image_size < least:
        raise ValueError(
            f"image tower {name!r}: image_size={image_size} must be at least {least} for this "
            "architecture; give --image-size"
        )
