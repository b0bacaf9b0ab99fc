"""A data set class of one's own: `--data python:MODULE:NAME`, anything with `__len__` and
`__getitem__`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from common.spelling import near
from data.bad_samples import Absent, BadSample
from data.formats.rows import (
    EntriesFormat,
    Media,
    Stamp,
    attempt,
    stamp,
)
from data.formats.specs import split_options
from data.regions import BOX_OPTIONS, BoxOptions
from data.stored.kinds import annotations_of, files_of

USAGE = (
    "python:MODULE:NAME, where NAME is a data set, or what makes one when it is called without "
    "arguments"
)
ITEM = '{"image": ..., "text": ...} or (image, text)'


class PythonFormat(EntriesFormat):
    """The items of a Python object, by number. An item is a mapping, or a pair (image, text) as
    torchvision's data sets give it.

    "image": encoded bytes, a path, {"bytes", "path"}, a PIL image or a uint8 array [H, W, 3];
    "text": a text or several; "audio": encoded bytes, a path, or as Hugging Face's data sets give
    it {"bytes", "path"} or {"array": floats [samples] or [channels, samples], "sampling_rate": Hz};
    "regions": a list of {"box", "text"} as in JSONL; "id": a name that stays, else the number;
    "language": of the text, for towers that tell languages apart. Further keys hold further
    modalities. A key that is missing, or None: the sample lacks the modality. Item i must be the
    same whenever it is asked for. The data set is made once in every process. It is compared with
    its index when its module's file changes, its length, or its attribute `fingerprint` if it has
    one.
    """

    holds = None

    def __init__(self, where: str) -> None:
        """`where`: `MODULE:NAME[?unit=…&boxes=…]`. Errors: ValueError."""
        spec = f"data spec 'python:{where}':"
        where, options, _ = split_options("python", where, BOX_OPTIONS)
        self.boxes = BoxOptions.of(spec, options)
        self.module, _, self.attribute = where.partition(":")
        self.spec = f"python:{where}"
        self.files = [self.spec]
        self.spec += self.boxes.words()
        if not self.module or not self.attribute:
            raise ValueError(f"data spec '{self.spec}': write {USAGE}")
        if not hasattr(self._items, "__len__") or not hasattr(self._items, "__getitem__"):
            raise ValueError(
                f"data spec '{self.spec}': it is a {type(self._items).__name__} without __len__ "
                f"and __getitem__; {USAGE}"
            )

    @cached_property
    def _items(self) -> Any:
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that nothing in it hides a module of the environment
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise ValueError(
                f"data spec '{self.spec}': cannot import {self.module}: {error}; give a module of "
                "the current folder or of PYTHONPATH"
            ) from error
        if not hasattr(module, self.attribute):
            raise ValueError(
                f"data spec '{self.spec}': {self.module} has no "
                f"'{self.attribute}'{near(self.attribute, dir(module))}"
            )
        found = getattr(module, self.attribute)
        makes_one = isinstance(found, type) or not hasattr(found, "__len__") and callable(found)
        return found() if makes_one else found

    def fingerprint(self) -> list[Stamp]:
        file = getattr(importlib.import_module(self.module), "__file__", None)
        own = str(getattr(self._items, "fingerprint", ""))
        return [*([stamp(file)] if file else []), (f"{len(self._items)} items {own}", 0, 0)]

    def total(self) -> int:
        return len(self._items)

    def entries(self) -> Iterator[tuple[tuple[int, int], int]]:
        return (((number, number), 1) for number in range(len(self._items)))

    def values(self, content: int) -> dict[str, Any]:
        item = self._item(content)
        values = {key: item.get(key) for key in ("id", "language", *self.modalities)}
        values |= {kind.name: item.get(kind.key) for kind in annotations_of(self.modalities)}
        for kind in files_of(self.modalities):
            if values[kind.name] is not None:
                values[kind.name] = attempt(kind.encode, values[kind.name])
        return values

    def _item(self, number: int) -> Mapping[str, Any]:
        """Raises BadSample."""
        try:
            item = self._items[number]
        except Exception as error:  # the user's own code raises what it will
            raise BadSample(
                "unreadable", f"item {number}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(item, Mapping):
            return item
        if isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
            return {"image": item[0], "text": item[1]}
        raise BadSample(
            "invalid-row", f"item {number} is a {type(item).__name__}; {ITEM} is needed"
        )

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        (kind,) = files_of([modality])
        return kind.encode(self._item(number).get(modality))

    def value(self, modality: str, number: int) -> Any:
        value = self._item(number).get(modality)
        if value is None:
            raise Absent(f"item {number} has no '{modality}'")
        return value

    def where(self, file: str, path: str, number: int) -> str:
        return f"{self.spec}#{number}"
