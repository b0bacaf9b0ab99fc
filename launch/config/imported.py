"""What the model of --import says: train.py's options that go on with it. Imports neither torch nor
transformers, but for published models: the command line reads it."""

from __future__ import annotations

import logging
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from common.files import read_json
from common.model_sizes import refuse_sizes
from common.output import brief
from data.modules import is_trusted
from data.options import IMAGE_TEXT, branches_of
from launch.config.groups import FLAGS, OF_BRANCH, PIXELS, flag_of
from launch.records import RECORD, RUN_RECORD, read_export
from models.towers.names import split_name

OPEN_CLIP_CONFIG = "open_clip_config.json"
FUSION_OPTIONS = ("fusion", "fusion_width", "fusion_heads", "fusion_scales")
HERE = "{folder}"  # in the options of an export: where it lies
LIBRARIES = ("hf:", "open_clip:", "timm:")  # how names of towers and tokenizers begin, "" otherwise
# those that need no file: all others lie in the export
BY_NAME: Mapping[str, Collection[str]] = {
    "tokenizer": (),
    "text_tower": ("open_clip:",),
    "image_tower": ("", "open_clip:", "timm:"),
    "audio_tower": ("", "open_clip:", "timm:"),
}
# of train.py: all that an export may say, of its model and of what enters it. It may come from a
# stranger, who is not to decide more, such as what data are read and what modules are imported
MODEL_OPTIONS = (
    *("embed_dim", "max_text_tokens", "loss", "projection", "pairs", *BY_NAME),
    *("image_size", *PIXELS, "audio_size", "audio_seconds"),
)


def refuse_no_model(where: str, folder: Path, weights_alone: bool) -> None:
    """Raise ValueError for a folder of --import that holds no whole model: neither an export nor a
    published one. `weights_alone`: a folder without a configuration will do, because the towers are
    named elsewhere."""
    folder = folder.expanduser()
    if not folder.is_dir() or read_export(folder) is not None or is_published(folder):
        return
    file, found = folder / RUN_RECORD, None
    if file.is_file():
        try:
            found = read_json(file)
        except ValueError as error:
            raise ValueError(
                f"--import {where}: its {RUN_RECORD} is no JSON ({error}); download the model again"
            ) from error
    if isinstance(found, dict) and "options" in found:
        raise ValueError(
            f"--import {where}: is the folder of a run; write its model out with export.py RUN_DIR "
            "OUT, and give OUT (evaluate.py takes the folder itself, without --import)"
        )
    if found is None and weights_alone and any(folder.glob("*model*")):
        return
    kind = found.get("model_type") if isinstance(found, dict) else None
    what = f"its {RUN_RECORD} is of a {kind!r}" if kind else f"there is no {RUN_RECORD} of a model"
    raise ValueError(
        f"--import {where}: holds no whole model: {what}. Give a folder of export.py, of "
        "transformers' CLIPModel, SiglipModel, Siglip2Model, ChineseCLIPModel, "
        "VisionTextDualEncoderModel or ClapModel, or of OpenCLIP; a single tower is started from "
        f"with {', '.join(flag_of(branch, 'weights', 'WHERE') for branch in OF_BRANCH)}"
    )


def options_of_import(where: Path) -> dict[str, Any]:
    """train.py's options that go on with the model in a folder, of export.py, of transformers or of
    OpenCLIP; none of a file of weights. `pairs` is among them where sounds are, or towers of one's
    own whose modules the command line names. Errors: ValueError for a model that is not built,
    FileNotFoundError for one that lacks a file."""
    if not is_published(where):
        if (read_export(where) or {}).get("adapters"):
            raise ValueError(
                f"--import {where}: its adapters are apart from its weights, which are those "
                "before training; export without --keep-adapters to go on from it"
            )
        return options_of_export(where) | _options_of_own(where)
    # imports transformers, which the command line can do without
    from models.weights.open_clip_models import PREFIX, folder_of, options_of_open_clip
    from models.weights.whole_models import is_whole_model, options_of_model

    where = where.expanduser().absolute()
    if is_whole_model(where):
        return options_of_model(where)
    return options_of_open_clip(f"{PREFIX}{folder_of(where)}")


def branches_held(where: str | Path | None, named: Collection[str]) -> tuple[str, ...]:
    """The branches of a run with those `named` that the model of --import has towers of; none where
    there is no such model. Errors: as `options_of_import`."""
    if not where:
        return ()
    return as_branches(branches_of(options_of_import(Path(where)).get("pairs", IMAGE_TEXT)), named)


def as_branches(held: Sequence[str], named: Collection[str]) -> tuple[str, ...]:
    """Branches of a model in a run with those `named`: where that has films and no images, the
    tower of images is for the frames of films."""
    from data.stored.kinds import whole_of  # imports numpy, which --help can do without

    return tuple(whole_of(each, named) for each in held)


