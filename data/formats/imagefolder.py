"""A folder per class, as ImageNet has them: `DIR/class/name.jpg`, or `DIR/class/name.wav`; captions
are the class's name in some sentences."""

import json
import os
from collections.abc import Iterator, Sequence

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
    near,
    place,
    place_audio,
    stamp,
)
from data.formats.specs import local_file, local_folder, split_options
from data.index.bad_samples import BadSample

OPTIONS = ("names", "templates")
NAMES_FILE = "classnames.txt"  # taken from DIR where it is there and no other is named
TEMPLATES = (
    "a photo of a {}",
    "a picture that shows a {}",
    "one {}, seen from near",
    "a {} among other things",
    "a drawing or a photo of a {}",
)


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
        own = os.path.join(root, NAMES_FILE)
        names = options.get(
            "names", own if os.path.isfile(own) and is_inside(root, os.path.realpath(own)) else None
        )
        templates = options.get("templates")
        self.names_file = local_file(self.kind, names, usage, "class names") if names else None
        self.templates_file = (
            local_file(self.kind, templates, usage, "sentences with {}") if templates else None
        )
        self.names = _read_names(self.names_file, self.classes) if self.names_file else {}
        self.templates = (
            _read_templates(self.templates_file) if self.templates_file else self.usual_templates
        )
        self.spec = f"{self.kind}:{self.folder}?{self.names_file}&{self.templates_file}"

    def fingerprint(self) -> list[Stamp]:
        root = self.roots.own
        folders = [(name, os.path.join(root, name)) for name in self.classes]
        inside = [path for _, path in folders if is_inside(root, os.path.realpath(path))]
        below = [folder for path in inside for folder in _folders(path)]
        return [
            stamp(path) for path in (root, *below, self.names_file, self.templates_file) if path
        ] + [(str(self.templates), 0, 0)]

    def total(self) -> int:
        return len(self.classes)

    def parts(self) -> Iterator[Part]:
        return (Part(self.roots.own, name, 1) for name in self.classes)

    def rows(self, part: Part) -> Iterator[Row]:
        name = self.names.get(part.content, part.content.replace("_", " "))
        captions = [template.replace("{}", name) for template in self.templates]
        for number, path in enumerate(_files(self.roots.own, part.content, self.endings)):
            row = Row(id=path, number=number, path=path)
            try:
                check_characters(path, "the name of the file")
                self._place(row, path)
                row.captions = checked_captions(captions)
            except BadSample as problem:
                row.problem = problem
            yield row

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


def _read_text(file: str) -> str:
    try:
        with open(file, encoding="utf-8-sig") as opened:
            return opened.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _read_names(file: str, classes: list[str]) -> dict[str, str]:
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
        hint = near(missing[0], list(names))
        raise ValueError(
            f"{file}: no name for {len(missing)} of {len(classes)} folders, the first is "
            f"'{missing[0]}'{hint}"
        )
    return {folder: names[folder] for folder in classes}


def _read_templates(file: str) -> tuple[str, ...]:
    templates = tuple(line.strip() for line in _read_text(file).splitlines() if line.strip())
    wrong = [template for template in templates if template.count("{}") != 1]
    if wrong or not templates:
        raise ValueError(
            f"{file}: {wrong[0] if wrong else 'no line'!r}; each line is a sentence with one {{}}, "
            "for the class"
        )
    return templates
