"""Published data sets of boxes with phrases: Visual Genome, RefCOCO and its kin, Flickr30k
Entities."""

import io
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common.files import JSON_LIMIT, read_bounded
from common.output import brief
from data.bad_samples import BadSample
from data.formats.folders import KarpathyFormat, json_lists, key_of
from data.formats.rows import EntriesFormat, Roots, Stamp, attempt, stamp
from data.formats.specs import ROOT, existing, images_and
from data.formats.tables import an_object, list_entries
from data.regions import BOX_OPTIONS, BoxOptions

# Visual Genome's images come in two archives
ARCHIVES = ("VG_100K", "VG_100K_2")
# [/EN#283585/people Two young guys]
ENTITY = re.compile(r"\[/EN#(\d+)/[^\s\[\]]+ ([^\[\]]*)\]")
PICKLE_LIMIT = 128 << 20  # bytes, of which each may become an object; RefCOCO's have 50 MB
# what makes lists, dicts, texts and numbers; of numbers those of up to 255 bytes
OPCODES = {
    code[0]
    for name in "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 "
    "BININT2 LONG LONG1 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES UNICODE "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 "
    "TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET "
    "LONG_BINGET GLOBAL STACK_GLOBAL".split()
    for code in [getattr(pickle, name)]
}
CORNERS = ("xmin", "ymin", "xmax", "ymax")
# of refcoco: what a sentence chooses among, the referred objects of the split or all boxes
CANDIDATES, REFERRED, ANNOTATED = "candidates", "referred", "annotated"


class VisualGenomeFormat(EntriesFormat):
    """The images of `region_descriptions.json`, with their regions and without captions. Image 5 is
    `5.jpg` in IMAGES, in its folders VG_100K and VG_100K_2, or below a further root."""

    unit = "B"
    holds = ("image", "region")

    def __init__(self, where: str) -> None:
        """`where`: `IMAGES:FILE[?root=DIR]`. Errors: ValueError, FileNotFoundError."""
        usage = "vg:IMAGES:region_descriptions.json or vg:IMAGES:FILE?root=DIR"
        needed = 'a file of [{"id": ..., "regions": [{"x", "y", "width", "height", "phrase"}]}]'
        known = (*BOX_OPTIONS, ROOT)
        folder, file, options, more = images_and("vg", where, known, needed, usage)
        self.boxes = BoxOptions.of(f"data spec 'vg:{where}':", options)
        self.files = [file]
        archives = [os.path.join(folder, name) for name in ARCHIVES]
        self.roots = Roots.of(folder, [*filter(os.path.isdir, archives), *more])
        self.spec = f"vg:{folder}:{file}{self.roots.options()}{self.boxes.words()}"

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        return list_entries(self.file)

    def values(self, content: Any) -> dict[str, Any]:
        entry = an_object(content, "the entry")
        identity, regions = entry.get("id", entry.get("image_id")), entry.get("regions")
        if not isinstance(identity, (int, str)) or not isinstance(regions, list):
            raise BadSample(
                "invalid-row", f"{brief(content)} is given; an image has an id and regions"
            )
        sides = ("x", "y", "width", "height")
        return {
            "id": identity,
            "image": f"{identity}.jpg",
            "region": [
                {"box": [each.get(side) for side in sides], "text": each.get("phrase")}
                if isinstance(each, dict)
                else each
                for each in regions
            ],
        }

    def where(self, file: str, path: str, number: int) -> str:
        return f"{file}#[{number}] {path}"


