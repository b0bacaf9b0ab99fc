"""Image towers of transformers, `hf:WHERE`: CLIP, SigLIP, ViT, DINOv2, ConvNeXt and Swin, cut into
layers.

B micro-batch, C channels, H, W height and width, N tokens, of which the first P are none of patches
(class token, registers), D width.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    ChineseCLIPVisionModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
    ConvNextV2Config,
    ConvNextV2Model,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    PreTrainedConfig,
    PreTrainedModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
)

from models.towers.layers import Layer, Tower, cut
from models.towers.libraries.configurations import (
    Preset,
    find_config,
    initialise,
    preset_of,
    saved_state,
)
from models.towers.names import parse_overrides, refuse, split_name
from models.towers.pooling import ADDED, AttentionPool, FirstPool, MaxPool, MeanPool

HF = "hf:"  # how the names of these towers begin

# -- layers


class PatchEmbeddings(Layer):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, N, D], by the library's `embeddings` and
    the `norm` behind them, if there is one.

    Images of another size than `image_size` get positions interpolated as the library does. Where
    `kept_patches` [B, K] numbers some of an image's patches, row by row from 0, the others are left
    out (FLIP: Li et al. 2023): N = P + K.
    """

    reads, makes, drops, reads_if_given = (
        ("pixel_values",),
        ("image_hidden",),
        ("pixel_values", "kept_patches"),
        ("kept_patches",),
    )

    def __init__(
        self, embeddings: Any, image_size: int, prefix: int, norm: nn.Module | None
    ) -> None:
        """`embeddings`: the library's module."""
        super().__init__()
        self.embeddings, self.image_size, self.prefix = embeddings, image_size, prefix
        self.norm = nn.Identity() if norm is None else norm
        self.interpolates = "interpolate_pos_encoding" in _parameters(embeddings)

    def compute(self, pixel_values: Tensor, kept_patches: Tensor | None = None) -> Tensor:
        tokens = self.tokens(pixel_values.to(next(self.embeddings.parameters()).dtype))
        if kept_patches is not None:
            first = torch.arange(self.prefix, device=tokens.device).expand(len(tokens), -1)
            kept = torch.cat([first, kept_patches + self.prefix], 1)  # [B, P + K]
            tokens = tokens.gather(1, kept[:, :, None].expand(-1, -1, tokens.shape[2]))
        return self.norm(tokens)

    def tokens(self, pixel_values: Tensor) -> Tensor:
        if not self.interpolates:  # DINOv2 does so by itself
            return self.embeddings(pixel_values)
        other = tuple(pixel_values.shape[-2:]) != (self.image_size, self.image_size)
        return self.embeddings(pixel_values, interpolate_pos_encoding=other)


