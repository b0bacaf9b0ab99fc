"""Embeddings of regions of images, from the maps of their tower.

    image_hidden ──tap──> image_map_0, image_map_1 ──RoIAlign (region_boxes)── project ──> region_embeds

B micro-batch, n its regions, C channels, h × w places of a map, D embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import roi_align

from common.boxes import WHOLE
from models.towers.annotations import AnnotationsHead
from models.towers.fusion import channels_last, map_ends, tap
from models.towers.layers import Layer, LayerSpec, Tower

SCALES = 2  # of maps: small regions are seen by the larger one, and large ones by both


class MapTap(Layer):
    """`image_hidden` [B, C, h, w], [B, h, w, C] (`last`) or [B, N, C] -> a copy of it as a map [B,
    C, h, w] of another name for the head; of tokens those behind the first `num_prefix`, of a
    square image."""

    reads = ("image_hidden",)

    def __init__(self, name: str, last: bool = False, num_prefix: int = 0) -> None:
        super().__init__()
        self.makes = (name,)
        self.last, self.num_prefix = last, num_prefix

    def compute(self, image_hidden: Tensor) -> Tensor:
        # * 1: what is sent on under two names must not share its memory
        return self.as_map(image_hidden, self.last, self.num_prefix) * 1

    @staticmethod
    def as_map(image_hidden: Tensor, last: bool, num_prefix: int) -> Tensor:
        """[B, C, h, w]"""
        if image_hidden.dim() == 4:
            return image_hidden.permute(0, 3, 1, 2) if last else image_hidden
        tokens = image_hidden[:, num_prefix:]
        side = math.isqrt(tokens.shape[1])  # of all patches of a square image
        return tokens.transpose(1, 2).unflatten(2, (side, side))


def tap_maps(
    tower: Tower, pixel_values: Tensor
) -> tuple[tuple[LayerSpec, ...], partial[RegionsHead]]:
    """The recipes of a tower without a head, with taps behind its last two sizes of maps, or its
    only one, and what makes its head. `pixel_values`: as in
    `models.towers.building.meta_inputs`."""
    specs, maps = list(tower.specs), dict[str, int]()
    ends = [(end, shape) for end, shape in map_ends(tower, pixel_values) if len(shape) > 1]
    for number, (end, shape) in enumerate(ends[-SCALES:]):
        name, last = f"image_map_{number}", channels_last(shape)
        layer = tap(f"image.map_{number}", "image", MapTap(name, last, _num_prefix(shape)))
        specs.insert(end + 1 + number, layer)
        maps[name] = shape[-1] if last or len(shape) == 2 else shape[0]
    return tuple(specs), partial(RegionsHead, tower.branch, maps)


def _num_prefix(shape: Sequence[int]) -> int:
    """Tokens before those of the patches of a square image, by the shape of a map."""
    return shape[0] - math.isqrt(shape[0]) ** 2 if len(shape) == 2 else 0


def region_features(
    maps: Tensor, boxes: Tensor, row: Tensor, bins: Sequence[int] = (1, 1)
) -> Tensor:
    """Mean features of regions: `maps` [B, C, h, w], `boxes` [n, 4] (x1, y1, x2, y2 in parts of
    `WHOLE`), `row` [n] which image -> [n, C, *bins] fp32. By RoIAlign (He et al. 2017)."""
    height, width = maps.shape[-2:]
    x1, y1, x2, y2 = (boxes.float() / WHOLE).unbind(1)
    # side by side: a tensor of the sides would be a copy to the device, for which the host waits
    rois = torch.stack([row.float(), x1 * width, y1 * height, x2 * width, y2 * height], 1)
    return roi_align(maps.float(), rois, output_size=tuple(bins), aligned=True)


class PooledRegions:
    """Regions by a tower that learned none: RoIAlign of the last map, with as many bins as it has
    places, goes through the layers behind it as if it were the map of an image. So does the mean of
    its bins in the place of tokens that stand before those of patches.

    `tower`: with its head. `pixel_values`: as in `models.towers.building.meta_inputs`. Errors:
    ValueError where no layer makes a map.
    """

    def __init__(self, tower: Tower, pixel_values: Tensor) -> None:
        bare = replace(tower, specs=tower.specs[:-1])
        ends = [(end, s) for end, s in map_ends(bare, pixel_values) if len(s) > 1]
        if not ends:
            raise ValueError(f"image tower {tower.name!r}: no layer of it makes a map")
        end, shape = ends[-1]
        self.num_before = end + 1
        """Of the layers up to the last map."""
        self.last = channels_last(shape)
        self.num_prefix = _num_prefix(shape)

    def hidden(self, image_hidden: Tensor, boxes: Tensor, row: Tensor) -> Tensor:
        """`image_hidden` of the images [B, ...], `boxes` [n, 4] and `row` [n], as
        `region_features` takes them -> that of the regions [n, ...]."""
        maps = MapTap.as_map(image_hidden, self.last, self.num_prefix)
        found = region_features(maps, boxes, row, maps.shape[-2:]).to(image_hidden.dtype)
        if image_hidden.dim() == 4:
            return found.permute(0, 2, 3, 1) if self.last else found
        tokens = found.flatten(2).transpose(1, 2)
        mean = tokens.mean(1, keepdim=True).expand(-1, self.num_prefix, -1)
        return torch.cat([mean, tokens], 1)


class RegionsHead(AnnotationsHead):
    """The head of images with regions: `region_boxes` int32 [n, 4] and `region_row`, see
    `region_features`. `maps`: by name with their channels, of which the features stand side by
    side."""

    def __init__(self, branch: str, maps: Mapping[str, int], *given: Any) -> None:
        channels = sum(maps.values())
        super().__init__(branch, "region", "region_boxes", [*maps], channels, *given)

    def pooled(
        self, tapped: Sequence[Tensor], extents: Tensor | None, row: Tensor | None
    ) -> Tensor:
        if extents is None or row is None:
            extents = torch.empty((0, 4), dtype=torch.int32, device=tapped[0].device)
            row = torch.empty(0, dtype=torch.int64, device=tapped[0].device)
        each = [region_features(of, extents, row).flatten(1) for of in tapped]
        return torch.cat(each, 1).to(tapped[0].dtype)
