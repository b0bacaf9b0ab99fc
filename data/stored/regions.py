"""Regions of images in data sets: boxes with phrases, as JSON or as lists of parquet files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data.regions import Regions, checked_regions
from data.stored.record import JSON, PARQUET, TABLE, Stored

if TYPE_CHECKING:
    from data.formats.rows import Format, Sample


class StoredRegions(Stored):
    in_formats = True

    def numbers(self) -> Mapping[str, str]:
        return {"num_regions": "i4", "num_negatives": "i4"}  # of all together

    def texts(self) -> tuple[str, ...]:
        return ("regions",)

    def check(self, value: Any, sample: Sample, row: Mapping[str, Any], format: Format) -> None:
        known = isinstance(value, Regions)
        sample.regions = value if known else checked_regions(value, unit=format.boxes.unit)


REGIONS = StoredRegions(
    "region", {JSON: ("regions",), PARQUET: ("regions",), TABLE: ()}, several="regions"
)
