"""Where samples come from: the interface that every kind of data set offers, and the words that
open one."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from common.secrets import HIDDEN, redact
from data.formats.coco import CocoFormat, KarpathyFormat
from data.formats.demo import DemoFormat, family_key, text_of, toneless_key
from data.formats.imagefolder import AudioFolderFormat, ImageFolderFormat
from data.formats.jsonl import JsonlFormat
from data.formats.parquet import ParquetFormat
from data.formats.python import PythonFormat
from data.formats.rows import DEFAULT_PAIRS, Format, Pairs
from data.formats.table import open_csv, open_tsv
from data.formats.voices import WORD, VoicesFormat, is_new, spoken_text
from data.formats.webdataset import WebdatasetFormat
from data.index.bad_samples import REASON_OF_CODE, Absent, BadSample
from data.index.building import content_hash, load_index
from data.index.hearing import hash_of
from data.index.mapped import Index, UnusedCounts

MAX_SHOWN = 5


@runtime_checkable
class Source(Protocol):
    """A data set of numbered samples 0..len-1; each is one image and one or more texts, or is bad
    and says why. Where more modalities are compared, a usable sample may lack some of them."""

    spec: str
    """What it was opened with, for example `jsonl:train.jsonl`."""

    def __len__(self) -> int:
        """All samples, the bad ones too, so that the number of a sample does not change because
        another is bad."""

    def identity(self, i: int) -> str:
        """A name of the sample that stays when other samples come or go; unique among the usable
        ones."""

    def captions(self, i: int) -> list[str]:
        """At least one text, none of them empty, if the sample is usable; none if it lacks
        texts."""

    def language(self, i: int) -> str | int | None:
        """Of the texts, where the data set says it."""

    def image_bytes(self, i: int) -> bytes:
        """The encoded image. Raises Absent, BadSample."""

    def value(self, modality: str, i: int) -> Any:
        """What the sample holds of another modality; of audio the encoded sound. Raises Absent,
        BadSample."""

    def lacking(self, modality: str) -> np.ndarray:
        """[N] bool: which usable samples have nothing of a modality."""

    def content_hash(self, i: int) -> bytes:
        """16 bytes: blake2b of `image_bytes`."""

    def audio_hash(self, i: int) -> bytes:
        """16 bytes: blake2b of what `value("audio", i)` gives; zeros without a sound."""

    def where(self, i: int, modality: str | None = None) -> str:
        """For messages: FILE:LINE, SHARD.tar#member, folder/name.jpg. `modality`: of this one of
        what the sample has."""

    def column(self, name: str) -> np.ndarray:
        """[N] of all samples, not copied, not to be written to: width and height int32 (pixels),
        num_captions int16, num_characters int32 (longest caption), complexity float32 (bytes /
        pixel), perceptual_hash uint64, bad int8 (0: usable, else 1 + position in REASONS);
        audio_seconds float32, audio_rate int32 (Hz), audio_channels int16, 0 without a sound."""

    def keys(self, kind: str) -> np.ndarray:
        """[N] uint64, equal for samples with equal encoded images (kind "content"), equal decoded
        sounds ("audio") or equal ids ("id"); 0: there is none. Different ones are equal by chance
        once in 10^19 pairs."""

    def usable(self) -> np.ndarray:
        """[n] int64, ascending: the samples that are not bad."""

    def bad_samples(self) -> Iterator[tuple[str, str, str, str]]:
        """(identity, where, reason, detail) of each."""

    def broken_values(self) -> Iterator[tuple[str, str, str, str]]:
        """The same of each value that cannot be used of a usable sample, which is used without
        it, and of captions that are dropped beside good ones."""

    def unused(self) -> UnusedCounts:
        """What is no part of a sample -> how many there are, and where the first is."""


@runtime_checkable
class ConceptSource(Source, Protocol):
    """A source that knows which samples are variants of one concept, so that whole concepts can be
    held out."""

    def family(self, i: int) -> str:
        """Equal for all skin tones and genders of one concept."""

    def toneless(self, i: int) -> str:
        """Equal for samples that differ in skin tone only."""


class IndexedSource:
    """A format's samples, as the index has them. Pickled it is two paths and some options."""

    def __init__(self, spec: str, format: Format, index: Index) -> None:
        self.spec = redact(spec)
        self.format = format
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def identity(self, i: int) -> str:
        return self.index.id(i)

    def captions(self, i: int) -> list[str]:
        return self.index.captions(i)

    def language(self, i: int) -> str | int | None:
        return self.format.language(int(self.column("row")[i]))

    def label(self, i: int) -> str | None:
        """The class of the image; None: this kind of data set has no classes of its own."""
        return self.format.label(self.index.text("path", i))

    def image_bytes(self, i: int) -> bytes:
        """Raises BadSample for a sample that the index calls bad, and when the image is not the
        one that it knows."""
        if code := int(self.column("bad")[i]):
            raise BadSample(REASON_OF_CODE[code], self.index.text("detail", i))
        if self.index.lacks("image", i):
            raise Absent(f"{self.where(i)} has no image")
        offset, size = int(self.column("offset")[i]), int(self.column("size")[i])
        image = self.format.image_bytes(
            self.index.container(i), self.index.text("path", i), offset, size
        )
        if content_hash(image) != self.content_hash(
            i
        ):  # a GB/s; bytes of another image would go unnoticed into every cache
            raise BadSample(
                "unreadable",
                f"the image has changed since it was checked; {self.format.when_changed}",
            )
        return image

    def value(self, modality: str, i: int) -> Any:
        if self.index.lacks(modality, i):
            raise Absent(f"{self.where(i)} has no {modality}")
        if modality == "audio":
            return self._audio_bytes(i)
        return self.format.value(
            modality,
            self.index.container(i),
            self.index.text("path", i),
            int(self.column("row")[i]),
        )

    def _audio_bytes(self, i: int) -> bytes:
        if code := int(self.column("bad")[i]):
            raise BadSample(REASON_OF_CODE[code], self.index.text("detail", i))
        sound = self.format.audio_bytes(
            self.index.container(i),
            self.index.text("audio_path", i),
            int(self.column("audio_offset")[i]),
            int(self.column("audio_size")[i]),
            int(self.column("row")[i]),
        )
        if hash_of(sound) != self.index.audio_hash(i):
            raise BadSample(
                "unreadable",
                f"the sound has changed since it was checked; {self.format.when_changed}",
            )
        return sound

    def lacking(self, modality: str) -> np.ndarray:
        return self.index.lacking(modality)

    def content_hash(self, i: int) -> bytes:
        return self.index.content_hash(i)

    def audio_hash(self, i: int) -> bytes:
        return self.index.audio_hash(i)

    def where(self, i: int, modality: str | None = None) -> str:
        path = self.index.text("audio_path" if self._is_sound(i, modality) else "path", i)
        return self.format.where(self.index.container(i), path, int(self.column("row")[i]))

    def _is_sound(self, i: int, modality: str | None) -> bool:
        """Is what is asked for in a file or a member of its own, beside that of the image?"""
        return (
            modality == "audio"
            and modality in self.index.modalities
            and bool(self.index.text("audio_path", i))
        )

    def column(self, name: str) -> np.ndarray:
        return self.index.column(name)

    def keys(self, kind: str) -> np.ndarray:
        if kind == "content":
            return self.index.content_keys()
        return self.index.column("audio_key" if kind == "audio" else "id_hash")

    def usable(self) -> np.ndarray:
        return self.index.usable()

    def bad_samples(self) -> Iterator[tuple[str, str, str, str]]:
        bad = self.column("bad")
        # one number after the other: no list of the size of the data set is made
        for i in map(int, np.flatnonzero(bad)):
            yield (
                self.identity(i),
                self.where(i),
                REASON_OF_CODE[int(bad[i])],
                self.index.text("detail", i),
            )

    def broken_values(self) -> Iterator[tuple[str, str, str, str]]:
        for i, modality, reason, detail in self.index.broken():
            what = f"its {modality}" if self.index.lacks(modality, i) else "them"
            without = f"{detail}; the sample is used without {what}"
            yield self.identity(i), self.where(i, modality), reason, without

    def unused(self) -> UnusedCounts:
        return {
            what: (number, where) for what, (number, where) in self.index.meta["unused"].items()
        }


