"""What every format offers to the index, and the checks that all of them share.

A format is listed in *parts*, in order. `parts` runs in the process that builds the index and is
cheap; `rows` runs in any process and turns one part into rows. A row that is wrong is a row with a
`problem`, so that rows keep their numbers.
"""

import difflib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from data.index.bad_samples import CAPTION_LIMIT, FILE_LIMIT, Absent, BadSample

ROWS_OF_A_PART = 1024
BYTES_OF_A_PART = 8 << 20
ID_LIMIT = 1000  # characters
ROOTS_SHOWN = 3
AUDIO_ENDINGS = ("wav", "flac", "ogg", "opus", "mp3", "m4a", "aac", "aif", "aiff")
IMAGE_ENDINGS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff"),
    *("ppm", "pgm", "pbm", "pnm"),
)
# What systems and tools leave beside data: no part of it, and not worth a word.
LEFTOVER = re.compile(
    r"(^|/)(__MACOSX(/.*)?|\._[^/]*|\.DS_Store|Thumbs\.db|desktop\.ini"
    r"|(README|LICEN[CS]E)(\.(md|txt|rst))?)$",
    re.IGNORECASE | re.DOTALL,
)

Pairs = tuple[tuple[str, str], ...]
DEFAULT_PAIRS: Pairs = (("image", "text"),)

Stamp = tuple[str, int, int]
"""Path, size in bytes, time of the last change in ns: equal as long as a file is what it was."""


@dataclass(frozen=True)
class Part:
    """A piece of a data set that is listed at once."""

    file: str  # the file (or folder) that the rows stand in
    content: Any  # what the format's `rows` turns into rows
    weight: int  # its share of `Format.total`
    stamp: str = ""  # as long as it is the same, so are all rows; empty: they may differ


@dataclass
class AudioFile:
    """Where the encoded sound of a sample is, as `Row` says it of the image."""

    path: str = ""
    root: str = ""
    offset: int = 0
    size: int = -1
    mtime_ns: int = 0
    content: bytes | None = None


@dataclass
class Row:
    """One sample as listed; its image and its sound have not been read yet."""

    id: str
    number: int  # of the line, the table's row, the entry: for messages
    path: str = ""  # of the image as the data set gives it, or of the member in its archive
    root: str = ""  # the folder that an image of its own file was found below
    offset: int = 0  # of the image in its archive (bytes), or of the row in its table
    size: int = -1  # bytes of the encoded image; -1: not known
    mtime_ns: int = 0  # last change of the file that holds the image
    captions: list[str] = field(default_factory=list)
    image: bytes | None = None  # where listing has read it anyway
    audio: AudioFile | None = None
    problem: BadSample | None = None
    dropped: list[BadSample] = field(default_factory=list)  # of captions beside good ones
    lacks: dict[str, BadSample] = field(
        default_factory=dict
    )  # modality -> why the sample has none of it


class Unused(NamedTuple):
    """Something in a data set that is no part of a sample and is not expected to be one, such as a
    file of labels beside the images. It is counted, and refuses no run."""

    what: str  # counted together, such as "files .xml"
    path: str  # as `Row.path` has it: an example is shown


