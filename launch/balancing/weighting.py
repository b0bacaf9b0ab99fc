"""What the `sample_weights` block makes of a run: the order of the training samples, and what each
counts in the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from data.batching.sampler import BatchSizes, GlobalOrder
from data.batching.weights import Curriculum, loss_weights, sample_weights
from data.modalities.lengths import token_counts
from data.prepare import PreparedData
from launch.config.blocks import SampleWeightsBlock


def text_lengths(
    data: PreparedData,
    block: SampleWeightsBlock | None,
    max_text_tokens: int,
    run_folder: Path,
    progress: bool = False,
) -> np.ndarray | None:
    """[N] lengths of the training samples' longest captions, in the block's unit, 0 of a sample
    without any; None: nothing is weighed. Tokens are counted by the first process that comes and
    kept in the run's folder."""
    if block is None:
        return None
    if block.length == "characters" or data.tokenizer is None:
        return data.source.column("num_characters")[data.train]  # 0 without a text
    counts = token_counts(
        data.source,
        data.train,
        data.tokenizer,
        max_text_tokens=max_text_tokens,
        folder=run_folder / "token_counts",
        progress=progress,
    )
    return np.where(data.source.lacking("text")[data.train], 0, counts.longest())


def training_order(
    data: PreparedData,
    global_batch_size: int,
    seed: int,
    block: SampleWeightsBlock | None,
    lengths: np.ndarray | None,
    earlier: BatchSizes = (),
) -> GlobalOrder:
    """`lengths`: as `text_lengths` gives them. `earlier`: the sizes that global batches had before.
    Errors: ValueError when the training samples do not fill one global batch."""
    curriculum = None
    if block is not None and lengths is not None and block.epochs is not None:  # a curriculum
        complexity = data.source.column("complexity")[data.train]
        seconds = data.source.column("audio_seconds")[data.train]
        difficulty = sample_weights(
            complexity, lengths, block.image, text=block.text, seconds=seconds, audio=block.audio
        )
        curriculum = Curriculum(difficulty, block.epochs)
    return GlobalOrder(
        len(data.train), global_batch_size, seed, data.parts, curriculum=curriculum, earlier=earlier
    )


def loss_weights_of(
    data: PreparedData, block: SampleWeightsBlock | None, lengths: np.ndarray | None
) -> Callable[[np.ndarray], np.ndarray] | None:
    """The samples of a global batch [G] -> what they count in its loss [G] int64, millionths; None:
    all the same."""
    if block is None or block.use != "loss" or lengths is None:
        return None
    return partial(
        loss_weights,
        data.source,
        data.train,
        lengths,
        block.image,
        block.text,
        audio=block.audio,
    )
