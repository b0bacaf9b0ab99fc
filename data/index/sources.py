"""Where samples come from: the interface that every kind of data set offers, and the words that
open one."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from common.secrets import HIDDEN, redact
from common.spelling import near
from data.bad_samples import CODES, REASON_OF_CODE, Absent, BadSample
from data.box_checks import doubtful_boxes, refuse_wrong_unit
from data.formats.boxes import Flickr30kEntitiesFormat, RefCocoFormat, VisualGenomeFormat
from data.formats.clips import ClipsFormat
from data.formats.demo import Concept, DemoFormat
from data.formats.folders import (
    AudioFolderFormat,
    CocoFormat,
    ImageFolderFormat,
    KarpathyFormat,
    VideoFolderFormat,
)
from data.formats.parquet import ParquetFormat
from data.formats.python import PythonFormat
from data.formats.rows import CAPTION_LINES, DEFAULT_PAIRS, Format, Media, Pairs
from data.formats.scenes import demo_format
from data.formats.subtitles import SubtitlesFormat
from data.formats.tables import JsonlFormat, TableFormat
from data.formats.webdataset import WebdatasetFormat
from data.identity import Identity, fingerprint
from data.index.building import load_index
from data.index.mapped import ABSENT, TEXTS, Index, UnusedCounts
from data.keys import content_hash
from data.stored.annotations import StoredAnnotations
from data.stored.image import IMAGE
from data.stored.kinds import STORED, files_of, stored
from data.stored.record import StoredFile

MAX_SHOWN = 5
LINES_SHARE = 0.1  # of the samples have a caption of several lines: each may be one


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

    def value(self, modality: str, i: int) -> Any:
        """What the sample holds of a modality: the encoded image, the encoded sound, its regions
        (a list of `Region`), or what a modality of one's own has. Raises Absent, BadSample."""

    def content_hash(self, modality: str, i: int) -> bytes:
        """16 bytes: blake2b of the encoded image or sound; zeros without one."""

    def where(self, i: int, modality: str | None = None) -> str:
        """For messages: FILE:LINE, SHARD.tar#member, folder/name.jpg. `modality`: of this one of
        what the sample has."""

    def numbers(self, name: str, index: np.ndarray) -> np.ndarray:
        """[n] of the samples `index` [n]: width and height int32 (pixels), num_captions int16,
        num_characters int32 (longest caption), complexity float32 (bytes / pixel), perceptual_hash
        uint64, bad int8 (0: usable, else 1 + position in REASONS); audio_seconds float32,
        audio_rate int32 (Hz), audio_channels int16, 0 without a sound; num_regions int32,
        num_negatives int32 (of all its regions)."""

    def bad_counts(self) -> dict[str, int]:
        """Samples that are known to be bad, by reason."""

    def bad_samples(self) -> Iterator[tuple[str, str, str, str]]:
        """(identity, where, reason, detail) of each of them."""

    def broken_values(self) -> Iterator[tuple[str, str, str, str]]:
        """(identity, where, reason, detail) of each value that a usable sample is used without, and
        of captions that are dropped beside good ones."""

    def unused(self) -> UnusedCounts:
        """What is no part of a sample -> how many there are, and where the first is."""

    def hints(self) -> list[str]:
        """Sentences on what is read, and may be meant otherwise."""


class KnownSource(Source, Protocol):
    """One of which every sample was looked at beforehand."""

    def column(self, name: str) -> np.ndarray:
        """[N], see `numbers`, of all samples, not to be written to."""

    def lacking(self, modality: str) -> np.ndarray:
        """[N] bool: which usable samples have nothing of a modality."""

    def keys(self, kind: str) -> np.ndarray:
        """[N] uint64, equal for samples with equal encoded images (kind "content"), equal decoded
        sounds ("audio"), clips of equal films ("video"), equal files of another modality (its name)
        or equal ids ("id"); 0: there is none.
        Different ones are equal by chance once in 10^19 pairs."""

    def usable(self) -> np.ndarray:
        """[n] int64, ascending: the samples that are not bad."""

    def texts_fingerprint(self) -> str:
        """Another one where a caption is another."""


