"""What a data format is, and the checks that all formats share.

A format lists *parts* and turns a part into plain *rows*; `Format.samples` fills, checks and names
them. Listing parts is cheap and happens in one process, reading a part happens in any. An index
(`data/index/`) reads all parts beforehand; whatever reads parts as they come needs no more than
`parts` and `samples`.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from common.output import brief
from data.annotations import Annotations
from data.bad_samples import Absent, BadSample, check_characters
from data.clips import WHOLE_FILM, Span
from data.identity import Identity
from data.regions import BoxOptions
from data.stored.kinds import stored
from data.stored.record import Media
from data.stored.roots import Roots
from data.values import plain, whole

ROWS_OF_A_PART = 1024
WEIGHT_OF_A_PART = 8 << 20
NAME_LIMIT = 1000  # characters of an id or a language that is given
NAME_NEEDED = "a text or a whole number is needed"
CAPTION_LINES = "samples with a caption of several lines"
LIST_LIMIT = 4 << 30  # bytes of a file that is one JSON value, and is read as a whole
# What systems and tools leave beside data: no part of it, and not counted.
LEFTOVER = re.compile(
    r"(^|/)(__MACOSX(/.*)?|\._[^/]*|\.DS_Store|Thumbs\.db|desktop\.ini"
    r"|(README|LICEN[CS]E)(\.(md|txt|rst))?)$",
    re.IGNORECASE | re.DOTALL,
)

Pairs = tuple[tuple[str, str], ...]
DEFAULT_PAIRS: Pairs = (("image", "text"),)

BESIDE = "beside what is used"
"""In the `values` of an entry, where no modality can be named so: of what it holds more than once, the
rest, each as `Unused.what`."""

Stamp = tuple[str, int, int]
"""Path, size in bytes, time of the last change in ns: equal while a file is unchanged."""


class Part(NamedTuple):
    """A piece of a data set that is read at once, such as a shard or some lines of a file."""

    file: str  # the file or folder that the rows stand in
    content: Any  # what the format's `rows` turns into rows
    weight: int  # its share of `Format.total`
    # Equal while all rows are unchanged; None: they follow from more, such as images or code.
    stamp: Any = None


class Row(NamedTuple):
    """One sample as the data set gives it, unchecked."""

    name: str  # its id where `values` has none
    number: int  # of the line, the table's row, the entry: for messages
    # "id", "language" and each modality -> what is given, or what is wrong with it. An image, a
    # sound or a film is a path below the format's roots, encoded bytes, or the `Media` of an
    # archive; `data.clips.KEYS` say which part of a film.
    values: Mapping[str, Any] | BadSample
    beside: Sequence["Unused"] = ()  # counted where the sample is used


class Unused(NamedTuple):
    """Something in a data set that is no part of a sample and is not expected to be one, such as a
    file of labels beside the images. It is counted, and refuses no run."""

    what: str  # counted together, such as "files .xml"
    path: str  # as `Media.path` has it: an example is shown
    number: int = 0  # as `Row.number`, where places are told by it


@dataclass
class Sample:
    """A row that was checked; its image and sound have not been read yet."""

    id: str
    number: int
    captions: list[str] = field(default_factory=list)
    language: str | int | None = None
    label: str = ""  # its class, where the row says it
    media: dict[str, Media] = field(default_factory=dict)  # by modality
    lacks: dict[str, BadSample] = field(default_factory=dict)  # modality -> why there is none
    dropped: list[BadSample] = field(default_factory=list)  # captions beside good ones
    annotations: dict[str, Annotations] = field(default_factory=dict)  # by modality
    span: Span = WHOLE_FILM
    problem: BadSample | None = None


class Format:
    """A data set of one kind: subclasses set `spec`, and list parts and rows.

    Small when pickled: it holds paths and options, never rows. Attributes that begin with "_" stay
    in their process.
    """

    spec: str  # kind, absolute paths and options: what the index is filed under
    files: Sequence[str] = ()  # all that the rows follow from
    roots: Roots  # unused where no image or sound is a file of its own
    unit = "sample"  # of `total` and the weights of parts
    holds: tuple[str, ...] | None = ("image", "text")  # modalities; None: any, each sample some
    boxes = BoxOptions()
    # what `?captions=` may say of how captions are made of a row's texts, and what it does say
    caption_ways: tuple[str, ...] = ()
    captions: str | None = None
    # of modalities that are compared: a sample is usable where it has both of some pair
    pairs: Pairs = DEFAULT_PAIRS

    def fingerprint(self) -> list[Stamp]:
        """The stamps of everything that the list of rows follows from. Raises FileNotFoundError."""
        return [stamp(file) for file in self.files]

    def total(self) -> int | None:
        """The sum of the weights of all parts, where it is known beforehand."""
        return sum(map(os.path.getsize, self.files)) if self.unit == "B" else None

    def parts(self) -> Iterator[Part]:
        raise NotImplementedError

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        raise NotImplementedError

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        """The encoded image or sound of row `number` of the part of `file`. Raises BadSample."""
        return self.roots.read(media.path, modality, media.true_path)

    def value(self, modality: str, number: int) -> Any:
        """What row `number` holds of a modality that is not in files. Raises Absent."""
        raise Absent(f"{self.spec} holds {' and '.join(self.holds or ())}, no {modality}")

    def label(self, path: str) -> str | None:
        """A name that is equal for all images of a class; None: there are no classes."""
        return None

    def where(self, file: str, path: str, number: int) -> str:
        """For messages. `path`: of the image or the sound, else the sample's id."""
        return f"{file}:{number}"

    def samples(self, part: Part) -> Iterator[Sample | Unused]:
        """The rows of a part, each checked as far as that needs no decoding."""
        for row in self.rows(part):
            if isinstance(row, Unused):
                yield row
                continue
            sample = self.checked(row)
            # asked before whoever gets the sample adds what its image lacks
            is_used = self.problem(sample) is None
            yield sample
            yield from row.beside if is_used else ()

    def checked(self, row: Row) -> Sample:
        """A row as a sample, with what is wrong with it."""
        sample = Sample(row.name, row.number)
        try:
            if isinstance(row.values, BadSample):
                raise row.values
            sample.id = checked_id(row.values.get("id"), row.name)
            sample.label = row.values.get("label", "")
            language = checked_name(row.values.get("language"), "the language")
            sample.language = None if language == "" else language
        except BadSample as problem:
            sample.problem = problem
            return sample
        for modality in self.modalities:
            try:
                value = row.values.get(modality)
                if isinstance(value, BadSample):
                    raise value
                stored(modality).check(value, sample, row.values, self)
            except BadSample as problem:
                sample.lacks[modality] = problem
        return sample

    def problem(self, sample: Sample) -> BadSample | None:
        """What is wrong with a sample that has both values of no pair."""
        lacks = sample.lacks
        if sample.problem or any(not {*pair} & lacks.keys() for pair in self.pairs):
            return sample.problem
        problems = [lacks[modality] for modality in self.modalities if modality in lacks]
        # A value that is broken says more than one that was never there.
        return min(problems, key=lambda problem: problem.reason == "no-value")

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities of the pairs, in the order in which they are first named."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair))

    def lacks_all(self, pair: Sequence[str]) -> bool:
        """Whether this kind of data set holds nothing of a modality of the pair."""
        return self.holds is not None and not {*pair} <= {*self.holds}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name[0] != "_"}


