"""RUN_DIR/code: the code that a run goes on with, whatever is edited later.

A job runs it as a program, and the folder of a run may come from somebody else. What is there is
kept only where it is the code as it is now, where the same files were copied before by this user,
which a list outside of the run's folder tells, or where the command line trusts it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from common.files import (
    append_text,
    make_folder,
    refuse_links_in,
    remove_folder,
    replacing_folder,
    write_text,
)
from data.formats.specs import cache_folder
from launch.config.options import ROOT

COPIED = ("common", "data", "ds_configs", "engine", "examples", "launch", "models")
COMPILED = "__pycache__"
COMMIT, GIVEN = "COMMIT", "given-"  # files that are no code; `GIVEN`: how their names begin
LIST = "copied-code"  # in the cache: a digest a line


def keep_code(folder: Path, trusts: bool) -> Path:
    """The code as it is now, unless the folder holds some already. `trusts`: whatever that is.

    Errors: ValueError for code that may be another one's; OSError for links, through which
    something outside would be run or written.
    """
    if folder.is_symlink() or folder.exists():
        make_folder(folder, within=folder.parent)
        if not trusts:
            _refuse_unknown(folder)
        print(f"{folder} is kept; delete it for the code as it is now", file=sys.stderr)
        return folder
    from launch.run.folder import git_commit  # imports torch

    with replacing_folder(folder) as part:
        for name in COPIED:
            shutil.copytree(ROOT / name, part / name, ignore=shutil.ignore_patterns(COMPILED))
        for file in ROOT.glob("*.py"):
            shutil.copy(file, part)
        write_text(part / COMMIT, f"{git_commit() or ''}\n")
        append_text(make_folder(cache_folder()) / LIST, _digest(part, _files(part)) + "\n")
    return folder


def _refuse_unknown(folder: Path) -> None:
    refuse_links_in(folder)
    for compiled in [Path(parent) for parent, _, _ in os.walk(folder) if _is_compiled(parent)]:
        remove_folder(compiled, within=folder)  # Python runs it instead of what is beside it
    found, copied = _digest(folder, _files(folder)), cache_folder() / LIST
    if copied.is_file() and found in copied.read_text(encoding="utf-8").split():
        return
    now = [file for name in COPIED for file in _files(ROOT / name)]
    if found != _digest(ROOT, [*now, *ROOT.glob("*.py")]):
        raise ValueError(
            f"{folder}: the job would run this code as a program, and it is neither the code as it "
            f"is now nor what this tool has copied before ({copied}). Delete the folder for the code "
            "as it is now; if you trust whoever made it, add --trust-run"
        )


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        if not _is_compiled(parent):
            yield from (Path(parent, name) for name in names)


def _is_compiled(folder: str) -> bool:
    return os.path.basename(folder) == COMPILED


def _digest(folder: Path, files: Iterator[Path] | list[Path]) -> str:
    """Of the names and the bytes of all code."""
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(folder).as_posix(), file) for file in files):
        if name != COMMIT and not name.startswith(GIVEN):
            digest.update(f"{name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
            digest.update(file.read_bytes())
    return digest.hexdigest()
