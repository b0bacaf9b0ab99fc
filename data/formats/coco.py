"""Images and a JSON file of captions, as COCO has them, and as Karpathy split COCO and Flickr8k/30k
for retrieval (Karpathy and Fei-Fei 2015)."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from data.formats.rows import (
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    checked_id,
    in_parts,
    near,
    place,
    stamp,
    take_captions,
)
from data.formats.specs import ROOT, local_file, local_folder, split_options
from data.index.bad_samples import BadSample

USAGE = "coco:IMAGES:CAPTIONS.json or coco:IMAGES:CAPTIONS.json?root=DIR"
KARPATHY = "karpathy:FILE?split=test or karpathy:FILE?split=train+restval&root=DIR"


class CocoFormat(Format):
    """One sample per entry of "images", with all its captions; then one faulty row per caption
    whose image is not listed.

    File names count from IMAGES, then from each further root. The JSON file is one value and is
    read as a whole (COCO's largest has 91 MB).
    """

    def __init__(self, where: str) -> None:
        """`where`: `IMAGES:CAPTIONS.json[?root=DIR]`. Errors: ValueError, FileNotFoundError."""
        names, _, more = split_options("coco", where, (ROOT,))
        folder, colon, file = names.rpartition(":")
        if not colon or not folder or not file:
            raise ValueError(f"data spec 'coco:{where}': a folder and a file are needed: {USAGE}")
        self.folder = local_folder("coco", folder, USAGE)
        self.file = local_file(
            "coco", file, USAGE, 'captions {"images": [...], "annotations": [...]}'
        )
        self.roots = Roots.of(self.folder, more)
        self.spec = f"coco:{self.folder}:{self.file}{self.roots.options()}"

    def fingerprint(self) -> list[Stamp]:
        return [stamp(self.file)]

    def parts(self) -> Iterator[Part]:
        return in_parts(
            self.file,
            (
                ((number, image, texts), 1, 1)
                for number, (image, texts) in enumerate(self._samples())
            ),
        )

    def _samples(self) -> Iterator[tuple[object, list]]:
        try:
            with open(self.file, encoding="utf-8-sig", errors="surrogateescape") as file:
                content = json.load(file)
            images, annotations = content["images"], content["annotations"]
            if not isinstance(images, list) or not isinstance(annotations, list):
                raise TypeError('"images" and "annotations" must be lists')
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f'{self.file}: no COCO captions ({what}); {{"images": [...], "annotations": [...]}} is needed'
            ) from error
        texts, faulty = defaultdict(list), []
        for annotation in annotations:
            if isinstance(annotation, dict) and isinstance(annotation.get("image_id"), (int, str)):
                texts[annotation["image_id"]].append(annotation.get("caption"))
            else:
                faulty.append(annotation)
        known = set()
        for image in images:
            name = image.get("id") if isinstance(image, dict) else None
            known.add(name if isinstance(name, (int, str)) else None)
            yield image, texts.get(name, []) if isinstance(name, (int, str)) else []
        for annotation in faulty:
            yield annotation, []
        for name in [name for name in texts if name not in known]:
            yield {"id": name}, texts[name]

    def rows(self, part: Part) -> Iterator[Row]:
        for number, image, texts in part.content:
            row = Row(id=f"images[{number}]", number=number)
            try:
                if not isinstance(image, dict) or image.get("id") is None:
                    raise BadSample(
                        "invalid-row",
                        f"{image!r:.100} is given; an image has an id and a file_name, a caption "
                        "an image_id",
                    )
                row.id = checked_id(image["id"], row.id)
                if "file_name" not in image:
                    raise BadSample("invalid-row", f"image {row.id} is not listed with a file_name")
                take_captions(row, texts)
                place(row, self.roots, image["file_name"])
            except BadSample as problem:
                row.problem = problem
            yield row

    def where(self, file: str, path: str, number: int) -> str:
        return f"{file}#images[{number}]" + (f" {path}" if path else "")


class KarpathyFormat(Format):
    """The images of one or more splits of `dataset_coco.json`, `dataset_flickr30k.json` or
    `dataset_flickr8k.json`, with all their sentences.

    An image is `filepath/filename`, or `filename` alone, below the file's folder or below a further
    root. An id is COCO's own where there is one, so that leaks are found beside `coco:`.
    """

    def __init__(self, where: str) -> None:
        """`where`: `FILE?split=NAME+NAME[&root=DIR]`. Errors: ValueError, FileNotFoundError."""
        name, options, more = split_options("karpathy", where, ("split", ROOT))
        self.file = local_file(
            "karpathy", name, KARPATHY, 'Karpathy\'s splits {"images": [{"sentences": ...}, ...]}'
        )
        self.roots = Roots.of(os.path.dirname(self.file), more)
        self.splits = tuple(filter(None, options.get("split", "").split("+")))
        if not self.splits:
            raise ValueError(
                f"data spec 'karpathy:{where}': no split is given; write {KARPATHY}; the file has "
                f"{self._counts()}"
            )
        self.spec = f"karpathy:{self.file}?{'+'.join(self.splits)}{self.roots.options()}"

    def fingerprint(self) -> list[Stamp]:
        return [stamp(self.file)]

    def parts(self) -> Iterator[Part]:
        images = self._images()
        known = dict.fromkeys(_split_of(image) for image in images)
        for split in self.splits:
            if split not in known:
                raise ValueError(
                    f"data spec '{self.spec}': the file has no split {split!r}; it has "
                    f"{self._counts()}{near(split, [str(each) for each in known])}"
                )
        entries = enumerate(images)
        return in_parts(
            self.file,
            (
                ((n, image), 1, 1)
                for n, image in entries
                # an entry that names no split may be of any
                if _split_of(image) in (None, *self.splits)
            ),
        )

    def _images(self) -> list:
        try:
            with open(self.file, encoding="utf-8-sig", errors="surrogateescape") as file:
                images = json.load(file)["images"]
            if not isinstance(images, list):
                raise TypeError('"images" must be a list')
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{self.file}: is no file of Karpathy's splits ({what}); "
                '{"images": [{"filename": ..., "split": ..., "sentences": [{"raw": ...}]}]} is needed'
            ) from error
        return images

    def _counts(self) -> str:
        """Of the file's splits, for messages."""
        counts = Counter(str(_split_of(image)) for image in self._images())
        return ", ".join(f"{split} ({number:,})" for split, number in counts.items())

    def rows(self, part: Part) -> Iterator[Row]:
        for number, image in part.content:
            row = Row(id=f"images[{number}]", number=number)
            try:
                self._fill(row, image)
            except BadSample as problem:
                row.problem = problem
            yield row

    def _fill(self, row: Row, image: Any) -> None:
        sentences = image.get("sentences") if isinstance(image, dict) else None
        if not isinstance(sentences, list) or "filename" not in image or not _split_of(image):
            raise BadSample(
                "invalid-row",
                f"{image!r:.100} is given; an image has a filename, sentences and a split",
            )
        row.id = checked_id(image.get("cocoid", image.get("imgid")), row.id)
        take_captions(
            row, [each.get("raw") if isinstance(each, dict) else each for each in sentences]
        )
        name, folder = image["filename"], image.get("filepath")
        if isinstance(folder, str) and isinstance(name, str):
            try:
                return place(row, self.roots, f"{folder}/{name}")
            except BadSample as problem:
                if problem.reason != "missing-file":
                    raise
        place(row, self.roots, name)

    def where(self, file: str, path: str, number: int) -> str:
        return f"{file}#images[{number}]" + (f" {path}" if path else "")


def _split_of(image: object) -> str | None:
    split = image.get("split") if isinstance(image, dict) else None
    return split if isinstance(split, str) and split else None