class IndexedSource:
    """A format's samples, as the index has them. Pickled it is a path and some options."""

    def __init__(self, spec: str, format: Format, index: Index) -> None:
        self.spec = redact(spec)
        self.format = format
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def identity(self, i: int) -> str:
        return self.index.text("id", i)

    def captions(self, i: int) -> list[str]:
        return self.index.text("captions", i)

    def language(self, i: int) -> str | int | None:
        text = self.index.text("language", i)
        return json.loads(text) if text else None

    def label(self, i: int) -> str | None:
        """The class of the sample; None: it has none that the data set names."""
        return self.format.label(self.identity(i)) or self.index.text("label", i) or None

    def value(self, modality: str, i: int) -> Any:
        kind = stored(modality)
        if modality in STORED and (code := int(self.column("bad")[i])):
            raise BadSample(REASON_OF_CODE[code], self._detail(i))
        if self._lacks(modality, i):
            raise Absent(f"{self.where(i)} has no {modality}")
        if isinstance(kind, StoredAnnotations):
            return kind.read(self.index.text(kind.several, i))
        number = int(self.column("row")[i])
        if not isinstance(kind, StoredFile):
            return self.format.value(modality, number)
        offset, size, mtime_ns = (
            int(self.column(f"{modality}_{name}")[i]) for name in ("offset", "size", "mtime_ns")
        )
        media = Media(self.index.text(f"{modality}_path", i), offset, size, mtime_ns)
        content: bytes | str
        if kind.stays(media):
            content, status = self.format.roots.find(media.path, modality)
            is_same = Identity.of(status) == Identity(media.size, media.mtime_ns)
        else:
            content = self.format.read(modality, self.index.container(i), number, media)
            # a GB/s; bytes of another file would go unnoticed into every cache
            is_same = content_hash(content) == self.content_hash(modality, i)
        if not is_same:
            raise BadSample(
                "unreadable",
                f"the {modality} has changed since it was checked; start again, and it is checked "
                "anew. Of a Python data set, change the attribute `fingerprint` first; of one with "
                "over 100,000 files, call open_source(SPEC, refresh=True)",
            )
        return kind.of_index(content, lambda name: self.column(name)[i])

    def lacking(self, modality: str) -> np.ndarray:
        return self._lacking(modality, slice(None))

    def _lacking(self, modality: str, rows: slice) -> np.ndarray:
        modalities = self.index.modalities
        if modality not in modalities or modalities == DEFAULT_PAIRS[0]:  # these have no column
            return np.full(len(self.column("bad")[rows]), modality not in modalities)
        return (self.column(ABSENT)[rows] >> modalities.index(modality) & 1).astype(bool)

    def _lacks(self, modality: str, i: int) -> bool:
        return bool(self._lacking(modality, slice(i, i + 1))[0])

    def content_hash(self, modality: str, i: int) -> bytes:
        return self.column(f"{modality}_hash")[i].tobytes()

    def where(self, i: int, modality: str | None = None) -> str:
        files = [kind.name for kind in files_of()]
        names = [*([modality] if modality in files else []), *files]
        paths = (self.index.text(f"{name}_path", i) for name in names)
        path = next(filter(None, paths), None) or self.identity(i)
        return self.format.where(self.index.container(i), path, int(self.column("row")[i]))

    def column(self, name: str) -> np.ndarray:
        return self.index.column(name)

    def numbers(self, name: str, index: np.ndarray) -> np.ndarray:
        return self.column(name)[index]

    def keys(self, kind: str) -> np.ndarray:
        if kind == "id":
            return self.column("id_hash")
        (file,) = files_of([IMAGE.name if kind == "content" else kind])
        return file.keys(self.column)

    def usable(self) -> np.ndarray:
        return np.flatnonzero(self.column("bad") == 0).astype(np.int64, copy=False)

    def bad_counts(self) -> dict[str, int]:
        codes, counts = np.unique(self.column("bad"), return_counts=True)
        found = zip(codes.tolist(), counts.tolist())
        return {REASON_OF_CODE[code]: count for code, count in found if code}

    def bad_samples(self) -> Iterator[tuple[str, str, str, str]]:
        bad = self.column("bad")
        # one number after the other: no list of the size of the data set is made
        for i in map(int, np.flatnonzero(bad)):
            yield self.identity(i), self.where(i), REASON_OF_CODE[int(bad[i])], self._detail(i)

    def _detail(self, i: int) -> str:
        if self.column("bad")[i] != CODES["duplicate-id"]:
            return self.index.text("detail", i)
        repeats = self.index.repeats
        first = self.where(int(repeats[np.searchsorted(repeats[:, 0], i), 1]))
        return f"id '{self.identity(i)}' is already that of {first}; ids must differ"

    def broken_values(self) -> Iterator[tuple[str, str, str, str]]:
        for i, noted in self.index.filled("detail"):
            for line in noted.split("\n") if self.column("bad")[i] == 0 else ():
                modality, reason, detail = line.split(": ", 2)
                what = f"its {modality}" if self._lacks(modality, i) else "them"
                without = f"{detail}; the sample is used without {what}"
                yield self.identity(i), self.where(i, modality), reason, without

    def unused(self) -> UnusedCounts:
        return self.index.unused()

    def hints(self) -> list[str]:
        notes, lines = self.index.notes(), []
        number = notes.get(CAPTION_LINES, 0)
        is_known = "lines" in self.format.caption_ways and self.format.captions is None
        if is_known and number and number >= LINES_SHARE * len(self):
            lines.append(
                f"{number:,} of {len(self):,} samples have a caption of several lines; if each line "
                "is a caption, give ?captions=lines in the data spec"
            )
        doubts = doubtful_boxes(notes, self.format.boxes.upright)
        return [f"{self.spec}: {line}" for line in [*lines, *doubts]]

    def texts_fingerprint(self) -> str:
        return fingerprint(self.index.meta["files"][TEXTS])


