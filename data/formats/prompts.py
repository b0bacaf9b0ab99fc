"""Names of classes and the sentences that they stand in: of files, and those that figures for
ImageNet are published with.

OpenCLIP's package has OpenAI's names of ImageNet's 1,000 classes and its 80 sentences (Radford et
al. 2021, section 3.1.4), and timm, which it needs, their WordNet ids; both are taken from there.
"""

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from common.spelling import near
from data.formats.rows import is_inside
from data.formats.specs import existing

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
    if templates in PUBLISHED:
        usual = published_templates(templates)
    elif templates and "{}" in templates:
        usual = (templates,)
    elif templates:
        needed = f"a file of sentences with {{}}; or {', '.join(PUBLISHED)}"
        templates = existing(spec, templates, "file", needed)
        usual = _read_templates(templates)
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
    if "names" in options and "classnames" in options:
        raise ValueError(f"{spec} names and classnames are the same; give one of them")
    own = os.path.join(root, NAMES_FILE)
    has_own = os.path.isfile(own) and is_inside(root, os.path.realpath(own))
    return options.get("names", options.get("classnames", own if has_own else None))


def _read_text(file: str) -> str:
    try:
        with open(file, encoding="utf-8-sig") as opened:
            return opened.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _read_names(file: str, classes: Sequence[str]) -> dict[str, str]:
    """Folder -> name of each class, of a file with a line `folder name` for each, or of a JSON
    object. Errors: ValueError, also for a class that has none."""
    text = _read_text(file)
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


def _read_templates(file: str) -> tuple[str, ...]:
    """Read a file with a sentence a line. Errors: ValueError for one without exactly one {}."""
    templates = tuple(line.strip() for line in _read_text(file).splitlines() if line.strip())
    wrong = [template for template in templates if template.count("{}") != 1]
    if wrong or not templates:
        raise ValueError(
            f"{file}: {wrong[0] if wrong else 'no line'!r}; each line is a sentence with one {{}}, "
            "for the class"
        )
    return templates
