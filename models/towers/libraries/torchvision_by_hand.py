"""torchvision's ResNet, ViT and ConvNeXt without their classifiers, cut into layers by hand: with
more keys and poolings than others, and with first values that need no whole model.

B micro-batch, C channels, H, W height and width, N patches + 1 (class token), D width.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.convnext import CNBlock, CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vision_transformer import MLPBlock, VisionTransformer

from models.towers.layers import Layer, Tower, cut, reset
from models.towers.names import parse_overrides, refuse, split_name
from models.towers.pooling import ADDED, AttentionPool, FirstPool, MaxPool, MeanPool

# -- layers


class BatchNorm2d(nn.BatchNorm2d):
    """torchvision's, but with its statistics and affine in fp32 also where the engine keeps
    parameters in bf16 or fp16.

    Half-precision running statistics would lose their small updates, and no kernel takes
    half-precision weights beside fp32 statistics. In fp32 it is the library's own forward.
    """

    momentum: float  # a fixed one
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            return super().forward(x)
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return F.batch_norm(
            x,
            *statistics,
            self.weight.float(),
            self.bias.float(),
            self.training,
            self.momentum,
            self.eps,
        )


class ResNetStem(Layer):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, 64, H/4, W/4]."""

    reads, makes, drops = ("pixel_values",), ("image_hidden",), ("pixel_values",)

    def __init__(self, model: ResNet) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool = (
            model.conv1,
            model.bn1,
            model.relu,
            model.maxpool,
        )

    def compute(self, pixel_values: Tensor) -> Tensor:
        pixel_values = pixel_values.to(self.conv1.weight.dtype)
        return self.maxpool(self.relu(self.bn1(self.conv1(pixel_values))))


class ViTStem(Layer):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, N, D]: patches, class token, positions,
    dropout.

    Images of another size than the one it was made for get positions interpolated between the
    learned ones (bicubic, as Dosovitskiy et al. 2021, section 3.2, propose for higher resolutions).
    Where `kept_patches` [B, K] numbers some of an image's patches, row by row from 0, the others
    are left out (FLIP: Li et al. 2023): N = K + 1.
    """

    reads, makes, drops, reads_if_given = (
        ("pixel_values",),
        ("image_hidden",),
        ("pixel_values", "kept_patches"),
        ("kept_patches",),
    )

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.image_size, self.patch_size = model.image_size, model.patch_size
        self.conv_proj, self.class_token = model.conv_proj, model.class_token
        self.pos_embedding, self.dropout = model.encoder.pos_embedding, model.encoder.dropout

    def compute(self, pixel_values: Tensor, kept_patches: Tensor | None = None) -> Tensor:
        if any(side % self.patch_size for side in pixel_values.shape[-2:]):
            raise ValueError(
                f"pixel_values are {tuple(pixel_values.shape[-2:])} but this ViT reads patches of "
                f"{self.patch_size}x{self.patch_size}; both sides must be multiples of that"
            )
        patches = self.conv_proj(
            pixel_values.to(self.conv_proj.weight.dtype)
        )  # [B, D, H/patch, W/patch]
        positions = self.positions(*patches.shape[-2:])
        patches = patches.flatten(2).permute(0, 2, 1)  # [B, N-1, D]
        tokens = (
            torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
            + positions
        )
        if kept_patches is not None:
            kept = F.pad(kept_patches + 1, (1, 0))  # [B, N], the class token first
            tokens = tokens.gather(1, kept[:, :, None].expand(-1, -1, tokens.shape[2]))
        return self.dropout(tokens)  # [B, N, D]

    def positions(self, rows: int, columns: int) -> Tensor:
        """[1, 1 + rows * columns, D]."""
        side = self.image_size // self.patch_size
        if (rows, columns) == (side, side):
            return self.pos_embedding
        of_class, of_patches = self.pos_embedding[:, :1], self.pos_embedding[:, 1:]
        grid = of_patches.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # [1, D, side, side]
        grid = F.interpolate(grid.float(), (rows, columns), mode="bicubic", antialias=True).to(
            of_patches.dtype
        )
        return torch.cat([of_class, grid.flatten(2).permute(0, 2, 1)], dim=1)


class ConvNeXtStem(Layer):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, C, H/4, W/4]."""

    reads, makes, drops = ("pixel_values",), ("image_hidden",), ("pixel_values",)

    def __init__(self, patchify: nn.Module) -> None:
        super().__init__()
        self.patchify = patchify

    def compute(self, pixel_values: Tensor) -> Tensor:
        return self.patchify(pixel_values.to(next(self.patchify.parameters()).dtype))


