"""A data set as tar shards, as webdataset writes them: members of one sample share the name up to
its first dot, or, where a name has dots of its own, up to its last.

A file may hold several archives, one behind the other, as `cat a.tar b.tar` joins them.

Shards are not unpacked: the index knows where in its shard each image lies, and any sample is one
read. Names of members are names only, they are never opened as paths.
"""

import os
import re
import tarfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from posixpath import splitext
from typing import Any, BinaryIO, cast

from common.secrets import redact
from data.bad_samples import ABSENCES, BadSample, Captions, checked_captions
from data.formats.classes import (
    RETRIEVAL,
    Classes,
    classes_beside,
    local_stamps,
    type_beside,
)
from data.formats.prompts import OPTIONS
from data.formats.rows import (
    LEFTOVER,
    Media,
    Part,
    Row,
    Stamp,
    Unused,
    attempt,
    second_value,
    take_captions,
)
from data.formats.shards import Shard, ShardsFormat, split_pattern
from data.formats.tables import parsed_object
from data.regions import BOX_OPTIONS, BoxOptions
from data.stored.annotations import StoredAnnotations
from data.stored.image import ENDINGS as IMAGE_ENDINGS
from data.stored.kinds import STORED, files_of, stored
from data.stored.record import StoredFile
from data.stored.text import StoredText, lines_of

CLASS = "cls"  # the ending of a class
OF_TARS = (*BOX_OPTIONS, "captions", "split", *OPTIONS)
USAGE = "webdataset:PATTERN, for example webdataset:shards/{000..012}.tar"
PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst")
# Ending and, of JSON, key: the first good text is taken.
TEXTS = (("txt", None), ("json", "caption"), ("json", "text"))
OF_THE_ARCHIVE = re.compile(r"__[^/]*__($|/)")
HIDDEN = re.compile(r"(^|/)[.][^./]")
TEXT_LIMIT = 1 << 20  # bytes of a text member
# bytes of the headers of one member, in which long names and attributes are
HEADER_LIMIT = 1 << 20
GLOBALS_LIMIT = 10_000  # entries of a shard's own headers, which hold for all that follows
DIGITS = re.compile(rb"[0-9]{256}")  # tarfile searches such runs anew from each of their digits
OPEN_SHARDS = 64  # per process
BLOCK = 512  # bytes; tar's unit
PIECE = 1 << 20  # bytes of what follows an archive that are looked at together

Members = dict[str, Media]
"""Ending, in lower case -> a file in the shard."""


