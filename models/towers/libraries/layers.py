"""The layers that image and audio towers are cut into by hand.

B micro-batch, C channels, H, W height and width, N tokens, D width.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from models.towers.layers import Layer
from models.towers.patches import kept_tokens
from models.towers.pooling import ADDED, AttentionPool

Named = list[tuple[str, Layer]]
INPUTS = {"image": "pixel_values", "audio": "input_features"}


class Start(Layer):
    """Pixels or a spectrogram -> `{branch}_hidden`: `embeddings`, and the `norm` behind them, if
    there is one."""

    def __init__(self, branch: str, embeddings: Any, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.reads = self.drops = (INPUTS[branch],)
        self.makes = (f"{branch}_hidden",)
        self.embeddings, self.norm = embeddings, nn.Identity() if norm is None else norm

    def compute(self, given: Tensor) -> Tensor:
        return self.norm(self.embedded(given.to(next(self.embeddings.parameters()).dtype)))

    def embedded(self, given: Tensor) -> Tensor:
        return self.embeddings(given)


class PatchStart(Start):
    """`pixel_values` [B, 3, H, W] -> `image_hidden` [B, N, D], of which the first `prefix` tokens
    are none of patches (class token, registers).

    Where `kept_patches` [B, K] numbers some of an image's patches, row by row from 0, the others
    are left out: N = `prefix` + K.
    """

    reads_if_given = ("kept_patches",)

    def __init__(self, embeddings: Any, prefix: int, norm: nn.Module | None = None) -> None:
        super().__init__("image", embeddings, norm)
        self.drops, self.prefix = (*self.reads, "kept_patches"), prefix

    def compute(self, pixel_values: Tensor, kept_patches: Tensor | None = None) -> Tensor:
        tokens = self.embedded(pixel_values.to(next(self.embeddings.parameters()).dtype))
        if kept_patches is not None:
            tokens = kept_tokens(tokens, kept_patches, self.prefix)
        return self.norm(tokens)


class Block(Layer):
    """`{branch}_hidden` -> `{branch}_hidden`: one block of the library as it is, or what lies
    between two groups of them. `more`: what it is called with."""

    def __init__(self, branch: str, block: nn.Module, **more: Any) -> None:
        super().__init__()
        self.reads = self.makes = (f"{branch}_hidden",)
        self.block, self.more = block, more
        if takes(block, "attention_mask"):  # nothing is masked
            self.more = {**more, "attention_mask": None}

    def compute(self, hidden: Tensor) -> Tensor:
        made = self.block(hidden, **self.more)
        return made if isinstance(made, Tensor) else made[0]


class Pool(Layer):
    """`{branch}_hidden`, tokens or a map, -> `{branch}_features` [B, D]: `norm`, `pool` and
    `behind`, in this order; `skipped`: tokens at the beginning that are not pooled."""

    def __init__(
        self,
        branch: str,
        pool: nn.Module,
        norm: nn.Module | None = None,
        behind: nn.Module | None = None,
        skipped: int = 0,
    ) -> None:
        super().__init__()
        self.reads = self.drops = (f"{branch}_hidden",)
        self.makes = (f"{branch}_features",)
        self.norm = nn.Identity() if norm is None else norm
        self.pool, self.skipped = pool, skipped
        self.behind = nn.Identity() if behind is None else behind
        self.added = ADDED if isinstance(pool, AttentionPool) else None

    def compute(self, hidden: Tensor) -> Tensor:
        tokens = self.norm(hidden if hidden.dim() == 3 else tokens_of(hidden))
        return self.behind(self.pool(tokens[:, self.skipped :]))


class PlacePool(Pool):
    """`image_hidden` [B, C, H, W] -> `image_features` [B, C]: `pool` makes one place of the map,
    and `behind` features of that."""

    def compute(self, hidden: Tensor) -> Tensor:
        return self.behind(self.pool(hidden))


def tokens_of(maps: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, HW, C]."""
    return maps.flatten(2).transpose(1, 2)


def takes(module: nn.Module, name: str) -> bool:
    """Has its forward such a parameter?"""
    return name in inspect.signature(module.forward).parameters
