"""Preprocessing of images for an image tower: size, resampling, mean and standard deviation.

A pretrained tower that is given other pixels than in its training still runs, but its features are
wrong. Training and evaluation therefore take these values from the weights
(`launch/config/pixels.py`) and record them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Values = tuple[float, float, float]  # of red, green and blue

NORMALIZATIONS: dict[str, tuple[Values, Values]] = {
    # OpenAI CLIP, clip/clip.py; OpenCLIP's default
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    # torchvision's and timm's supervised models
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    # SigLIP, Inception: values from -1 to 1
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Name -> (mean, standard deviation) of channel values from 0 to 1."""
INTERPOLATIONS = ("bicubic", "bilinear")  # those that torch and Pillow have with antialiasing
RESIZE_MODES = ("shortest", "longest", "squash")


@dataclass(frozen=True)
class Preprocessing:
    """The processing of an image besides augmentation. Checked when made; the defaults are CLIP's.

    `mean`, `std`: of channel values from 0 to 1, subtracted and divided by. `interpolation`: of
    every resizing. `crop_pct`: the tower's input ÷ what the shorter side is resized to before the
    centre is cropped, in evaluation (timm's word; 224 / 232 for torchvision's ResNet-50).
    `resize_mode`, in evaluation (OpenCLIP's words): `shortest` keeps the shape of an image and cuts
    off what is too long; `longest` keeps it and fills what is too short with black; `squash`
    resizes both sides to the tower's input, as SigLIP was trained. `train_resize_mode`: the same of
    what training crops out of an image. It is a value of its own because version 0.1 cropped as
    `shortest` does, whatever its evaluation did.
    """

    mean: Values = NORMALIZATIONS["clip"][0]
    std: Values = NORMALIZATIONS["clip"][1]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    resize_mode: str = "shortest"
    train_resize_mode: str = "shortest"

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(math.isfinite(value) for value in values):
                raise ValueError(
                    f"image {name} {values}: three numbers are needed, for red, green and blue"
                )
        if min(self.std) <= 0:
            raise ValueError(
                f"image std {self.std}: each channel is divided by its own, so every number must "
                "be above 0"
            )
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"image interpolation {self.interpolation!r}: use one of "
                f"{', '.join(INTERPOLATIONS)}"
            )
        for mode in (self.resize_mode, self.train_resize_mode):
            if mode not in RESIZE_MODES:
                raise ValueError(
                    f"image resize mode {mode!r}: use one of {', '.join(RESIZE_MODES)}"
                )
        if not 0.25 <= self.crop_pct <= 1:
            raise ValueError(
                f"image crop: the tower's input is {self.crop_pct:g} of what images are resized "
                "to; it must be from 0.25 to 1"
            )

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """(H, W) that an image covers before the centre `size` = (H, W) is cropped, pixels."""
        return round(size[0] / self.crop_pct), round(size[1] / self.crop_pct)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Preprocessing:
        """Read train.py's options by name, as config.json and wye.json keep them. CLIP's are used
        where they are missing."""
        if options.get("image_mean") is None:
            return cls()
        crop_pct = options["image_size"] / options["image_resize"]
        return cls(
            tuple(options["image_mean"]),
            tuple(options["image_std"]),
            options["image_interpolation"],
            crop_pct,
            options.get("image_resize_mode", "shortest"),
            options.get("image_train_resize_mode") or "shortest",
        )

    def options(self, image_size: int) -> dict[str, Any]:
        """The inverse of `from_options` for towers of `image_size` pixels a side."""
        return {
            "image_mean": self.mean,
            "image_std": self.std,
            "image_interpolation": self.interpolation,
            "image_resize": self.resized((image_size, image_size))[0],
            "image_resize_mode": self.resize_mode,
            "image_train_resize_mode": self.train_resize_mode,
        }


CLIP = Preprocessing()
