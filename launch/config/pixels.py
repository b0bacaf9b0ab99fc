"""How the pixels of a run are prepared: as the command line says, else as the image weights were
trained, else as CLIP's.

torchvision, transformers, timm and OpenCLIP write this beside their weights, each in its own way;
here it becomes a `Preprocessing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchvision
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from PIL import Image

from common.files import read_json
from data.modalities.preprocessing import CLIP, INTERPOLATIONS, NORMALIZATIONS, Preprocessing
from data.options import branches_of, derived_of
from data.stored.image import IMAGE
from data.stored.kinds import stored, whole_of
from launch.config.groups import PIXELS, ImageOptions, first_weights, flag_of, tower_names
from launch.config.imported import branches_held, options_of_export
from models.towers.image import full_name
from models.towers.libraries import open_clip, timm, transformers_image
from models.towers.names import HF, split_name
from models.towers.video import frames_tower
from models.weights.libraries import DEFAULT
from models.weights.open_clip_models import folder_of

if TYPE_CHECKING:
    from launch.config.options import Options

SIDES = {"shortest": "shorter side", "longest": "longer side", "squash": "both sides"}
IMAGENET = Preprocessing(*NORMALIZATIONS["imagenet"])
# of OpenCLIP, where its configuration says nothing
OPEN_CLIP = {"mean": CLIP.mean, "std": CLIP.std}
# of an image processor, and of a whole processor, which transformers 5 writes instead
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
ASSUMED = (
    ", so CLIP's values are assumed; give --image-normalization imagenet if torchvision or timm "
    "trained them, half for SigLIP"
)


def settled_pixels(
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    held: Sequence[str],
    began: Mapping[str, Any],
) -> tuple[dict[str, Any], bool]:
    """The image size and how pixels are prepared: as given, else as the run began, else as the
    weights of the image tower were trained, else CLIP's. Also whether those weights say it."""
    asked: dict[str, Any] = {name: given.get(name) for name in PIXELS}
    ImageOptions(image_normalization=given.get("image_normalization"), **asked).check_pixels()
    if given.get("image_normalization"):
        asked["image_mean"], asked["image_std"] = NORMALIZATIONS[given["image_normalization"]]
    weights, tower, _ = _what_shows(branches_of(values["pairs"]), held, values)
    asks = weights is not None and not began
    trained = trained_with(weights, tower) if tower is not None and asks else None
    preprocessing, size = trained or (Preprocessing.from_options(began), values["image_size"])
    if not began:
        preprocessing = _as_shown(preprocessing, given, values["pairs"])
    size = given.get("image_size") or size
    found: dict[str, Any] = {
        name: default if asked[name] is None else asked[name]
        for name, default in preprocessing.options(size).items()
    }
    if found["image_resize"] < size:
        raise ValueError(
            f"argument --image-resize: {found['image_resize']} is below --image-size {size}; the "
            "centre is cropped from it"
        )
    Preprocessing.from_options({**found, "image_size": size})
    return {"image_size": size, **found}, trained is not None


def _as_shown(preprocessing: Preprocessing, given: Mapping[str, Any], pairs: str) -> Preprocessing:
    """With the resize modes of a new run: training sees as much of an image as evaluation does, and
    where regions are compared that is all of it, or boxes beside the centre would be lost
    (bench/EVIDENCE.md)."""
    mode = given.get("image_resize_mode") or preprocessing.resize_mode
    derived = derived_of(pairs)
    if derived and derived.in_view and mode == "shortest" and not given.get("image_resize_mode"):
        mode = "squash"
    return replace(preprocessing, resize_mode=mode, train_resize_mode=mode)


def _what_shows(
    branches: Collection[str], held: Collection[str], values: Mapping[str, Any]
) -> tuple[Any, str | None, str]:
    """Weights, tower and flag that say how pixels are prepared: of images, without any those of the
    frames of films."""
    branch = whole_of(IMAGE.name, branches)
    tower: str | None = tower_names(values).get(branch, "")
    if tower and stored(branch).parts:
        tower = frames_tower(tower)
    if branch in held:
        return values["imported"], tower, f"--import {values['imported']}"
    weights = first_weights(values).get(branch)
    return weights, tower, flag_of(branch, "weights", weights or "WHERE")


