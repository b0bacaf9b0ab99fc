"""The shards of a folder, as data sets lie on Hugging Face's hub and in its cache on this machine.

The split of a shard is that of its name, as the library `datasets` finds it (its data_files.py):
`data/train-00000-of-00005.parquet`, `imagenet1k-validation-00.tar`, `test.parquet`, `train/0.tar`.
"""

import os
import re
from collections import defaultdict
from collections.abc import Sequence

from common.spelling import near

ENDINGS = {
    "parquet": (".parquet",),
    "webdataset": (".tar",),
    "stream": (".parquet", ".tar"),
}
"""By kind of data set."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words}
PIECE = re.compile(r"-(\d+)-of-(\d+)(-[0-9a-f]+)?$")  # at the end of a name
NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)  # of any split, in front of that
BETWEEN = re.compile(r"[-._ 0-9]+")  # words of a name
SHOWN = 5


def folder_shards(spec: str, kind: str, folder: str, split: str | None) -> list[str]:
    """The shards in a folder and below it, sorted, or those of a split, or of several,
    `train+test`. `spec` begins messages. Errors: ValueError where it is not clear which these are;
    OSError."""
    folder = of_cache(spec, folder)
    splits: dict[str, list[str]] = defaultdict(list)
    for path in _shards(spec, kind, folder):
        splits[_split_of(path)].append(path)
    found = []
    for own in _chosen(spec, splits, split):
        _refuse_several(spec, kind, folder, splits[own])
        _refuse_incomplete(spec, folder, splits[own])
        found += splits[own]
    return [os.path.join(folder, path) for path in found]


def of_cache(spec: str, folder: str) -> str:
    """In the hub's cache a data set has a folder for each revision, with links to its files."""
    revisions = os.path.join(folder, "snapshots")
    if not (os.path.isdir(revisions) and os.path.isdir(os.path.join(folder, "blobs"))):
        return folder
    there, main = sorted(os.listdir(revisions)), os.path.join(folder, "refs", "main")
    if os.path.isfile(main):
        with open(main, encoding="ascii", errors="replace") as file:
            revision = file.read(100).strip()
        there = [name for name in there if name == revision] or there
    if len(there) != 1:
        raise ValueError(
            f"{spec} has {len(there)} revisions in the hub's cache, and refs/main names none of them; "
            f"give one: {revisions}/REVISION"
        )
    return os.path.join(revisions, there[0])


def _shards(spec: str, kind: str, folder: str) -> list[str]:
    """Paths in the folder. Files may be links, as in the hub's cache; folders that are links are
    not looked into."""
    found: dict[str, list[str]] = defaultdict(list)
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in files:
            if not name.startswith("."):
                path = os.path.relpath(os.path.join(parent, name), folder)
                found[os.path.splitext(name)[1].lower()].append(path)
    endings = [ending for ending in ENDINGS[kind] if ending in found]
    if len(endings) == 1:
        return sorted(found[endings[0]])
    if endings:
        raise ValueError(f"{spec} has .parquet and .tar files; give a pattern, such as DIR/*.tar")
    needed = " or ".join(ENDINGS[kind])
    other = next((each for each, (end, *_) in ENDINGS.items() if end in found), None)
    advice = "give the folder of its shards, or a pattern"
    if other:
        advice = f"there are {'/'.join(ENDINGS[other])} files: give {other}:DIR"
    elif ".arrow" in found:
        advice = "there are .arrow files, as save_to_disk writes them: write them by to_parquet"
    raise ValueError(f"{spec} has no file that ends in {needed}; {advice}")


def _split_of(path: str) -> str:
    """ "" where its name and its folders say nothing, or more than one thing."""
    stem = os.path.splitext(os.path.basename(path))[0]
    piece = PIECE.search(stem)
    if piece and NAME.fullmatch(stem, 0, piece.start()):
        return stem[: piece.start()]
    for name in (stem[: piece.start()] if piece else stem, *reversed(path.split(os.sep)[:-1])):
        words = {SPLIT_OF[word] for word in BETWEEN.split(name.lower()) if word in SPLIT_OF}
        if len(words) == 1:
            return words.pop()
    return ""


def _chosen(spec: str, splits: dict[str, list[str]], given: str | None) -> list[str]:
    """The splits to read. Errors: ValueError, also where there are several and none is named."""
    named = sorted(name for name in splits if name)
    listed = ", ".join(f"{name} ({len(splits[name]):,} files)" for name in named)
    if "" in splits:
        unnamed = sorted(splits[""])[0]
        listed += f"{', and ' if named else ''}{len(splits['']):,} files of none, such as {unnamed}"
    if given is None:
        if len(splits) == 1:
            return [*splits]
        first = min(named, key=lambda name: name != "train", default="NAME")
        raise ValueError(
            f"{spec} has several splits: {listed}; give one, ?split={first}, or a pattern of files"
        )
    found = [each if each in splits else SPLIT_OF.get(each, each) for each in given.split("+")]
    if unknown := [each for each in found if each not in named]:
        hint = near(unknown[0], named)
        raise ValueError(f"{spec} has no split '{unknown[0]}'{hint}; it has {listed}")
    return [*dict.fromkeys(found)]


def _refuse_several(spec: str, kind: str, folder: str, paths: Sequence[str]) -> None:
    """Raise ValueError where the shards of a split are in several folders, as where these are
    configurations of it."""
    folders = sorted({os.path.dirname(path) for path in paths})
    if len(folders) > 1:
        more = ", …" if len(folders) > SHOWN else ""
        raise ValueError(
            f"{spec} has shards of one split in {len(folders)} folders: "
            f"{', '.join(each or '.' for each in folders[:SHOWN])}{more}; give one of them, such as "
            f"{kind}:{os.path.join(folder, folders[-1])}, or a pattern of files"
        )


def _refuse_incomplete(spec: str, folder: str, paths: Sequence[str]) -> None:
    """Raise ValueError where shards that are counted in their names are not those of one count."""
    counts: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in paths:
        stem = os.path.splitext(path)[0]
        if piece := PIECE.search(stem):
            counts[stem[: piece.start()]][int(piece[2])].add(int(piece[1]))
    for name, of in counts.items():
        several = sorted(of)
        there = len(of[several[0]])
        if len(several) == 1 and there == several[0]:
            continue
        found = f"{there:,} of {several[0]:,} shards of '{name}'"
        if len(several) > 1:
            found = f"shards of '{name}' of {several[0]:,} and of {several[1]:,}"
        raise ValueError(
            f"{spec} has {found}; download the others, remove what is left of another version, or "
            f"name what is meant: {os.path.join(folder, name)}-*"
        )