def is_published(folder: Path) -> bool:
    """Does the folder hold one of transformers' or OpenCLIP's models of two modalities, and is it
    no export? A file: is it of OpenCLIP, with the model's configuration beside it?"""
    folder = folder.expanduser()
    if read_export(folder) is not None:
        return False
    if not any((folder / name).is_file() for name in (RUN_RECORD, OPEN_CLIP_CONFIG)):
        return folder.name.startswith("open_clip_") and (folder.parent / OPEN_CLIP_CONFIG).is_file()
    from models.weights.open_clip_models import folder_of
    from models.weights.whole_models import is_whole_model

    return is_whole_model(folder) or folder_of(folder) is not None


def options_of_export(folder: Path) -> dict[str, Any]:
    """train.py's options that go on with an exported model; none where there is no record (a file
    of weights). Errors: ValueError for what no option takes, and for a tower or tokenizer elsewhere
    than in the export."""
    return _options_said(folder, "options", MODEL_OPTIONS)


def fusion_of_export(folder: Path) -> dict[str, Any]:
    """Those of what scores pairs. Errors: as `options_of_export`."""
    return _options_said(folder, "fusion", FUSION_OPTIONS)


def own_of_export(folder: Path) -> dict[str, Any]:
    """What an export says of its towers of modalities of one's own; nothing where it has none.
    Errors: ValueError."""
    own = (read_export(folder) or {}).get("own") or {}
    kinds = {"modules": list, "branches": list, "pairs": str, "loss": str, "tower": list}
    wrong = [key for key, kind in kinds.items() if own and not isinstance(own.get(key), kind)]
    if wrong or (own and not {*own["branches"]} <= {*branches_of(own["pairs"])}):
        raise ValueError(f"{folder / RECORD}: own is {brief(own)}; export again")
    return own


def describe_own_left_out(folder: Path, remedy: str) -> str:
    """A line where the command line names none of the modules of these towers; empty where it
    does."""
    own = own_of_export(folder)
    if not own or is_trusted(own["modules"]):
        return ""
    return (
        f"{folder}: leaves out {' and '.join(own['branches'])}, of the Python module "
        f"{', '.join(own['modules'])}; if you trust it, add {remedy}"
    )


def _options_of_own(folder: Path) -> dict[str, Any]:
    """--pairs, --tower and --loss that go on with these towers, too, where the command line names
    their modules."""
    own = own_of_export(folder)
    if not own or not is_trusted(own["modules"]):
        return {}
    return {"pairs": own["pairs"], "tower": tuple(own["tower"]), "loss": own["loss"]}


def _options_said(folder: Path, key: str, allowed: Collection[str]) -> dict[str, Any]:
    written, file = (read_export(folder) or {}).get(key, {}), folder / RECORD
    if not isinstance(written, dict):
        raise ValueError(f"{file}: {key} is {written!r}, and no object; export again")
    if others := tuple(name for name in written if name not in allowed):
        _note_others(file, key, others)
    said = {
        name: _option_said(folder, f"{key}.{name}", name, value)
        for name, value in written.items()
        if name in allowed
    }
    refuse_sizes(str(file), said)
    return said


@cache  # a folder is read several times
def _note_others(file: Path, key: str, names: tuple[str, ...]) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("wye").warning(
            "%s: %s holds %s, which an export cannot decide; passed over, give it on the command "
            "line if it is wanted",
            *(file, key, ", ".join(names)),
        )


def _option_said(folder: Path, key: str, name: str, value: Any) -> Any:
    """The value as the command line would read it."""
    flag = FLAGS[name]
    if value is None and flag.default is None:
        return None
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        read = flag.parse(text) if flag.parse else text
        if flag.choices and read not in flag.choices:
            raise ValueError(f"there are {', '.join(flag.choices)}")
        if name in BY_NAME:
            return _in_export(folder, text, BY_NAME[name])
    except (ValueError, ArgumentTypeError) as error:
        raise ValueError(f"{folder / RECORD}: {key} is {value!r}: {error}; export again") from None
    return read


def _in_export(folder: Path, said: str, by_name: Collection[str]) -> str:
    """A tower or tokenizer with the folder of the export in it. `by_name`: how names begin of which
    the library makes it by itself. Errors: ValueError for a path that leads out of the folder, and
    for what would be looked for elsewhere."""
    here, base = folder.expanduser().absolute(), split_name(said)[0]
    library = next((known for known in LIBRARIES if base.startswith(known)), "")
    place = base.removeprefix(library)
    inside = place == HERE or place.startswith(f"{HERE}/")
    if inside and Path(place.replace(HERE, str(here))).resolve().is_relative_to(here.resolve()):
        return said.replace(HERE, str(here))
    if library in by_name and re.fullmatch(r"\w[\w.-]*", place):
        return said
    raise ValueError(f"it is to lie in the folder of the export, {HERE}")
