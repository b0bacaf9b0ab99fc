"""Sets of benchmarks in the layout of CLIP_benchmark, as DataComp's are: what lies in a folder, and
the samples of its tar shards, each with what it is judged by.

    SET/test/nshards.txt                          how many shards there are: 0.tar, 1.tar, …
    SET/test/0.tar                                0.webp and 0.cls, 0.npy or 0.txt, …
    SET/dataset_type.txt                          retrieval or multilabel; without it classes
    SET/classnames.txt                            a name a line
    SET/zeroshot_classification_templates.txt     a sentence a line, with {c} for the class

Source: `build_wds_dataset` of clip_benchmark 1.6.2. Samples are read as they lie in the shards,
without the index of a data set that is trained on: each one that is there counts, or is named.
"""

from __future__ import annotations

import io
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from common.output import brief
from data.bad_samples import BadSample
from data.formats.classes import (
    CLASSIFICATION,
    MULTILABEL,
    NAMES_FILE,
    NUMBER,
    RETRIEVAL,
    TEMPLATES_FILE,
    TYPE_FILE,
    Classes,
    classes_beside,
    type_beside,
)
from data.formats.hub import SPLIT_OF, of_cache
from data.formats.prompts import read_text
from data.formats.shards import expand
from data.formats.specs import is_remote, local_path
from data.formats.webdataset import TEXT_LIMIT, whole_samples
from data.keys import content_hash
from data.stored.image import ENDINGS as IMAGE_ENDINGS
from data.stored.record import Media

FIRST_ENDINGS = ("webp", "png", "jpg", "jpeg")  # which CLIP_benchmark reads, in its order
COUNT_FILE = "nshards.txt"
SPLIT = "test"
DEPTH = 4  # folders below the one that is given, in which shards are looked for
USAGE = "--benchmark DIR, such as a folder of CLIP_benchmark's wds_* sets"
SHOWN = 5


@dataclass(frozen=True)
class Kind:
    """What a set is for. `ending`: of the member that a sample is judged by; `read`: makes that of
    its content, for a set with these classes; raises ValueError with what is wrong. `has_classes`:
    names and sentences lie beside the shards. `groups`: the ending of a member that some sets have,
    with the groups that their samples are of."""

    name: str
    ending: str
    read: Callable[[bytes, Classes], Any]
    has_classes: bool = True
    groups: str | None = None


@dataclass(frozen=True)
class BenchmarkSet:
    """A set as it lies on disk. `shards`: its tar files, in order; `classes`: none where its kind
    has none; `notes`: what is there and not read."""

    name: str
    folder: str
    kind: Kind
    shards: tuple[str, ...]
    classes: Classes
    notes: tuple[str, ...] = ()


class Found(NamedTuple):
    """A set whose marks were not read yet: its name, the folder of its shards, and these."""

    name: str
    folder: str
    shards: Sequence[str]


@dataclass(frozen=True)
class BenchmarkSamples:
    """The n samples of a set. `judged_by`: what the set's kind reads of each; `groups` int64 [n,
    m], of the sets that have some. It is all of a KnownSource that images and captions are loaded
    by."""

    spec: str
    names: Sequence[str]  # of members, with their shards
    files: Sequence[str]  # the shard of each
    places: np.ndarray  # int64 [n, 2]: of the image in its shard, its first byte and its size
    judged_by: Sequence[Any]
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    def value(self, modality: str, i: int) -> bytes:
        """The encoded image. Raises BadSample."""
        offset, size = self.places[i].tolist()
        try:
            with open(self.files[i], "rb", buffering=0) as file:
                found = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise BadSample("unreadable", str(error.strerror)) from error
        if len(found) < size:
            raise BadSample("unreadable", f"ends before byte {offset + size}; it has changed")
        return found

    def content_hash(self, modality: str, i: int) -> bytes:
        """Zeros where it cannot be read."""
        try:
            return content_hash(self.value(modality, i))
        except BadSample:
            return bytes(16)

    def captions(self, i: int) -> Sequence[str]:
        return self.judged_by[i]

    def language(self, i: int) -> None:
        return None

    def where(self, i: int, modality: str | None = None) -> str:
        return self.names[i]


# -- what lies in a folder


def find_sets(where: str) -> list[Found]:
    """The sets in a folder and below it, by name, also as the Hugging Face hub keeps them in its
    cache; a set itself, the folder of its shards, or a pattern of these. Of several splits `test` is
    read. Errors: ValueError where there is none, or one has no such split; OSError."""
    if is_remote(where):
        raise ValueError(f"--benchmark {where}: copy the sets to this machine, and give the folder")
    folders: dict[str, list[str]] = defaultdict(list)  # -> the shards in it
    if os.path.isdir(local_path(where)):
        for folder in _chosen_splits([*_folders_of_shards(local_path(where), DEPTH)]):
            folders[folder] = _shards_of(folder)
    else:
        for file in expand("benchmark", where, USAGE):
            folders[os.path.dirname(file)].append(file)
    if not folders:
        raise ValueError(f"--benchmark {where}: no .tar file is in it or below it; write {USAGE}")
    roots = {folder: _root_of(folder) for folder in folders}
    of_name = Counter(_name_of(root) for root in roots.values())
    top = os.path.dirname(os.path.commonpath([f"{root}/." for root in roots.values()]))
    sets = []
    for folder, shards in folders.items():
        name = _name_of(roots[folder])
        name = os.path.relpath(roots[folder], top) if of_name[name] > 1 else name
        sets.append(Found(name, folder, shards))
    return sorted(sets, key=lambda each: each.name)