class ConceptSource(IndexedSource):
    """A source that knows which samples are variants of one concept, and which can only be held
    out, so that whole concepts, speakers and compositions are."""

    format: DemoFormat

    def concept(self, i: int) -> Concept:
        return self.format.concept(self.identity(i))

    def reversed_caption(self, i: int) -> str | None:
        """The caption of a film whose events come in the opposite order; None: it has none."""
        if not isinstance(self.format, ClipsFormat):
            return None
        return self.format.reversed_caption(self.identity(i))


KINDS: dict[str, tuple[str, Callable[..., Format]]] = {
    "demo": ("demo[:voices][:LANG+LANG], demo:scenes[:N] or demo:clips[:N]", demo_format),
    "jsonl": ("jsonl:FILE", JsonlFormat),
    "csv": ("csv:FILE", partial(TableFormat, "csv")),
    "tsv": ("tsv:FILE", partial(TableFormat, "tsv")),
    "parquet": ("parquet:FILE_OR_PATTERN", ParquetFormat),
    "coco": ("coco:IMAGES:CAPTIONS.json", CocoFormat),
    "karpathy": ("karpathy:FILE?split=test", KarpathyFormat),
    "vg": ("vg:IMAGES:region_descriptions.json", VisualGenomeFormat),
    "refcoco": ("refcoco:IMAGES:REFS.p?split=val", RefCocoFormat),
    "flickr30k-entities": (
        "flickr30k-entities:IMAGES:FOLDER?split=test",
        Flickr30kEntitiesFormat,
    ),
    "imagefolder": ("imagefolder:DIR", ImageFolderFormat),
    "audiofolder": ("audiofolder:DIR", AudioFolderFormat),
    "videofolder": ("videofolder:DIR", VideoFolderFormat),
    "subtitles": ("subtitles:DIR", SubtitlesFormat),
    "webdataset": ("webdataset:PATTERN", WebdatasetFormat),
    "python": ("python:MODULE:NAME", PythonFormat),
}
"""Kind -> how it is written, and what reads it, made from what follows the colon."""
ENDINGS = {f".{kind}": kind for kind in ("jsonl", "csv", "tsv", "parquet")}
ENDINGS |= {".json": "jsonl", ".tar": "webdataset"}