@dataclass(frozen=True)
class Roots:
    """The folders that images may lie below, absolute and without links in their paths: nothing
    that leaves all of them is opened."""

    own: str  # of the data set
    more: tuple[str, ...] | None = (
        # named beside it, in the order in which they are searched; None: this kind of data set
        # takes none
        None
    )

    @classmethod
    def of(cls, own: str, more: Sequence[str] | None = None) -> "Roots":
        """Of existing folders, given by any path; one that is given twice counts once."""
        true = dict.fromkeys(os.path.realpath(folder) for folder in (own, *(more or ())))
        first, *others = true
        return cls(first, None if more is None else tuple(others))

    @property
    def folders(self) -> tuple[str, ...]:
        """In the order in which they are searched."""
        return (self.own, *(self.more or ()))

    def options(self) -> str:
        """What tells an index of these folders from one of the data set's own folder alone; empty
        where there are no others."""
        return "".join(f"?root={folder}" for folder in self.more or ())

    def holding(self, true: str) -> str | None:
        """The first folder that is, or is above, a path without links."""
        return next(
            (folder for folder in self.folders if true == folder or is_inside(folder, true)), None
        )

    def shown(self) -> str:
        """For messages."""
        hidden = len(self.folders) - ROOTS_SHOWN
        return ", ".join(self.folders[:ROOTS_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


class Format:
    """A data set of one kind. Small when pickled: it holds paths and options, never rows."""

    spec: str  # kind, absolute paths and options: what the index is filed under
    roots: Roots  # unused when no image is a file of its own
    images_are_files = True  # at least those of rows with a path
    audio_is_files = True  # likewise, where there is any
    unit = "sample"  # of `total` and the weights of parts
    when_changed = "start again, and it is checked anew"  # what to do about a changed image
    holds: tuple[str, ...] | None = ("image", "text")  # modalities; None: any, each sample some
    # of modalities that are compared: a sample is usable where it has both of some pair
    pairs: Pairs = DEFAULT_PAIRS

    def fingerprint(self) -> list[Stamp]:
        """The stamps of everything that the list of rows follows from. Raises FileNotFoundError."""
        raise NotImplementedError

    def total(self) -> int | None:
        """The sum of the weights of all parts, where it is known beforehand."""
        return None

    def parts(self) -> Iterator[Part]:
        raise NotImplementedError

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        raise NotImplementedError

    def image_bytes(self, file: str, path: str, offset: int, size: int) -> bytes:
        """The encoded image of a row: `file` is that of its part. Raises BadSample."""
        return read_below(self.roots, path)

    def audio_bytes(self, file: str, path: str, offset: int, size: int, number: int) -> bytes:
        """The encoded sound of a row: `file` is that of its part, the rest of its `AudioFile`,
        `number` of the row. Raises BadSample."""
        return read_below(self.roots, path, "audio")

    def value(self, modality: str, file: str, path: str, number: int) -> Any:
        """What a row holds of a modality other than images, texts and audio. Raises Absent,
        BadSample."""
        raise Absent(f"{self.spec} holds {' and '.join(self.holds or ())}, no {modality}")

    def language(self, number: int) -> str | int | None:
        """Of a row's texts, by a name or a number that the text tower knows; None: not said."""
        return None

    def label(self, path: str) -> str | None:
        """The class of a row's image, by a name that is equal for all images of the class; None: the
        data set has no classes of its own."""
        return None

    def where(self, file: str, path: str, number: int) -> str:
        return f"{file}:{number}"

    def fill(self, row: Row, takers: Mapping[str, Callable[[], None]]) -> None:
        """Give the row what it has of each modality that is compared, by the `takers`, in their
        order. One that raises BadSample: where images and texts are compared the sample is bad,
        else it lacks that modality. Raises BadSample."""
        for modality in self.modalities:
            if modality not in takers:
                row.lacks[modality] = BadSample("no-value", f"no '{modality}' is read from here")
        for modality, take in takers.items():
            if modality not in self.modalities:
                continue
            try:
                take()
            except BadSample as problem:
                if self.pairs == DEFAULT_PAIRS:
                    raise
                row.lacks[modality] = problem

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those of the pairs, in the order in which they are first named."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair))

    def lacks_all(self, pair: set[str]) -> bool:
        """Is there nothing in this kind of data set that a pair compares?"""
        return self.holds is not None and not pair <= set(self.holds)

    def index_name(self) -> str:
        """What an index is filed under: the spec, and the pairs where they are others than images
        and texts."""
        named = ",".join(map(":".join, self.pairs))
        return self.spec if self.pairs == DEFAULT_PAIRS else f"{self.spec}\0{named}"


def stamp(path: str) -> Stamp:
    """Raises OSError."""
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns


class Place(NamedTuple):
    """An image's file."""

    root: str  # the folder that it was found below
    true: str  # absolute, without links
    status: os.stat_result


def locate(roots: Roots, path: Any, what: str = "image") -> Place:
    """Where the file of a path in a data set is; nothing is opened.

    A relative path counts from each of `roots` in order, and the first below which it exists wins,
    whatever is there. An absolute one may lie below any of them. Links are followed as far as they
    stay below one of `roots`.

    Raises BadSample: outside-root when the path leaves all of `roots`, has '..' or leads out
    through a link; missing-file; invalid-row; nul-character; invalid-utf8; not-an-image (`what`
    "audio": not-audio) for folders, pipes and devices; unreadable.
    """
    if not isinstance(path, str) or not path:
        raise BadSample(
            "invalid-row", f"the {what}'s path is {path!r:.100}; a path as text is needed"
        )
    check_characters(path, f"the {what}'s path")
    pure = PurePosixPath(path)
    if ".." in pure.parts:
        raise _outside(roots, path)
    for folder, true in _candidates(roots, pure):
        if found := _found(roots, path, folder, true, what):
            return found
    if pure.is_absolute():
        raise BadSample("missing-file", f"{true} does not exist")
    if roots.more:
        raise BadSample(
            "missing-file",
            f"'{path}' does not exist; paths count from {roots.shown()}, in this order",
        )
    raise BadSample("missing-file", f"{true} does not exist; paths count from {roots.own}")


def _candidates(roots: Roots, path: PurePosixPath) -> Iterator[tuple[str | None, str]]:
    """Where a path without '..' may lead: the folder that a relative one counts from, None for an
    absolute one; and the true path."""
    if not path.is_absolute():
        for folder in roots.folders:
            yield folder, _true_path(folder, path.parts)
        return
    plain = "/" + "/".join(path.parts[1:])
    below = next((folder for folder in roots.folders if is_inside(folder, plain)), None)
    if below is None:
        yield None, os.path.realpath(plain)  # the path may name a root by a link
    else:
        yield None, _true_path(below, PurePosixPath(plain).relative_to(below).parts)


def _found(roots: Roots, path: str, folder: str | None, true: str, what: str) -> Place | None:
    """What is at `true`, where `path` leads; None: nothing. Raises BadSample as `locate` does."""
    holding = roots.holding(true)
    if holding is None:
        raise _outside(roots, path, true)
    try:
        status = os.stat(true)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadSample("unreadable", f"{true}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadSample(
            "not-audio" if what == "audio" else "not-an-image",
            f"{true} is a {'folder' if stat.S_ISDIR(status.st_mode) else 'pipe or device'}, not a "
            "file",
        )
    return Place(folder or holding, true, status)


def _outside(roots: Roots, path: str, true: str | None = None) -> BadSample:
    """`true`: where the path leads, if that was looked up."""
    remedy = (
        ""
        if roots.more is None
        else "; allow its folder with --data-root DIR, or ?root=DIR in the data spec"
    )
    if true is None or true == os.path.normpath(path):
        below = "below one of them" if roots.more else "below it"
        return BadSample(
            "outside-root",
            f"'{path}' leaves {roots.shown()}; give a path {below}, without '..'{remedy}",
        )
    return BadSample(
        "outside-root",
        f"'{path}' leads through a link to {true}, which is not below {roots.shown()}{remedy}",
    )


def _true_path(root: str, parts: tuple[str, ...]) -> str:
    path = root.rstrip("/")
    for part in parts:  # the root has no links, so only what is below it is checked
        path = f"{path}/{part}"
        if os.path.islink(path):
            return os.path.realpath(os.path.join(root, *parts))
    return path or root


def is_inside(root: str, true: str) -> bool:
    return true.startswith(root.rstrip("/") + "/")


def read_below(roots: Roots, path: str, what: str = "image") -> bytes:
    """All bytes of a file below one of `roots`. Raises BadSample as `locate` does."""
    _, true, status = locate(roots, path, what)
    if status.st_size > FILE_LIMIT:
        raise BadSample(
            "unreadable", f"{true} has {status.st_size:,} bytes; at most {FILE_LIMIT:,} are read"
        )
    try:
        with open(true, "rb") as file:
            return file.read()
    except OSError as error:
        raise BadSample("unreadable", f"{true}: {error.strerror}") from error


def place(row: Row, roots: Roots, path: Any) -> None:
    """Set the row's path, and the root, size and time of the file it names. Raises BadSample as
    `locate` does."""
    row.path = path if isinstance(path, str) else ""
    row.root, _, status = locate(roots, path, "image")
    row.size, row.mtime_ns = status.st_size, status.st_mtime_ns


def place_audio(row: Row, roots: Roots, path: Any) -> None:
    """The same for the sound."""
    if path is None:
        raise BadSample("no-value", "no sound is given")
    row.audio = AudioFile(path if isinstance(path, str) else "")
    row.audio.root, _, status = locate(roots, path, "audio")
    row.audio.size, row.audio.mtime_ns = status.st_size, status.st_mtime_ns


def check_characters(text: str, what: str) -> None:
    """Raises BadSample: nul-character, invalid-utf8 (a lone surrogate, which is also what a byte
    that is not UTF-8 is read as)."""
    if "\0" in text:
        raise BadSample(
            "nul-character", f"{what} holds the character NUL at position {text.index(chr(0))}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSample(
            "invalid-utf8", f"{what} is not UTF-8 at position {error.start}; save it as UTF-8"
        ) from None


def take_captions(row: Row, given: Any) -> None:
    """Give the row the good ones of one text or a list of them, and what is wrong with the others.

    Raises BadSample when no text is good, with what is wrong with the first: no-caption,
    invalid-row for other types, nul-character, invalid-utf8, empty-caption, huge-caption.
    """
    if hasattr(given, "tolist"):
        given = given.tolist()  # of numpy or pandas
    texts = list(given) if isinstance(given, (list, tuple)) else [given]
    good, problems = [], []
    for text in texts or [None]:
        try:
            check_caption(text)
            good.append(text)
        except BadSample as problem:
            problems.append(problem)
    if not good:
        raise problems[0]
    row.captions, row.dropped = good, problems


def check_caption(text: Any) -> None:
    """Raises BadSample: no-caption, invalid-row, nul-character, invalid-utf8, empty-caption,
    huge-caption."""
    if text is None:
        raise BadSample("no-caption", "no text is given; every sample needs words")
    if not isinstance(text, str):
        raise BadSample(
            "invalid-row", f"the text is {text!r:.100}; a text or a list of texts is needed"
        )
    check_characters(text, "the text")
    if not text.strip():
        raise BadSample("empty-caption", "the text is empty; every sample needs words")
    if len(text) > CAPTION_LIMIT:
        raise BadSample(
            "huge-caption",
            f"the text has {len(text):,} characters; at most {CAPTION_LIMIT:,} are read: "
            f"{text[:40]!r}...",
        )


def checked_id(given: Any, otherwise: str) -> str:
    """A text or a whole number, or None for `otherwise`. Raises BadSample: invalid-row,
    nul-character, invalid-utf8."""
    if given is None:
        return otherwise
    if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
        raise BadSample(
            "invalid-row", f"the id is {given!r:.100}; a text or a whole number is needed"
        )
    text = str(given)
    check_characters(text, "the id")
    if len(text) > ID_LIMIT:
        raise BadSample(
            "invalid-row", f"the id has {len(text):,} characters; at most {ID_LIMIT:,} are allowed"
        )
    return text


def checked_language(given: Any) -> str | int | None:
    """A name or a number; all else, and an empty name: not said."""
    return given if isinstance(given, (str, int)) and given != "" else None


def in_parts(file: str, entries: Iterator[tuple[Any, int, int]]) -> Iterator[Part]:
    """Entries (content, bytes it takes, share of the total) -> parts of at most 1024 of them and
    about 8 MiB."""
    content, size, weight = [], 0, 0
    for entry, entry_size, entry_weight in entries:
        content.append(entry)
        size, weight = size + entry_size, weight + entry_weight
        if len(content) == ROWS_OF_A_PART or size >= BYTES_OF_A_PART:
            yield Part(file, content, weight)
            content, size, weight = [], 0, 0
    if content:
        yield Part(file, content, weight)


def near(word: str, known: Sequence[str]) -> str:
    """A hint for a word that is none of the known ones, or nothing."""
    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.4)
    return f"; did you mean '{found[0]}'?" if found else ""
