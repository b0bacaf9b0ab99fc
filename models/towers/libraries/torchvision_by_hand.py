"""torchvision's ResNet, ViT and ConvNeXt without their classifiers, cut into layers by hand: with
more keys and poolings than others, a ViT for images of other sizes and with patches left out, and
first values that need no whole model.

B micro-batch, H, W height and width, N patches + 1 (class token), D width.
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

from models.towers.attention import with_self_attention
from models.towers.layers import Layer, Tower, cut, reset
from models.towers.libraries.layers import Block, Named, PatchStart, PlacePool, Pool, Start
from models.towers.names import parse_overrides, refuse, split_name
from models.towers.pooling import AttentionPool, pooling
from models.towers.tracing.precision import with_exact_statistics


class ViTStart(PatchStart):
    """Patches, class token, positions, and the dropout behind them.

    Images of another size than the one it was made for get positions interpolated between the
    learned ones (bicubic, as Dosovitskiy et al. 2021, section 3.2, propose for higher resolutions).
    """

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__(model.conv_proj, prefix=1, norm=model.encoder.dropout)
        self.image_size, self.patch_size = model.image_size, model.patch_size
        self.class_token, self.pos_embedding = model.class_token, model.encoder.pos_embedding

    def embedded(self, given: Tensor) -> Tensor:
        if any(side % self.patch_size for side in given.shape[-2:]):
            raise ValueError(
                f"pixel_values are {tuple(given.shape[-2:])} but this ViT reads patches of "
                f"{self.patch_size}x{self.patch_size}; both sides must be multiples of that"
            )
        patches = self.embeddings(given)  # [B, D, H/patch, W/patch]
        positions = self.positions(*patches.shape[-2:])
        patches = patches.flatten(2).permute(0, 2, 1)  # [B, N-1, D]
        first = self.class_token.expand(patches.shape[0], -1, -1)
        return torch.cat([first, patches], dim=1) + positions

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
    pools = (*(("cls",) if isinstance(sizes, ViTSizes) else ()), "avg", "max", "attention")
    pool = values.pop("pool", pools[0])  # the library's own first
    if pool not in pools:
        raise refuse(f"image tower {name!r}: pool", pool, pools)
    sizes = replace(sizes, **values)
    _check(name, sizes, image_size)
    with torch.device("meta"):
        model = with_self_attention(with_exact_statistics(library_model(sizes, image_size)))
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
        values = asdict(sizes)
        block = Bottleneck if values.pop("bottleneck") else BasicBlock
        return ResNet(block, **{**values, "layers": list(sizes.layers)})
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

# layers, how the names of dropped tensors begin, what initialises a layer, width
Cut = tuple[Named, tuple[str, ...], Callable[[Layer], None], int]


def _cut_resnet(model: ResNet, sizes: ResNetSizes, pool: str) -> Cut:
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    layers: Named = [("stem", Start("image", stem))]
    for group in ("layer1", "layer2", "layer3", "layer4"):
        blocks = getattr(model, group)
        layers += [(f"{group}.{i}", Block("image", block)) for i, block in enumerate(blocks)]
    width = model.fc.in_features
    layers.append(("pool", _pool_of_map(pool, model.avgpool, width)))
    return layers, ("fc.",), partial(_initialise_resnet, sizes=sizes), width


def _cut_vit(model: VisionTransformer, sizes: ViTSizes, pool: str) -> Cut:
    own = pooling(pool, sizes.hidden_dim)
    skipped = 1 if pool in ("avg", "max") else 0
    layers: Named = [
        ("stem", ViTStart(model)),
        *(
            (f"encoder.layers.{name}", Block("image", block))
            for name, block in model.encoder.layers.named_children()
        ),
        ("pool", Pool("image", own, norm=model.encoder.ln, skipped=skipped)),
    ]
    return layers, ("heads.",), _initialise_vit, sizes.hidden_dim


def _cut_convnext(model: ConvNeXt, sizes: ConvNeXtSizes, pool: str) -> Cut:
    layers: Named = [("stem", Start("image", model.features[0]))]
    for i, part in enumerate(model.features[1:], start=1):
        if isinstance(part[0], CNBlock):
            layers += [(f"features.{i}.{j}", Block("image", block)) for j, block in enumerate(part)]
        else:  # between groups: norm and downsampling
            layers.append((f"features.{i}", Block("image", part)))
    width = sizes.dims[-1]
    layers.append(("pool", _pool_of_map(pool, model.avgpool, width, model.classifier[0])))
    return layers, ("classifier.2.",), partial(_initialise_convnext, sizes=sizes), width


def _pool_of_map(
    pool: str, avgpool: nn.Module, width: int, norm: nn.LayerNorm | None = None
) -> Layer:
    """The last layer of a tower whose `image_hidden` are maps. `norm`: of a map."""
    if pool == "attention":
        of_tokens = None
        if norm is not None:
            of_tokens = nn.LayerNorm(width, norm.eps)
            of_tokens.weight, of_tokens.bias = norm.weight, norm.bias
        return Pool("image", AttentionPool(width), norm=of_tokens)
    behind = [nn.Flatten()] if norm is None else [norm, nn.Flatten()]
    own = nn.AdaptiveMaxPool2d(1) if pool == "max" else avgpool
    return PlacePool("image", own, behind=nn.Sequential(*behind))


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
    if isinstance(layer, ViTStart):
        conv = layer.embeddings
        fan_in = conv.in_channels * math.prod(conv.kernel_size)
        nn.init.trunc_normal_(conv.weight, std=math.sqrt(1 / fan_in))
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
    if layer.added:  # an attention pool, which torchvision has none of
        return
    for module in layer.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, CNBlock):
            nn.init.constant_(module.layer_scale, sizes.layer_scale)
