"""Requests for micro-batches: what the workers of a loader are asked to make.

b: samples of one micro-batch, t: its texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from data.batching.load_control import FeedRates
from data.batching.shown import PhraseRows, Places, ShownAnnotations

Size = tuple[int, int]  # H, W in pixels


@dataclass(frozen=True, eq=False)
class TextRows:
    """Texts [t], all int64: their samples in the source, their positions 0..c·G-1, where c is the
    number of captions that a sample shows, and their weights in millionths (None: all the same).
    `phrases`: that were packed with them."""

    index: np.ndarray
    position: np.ndarray
    weight: np.ndarray | None
    phrases: PhraseRows | None = None


@dataclass(frozen=True, eq=False)
class MicroBatchRequest:
    """What one micro-batch is to hold; small, so that it travels to the workers instead of the
    samples."""

    step: int  # evaluation: number of the micro-batch within its replica
    epoch: int  # evaluation: 0
    index: np.ndarray  # [b] int64, samples of the source
    # [b] int64, where they stand in the global batch; evaluation: in the subset
    position: np.ndarray
    training: bool
    # H, W of its images, pixels, before the feed rates; None: that of the transform
    size: Size | None = None
    feed_rates: FeedRates = field(default_factory=FeedRates)
    # [b] int64, millionths: what each counts in the loss; None: all the same
    weight: np.ndarray | None = None
    packed_texts: TextRows | None = None  # texts that were packed by themselves; None: its samples'
    # of its samples, where a pair has annotations
    places: Places | None = None
    # of streams, by data set: the shards that this step and those near it read
    shards: Mapping[int, np.ndarray] | None = None
    view: np.ndarray | None = None  # [b] int64, which view of its sample each is; None: the first

    def with_views(self) -> MicroBatchRequest:
        """A request for each view that its images show, one after the other: the one at position p is
        view p mod c of c. In evaluation an image has one."""
        c = self.feed_rates.views_per_image if self.training else 1
        if c == 1:
            return self
        return replace(
            self,
            index=np.repeat(self.index, c),
            position=(self.position[:, None] * c + np.arange(c)).ravel(),
            weight=None if self.weight is None else np.repeat(self.weight, c),
            view=np.tile(np.arange(c), len(self.index)),
        )

    def drawn(self) -> list[tuple[int, int]]:
        """(sample, view) of each."""
        view = np.zeros_like(self.index) if self.view is None else self.view
        return list(zip(self.index.tolist(), view.tolist()))

    def texts(self) -> TextRows:
        """Its texts: those that were packed by themselves, else the c captions that each of its
        samples shows, one after the other. The text at position p is the (p mod c)-th of them."""
        if self.packed_texts is not None:
            return self.packed_texts
        c = self.feed_rates.captions_per_image
        position = (self.position[:, None] * c + np.arange(c)).ravel()
        weight = None if self.weight is None else np.repeat(self.weight, c)
        return TextRows(np.repeat(self.index, c), position, weight)

    def phrases(self) -> PhraseRows | None:
        """Those that were packed with its texts, else those of its samples; None where no pair has
        annotations."""
        if self.packed_texts is not None:
            return self.packed_texts.phrases
        return None if self.places is None else self.places.phrases(self.index, self.weight)


def check_replica(replica: int, replicas: int) -> None:
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} of {replicas}: give one from 0 to {replicas - 1}")


def evaluation_requests(
    subset: np.ndarray,
    replica: int,
    replicas: int,
    micro_batch_size: int,
    annotations: ShownAnnotations | None = None,
) -> list[MicroBatchRequest]:
    """One replica's share of the whole held-out subset [n], in order; shares are contiguous and
    differ by at most one.

    The last micro-batch may be smaller; a replica without a share gets none. Positions are 0..n-1
    over the subset. `annotations`: where a pair has them. Errors: ValueError.
    """
    check_replica(replica, replicas)
    share = np.array_split(np.arange(len(subset), dtype=np.int64), replicas)[replica]
    parts = [
        share[start : start + micro_batch_size] for start in range(0, len(share), micro_batch_size)
    ]
    every = None if annotations is None else annotations.places(subset, training=False)
    return [
        MicroBatchRequest(
            number,
            0,
            subset[part],
            part,
            training=False,
            places=None if every is None else every.of(part),
        )
        for number, part in enumerate(parts)
    ]
