"""A folder per class, as ImageNet has them: `DIR/class/name.jpg`, or `DIR/class/name.wav`; captions
are the class's name in some sentences (`prompts.py`)."""

import os
from collections.abc import Iterator

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
    LEFTOVER,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    Unused,
    check_characters,
    is_inside,
    place,
    place_audio,
    stamp,
    take_captions,
)
from data.formats.specs import local_file, local_folder, split_options
from data.index.bad_samples import BadSample

OPTIONS = ("names", "classnames", "templates")
DEPTH_LIMIT = 100  # folders within a class
NAMES_FILE = "classnames.txt"  # taken from DIR where it is there and no other is named


class ImageFolderFormat(Format):
    """The images of all classes, sorted by class and path; an id is the path below DIR.

    Bad rows tell of images beside the classes, of images in a format that is not read, and of
    classes without an image. Other files are counted as unused.
    """

    unit = "class"
    kind = "imagefolder"
    endings: tuple[str, ...] = IMAGE_ENDINGS
    unread: tuple[str, ...] = (
        *("heic", "heif", "avif", "jxl", "jp2", "svg", "tga", "psd", "ico"),
        *("dng", "raw", "cr2"),
    )
    no_file_of_its_kind = "not-an-image"
    usual_templates = TEMPLATES

    def __init__(self, where: str) -> None:
        """`where`: `DIR[?names=FILE&templates=FILE]`. Errors: ValueError, FileNotFoundError."""
        usage = f"{self.kind}:DIR or {self.kind}:DIR?names=FILE&templates=FILE"
        name, options, _ = split_options(self.kind, where, OPTIONS)
        self.folder = local_folder(self.kind, name, usage)
        self.roots = Roots.of(self.folder)
        root = self.roots.own
        self.classes = sorted(
            entry.name
            for entry in os.scandir(root)
            if _is_folder(entry) and not entry.name.startswith(".") and not _is_leftover(entry)
        )
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
        yield Part(self.roots.own, None, 0)  # what is in no class
        yield from (Part(self.roots.own, name, 1) for name in self.classes)

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        number, folder = 0, part.content
        captions = [] if folder is None else self.prompts(folder)
        expected = {*self.endings, *self.unread}
        for path, leads_out in self._beside() if folder is None else _files(self.roots.own, folder):
            ending = os.path.splitext(path)[1][1:].lower()
            if not leads_out and ending not in expected:
                yield Unused(_kind_of(path), path)
                continue
            row = Row(id=path, number=number, path=path)
            try:
                self._fill(row, folder, ending, captions)
            except BadSample as problem:
                row.problem = problem
            number += 1
            yield row
        if folder is not None and not number:
            without = f"the class has no file that ends with one of {', '.join(self.endings)}"
            yield Row(folder, 0, folder, problem=BadSample("orphan-member", without))

    def _fill(self, row: Row, folder: str | None, ending: str, captions: list[str]) -> None:
        check_characters(row.path, "the name of the file")
        if folder is None:
            raise BadSample(
                "orphan-member", "it lies in no folder of a class, of which captions are made"
            )
        if ending in self.unread:
            raise BadSample(
                self.no_file_of_its_kind, f".{ending} is not read; convert it to {self.endings[0]}"
            )
        self._place(row, row.path)
        take_captions(row, captions)

    def _beside(self) -> Iterator[tuple[str, bool]]:
        """What is in DIR and in no class; as `_files`."""
        used = [os.path.realpath(file) for file in (self.names_file, self.templates_file) if file]
        for entry in sorted(os.scandir(self.roots.own), key=lambda entry: entry.name):
            taken = entry.name in self.classes or os.path.realpath(entry.path) in used
            if not taken and not _is_leftover(entry):
                yield entry.name, False

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
    unread = ("wma", "amr", "ape", "ac3", "mp4", "mkv", "mov", "webm")
    no_file_of_its_kind = "not-audio"
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


def _files(root: str, relative: str) -> Iterator[tuple[str, bool]]:
    """Paths below `root`, sorted, without what systems leave there. A folder that leads out of the
    root, or is too deep, comes as its own path, with True, and is not entered."""
    folder = os.path.join(root, relative)
    if relative.count("/") == DEPTH_LIMIT or not is_inside(root, os.path.realpath(folder)):
        yield relative, True
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = f"{relative}/{entry.name}"
        if _is_leftover(entry):
            continue
        if entry.is_symlink() and _is_folder(
            entry
        ):  # inside it is listed where it is; else a link to its own parent would never end
            if not is_inside(root, os.path.realpath(entry.path)):
                yield path, True
        elif _is_folder(entry):
            yield from _files(root, path)
        else:
            yield path, False


def _is_leftover(entry: os.DirEntry) -> bool:
    # a folder may well be called license
    return bool(LEFTOVER.search(f"{entry.name}/" if _is_folder(entry) else entry.name))


def _is_folder(entry: os.DirEntry) -> bool:
    # of a link to itself `is_dir` raises an error
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _kind_of(path: str) -> str:
    """Of a file that is no image: what it is counted as."""
    if os.path.basename(path).startswith("."):
        return "hidden files"
    ending = os.path.splitext(path)[1].lower()
    return f"files {ending}" if ending else "files without an ending"


def _folders(folder: str, depth: int = 0) -> Iterator[str]:
    """The folder and all below it that `_files` enters, links apart."""
    yield folder
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if depth < DEPTH_LIMIT and entry.is_dir(follow_symlinks=False):
            yield from _folders(entry.path, depth + 1)
