"""A data set as tar shards, as webdataset writes them: members of one sample share the name up to
its first dot, or, where a name has dots of its own, up to its last.

Shards are not unpacked: the index knows where in its shard each image lies, and any sample is one
read. Names of members are names only, they are never opened as paths.
"""

import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from posixpath import splitext
from typing import Any, BinaryIO, NamedTuple, cast

from common.secrets import redact
from data.formats.parquet import short_names
from data.formats.rows import (
    AUDIO_ENDINGS,
    IMAGE_ENDINGS,
    LEFTOVER,
    AudioFile,
    Format,
    Part,
    Row,
    Stamp,
    Unused,
    check_characters,
    checked_id,
    stamp,
    take_captions,
)
from data.formats.specs import absolute_pattern, expand, local_copies
from data.index.bad_samples import ABSENCES, FILE_LIMIT, BadSample

USAGE = "webdataset:PATTERN, for example webdataset:shards/{000..012}.tar"
# Ending and, of JSON, key: the first good text is taken.
TEXTS = (("txt", None), ("json", "caption"), ("json", "text"))
READ_ENDINGS = {*IMAGE_ENDINGS, *AUDIO_ENDINGS, *(ending for ending, _ in TEXTS)}
# As in webdataset's tariterators, which cannot be imported without torch, nor tell where a member
# lies.
KEY_AND_ENDING = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
OF_THE_ARCHIVE = re.compile(r"__[^/]*__($|/)")
HIDDEN = re.compile(r"(^|/)[.][^./]")
TEXT_LIMIT = 1 << 20  # bytes of a text member
# bytes of the headers of one member, in which long names and attributes are
HEADER_LIMIT = 1 << 20
GLOBALS_LIMIT = 10_000  # entries of a shard's own headers, which hold for all that follows
DIGITS = re.compile(rb"[0-9]{256}")  # tarfile searches such runs anew from each of their digits
OPEN_SHARDS = 64  # per process
BLOCK = 512  # bytes; tar's unit


class WebdatasetFormat(Format):
    """The samples of all shards, in order. An id is SHARD/KEY, where the key is the members' common
    name."""

    images_are_files = False
    audio_is_files = False
    unit = "B"
    holds = ("image", "text", "audio")

    def __init__(self, where: str, progress: bool = False) -> None:
        """`where`: patterns of shards, joined by `::`. Errors: ValueError, OSError."""
        names = expand("webdataset", where, USAGE)
        packed = [
            name
            for name in names
            if name.partition("?")[0].lower().endswith((".gz", ".tgz", ".bz2", ".xz", ".zst"))
        ]
        if packed:
            raise ValueError(_refusal(packed[0]))
        self.files = local_copies(names, progress)
        self.name_of_file = dict(zip(self.files, map(redact, names)))
        self.short_names = short_names([redact(name) for name in names])
        self.spec = redact(f"webdataset:{absolute_pattern(where)}")

    @cached_property
    def _shards(self) -> "_OpenShards":
        return _OpenShards()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_shards"}

    def fingerprint(self) -> list[Stamp]:
        return [stamp(file) for file in self.files]

    def total(self) -> int:
        return sum(map(os.path.getsize, self.files))

    def parts(self) -> Iterator[Part]:
        for file in self.files:
            found = stamp(file)
            yield Part(file, None, found[1], "\0".join(map(str, found)))

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        name = self.name_of_file[part.file]
        short, (_, size, mtime_ns) = self.short_names[name], stamp(part.file)
        if size == 0:
            yield Row(short, 0, problem=BadSample("empty-file", f"{name} has no byte"))
            return
        with open(part.file, "rb") as file:
            if file.read(2) == b"\x1f\x8b":
                raise ValueError(_refusal(name))
            shard = _Shard(file, size)
            number = 0
            waiting = None  # the last sample, until it is known whether the shard goes on
            for found in shard.samples():
                if isinstance(found, Unused):
                    yield found
                    continue
                if waiting is not None:
                    yield waiting
                    number += 1
                key, members = found
                used: set[str] = set()  # endings
                row = Row(f"{short}/{key}", number, path=key, mtime_ns=mtime_ns)
                self._fill(row, shard, members, used)
                if row.problem is None:
                    for ending, member in members.items():
                        if ending not in used:
                            yield Unused(f"members .{ending}", member.name)
                waiting = row
            if waiting is not None and not (
                shard.fault and waiting.problem and waiting.problem.reason == "orphan-member"
            ):
                yield waiting  # else the other half of the sample is lost with the end
                number += 1
            if shard.fault:
                yield Row(
                    f"{short}/end of shard",
                    number,
                    problem=BadSample("truncated-archive", shard.fault),
                )

    def _fill(self, row: Row, shard: "_Shard", members: "Members", used: set[str]) -> None:
        """`used` gets the endings of the members that the row is made of."""
        try:
            check_characters(row.path, "the name of the member")
            checked_id(row.id, row.id)
            self.fill(
                row,
                {
                    "image": lambda: _take_image(row, members, used),
                    "text": lambda: _take_text(row, shard, members, used),
                    "audio": lambda: _take_audio(row, members, used),
                },
            )
        except BadSample as problem:
            row.problem = problem

    def image_bytes(self, file: str, path: str, offset: int, size: int) -> bytes:
        return self._read(file, offset, size)

    def audio_bytes(self, file: str, path: str, offset: int, size: int, number: int) -> bytes:
        return self._read(file, offset, size)

    def _read(self, file: str, offset: int, size: int) -> bytes:
        try:
            found = self._shards.read(file, offset, size)
        except OSError as error:
            raise BadSample("unreadable", f"{self.name_of_file[file]}: {error.strerror}") from error
        if len(found) < size:
            raise BadSample(
                "unreadable",
                f"{self.name_of_file[file]} ends before byte {offset + size}; it changed under "
                "the run",
            )
        return found

    def where(self, file: str, path: str, number: int) -> str:
        return (
            f"{self.name_of_file.get(file, file)}#{path}"
            if path
            else self.name_of_file.get(file, file)
        )


