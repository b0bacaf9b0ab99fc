"""The heads: pooled features to the embeddings in which images and texts are compared; with fusion,
maps to tokens, and tokens to scores.

B micro-batch, W width of the tower's features, D embedding size; T, L, F as in
`models/towers/fusion.py`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from models.towers.fusion import Fusion, FusionSizes, token_projection
from models.towers.layers import Layer, LayerSpec, reset
from models.towers.names import refuse

PROJECTIONS = ("linear", "mlp", "none")
"""From a tower's features to the embeddings: a matrix without a bias (CLIP); two layers with biases
and an activation between them, ReLU unless `mlp:hidden_act=NAME` says another one (CLAP); nothing
(SigLIP)."""
HIDDEN_ACT_KEY, HIDDEN_ACT = "hidden_act", "relu"


def read_projection(projection: str) -> tuple[str, str]:
    """(one of `PROJECTIONS`, the name of its activation, "" where it has none). Errors: ValueError
    for what is written otherwise."""
    base, colon, rest = projection.partition(":")
    if base not in PROJECTIONS:
        raise refuse("projection", base, PROJECTIONS)
    if base != "mlp":
        if colon:
            raise ValueError(
                f"projection {projection!r}: {base} has no activation; leave out {':' + rest!r}"
            )
        return base, ""
    key, _, activation = (rest if colon else f"{HIDDEN_ACT_KEY}={HIDDEN_ACT}").partition("=")
    if key != HIDDEN_ACT_KEY:
        raise ValueError(
            f"projection {projection!r}: write mlp, or mlp:{HIDDEN_ACT_KEY}=NAME with an activation "
            "of transformers, such as gelu"
        )
    if activation not in ACT2FN or list(ACT2FN[activation].parameters()):
        plain = [name for name in ACT2FN if not list(ACT2FN[name].parameters())]
        raise refuse(f"projection {projection!r}: activation", activation, plain)
    return base, activation


def projection_module(projection: str, width: int, embed_dim: int) -> nn.Module:
    """[B, W] -> [B, D]. The layers of `mlp` are called as in transformers' ClapProjectionLayer."""
    base, activation = read_projection(projection)
    if base == "none":
        return nn.Identity()
    if base == "linear":
        return nn.Linear(width, embed_dim, bias=False)
    return nn.Sequential(
        OrderedDict(
            linear1=nn.Linear(width, embed_dim),
            activation=ACT2FN[activation],
            linear2=nn.Linear(embed_dim, embed_dim),
        )
    )


class Head(Layer):
    """Of any branch, here of images: `image_features` [B, W] -> `image_embeds` [B, D] fp32 of
    length 1, and the scalars that losses learn, each [1] fp32.

    `scalars`: names and first values of those that the branch owns (`engine/objective.py`). They
    live here so that exactly one layer owns them. They have one dimension because optimizers that
    flatten parameters mishandle 0-dim ones. `projection`: as `read_projection` takes it; with `none`
    the features are the embeddings, W = D.
    """

    def __init__(
        self,
        branch: str,
        width: int,
        embed_dim: int,
        scalars: Mapping[str, float] | None = None,
        projection: str = "linear",
    ) -> None:
        super().__init__()
        self.scalars = dict(scalars or {})
        self.reads = self.drops = (f"{branch}_features",)
        self.makes = (f"{branch}_embeds", *self.scalars)
        self.projection_name = f"{branch}_projection"
        self.add_module(
            self.projection_name,
            projection_module(projection, width, embed_dim),
        )
        for name in self.scalars:
            self.register_parameter(name, nn.Parameter(torch.empty(1)))
        self._name_parameters()

    def _name_parameters(self) -> None:
        self.canonical_names = {name: f"head.{name}" for name in self.state_dict()}

    def compute(self, features: Tensor) -> tuple[Tensor, ...]:
        # * 1: what travels is a result with a gradient, never the parameter itself
        scalars = (getattr(self, name).float() * 1 for name in self.scalars)
        return _embed(self.get_submodule(self.projection_name), features), *scalars


