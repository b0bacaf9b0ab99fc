"""Data sets as shards: patterns that name files, files that are elsewhere, and names of both."""

import glob
import json
import logging
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from braceexpand import braceexpand
from filelock import FileLock

from common.files import make_folder, move, read_json, write_text
from common.secrets import redact
from data.formats.hub import folder_shards
from data.formats.rows import Format, Stamp, stamp
from data.formats.specs import cache_folder, is_remote, local_path, split_options
from data.formats.store import WAIT_S, fetch, identity_of, listed
from data.identity import Identity
from data.keys import content_hash

COPIES_AT_ONCE = 8
KNOWN_WAIT_S = 10.0  # for a store of whose file there is a copy
MAX_SHOWN = 5
NAMES_LIMIT = 1_000_000  # that braces may stand for
BRACES = re.compile(
    r"\\.|(?P<range>\{(?:(?P<first>-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))"
    r"(?:\.\.-?(?P<step>\d+))?\})|[{},]"
)


class Shard(NamedTuple):
    """A file that was fetched: its address, where it lies now, and its short name in ids."""

    name: str
    file: str
    short: str


class ShardsFormat(Format):
    """The rows of all files that a pattern names, in order."""

    def __init__(
        self,
        kind: str,
        pattern: str,
        usage: str,
        shard: Shard | None = None,
        split: str | None = None,
    ) -> None:
        """`shard`: the only file, instead of those of the pattern. `split`: of a pattern that is a
        folder. Errors: ValueError, OSError."""
        if shard is not None:
            self.names, self.files = [shard.name], [shard.file]
            self.shown = {shard.file: redact(shard.name)}
            self.short = {shard.file: shard.short}
            self.spec = redact(f"{kind}:{shard.name}")
            return
        self.names = expand(kind, pattern, usage, split=split)
        for name in self.names:
            self.check(name)
        self.files = local_copies(self.names)
        shown = [redact(name) for name in self.names]
        # a local file -> its address without credentials, and a short name of it: a part of ids
        self.shown = dict(zip(self.files, shown))
        self.short = dict(zip(self.files, short_names(shown)))
        # What an index of the pattern is filed under, whichever files it names by now.
        parts = (each if is_remote(each) else local_path(each) for each in pattern.split("::"))
        self.spec = redact(f"{kind}:{'::'.join(parts)}")
        self.spec += f"?split={split}" if split else ""

    def stamp(self, file: str) -> tuple[Stamp, str]:
        """Of a file and of its short name, which changes with the other files' names. Raises
        OSError."""
        return stamp(file), self.short[file]

    def check(self, name: str) -> None:
        """Raises ValueError for a file that cannot be read, before it is copied."""


