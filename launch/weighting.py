"""What the `sample_weights` block makes of a run: the order of the training samples, and what each counts in the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from data.prepare import PreparedData
from data.sampler import BatchSizes, GlobalOrder
from data.weights import COLUMNS, Curriculum, loss_weights, sample_weights
from engine.config import SampleWeightsBlock


def training_order(
    data: PreparedData, global_batch_size: int, seed: int, block: SampleWeightsBlock | None, earlier: BatchSizes = ()
) -> GlobalOrder:
    """`earlier`: the sizes that global batches had before. Errors: ValueError when the training samples do not fill one global batch."""
    curriculum = None
    if block is not None and block.use == "curriculum":
        columns = (data.source.column(name)[data.train] for name in COLUMNS)
        curriculum = Curriculum(sample_weights(*columns, block.image, block.text), block.epochs)
    return GlobalOrder(len(data.train), global_batch_size, seed, data.parts, curriculum=curriculum, earlier=earlier)


def loss_weights_of(data: PreparedData, block: SampleWeightsBlock | None) -> Callable[[np.ndarray], np.ndarray] | None:
    """The samples of a global batch [G] -> what they count in its loss [G] int64, millionths; None: all the same."""
    return partial(loss_weights, data.source, block.image, block.text) if block is not None and block.use == "loss" else None
