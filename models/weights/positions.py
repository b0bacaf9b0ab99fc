"""Learned positions for more tokens, or for images of another size, than the weights have; tables
of tokens without the rows that no tokenizer reads.

P positions in the file, W width, V tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.towers.layers import Tower
from models.towers.libraries.transformers_image import FAMILIES
from models.towers.libraries.transformers_text import first_position

KEPT = 20  # Long-CLIP: the positions that CLIP's short captions have trained well

Resize = Callable[[Tensor, tuple[int, ...]], Tensor]
"""From a tensor in the file and the shape in the tower to the tensor of the tower. Raises
ValueError where none can be made of it."""

_TABLES: tuple[str, ...]
_TABLES = ("position_embedding.weight", "position_embeddings.weight", "position_embeddings")
_TABLES += ("encoder.pos_embedding", ".positional_embedding")  # of torchvision, of OpenCLIP
# of tokens, in text towers of transformers
TOKENS = ("word_embeddings.weight", "tok_embeddings.weight", "shared.weight")
ROUNDED_TO, MOST_ROWS = 64, 128  # published ones are rounded up to multiples, by fewer rows


def stretched_positions(weight: Tensor, positions: int, kept: int = KEPT) -> Tensor:
    """[P, W] -> [`positions`, W], more than P: the first `kept` stay, the others are spread over
    the rest by linear interpolation (Long-CLIP, Zhang et al. 2024, section 3.2).

    With r = (P - kept) / (positions - kept), row k >= kept is the old row kept + r (k - kept);
    behind the last old row it goes on by the last difference. Raises ValueError for a table that
    does not become longer, or has fewer than two rows behind `kept`.
    """
    rows = weight.shape[0]
    if positions <= rows or rows < kept + 2:
        raise ValueError(
            f"{rows} positions cannot be stretched to {positions} behind the first {kept}; a "
            f"longer table, and one of at least {kept + 2}, is needed"
        )
    old = kept + torch.arange(positions - kept) * ((rows - kept) / (positions - kept))
    below = old.long().clamp(max=rows - 2)
    share = (old - below)[:, None].to(weight.device)
    below = below.to(weight.device)
    return torch.cat([weight[:kept], torch.lerp(weight[below], weight[below + 1], share)])


def resized_positions(
    weight: Tensor, positions: int, prefix: int, antialias: bool = False
) -> Tensor:
    """[P, W] or [1, P, W] -> the same with `positions` rows: those of a square of patches, row by
    row, behind `prefix` rows for other tokens, which stay.

    Bicubic, in fp32, as transformers' `interpolate_pos_encoding` for images of other sizes; DINOv2
    with registers also has `antialias`. Raises ValueError where the patches are no square.
    """
    table = weight.float().reshape(-1, weight.shape[-1])
    sides = [math.isqrt(max(rows - prefix, 0)) for rows in (table.shape[0], positions)]
    for rows, side in zip((table.shape[0], positions), sides):
        if side < 1 or rows != prefix + side * side:
            raise ValueError(
                f"{rows} positions, {prefix} of which are of no patch: the others must be as many "
                "as the patches of a square image"
            )
    grid = table[prefix:].unflatten(0, (sides[0], sides[0])).permute(2, 0, 1)[None]
    grid = F.interpolate(
        grid, (sides[1], sides[1]), mode="bicubic", align_corners=False, antialias=antialias
    )
    made = torch.cat([table[:prefix], grid[0].permute(1, 2, 0).flatten(0, 1)])
    return made.reshape(*weight.shape[:-2], positions, weight.shape[-1])


def resizers(tower: Tower) -> dict[str, Resize]:
    """By canonical name, for the tensors of a tower that can be made of a file with another number
    of positions. timm's towers have timm for it."""
    makers: dict[tuple[str, str], Callable[[Mapping[str, Any]], Resize | None]] = {
        ("transformers", "text"): _of_texts,
        ("transformers", "image"): _of_images,
        ("torchvision", "image"): lambda config: _behind_class_token,
        ("open_clip", "image"): lambda config: _behind_class_token,
        ("open_clip", "text"): lambda config: _evenly,
    }
    maker = makers.get((tower.config.get("library", ""), tower.branch))
    resize = maker(tower.config) if maker else None
    shapes = {
        name: shape for spec in tower.specs for name, shape in spec.canonical_parameters.items()
    }
    found = {name: resize for name in shapes if name.endswith(_TABLES)} if resize else {}
    if maker is _of_texts:
        found |= {name: _without_padding for name in shapes if name.endswith(TOKENS)}
    return found


def _without_padding(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[P, W] -> `shape` = [V, W]: the rows behind the highest id of the tokenizer (T5 has 28 of
    them, ModernBERT 88) are left out. ValueError where there are others: it is another
    tokenizer's."""
    rows = weight.shape[0]
    if rows % ROUNDED_TO or not 0 < rows - shape[0] < MOST_ROWS:
        raise ValueError(f"a table of {rows} tokens cannot become one of {shape[0]}")
    return weight[: shape[0]]


def _of_texts(config: Mapping[str, Any]) -> Resize:
    kept = KEPT + first_position(config["config"])
    return lambda weight, shape: stretched_positions(weight, shape[0], kept)


def _of_images(config: Mapping[str, Any]) -> Resize | None:
    """None for SigLIP 2, which interpolates in every forward."""
    own = config["config"]
    if own.get("image_size") is None or "patch_size" not in own:
        return None
    patches = (own["image_size"] // own["patch_size"]) ** 2
    family = FAMILIES.get(own["model_type"])  # none of networks of clips
    antialias = family is not None and family.antialias
    return lambda weight, shape: resized_positions(
        weight, shape[-2], shape[-2] - patches, antialias
    )


def _behind_class_token(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As OpenCLIP does for its ViTs; torchvision's have the same table."""
    return resized_positions(weight, shape[-2], 1, antialias=True)


def _evenly(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[P, W] -> `shape` = [positions, W] by linear interpolation, as OpenCLIP does for texts."""
    if weight.dim() != 2 or weight.shape[1] != shape[1]:
        raise ValueError(f"{tuple(weight.shape)} positions cannot become {shape}")
    return F.interpolate(weight.float().t()[None], shape[0], mode="linear")[0].t()