class FlexibleEmbeddings(PatchEmbeddings):
    """SigLIP 2's, which take images in patches, with the number of rows and columns. All images of
    a micro-batch are of one size here, so that one set of positions serves them all."""

    def tokens(self, pixel_values: Tensor) -> Tensor:
        side = self.embeddings.patch_size
        rows, columns = (length // side for length in pixel_values.shape[-2:])
        cropped = pixel_values[..., : rows * side, : columns * side]
        patches = cropped.unflatten(2, (rows, side)).unflatten(4, (columns, side))
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # [B, N, 3 side²]
        # on the CPU, where the library reads it
        return self.embeddings(patches, torch.tensor([[rows, columns]], device="cpu"))


class TokenBlock(Layer):
    """`image_hidden` [B, N, D] -> `image_hidden`: one block of the library, which masks nothing."""

    reads = makes = ("image_hidden",)

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.more = {"attention_mask": None} if "attention_mask" in _parameters(block) else {}

    def compute(self, image_hidden: Tensor) -> Tensor:
        return self.block(image_hidden, **self.more)


class MapEmbeddings(Layer):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, C, H/4, W/4]."""

    reads, makes, drops = ("pixel_values",), ("image_hidden",), ("pixel_values",)

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def compute(self, pixel_values: Tensor) -> Tensor:
        made = self.embeddings(pixel_values.to(next(self.embeddings.parameters()).dtype))
        return made if isinstance(made, Tensor) else _map(*made)


class MapBlock(Layer):
    """`image_hidden` [B, C, H, W] -> `image_hidden`: one block of ConvNeXt, or what lies between
    two groups of them."""

    reads = makes = ("image_hidden",)

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def compute(self, image_hidden: Tensor) -> Tensor:
        return self.block(image_hidden)


class WindowBlock(MapBlock):
    """The same of Swin, whose blocks take tokens and the size of the map. In the layout in memory
    that they leave, a map is a view of its tokens."""

    SIZES = ("window_size", "shift_size")

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.sizes = {name: getattr(block, name) for name in self.SIZES if hasattr(block, name)}

    def compute(self, image_hidden: Tensor) -> Tensor:
        height, width = image_hidden.shape[2:]
        for name, value in self.sizes.items():  # a small map makes the library change them for good
            setattr(self.block, name, value)
        made = self.block(_tokens(image_hidden), (height, width))
        if isinstance(made, Tensor):  # a merging of patches, two by two
            return _map(made, (-(-height // 2), -(-width // 2)))
        return _map(made[0], (height, width))


class ImagePool(Layer):
    """`image_hidden`, tokens or a map, -> `image_features` [B, D]: `norm`, `pool` and `behind`, in
    this order; `skipped`: tokens at the beginning that are not pooled."""

    reads, makes, drops = ("image_hidden",), ("image_features",), ("image_hidden",)

    def __init__(
        self,
        pool: nn.Module,
        norm: nn.Module | None = None,
        behind: nn.Module | None = None,
        skipped: int = 0,
    ) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.pool, self.skipped = pool, skipped
        self.behind = nn.Identity() if behind is None else behind
        self.added = ADDED if isinstance(pool, AttentionPool) else None

    def compute(self, image_hidden: Tensor) -> Tensor:
        tokens = self.norm(image_hidden if image_hidden.dim() == 3 else _tokens(image_hidden))
        return self.behind(self.pool(tokens[:, self.skipped :]))


class PlacePool(ImagePool):
    """`image_hidden` [B, C, H, W] -> `image_features` [B, C]: the mean or the maximum of all
    places, then the norm, as ConvNeXt does."""

    def __init__(self, largest: bool, behind: nn.Module) -> None:
        super().__init__(nn.Identity(), behind=behind)
        self.largest = largest

    def compute(self, image_hidden: Tensor) -> Tensor:
        places = (-2, -1)
        return self.behind(image_hidden.amax(places) if self.largest else image_hidden.mean(places))


class TransposedPool(nn.Module):
    """Swin's pooler, which takes [B, C, N]."""

    def __init__(self, pooler: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, tokens: Tensor) -> Tensor:
        return self.pooler(tokens.transpose(1, 2)).flatten(1)


def _tokens(maps: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, HW, C]."""
    return maps.flatten(2).transpose(1, 2)


def _map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, HW, C] -> [B, C, H, W]."""
    return tokens.transpose(1, 2).unflatten(2, size)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


# -- where each model is cut

