"""A data format of one's own: a folder of images whose captions are their names, `red_apple.png`.

    python train.py --import-module examples.format --data named:FOLDER

The index, splits, checks, cache and mixing with other data come with it. A data set that Python can
hold is simpler: `examples/dataset.py`.
"""

import os
from collections.abc import Iterator

from data.formats import rows
from data.formats.rows import Part, Row
from data.formats.specs import local_folder
from data.index.bad_samples import BadSample
from data.index.sources import KINDS

USAGE = "named:FOLDER"


class NamedFormat(rows.Format):
    def __init__(self, where: str) -> None:
        self.folder = local_folder("named", where, USAGE)
        self.roots = rows.Roots.of(self.folder)  # nothing outside is opened, whatever a link says
        self.spec = f"named:{self.folder}"  # what the index is filed under

    def fingerprint(self) -> list[rows.Stamp]:
        """Equal as long as the rows are: a folder's time changes with its entries."""
        return [rows.stamp(self.folder)]

    def parts(self) -> Iterator[Part]:
        """Pieces that processes read side by side."""
        names = [name for name in sorted(os.listdir(self.folder)) if is_image(name)]
        return rows.in_parts(self.folder, ((entry, 1, 1) for entry in enumerate(names)))

    def rows(self, part: Part) -> Iterator[Row]:
        for number, name in part.content:
            row = Row(id=name, number=number)
            try:
                rows.take_captions(row, name.rpartition(".")[0].replace("_", " "))
                rows.place(row, self.roots, name)
            except BadSample as problem:  # listed with its reason, and left out of training
                row.problem = problem
            yield row


def is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in rows.IMAGE_ENDINGS


KINDS["named"] = (USAGE, NamedFormat)