def _folders_of_shards(folder: str, depth: int) -> Iterator[str]:
    folder = of_cache(f"--benchmark {folder}", folder)
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    if any(entry.name.endswith(".tar") and entry.is_file() for entry in entries):
        yield folder
    elif depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _folders_of_shards(entry.path, depth - 1)


def _split_of(folder: str) -> str:
    """ "" for a folder that is not called after a split."""
    return SPLIT_OF.get(os.path.basename(folder).lower(), "")


def _root_of(folder: str) -> str:
    """Of the set whose shards lie in a folder."""
    return os.path.dirname(folder) if _split_of(folder) else folder


def _name_of(root: str) -> str:
    of_hub = root.rpartition("/snapshots/")[0]
    return os.path.basename(of_hub or root).rpartition("--")[2]


def _chosen_splits(folders: Sequence[str]) -> list[str]:
    """Of each set the folder with its shards of `SPLIT`, or its only one that is no split. A single
    folder that is a split was asked for by name, or has nothing beside it."""
    splits: dict[str, dict[str, str]] = defaultdict(dict)
    for folder in folders:
        splits[_root_of(folder)][_split_of(folder)] = folder
    chosen = []
    for root, own in splits.items():
        found = own.get(SPLIT) or own.get("") or (folders[0] if len(folders) == 1 else None)
        if found is None:
            raise ValueError(
                f"--benchmark: {root} has no {SPLIT}/, but {', '.join(sorted(own))}; give the "
                f"folder of one, such as {own[min(own)]}, or move {root} away"
            )
        chosen.append(found)
    return chosen


def _shards_of(folder: str) -> list[str]:
    names = [name for name in os.listdir(folder) if name.endswith(".tar")]
    # 10.tar is behind 9.tar
    return [os.path.join(folder, name) for name in sorted(names, key=lambda n: (len(n), n))]


def set_of(found: Found) -> BenchmarkSet:
    """A set with what lies beside its shards. Errors: ValueError where that does not fit together,
    OSError."""
    name, folder, shards = found
    kind = KINDS[type_beside(shards[0]) or CLASSIFICATION]
    counted, notes = _counted(folder, shards)
    classes = Classes((), (), (None, None))
    if kind.has_classes:
        classes = classes_beside(f"--benchmark {folder}:", shards[0], {})
        missing = [
            file for file, of in zip((NAMES_FILE, TEMPLATES_FILE), classes.made_of) if not of
        ]
        if missing:
            hint = (
                f"; if it is of captions, write {RETRIEVAL} into {TYPE_FILE}"
                if len(missing) == 2
                else ""
            )
            raise ValueError(
                f"--benchmark: {folder} has no {' and no '.join(missing)} beside it or one folder "
                f"above, which a set of {kind.name} needs{hint}"
            )
    return BenchmarkSet(name, folder, kind, counted, classes, notes)


