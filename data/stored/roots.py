"""The folders that files of a data set may lie in: nothing outside of them is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from common.output import brief
from data.bad_samples import FILE_LIMIT, BadSample, check_characters

ROOTS_SHOWN = 3
WITHOUT_DOTS = "write the path of the file without '..'"
TEXTS = ("text", "caption", "annotation")  # what files are read for, beside modalities
TEXT_FILE_LIMIT = 16 << 20  # bytes of a file of subtitles or sentences


@dataclass(frozen=True)
class Roots:
    """The folders that images and sounds may lie below, absolute and without links, in the order in
    which they are searched. Nothing outside of them is opened."""

    folders: tuple[str, ...]
    more_allowed: bool = False  # may a spec name further ones?

    @classmethod
    def of(cls, own: str, more: Sequence[str] | None = None) -> Roots:
        """Make them of existing folders, each once. `more`: those named beside the own one;
        None: its kind takes none."""
        folders = dict.fromkeys(os.path.realpath(folder) for folder in (own, *(more or ())))
        return cls(tuple(folders), more is not None)

    @property
    def own(self) -> str:
        return self.folders[0]

    def options(self) -> str:
        """The folders beside the own one, as a spec names them."""
        return "".join(f"?root={folder}" for folder in self.folders[1:])

    def find(
        self, path: Any, modality: str = "image", not_of_its_kind: str = "not-an-image"
    ) -> tuple[str, os.stat_result]:
        """The true path and the status of the file that a path of a data set leads to.

        A relative path counts from each root in order, and the first below which it exists wins,
        whatever is there. An absolute one may lie below any root. Links are followed as far as
        they stay below the roots; a path with `..` counts from the roots from which it stays below
        one, and its `..` may not stand behind a link. Raises BadSample, `not_of_its_kind` for what
        is no file.
        """
        if not isinstance(path, str) or not path:
            raise BadSample(
                "invalid-row", f"the {modality}'s path is {brief(path)}; a path as text is needed"
            )
        check_characters(path, f"the {modality}'s path")
        climbs = ".." in PurePosixPath(path).parts
        refused = ""
        for folder in self.folders:
            # `join` gives an absolute path as it is
            joined = os.path.join(folder, path)
            true = os.path.realpath(joined)
            # behind a link, `..` is the parent of what the link leads to, which may be anywhere
            if climbs and true != os.path.realpath(os.path.normpath(joined)):
                raise BadSample("outside-root", f"'{path}' has '..' behind a link; {WITHOUT_DOTS}")
            if not self._hold(true):
                refused = refused or self._refusal(path, true)
                if climbs:
                    continue
                raise BadSample("outside-root", refused)
            try:
                status = os.stat(true)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise BadSample("unreadable", f"{true}: {error.strerror}") from error
            if not stat.S_ISREG(status.st_mode):
                what = "folder" if stat.S_ISDIR(status.st_mode) else "pipe or device"
                raise BadSample(not_of_its_kind, f"{true} is a {what}, not a file")
            return true, status
        if refused:
            raise BadSample("outside-root", refused)
        raise BadSample(
            "missing-file", f"'{path}' does not exist; paths count from {self._shown()}, in order"
        )

    def read(self, path: str, modality: str = "image", true: str = "") -> bytes:
        """All bytes of a file. `true`: where `find` just found it. Raises BadSample."""
        true = true or self.find(path, modality)[0]
        try:
            with open(true, "rb") as file:
                most = TEXT_FILE_LIMIT if modality in TEXTS else FILE_LIMIT
                if (size := os.fstat(file.fileno()).st_size) > most:
                    raise BadSample("unreadable", f"{true} has {too_large(size, most)}")
                return file.read()
        except OSError as error:
            raise BadSample("unreadable", f"{true}: {error.strerror}") from error

    def with_ending(self, path: Any, endings: Sequence[str]) -> Any:
        """A path as it is, or with the first ending that a file has, where it has none: lists of
        films often name them without."""
        if not isinstance(path, str) or os.path.splitext(path)[1][1:].lower() in endings:
            return path
        for ending in endings:
            for folder in self.folders:
                if os.path.isfile(os.path.join(folder, f"{path}.{ending}")):
                    return f"{path}.{ending}"
        return path

    def _hold(self, true: str) -> bool:
        return any(true == folder or is_inside(folder, true) for folder in self.folders)

    def _refusal(self, path: str, true: str) -> str:
        remedy = "; allow its folder with --data-root DIR, or ?root=DIR in the data spec"
        return f"'{path}' leads to {true}; only files below {self._shown()} are read" + (
            remedy if self.more_allowed else ""
        )

    def _shown(self) -> str:
        hidden = len(self.folders) - ROOTS_SHOWN
        return ", ".join(self.folders[:ROOTS_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


def is_inside(root: str, true: str) -> bool:
    return true.startswith(root.rstrip("/") + "/")


def local_path(path: str) -> str:
    """Absolute, of a path or a file:// address."""
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def too_large(size: int, most: int = FILE_LIMIT) -> str:
    return f"{size:,} bytes; at most {most:,} are read"
