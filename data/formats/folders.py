"""Data sets whose images or sounds are files in folders: a folder per class, as ImageNet has them,
and lists of captions as COCO has them, or as Karpathy split COCO and Flickr for retrieval (Karpathy
and Fei-Fei 2015)."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from common.files import refuse_longer
from common.output import brief
from common.spelling import near
from data.bad_samples import BadSample
from data.formats.prompts import OPTIONS, TEMPLATES, class_captions
from data.formats.rows import (
    LEFTOVER,
    LIST_LIMIT,
    EntriesFormat,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    Unused,
    attempt,
    stamp,
)
from data.formats.specs import ROOT, existing, images_and, split_options
from data.regions import BOX_OPTIONS, BoxOptions
from data.stored.audio import AUDIO
from data.stored.image import IMAGE
from data.stored.regions import REGIONS
from data.stored.roots import is_inside
from data.stored.video import VIDEO

DEPTH_LIMIT = 100  # folders within a class


class ImageFolderFormat(Format):
    """The images of all classes, `DIR/class/name.jpg`, sorted by class and path; an id is the path
    below DIR, and captions are the class's name in some sentences.

    Bad rows tell of images beside the classes, of images in a format that is not read, and of
    classes without an image. Other files are counted as unused.
    """

    unit = "class"
    kind = "imagefolder"
    modality = "image"
    endings: tuple[str, ...] = IMAGE.endings
    unread: tuple[str, ...] = (
        *("heic", "heif", "avif", "jxl", "jp2", "svg", "tga", "psd", "ico"),
        *("dng", "raw", "cr2"),
    )
    not_of_its_kind = IMAGE.not_of_its_kind
    usual_templates = TEMPLATES

    def __init__(self, where: str) -> None:
        """`where`: `DIR[?names=FILE&templates=FILE]`. Errors: ValueError, FileNotFoundError."""
        spec = f"data spec '{self.kind}:{where}':"
        usage = f"{self.kind}:DIR or {self.kind}:DIR?names=FILE&templates=FILE"
        name, options, _ = split_options(self.kind, where, OPTIONS)
        folder = existing(spec, name, "folder", f"a folder that has one per class: {usage}")
        self.roots = Roots.of(folder)
        self.classes = sorted(
            entry.name
            for entry in os.scandir(self.roots.own)
            if _is_folder(entry) and not entry.name.startswith(".") and not _is_leftover(entry)
        )
        if not self.classes:
            raise ValueError(f"{spec} {folder} has no folder in it; a folder per class is needed")
        self.texts, self.made_of = class_captions(
            spec, options, self.roots.own, self.classes, self.usual_templates
        )
        self.spec = f"{self.kind}:{folder}?{'&'.join(map(str, self.made_of))}"

    def fingerprint(self) -> list[Stamp]:
        root = self.roots.own
        stamps = [stamp(root)]
        for name in self.classes:
            top = os.path.join(root, name)
            for folder, names, _ in os.walk(top) if is_inside(root, os.path.realpath(top)) else ():
                stamps.append(stamp(folder))
                if folder.count("/") - root.count("/") > DEPTH_LIMIT:
                    names.clear()  # goes no deeper
        return [*sorted(stamps), (repr(self.texts), 0, 0)]

    def total(self) -> int:
        return len(self.classes)

    def parts(self) -> Iterator[Part]:
        yield Part(self.roots.own, None, 0)  # what is in no class
        yield from (Part(self.roots.own, name, 1) for name in self.classes)

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        name, number = part.content, 0
        found = self._beside() if name is None else files_below(self.roots.own, name)
        for path, leads_out in found:
            ending = os.path.splitext(path)[1][1:].lower()
            values: dict[str, Any] | BadSample
            if not leads_out and ending not in {*self.endings, *self.unread}:
                yield Unused(kind_of(path), path)
                continue
            if name is None:
                values = BadSample(
                    "orphan-member", "it lies in no folder of a class, of which captions are made"
                )
            elif ending in self.unread:
                values = BadSample(
                    self.not_of_its_kind, f".{ending} is not read; convert it to {self.endings[0]}"
                )
            else:
                values = {self.modality: path, "text": self.texts[name]}
            yield Row(path, number, values)
            number += 1
        if name is not None and not number:
            without = f"the class has no file that ends with one of {', '.join(self.endings)}"
            yield Row(name, 0, BadSample("orphan-member", without))

    def _beside(self) -> Iterator[tuple[str, bool]]:
        """What is in DIR and in no class; as `files_below`."""
        used = {*map(os.path.realpath, filter(None, self.made_of))}
        for entry in sorted(os.scandir(self.roots.own), key=lambda entry: entry.name):
            taken = entry.name in self.classes or os.path.realpath(entry.path) in used
            if not taken and not _is_leftover(entry):
                yield entry.name, False

    def label(self, path: str) -> str:
        return path.partition("/")[0]

    def where(self, file: str, path: str, number: int) -> str:
        return os.path.join(file, path)


class AudioFolderFormat(ImageFolderFormat):
    """The sounds of all classes, `DIR/class/name.wav`."""

    kind = "audiofolder"
    modality = "audio"
    endings = AUDIO.endings
    unread = ("wma", "amr", "ape", "ac3", "mp4", "mkv", "mov", "webm")
    not_of_its_kind = AUDIO.not_of_its_kind
    holds = ("audio", "text")
    usual_templates = (
        "the sound of {}",
        "a recording of {}",
        "{}",
        "one can hear {}",
        "{}, with some noise",
    )


class VideoFolderFormat(ImageFolderFormat):
    """The films of all classes, `DIR/class/name.mp4`, as Kinetics has them."""

    kind = "videofolder"
    modality = "video"
    endings = VIDEO.endings
    unread = ("gif", "apng", "ogv", "3gp", "rmvb")
    not_of_its_kind = VIDEO.not_of_its_kind
    holds = ("video", "text")
    usual_templates = (
        "a video of {}",
        "a film of a person {}",
        "{}",
        "a clip of {}, seen from the front",
        "one can see {}",
    )


def files_below(root: str, relative: str = "") -> Iterator[tuple[str, bool]]:
    """Paths below `relative` in `root`, sorted, without what systems leave there. A folder that
    leads out of the root, or is too deep, comes as its own path, with True, and is not entered."""
    folder = os.path.join(root, relative)
    outside = relative and not is_inside(root, os.path.realpath(folder))
    if relative.count("/") == DEPTH_LIMIT or outside:
        yield relative, True
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = os.path.join(relative, entry.name)
        if _is_leftover(entry):
            continue
        if not _is_folder(entry):
            yield path, False
        elif not entry.is_symlink():
            yield from files_below(root, path)
        # What a linked folder holds is listed where it is, else a link to its own parent would
        # never end.
        elif not is_inside(root, os.path.realpath(entry.path)):
            yield path, True


def _is_leftover(entry: os.DirEntry) -> bool:
    # a folder may well be called license
    return bool(LEFTOVER.search(f"{entry.name}/" if _is_folder(entry) else entry.name))


def _is_folder(entry: os.DirEntry) -> bool:
    # of a link to itself `is_dir` raises an error
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def kind_of(path: str) -> str:
    """What a file that is not used is counted as."""
    if os.path.basename(path).startswith("."):
        return "hidden files"
    ending = os.path.splitext(path)[1].lower()
    return f"files {ending}" if ending else "files without an ending"


# -- lists of captions


class ListFormat(EntriesFormat):
    """A JSON file with the list "images". It is one value and is read as a whole (COCO's largest
    has 91 MB)."""

    listed = "images"

    def name(self, number: int) -> str:
        return f"{self.listed}[{number}]"

    def where(self, file: str, path: str, number: int) -> str:
        return f"{file}#{self.listed}[{number}] {path}"


def json_lists(path: str, what: str, needed: str, *keys: str) -> list[list]:
    """The lists of a file by these keys; without keys, all of it is one. Errors: ValueError."""
    try:
        refuse_longer(os.path.getsize(path), LIST_LIMIT, path)
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            content = json.load(file, object_hook=_without_outlines)
        lists = [content[key] for key in keys] or [content]
        if not all(isinstance(each, list) for each in lists):
            raise TypeError(f"lists are needed of {' and '.join(keys)}")
        return lists
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: no {what} ({found}); {needed} is needed") from error


def _without_outlines(entry: dict) -> dict:
    """Outlines of objects are most of a file of instances, and would take gigabytes of memory."""
    entry.pop("segmentation", None)
    return entry


class CocoFormat(ListFormat):
    """One sample per entry of "images", with all its captions, and with the boxes of a file of
    instances and the names of their categories where one is given; then one faulty row per caption
    whose image is not listed. File names count from IMAGES, then from each further root."""

    NEEDED = '{"images": [...], "annotations": [...]}'
    NEEDED_BOXES = '{"images": [...], "annotations": [...], "categories": [...]}'
    holds: tuple[str, ...] = ("image", "text")

    def __init__(self, where: str) -> None:
        """`where`: `IMAGES:CAPTIONS.json[?instances=INSTANCES.json&root=DIR]`. Errors: ValueError,
        FileNotFoundError."""
        usage = "coco:IMAGES:CAPTIONS.json or coco:IMAGES:CAPTIONS.json?instances=FILE&root=DIR"
        needed = f"a file of captions {self.NEEDED}"
        known = ("instances", *BOX_OPTIONS, ROOT)
        folder, file, options, more = images_and("coco", where, known, needed, usage)
        self.boxes = BoxOptions.of(f"data spec 'coco:{where}':", options)
        self.files = [file]
        self.roots = Roots.of(folder, more)
        self.spec = f"coco:{folder}:{self.file}{self.roots.options()}"
        if "instances" in options:
            of = f"data spec 'coco:{where}':"
            needed = f"a file of boxes {self.NEEDED_BOXES}: {usage}"
            self.files.append(existing(of, options["instances"], "file", needed))
            self.holds = (*self.holds, "region")
            self.spec += f"?instances={self.files[1]}{self.boxes.words()}"

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        needed = self.NEEDED
        images, annotations = json_lists(
            self.file, "COCO captions", needed, "images", "annotations"
        )
        more, regions, crowds = self._instances()
        texts: defaultdict[Any, list] = defaultdict(list)
        faulty: list[tuple[Any, list]] = []
        for annotation in annotations:
            identity = key_of(annotation, "image_id")
            if identity is None:
                faulty.append((annotation, []))
            else:
                texts[identity].append(annotation.get("caption"))
        # An image that is listed twice has its captions twice: the second is a duplicate.
        known = {key_of(image, "id") for image in images}
        images += [image for image in more if key_of(image, "id") not in known]
        listed = [(image, texts.get(key_of(image, "id"), [])) for image in images]
        known = {key_of(image, "id") for image in images}
        alone = [({"id": key}, found) for key, found in texts.items() if key not in known]
        for number, (image, found) in enumerate([*listed, *faulty, *alone]):
            key = key_of(image, "id")
            yield (number, (image, found, regions.get(key), crowds.get(key, ()))), 1

    def _instances(self) -> tuple[list, dict[Any, list], dict[Any, list]]:
        """The images of the file of instances, their regions, and the ids of boxes of crowds, where
        they are needed."""
        regions: defaultdict[Any, list] = defaultdict(list)
        crowds: defaultdict[Any, list] = defaultdict(list)
        if REGIONS.name not in self.modalities:
            return [], regions, crowds
        keys = ("images", "annotations", "categories")
        images, boxes, categories = json_lists(
            self.files[1], "COCO instances", self.NEEDED_BOXES, *keys
        )
        names = {
            key_of(each, "id"): each.get("name") for each in categories if isinstance(each, dict)
        }
        for box in boxes:
            image = key_of(box, "image_id")
            if image is not None and box.get("iscrowd"):
                crowds[image].append(box.get("id"))
            elif image is not None:
                name = names.get(key_of(box, "category_id"))
                regions[image].append({"box": box.get("bbox"), "text": name})
        return images, regions, crowds

    def rows(self, part: Part) -> Iterator[Row]:
        for row, (_, content) in zip(super().rows(part), part.content):
            places = (f"{self.files[1]}#annotation {box}" for box in content[3])
            yield row._replace(beside=[Unused("boxes of crowds", place) for place in places])

    def where(self, file: str, path: str, number: int) -> str:
        is_place = path.startswith(f"{self.files[-1]}#")  # of a crowd's box
        return path if is_place else super().where(file, path, number)

    def values(self, content: tuple[Any, list, list | None, Any]) -> dict[str, Any]:
        image, texts, regions, _ = content
        if not isinstance(image, dict) or image.get("id") is None:
            raise BadSample(
                "invalid-row",
                f"{brief(image)} is given; an image has an id and a file_name, a caption an "
                "image_id",
            )
        unlisted = BadSample("invalid-row", f"image {image['id']} is not listed with a file_name")
        name = image.get("file_name", unlisted)
        return {"id": image["id"], "text": texts, "image": name, "region": regions}


class KarpathyFormat(ListFormat):
    """The images of one or more splits of `dataset_coco.json`, `dataset_flickr30k.json` or
    `dataset_flickr8k.json`, with all their sentences.

    An image is `filepath/filename`, or `filename` alone, below the file's folder or below a further
    root. An id is COCO's own where there is one, so that leaks are found beside `coco:`.
    """

    NEEDED = '{"images": [{"filename": ..., "split": ..., "sentences": [{"raw": ...}]}]}'

    def __init__(self, where: str) -> None:
        """`where`: `FILE?split=NAME+NAME[&root=DIR]`. Errors: ValueError, FileNotFoundError."""
        usage = "karpathy:FILE?split=test or karpathy:FILE?split=train+restval&root=DIR"
        name, options, more = split_options("karpathy", where, ("split", ROOT))
        spec = f"data spec 'karpathy:{where}':"
        needed = f"a file of Karpathy's splits {self.NEEDED}: {usage}"
        self.files = [existing(spec, name, "file", needed)]
        self.roots = Roots.of(os.path.dirname(self.file), more)
        self.choose_splits(spec, options, usage)
        self.spec = f"karpathy:{self.file}?{'+'.join(self.splits)}{self.roots.options()}"

    def choose_splits(self, spec: str, options: dict[str, str], usage: str) -> None:
        """Errors: ValueError."""
        self.splits = tuple(filter(None, options.get("split", "").split("+")))
        if not self.splits:
            raise ValueError(
                f"{spec} no split is given; write {usage}; the file has {_counts(self.images())}"
            )

    def images(self) -> list:
        """All that the file lists, each of some split. Errors: ValueError."""
        return json_lists(self.file, "file of Karpathy's splits", self.NEEDED, "images")[0]

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        images = self.images()
        known = dict.fromkeys(map(_split_of, images))
        for split in self.splits:
            if split not in known:
                raise ValueError(
                    f"data spec '{self.spec}': the file has no split {split!r}; it has "
                    f"{_counts(images)}{near(split, map(str, known))}"
                )
        # An entry that names no split may be of any.
        wanted = (None, *self.splits)
        for entry in enumerate(images):
            if _split_of(entry[1]) in wanted:
                yield entry, 1

    def values(self, content: Any) -> dict[str, Any]:
        sentences = content.get("sentences") if isinstance(content, dict) else None
        if not isinstance(sentences, list) or "filename" not in content or not _split_of(content):
            raise BadSample(
                "invalid-row",
                f"{brief(content)} is given; an image has a filename, sentences and a split",
            )
        texts = [each.get("raw") if isinstance(each, dict) else each for each in sentences]
        return {
            "id": content.get("cocoid", content.get("imgid")),
            "text": texts,
            "image": self._path(content["filename"], content.get("filepath")),
        }

    def _path(self, name: Any, folder: Any) -> Any:
        if not isinstance(folder, str) or not isinstance(name, str):
            return name
        path = f"{folder}/{name}"
        found = attempt(self.roots.find, path)
        is_missing = isinstance(found, BadSample) and found.reason == "missing-file"
        return name if is_missing else path


def key_of(entry: Any, name: str) -> str | int | None:
    found = entry.get(name) if isinstance(entry, dict) else None
    return found if isinstance(found, (str, int)) else None


def _split_of(image: Any) -> str | None:
    split = image.get("split") if isinstance(image, dict) else None
    return split if isinstance(split, str) and split else None


def _counts(images: list) -> str:
    """List how many images each split has, for messages."""
    counts = Counter(map(str, map(_split_of, images)))
    return ", ".join(f"{split} ({number:,})" for split, number in counts.items())
