"""A folder per class, as ImageNet has them: `DIR/class/name.jpg`, or `DIR/class/name.wav`; captions
are the class's name in some sentences (`prompts.py`)."""

import os
from collections.abc import Iterator, Sequence

from data.formats.prompts import (
    IMAGENET,
    PUBLISHED,
    TEMPLATES,
    imagenet_names,
    is_imagenet,
    published_templates,
    read_names,
    read_templates,
)
from data.formats.rows import (
    AUDIO_ENDINGS,
    IMAGE_ENDINGS,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    check_characters,
    checked_captions,
    is_inside,
    place,
    place_audio,
    stamp,
)
from data.formats.specs import local_file, local_folder, split_options
from data.index.bad_samples import BadSample

OPTIONS = ("names", "classnames", "templates")
NAMES_FILE = "classnames.txt"  # taken from DIR where it is there and no other is named


class ImageFolderFormat(Format):
    """The images of all classes, sorted by class and path; an id is the path below DIR. Other
    files are passed over."""

    unit = "class"
    kind = "imagefolder"
    endings = IMAGE_ENDINGS
    usual_templates = TEMPLATES

    def __init__(self, where: str) -> None:
        """`where`: `DIR[?names=FILE&templates=FILE]`. Errors: ValueError, FileNotFoundError."""
        usage = f"{self.kind}:DIR or {self.kind}:DIR?names=FILE&templates=FILE"
        name, options, _ = split_options(self.kind, where, OPTIONS)
        self.folder = local_folder(self.kind, name, usage)
        self.roots = Roots.of(self.folder)
        root = self.roots.own
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        if not self.classes:
            raise ValueError(
                f"data spec '{self.kind}:{where}': {self.folder} has no folder in it; a folder per "
                "class is needed"
            )
        templates = options.get("templates")
        self.templates_file = None
        if templates in PUBLISHED:
            self.templates = published_templates(templates)
        elif templates and "{}" in templates:
            self.templates = (templates,)
        elif templates:
            self.templates_file = local_file(
                self.kind, templates, usage, f"sentences with {{}}; or {', '.join(PUBLISHED)}"
            )
            self.templates = read_templates(self.templates_file)
        else:
            self.templates = self.usual_templates
        names = _chosen_names(f"{self.kind}:{where}", options, root)
        if names is None and templates in PUBLISHED and is_imagenet(self.classes):
            names = IMAGENET
        self.names_file = None
        if names == IMAGENET:
            self.names = imagenet_names(self.classes)
        elif names:
            self.names_file = local_file(
                self.kind, names, usage, f"class names; or {IMAGENET} for ImageNet's"
            )
            self.names = read_names(self.names_file, self.classes)
        else:
            self.names = {}
        said = self.templates_file or (templates if templates else None)
        self.spec = f"{self.kind}:{self.folder}?{self.names_file or names}&{said}"

    def fingerprint(self) -> list[Stamp]:
        root = self.roots.own
        folders = [(name, os.path.join(root, name)) for name in self.classes]
        inside = [path for _, path in folders if is_inside(root, os.path.realpath(path))]
        below = [folder for path in inside for folder in _folders(path)]
        return [
            stamp(path) for path in (root, *below, self.names_file, self.templates_file) if path
        ] + [(str(self.templates), 0, 0), *self._names_by_library()]

    def _names_by_library(self) -> list[Stamp]:
        """Of names that no file holds; none for the folders' own."""
        return [(str(self.names), 0, 0)] if self.names and not self.names_file else []

    def total(self) -> int:
        return len(self.classes)

    def parts(self) -> Iterator[Part]:
        return (Part(self.roots.own, name, 1) for name in self.classes)

    def rows(self, part: Part) -> Iterator[Row]:
        captions = self.prompts(part.content)
        for number, path in enumerate(_files(self.roots.own, part.content, self.endings)):
            row = Row(id=path, number=number, path=path)
            try:
                check_characters(path, "the name of the file")
                self._place(row, path)
                row.captions = checked_captions(captions)
            except BadSample as problem:
                row.problem = problem
            yield row

    def prompts(self, folder: str) -> list[str]:
        """The name of a class in each of the sentences."""
        name = self.names.get(folder, folder.replace("_", " "))
        return [template.replace("{}", name) for template in self.templates]

    def label(self, path: str) -> str:
        return path.partition("/")[0]

    def _place(self, row: Row, path: str) -> None:
        place(row, self.roots, path)

    def where(self, file: str, path: str, number: int) -> str:
        return os.path.join(file, path)


class AudioFolderFormat(ImageFolderFormat):
    """The same of sounds."""

    kind = "audiofolder"
    endings = AUDIO_ENDINGS
    holds = ("audio", "text")
    usual_templates = (
        "the sound of {}",
        "a recording of {}",
        "{}",
        "one can hear {}",
        "{}, with some noise",
    )

    def _place(self, row: Row, path: str) -> None:
        place_audio(row, self.roots, path)


def _chosen_names(spec: str, options: dict[str, str], root: str) -> str | None:
    """The file with the names of the classes, or `IMAGENET`; None: neither is given, nor is there
    the folder's own file. Errors: ValueError where two are given."""
    given = [options[key] for key in ("names", "classnames") if key in options]
    if len(given) > 1:
        raise ValueError(f"data spec '{spec}': names and classnames are the same; give one of them")
    own = os.path.join(root, NAMES_FILE)
    if not given and os.path.isfile(own) and is_inside(root, os.path.realpath(own)):
        return own
    return given[0] if given else None


def _files(root: str, relative: str, endings: Sequence[str]) -> Iterator[str]:
    """Paths below `root`, sorted. A folder that leads out of the root comes as its own path, and is
    not entered."""
    folder = os.path.join(root, relative)
    if not is_inside(root, os.path.realpath(folder)):
        yield relative
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = f"{relative}/{entry.name}"
        if (
            entry.is_symlink() and entry.is_dir()
        ):  # inside it is listed where it is; else a link to its own parent would never end
            if not is_inside(root, os.path.realpath(entry.path)):
                yield path
        elif entry.is_dir():
            yield from _files(root, path, endings)
        elif entry.name.rpartition(".")[2].lower() in endings:
            yield path


def _folders(folder: str) -> Iterator[str]:
    """The folder and all below it, links apart."""
    yield folder
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from _folders(entry.path)