class WebdatasetFormat(ShardsFormat):
    """The samples of all shards. An id is SHARD/KEY, where the key is the members' common name."""

    unit = "B"
    caption_ways = ("lines", "classes")

    def __init__(self, where: str, shard: Shard | None = None) -> None:
        """`where`: patterns of shards, joined by `::`, and options. `shard`: instead of these.
        Errors: ValueError, OSError."""
        pattern, options = split_pattern("webdataset", where, OF_TARS)
        self.described = redact(f"data spec 'webdataset:{where:.1000}':")
        self.boxes = BoxOptions.of(self.described, options)
        self.captions = take_captions(self.described, options, self.caption_ways)
        super().__init__("webdataset", pattern, USAGE, shard, options.pop("split", None))
        self.holds = tuple(name for name, kind in STORED.items() if kind.in_archives)
        self.class_options = options
        self.spec += self.boxes.words() + (f"?captions={self.captions}" if self.captions else "")
        self.spec += f"?{options}" if options else ""

    def check(self, name: str) -> None:
        if name.partition("?")[0].lower().endswith(PACKED):
            raise ValueError(_refusal(name))

    def parts(self) -> Iterator[Part]:
        for file in self.files:
            unchanging = (self.stamp(file), self._class_stamps(self._addresses[file]))
            yield Part(file, None, os.path.getsize(file), unchanging)

    def fingerprint(self) -> list[Stamp]:
        one_of_each = {os.path.dirname(name): name for name in self.names}.values()
        every = {each for name in one_of_each for each in self._class_stamps(name)}
        return [*super().fingerprint(), *sorted(every)]

    @cached_property
    def _addresses(self) -> dict[str, str]:
        return dict(zip(self.files, self.names))

    def _class_stamps(self, name: str) -> list[Stamp]:
        return local_stamps(name, self.class_options)

    @property
    def made_of(self) -> tuple[str | None, str | None]:
        """Where names of classes and their sentences are from; None: the data set itself."""
        return self._classes(self.names[0]).made_of

    @cached_property
    def _classes(self) -> Callable[[str], Classes]:
        """The classes of a shard, by its name; those of a folder are read once."""
        known: dict[str, Classes] = {}

        def classes(shard: str) -> Classes:
            if (folder := os.path.dirname(shard)) not in known:
                known[folder] = classes_beside(self.described, shard, self.class_options)
            return known[folder]

        return classes

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        name, short = self.shown[part.file], self.short[part.file]
        size = os.path.getsize(part.file)
        if size == 0:
            yield Row(short, 0, BadSample("empty-file", f"{name} has no byte"))
            return
        with open(part.file, "rb") as file:
            shard, number = _shard_of(file, size, name), 0
            last: Row | None = None  # held back until it is known whether the shard goes on
            for found in shard.samples():
                if isinstance(found, Unused):
                    yield found
                    continue
                if last is not None:
                    yield last
                key, members = found
                last = Row(f"{short}/{key}", number, *self._values(part.file, shard, members))
                number += 1
            # An orphan at a damaged end lost its other half with it.
            if last is not None and not (shard.fault and self._is_orphan(last)):
                yield last
            if shard.fault:
                fault = BadSample("truncated-archive", shard.fault)
                yield Row(f"{short}/end of shard", number, fault)

    def _is_orphan(self, row: Row) -> bool:
        problem = self.problem(self.checked(row))
        return problem is not None and problem.reason == "orphan-member"

    def _values(
        self, file: str, shard: "_Shard", members: Members
    ) -> tuple[dict[str, Any], list[Unused]]:
        """What a sample holds of each modality that is compared, and the members beside that."""
        values: dict[str, Any] = {}
        used: set[str] = set()
        beside: list[Unused] = []
        listed = ", ".join(members)
        for modality in self.modalities:
            missing = BadSample("orphan-member", f"no {modality} among {listed}")
            kind = stored(modality)
            if isinstance(kind, StoredText):
                values[modality] = self._text(file, shard, members, used, beside)
                if values[modality] is None and CLASS in members:
                    used.add(CLASS)
                    found = attempt(self._class_captions, file, shard, members[CLASS])
                    values |= found if isinstance(found, dict) else {modality: found}
                values[modality] = values[modality] or missing
            elif isinstance(kind, StoredAnnotations):
                values[modality] = None
                if "json" in members:
                    used.add("json")
                    values[modality] = attempt(shard.text, members["json"], kind.key)
            elif isinstance(kind, StoredFile):
                found = next((each for each in members if each in kind.endings), None)
                values[modality] = missing if found is None else members[found]
                used |= {found} if found else set()
                if kind.beside and "json" in members:
                    used.add("json")
                    fields = attempt(shard.text, members["json"], "")
                    keys = kind.beside if isinstance(fields, dict) else ()
                    values |= {key: fields.get(key) for key in keys}
        names = {ending: member.path for ending, member in members.items() if ending not in used}
        beside += [Unused(f"members .{ending}", path) for ending, path in names.items()]
        return values, beside

    def _text(
        self, file: str, shard: "_Shard", members: Members, used: set[str], beside: list[Unused]
    ) -> Captions | BadSample | None:
        if self.captions == "classes":
            return None
        is_lines = self.captions == "lines" or self.captions is None and self._marked_lines(file)
        return _first_good_text(shard, members, used, beside, is_lines)

    @cached_property
    def _marked_lines(self) -> Callable[[str], bool]:
        """Whether the set of a shard, by its file, says that each line is a caption."""
        of_folder = lru_cache(None)(lambda folder: type_beside(f"{folder}/shard") == RETRIEVAL)
        return lambda file: of_folder(os.path.dirname(self._addresses[file]))

    def _class_captions(self, file: str, shard: "_Shard", member: Media) -> dict[str, Any]:
        """The class and its captions. Raises BadSample."""
        label, captions = self._classes(self._addresses[file]).of(shard.text(member, None))
        return {"label": label, "text": captions}

    @cached_property
    def _opened(self) -> Callable[[str], Any]:
        """Opens a shard; of those that are kept open, the longest unused closes for the next."""
        return lru_cache(OPEN_SHARDS)(lambda file: open(file, "rb", buffering=0))

    def read(self, modality: str, file: str, number: int, media: Media) -> bytes:
        name = self.shown[file]
        try:
            found = os.pread(self._opened(file).fileno(), media.size, media.offset)
        except OSError as error:
            raise BadSample("unreadable", f"{name}: {error.strerror}") from error
        if len(found) < media.size:
            end = media.offset + media.size
            raise BadSample(
                "unreadable", f"{name} ends before byte {end}; it changed under the run"
            )
        return found

    def where(self, file: str, path: str, number: int) -> str:
        name = self.shown.get(file, file)
        key = path.removeprefix(self.short.get(file, "")).removeprefix("/")
        return f"{name}#{key}" if key else name


