"""What stands after the kind in a data spec: files, patterns of files, options; and files that are
elsewhere."""

import glob
import hashlib
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

from braceexpand import braceexpand
from filelock import FileLock

from common.files import make_folder, replacing
from data.formats.rows import near
from data.progress import progress_bar

COPIES_AT_ONCE = 8
MAX_SHOWN = 5
NAMES_LIMIT = 1_000_000  # that braces may stand for
BRACES = re.compile(
    r"\\.|(?P<range>\{(?:(?P<first>-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))"
    r"(?:\.\.-?(?P<step>\d+))?\})|[{},]"
)
ROOT = "root"  # the option that names a further folder in which images may lie


def cache_folder() -> Path:
    """Where indexes and copies are kept: WYE_CACHE, or ~/.cache/wye."""
    return Path(os.environ.get("WYE_CACHE") or Path.home() / ".cache" / "wye").absolute()


def split_options(
    kind: str, where: str, known: tuple[str, ...]
) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """`FILE?key=value&key=value` -> the file, its options, and the folders of ROOT, absolute, which
    alone may come several times.

    In a value %26 stands for `&`, and so on. A file that exists under the whole name wins. Errors:
    ValueError, FileNotFoundError for a ROOT that is no folder.
    """
    if not has_options(kind, where):
        return where, {}, ()
    spec = f"data spec '{kind}:{where}':"
    file, _, words = where.rpartition("?")
    options: dict[str, str] = {}
    roots: list[str] = []
    for word in words.split("&"):
        key, _, value = word.partition("=")
        if key not in known:
            listed = ", ".join(known)
            raise ValueError(f"{spec} unknown option '{key}'; known: {listed}{near(key, known)}")
        if key in options:
            raise ValueError(f"{spec} option '{key}' is given twice; give it once")
        if not value:
            raise ValueError(f"{spec} option '{key}' has no value; write {key}=VALUE")
        if key == ROOT:
            roots.append(root_folder(unquote(value), f"{spec} root"))
        else:
            options[key] = unquote(value)
    return file, options, tuple(roots)


def has_options(kind: str, where: str) -> bool:
    """Does what follows the kind end with `?key=value`? Not if a file (coco: a folder and a file)
    exists under the whole name."""
    if "?" not in where or os.path.exists(local_path(where)):
        return False
    if kind == "parquet" and "=" not in where.rpartition("?")[2]:
        return False  # part-?.parquet: a pattern of files
    folder, _, file = where.rpartition(":")
    return not (
        kind == "coco" and os.path.isdir(local_path(folder)) and os.path.isfile(local_path(file))
    )


def root_folder(given: str, of: str) -> str:
    """The absolute path of a further folder that images may lie in. Errors: ValueError,
    FileNotFoundError; `of` begins their messages."""
    if not given:
        raise ValueError(f"{of} names no folder; give one that images lie in")
    if is_remote(given):
        raise ValueError(
            f"{of} '{given}' is remote; images that are files of their own are read from local "
            "folders: copy it, and name the copy"
        )
    path = local_path(given)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{of} {path!r}: the name is not UTF-8; give a link to it that is"
        ) from None
    if not os.path.isdir(path):
        what = "is not a folder" if os.path.exists(path) else "does not exist"
        raise FileNotFoundError(f"{of} '{path}' {what}; give a folder that images lie in")
    return path


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> str:
    """Absolute, of a path or a file:// address."""
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def local_file(kind: str, where: str, usage: str, content: str) -> str:
    """The absolute path of the one file that a spec names. Errors: ValueError,
    FileNotFoundError."""
    path = _local(kind, where, "file", usage)
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "does not exist"
        raise FileNotFoundError(f"data spec '{kind}:{where}': {what}; give a file of {content}")
    return path


def local_folder(kind: str, where: str, usage: str) -> str:
    """The absolute path of the folder that a spec names. Errors: ValueError, FileNotFoundError."""
    path = _local(kind, where, "folder", usage)
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise FileNotFoundError(
            f"data spec '{kind}:{where}': {path} {what}; a folder is needed: {usage}"
        )
    return path


def _local(kind: str, where: str, what: str, usage: str) -> str:
    if not where:
        raise ValueError(f"data spec '{kind}:' names no {what}; write {usage}")
    if is_remote(where):
        raise ValueError(
            f"data spec '{kind}:{where}': a remote {what} cannot be read, its images would have to "
            "be fetched one by one; copy it, or give remote shards that hold the images: "
            "webdataset:URL or parquet:URL"
        )
    return local_path(where)


def expand(kind: str, pattern: str, usage: str) -> list[str]:
    """`a/{000..012}.tar::b/*.tar` -> names of files, in order: braces as the shell has them, `*`
    and `?` sorted, `::` between patterns.

    Local names come back absolute, remote ones as they are. Errors: ValueError, FileNotFoundError.
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
    names = [name for each in every for name in ([each] if is_remote(each) else _found(spec, each))]
    missing = [name for name in names if not is_remote(name) and not os.path.isfile(name)]
    if missing:
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        raise FileNotFoundError(f"{spec}: no such file: {', '.join(missing[:MAX_SHOWN])}{more}")
    twice = sorted(name for name, number in Counter(names).items() if number > 1)
    if twice:
        raise ValueError(f"{spec} names {twice[0]} twice; name each file once")
    return names


def _found(spec: str, name: str) -> list[str]:
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


def absolute_pattern(pattern: str) -> str:
    """The pattern from any folder: what an index of it is filed under, whichever files it names by
    now."""
    return "::".join(part if is_remote(part) else local_path(part) for part in pattern.split("::"))


def local_copies(names: list[str], progress: bool = False) -> list[str]:
    """The same files on this machine: a remote one is copied once, into the cache folder, and is
    not asked for again.

    Several at a time; processes that start together copy each file once. Errors: OSError that names
    the address.
    """
    remote = [name for name in names if is_remote(name)]
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        copied = pool.map(_local_copy, remote)
        bar = progress_bar(copied, "copying", "file", len(remote), shown=progress)
        copies = dict(zip(remote, bar))
    return [copies.get(name, name) for name in names]


def _local_copy(url: str) -> str:
    import fsspec

    folder = cache_folder() / "copies" / hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    copy = folder / (os.path.basename(url.partition("?")[0]) or "file")
    if copy.is_file():
        return str(copy)
    make_folder(folder)
    with FileLock(folder / "lock"):
        if copy.is_file():
            return str(copy)
        try:
            files, path = fsspec.core.url_to_fs(url)
            with replacing(copy) as beside:
                files.get_file(path, str(beside))
        except Exception as error:  # each kind of address raises its own
            raise OSError(
                f"cannot copy {url} to {folder}: {type(error).__name__}: {error}; check the "
                "address and its credentials"
            ) from error
    return str(copy)


def short_names(files: list[str]) -> dict[str, str]:
    """File -> its name alone where these differ, else its path below what all have in common: a
    part of ids."""
    bases = [os.path.basename(file) for file in files]
    if len(set(bases)) == len(files):
        return dict(zip(files, bases))
    common = os.path.commonprefix([os.path.dirname(file) + "/" for file in files])
    common = common[: common.rfind("/") + 1]
    return {file: file[len(common) :] for file in files}
