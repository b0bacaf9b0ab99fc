"""Rows that are made of the samples of two branches and compared beside them. Regions of images
with their phrases are the one kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Derived:
    """`name`: the modality of data sets that says which rows a sample has (`kinds.py`). `rows`: the
    names of what is compared, and `of`: the branch that makes each of them."""

    name: str
    rows: tuple[str, str]
    of: tuple[str, str]

    @property
    def pair(self) -> tuple[str, str]:
        """As `--pairs` names it."""
        return self.name, self.of[1]


REGIONS = Derived("region", ("region", "phrase"), ("image", "text"))
DERIVED = {each.name: each for each in (REGIONS,)}


def place_of(name: str) -> str:
    """The modality whose samples have places for rows of this name; any other name is itself."""
    return next((kind.of[0] for kind in DERIVED.values() if name in kind.rows), name)