class Member(NamedTuple):
    """A file in a shard."""

    name: str
    offset: int  # of its content, bytes
    size: int


Members = dict[str, Member]
"""Ending, in lower case -> member."""


class _Shard:
    """The members of one tar file, read front to back. `fault` says at the end what is wrong with
    the file, if anything."""

    def __init__(self, file, size: int) -> None:
        self._file, self._size = file, size
        self.fault = ""

    def samples(self) -> Iterator[tuple[str, Members] | Unused]:
        """Key and members of each sample, or of what has no half of one. Neighbours with one name
        up to its first dot belong together."""
        key, members = "", Members()
        for member in self._members():
            if OF_THE_ARCHIVE.match(member.name) or LEFTOVER.search(member.name):
                continue
            if HIDDEN.search(member.name):
                yield Unused("hidden members", member.name)
                continue
            found = KEY_AND_ENDING.match(member.name)
            name = found[1] if found else splitext(member.name)[0]
            ending = member.name[len(name) + 1 :].lower()
            if name != key or ending in members:  # the same name again is another sample
                yield from _samples_of(key, members)
                key, members = name, Members()
            members[ending] = member
        yield from _samples_of(key, members)

    def _members(self) -> Iterator[Member]:
        self._file.seek(0)
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
                if member.isreg() and not member.issparse():
                    if member.offset_data + member.size > self._size:
                        self.fault = f"cut off at byte {self._size} within '{_shown(member.name)}', which needs {member.offset_data + member.size}"
                        return
                    yield Member(member.name, member.offset_data, member.size)
                elif not member.isdir():  # its content is elsewhere, so this is no image's ending
                    yield Member(f"{member.name} (a link)", 0, 0)
            end = tar.offset
        except (
            tarfile.TarError,
            ValueError,
            IndexError,
            RecursionError,
        ) as error:
            # headers from a damaged file may raise the others, a thousand in a row the last one
            self.fault = f"damaged or cut off: {error}"
            return
        self._file.seek(end)
        block = self._file.read(BLOCK)
        if len(block) < BLOCK or any(block):  # tarfile takes garbage and a missing end for the end
            self.fault = f"{'damaged' if any(block) else 'cut off'} at byte {end}: an empty block must end a tar file"

    def text(self, member: Member, key: str | None) -> Any:
        """The captions as given, in JSON under `key`. Raises BadSample."""
        if member.size > TEXT_LIMIT:
            raise BadSample(
                "huge-caption",
                f"{member.name} has {member.size:,} bytes; at most {TEXT_LIMIT:,} are read",
            )
        position = self._file.tell()
        self._file.seek(member.offset)
        content = self._file.read(member.size)
        self._file.seek(position)
        try:
            text = content.decode("utf-8-sig")
            if key is None:
                return text.strip("\r\n")
            fields = json.loads(text)
        except UnicodeDecodeError as error:
            detail = f"{member.name} is not UTF-8: byte {content[error.start]:#04x} at position {error.start}"
            raise BadSample("invalid-utf8", detail) from None
        except (ValueError, RecursionError) as error:
            raise BadSample("invalid-row", f"{member.name}: invalid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadSample(
                "invalid-row",
                f"{member.name}: a {type(fields).__name__} is given, an object {{...}} is needed",
            )
        return fields.get(key)


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