class ImageHead(Head):
    """The head of images, which with fusion also makes tokens.

    `maps`: names and channels of the tower's maps, for `image_tokens` [B, T, F], those of one map
    behind those of the one before; none: there is no fusion.
    """

    def __init__(
        self,
        width: int,
        embed_dim: int,
        scalars: Mapping[str, float],
        maps: Mapping[str, int] | None = None,
        token_width: int = 0,
        projection: str = "linear",
    ):
        super().__init__("image", width, embed_dim, scalars, projection)
        if maps:
            self.reads = self.drops = (*self.reads, *maps)
            self.makes = (*self.makes, "image_tokens")
        self.image_tokens = nn.ModuleList(
            token_projection(channels, token_width) for channels in (maps or {}).values()
        )
        self._name_parameters()

    def compute(self, image_features: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        tokens = [project(one) for project, one in zip(self.image_tokens, maps)]
        return *super().compute(image_features), *([torch.cat(tokens, 1)] if tokens else [])


class TextHead(Head):
    """The head of texts. With `sizes` of a fusion it also makes `text_states` [B, L, W] ->
    `text_tokens` [B, L, F]; `fusion` then scores pairs of tokens, which is asked of it by the loss
    and not as a part of the tower.
    """

    def __init__(
        self,
        width: int,
        embed_dim: int,
        scalars: Mapping[str, float] | None = None,
        sizes: FusionSizes | None = None,
        projection: str = "linear",
    ) -> None:
        super().__init__("text", width, embed_dim, scalars, projection)
        if sizes:
            self.reads = self.drops = (*self.reads, "text_states")
            self.makes = (*self.makes, "text_tokens")
        self.text_tokens = token_projection(width, sizes.width) if sizes else None
        self.fusion = Fusion(sizes) if sizes else None
        self._name_parameters()

    def compute(self, text_features: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        tokens = [] if self.text_tokens is None else [self.text_tokens(*states)]
        return *super().compute(text_features), *tokens


FUSION_NAMES = (
    "head.image_tokens.",
    "head.text_tokens.",
    "head.fusion.",
)  # how the canonical names of its tensors begin


def _embed(projection: nn.Module, features: Tensor) -> Tensor:
    """The projection runs in the module's dtype; the length is made 1 in fp32, where squares do not
    overflow."""
    return F.normalize(projection(features).float(), dim=-1)  # [B, D]


def image_head(
    width: int,
    embed_dim: int,
    scalars: Mapping[str, float],
    maps: Mapping[str, int] | None = None,
    token_width: int = 0,
    projection: str = "linear",
) -> LayerSpec:
    """The head of the image branch, as the last recipe of its tower; it owns the `scalars`."""
    return _spec(
        "image",
        embed_dim,
        lambda: ImageHead(
            width=width,
            embed_dim=embed_dim,
            scalars=scalars,
            maps=maps,
            token_width=token_width,
            projection=projection,
        ),
    )


def text_head(
    width: int,
    embed_dim: int,
    sizes: FusionSizes | None = None,
    scalars: Mapping[str, float] | None = None,
    projection: str = "linear",
) -> LayerSpec:
    """The head of the text branch, as the last recipe of its tower; it owns the `scalars`."""
    return _spec("text", embed_dim, lambda: TextHead(width, embed_dim, scalars, sizes, projection))


def head(
    branch: str,
    width: int,
    embed_dim: int,
    scalars: Mapping[str, float] | None = None,
    projection: str = "linear",
) -> LayerSpec:
    """The head of any other branch, as the last recipe of its tower; it owns the `scalars`."""
    return _spec(branch, embed_dim, lambda: Head(branch, width, embed_dim, scalars, projection))


def _spec(branch: str, embed_dim: int, make: Callable[[], Head]) -> LayerSpec:
    if embed_dim < 1:
        raise ValueError(f"embed_dim={embed_dim} must be at least 1")
    with torch.device("meta"):
        return LayerSpec(f"{branch}.head", branch, make(), _initialise)


def _initialise(head: Head) -> None:
    """CLIP's rule for projections of one layer (Radford et al. 2021): normal with standard deviation
    width**-0.5. Scalars as the loss says; torch's own rules for projections of two layers, as
    LAION-CLAP, and for what fusion adds."""
    for name, module in head.named_children():
        if name == head.projection_name and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        else:
            reset(module)
    for name, value in head.scalars.items():
        nn.init.constant_(head.get_parameter(name), value)
