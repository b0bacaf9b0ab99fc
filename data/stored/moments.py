"""Moments of films in data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from data.annotations import Annotation, Annotations
from data.bad_samples import BadSample
from data.moments import checked_moment, placed_moments
from data.stored.annotations import StoredAnnotations
from data.stored.record import JSON, PARQUET, TABLE
from data.stored.video import clip_spans

if TYPE_CHECKING:
    from data.formats.rows import Format
    from data.index.sources import Source


class StoredMoments(StoredAnnotations):
    def one(self, given: Mapping[str, Any], dropped: list[BadSample], format: Format) -> Annotation:
        return checked_moment(given, dropped)

    def placed(
        self, found: Annotations, measured: Mapping[str, Any], format: Format
    ) -> list[Annotation] | None:
        if not measured.get("video_end_s"):
            return None
        return placed_moments(found, measured["video_start_s"], measured["video_end_s"])

    def box(self, source: Source, i: int, annotation: Annotation) -> tuple[float, ...]:
        """On frames of the clip side by side, from its start to its end."""
        ((start, end),) = clip_spans(source, np.array([i])).tolist()
        left, right = ((second - start) / (end - start) for second in annotation.extent)
        return left, 0.0, right, 1.0


MOMENTS = StoredMoments(
    "moment",
    {JSON: ("moments",), PARQUET: ("moments",), TABLE: ()},
    several="moments",
    of="video",
    negatives="num_negatives_of_moments",
    needed="{start_s, end_s, text}",
)
