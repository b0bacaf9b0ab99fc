"""Names of classes and the sentences that they stand in: of files, and those that figures for
ImageNet are published with.

OpenCLIP's package has OpenAI's names of ImageNet's 1,000 classes and its 80 sentences (Radford et
al. 2021, section 3.1.4), and timm, which it needs, their WordNet ids; both are taken from there.
"""

import functools
import json
import os
from collections.abc import Sequence

from data.formats.rows import is_inside, near
from data.formats.specs import local_file

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
SHOWN = 3


class ClassCaptions:
    """`texts`: folder of a class -> its captions. `files`: those that they are made of. `named`:
    what tells these captions from others of the same folders."""

    OPTIONS = ("names", "classnames", "templates")

    def __init__(
        self,
        spec: str,
        options: dict[str, str],
        root: str,
        classes: Sequence[str],
        usual: Sequence[str],
    ) -> None:
        """`usual`: templates where the options give none. Errors: ValueError, OSError."""
        kind = spec.partition(":")[0]
        usage = f"{kind}:DIR?names=FILE&templates=FILE"
        self.files: list[str] = []

        def file_of(given: str, what: str) -> str:
            self.files.append(local_file(kind, given, usage, what))
            return self.files[-1]

        templates = given = options.get("templates")
        if templates in PUBLISHED:
            usual = published_templates(templates)
        elif templates and "{}" in templates:
            usual = (templates,)
        elif templates:
            templates = file_of(templates, f"sentences with {{}}; or {', '.join(PUBLISHED)}")
            usual = _read_templates(templates)
        names = _chosen_names(spec, options, root)
        if names is None and given in PUBLISHED and {*classes} <= {*_wordnet_ids()}:
            names = IMAGENET
        of_class = {name: name.replace("_", " ") for name in classes}
        if names == IMAGENET:
            of_class = imagenet_names(classes)
        elif names:
            names = file_of(names, f"class names; or {IMAGENET} for ImageNet's")
            of_class = _read_names(names, classes)
        self.named = f"{names}&{templates}"
        self.texts = {
            folder: [template.replace("{}", name) for template in usual]
            for folder, name in of_class.items()
        }


def published_templates(name: str) -> tuple[str, ...]:
    """Templates of `PUBLISHED`, with {} where the class stands. Errors: ValueError without the
    package."""
    library = _open_clip(f"templates={name}")
    return tuple(template("{}") for template in getattr(library, PUBLISHED[name]))


def imagenet_names(folders: Sequence[str]) -> dict[str, str]:
    """OpenAI's name of each folder, `n01440764` -> "tench"; any part of ImageNet's classes. Errors:
    ValueError without the package, and for a folder that is none of these classes."""
    named = _open_clip(f"names={IMAGENET}").IMAGENET_CLASSNAMES
    names = dict(zip(_wordnet_ids(), named, strict=True))
    unknown = [folder for folder in folders if folder not in names]
    if unknown:
        raise ValueError(
            f"names={IMAGENET}: {len(unknown)} of {len(folders)} folders are none of ImageNet's "
            f"1,000 classes, such as {', '.join(map(repr, unknown[:SHOWN]))}; they are called "
            "like n01440764. Give names=FILE for other classes"
        )
    return {folder: names[folder] for folder in folders}


@functools.cache
def _wordnet_ids() -> tuple[str, ...]:
    """ImageNet's ids, in the order of the classes."""
    try:
        from timm.data import ImageNetInfo
    except ImportError as error:
        raise _lacking(f"names={IMAGENET}", error) from error
    return tuple(ImageNetInfo("imagenet-1k").label_names())


def _open_clip(asked: str):
    try:
        import open_clip
    except ImportError as error:
        raise _lacking(asked, error) from error
    return open_clip


def _lacking(asked: str, error: ImportError) -> ValueError:
    return ValueError(
        f"{asked} of an imagefolder is taken from the package open_clip_torch ({error}); install "
        "it with pip install -r requirements-models.txt, or give a file"
    )


def _chosen_names(spec: str, options: dict[str, str], root: str) -> str | None:
    """The file with the names of the classes, or `IMAGENET`; None: the folders' own names. Errors:
    ValueError where two are given."""
    given = [options[key] for key in ("names", "classnames") if key in options]
    if len(given) > 1:
        raise ValueError(f"data spec '{spec}': names and classnames are the same; give one of them")
    own = os.path.join(root, NAMES_FILE)
    if not given and os.path.isfile(own) and is_inside(root, os.path.realpath(own)):
        return own
    return given[0] if given else None


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
