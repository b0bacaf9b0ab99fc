"""What data sets know of a modality: the names under which rows hold it, and how a value is
checked; where its values are encoded files, also how these end and what is measured of them.

`kinds.py` has all of them. One of your own, which every data format then reads:

    from data.stored.kinds import STORED
    from data.stored.record import StoredFile

    STORED["depth"] = StoredFile("depth", endings=("depth.png",), measure=measured_depth)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from common.output import brief
from common.spelling import nearest
from data.bad_samples import FILE_LIMIT, REASONS, BadSample, check_characters
from data.identity import MISSING, Identity
from data.keys import HASH_BYTES, content_hash, keys_of
from data.stored.items import encoded_file
from data.stored.roots import too_large

if TYPE_CHECKING:
    from data.formats.rows import Format, Sample
    from data.index.sources import Source

JSON, TABLE, PARQUET = FORMS = ("json", "table", "parquet")
"""Rows as JSON objects, below a line of column names, and of parquet files."""
UNREADABLE = "unreadable_"
"""How the counts of values that could not be loaded begin."""


@dataclass
class Media:
    """Where the encoded value of a sample is."""

    path: str = ""  # as the data set gives it, or of the member in its archive
    offset: int = 0  # in its archive: bytes, or whatever place its format finds it by
    size: int = -1  # bytes; -1: not known
    mtime_ns: int = 0  # of a file of its own; 0: it is none; -1: the file is missing
    true_path: str = ""  # of a file of its own that was just found
    content: bytes | None = field(default=None, repr=False)  # where listing has read it anyway


@dataclass(frozen=True)
class Stored:
    """One modality in data sets. `names`: of `FORMS`, the keys or columns of rows that hold it, of
    which the first is proposed; those of a form that is not named are its own name, and of files
    NAME_path. `beside`: further keys that say more of a value. `several`: what values are called
    together. `parts`: the modality of what a value is made of, whose towers and weights serve it
    where a run does not have that modality itself.

    Of values that are no encoded files, formats read texts and regions; those of a modality of
    one's own come from `python:` data alone. Raises ValueError for what is no such record.
    """

    name: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    several: str = ""
    parts: str = ""
    in_formats: ClassVar[bool] = False
    """Whether formats read its values, and not `python:` data alone."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise self.wrong(
                f"the name is {brief(self.name)}; letters, digits and _ are needed, since --pairs, "
                "columns and metrics are named by it"
            )
        for form in self.names:
            if form not in FORMS:
                raise self.wrong(f"names has a form {brief(form)}{nearest(str(form), FORMS)}")
            self.refuse_no_words(f"names[{form!r}]", self.names[form])
        self.refuse_no_words("beside", self.beside)

    def wrong(self, what: str) -> ValueError:
        """What is wrong with the record, as an error."""
        return ValueError(f"{type(self).__name__} {brief(self.name)}: {what}")

    def refuse_no_words(self, what: str, given: Any) -> None:
        """Raise ValueError for anything but a tuple of words. A single word is the usual slip: its
        letters would be taken for words."""
        if not isinstance(given, tuple) or not all(isinstance(e, str) and e for e in given):
            hint = f"; write ({given!r},)" if isinstance(given, str) else ""
            raise self.wrong(f"{what} is {brief(given)}; a tuple of texts is needed{hint}")

    def names_in(self, form: str) -> tuple[str, ...]:
        return self.names.get(form, (self.name,))

    @property
    def in_archives(self) -> bool:
        """Whether a tar may hold it."""
        return self.in_formats

    @property
    def sought(self) -> str:
        """Where data sets hold it, for messages."""
        if not self.in_formats:
            return (
                f"{self.name} is an item's '{self.name}' of python: data alone, since STORED of "
                "data/stored/kinds.py has no entry that is a StoredFile"
            )
        keys = [" or ".join(map(repr, self.names_in(form))) for form in FORMS]
        places = zip(("a key {} of JSON lines", "a column {} of a table", "{} of parquet"), keys)
        return f"{self.name} is {', '.join(place.format(key) for place, key in places if key)}"

    def equal_rows(self, source: Source, index: np.ndarray) -> np.ndarray | None:
        """[n] int64 of the samples `index` [n], equal for equal values, which a loss takes for no
        negatives of each other and an evaluation for one; None: nothing tells. A sample without a
        value has any."""
        return None

    @property
    def plural(self) -> str:
        """What values are called together, as a part of a metric's name."""
        return (self.several or self.name).replace(" ", "_")

    @property
    def unreadable(self) -> str:
        """The key of a step's line for values that could not be loaded: `unreadable_sounds`."""
        return f"{UNREADABLE}{self.plural}"

    def numbers(self) -> Mapping[str, str]:
        """Columns of the index, name -> numpy type."""
        return {}

    def texts(self) -> tuple[str, ...]:
        """Its columns of texts."""
        return ()

    def check(self, value: Any, sample: Sample, row: Mapping[str, Any], format: Format) -> None:
        """Give the sample a value as the data set has it. `row`: all values. Raises BadSample."""
        if value is None:
            raise BadSample("no-value", f"no {self.name} is given")


