"""A data set class of one's own: `--data python:MODULE:NAME`, anything with `__len__` and
`__getitem__`."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from common.spelling import near
from data.bad_samples import Absent, BadSample, check_sound, refusing
from data.decoding.images import upright_8bit
from data.formats.rows import (
    EntriesFormat,
    Media,
    Roots,
    Stamp,
    attempt,
    stamp,
)
from data.formats.specs import local_path, split_options
from data.regions import BOX_OPTIONS, BoxOptions

USAGE = (
    "python:MODULE:NAME, where NAME is a data set, or what makes one when it is called without "
    "arguments"
)
# that a PNG file can hold; of others, such as CMYK, it holds what a viewer would show
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
ITEM = '{"image": ..., "text": ...} or (image, text)'
ANYWHERE = Roots(("/",))


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
        if "region" in values:
            values["region"] = item.get("regions")
        for modality in values.keys() & ENCODERS.keys():
            if values[modality] is not None:
                values[modality] = attempt(ENCODERS[modality], values[modality])
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
        return ENCODERS[modality](self._item(number).get(modality))

    def value(self, modality: str, number: int) -> Any:
        value = self._item(number).get(modality)
        if value is None:
            raise Absent(f"item {number} has no '{modality}'")
        return value

    def where(self, file: str, path: str, number: int) -> str:
        return f"{self.spec}#{number}"


def encoded(image: Any) -> bytes:
    """An image as the bytes of a file: PNG where it is not encoded yet. Raises BadSample."""
    image = _bytes_or_path(image, "image")
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        with refusing():
            image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        what = f"a {type(image).__name__}" + (
            f" of {image.dtype}, shape {image.shape}" if isinstance(image, np.ndarray) else ""
        )
        raise BadSample(
            "not-an-image",
            f"the image is {what}; bytes, a path, {{bytes, path}}, a PIL image or a uint8 array "
            "[H, W, 3] is needed",
        )
    held = image if image.mode in PNG_MODES else upright_8bit(image)
    with refusing(), io.BytesIO() as file:
        held.save(file, "PNG", compress_level=1)  # whatever the level, the pixels stay
        return file.getvalue()


def encoded_audio(sound: Any) -> bytes:
    """A sound as the bytes of a file: WAV of float32 where it is not encoded yet. Raises
    BadSample."""
    if isinstance(sound, Mapping) and "array" in sound:
        from scipy.io import wavfile  # half a second, which only such data sets wait for

        with refusing():
            samples = np.asarray(sound["array"], np.float32)
        if samples.ndim in (1, 2) and isinstance(rate := sound.get("sampling_rate"), int):
            with refusing(), io.BytesIO() as file:
                check_sound(rate, 1 if samples.ndim == 1 else len(samples))
                wavfile.write(file, rate, samples.T)
                return file.getvalue()
    sound = _bytes_or_path(sound, "audio")
    if isinstance(sound, bytes):
        return sound
    raise BadSample(
        "not-audio",
        f"the sound is a {type(sound).__name__}; bytes, a path, {{bytes, path}} or {{array, "
        "sampling_rate}} is needed",
    )


def encoded_film(film: Any) -> bytes:
    """Raises BadSample."""
    film = _bytes_or_path(film, "video")
    if isinstance(film, bytes):
        return film
    raise BadSample(
        "not-a-film",
        f"the film is a {type(film).__name__}; bytes, a path or {{bytes, path}} is needed",
    )


ENCODERS = {"image": encoded, "audio": encoded_audio, "video": encoded_film}


def _bytes_or_path(given: Any, modality: str) -> Any:
    """The content of a path, and of {bytes, path}, as Hugging Face's data sets give what they do
    not decode; all else as it is. Raises BadSample."""
    if isinstance(given, Mapping) and {"bytes", "path"} & {*given}:
        given = given.get("path") if given.get("bytes") is None else given["bytes"]
    if isinstance(given, (str, os.PathLike)):
        return ANYWHERE.read(local_path(os.fspath(given)), modality)
    return given
