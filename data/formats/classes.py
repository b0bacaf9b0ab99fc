"""Classes of samples that a tar shard gives as `.cls`, or a column of parquet: numbers of a list of
names, or names.

The list and the sentences around a name lie beside the shards or one folder above, as
CLIP_benchmark lays its data sets out: `classnames.txt`, a name a line, and
`zeroshot_classification_templates.txt`, a sentence a line with `{c}` for the class. There also lies
`dataset_type.txt`, with what a set is for where that is not classes.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from common.output import brief
from common.spelling import near
from data.bad_samples import BadSample, check_caption
from data.formats.prompts import (
    IMAGENET,
    NAMES_FILE,
    TEMPLATES,
    chosen_templates,
    imagenet_classes,
    named_option,
    read_templates,
    read_text,
)
from data.formats.rows import Stamp, stamp
from data.formats.shards import local_copies
from data.formats.specs import existing, is_remote, local_path
from data.stored.roots import is_inside

TEMPLATES_FILE = "zeroshot_classification_templates.txt"
TYPE_FILE = "dataset_type.txt"
CLASSIFICATION, RETRIEVAL, MULTILABEL = TYPES = ("classification", "retrieval", "multilabel")
"""What `dataset_type.txt` may say; the first goes without saying."""
NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
NAME_LIMIT = 1000  # characters


class Classes(NamedTuple):
    """`names`: of the classes 0, 1, …; none: a class is given by its name. `made_of`: where names
    and templates are from, None: from nowhere else."""

    names: tuple[str, ...]
    templates: tuple[str, ...]
    made_of: tuple[str | None, str | None]

    def of(self, given: str) -> tuple[str, list[str]]:
        """What a class is known by, and its captions. Raises BadSample."""
        given = given.strip()
        check_caption(given)
        if len(given) > NAME_LIMIT or "\n" in given:
            raise BadSample(
                "invalid-row", f"the class is {brief(given)}; a number or a name is needed"
            )
        if not self.names:
            if NUMBER.fullmatch(given):
                raise BadSample(
                    "orphan-member",
                    f"no text, and class {given} has no name: write {NAMES_FILE}, a name a line, "
                    "beside the shards or one folder above, or give ?names=FILE",
                )
            return given, self._captions(given)
        number = self._number(given)
        if number not in range(len(self.names)):
            of = f"{len(self.names)} classes of {self.made_of[0]}"
            hint = (
                near(given, self.names) or f"; they are 0 to {len(self.names) - 1}, or their names"
            )
            raise BadSample("invalid-row", f"class {given!r} is none of the {of}{hint}")
        name = self.names[number]
        return f"{number:06} {name}", self._captions(name)

    def _number(self, given: str) -> int:
        if NUMBER.fullmatch(given):
            return int(given)
        return self.names.index(given) if given in self.names else -1

    def _captions(self, name: str) -> list[str]:
        return [template.replace("{}", name) for template in self.templates]


def classes_beside(spec: str, shard: str, options: Mapping[str, str]) -> Classes:
    """Those of a shard, by its name or address. `options`: as those of an imagefolder. `spec`
    begins messages. Errors: ValueError, OSError."""
    given, names = named_option(spec, options), tuple[str, ...]()
    file = given or _first(shard, NAMES_FILE)
    if given == IMAGENET:
        names = imagenet_classes()
    elif file:
        names = _names(_local(spec, file, "a file of class names"))
    beside = None if "templates" in options else _first(shard, TEMPLATES_FILE)
    if beside:
        return Classes(names, read_templates(_local(spec, beside, "")), (file, beside))
    templates, made_of = chosen_templates(spec, options.get("templates"), TEMPLATES)
    return Classes(names, templates, (file, made_of))


def classes_of(
    spec: str, names: tuple[str, ...], of: str, options: Mapping[str, str], usual: Sequence[str]
) -> Classes:
    """Those of a column, `of`, whose file tells `names` of the numbers in it, if the options give no
    others. `usual`: templates where the options give none. Errors: ValueError, OSError."""
    given = named_option(spec, options)
    if given == IMAGENET:
        names = imagenet_classes()
    elif given:
        names = _names(_local(spec, given, f"a file of class names; or {IMAGENET}"))
    templates, made_of = chosen_templates(spec, options.get("templates"), usual)
    return Classes(names, templates, (given or of, made_of))


def type_beside(shard: str) -> str | None:
    """What the file beside a shard, or one folder above, says the set is for: of `TYPES`; None:
    there is none on this machine. Errors: ValueError for another word, OSError."""
    file = None if is_remote(shard) else _first(shard, TYPE_FILE)
    if file is None:
        return None
    word = read_text(file).strip().lower()
    if word not in TYPES:
        raise ValueError(
            f"{file}: {brief(word)}; one of {', '.join(TYPES)} is needed{near(word, TYPES)}"
        )
    return word


def local_stamps(shard: str, options: Mapping[str, str]) -> list[Stamp]:
    """Of the files on this machine that the classes and the captions of a shard follow from."""
    beside = (_beside(shard, name) for name in (NAMES_FILE, TEMPLATES_FILE, TYPE_FILE))
    files = [*chain(*beside), *options.values()]
    there = (local_path(file) for file in files if not is_remote(file))
    return [stamp(file) for file in there if os.path.isfile(file)]


def _names(file: str) -> tuple[str, ...]:
    names = tuple(line.strip() for line in read_text(file).rstrip().splitlines())
    if empty := [str(n + 1) for n, name in enumerate(names) if not name] or not names:
        lines = ", ".join(empty) if isinstance(empty, list) else "1"
        raise ValueError(f"{file}: line {lines} is empty; the name of class N stands in line N + 1")
    return names


def _beside(shard: str, name: str) -> Iterator[str]:
    """Where a file may lie: beside the shard, and one folder above."""
    path, mark, query = shard.partition("?") if is_remote(shard) else (shard, "", "")
    folder = path.rpartition("/")[0]
    for each in (folder, folder.rpartition("/")[0]):
        yield f"{each}/{name}{mark}{query}"


def _first(shard: str, name: str) -> str | None:
    """The first of these that is there; a link that leads out of its folder is not followed, but
    for those of the hub's cache."""
    for file in _beside(shard, name):
        if is_remote(file):
            # stores also say the second of what is not there
            with suppress(FileNotFoundError, PermissionError):
                local_copies([file])
                return file
        elif os.path.isfile(file):
            folder, true = os.path.realpath(os.path.dirname(file)), os.path.realpath(file)
            cached = folder.rpartition("/snapshots/")[0]  # a revision there has links to its blobs
            if is_inside(folder, true) or (cached and is_inside(f"{cached}/blobs", true)):
                return file
    return None


def _local(spec: str, file: str, needed: str) -> str:
    return local_copies([file])[0] if is_remote(file) else existing(spec, file, "file", needed)