def trained_with(where: str, image_tower: str) -> tuple[Preprocessing, int] | None:
    """How the pixels were prepared that weights were trained on, and the tower's input in pixels;
    None: the weights do not say.

    `where`: as --image-weights or --import. Known are the weights of torchvision, timm and OpenCLIP
    by name, torchvision's also by their files' names, those of transformers on the hub, and folders
    from export.py or with one of PROCESSORS, a config.json of timm or an open_clip_config.json, and
    files beside one.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        return _of_export(path) or _beside(path)
    if path.is_file():
        if folder := folder_of(path):  # beside which there may be the files of transformers
            return _described(folder / open_clip.CONFIG)
        return (
            _of_torchvision(path.name, split_name(image_tower)[0])
            or _beside(path.parent)
            or _of_all_open_clip(image_tower)
        )
    try:
        tower = full_name(image_tower)
    except ValueError:  # the tower's own error says so
        return None
    if where.startswith("timm/"):  # on the Hugging Face hub
        return _of_timm(*timm.split_tag(where.removeprefix("timm/")))
    if tower.startswith(timm.PREFIX):
        architecture, tag = timm.split_tag(tower)
        return _of_timm(architecture, tag if where == DEFAULT else where)
    if tower.startswith(open_clip.PREFIX):
        return _of_open_clip(tower, where)
    if tower.startswith(HF):
        return _of_hub(split_name(tower)[0] if where == DEFAULT else where)
    return _of_torchvision(path.name, split_name(tower)[0])


def describe_pixels(options: Options) -> str:
    """One line for the start of a run; empty where no image weights are given."""
    held = branches_held(options.imported, options.branches)
    weights, tower, flag = _what_shows(options.branches, held, vars(options))
    if not weights or tower is None:
        return ""
    used = options.preprocessing
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (used.mean, used.std))
    line = (
        f"pixels: mean {mean}; std {std}; {options.image_interpolation}; "
        f"{SIDES[used.resize_mode]} {options.image_resize}, centre {options.image_size}"
    )
    found = trained_with(str(weights), tower)
    if found is None:
        assumed = ASSUMED if used.mean == CLIP.mean else ""
        return f"{line}. {flag} does not say what it was trained with{assumed}"
    same = (found[0].mean, found[0].std, found[0].interpolation) == (
        used.mean,
        used.std,
        used.interpolation,
    )
    return f"{line} ({'as' if same else 'not as'} {flag} was trained)"


def _of_export(folder: Path) -> tuple[Preprocessing, int] | None:
    options = options_of_export(folder)
    if "image_size" not in options:
        return None
    return Preprocessing.from_options(options), options["image_size"]


def _beside(folder: Path) -> tuple[Preprocessing, int] | None:
    """As the first of the files says that there are."""
    return next(filter(None, (_described(folder / name) for name in RECORDS)), None)


def _described(file: Path) -> tuple[Preprocessing, int] | None:
    """As a file of RECORDS says; None: it is not there, or says nothing."""
    if not file.is_file():
        return None
    try:
        return RECORDS[file.name](read_json(file))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file}: does not describe how images are prepared ({type(error).__name__}: {error}); "
            "mend it, or remove it and give --image-normalization"
        ) from error


def _of_hub(name: str) -> tuple[Preprocessing, int] | None:
    """Of transformers' model of a preset or on the hub."""
    hub_id = transformers_image.hub_id_of(name) or name.removeprefix(HF)
    if "/" not in hub_id:
        return None
    try:
        return _beside(Path(snapshot_download(hub_id, allow_patterns=PROCESSORS)))
    except (OSError, HfHubHTTPError, HFValidationError):  # reading the weights says why
        return None


def _of_timm(architecture: str, tag: str) -> tuple[Preprocessing, int] | None:
    config = timm.library().get_pretrained_cfg(f"{architecture}.{tag}" if tag else architecture)
    return None if config is None else _of_config(config.to_dict())


def _of_open_clip(tower: str, where: str) -> tuple[Preprocessing, int] | None:
    config = open_clip.published(tower, where)
    size = open_clip.model_config(tower)["vision_cfg"].get("image_size", 224)
    return _of_config(config, size) if config else None


def _of_all_open_clip(tower: str) -> tuple[Preprocessing, int] | None:
    """Of a file of weights for one of OpenCLIP's models: what all of its published weights were
    trained with; None: they differ, or there are none."""
    if not tower.startswith(open_clip.PREFIX):
        return None
    model = split_name(tower)[0].removeprefix(open_clip.PREFIX)
    if found := _described(Path(model).expanduser() / open_clip.CONFIG):
        return found
    tags = open_clip.library().list_pretrained_tags_by_model(model)
    published = {_of_open_clip(tower, tag) for tag in tags}
    return published.pop() if len(published) == 1 else None


def _of_config(config: Mapping[str, Any], size: int | None = None) -> tuple[Preprocessing, int]:
    """`size`: where the configuration does not say it."""
    if "input_size" in config:
        size = config["input_size"][-1]
    size = config.get("size", size) if size is None else size
    interpolation = config.get("interpolation", "bicubic")
    return Preprocessing(
        tuple(config.get("mean") or IMAGENET.mean),
        tuple(config.get("std") or IMAGENET.std),
        # timm's "random" and the like choose anew for every image of a training
        interpolation if interpolation in INTERPOLATIONS else "bicubic",
        config.get("crop_pct") or 1.0,
        config.get("resize_mode") or "shortest",
    ), size if isinstance(size, int) else min(size)


def _of_processor(config: Mapping[str, Any]) -> tuple[Preprocessing, int] | None:
    """transformers' configuration of an image processor."""
    # of sounds, or of texts alone
    if not config or "sampling_rate" in config:
        return None
    resize = _side(config["size"])
    cropped = config.get("do_center_crop", "crop_size" in config)
    crop = _side(config["crop_size"]) if cropped else resize
    resample = Image.Resampling(config.get("resample", Image.Resampling.BICUBIC))
    mean, std = tuple(config["image_mean"]), tuple(config["image_std"])
    return Preprocessing(mean, std, resample.name.lower(), crop / resize), crop


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


def _of_open_clip_folder(config: Mapping[str, Any]) -> tuple[Preprocessing, int]:
    size = config["model_cfg"]["vision_cfg"].get("image_size", 224)
    return _of_config({**OPEN_CLIP, **config.get("preprocess_cfg", {})}, size)


RECORDS: Mapping[str, Callable[[Any], tuple[Preprocessing, int] | None]] = {
    PROCESSORS[0]: lambda found: _of_processor(found.get("image_processor", found)),
    PROCESSORS[1]: lambda found: _of_processor(found.get("image_processor", {})),
    # timm's, where it is not another library's
    "config.json": lambda found: _of_config(c) if (c := found.get("pretrained_cfg")) else None,
    open_clip.CONFIG: _of_open_clip_folder,
}
"""Files beside weights, and what reads them."""
