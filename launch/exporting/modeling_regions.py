"""Embed regions of images with the model of this folder, with public libraries alone.

    from modeling_export import load
    from modeling_regions import Regions

    model = load(".")
    regions = Regions(model)
    pixel_values = model.pixel_values("apple.jpg")[None]
    boxes = torch.tensor([[0.1, 0.2, 0.5, 0.9]])  # of these pixels, in fractions of their sides
    region_embeds = regions.embed(pixel_values, boxes)  # [1, D], of length 1

They are compared with `model.embed_texts` of phrases.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import roi_align


class Regions(nn.Module):
    """The head of regions of `model`, as `modeling_export.load` makes it: the mean features of a
    box on each of the image tower's last maps (RoIAlign, He et al. 2017), projected."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.record = model.record["regions"]
        tensors = load_file(model.folder / Path(self.record["file"]).name)
        prefix = "head.region_projection."
        own = {name[len(prefix) :]: each for name, each in tensors.items() if prefix in name}
        width, channels = own["1.weight"].shape
        self.projection = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, width))
        self.projection.load_state_dict(own)
        self.model = [model]  # in a list: none of its parameters are of this module
        self._modules_of_maps = [_module(model, each["module"]) for each in self.record["maps"]]

    @torch.no_grad()
    def embed(self, pixel_values: Tensor, boxes: Tensor, image: Tensor | None = None) -> Tensor:
        """[B, 3, H, W], as `model.pixel_values` prepares them, and boxes [n, 4]: x1, y1, x2, y2 in
        0..1 of the sides of these -> [n, D], of length 1. `image` int64 [n]: which of the B each
        box is of; None: all of the first."""
        found: list[Any] = []
        hooks = [
            module.register_forward_hook(lambda module, given, output: found.append(output))
            for module in self._modules_of_maps
        ]
        try:
            self.model[0].embed_images(pixel_values)
        finally:
            for hook in hooks:
                hook.remove()
        image = torch.zeros(len(boxes)) if image is None else image
        features = []
        for output, how in zip(found, self.record["maps"]):
            output = output[0] if isinstance(output, tuple) else output
            maps = _as_map(output, how["channels_last"]).float()
            height, width = maps.shape[-2:]
            places = boxes.to(maps) * torch.tensor([width, height, width, height]).to(maps)
            rois = torch.cat([image.to(maps)[:, None], places], 1)
            features.append(roi_align(maps, rois, output_size=1, aligned=True).flatten(1))
        return F.normalize(self.projection(torch.cat(features, 1)), dim=-1)


def _as_map(output: Tensor, channels_last: bool) -> Tensor:
    """[B, C, h, w]"""
    if output.dim() == 4:
        return output.permute(0, 3, 1, 2) if channels_last else output
    side = math.isqrt(output.shape[1])
    tokens = output[:, output.shape[1] - side * side :]  # behind those of no place
    return tokens.transpose(1, 2).unflatten(2, (side, side))


def _module(model: Any, path: str) -> nn.Module:
    """The one of the image tower that makes the map. Errors: ValueError."""
    inside = model.towers["image"].module if "image" in model.towers else model.whole
    # transformers 5 calls ViT's blocks otherwise than their weights
    ends = tuple({f".{path}", "." + path.replace("encoder.layer.", "layers.")})
    found = [module for name, module in inside.named_modules() if f".{name}".endswith(ends)]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} modules of the image tower are called {path}; one is needed"
        )
    return found[0]
