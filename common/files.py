"""How files are written and removed: whole, and never through a link.

A run's folder, an export or a cache may come from somebody else, who has put links into it. Nothing
outside of such a folder may be written or deleted because of them. So a file is written beside,
under a name of its own, and renamed, which replaces a link instead of following it; a file that
grows is opened only where it is a file of its own; and what lies in a folder is made and removed
only where it is in that folder after links are followed (`within`). The folder itself, which the
user names, may lie behind links.

Other modules open nothing for writing and remove nothing (`tests/common/test_files.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from common.sizes import sized

BLOCK = 1 << 16  # bytes that are read at a time
JSON_LIMIT = 64 << 20  # bytes of a record, which takes up to 30 times as many in memory
OWN_LIMIT = 4 << 30  # bytes of a file that was written here, of a line for each sample, say


def first_bytes(pieces: Iterable[bytes], most: int) -> bytes:
    """All of what comes in pieces, or of what has no end, or is a hole in a file, over `most`."""
    found, size = [], 0
    for piece in pieces:
        found.append(piece)
        if (size := size + len(piece)) > most:
            break
    return b"".join(found)


def refuse_longer(size: int, most: int, what: str) -> None:
    """Raise ValueError for a file of over `most` bytes, of which no more are read."""
    if size > most:
        raise ValueError(
            f"{what}: has over {sized(most)}, and no more is read of such a file; give the file that "
            "is meant, or a smaller one"
        )


def read_bounded(path: Path, most: int) -> bytes:
    """All of a file. Errors: OSError; ValueError where it has over `most` bytes."""
    with path.open("rb") as file:
        content = first_bytes(iter(lambda: file.read(BLOCK), b""), most)
    refuse_longer(len(content), most, str(path))
    return content


def read_json(path: Path, most: int = JSON_LIMIT) -> Any:
    """Errors: OSError; ValueError for what is no JSON, is nested beyond what can be read, or has
    over `most` bytes."""
    try:
        return json.loads(read_bounded(path, most).decode("utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path}: its JSON is nested too deeply to be read") from error


def make_folder(path: Path, within: Path | None = None) -> Path:
    """`path`, made with its parents where it is not there. `within`: the folder that it belongs to.
    Errors: OSError, also where links lead out of `within`."""
    if within is not None:
        _refuse_outside(path, within)
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write, which becomes `path` when it is whole: others see all of it, or what
    was there before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        beside.chmod(0o666 & ~_umask())  # mkstemp makes it for its owner alone
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """As `replacing`."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def append_text(path: Path, text: str) -> None:
    """In one piece, at the end of a file that is made where it is not there. Errors: OSError, also
    for a link or anything but a file."""
    with open_own(path) as file:
        file.write(text)


def lines_from_end(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file, the last one first, each with the place of its first byte; none where
    there is no file. Holds a block and a line of it at a time."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        rest, ended = b"", False  # ended: was there something behind `rest`?
        while at:
            size = min(BLOCK, at)
            at = file.seek(at - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            place = at + len(rest) + sum(len(line) + 1 for line in lines)
            for line in reversed(lines):
                place -= len(line)
                if line or ended:
                    yield place, line.decode(errors="replace")
                place, ended = place - 1, True
        if rest or ended:
            yield 0, rest.decode(errors="replace")


def cut_lines(path: Path, unwanted: Callable[[str], bool]) -> None:
    """Cut off the last lines of a file that are `unwanted`, up to the first one from the end that
    is not; one that is cut short itself is ended. Errors: as `append_text`."""
    cut = None
    for place, line in lines_from_end(path):
        if not unwanted(line):
            break
        cut = place
    if cut is None and _ends_whole(path):
        return
    with open_own(path) as file:
        if cut is None:
            file.write("\n")
        else:
            file.truncate(cut)
        file.flush()
        os.fsync(file.fileno())


def _ends_whole(path: Path) -> bool:
    """Is there no last line without its end?"""
    if not path.is_file() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def open_own(path: Path) -> IO[str]:
    """To append to and to read. Errors: as `append_text`."""
    refuse_link(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "a+", encoding="utf-8")


def open_part(path: Path) -> IO[bytes]:
    """To go on writing where the file ends. Errors: as `append_text`."""
    refuse_link(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def open_folder(path: Path) -> int:
    """A descriptor to lock the folder with, for the caller to close. No program started inherits
    it. Errors: OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def refuse_link(path: Path) -> None:
    """Raise OSError where `path` is there and is a link, a file of several names, or no file."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(
                f"{path}: is a link or no ordinary file, so writing it could change a file elsewhere; "
                "remove it, or put a copy in its place"
            )


def refuse_links_in(folder: Path) -> None:
    """Raise OSError where anything below `folder` is a link: for a folder that a library writes
    in."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() or name in files:
                refuse_link(path)


def refuse_links_out_of(folder: Path) -> None:
    """Raise OSError where a folder below `folder` is a link out of it: for a library that makes
    links of its own to files, and writes files of new names."""
    for parent, folders, _ in os.walk(folder):
        for path in (Path(parent, name) for name in folders):
            _refuse_outside(path, folder)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder`, and of all that it holds, when it is
    whole. Its parents are made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(
        tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:100]}.", suffix=".writing")
    )
    try:
        beside.chmod(0o777 & ~_umask())
        yield beside
        remove_folder(folder, folder.parent)
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def remove(path: Path, within: Path) -> None:
    """A file, or the link instead of what it names. Nothing where there is none. Errors: as
    `make_folder`."""
    _refuse_outside(path.parent, within)
    path.unlink(missing_ok=True)


def remove_folder(path: Path, within: Path) -> None:
    """With all that it holds; of a link, the link alone. What cannot be removed stays. Errors: as
    `make_folder`."""
    _refuse_outside(path.parent, within)
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def move(path: Path, target: Path) -> None:
    """By a rename: a link at either end is moved or replaced itself."""
    os.replace(path, target)


def name_again(path: Path, folder: Path) -> None:
    """Give a file a second name, the same one, in `folder`: a link is named itself, not what it leads
    to. Errors: OSError, also where the disk knows no second names."""
    try:
        os.link(path, folder / path.name, follow_symlinks=False)
    except NotImplementedError as error:
        raise OSError(f"{path}: this system gives a file no second name") from error


def _refuse_outside(path: Path, within: Path) -> None:
    resolved = path.resolve()
    if not resolved.is_relative_to(within.resolve()):
        raise OSError(
            f"{path}: leads out of {within}, to {resolved}; only what lies in {within} itself is "
            "written or removed there: take the link away, or name a folder on that disk instead"
        )


def _umask() -> int:
    """Without a moment in which another thread's files get other rights, where the system says
    it."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        with open("/proc/self/status", encoding="ascii") as status:
            return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    return 0o022