@runtime_checkable
class SpeakerSource(ConceptSource, Protocol):
    """A source whose samples are spoken, so that whole speakers can be held out."""

    def is_new_speaker(self, i: int) -> bool:
        """Is the sample's speaker one that training never hears?"""


class DemoSource(IndexedSource):
    """The embedded emoji, which know their concepts."""

    def family(self, i: int) -> str:
        return family_key(text_of(self.identity(i)))

    def toneless(self, i: int) -> str:
        return toneless_key(text_of(self.identity(i)))


class VoicesSource(DemoSource):
    """The same with their names spoken."""

    def family(self, i: int) -> str:
        return family_key(spoken_text(self.identity(i)))

    def toneless(self, i: int) -> str:
        return toneless_key(spoken_text(self.identity(i)))

    def is_new_speaker(self, i: int) -> bool:
        return is_new(self.identity(i))


def open_demo(where: str) -> DemoFormat:
    """`voices` and `voices:LANG+LANG` have sounds; else as `DemoFormat`."""
    first, _, languages = where.partition(":")
    return VoicesFormat(languages) if first == WORD else DemoFormat(where)


KINDS: dict[str, tuple[str, Callable[..., Format]]] = {
    "demo": ("demo[:voices][:LANG+LANG]", open_demo),
    "jsonl": ("jsonl:FILE", JsonlFormat),
    "csv": ("csv:FILE", open_csv),
    "tsv": ("tsv:FILE", open_tsv),
    "parquet": ("parquet:FILE_OR_PATTERN", ParquetFormat),
    "coco": ("coco:IMAGES:CAPTIONS.json", CocoFormat),
    "karpathy": ("karpathy:FILE?split=test", KarpathyFormat),
    "imagefolder": ("imagefolder:DIR", ImageFolderFormat),
    "audiofolder": ("audiofolder:DIR", AudioFolderFormat),
    "webdataset": ("webdataset:PATTERN", WebdatasetFormat),
    "python": ("python:MODULE:NAME", PythonFormat),
}
"""Kind -> how it is written, and what reads it, made from what follows the colon."""
ENDINGS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".tar": "webdataset",
}


