"""What stands after the kind in a data spec: a file or a folder, and options."""

import importlib.util
import os
from importlib.machinery import ModuleSpec
from pathlib import Path
from urllib.parse import unquote

from common.spelling import near
from data.stored.roots import local_path

NAMING = ("id", "language")  # what a row holds beside its modalities
ROOT = "root"  # the option that names a further folder in which images may lie


def cache_folder() -> Path:
    """Where indexes and copies are kept: WYE_CACHE, or ~/.cache/wye."""
    return Path(os.environ.get("WYE_CACHE") or Path.home() / ".cache" / "wye").absolute()


def installed(package: str, what_for: str, install: str) -> ModuleSpec:
    """Where a package of the demo is, without importing it. Errors: FileNotFoundError."""
    found = importlib.util.find_spec(package.replace("-", "_"))
    if found is None:
        raise FileNotFoundError(
            f"demo data: the Python package '{package}' is not installed; it {what_for}; run: "
            f"{install}"
        )
    return found


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


def names_of(
    usual: dict[str, tuple[str, ...]], options: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    """What a row holds -> the names of columns or keys that it may stand under: the one of the
    options, else the usual ones without those that the options give to another modality. An id or
    a language may stand under any."""
    taken = {name for key, name in options.items() if key not in NAMING}
    free = {
        key: names if key in NAMING else tuple(name for name in names if name not in taken)
        for key, names in usual.items()
    }
    return free | {key: (name,) for key, name in options.items()}


def images_and(
    kind: str, where: str, options: tuple[str, ...], needed: str, usage: str, what: str = "file"
) -> tuple[str, str, dict[str, str], tuple[str, ...]]:
    """`IMAGES:FILE?key=value` -> the folder and the file, or another folder where `what` says so,
    absolute, and the rest as `split_options` has it. Errors: ValueError, FileNotFoundError."""
    spec = f"data spec '{kind}:{where}':"
    names, given, roots = split_options(kind, where, options)
    folder, _, name = names.rpartition(":")
    if not folder or not name:
        raise ValueError(f"{spec} a folder and a {what} are needed: {usage}")
    folder = existing(spec, folder, "folder", f"a folder of images: {usage}")
    return folder, existing(spec, name, what, f"{needed}: {usage}"), given, roots


def has_options(kind: str, where: str) -> bool:
    """Whether what follows the kind ends with `?key=value`, and no file (coco: folder and file)
    exists under the whole name."""
    if "?" not in where or os.path.exists(local_path(where)):
        return False
    if kind in ("parquet", "stream") and "=" not in where.rpartition("?")[2]:
        return False  # part-?.parquet: a pattern of files
    folder, _, file = where.rpartition(":")
    return not (os.path.isdir(local_path(folder)) and os.path.isfile(local_path(file)))


def existing(of: str, given: str, what: str, needed: str) -> str:
    """The absolute path of a file or a folder, whichever `what` says. `of` begins the messages,
    `needed` says what to give. Errors: ValueError, FileNotFoundError."""
    if not given:
        raise ValueError(f"{of} names no {what}; give {needed}")
    if is_remote(given):
        raise ValueError(
            f"{of} '{given}' is remote, and files of their own would have to be fetched one by one; "
            "copy it, or give remote shards that hold the images: webdataset:URL or parquet:URL"
        )
    path = local_path(given)
    if not (os.path.isfile(path) if what == "file" else os.path.isdir(path)):
        found = f"is not a {what}" if os.path.exists(path) else "does not exist"
        raise FileNotFoundError(f"{of} '{path}' {found}; give {needed}")
    return path


def root_folder(given: str, of: str) -> str:
    """The absolute path of a further folder that images may lie in. Errors: as `existing`."""
    try:
        local_path(given).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{of} {given!r}: the name is not UTF-8; give a link to it that is"
        ) from None
    return existing(of, given, "folder", "a folder that images lie in")


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith("file://")
