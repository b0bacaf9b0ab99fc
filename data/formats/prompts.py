"""Names of classes and the sentences that they stand in: of files, and those that figures for
ImageNet are published with.

OpenCLIP's package has OpenAI's names of ImageNet's 1,000 classes and its 80 sentences (Radford et
al. 2021, section 3.1.4), and timm, which it needs, their WordNet ids; both are taken from there.
"""

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import JSON_LIMIT, read_bounded
from common.spelling import near
from data.formats.specs import existing
from data.stored.roots import is_inside

TEMPLATES = (
    "a photo of a {}",
    "a picture that shows a {}",
    "one {}, seen from near",
    "a {} among other things",
    "a drawing or a photo of a {}",
)
PUBLISHED = {"openai": "OPENAI_IMAGENET_TEMPLATES", "simple": "SIMPLE_IMAGENET_TEMPLATES"}
"""By name -> what open_clip calls them."""
IMAGENET = "imagenet"  # in place of a file with names of classes
NAMES_FILE = "classnames.txt"  # taken from the data set's folder where no other is named
CLASS = re.compile(r"\{c?\}")  # where its name stands in a template
OPTIONS = ("names", "classnames", "templates")
SHOWN = 3


def class_captions(
    spec: str, options: dict[str, str], root: str, classes: Sequence[str], usual: Sequence[str]
) -> tuple[dict[str, list[str]], tuple[str | None, str | None]]:
    """The captions of each class, and where the names and the templates of these are from: a file,
    or what the option says itself. `usual`: templates where the options give none. `spec` begins
    messages. Errors: ValueError, OSError."""
    names, templates = _chosen_names(spec, options, root), options.get("templates")
    if names is None and templates in PUBLISHED and {*classes} <= {*_imagenet()[1]}:
        names = IMAGENET
    usual, templates = chosen_templates(spec, templates, usual)
    of_class = {name: name.replace("_", " ") for name in classes}
    if names == IMAGENET:
        of_class = imagenet_names(classes)
    elif names:
        names = existing(spec, names, "file", f"a file of class names; or {IMAGENET}")
        of_class = _read_names(names, classes)
    texts = {
        folder: [template.replace("{}", name) for template in usual]
        for folder, name in of_class.items()
    }
    return texts, (names, templates)


def chosen_templates(
    spec: str, given: str | None, usual: Sequence[str]
) -> tuple[tuple[str, ...], str | None]:
    """Sentences with {} for the class, and where they are from: what the option `templates` says,
    else the usual ones. Errors: ValueError, OSError."""
    if given in PUBLISHED:
        return published_templates(given), given
    if given and CLASS.search(given):
        return (CLASS.sub("{}", given),), given
    if not given:
        return tuple(usual), None
    needed = f"a file of sentences with {{}}; or {', '.join(PUBLISHED)}"
    file = existing(spec, given, "file", needed)
    return read_templates(file), file


def published_templates(name: str) -> tuple[str, ...]:
    """Templates of `PUBLISHED`, with {} where the class stands. Errors: ValueError without the
    package."""
    return tuple(template("{}") for template in getattr(_imagenet()[0], PUBLISHED[name]))


def imagenet_names(folders: Sequence[str]) -> dict[str, str]:
    """OpenAI's name of each folder, `n01440764` -> "tench"; any part of ImageNet's classes. Errors:
    ValueError without the package, and for a folder that is none of these classes."""
    library, ids = _imagenet()
    names = dict(zip(ids, library.IMAGENET_CLASSNAMES, strict=True))
    unknown = [folder for folder in folders if folder not in names]
    if unknown:
        raise ValueError(
            f"names={IMAGENET}: {len(unknown)} of {len(folders)} folders are none of ImageNet's "
            f"1,000 classes, such as {', '.join(map(repr, unknown[:SHOWN]))}; they are called "
            "like n01440764. Give names=FILE for other classes"
        )
    return {folder: names[folder] for folder in folders}


def imagenet_classes() -> tuple[str, ...]:
    """OpenAI's names of ImageNet's 1,000 classes, in its order. Errors: ValueError without the
    package."""
    return tuple(_imagenet()[0].IMAGENET_CLASSNAMES)


@functools.cache
def _imagenet() -> tuple[Any, tuple[str, ...]]:
    """The package open_clip, and the WordNet ids of ImageNet's classes in its order."""
    try:
        import open_clip
        from timm.data import ImageNetInfo
    except ImportError as error:
        raise ValueError(
            "names and templates of ImageNet are taken from the package open_clip_torch "
            f"({error}); install it with pip install -r requirements-models.txt, or give a file"
        ) from error
    return open_clip, tuple(ImageNetInfo("imagenet-1k").label_names())


def _chosen_names(spec: str, options: dict[str, str], root: str) -> str | None:
    """The file with the names of the classes, or `IMAGENET`; None: the folders' own names. Errors:
    ValueError where two are given."""
    given = named_option(spec, options)
    own = os.path.join(root, NAMES_FILE)
    has_own = os.path.isfile(own) and is_inside(root, os.path.realpath(own))
    return given or (own if has_own else None)


def named_option(spec: str, options: Mapping[str, str]) -> str | None:
    """The option with the names of classes. Errors: ValueError where two are given."""
    if "names" in options and "classnames" in options:
        raise ValueError(f"{spec} names and classnames are the same; give one of them")
    return options.get("names", options.get("classnames"))


def read_text(file: str) -> str:
    try:
        return read_bounded(Path(file), JSON_LIMIT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _read_names(file: str, classes: Sequence[str]) -> dict[str, str]:
    """Folder -> name of each class, of a file with a line `folder name` for each, or of a JSON
    object. Errors: ValueError, also for a class that has none."""
    text = read_text(file)
    if file.endswith(".json"):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file}: invalid JSON: {error}") from None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f'{file}: an object {{"folder": "name of the class", ...}} is needed')
    else:
        lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
        short = [line[0] for line in lines if len(line) < 2]
        if short:
            raise ValueError(
                f"{file}: '{short[0]}' has no name; a line is a folder, a space, and the name of "
                "its class"
            )
        names = {folder: name.strip() for folder, name in lines}
    missing = [folder for folder in classes if not names.get(folder, "").strip()]
    if missing:
        raise ValueError(
            f"{file}: no name for {len(missing)} of {len(classes)} folders, the first is "
            f"'{missing[0]}'{near(missing[0], names)}"
        )
    return {folder: names[folder] for folder in classes}


def read_templates(file: str) -> tuple[str, ...]:
    """Read a file with a sentence a line, with {} or {c} for the class, which comes back as {}.
    Errors: ValueError for one without exactly one of them."""
    lines = (line.strip() for line in read_text(file).splitlines())
    templates = tuple(CLASS.sub("{}", line) for line in lines if line)
    wrong = [template for template in templates if template.count("{}") != 1]
    if wrong or not templates:
        raise ValueError(
            f"{file}: {wrong[0] if wrong else 'no line'!r}; each line is a sentence with one {{}}, "
            "for the class"
        )
    return templates
