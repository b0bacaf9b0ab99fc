"""Further folders that images may lie in: `--data-root DIR` of the commands, which is `?root=DIR`
in each of their data specs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from urllib.parse import unquote

from data.formats.specs import ROOT, has_options, is_remote, local_path, root_folder

# Their images may be files of their own, named by paths.
KINDS_WITH_PATHS = (
    *("jsonl", "csv", "tsv", "parquet", "coco", "karpathy"),
    *("vg", "refcoco", "flickr30k-entities"),
)
ESCAPES = {"%": "%25", "&": "%26", "?": "%3F"}  # what has a meaning in a spec; see split_options
FLAG = "--data-root"


def with_roots(spec: str, roots: Sequence[str] | None) -> str:
    """The spec with `roots` after those that it has; unchanged where its kind takes none."""
    if not roots or not takes_roots(spec):
        return spec
    kind, _, where = spec.partition(":")
    return spec + ("&" if has_options(kind, where) else "?") + "&".join(map(_option, roots))


def from_anywhere(spec: str) -> str:
    """The spec with the absolute paths of its roots, so that it means the same folders wherever it
    is opened."""
    kind, _, where = spec.partition(":")
    if not takes_roots(spec) or not has_options(kind, where):
        return spec
    file, _, words = spec.rpartition("?")
    return f"{file}?" + "&".join(map(_absolute, words.split("&")))


def takes_roots(spec: str) -> bool:
    return spec.partition(":")[0] in KINDS_WITH_PATHS


def _absolute(word: str) -> str:
    key, _, value = word.partition("=")
    root = unquote(value)
    return _option(root) if key == ROOT and root and not is_remote(root) else word


def escaped(value: str) -> str:
    """The value of an option as a spec has it."""
    return "".join(ESCAPES.get(letter, letter) for letter in value)


def _option(root: str) -> str:
    return f"{ROOT}={escaped(local_path(root))}"


# -- on the command line


def add_root_flag(group: argparse._ActionsContainer, of: str) -> None:
    """`of`: the arguments that have the data specs, for the help."""
    group.add_argument(
        FLAG,
        action="append",
        type=root,
        metavar="DIR",
        help=f"a further folder that the images of {of} may lie in: paths in data files count from "
        "the file's own folder first, then from each DIR in order; repeat it for several "
        "(default: the own folder only)",
    )


def given_roots(
    parser: argparse.ArgumentParser, given: Sequence[str] | None, specs: Sequence[str]
) -> tuple[str, ...] | None:
    """What the flag was given, each once; None: nothing. Ends the program when none of `specs`
    names images by paths."""
    if given and not any(map(takes_roots, specs)):
        kinds = ", ".join(KINDS_WITH_PATHS)
        parser.error(
            f"argument {FLAG}: {given[0]}; it is for data specs of the kinds {kinds}, and none is "
            "given; leave it out"
        )
    return tuple(dict.fromkeys(given)) if given else None


def root(given: str) -> str:
    try:
        return root_folder(given, "folder")
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
