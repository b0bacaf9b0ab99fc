"""What every format offers to the index, and the checks that all of them share.

A format is listed in *parts*, in order. `parts` runs in the process that builds the index and is cheap; `rows` runs in
any process and turns one part into rows. A row that is wrong is a row with a `problem`, so that rows keep their numbers.
"""

import difflib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from data.bad_samples import CAPTION_LIMIT, FILE_LIMIT, BadSample

ROWS_OF_A_PART = 1024
BYTES_OF_A_PART = 8 << 20
ID_LIMIT = 1000  # characters
PICTURE_ENDINGS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")

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
class Row:
    """One sample as listed; its picture has not been looked at yet."""

    id: str
    number: int  # of the line, the table's row, the entry: for messages
    path: str = ""  # of the picture below the root, or of the member in its archive
    offset: int = 0  # of the picture in its archive (bytes), or of the row in its table
    size: int = -1  # bytes of the encoded picture; -1: not known
    mtime_ns: int = 0  # last change of the file that holds the picture
    captions: list[str] = field(default_factory=list)
    image: bytes | None = None  # where listing has read it anyway
    problem: BadSample | None = None


class Format:
    """A data set of one kind. Small when pickled: it holds paths and options, never rows."""

    spec: str  # kind, absolute paths and options: what the index is filed under
    root: str  # the folder that no picture may leave, without links; unused when no picture is a file of its own
    pictures_are_files = True
    unit = "sample"  # of `total` and the weights of parts

    def fingerprint(self) -> list[Stamp]:
        """The stamps of everything that the list of rows follows from. Raises FileNotFoundError."""
        raise NotImplementedError

    def total(self) -> int | None:
        """The sum of the weights of all parts, where it is known beforehand."""
        return None

    def parts(self) -> Iterator[Part]:
        raise NotImplementedError

    def rows(self, part: Part) -> Iterator[Row]:
        raise NotImplementedError

    def image_bytes(self, file: str, path: str, offset: int, size: int) -> bytes:
        """The encoded picture of a row: `file` is that of its part. Raises BadSample."""
        return read_below(self.root, path)

    def where(self, file: str, path: str, number: int) -> str:
        return f"{file}:{number}"


def stamp(path: str) -> Stamp:
    """Raises OSError."""
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns


def locate(root: str, relative: Any) -> tuple[str, os.stat_result]:
    """The true path of a file below `root` (a folder without links in its path), and its status; nothing is opened.

    Raises BadSample: outside-root when the path is absolute, has '..' or leads out through a link; missing-file; invalid-row;
    nul-character; invalid-utf8; not-an-image for folders, pipes and devices; unreadable.
    """
    if not isinstance(relative, str) or not relative:
        raise BadSample("invalid-row", f"the picture's path is {relative!r:.100}; a path as text is needed")
    check_characters(relative, "the picture's path")
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts:
        raise BadSample("outside-root", f"'{relative}' leaves {root}; give a path below it, without '..'")
    true = _true_path(root, pure.parts)
    if not is_inside(root, true):
        raise BadSample("outside-root", f"'{relative}' is a link that leads to {true}, which is not below {root}")
    try:
        status = os.stat(true)
    except (FileNotFoundError, NotADirectoryError):
        raise BadSample("missing-file", f"{true} does not exist; paths count from {root}") from None
    except OSError as error:
        raise BadSample("unreadable", f"{true}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadSample("not-an-image", f"{true} is a {'folder' if stat.S_ISDIR(status.st_mode) else 'pipe or device'}, not a file")
    return true, status


def _true_path(root: str, parts: tuple[str, ...]) -> str:
    path = root
    for part in parts:  # the root has no links, so only what is below it is looked at
        path = f"{path}/{part}"
        if os.path.islink(path):
            return os.path.realpath(os.path.join(root, *parts))
    return path


def is_inside(root: str, true: str) -> bool:
    return true.startswith(root.rstrip("/") + "/")


def read_below(root: str, relative: str) -> bytes:
    """All bytes of a file below `root`. Raises BadSample as `locate` does."""
    true, status = locate(root, relative)
    if status.st_size > FILE_LIMIT:
        raise BadSample("unreadable", f"{true} has {status.st_size:,} bytes; at most {FILE_LIMIT:,} are read")
    try:
        with open(true, "rb") as file:
            return file.read()
    except OSError as error:
        raise BadSample("unreadable", f"{true}: {error.strerror}") from error


def place(row: Row, root: str, relative: Any) -> None:
    """Set the row's path, and the size and time of the file it names. Raises BadSample as `locate` does."""
    row.path = relative if isinstance(relative, str) else ""
    _, status = locate(root, relative)
    row.size, row.mtime_ns = status.st_size, status.st_mtime_ns


def check_characters(text: str, what: str) -> None:
    """Raises BadSample: nul-character, invalid-utf8 (a lone surrogate, which is also what a byte that is not UTF-8 is read as)."""
    if "\0" in text:
        raise BadSample("nul-character", f"{what} holds the character NUL at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSample("invalid-utf8", f"{what} is not UTF-8 at position {error.start}; save it as UTF-8") from None


def checked_captions(given: Any) -> list[str]:
    """One text or a list of them -> the good ones, at least one.

    Raises BadSample: no-caption, invalid-row for other types, and when no text is good what is wrong with the first:
    nul-character, invalid-utf8, empty-caption, huge-caption.
    """
    texts = given if isinstance(given, list) else [given]
    if given is None or not texts:
        raise BadSample("no-caption", "no text is given; every sample needs words")
    good, first = [], None
    for text in texts:
        if not isinstance(text, str):
            raise BadSample("invalid-row", f"the text is {given!r:.100}; a text or a list of texts is needed")
        try:
            check_caption(text)
            good.append(text)
        except BadSample as problem:
            first = first or problem
    if first and not good:
        raise first
    return good


def check_caption(text: str) -> None:
    """Raises BadSample: nul-character, invalid-utf8, empty-caption, huge-caption."""
    check_characters(text, "the text")
    if not text.strip():
        raise BadSample("empty-caption", "the text is empty; every sample needs words")
    if len(text) > CAPTION_LIMIT:
        raise BadSample("huge-caption", f"the text has {len(text):,} characters; at most {CAPTION_LIMIT:,} are read: {text[:40]!r}...")


def checked_id(given: Any, otherwise: str) -> str:
    """A text or a whole number, or None for `otherwise`. Raises BadSample: invalid-row, nul-character, invalid-utf8."""
    if given is None:
        return otherwise
    if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
        raise BadSample("invalid-row", f"the id is {given!r:.100}; a text or a whole number is needed")
    text = str(given)
    check_characters(text, "the id")
    if len(text) > ID_LIMIT:
        raise BadSample("invalid-row", f"the id has {len(text):,} characters; at most {ID_LIMIT:,} are allowed")
    return text


def in_parts(file: str, entries: Iterator[tuple[Any, int, int]]) -> Iterator[Part]:
    """Entries (content, bytes it takes, share of the total) -> parts of at most 1024 of them and about 8 MiB."""
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