class ImageBlock(Layer):
    """`image_hidden` -> `image_hidden`: one block of the library, as it is."""

    reads = makes = ("image_hidden",)

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def compute(self, image_hidden: Tensor) -> Tensor:
        return self.block(image_hidden)


class ConvPool(Layer):
    """`image_hidden` [B, C, H, W] -> `image_features` [B, C]: `pool` of the map [B, C, H, W] -> [B,
    C, 1, 1], then the norm if there is one."""

    reads, makes, drops = ("image_hidden",), ("image_features",), ("image_hidden",)

    def __init__(self, pool: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.pool, self.norm = pool, nn.Identity() if norm is None else norm

    def compute(self, image_hidden: Tensor) -> Tensor:
        return torch.flatten(self.norm(self.pool(image_hidden)), 1)


class ConvAttentionPool(Layer):
    """`image_hidden` [B, C, H, W] -> `image_features` [B, C]: the norm if there is one, then
    attention over all places."""

    reads, makes, drops, added = ("image_hidden",), ("image_features",), ("image_hidden",), ADDED

    def __init__(self, channels: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.pool, self.norm = AttentionPool(channels), nn.Identity() if norm is None else norm

    def compute(self, image_hidden: Tensor) -> Tensor:
        return self.pool(self.norm(image_hidden).flatten(2).transpose(1, 2))


class ViTPool(Layer):
    """`image_hidden` [B, N, D] -> `image_features` [B, D]: final norm, then `pool`; without the
    class token where `of_patches`."""

    reads, makes, drops = ("image_hidden",), ("image_features",), ("image_hidden",)

    def __init__(self, norm: nn.Module, pool: nn.Module, of_patches: bool) -> None:
        super().__init__()
        self.norm, self.pool, self.of_patches = norm, pool, of_patches
        self.added = ADDED if isinstance(pool, AttentionPool) else None

    def compute(self, image_hidden: Tensor) -> Tensor:
        tokens = self.norm(image_hidden)
        return self.pool(tokens[:, 1:] if self.of_patches else tokens)


# -- architectures


@dataclass(frozen=True)
class ResNetSizes:
    """torchvision's ResNet (He et al. 2015); `layers`: blocks in each of the 4 groups."""

    bottleneck: bool
    layers: tuple[int, ...]
    width_per_group: int = 64
    groups: int = 1
    zero_init_residual: bool = False


@dataclass(frozen=True)
class ViTSizes:
    """torchvision's VisionTransformer (Dosovitskiy et al. 2020)."""

    patch_size: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    mlp_dim: int
    dropout: float = 0.0
    attention_dropout: float = 0.0


@dataclass(frozen=True)
class ConvNeXtSizes:
    """torchvision's ConvNeXt (Liu et al. 2022); `dims` and `depths`: channels and blocks of each
    group."""

    dims: tuple[int, ...]
    depths: tuple[int, ...]
    stochastic_depth_prob: float
    layer_scale: float = 1e-6


Sizes = ResNetSizes | ViTSizes | ConvNeXtSizes

ARCHITECTURES: dict[str, Sizes] = {
    "resnet18": ResNetSizes(False, (2, 2, 2, 2)),
    "resnet34": ResNetSizes(False, (3, 4, 6, 3)),
    "resnet50": ResNetSizes(True, (3, 4, 6, 3)),
    "resnet101": ResNetSizes(True, (3, 4, 23, 3)),
    "resnet152": ResNetSizes(True, (3, 8, 36, 3)),
    "vit_b_16": ViTSizes(16, 12, 12, 768, 3072),
    "vit_b_32": ViTSizes(32, 12, 12, 768, 3072),
    "vit_l_16": ViTSizes(16, 24, 16, 1024, 4096),
    "convnext_tiny": ConvNeXtSizes((96, 192, 384, 768), (3, 3, 9, 3), 0.1),
    "convnext_small": ConvNeXtSizes((96, 192, 384, 768), (3, 3, 27, 3), 0.4),
    "convnext_base": ConvNeXtSizes((128, 256, 512, 1024), (3, 3, 27, 3), 0.5),
    "convnext_large": ConvNeXtSizes((192, 384, 768, 1536), (3, 3, 27, 3), 0.5),
}

POOLS: dict[type, tuple[str, ...]] = {  # the library's own first
    ResNetSizes: ("avg", "max", "attention"),
    ViTSizes: ("cls", "avg", "max", "attention"),
    ConvNeXtSizes: ("avg", "max", "attention"),
}


def image_tower(name: str, image_size: int) -> Tower:
    """The tower of `name` = ARCHITECTURE[:key=value,...] for images of `image_size` pixels a side;
    it has no head yet.

    Without `pool` its features are the library model's output with the last classifier linear
    replaced by the identity.
    """
    base, overrides = split_name(name)
    sizes = ARCHITECTURES[base]
    kinds = {key: type(value) for key, value in asdict(sizes).items() if key != "bottleneck"}
    values = parse_overrides(name, overrides, {**kinds, "pool": str})
    pools = POOLS[type(sizes)]
    pool = values.pop("pool", pools[0])
    if pool not in pools:
        raise refuse(f"image tower {name!r}: pool", pool, pools)
    sizes = replace(sizes, **values)
    _check(name, sizes, image_size)
    with torch.device("meta"):
        model = library_model(sizes, image_size)
        layers, dropped, initialise, width = _CUTS[type(sizes)](model, sizes, pool)
    config: dict[str, Any] = {
        "library": "torchvision",
        "architecture": base,
        "pool": pool,
        "image_size": image_size,
        **asdict(sizes),
    }
    return Tower("image", name, width, cut("image", model, layers, initialise, dropped), config)


def library_model(sizes: Sizes, image_size: int) -> nn.Module:
    """The library's whole model, classifier included, on the ambient device."""
    if isinstance(sizes, ResNetSizes):
        return ResNet(
            Bottleneck if sizes.bottleneck else BasicBlock,
            list(sizes.layers),
            width_per_group=sizes.width_per_group,
            groups=sizes.groups,
            zero_init_residual=sizes.zero_init_residual,
            norm_layer=BatchNorm2d,
        )
    if isinstance(sizes, ViTSizes):
        return VisionTransformer(image_size=image_size, **asdict(sizes))
    outputs = [*sizes.dims[1:], None]
    blocks = [
        CNBlockConfig(*setting) for setting in zip(sizes.dims, outputs, sizes.depths, strict=True)
    ]
    return ConvNeXt(blocks, sizes.stochastic_depth_prob, sizes.layer_scale)


def _check(name: str, sizes: Sizes, image_size: int) -> None:
    if isinstance(sizes, ViTSizes):
        if sizes.patch_size < 1 or image_size < 1 or image_size % sizes.patch_size:
            raise ValueError(
                f"tower {name!r}: image_size={image_size} must be a multiple of "
                f"patch_size={sizes.patch_size}"
            )
        if sizes.num_heads < 1 or sizes.hidden_dim % sizes.num_heads:
            raise ValueError(
                f"tower {name!r}: hidden_dim={sizes.hidden_dim} must be a multiple of "
                f"num_heads={sizes.num_heads}"
            )
        return
    if image_size < 32:
        raise ValueError(
            f"tower {name!r}: image_size={image_size} must be at least 32, for it is divided by 2 "
            "five times"
        )
    if isinstance(sizes, ResNetSizes):
        if len(sizes.layers) != 4 or min(sizes.layers) < 1:
            raise ValueError(
                f"tower {name!r}: layers={'-'.join(map(str, sizes.layers))} must be 4 positive "
                "integers"
            )
        if not sizes.bottleneck and (sizes.groups, sizes.width_per_group) != (1, 64):
            raise ValueError(
                f"tower {name!r}: groups and width_per_group can differ from 1 and 64 in resnet50, "
                "101 and 152 only"
            )
    elif (
        len(sizes.dims) != len(sizes.depths)
        or min(sizes.dims + sizes.depths) < 1
        or sum(sizes.depths) < 2
    ):
        raise ValueError(
            f"tower {name!r}: dims and depths must be equally many positive integers, with two "
            f"blocks or more, not {sizes.dims} and {sizes.depths}"
        )


# -- where each library model is cut

Cut = tuple[
    list[tuple[str, Layer]], tuple[str, ...], Callable[[Layer], None], int
]  # layers, dropped names, initialise, width


def _cut_resnet(model: ResNet, sizes: ResNetSizes, pool: str) -> Cut:
    layers: list[tuple[str, Layer]] = [("stem", ResNetStem(model))]
    for group in ("layer1", "layer2", "layer3", "layer4"):
        layers += [
            (f"{group}.{i}", ImageBlock(block)) for i, block in enumerate(getattr(model, group))
        ]
    width = model.fc.in_features
    layers.append(("pool", _pool_map(pool, model.avgpool, width)))
    return layers, ("fc.",), partial(_initialise_resnet, sizes=sizes), width


def _cut_vit(model: VisionTransformer, sizes: ViTSizes, pool: str) -> Cut:
    layers: list[tuple[str, Layer]] = [("stem", ViTStem(model))]
    layers += [
        (f"encoder.layers.{name}", ImageBlock(block))
        for name, block in model.encoder.layers.named_children()
    ]
    modules: dict[str, Callable[[], nn.Module]] = {
        "cls": FirstPool,
        "avg": MeanPool,
        "max": MaxPool,
        "attention": partial(AttentionPool, sizes.hidden_dim),
    }
    layers.append(
        ("pool", ViTPool(model.encoder.ln, modules[pool](), of_patches=pool in ("avg", "max")))
    )
    return layers, ("heads.",), _initialise_vit, sizes.hidden_dim


def _cut_convnext(model: ConvNeXt, sizes: ConvNeXtSizes, pool: str) -> Cut:
    layers: list[tuple[str, Layer]] = [("stem", ConvNeXtStem(model.features[0]))]
    for i, part in enumerate(model.features[1:], start=1):
        if isinstance(part[0], CNBlock):
            layers += [(f"features.{i}.{j}", ImageBlock(block)) for j, block in enumerate(part)]
        else:
            layers.append(
                (f"features.{i}", ImageBlock(part))
            )  # between groups: norm and downsampling
    layers.append(("pool", _pool_map(pool, model.avgpool, sizes.dims[-1], model.classifier[0])))
    return layers, ("classifier.2.",), partial(_initialise_convnext, sizes=sizes), sizes.dims[-1]


def _pool_map(pool: str, avgpool: nn.Module, channels: int, norm: nn.Module | None = None) -> Layer:
    """The last layer of a tower whose `image_hidden` are maps."""
    if pool == "attention":
        return ConvAttentionPool(channels, norm)
    return ConvPool(nn.AdaptiveMaxPool2d(1) if pool == "max" else avgpool, norm)


_CUTS: dict[type, Callable[[Any, Any, str], Cut]] = {
    ResNetSizes: _cut_resnet,
    ViTSizes: _cut_vit,
    ConvNeXtSizes: _cut_convnext,
}

# -- the rules of torchvision's constructors, which cannot be applied to a part of a model


def _initialise_resnet(layer: Layer, sizes: ResNetSizes) -> None:
    reset(layer)
    for module in layer.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif sizes.zero_init_residual and isinstance(module, (BasicBlock, Bottleneck)):
            nn.init.zeros_((module.bn3 if isinstance(module, Bottleneck) else module.bn2).weight)


def _initialise_vit(layer: Layer) -> None:
    reset(layer)
    if isinstance(layer, ViTStem):
        conv = layer.conv_proj
        nn.init.trunc_normal_(
            conv.weight, std=math.sqrt(1 / (conv.in_channels * math.prod(conv.kernel_size)))
        )
        nn.init.zeros_(conv.bias)
        nn.init.zeros_(layer.class_token)
        nn.init.normal_(layer.pos_embedding, std=0.02)
    for module in layer.modules():
        if isinstance(module, MLPBlock):
            for linear in (part for part in module if isinstance(part, nn.Linear)):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.normal_(linear.bias, std=1e-6)


def _initialise_convnext(layer: Layer, sizes: ConvNeXtSizes) -> None:
    reset(layer)
    if isinstance(layer, ConvAttentionPool):  # torchvision has none
        return
    for module in layer.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, CNBlock):
            nn.init.constant_(module.layer_scale, sizes.layer_scale)
