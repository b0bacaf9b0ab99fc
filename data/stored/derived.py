"""Rows that are made of annotations and compared beside those of samples: of a place within a
value, such as a box of an image, and of the phrases that are said of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Derived:
    """`name`: the modality of data sets that says which rows a sample has (`kinds.py`). `rows`: the
    names of what is compared, and `of`: the branch that makes each of them. `most`: the option of
    train.py for how many of a sample come in a step. `extent`: what a phrase chooses among those of
    its sample, as metrics name it, and `extents`: several of them; `num_edges`: numbers that say
    where one is. `in_view`: whether a view that leaves out a part of the value may leave out
    rows."""

    name: str
    rows: tuple[str, str]
    of: tuple[str, str]
    most: str
    extent: str
    extents: str
    num_edges: int
    in_view: bool = False

    @property
    def pair(self) -> tuple[str, str]:
        """As `--pairs` names it."""
        return self.name, self.of[1]

    @property
    def pair_name(self) -> str:
        return ":".join(self.pair)

    @property
    def phrase_to_extent(self) -> str:
        """How the metrics of phrases among the annotations of their sample begin:
        `phrase_to_box`."""
        return f"{self.rows[1]}_to_{self.extent}"

    @property
    def num_unseen(self) -> str:
        """Of the annotations that an evaluation asks for."""
        return f"num_{self.name}s_not_in_view"

    @property
    def num_beyond(self) -> str:
        """Of a sample, for which a run does not ask (`most`)."""
        return f"num_{self.name}s_beyond_max"


REGIONS = Derived(
    "region",
    ("region", "phrase"),
    ("image", "text"),
    "max_regions",
    "box",
    "boxes",
    4,
    in_view=True,
)
MOMENTS = Derived(
    "moment", ("moment", "phrase"), ("video", "text"), "max_moments", "span", "spans", 2
)
DERIVED = {each.name: each for each in (REGIONS, MOMENTS)}