def count_rows(file: BinaryIO, size: int, name: str) -> int:
    """How many the format gives for a shard, by its headers alone; for one with a damaged end, of
    which it reads the texts, at most one more. `name`: for messages. Errors: ValueError."""
    if size == 0:
        return 1
    shard = _shard_of(file, size, name)
    samples = sum(not isinstance(found, Unused) for found in shard.samples())
    return samples + bool(shard.fault)


def records(
    file: BinaryIO, size: int, name: str, fields: bool, captions: bool
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Of each sample of a shard what its .json says, if `fields` are asked for, and its good
    captions. Errors: as `count_rows`."""
    shard = _shard_of(file, size, name)
    for found in shard.samples():
        if isinstance(found, Unused):
            continue
        record, texts, members = dict[str, Any](), None, found[1]
        if fields and "json" in members:
            with suppress(BadSample):
                record = shard.text(members["json"], "")
        if captions:
            texts = _first_good_text(shard, members, set(), [])
        yield record, texts.good if isinstance(texts, Captions) else []


def keys_and_captions(
    file: BinaryIO, size: int, name: str, is_lines: bool
) -> Iterator[tuple[str, list[str]]]:
    """Of each sample of a shard its key and its good captions, each line one if `is_lines`. Errors:
    ValueError, also for a sample whose captions are those of its class."""
    shard = _shard_of(file, size, name)
    for found in shard.samples():
        if not isinstance(found, Unused):
            texts = _first_good_text(shard, found[1], set(), [], is_lines)
            if texts is None and CLASS in found[1]:
                raise ValueError(f"{name}: {found[0]} has no text, but a class")
            yield found[0], texts.good if isinstance(texts, Captions) else []


def whole_samples(file: BinaryIO, size: int, name: str) -> Iterator[tuple[str, Members]]:
    """Key and members of each sample of a shard. Errors: ValueError, also for a shard that is
    damaged or ends early."""
    shard = _shard_of(file, size, name)
    for found in shard.samples():
        if not isinstance(found, Unused):
            yield found
    if shard.fault:
        raise ValueError(f"{name} is {shard.fault}; get it again")


def _shard_of(file: BinaryIO, size: int, name: str) -> "_Shard":
    if file.read(2) == b"\x1f\x8b":
        raise ValueError(_refusal(name))
    return _Shard(file, size)


class _Shard:
    """The members of one file of archives, read front to back. `fault` says at the end what is wrong with
    the file, if anything."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._parsed: tuple[int, dict[str, Any]] = (-1, {})  # the last JSON, by its place
        self.fault = ""

    def samples(self) -> Iterator[tuple[str, Members] | Unused]:
        """Key and members of each sample, or of what has no half of one. Neighbours with one name
        up to its first dot belong together."""
        key, members = "", Members()
        for member in self._members():
            if OF_THE_ARCHIVE.match(member.path) or LEFTOVER.search(member.path):
                continue
            if HIDDEN.search(member.path):
                yield Unused("hidden members", member.path)
                continue
            name = _key_of(member.path) or splitext(member.path)[0]
            ending = member.path[len(name) + 1 :].lower()
            if name != key or ending in members:  # the same name again is another sample
                yield from _samples_of(key, members)
                key, members = name, Members()
            members[ending] = member
        yield from _samples_of(key, members)

    def _members(self) -> Iterator[Media]:
        """Of all archives that the file holds one behind the other, as `cat` joins them."""
        start: int | None = 0
        while start is not None:
            end = yield from self._of_archive(start)
            start = None if self.fault else self._next_archive(end)

    def _of_archive(self, start: int) -> Generator[Media, None, int]:
        """The members of the archive that begins at a byte; returns where its headers end. Sets
        `fault`."""
        self._file.seek(start)
        try:
            headers = _Headers(self._file)
            tar = tarfile.TarFile(
                fileobj=cast(BinaryIO, headers),
                errorlevel=1,
                encoding="utf-8",
                errors="surrogateescape",
            )
            while (member := tar.next()) is not None:
                headers.left = HEADER_LIMIT
                if len(tar.pax_headers) > GLOBALS_LIMIT:
                    raise tarfile.ReadError(f"over {GLOBALS_LIMIT:,} entries in its own headers")
                # it keeps them all, for access by name; typeshed does not know the list
                tar.members.clear()  # type: ignore[attr-defined]
                end = member.offset_data + member.size
                if member.isreg() and not member.issparse():
                    if end > self._size:
                        name = member.name.encode("utf-8", "backslashreplace").decode()
                        self.fault = (
                            f"cut off at byte {self._size} within '{name}', which needs {end}"
                        )
                        return end
                    yield Media(member.name, member.offset_data, member.size)
                elif not member.isdir():  # its content is elsewhere, so this is no image's ending
                    yield Media(f"{member.name} (a link)", 0, 0)
            end = tar.offset
        except (tarfile.TarError, ValueError, IndexError, RecursionError) as error:
            # headers from a damaged file may raise the others, a thousand in a row the last one
            self.fault = f"damaged or cut off: {error}"
            return start
        self._file.seek(end)
        block = self._file.read(BLOCK)
        if len(block) < BLOCK or any(block):  # tarfile takes garbage and a missing end for the end
            what = "damaged" if any(block) else "cut off"
            self.fault = f"{what} at byte {end}: an empty block must end a tar file"
        return end

    def _next_archive(self, end: int) -> int | None:
        """Where another archive begins behind the empty blocks that end one; None: there is none.
        Sets `fault` where something else is there."""
        start = self._first_filled(end)
        if start is None:
            return None
        at = start - start % BLOCK
        self._file.seek(at)
        try:
            tarfile.TarInfo.frombuf(self._file.read(BLOCK), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            self.fault = (
                f"{self._size - start:,} bytes from byte {start} on, behind the end of the tar file, "
                "are no tar file and are not read"
            )
            return None
        return at

    def _first_filled(self, start: int) -> int | None:
        """The first byte from `start` on that is not 0."""
        self._file.seek(start)
        while piece := self._file.read(PIECE):
            if filled := piece.lstrip(b"\0"):
                return self._file.tell() - len(filled)
        return None

    def text(self, member: Media, key: str | None) -> Any:
        """The captions as given, in JSON under `key`; with "" all of the JSON. Raises BadSample."""
        if member.size > TEXT_LIMIT:
            raise BadSample(
                "huge-caption",
                f"{member.path} has {member.size:,} bytes; at most {TEXT_LIMIT:,} are read",
            )
        if key is not None:
            fields = self._fields(member)
            return fields.get(key) if key else fields
        content = self._content(member)
        # Bytes that are not UTF-8 become lone surrogates, which the checks of texts find.
        return content.decode("utf-8-sig", "surrogateescape").strip("\r\n")

    def _fields(self, member: Media) -> dict[str, Any]:
        """Raises BadSample."""
        if self._parsed[0] != member.offset:
            self._parsed = member.offset, parsed_object(self._content(member), member.path)
        return self._parsed[1]

    def _content(self, member: Media) -> bytes:
        self._file.seek(member.offset)
        return self._file.read(member.size)


class _Headers:
    """A shard as tarfile reads it. The size of a header is what the header says, and so much of the
    file, or of its holes, would be held in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.left = file, HEADER_LIMIT
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError(f"a member whose headers have over {HEADER_LIMIT:,} bytes")
        found = self._file.read(size)
        if DIGITS.search(found):
            raise tarfile.ReadError("a number of over 256 digits in a header")
        return found


def _key_of(path: str) -> str | None:
    """Up to the first dot of a file's name. As `((?:.*/|)[^.]+)[.]([^/]*)$` of webdataset's
    tariterators, which for a name of 100 KB takes a minute."""
    begin = path.rfind("/") + 1
    dot = path.find(".", begin)
    if dot == begin:  # then the name of its folder is what is before the dot
        begin = path.rfind("/", 0, max(0, begin - 1)) + 1
    return path[:dot] if begin < dot and "." not in path[begin:dot] else None


def _samples_of(key: str, members: Members) -> Iterator[tuple[str, Members] | Unused]:
    """The samples among members with one name up to its first dot, by endings after that.

    Where one of these is read (`a.jpg` beside `a.seg.png`), they are one sample, as webdataset
    has it. Else the names have dots of their own (`photo_v1.20.jpg`, `photo_v1.21.jpg`), and those
    that are equal up to the last dot are a sample; so is an image with its own .txt beside others.
    """
    if not any("." in ending for ending in members):
        yield from [(key, members)] if members else []
        return
    read_endings = {*(e for e, _ in TEXTS), *(e for kind in files_of() for e in kind.endings)}
    apart: dict[str, Members] = {}
    for member in members.values():
        stem, ending = splitext(member.path)
        apart.setdefault(stem, Members())[ending[1:].lower()] = member
    read = {stem: own for stem, own in apart.items() if own.keys() & read_endings}
    if members.keys() & read_endings:
        paired = {
            stem: own
            for stem, own in read.items()
            if stem != key and "txt" in own and own.keys() & {*IMAGE_ENDINGS}
        }
        yield key, {e: m for e, m in members.items() if splitext(m.path)[0] not in paired}
        yield from paired.items()
    elif read:
        yield from read.items()
        for stem, own in apart.items():
            if stem not in read:
                yield from (Unused(f"members .{end}", member.path) for end, member in own.items())
    else:
        yield key, members


def _first_good_text(
    shard: _Shard,
    members: Members,
    used: set[str],
    beside: list[Unused],
    is_lines: bool = False,
) -> Captions | BadSample | None:
    """The first of a sample's texts with a good caption, or what is wrong with the first of them.
    `used` keeps the endings of those that were read, `beside` further texts of the same .json.
    `is_lines`: each line is a caption."""
    problems: list[BadSample] = []
    for number, (ending, key) in enumerate(TEXTS):
        if ending in members:
            used.add(ending)
            try:
                given = shard.text(members[ending], key)
                good, dropped = checked_captions(lines_of(given) if is_lines else given)
            except BadSample as problem:
                problems.append(problem)
                continue
            for also, other in TEXTS[number + 1 :]:
                if key and other and also == ending and shard.text(members[ending], other):
                    beside.append(Unused(second_value("key", other, key), members[ending].path))
            return Captions(good, dropped + [p for p in problems if p.reason not in ABSENCES])
    return problems[0] if problems else None


def _refusal(name: str) -> str:
    return (
        f"{name} is compressed, and samples are read from any place of a shard; decompress it "
        "first (gunzip) and name the .tar"
    )
