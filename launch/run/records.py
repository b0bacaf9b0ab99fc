"""What the folder of a run, of export.py or of a published model says about the model in it. Imports
neither torch nor transformers, but for published models: the command line reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RUN_RECORD = "config.json"
RECORD, WEIGHTS, TEXT_FOLDER, IMAGE_FOLDER = "wye.json", "model.safetensors", "text", "image"
OPTIONS = (
    "image_tower",
    "embed_dim",
    "image_size",
    "max_text_tokens",
)  # of train.py, as the model was trained with
PIXELS = (
    "image_mean",
    "image_std",
    "image_interpolation",
    "image_resize",
)  # likewise; earlier exports, of CLIP's values, have none


def read_run(folder: Path) -> dict[str, Any] | None:
    """What was decided when the run in `folder` began; None where there is none. Errors: ValueError
    for a damaged record."""
    return _read(folder / RUN_RECORD, "delete it, and the same command writes it again")


def read_export(folder: Path) -> dict[str, Any] | None:
    """Its record, or None where `folder` is no folder that export.py made. Errors: ValueError for a
    damaged record."""
    return _read(folder.expanduser() / RECORD, "export again")


def _read(file: Path, remedy: str) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        raise ValueError(f"{file}: is damaged ({error}); {remedy}") from error


def options_of_import(where: Path) -> dict[str, Any]:
    """train.py's options that go on with the model in a folder, of export.py or of transformers;
    none of a file of weights."""
    if not is_published(where):
        if (read_export(where) or {}).get("adapters"):
            raise ValueError(
                f"--import {where}: its adapters are apart from its weights, which are those before "
                "training; export without --keep-adapters to go on from it"
            )
        return options_of_export(where)
    # imports transformers, which the command line can do without
    from models.weights.whole_models import options_of_model

    return options_of_model(where.expanduser().absolute())


def is_published(folder: Path) -> bool:
    """Does the folder hold one of transformers' models of images and texts, and is it no export?"""
    if read_export(folder) is not None or not (folder.expanduser() / RUN_RECORD).is_file():
        return False
    from models.weights.whole_models import is_whole_model

    return is_whole_model(folder.expanduser())


def options_of_export(folder: Path) -> dict[str, Any]:
    """train.py's options that go on with an exported model; none where there is no record (a file
    of weights)."""
    record = read_export(folder)
    if record is None:
        return {}
    pool = (
        f":pool={record['text_pool']}" if "text_pool" in record else ""
    )  # earlier ones have the library's
    images = folder.expanduser() / IMAGE_FOLDER  # of a tower that is transformers' own
    own = (
        {"image_tower": f"hf:{images}:pool={record['image_pool']}"}
        if (images / "config.json").is_file()
        else {}
    )
    texts = folder.expanduser() / TEXT_FOLDER
    # a tower of another library than transformers is made again by its name
    text_tower = f"{texts}{pool}" if texts.is_dir() else record["text_tower"]
    return {
        **{key: record[key] for key in OPTIONS},
        **own,
        **{key: record[key] for key in PIXELS if key in record},
        "text_tower": text_tower,
        "tokenizer": str(folder.expanduser()),
        "loss": record["loss"],
        "projection": record.get("projection", "linear"),
    }