def _samples_of(key: str, members: Members) -> Iterator[tuple[str, Members] | Unused]:
    """The samples among members with one name up to its first dot, by endings behind that.

    Where one of these is read (`a.jpg` beside `a.seg.png`), they are one sample, as webdataset
    has it. Else the names have dots of their own (`photo_v1.20.jpg`, `photo_v1.21.jpg`), and those
    that are equal up to the last dot are a sample; so is an image with its own .txt beside others.
    """
    if not any("." in ending for ending in members):
        yield from [(key, members)] if members else []
        return
    apart: dict[str, Members] = {}
    for member in members.values():
        stem, ending = splitext(member.name)
        apart.setdefault(stem, Members())[ending[1:].lower()] = member
    read = {stem: own for stem, own in apart.items() if own.keys() & READ_ENDINGS}
    if members.keys() & READ_ENDINGS:
        paired = {
            stem: own
            for stem, own in read.items()
            if stem != key and "txt" in own and own.keys() & {*IMAGE_ENDINGS}
        }
        yield key, {e: m for e, m in members.items() if splitext(m.name)[0] not in paired}
        yield from paired.items()
    elif read:
        yield from read.items()
        for stem, own in apart.items():
            if stem not in read:
                yield from (Unused(f"members .{end}", member.name) for end, member in own.items())
    else:
        yield key, members


def _take_image(row: Row, members: Members, used: set[str]) -> None:
    ending, image = _first("image", members, IMAGE_ENDINGS)
    row.path, row.offset, row.size = image.name, image.offset, image.size
    used.add(ending)


def _take_audio(row: Row, members: Members, used: set[str]) -> None:
    ending, sound = _first("sound", members, AUDIO_ENDINGS)
    row.audio = AudioFile(sound.name, "", sound.offset, sound.size, row.mtime_ns)
    used.add(ending)


def _first(what: str, members: Members, endings: Sequence[str]) -> tuple[str, Member]:
    found = next((ending for ending in members if ending in endings), None)
    if found is None:
        raise BadSample("orphan-member", f"no {what} among {', '.join(members)}")
    member = members[found]
    check_characters(member.name, "the name of the member")
    if member.size > FILE_LIMIT:
        raise BadSample(
            "unreadable", f"the {what} has {member.size:,} bytes; at most {FILE_LIMIT:,} are read"
        )
    return found, member


def _take_text(row: Row, shard: _Shard, members: Members, used: set[str]) -> None:
    problems = []
    for ending, key in TEXTS:
        if ending in members:
            used.add(ending)
            try:
                take_captions(row, shard.text(members[ending], key))
                break
            except BadSample as problem:
                problems.append(problem)
    else:
        raise (
            problems[0]
            if problems
            else BadSample("orphan-member", f"no text among {', '.join(members)}")
        )
    row.dropped += [problem for problem in problems if problem.reason not in ABSENCES]


class _OpenShards:
    """Files kept open by one process, the longest unused of which is closed for the next."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, Any] = OrderedDict()

    def read(self, path: str, offset: int, size: int) -> bytes:
        if path not in self._files:
            if len(self._files) == OPEN_SHARDS:
                self._files.popitem(last=False)[1].close()
            self._files[path] = open(path, "rb", buffering=0)
        self._files.move_to_end(path)
        return os.pread(self._files[path].fileno(), size, offset)


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _refusal(name: str) -> str:
    return f"{name} is compressed, and samples are read from any place of a shard; decompress it first (gunzip) and name the .tar"