class RefCocoFormat(KarpathyFormat):
    """The images of one or more splits of `refs(unc).p` or its kin, a region for each object that
    is referred to, with all its sentences; without captions. Boxes are those of `instances.json`.
    With `candidates=annotated` its other boxes of these images are regions without a phrase.

    The file of references is a pickle, of which only lists, dicts, texts and numbers are read, or
    the same as JSON.
    """

    holds = ("image", "region")
    listed = "refs"
    NEEDED = '[{"image_id", "ann_id", "split", "sentences": [{"sent"}]}], as a pickle or JSON'

    def __init__(self, where: str) -> None:
        """`where`: `IMAGES:REFS?split=NAME+NAME[&instances=FILE&candidates=annotated&root=DIR]`.
        Errors: ValueError, FileNotFoundError."""
        usage = "refcoco:IMAGES:REFS.p?split=val or refcoco:IMAGES:REFS.p?split=testA+testB"
        usage += "&instances=FILE&candidates=annotated&root=DIR"
        needed = f"a file of references {self.NEEDED}"
        folder, file, options, more = images_and(
            "refcoco", where, ("split", "instances", CANDIDATES, *BOX_OPTIONS, ROOT), needed, usage
        )
        spec = f"data spec 'refcoco:{where}':"
        self.boxes = BoxOptions.of(spec, options)
        candidates = options.get(CANDIDATES, REFERRED)
        if candidates not in (REFERRED, ANNOTATED):
            known = f"{REFERRED} or {ANNOTATED}"
            raise ValueError(f"{spec} candidates={candidates}; {known} is needed")
        self.annotated = candidates == ANNOTATED
        beside = os.path.join(os.path.dirname(file), "instances.json")
        instances = options.get("instances", beside)
        self.files = [file, existing(spec, instances, "file", f"a file of boxes: {usage}")]
        self.roots = Roots.of(folder, more)
        self.choose_splits(spec, options, usage)
        self.spec = f"refcoco:{folder}:{'::'.join(self.files)}?{'+'.join(self.splits)}"
        self.spec += self.roots.options() + self.boxes.words()
        self.spec += f"&{CANDIDATES}={ANNOTATED}" if self.annotated else ""

    def images(self) -> list:
        if self.file.endswith(".json"):
            found = json_lists(self.file, "list of references", self.NEEDED)[0]
        else:
            found = _plain(self.file)
        if not isinstance(found, list):
            raise ValueError(f"{self.file}: {type(found).__name__} is given; give {self.NEEDED}")
        return found

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        needed = '{"images": [...], "annotations": [...]}'
        images, annotations = json_lists(
            self.files[1], "COCO instances", needed, "images", "annotations"
        )
        names, boxes = (
            {key_of(each, "id"): each.get(what) for each in entries if isinstance(each, dict)}
            for entries, what in ((images, "file_name"), (annotations, "bbox"))
        )
        found: dict[Any, tuple[int, list]] = {}
        referred = set()
        for (number, ref), _ in super().entries():
            image = key_of(ref, "image_id")
            # of a faulty one its number stands for the image
            key = (number,) if image is None else image
            referred.add(key_of(ref, "ann_id"))
            region = {"box": boxes.get(key_of(ref, "ann_id")), "text": _sentences(ref)}
            found.setdefault(key, (number, []))[1].append(region)
        for box in annotations if self.annotated else ():
            image = key_of(box, "image_id")
            if image in found and key_of(box, "id") not in referred:
                found[image][1].append({"box": box.get("bbox"), "candidate": True})
        for key, (number, regions) in found.items():
            yield (number, (key, names.get(key), regions)), 1

    def values(self, content: tuple[Any, Any, list]) -> dict[str, Any]:
        identity, name, regions = content
        if name is None:
            raise BadSample(
                "invalid-row",
                f"its image {brief(identity)} is not listed in {self.files[1]} with a file_name",
            )
        return {"id": identity, "image": name, "region": regions}