class EntriesFormat(Format):
    """A data set that is listed entry by entry, by the first of its `files`."""

    @property
    def file(self) -> str:
        return self.files[0]

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        """(number, content) of each, and its share of `total`."""
        raise NotImplementedError

    def values(self, content: Any) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """The `values` of a row, or of several, made of an entry that is not these yet. Raises
        BadSample."""
        return content

    def name(self, number: int) -> str:
        return str(number)

    def parts(self) -> Iterator[Part]:
        return in_parts(self.file, self.entries())

    def rows(self, part: Part) -> Iterator[Row]:
        for number, content in part.content:
            found = attempt(self.values, content)
            if not isinstance(found, list):
                yield Row(self.name(number), number, found, _beside(found, number))
                continue
            for k, values in enumerate(found):
                name = f"{self.name(number)}#{k}"
                yield Row(name, number, values, _beside(values, number))


def _beside(values: Mapping[str, Any] | BadSample, number: int) -> Sequence[Unused]:
    if isinstance(values, BadSample) or BESIDE not in values:
        return ()
    return [Unused(what, "", number) for what in values[BESIDE]]


def second_value(place: str, name: str, used: str) -> str:
    """What to count where a row has two values of a kind, of which that of `name` is not read.
    `place`: "key" or "column"."""
    return f"values of a {place} {name!r} beside {used!r}"


def stamp(path: str) -> Stamp:
    """Raises OSError."""
    found = Identity.of(os.stat(path))
    return path, found.size, found.mtime_ns


# -- checks


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or the BadSample that it raises."""
    try:
        return function(*arguments)
    except BadSample as problem:
        return problem


def checked_id(given: Any, otherwise: str) -> str:
    """`otherwise`, a name that follows from the data's own, for None. Raises BadSample: as
    `checked_name`."""
    found = checked_name(given, "the id")
    if found is None:
        check_characters(otherwise, "the name")
        return otherwise
    if found == "":
        raise BadSample("invalid-row", f"the id is ''; {NAME_NEEDED}")
    return str(found)


def checked_name(given: Any, what: str) -> str | int | None:
    """A text, a whole number, also of numpy or a decimal, or None, also as pandas has it. Raises BadSample:
    invalid-row, nul-character, invalid-utf8."""
    given = whole(plain(given))
    if given is None or isinstance(given, float) and math.isnan(given):
        return None
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    if not isinstance(given, str):
        raise BadSample("invalid-row", f"{what} is {brief(given)}; {NAME_NEEDED}")
    check_characters(given, what)
    if len(given) > NAME_LIMIT:
        raise BadSample(
            "invalid-row",
            f"{what} has {len(given):,} characters; at most {NAME_LIMIT:,} are allowed",
        )
    return given


def take_captions(spec: str, options: dict[str, str], known: Sequence[str]) -> str | None:
    """What `captions=` says, taken out of the options of a data spec. `spec` begins messages.
    Errors: ValueError."""
    given = options.pop("captions", None)
    if given not in (None, *known):
        raise ValueError(f"{spec} captions={given}; one of {', '.join(known)} is needed")
    return given


# -- lists


def in_parts(file: str, entries: Iterable[tuple[Any, int]]) -> Iterator[Part]:
    """Entries (content, weight) -> parts of at most 1024 of them and a weight of about 8 Mi, which
    are bytes where lines are read."""
    content, weight = [], 0
    for entry, entry_weight in entries:
        content.append(entry)
        weight += entry_weight
        if len(content) == ROWS_OF_A_PART or weight >= WEIGHT_OF_A_PART:
            yield Part(file, content, weight)
            content, weight = [], 0
    if content:
        yield Part(file, content, weight)
