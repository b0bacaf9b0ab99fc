"""How the pixels of a run are prepared: as the command line says, else as the image weights were
trained, else as CLIP's.

torchvision, transformers and OpenCLIP write this beside their weights, each in its own way; here it
becomes a `Preprocessing`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchvision
from PIL import Image

from data.modalities.preprocessing import CLIP, Preprocessing
from launch.run.records import read_export
from models.towers.names import split_name

if TYPE_CHECKING:
    from launch.settings.options import Options

PREPROCESSOR = "preprocessor_config.json"
TORCHVISION = "give --image-normalization imagenet if torchvision or timm trained them"


def trained_with(where: str, image_tower: str) -> tuple[Preprocessing, int] | None:
    """How the pixels were prepared that weights were trained on, and the tower's input in pixels;
    None: the weights do not say.

    `where`: as --image-weights or --import. Known are torchvision's weights by name and by their
    files' names, and folders with a preprocessor_config.json, files beside one, and folders from
    export.py.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        return _of_export(path) or _of_folder(path / PREPROCESSOR)
    return _of_torchvision(path.name, split_name(image_tower)[0]) or (
        _of_folder(path.parent / PREPROCESSOR) if path.is_file() else None
    )


def describe_pixels(options: Options) -> str:
    """One line for the start of a run; empty where no image weights are given."""
    if not options.imported and not options.image_weights:
        return ""
    mean, std = (
        ", ".join(f"{value:.4g}" for value in values)
        for values in (options.image_mean, options.image_std)
    )
    line = f"pixels: mean {mean}; std {std}; {options.image_interpolation}; shorter side {options.image_resize}, centre {options.image_size}"
    weights, flag = (
        (options.imported, "--import")
        if options.imported
        else (options.image_weights, "--image-weights")
    )
    found = trained_with(weights, options.image_tower)
    used = Preprocessing.from_options(vars(options))
    if found is None:
        hint = f"; {TORCHVISION}" if used.mean == CLIP.mean and not options.imported else ""
        return f"{line}. {flag} {weights} does not say what it was trained with{hint}"
    same = (found[0].mean, found[0].std, found[0].interpolation) == (
        used.mean,
        used.std,
        used.interpolation,
    )
    return f"{line} ({'as' if same else 'not as'} {flag} {weights} was trained)"


def _of_export(folder: Path) -> tuple[Preprocessing, int] | None:
    record = read_export(folder)
    return None if record is None else (Preprocessing.from_options(record), record["image_size"])


def _of_folder(file: Path) -> tuple[Preprocessing, int] | None:
    """transformers' configuration of an image processor."""
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        resize = _side(config["size"])
        crop = (
            _side(config["crop_size"])
            if config.get("do_center_crop", "crop_size" in config)
            else resize
        )
        interpolation = Image.Resampling(
            config.get("resample", Image.Resampling.BICUBIC)
        ).name.lower()
        return Preprocessing(
            tuple(config["image_mean"]), tuple(config["image_std"]), interpolation, crop / resize
        ), crop
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: does not describe how images are prepared ({type(error).__name__}: {error}); "
            "mend it, or remove it and give --image-normalization"
        ) from error


def _side(size: Any) -> int:
    return (
        size
        if isinstance(size, int)
        else size["shortest_edge"]
        if "shortest_edge" in size
        else min(size["height"], size["width"])
    )


def _of_torchvision(name: str, architecture: str) -> tuple[Preprocessing, int] | None:
    """`name`: of the weights, or of the file that torchvision downloads for them."""
    try:
        known = torchvision.models.get_model_weights(architecture)
    except ValueError:  # not one of torchvision's: the tower's own error says so
        return None
    members = dict(known.__members__)  # with the alias DEFAULT
    weights = members.get(name) or next(
        (one for one in known if one.url.endswith(f"/{name}")), None
    )
    if weights is None:
        return None
    preset = weights.transforms()
    (crop,), (resize,) = preset.crop_size, preset.resize_size
    return Preprocessing(
        tuple(preset.mean), tuple(preset.std), preset.interpolation.value, crop / resize
    ), crop
