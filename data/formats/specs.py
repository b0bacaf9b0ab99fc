"""What stands after the kind in a data spec: a file or a folder, and options."""

import os
from pathlib import Path
from urllib.parse import unquote

from data.formats.rows import near

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
    """Whether what follows the kind ends with `?key=value`, and no file (coco: folder and file)
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