Named = list[tuple[str, Layer]]
TOKEN_POOLS = ("cls", "avg", "max", "attention")
MAP_POOLS = ("avg", "max", "attention")


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its model, which configuration keys a user may override,
    what its features can be pooled by (the library's own first), and how it is cut.

    `antialias`: of the library's interpolation of positions.
    """

    model: type[PreTrainedModel]
    keys: Mapping[str, type]
    pools: tuple[str, ...]
    layers: Callable[[Any, str, int], Named]  # of the model, a pool and the image size
    unused: Callable[[str], tuple[str, ...]] = lambda pool: ()
    antialias: bool = False


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
    modules: dict[str, Callable[[], nn.Module]] = {
        "cls": FirstPool,
        "avg": MeanPool,
        "max": MaxPool,
        "attention": lambda: AttentionPool(model.config.hidden_size),
        "pooler": lambda: model.pooler,
        "head": lambda: model.head,
    }
    behind = norm_behind and pool != "attention"
    last = ImagePool(
        modules[pool](),
        norm=None if behind else final,
        behind=final if behind else None,
        skipped=first if pool in ("avg", "max") else 0,
    )
    return [
        ("embeddings", start(embeddings, image_size, first, getattr(model, "pre_layrnorm", None))),
        *(
            (f"{called or blocks}.{i}", TokenBlock(block))
            for i, block in enumerate(model.get_submodule(blocks))
        ),
        ("pool", last),
    ]


def _convnext(model: Any, pool: str, image_size: int) -> Named:
    layers: Named = [("embeddings", MapEmbeddings(model.embeddings))]
    for i, stage in enumerate(model.encoder.stages):
        name = f"encoder.stages.{i}"
        if len(stage.downsampling_layer):
            between = MapBlock(nn.Sequential(*stage.downsampling_layer))
            layers.append((f"{name}.downsampling_layer", between))
        layers += [(f"{name}.layers.{j}", MapBlock(block)) for j, block in enumerate(stage.layers)]
    if pool == "attention":
        last = ImagePool(AttentionPool(model.config.hidden_sizes[-1]), norm=model.layernorm)
    else:
        last = PlacePool(pool == "max", behind=model.layernorm)
    return [*layers, ("pool", last)]


def _swin(model: Any, pool: str, image_size: int) -> Named:
    layers: Named = [("embeddings", MapEmbeddings(model.embeddings))]
    for i, stage in enumerate(model.encoder.layers):
        name = f"encoder.layers.{i}"
        layers += [
            (f"{name}.blocks.{j}", WindowBlock(block)) for j, block in enumerate(stage.blocks)
        ]
        if stage.downsample is not None:
            layers.append((f"{name}.downsample", WindowBlock(stage.downsample)))
    modules: dict[str, Callable[[], nn.Module]] = {
        "avg": lambda: TransposedPool(model.pooler),
        "max": MaxPool,
        "attention": lambda: AttentionPool(model.num_features),
    }
    return [*layers, ("pool", ImagePool(modules[pool](), norm=model.layernorm))]


# -- keys

_VIT_KEYS = {
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "intermediate_size": int,
    "hidden_act": str,
    "patch_size": int,
    "layer_norm_eps": float,
}
_CLIP_KEYS = {
    **_VIT_KEYS,
    "attention_dropout": float,
    "initializer_range": float,
    "initializer_factor": float,
}
_SIGLIP_KEYS = {**_VIT_KEYS, "attention_dropout": float}
_DROPOUTS = {
    "hidden_dropout_prob": float,
    "attention_probs_dropout_prob": float,
    "initializer_range": float,
}
_DINO_KEYS = {
    **{key: kind for key, kind in _VIT_KEYS.items() if key != "intermediate_size"},
    **_DROPOUTS,
    "mlp_ratio": int,
    "layerscale_value": float,
    "drop_path_rate": float,
}
_CONVNEXT_KEYS = {
    "hidden_sizes": tuple,
    "depths": tuple,
    "drop_path_rate": float,
    "initializer_range": float,
    "layer_norm_eps": float,
}
_SWIN_KEYS = {
    "embed_dim": int,
    "depths": tuple,
    "num_heads": tuple,
    "window_size": int,
    "patch_size": int,
    "drop_path_rate": float,
    "layer_norm_eps": float,
    **_DROPOUTS,
}

_CLIP = partial(_of_tokens, blocks="encoder.layers", norm="post_layernorm", norm_behind=True)
_SIGLIP = partial(
    _of_tokens, blocks="encoder.layers", norm="post_layernorm", prefix=lambda config: 0
)
_DINO = partial(_of_tokens, blocks="encoder.layer", norm="layernorm")
_SIGLIP_POOLS = ("head", "avg", "max")


FAMILIES = {  # by the model_type of the configuration
    "clip_vision_model": Family(CLIPVisionModel, _CLIP_KEYS, TOKEN_POOLS, _CLIP),
    "chinese_clip_vision_model": Family(ChineseCLIPVisionModel, _CLIP_KEYS, TOKEN_POOLS, _CLIP),
    "siglip_vision_model": Family(SiglipVisionModel, _SIGLIP_KEYS, _SIGLIP_POOLS, _SIGLIP),
    "siglip2_vision_model": Family(
        Siglip2VisionModel,
        {**_SIGLIP_KEYS, "num_patches": int},
        _SIGLIP_POOLS,
        partial(_SIGLIP, start=FlexibleEmbeddings),
    ),
    "vit": Family(
        ViTModel,
        {**_VIT_KEYS, **_DROPOUTS},
        ("pooler", *TOKEN_POOLS),
        partial(_of_tokens, blocks="layers", norm="layernorm", called="encoder.layer"),
        lambda pool: () if pool == "pooler" else ("pooler.",),
    ),
    "dinov2": Family(Dinov2Model, _DINO_KEYS, TOKEN_POOLS, _DINO),
    "dinov2_with_registers": Family(
        Dinov2WithRegistersModel,
        {**_DINO_KEYS, "num_register_tokens": int},
        TOKEN_POOLS,
        partial(_DINO, prefix=lambda config: 1 + config.num_register_tokens),
        antialias=True,
    ),
    "convnext": Family(
        ConvNextModel, {**_CONVNEXT_KEYS, "layer_scale_init_value": float}, MAP_POOLS, _convnext
    ),
    "convnextv2": Family(ConvNextV2Model, _CONVNEXT_KEYS, MAP_POOLS, _convnext),
    "swin": Family(SwinModel, _SWIN_KEYS, MAP_POOLS, _swin),
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
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "image_size": 518,
    }


def _convnext_sizes(width: int, depths: tuple[int, ...]) -> dict[str, list[int]]:
    return {"hidden_sizes": [width, 2 * width, 4 * width, 8 * width], "depths": list(depths)}


_LARGE, _SO400M = (24, 1024, 4096, 16), (27, 1152, 4304, 16)

PRESETS = {
    "clip-vit-base-patch32": Preset("openai/clip-vit-base-patch32", CLIPVisionConfig),
    "clip-vit-base-patch16": Preset(
        "openai/clip-vit-base-patch16", CLIPVisionConfig, {"patch_size": 16}
    ),
    "clip-vit-large-patch14": Preset(
        "openai/clip-vit-large-patch14", CLIPVisionConfig, _vit(*_LARGE, 14, 224)
    ),
    "clip-vit-large-patch14-336": Preset(
        "openai/clip-vit-large-patch14-336", CLIPVisionConfig, _vit(*_LARGE, 14, 336)
    ),
    "siglip-base-patch16-224": Preset("google/siglip-base-patch16-224", SiglipVisionConfig),
    "siglip-large-patch16-256": Preset(
        "google/siglip-large-patch16-256", SiglipVisionConfig, _vit(*_LARGE, 16, 256)
    ),
    "siglip-so400m-patch14-384": Preset(
        "google/siglip-so400m-patch14-384", SiglipVisionConfig, _vit(*_SO400M, 14, 384)
    ),
    "siglip2-base-patch16-224": Preset("google/siglip2-base-patch16-224", SiglipVisionConfig),
    "siglip2-base-patch16-naflex": Preset(
        "google/siglip2-base-patch16-naflex", Siglip2VisionConfig
    ),
    "vit-base-patch16-224": Preset("google/vit-base-patch16-224", ViTConfig),
    "vit-large-patch16-224": Preset(
        "google/vit-large-patch16-224", ViTConfig, _vit(*_LARGE, 16, 224)
    ),
    "dinov2-small": Preset("facebook/dinov2-small", Dinov2Config, _dino(12, 384, 6)),
    "dinov2-base": Preset("facebook/dinov2-base", Dinov2Config, _dino(12, 768, 12)),
    "dinov2-large": Preset("facebook/dinov2-large", Dinov2Config, _dino(24, 1024, 16)),
    "dinov2-with-registers-base": Preset(
        "facebook/dinov2-with-registers-base",
        Dinov2WithRegistersConfig,
        {"image_size": 518, "num_register_tokens": 4},
    ),
    "convnext-tiny-224": Preset("facebook/convnext-tiny-224", ConvNextConfig),
    "convnext-base-224": Preset(
        "facebook/convnext-base-224", ConvNextConfig, _convnext_sizes(128, (3, 3, 27, 3))
    ),
    "convnextv2-atto-1k-224": Preset(
        "facebook/convnextv2-atto-1k-224", ConvNextV2Config, _convnext_sizes(40, (2, 2, 6, 2))
    ),
    "convnextv2-tiny-1k-224": Preset("facebook/convnextv2-tiny-1k-224", ConvNextV2Config),
    "convnextv2-base-1k-224": Preset(
        "facebook/convnextv2-base-1k-224", ConvNextV2Config, _convnext_sizes(128, (3, 3, 27, 3))
    ),
    "swin-tiny-patch4-window7-224": Preset("microsoft/swin-tiny-patch4-window7-224", SwinConfig),
}

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

# -- the tower


def image_tower(name: str, image_size: int) -> Tower:
    """The tower of `name` = hf:WHERE[:key=value,...] for images of `image_size` pixels a side; it
    has no head yet.

    WHERE: a preset, a local folder with a config.json, or a Hugging Face id, of an image model or
    of a model of images and texts that holds one. Without `pool` its features are the library's
    pooled output. Errors: ValueError, FileNotFoundError.
    """
    base, overrides = split_name(name)
    config, hub_id = _find(base)
    family = _family(name, config)
    values = parse_overrides(name, overrides, {**family.keys, "pool": str})
    pools = pools_of(family, config)
    pool = values.pop("pool", pools[0])
    if pool not in pools:
        raise refuse(f"image tower {name!r}: pool", pool, pools)
    values = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    if hasattr(config, "image_size"):  # SigLIP 2 takes images of any size
        values["image_size"] = image_size
    if pool != "head" and "head" in family.pools:  # a key that older configurations do not declare
        values["vision_use_head"] = False
    if hasattr(config, "use_mask_token"):  # of pretraining; it would wait for a gradient
        values["use_mask_token"] = False
    config = _remade(config, values)
    _check(name, config, image_size)
    with torch.device("meta"):
        model = family.model(config)
        layers = family.layers(model, pool, image_size)
    specs = cut(
        "image",
        model,
        layers,
        initialise=partial(initialise, model=model),
        dropped=family.unused(pool),
        state=saved_state(model),
    )
    record = {
        "library": "transformers",
        "architecture": family.model.__name__,
        "pool": pool,
        "image_size": image_size,
        **({"patch_size": config.patch_size} if _has_patches(layers) else {}),
        "hub_id": hub_id,
        "config": config.to_dict(),
    }
    return Tower("image", name, _width(config, pool), specs, record)


def pools_of(family: Family, config: PreTrainedConfig) -> tuple[str, ...]:
    """What the features can be pooled by, the library's own first."""
    if getattr(config, "vision_use_head", True):
        return family.pools
    return tuple(pool for pool in family.pools if pool != "head")


def of_library(base: str) -> tuple[tuple[str, ...], str | None]:
    """The pools of the tower that `base` names (the name without its overrides), the library's own
    first, and its id on the hub if there is one."""
    config, hub_id = _find(base)
    return pools_of(_family(base, config), config), hub_id


def hub_id_of(name: str) -> str | None:
    """The id on the hub of a preset that is named in any of its ways; None: it is no preset."""
    known = preset_of(name.removeprefix(HF), PRESETS, ALIASES)
    return PRESETS[known].hub_id if known else None


def _find(base: str) -> tuple[PreTrainedConfig, str | None]:
    return find_config(
        f"image tower {HF}",
        base.removeprefix(HF),
        "vision_config",
        presets=PRESETS,
        aliases=ALIASES,
        example="openai/clip-vit-base-patch32",
    )


def _family(name: str, config: PreTrainedConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"image tower {name!r} is of type {config.model_type!r}; supported types: "
            f"{', '.join(sorted(FAMILIES))}, and models of images and texts that hold one of them"
        )
    return FAMILIES[config.model_type]


_BACKBONE = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices")


def _remade(config: PreTrainedConfig, values: Mapping[str, object]) -> PreTrainedConfig:
    """With other `values`, and with what the configuration works out of them when it is made."""
    derived = {*_BACKBONE, "num_stages"} if hasattr(config, "num_stages") else {*_BACKBONE}
    if config.model_type == "swin":
        derived |= {"hidden_size", "num_layers"}
    if "hidden_size" in values:
        derived.add("pooler_output_size")
    given = {key: value for key, value in config.to_dict().items() if key not in derived}
    given |= values
    if hasattr(config, "num_stages"):
        given["num_stages"] = len(given["depths"])
    return type(config).from_dict(given)


def _has_patches(layers: Named) -> bool:
    """Whether its tokens are patches, of which some may be left out."""
    return isinstance(layers[0][1], PatchEmbeddings)


def _width(config: PreTrainedConfig, pool: str) -> int:
    if pool == "pooler":
        return config.pooler_output_size or config.hidden_size
    return config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size


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