def open_format(spec: str, pairs: Pairs = DEFAULT_PAIRS) -> Format:
    """What lists the rows of a data set. `pairs`: of modalities that will be compared. Errors:
    ValueError, OSError."""
    kind, _, where = spec.partition(":")
    if kind not in KINDS:
        known = ", ".join(usage for usage, _ in KINDS.values())
        near = difflib.get_close_matches(kind.lower(), KINDS, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else "give one of these."
        if meant := ENDINGS.get(Path(kind.lower()).suffix):
            hint = f"did you mean '{meant}:{spec}'?"
        raise ValueError(f"data spec '{spec}': unknown kind '{kind}'; known: {known}; {hint}")
    format = KINDS[kind][1](where)
    if pairs != DEFAULT_PAIRS or format.lacks_all({*DEFAULT_PAIRS[0]}):
        format.pairs = tuple(
            (first, second) for first, second in pairs if not format.lacks_all({first, second})
        )
        if not format.pairs:
            raise ValueError(
                f"data spec '{spec}': it holds {' and '.join(format.holds or ())}, and --pairs compares "
                f"{', '.join(map(':'.join, pairs))}; give data of the modalities of a pair, such "
                "as python:MODULE:NAME, or other --pairs"
            )
    return format


def open_source(spec: str, pairs: Pairs = DEFAULT_PAIRS, **building: Any) -> IndexedSource:
    """Open a data set by its spec, `KIND` or `KIND:WHERE`; see `KINDS`. The first time its index is
    made, which reads every image. `pairs`: of modalities that are compared; a sample that has
    both of none is bad.

    `building`: workers, progress, check, refresh, folder of `data.index.building.load_index`.
    Processes may call this together. Errors: ValueError for a spec that breaks a rule or data
    without a usable sample, OSError (FileNotFoundError) for files.
    """
    if HIDDEN in spec and "://" in spec:
        raise ValueError(
            f"data spec '{spec}': its credentials were not recorded; give the data's address again "
            "(--data, --val-data), or keep them in the environment or the store's own files"
        )
    format = open_format(spec, pairs)
    kinds: dict[type, type[IndexedSource]] = {
        DemoFormat: DemoSource,
        VoicesFormat: VoicesSource,
    }
    source = kinds.get(type(format), IndexedSource)(
        "demo" if spec in ("demo:", "demo:en") else spec, format, load_index(format, **building)
    )
    if not (source.column("bad") == 0).any():
        raise ValueError(_no_usable_sample(source))
    return source


def _no_usable_sample(source: IndexedSource) -> str:
    codes, counts = np.unique(source.column("bad"), return_counts=True)
    reasons = Counter({REASON_OF_CODE[int(code)]: int(count) for code, count in zip(codes, counts)})
    of = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    first = [
        f"{where}: {reason}: {detail}"
        for (_, where, reason, detail), _ in zip(source.bad_samples(), range(MAX_SHOWN))
    ]
    more = [f"... and {len(source) - MAX_SHOWN} more"] if len(source) > MAX_SHOWN else []
    pairs = ", ".join(map(":".join, source.format.pairs))
    other = (
        f", or give other --pairs than {pairs}"
        if reasons.keys() <= {"no-value", "no-caption"}
        else ""
    )
    return "\n".join(
        [
            f"{source.spec}: none of {len(source)} samples can be used ({of}); mend them{other}",
            *first,
            *more,
        ]
    )
