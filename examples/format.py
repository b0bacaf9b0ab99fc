"""A data format of one's own: a folder of pictures whose captions are their names, `red_apple.png`.

    python train.py --import-module examples.format --data named:FOLDER

The index, splits, checks, cache and mixing with other data come with it. A data set that Python can
hold is simpler: `examples/dataset.py`.
"""

import os
from collections.abc import Iterator

from data.formats.rows import (
    PICTURE_ENDINGS,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    checked_captions,
    in_parts,
    place,
    stamp,
)
from data.formats.specs import local_folder
from data.index.bad_samples import BadSample
from data.index.sources import KINDS

USAGE = "named:FOLDER"


class NamedFormat(Format):
    def __init__(self, where: str) -> None:
        self.folder = local_folder("named", where, USAGE)
        self.roots = Roots.of(self.folder)  # nothing outside is opened, whatever a link says
        self.spec = f"named:{self.folder}"  # what the index is filed under

    def fingerprint(self) -> list[Stamp]:
        """As long as it is equal, the rows are: a folder's time changes with its entries."""
        return [stamp(self.folder)]

    def parts(self) -> Iterator[Part]:
        """Pieces that processes look at side by side."""
        names = sorted(
            name
            for name in os.listdir(self.folder)
            if name.rpartition(".")[2].lower() in PICTURE_ENDINGS
        )
        return in_parts(self.folder, ((entry, 1, 1) for entry in enumerate(names)))

    def rows(self, part: Part) -> Iterator[Row]:
        for number, name in part.content:
            row = Row(id=name, number=number)
            try:
                row.captions = checked_captions(name.rpartition(".")[0].replace("_", " "))
                place(row, self.roots, name)
            except BadSample as problem:  # listed with its reason, and left out of training
                row.problem = problem
            yield row


KINDS["named"] = (USAGE, NamedFormat)
