"""A data format of one's own: a folder of images whose captions are their names, `red_apple.png`.

    python train.py --import-module examples.format --data named:FOLDER

The index, splits, checks, cache and mixing with other data come with it. A data set that Python can
hold is simpler: `examples/dataset.py`.
"""

import os
from collections.abc import Iterator

from data.formats.rows import Format, Part, Roots, Row, in_parts
from data.formats.specs import existing
from data.index.sources import KINDS
from data.stored.image import IMAGE

USAGE = "named:FOLDER"


class NamedFormat(Format):
    def __init__(self, where: str) -> None:
        self.folder = existing(f"data spec 'named:{where}':", where, "folder", USAGE)
        self.roots = Roots.of(self.folder)  # nothing outside is opened, whatever a link says
        self.spec = f"named:{self.folder}"  # what the index is filed under
        # The index is made anew when one of these changes: a folder's time does with its entries.
        self.files = [self.folder]

    def parts(self) -> Iterator[Part]:
        """Pieces that processes read side by side."""
        names = [name for name in sorted(os.listdir(self.folder)) if is_image(name)]
        return in_parts(self.folder, ((entry, 1) for entry in enumerate(names)))

    def rows(self, part: Part) -> Iterator[Row]:
        """What is given, unchecked: a sample that cannot be used is listed with its reason."""
        for number, name in part.content:
            text = name.rpartition(".")[0].replace("_", " ")
            yield Row(name, number, {"image": name, "text": text})


def is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in IMAGE.endings


KINDS["named"] = (USAGE, NamedFormat)