def _counted(folder: str, shards: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The shards that the set counts as its own, and what is beside them."""
    file = os.path.join(folder, COUNT_FILE)
    if not os.path.isfile(file):
        return tuple(shards), (f"no {COUNT_FILE} says whether all shards are there",)
    given = read_text(file).strip()
    if not given.isdecimal() or not int(given):
        raise ValueError(f"{file}: {brief(given)}; the number of shards is needed")
    own = [os.path.join(folder, f"{n}.tar") for n in range(int(given))]
    there = {*shards}
    if missing := [os.path.basename(each) for each in own if each not in there]:
        more = ", …" if len(missing) > SHOWN else ""
        raise ValueError(
            f"{file} counts {len(own):,} shards, and {len(missing):,} of them are not there: "
            f"{', '.join(missing[:SHOWN])}{more}; get them, or mend the count"
        )
    beside = sorted(os.path.basename(each) for each in there.difference(own))
    return tuple(own), tuple(f"{name} is not counted by {COUNT_FILE}" for name in beside)


# -- the samples of a set


def read_samples(given: BenchmarkSet) -> BenchmarkSamples:
    """All samples of a set, in the order of its shards; their images are not decoded. Errors:
    ValueError for a shard that is damaged, and for a sample without what it is judged by."""
    kind = given.kind
    names: list[str] = []
    files: list[str] = []
    places: list[tuple[int, int]] = []
    judged_by: list[Any] = []
    groups: list[np.ndarray] = []
    for file in given.shards:
        with open(file, "rb") as tar:
            size = os.path.getsize(file)
            for key, members in whole_samples(tar, size, file):
                where = f"{file}: sample {key}"
                image = next((e for e in (*FIRST_ENDINGS, *IMAGE_ENDINGS) if e in members), None)
                if image is None or kind.ending not in members:
                    raise ValueError(f"{where} {_lacking(kind, image, members)}")
                content = partial(_content, tar, members, where)
                judged_by.append(content(kind.ending, lambda own: kind.read(own, given.classes)))
                if kind.groups in members:
                    groups.append(content(kind.groups, _whole_numbers))
                names.append(f"{file}#{members[image].path}")
                files.append(file)
                places.append((members[image].offset, members[image].size))
    if not names:
        raise ValueError(f"--benchmark: the shards of {given.folder} hold no sample")
    stacked = _stacked(given, groups, len(names))
    return BenchmarkSamples(
        given.folder, names, files, np.array(places, np.int64), judged_by, stacked
    )


def _lacking(kind: Kind, image: str | None, members: Mapping[str, Media]) -> str:
    listed = ", ".join(f".{ending}" for ending in members)
    needed = "an image" if image is None else f".{kind.ending}"
    other = next((k for k in KINDS.values() if k is not kind and k.ending in members), None)
    hint = f"; is {other.name} missing in {TYPE_FILE}?" if image and other else ""
    return f"has {listed} and not {needed}, which a set of {kind.name} needs{hint}"


def _content(
    tar: io.BufferedReader,
    members: Mapping[str, Media],
    where: str,
    ending: str,
    read: Callable[[bytes], Any],
) -> Any:
    """What `read` makes of the content of a member. Errors: ValueError that begins with `where`."""
    member = members[ending]
    try:
        if member.size > TEXT_LIMIT:
            raise ValueError(f"{member.size:,} bytes; at most {TEXT_LIMIT:,} are read")
        # the place in the shard stays where it is
        return read(os.pread(tar.fileno(), member.size, member.offset))
    except ValueError as error:
        raise ValueError(f"{where}: .{ending}: {error}") from None


def _stacked(given: BenchmarkSet, groups: Sequence[np.ndarray], number: int) -> np.ndarray | None:
    if not groups:
        return None
    if len(groups) != number or len({len(each) for each in groups}) > 1:
        raise ValueError(
            f"--benchmark: {given.folder}: {len(groups):,} of {number:,} samples have "
            f".{given.kind.groups}, of {len({len(each) for each in groups})} lengths; each needs one, "
            "of one length"
        )
    return np.stack(groups)


def _class_number(content: bytes, classes: Classes) -> int:
    given = content.decode("utf-8", "replace").strip()
    if not NUMBER.fullmatch(given):
        raise ValueError(f"{brief(given)}; the number of a class is needed")
    if int(given) not in range(len(classes.names)):
        raise ValueError(
            f"class {given}, and {classes.made_of[0]} has {len(classes.names)} names, of the classes "
            f"0 to {len(classes.names) - 1}"
        )
    return int(given)


def _targets(content: bytes, classes: Classes) -> np.ndarray:
    """bool [C]: which classes are in the image."""
    found = _array(content)
    if found.shape != (len(classes.names),) or not np.isin(found, (0, 1)).all():
        what = "other numbers" if found.shape == (len(classes.names),) else f"{[*found.shape]}"
        raise ValueError(
            f"{what}; a 0 or a 1 is needed for each of the {len(classes.names)} classes of "
            f"{classes.made_of[0]}"
        )
    return found.astype(bool)


def _whole_numbers(content: bytes) -> np.ndarray:
    """int64 [m]"""
    found = _array(content)
    if found.ndim != 1 or not np.array_equal(found, np.trunc(found)):
        raise ValueError(f"an array {[*found.shape]}; a row of whole numbers is needed for groups")
    return found.astype(np.int64)


def _array(content: bytes) -> np.ndarray:
    """An array of numbers, as numpy.save writes it."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else (np.lib.format.read_array_header_2_0)
        )
        shape, _, dtype = header(file)
        if dtype.kind not in "biuf":
            raise ValueError(f"an array of {dtype}; numbers are needed")
        # numpy.load would make room for any shape that is claimed
        return np.frombuffer(content, dtype, math.prod(shape), file.tell()).reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"no array of numbers as numpy.save writes it: {error}") from None


def _captions(content: bytes, classes: Classes) -> list[str]:
    """One a line, the empty ones too, as CLIP_benchmark counts them."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    if not any(line.strip() for line in lines):
        raise ValueError("no caption; a line is needed for each")
    return lines


KINDS = {
    CLASSIFICATION: Kind(CLASSIFICATION, "cls", _class_number, groups="npy"),
    MULTILABEL: Kind(MULTILABEL, "npy", _targets),
    RETRIEVAL: Kind(RETRIEVAL, "txt", _captions, has_classes=False),
}
"""By what dataset_type.txt says."""