def split_pattern(kind: str, where: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """A pattern and its options. A `?` may also stand for a character, or begin what follows an
    address of the web. Errors: ValueError."""
    pattern, _, words = where.rpartition("?")
    keys = {word.partition("=")[0] for word in words.split("&")}
    is_address = is_remote(pattern.rpartition("::")[2])
    if not pattern or "=" not in words or is_address and not keys & {*known}:
        return where, {}
    return split_options(kind, where, known)[:2]


def expand(
    kind: str, pattern: str, usage: str, must_exist: bool = True, split: str | None = None
) -> list[str]:
    """`a/{000..012}.tar::b/*.tar` -> names of files, in order: braces as the shell has them, `*`
    and `?` sorted, `::` between patterns. A folder stands for its shards of `split`.

    Local names come back absolute. Remote ones are not looked for, unless by `*` or `?`; local ones
    neither unless they `must_exist`. Errors: ValueError, OSError (FileNotFoundError).
    """
    if not pattern:
        raise ValueError(f"data spec '{kind}:' names no file; write {usage}")
    spec = f"data spec '{kind}:{pattern:.1000}'"
    try:
        number = sum(map(_number_of_names, pattern.split("::")))
        if number > NAMES_LIMIT:
            raise ValueError(
                f"its braces stand for {number:,} names; at most {NAMES_LIMIT:,} are read: give "
                "narrower ranges, or *"
            )
        every = [name for part in pattern.split("::") for name in braceexpand(part)]
    except (ValueError, RecursionError) as error:  # of braceexpand: UnbalancedBracesError
        raise ValueError(f"{spec}: {error}") from error
    folders = [each for each in every if not is_remote(each) and os.path.isdir(local_path(each))]
    if split is not None and not folders:
        raise ValueError(f"{spec} names files, of which split={split} is not told; give a folder")
    names = [
        name
        for each in every
        for name in (
            folder_shards(spec, kind, local_path(each), split)
            if each in folders
            else _found(spec, each)
        )
    ]
    missing = [name for name in names if not is_remote(name) and not os.path.isfile(name)]
    if missing and must_exist:
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        raise FileNotFoundError(f"{spec}: no such file: {', '.join(missing[:MAX_SHOWN])}{more}")
    twice = sorted(name for name, number in Counter(names).items() if number > 1)
    if twice:
        raise ValueError(f"{spec} names {twice[0]} twice; name each file once")
    return names


def _found(spec: str, name: str) -> list[str]:
    if is_remote(name):
        plain, mark, query = name.partition("?")
        # a query may hold any character, as a signature does
        is_query = "=" in query or name.startswith("http")
        return listed(name) if {*plain} & {*"*["} or (mark and not is_query) else [name]
    path = local_path(name)
    if os.path.exists(path) or not glob.has_magic(path):
        return [path]
    if not (found := sorted(glob.glob(path, recursive=True))):
        raise FileNotFoundError(f"{spec}: no file is named like {path}")
    return found


def _number_of_names(pattern: str) -> int:
    """How many names a pattern's braces stand for; braceexpand makes lists of them at once."""
    # of each open brace: the names of its last alternative so far, and of those before that
    open_braces = [[1, 0]]
    for found in BRACES.finditer(pattern):
        inner = open_braces[-1]
        if found["range"]:
            first, last = (int(found[i]) if found["first"] else ord(found[i + 2]) for i in (2, 3))
            inner[0] *= abs(last - first) // (int(found["step"] or 1) or 1) + 1
        elif found[0] == "{":
            open_braces.append([1, 0])
        elif found[0] == "," and len(open_braces) > 1:
            open_braces[-1] = [1, sum(inner)]
        elif found[0] == "}" and len(open_braces) > 1:
            open_braces.pop()
            open_braces[-1][0] *= sum(inner)
    return open_braces[0][0]


def local_copies(names: list[str]) -> list[str]:
    """Local names of the files: a remote one is copied once, into the cache folder, and again when
    it has changed. Where its store does not answer, the copy of before is used, which is said.

    Several at a time; processes that start together copy each file once. Errors: OSError that names
    the address.
    """
    remote = [name for name in names if is_remote(name)]
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        copies = dict(zip(remote, pool.map(_local_copy, remote)))
    return [copies.get(name, name) for name in names]


def _local_copy(url: str) -> str:
    folder = cache_folder() / "copies" / content_hash(url.encode()).hex()
    copy = folder / (os.path.basename(url.partition("?")[0]) or "file")
    record = folder / "identity.json"
    make_folder(folder)
    with FileLock(folder / "lock"):
        known = _recorded(record) if copy.is_file() else None
        try:
            found = identity_of(url, WAIT_S if known is None else KNOWN_WAIT_S)
        except OSError as error:
            if not copy.is_file():
                raise
            logging.getLogger("wye").warning("%s; the copy of before is used", error)
            return str(copy)
        if known is None and copy.is_file() and os.path.getsize(copy) == found.size:
            known = found  # a copy of before there were records
            write_text(record, json.dumps(asdict(found)))
        if known != found:
            part = copy.with_name(f"{copy.name}.part")
            found = fetch(url, part)
            move(part, copy)
            write_text(record, json.dumps(asdict(found)))
    return str(copy)


def _recorded(file: Path) -> Identity | None:
    with suppress(OSError, ValueError, TypeError):
        return Identity(**read_json(file))
    return None


def short_names(files: list[str]) -> list[str]:
    """The names alone where these differ, else the paths below what all have in common."""
    bases = [os.path.basename(file) for file in files]
    if len(set(bases)) == len(files):
        return bases
    common = os.path.commonprefix([os.path.dirname(file) + "/" for file in files])
    common = common[: common.rfind("/") + 1]
    return [file[len(common) :] for file in files]
