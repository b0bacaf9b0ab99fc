"""A source whose readers say who they are, so that a test can end them."""

import os
from pathlib import Path

from data.index.sources import Source


class NamesItsReaders:
    """`source`, whose readers write their process ids to `file`."""

    def __init__(self, source: Source, file: Path) -> None:
        self.source, self.file, self.spec = source, file, source.spec

    def __len__(self) -> int:
        return len(self.source)

    def value(self, modality: str, i: int) -> bytes:
        with self.file.open("a") as pids:
            pids.write(f"{os.getpid()}\n")
        return self.source.value(modality, i)

    def content_hash(self, modality: str, i: int) -> bytes:
        return self.source.content_hash(modality, i)