def no_columns(value: Any, decode: bool) -> dict[str, Any]:
    """What is measured of files whose content is looked at when they are loaded."""
    return {}


def no_decoders() -> list[str]:
    return []


PLACE = {"offset": "i8", "size": "i8", "mtime_ns": "i8", "hash": f"V{HASH_BYTES}", "known_by": "u8"}
"""What the index has of every file, under the modality's name (`image_offset`): see `Media`; the
hash of the encoded bytes, and by what they are known again (`data/index/memo.py`): zeros where
nothing could be measured."""


@dataclass(frozen=True)
class StoredFile(Stored):
    """A modality whose values are encoded files: in folders, in archives or within rows.

    `endings`: of files and of members of an archive, there behind the first dot of a name.
    `not_of_its_kind`: the reason of `data.bad_samples.REASONS` for what is no such file.
    `measured`: columns of the index, name -> numpy type, 0 where it was not, and `said`: columns of
    texts. `measure`: makes them of a value; whether it is decoded. Raises BadSample.
    `missing_decoders`: what could be read if it were installed. `encode`: an item of a Python data
    set -> its bytes; raises BadSample.
    """

    endings: tuple[str, ...] = ()
    not_of_its_kind: str = "unreadable"
    measured: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    measure: Callable[[Any, bool], dict[str, Any]] = no_columns
    missing_decoders: Callable[[], list[str]] = no_decoders
    encode: Callable[[Any], bytes] = encoded_file
    in_formats = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_no_words("endings", self.endings)
        self.refuse_no_words("said", self.said)
        for ending in self.endings:
            if ending != ending.lower().lstrip("."):
                raise self.wrong(
                    f"the ending {ending!r} is never met: they are compared in lower case and from "
                    f"behind a dot; write {ending.lower().lstrip('.')!r}"
                )
        for column, kind in self.measured.items():
            self._refuse_no_number(column, kind)
        if self.not_of_its_kind not in REASONS:
            raise self.wrong(
                f"not_of_its_kind is {brief(self.not_of_its_kind)}, which is no reason of "
                f"data.bad_samples{nearest(str(self.not_of_its_kind), [*REASONS])}"
            )
        for part in ("measure", "missing_decoders", "encode"):
            if not callable(getattr(self, part)):
                raise self.wrong(f"{part} is {brief(getattr(self, part))}; a function is needed")
        if self.measure is no_columns and (self.measured or self.said):
            raise self.wrong(
                f"there is no measure, which makes {', '.join([*self.measured, *self.said])}; give "
                "a function (bytes, decoded or not) -> {column: value}, or leave the columns out"
            )

    def _refuse_no_number(self, column: Any, kind: Any) -> None:
        """Raise ValueError for what is no column of numbers."""
        try:
            is_number = isinstance(column, str) and np.dtype(kind).kind in "biuf"
        except TypeError:
            is_number = False
        if not is_number:
            raise self.wrong(
                f"measured has {brief(column)}: {brief(kind)}; a name and a numpy type of numbers "
                "are needed, such as 'f4'; texts stand in said"
            )

    def names_in(self, form: str) -> tuple[str, ...]:
        usual = (f"{self.name}_path", self.name)
        return self.names.get(form, usual[::-1] if form == PARQUET else usual)

    @property
    def rate(self) -> str:
        """The key of a step's line for values per second: `images_per_s`."""
        return f"{self.plural}_per_s"

    def numbers(self) -> Mapping[str, str]:
        return {f"{self.name}_{name}": kind for name, kind in PLACE.items()} | {**self.measured}

    def texts(self) -> tuple[str, ...]:
        return (f"{self.name}_path", *self.said)

    @property
    def in_archives(self) -> bool:
        return bool(self.endings)  # members are told apart by them alone

    @property
    def sought(self) -> str:
        members = f"a member .{' or .'.join(self.endings[:3])} of a tar" if self.endings else ""
        return f"{super().sought}, {members or 'no member of a tar, since it has no endings'}"

    def equal_rows(self, source: Source, index: np.ndarray) -> np.ndarray:
        return keys_of(source.content_hash(self.name, i) for i in index.tolist())

    def check(self, value: Any, sample: Sample, row: Mapping[str, Any], format: Format) -> None:
        super().check(value, sample, row, format)
        media = sample.media[self.name] = value if isinstance(value, Media) else Media()
        if isinstance(value, bytes):
            media.content, media.size = value, len(value)
        elif isinstance(value, Media):
            check_characters(value.path, "the name of the member")
        else:
            self.find(value, media, format)
        if media.size > FILE_LIMIT and not self.stays(media):
            raise BadSample("unreadable", f"the {self.name} has {too_large(media.size)}")

    def find(self, path: Any, media: Media, format: Format) -> None:
        """Look a path up below the roots of the data set. Raises BadSample."""
        media.path = path if isinstance(path, str) else ""
        try:
            media.true_path, status = format.roots.find(path, self.name, self.not_of_its_kind)
        except BadSample as problem:
            if problem.reason == "missing-file":
                media.size, media.mtime_ns = MISSING.size, MISSING.mtime_ns
            raise
        is_now = Identity.of(status)
        media.size, media.mtime_ns = is_now.size, is_now.mtime_ns

    def stays(self, media: Media) -> bool:
        """Whether what is known of a value is the path of its file, which is never read as a
        whole."""
        return False

    def look(self, value: Any, decode: bool, media: Media, hashed: bytes = b"") -> dict[str, Any]:
        """What the index has of a value. `hashed`: its `content_hash`, where it is known. Raises
        BadSample."""
        found = hashed or content_hash(value)
        return {f"{self.name}_hash": found, **self.measure(value, decode)}

    def may_decode(self, sample: Sample) -> bool:
        """Whether something of the sample may need the value decoded where others are not."""
        return False

    def must_decode(self, value: Any) -> bool:
        """Whether it does, where it may."""
        return False

    def of_sample(self, sample: Sample, found: Mapping[str, Any]) -> dict[str, Any]:
        """Further columns, of the sample and what was found of its value. Raises BadSample."""
        return {}

    def of_index(self, value: Any, number: Callable[[str], Any]) -> Any:
        """A value as a modality loads it. `number`: of a column."""
        return value

    def keys(self, column: Callable[[str], np.ndarray]) -> np.ndarray:
        """[N] uint64, equal for samples with equal values; 0: there is none."""
        name = f"{self.name}_key"
        if name in self.measured:
            return column(name)
        return column(f"{self.name}_hash").view(np.uint64)[::2]  # the first half of each
