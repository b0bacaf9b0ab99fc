"""The heads: pooled features to the embeddings in which images and texts are compared; with fusion,
maps to tokens, and tokens to scores.

B micro-batch, W width of the tower's features, D embedding size; T, L, F as in
`models/towers/fusion.py`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

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
            f"projection {projection!r}: write mlp, or mlp:{HIDDEN_ACT_KEY}=NAME with an "
            "activation of transformers, such as gelu"
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
    flatten parameters mishandle 0-dim ones. `projection`: as `read_projection` takes it; with
    `none` the features are the embeddings, W = D.
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


class ImageTokensHead(Head):
    """The head of images with fusion: also makes `image_tokens` [B, T, F] of the tower's `maps`,
    given by name with their channels; those of one map behind those of the one before."""

    def __init__(self, sizes: FusionSizes, maps: Mapping[str, int], *given: Any) -> None:
        """`given`: as `Head`, behind the branch."""
        super().__init__("image", *given)
        self.reads = self.drops = (*self.reads, *maps)
        self.makes = (*self.makes, "image_tokens")
        self.image_tokens = nn.ModuleList(
            token_projection(channels, sizes.width) for channels in maps.values()
        )
        self._name_parameters()

    def compute(self, features: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        tokens = [project(one) for project, one in zip(self.image_tokens, maps)]
        return *super().compute(features), torch.cat(tokens, 1)


class TextTokensHead(Head):
    """The head of texts with fusion: also makes `text_states` [B, L, W] -> `text_tokens`
    [B, L, F]; `fusion` then scores pairs of tokens, which is asked of it by the loss and not as a
    part of the tower."""

    def __init__(self, sizes: FusionSizes, width: int, *given: Any) -> None:
        """`width`, `given`: as `Head`, behind the branch."""
        super().__init__("text", width, *given)
        self.reads = self.drops = (*self.reads, "text_states")
        self.makes = (*self.makes, "text_tokens")
        self.text_tokens = token_projection(width, sizes.width)
        self.fusion = Fusion(sizes)
        self._name_parameters()

    def compute(self, features: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        return *super().compute(features), self.text_tokens(*states)


# how the canonical names of its tensors begin
FUSION_NAMES = ("head.image_tokens.", "head.text_tokens.", "head.fusion.")


def _embed(projection: nn.Module, features: Tensor) -> Tensor:
    """The projection runs in the module's dtype; the length is made 1 in fp32, where squares do not
    overflow."""
    return F.normalize(projection(features).float(), dim=-1)  # [B, D]


def head(
    branch: str,
    width: int,
    embed_dim: int,
    scalars: Mapping[str, float] | None = None,
    projection: str = "linear",
    fusion: FusionSizes | None = None,
    maps: Mapping[str, int] | None = None,
    make: Callable[..., Head] | None = None,
) -> LayerSpec:
    """The head of a branch, as the last recipe of its tower; it owns the `scalars`. With `fusion`
    it also makes tokens; `maps`: those of the image tower, by name with their channels. `make`:
    what makes another kind of head of the rest."""
    if embed_dim < 1:
        raise ValueError(f"embed_dim={embed_dim} must be at least 1")
    given = (width, embed_dim, scalars, projection)
    with torch.device("meta"):
        made: Head
        if make is not None:
            made = make(*given)
        elif fusion is None:
            made = Head(branch, *given)
        elif maps is not None:
            made = ImageTokensHead(fusion, maps, *given)
        else:
            made = TextTokensHead(fusion, *given)
    return LayerSpec(f"{branch}.head", branch, made, _initialise)


def _initialise(head: Head) -> None:
    """CLIP's rule for projections of one layer (Radford et al. 2021): normal with standard
    deviation width**-0.5. Scalars as the loss says; torch's own rules for projections of two
    layers, as LAION-CLAP, and for what fusion adds."""
    for name, module in head.named_children():
        if name == head.projection_name and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        else:
            reset(module)
    for name, value in head.scalars.items():
        nn.init.constant_(head.get_parameter(name), value)