def open_format(spec: str, pairs: Pairs = DEFAULT_PAIRS) -> Format:
    """What lists the rows of a data set. `pairs`: of modalities that will be compared. Errors:
    ValueError, OSError."""
    kind, _, where = spec.partition(":")
    if kind == "stream":
        raise ValueError(
            f"data spec '{spec}': a stream is read in its own order, by --data of train.py; give its "
            "shards, or some of them, as webdataset:SHARDS or parquet:SHARDS"
        )
    if kind not in KINDS:
        known = ", ".join(usage for usage, _ in KINDS.values())
        hint = near(kind, [*KINDS, "stream"]) or "; give one of these"
        if meant := ENDINGS.get(Path(kind.lower()).suffix):
            hint = f"; did you mean '{meant}:{spec}'?"
        raise ValueError(f"data spec '{spec}': unknown kind '{kind}'; known: {known}{hint}")
    format = KINDS[kind][1](where)
    if pairs != DEFAULT_PAIRS or format.lacks_all(DEFAULT_PAIRS[0]):
        format.pairs = tuple(pair for pair in pairs if not format.lacks_all(pair))
        if not format.pairs:
            held = format.holds or ()
            raise ValueError(
                f"data spec '{spec}': it holds {' and '.join(held)}, and --pairs compares "
                f"{', '.join(map(':'.join, pairs))}; give --pairs {':'.join(held[:2])}, or data of "
                "the modalities of a pair, such as python:MODULE:NAME"
            )
    return format


def open_source(spec: str, pairs: Pairs = DEFAULT_PAIRS, **building: Any) -> IndexedSource:
    """Open a data set by its spec, `KIND` or `KIND:WHERE`; see `KINDS`. The first time its index is
    made, which reads every image. `pairs`: of modalities that are compared; a sample that has
    both of none is bad.

    `building`: workers, progress, check, refresh, folder, max_audio_seconds of
    `data.index.building.load_index`. Processes may call this together. Errors: ValueError for a
    spec that breaks a rule or data without a usable sample, OSError (FileNotFoundError) for files.
    """
    refuse_hidden(spec)
    format = open_format(spec, pairs)
    kind = ConceptSource if isinstance(format, DemoFormat) else IndexedSource
    spec = "demo" if spec in ("demo:", "demo:en") else spec
    source = kind(spec, format, load_index(format, **building))
    refuse_wrong_unit(source.spec, source.index.notes())
    if not (source.column("bad") == 0).any():
        raise ValueError(_no_usable_sample(source))
    return source


def refuse_hidden(spec: str) -> None:
    """Raise ValueError for an address as it is recorded, without its credentials."""
    if HIDDEN in spec and "://" in spec:
        raise ValueError(
            f"data spec '{spec}': its credentials were not recorded; give the data's address again "
            "(--data, --val-data), or keep them in the environment or the store's own files"
        )


def _no_usable_sample(source: IndexedSource) -> str:
    reasons = Counter(source.bad_counts())
    of = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    other = ""
    if reasons.keys() <= {"no-value", "no-caption"}:
        other = f", or give other --pairs than {', '.join(map(':'.join, source.format.pairs))}"
    lines = [f"{source.spec}: none of {len(source)} samples can be used ({of}); mend them{other}"]
    for (_, where, reason, detail), _ in zip(source.bad_samples(), range(MAX_SHOWN)):
        lines.append(f"{where}: {reason}: {detail}")
    if len(source) > MAX_SHOWN:
        lines.append(f"... and {len(source) - MAX_SHOWN} more")
    return "\n".join(lines)
