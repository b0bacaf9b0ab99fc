"""A data set as tar shards, as webdataset writes them: members of one sample share the name up to
its first dot.

Shards are not unpacked: the index knows where in its shard each image lies, and any sample is one
read. Names of members are names only, they are never opened as paths.
"""

import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from data.formats.parquet import short_names
from data.formats.rows import (
    AUDIO_ENDINGS,
    IMAGE_ENDINGS,
    AudioFile,
    Format,
    Part,
    Row,
    Stamp,
    check_characters,
    checked_id,
    stamp,
    take_captions,
)
from data.formats.specs import absolute_pattern, expand, local_copies
from data.index.bad_samples import FILE_LIMIT, BadSample

USAGE = "webdataset:PATTERN, for example webdataset:shards/{000..012}.tar"
TEXT_ENDINGS = ("txt", "json")
JSON_KEYS = ("caption", "text")
# As in webdataset's tariterators, which cannot be imported without torch, nor tell where a member
# lies.
KEY_AND_ENDING = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
OF_THE_ARCHIVE = re.compile(r"__[^/]*__($|/)")
TEXT_LIMIT = 1 << 20  # bytes of a text member
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
        self.name_of_file = dict(zip(self.files, names))
        self.short_names = short_names(names)
        self.spec = f"webdataset:{absolute_pattern(where)}"

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

    def rows(self, part: Part) -> Iterator[Row]:
        name = self.name_of_file[part.file]
        short, (_, size, mtime_ns) = self.short_names[name], stamp(part.file)
        if size == 0:
            yield Row(short, 0, problem=BadSample("empty-file", f"{name} has no byte"))
            return
        with open(part.file, "rb") as file:
            if file.read(2) == b"\x1f\x8b":
                raise ValueError(_refusal(name))
            with_audio = "audio" in self.modalities
            endings = {*IMAGE_ENDINGS, *TEXT_ENDINGS, *(AUDIO_ENDINGS if with_audio else ())}
            shard = _Shard(file, size, endings)
            number = 0
            waiting = None  # the last sample, until it is known whether the shard goes on
            for key, members in shard.groups():
                if waiting is not None:
                    yield waiting
                    number += 1
                waiting = self._row(
                    shard, short, key, members=members, number=number, mtime_ns=mtime_ns
                )
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

    def _row(
        self,
        shard: "_Shard",
        short: str,
        key: str,
        members: dict[str, tarfile.TarInfo],
        number: int,
        mtime_ns: int,
    ) -> Row:
        row = Row(f"{short}/{key}", number, path=key, mtime_ns=mtime_ns)
        try:
            check_characters(key, "the name of the member")
            checked_id(row.id, row.id)
            self.fill(
                row,
                {
                    "image": lambda: self._take_image(row, members),
                    "text": lambda: self._take_text(row, shard, members),
                    "audio": lambda: self._take_audio(row, members),
                },
            )
        except BadSample as problem:
            row.problem = problem
        return row

    def _take_image(self, row: Row, members: dict[str, tarfile.TarInfo]) -> None:
        image = next((member for end, member in members.items() if end in IMAGE_ENDINGS), None)
        if image is None:
            raise BadSample("orphan-member", f"no image among {', '.join(members)}")
        row.path, row.offset, row.size = image.name, image.offset_data, image.size
        check_characters(row.path, "the name of the member")
        _check_size("image", row.size)

    def _take_text(self, row: Row, shard: "_Shard", members: dict[str, tarfile.TarInfo]) -> None:
        if not any(ending in members for ending in TEXT_ENDINGS):
            raise BadSample("orphan-member", f"no text among {', '.join(members)}")
        take_captions(row, shard.text(members))

    def _take_audio(self, row: Row, members: dict[str, tarfile.TarInfo]) -> None:
        sound = next((member for end, member in members.items() if end in AUDIO_ENDINGS), None)
        if sound is None:
            raise BadSample("orphan-member", f"no sound among {', '.join(members)}")
        check_characters(sound.name, "the name of the member")
        _check_size("sound", sound.size)
        row.audio = AudioFile(sound.name, "", sound.offset_data, sound.size, row.mtime_ns)

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


class _Shard:
    """The members of one tar file, read front to back. `fault` says at the end what is wrong with
    the file, if anything."""

    def __init__(self, file, size: int, endings: set[str]) -> None:
        """`endings`: of the members that are read."""
        self._file, self._size, self._endings = file, size, endings
        self.fault = ""

    def groups(self) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
        """Neighbouring members with one key: the key, and ending -> member. Groups of other
        endings are passed over."""
        key = ""
        members: dict[str, tarfile.TarInfo] = {}
        for member in self._members():
            found = None if OF_THE_ARCHIVE.match(member.name) else KEY_AND_ENDING.match(member.name)
            if not found:
                continue
            name, ending = found[1], found[2].lower()
            if name != key:
                if members:
                    yield key, members
                key, members = name, {}
            if ending in self._endings and ending not in members:
                members[ending] = member
        if members:
            yield key, members

    def _members(self) -> Iterator[tarfile.TarInfo]:
        self._file.seek(0)
        try:
            tar = tarfile.TarFile(
                fileobj=self._file, errorlevel=1, encoding="utf-8", errors="surrogateescape"
            )
            while (member := tar.next()) is not None:
                # it keeps them all, for access by name; typeshed does not know the list
                tar.members.clear()  # type: ignore[attr-defined]
                if member.isreg() and not member.issparse():
                    if member.offset_data + member.size > self._size:
                        self.fault = f"cut off at byte {self._size} within '{_shown(member.name)}', which needs {member.offset_data + member.size}"
                        return
                    yield member
            end = tar.offset
        except (
            tarfile.TarError,
            ValueError,
            IndexError,
        ) as error:  # headers from a damaged file may raise the last two
            self.fault = f"damaged or cut off: {error}"
            return
        self._file.seek(end)
        block = self._file.read(BLOCK)
        if len(block) < BLOCK or any(block):  # tarfile takes garbage and a missing end for the end
            self.fault = f"{'damaged' if any(block) else 'cut off'} at byte {end}: an empty block must end a tar file"

    def text(self, members: dict[str, tarfile.TarInfo]) -> Any:
        """The captions as given. Raises BadSample."""
        ending = next(ending for ending in TEXT_ENDINGS if ending in members)
        member = members[ending]
        if member.size > TEXT_LIMIT:
            raise BadSample(
                "huge-caption",
                f"{member.name} has {member.size:,} bytes; at most {TEXT_LIMIT:,} are read",
            )
        position = self._file.tell()
        self._file.seek(member.offset_data)
        content = self._file.read(member.size)
        self._file.seek(position)
        try:
            text = content.decode("utf-8-sig")
            if ending == "txt":
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
        return next((fields[key] for key in JSON_KEYS if key in fields), None)


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


def _check_size(what: str, size: int) -> None:
    if size > FILE_LIMIT:
        raise BadSample(
            "unreadable", f"the {what} has {size:,} bytes; at most {FILE_LIMIT:,} are read"
        )


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _refusal(name: str) -> str:
    return f"{name} is compressed, and samples are read from any place of a shard; decompress it first (gunzip) and name the .tar"