class Flickr30kEntitiesFormat(EntriesFormat):
    """The images of one or more splits of Flickr30k Entities, with their captions and a region for
    each box, with all phrases that the captions have for it. FOLDER has `Sentences/ID.txt`,
    `Annotations/ID.xml` and `train.txt`, `val.txt`, `test.txt`; an image is `ID.jpg`."""

    holds = ("image", "text", "region")

    def __init__(self, where: str) -> None:
        """`where`: `IMAGES:FOLDER?split=NAME+NAME[&root=DIR]`. Errors: ValueError,
        FileNotFoundError."""
        kind = "flickr30k-entities"
        usage = f"{kind}:IMAGES:FOLDER?split=test or {kind}:IMAGES:FOLDER?split=train+val&root=DIR"
        needed = "a folder with Sentences, Annotations and a list of ids, SPLIT.txt, per split"
        folder, own, options, more = images_and(
            kind, where, ("split", *BOX_OPTIONS, ROOT), needed, usage, "folder"
        )
        spec = f"data spec '{kind}:{where}':"
        self.boxes = BoxOptions.of(spec, options)
        splits = [name for name in options.get("split", "").split("+") if name]
        if not splits:
            there = sorted(name[:-4] for name in os.listdir(own) if name.endswith(".txt"))
            raise ValueError(
                f"{spec} no split is given; write {usage}; there are {', '.join(there) or 'none'}"
            )
        self.files = [
            existing(spec, os.path.join(own, f"{name}.txt"), "file", f"a list of ids: {usage}")
            for name in splits
        ]
        for name in ("Sentences", "Annotations"):
            existing(spec, os.path.join(own, name), "folder", f"{needed}: {usage}")
        self.annotations, self.roots = Roots.of(own), Roots.of(folder, more)
        self.spec = f"{kind}:{folder}:{own}?{'+'.join(splits)}{self.roots.options()}"
        self.spec += self.boxes.words()

    def fingerprint(self) -> list[Stamp]:
        stamps = super().fingerprint()
        for name in ("Sentences", "Annotations"):
            for entry in os.scandir(os.path.join(self.annotations.own, name)):
                stamps.append(stamp(entry.path))
        return sorted(stamps)

    def entries(self) -> Iterator[tuple[tuple[int, str], int]]:
        number = 0
        for file in self.files:
            content = read_bounded(Path(file), JSON_LIMIT).decode("utf-8-sig", "surrogateescape")
            for line in filter(str.strip, content.split("\n")):
                yield (number, line.strip()), 1
                number += 1

    def values(self, content: str) -> dict[str, Any]:
        sentences = attempt(self._text, f"Sentences/{content}.txt")
        values: dict[str, Any] = {"id": content, "image": f"{content}.jpg"}
        if isinstance(sentences, BadSample):
            return values | {"text": sentences, "region": sentences}
        lines = [*filter(str.strip, sentences.split("\n"))]
        phrases: defaultdict[str, list[str]] = defaultdict(list)
        for line in lines:
            for entity, phrase in ENTITY.findall(line):
                phrases[entity].append(phrase)
        captions = [ENTITY.sub(r"\2", line).strip() for line in lines]
        return values | {"text": captions, "region": attempt(self._regions, content, phrases)}

    def _regions(self, identity: str, phrases: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Raises BadSample."""
        name = f"Annotations/{identity}.xml"
        try:
            root = ElementTree.fromstring(self.annotations.read(name, "annotation"))
        except (ElementTree.ParseError, ValueError) as error:
            if isinstance(error, BadSample):
                raise
            raise BadSample("invalid-row", f"{name}: {error}") from error
        found = []
        for thing in root.iter("object"):
            if (box := thing.find("bndbox")) is not None:
                x1, y1, x2, y2 = (_number(box.findtext(corner)) for corner in CORNERS)
                # pixels are counted from 1, and the last is a part of the box
                begin = [None if each is None else each - 1 for each in (x1, y1)]
                entities = (each.text or "" for each in thing.findall("name"))
                texts = dict.fromkeys(text for e in entities for text in phrases.get(e, ()))
                found.append({"xyxy": [*begin, x2, y2], "text": [*texts]})
        return found

    def _text(self, name: str) -> str:
        return self.annotations.read(name, "caption").decode("utf-8", "surrogateescape")

    def where(self, file: str, path: str, number: int) -> str:
        return f"{self.annotations.own}#{path}"


class _Allowed(dict[int, Any]):
    """Opcode -> what reads it."""

    def __missing__(self, opcode: int) -> Any:
        raise pickle.UnpicklingError(f"it has the opcode {opcode:#04x}, which makes none of them")


class _PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Makes lists, dicts, texts and numbers, and calls nothing. The one in C would take memory for
    whatever number of objects the file claims to have; so would opcodes that are left out here."""

    dispatch = _Allowed(
        {code: read for code, read in pickle._Unpickler.dispatch.items() if code in OPCODES}  # type: ignore[attr-defined]
    )

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and nothing is called")


def _plain(file: str) -> Any:
    """What a pickle holds, also one that Python 2 wrote. Errors: ValueError."""
    try:
        content = io.BytesIO(read_bounded(Path(file), PICKLE_LIMIT))
        size = len(content.getbuffer())
        found = _PlainUnpickler(content, encoding="utf-8", errors="surrogateescape").load()
        if rest := len(content.read()):
            raise pickle.UnpicklingError(f"{rest:,} bytes follow its end; give files of one pickle")
        _refuse_unfolding(found, size)
        return found
    except Exception as error:  # what a damaged one raises is an open set
        raise ValueError(
            f"{file}: not a pickle of lists, dicts, texts and numbers: {type(error).__name__}: "
            f"{error}; give {RefCocoFormat.NEEDED}"
        ) from error


def _refuse_unfolding(found: Any, most: int) -> None:
    """Raise UnpicklingError for lists that stand within others so often that who goes through them
    meets more values than the file has bytes, such as one that holds itself."""
    waiting, met = [found], 1
    while waiting:
        each = waiting.pop()
        within = each.values() if isinstance(each, dict) else each
        if isinstance(each, (list, tuple, dict)):
            if (met := met + len(each)) > most:
                raise pickle.UnpicklingError(f"its lists repeat each other: over {most:,} values")
            waiting += within


def _sentences(ref: Any) -> list:
    """The texts of a reference, in lower case and without punctuation where they are so given."""
    given = ref.get("sentences") if isinstance(ref, dict) else None
    found = (each for each in given if isinstance(each, dict)) if isinstance(given, list) else ()
    return [each.get("sent", each.get("raw")) for each in found]


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
