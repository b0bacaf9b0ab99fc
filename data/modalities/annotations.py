"""The rows that a modality makes of annotations of its values, such as regions of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from data.annotations import Annotation
from data.bad_samples import ANNOTATION_LIMIT
from data.batching.shown import counted, shown_annotations
from data.modalities.modality import Loaded

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.index.sources import Source

KEPT = 0.5  # of an annotation's extent: one of which a view shows less is not of the view

Within = Callable[[int, Sequence[Annotation]], tuple[np.ndarray, np.ndarray]]
"""The number of a sample in the micro-batch, and annotations [n] of it -> where the tower sees
them, [n, extent] whole numbers, and which part of each one's extent it sees, [n]."""


def annotation_rows(
    source: Source,
    request: MicroBatchRequest,
    seed: int,
    modality: str,
    loaded: Loaded,
    within: Within | None,
) -> dict[str, Loaded]:
    """The rows of annotations of the samples that were `loaded` of a modality, by their name; none
    where no pair has any of it. The tensors are their extents, such as region_boxes int32 [n, 4],
    and NAME_row int64 [n], the sample of each in the micro-batch. One that the view does not show
    is left out of the loss, as a sample that cannot be read. `within`: None where nothing was
    loaded, whose extents are zeros."""
    places = request.places
    if places is None or places.kind.of[0] != modality:
        return {}
    row, number = np.repeat(np.arange(len(request.index)), places.number), counted(places.number)
    starts = np.cumsum(places.number) - places.number
    kind = places.kind
    extents = np.zeros((len(row), kind.num_edges), np.int32)
    inside = np.zeros(len(row), np.float32)
    missing = {*loaded.absent, *(i for i, _, _ in loaded.bad)}
    for sample, i in enumerate(request.index.tolist()):
        count, training = int(places.number[sample]), request.training
        if within is None or not count or i in missing:
            continue
        found = shown_annotations(source, kind, i, count, seed, request.epoch, training)
        own = slice(starts[sample], starts[sample] + count)
        extents[own], inside[own] = within(sample, found)
    name, index = kind.rows[0], request.index[row]
    tensors = {f"{name}_{kind.extents}": extents, f"{name}_row": row}
    return {
        name: Loaded(
            {name: torch.from_numpy(values) for name, values in tensors.items()},
            places.first[row] + number,
            np.where(inside < KEPT, -1 - index, index),
            None if request.weight is None else request.weight[row],
            key=index * (ANNOTATION_LIMIT + 1) + number,
        )
    }
