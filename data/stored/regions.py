"""Regions of images in data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data.annotations import Annotation, Annotations
from data.bad_samples import BadSample
from data.regions import Given, checked_region, placed
from data.stored.annotations import StoredAnnotations
from data.stored.record import JSON, PARQUET, TABLE

if TYPE_CHECKING:
    from data.formats.rows import Format


class StoredRegions(StoredAnnotations):
    def one(self, given: Mapping[str, Any], dropped: list[BadSample], format: Format) -> Given:
        return checked_region(given, dropped, format.boxes.unit)

    def placed(
        self, found: Annotations, measured: Mapping[str, Any], format: Format
    ) -> list[Annotation] | None:
        if "orientation" not in measured:
            return None
        width, height, orientation = (measured[name] for name in ("width", "height", "orientation"))
        return placed(found, width, height, orientation, format.boxes.upright)


REGIONS = StoredRegions(
    "region",
    {JSON: ("regions",), PARQUET: ("regions",), TABLE: ()},
    several="regions",
    of="image",
    negatives="num_negatives",
    needed="{box, text}",
)
