"""What a run's data come to: the training samples, the sets held out, and the order of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.bad_samples import Absent, BadSample
from data.bad_tables import count_bad
from data.batching.laps import Shards
from data.batching.mixing import apportioned
from data.batching.mixture import Mixture
from data.batching.order import BatchSizes, GlobalOrder, Parts, Together
from data.batching.rows import Rows
from data.batching.stream_order import StreamOrder
from data.index.sources import KnownSource, Source
from data.stored.kinds import is_text

SAMPLES_LOOKED_INTO = 200  # of each data set, for modalities that none of them has
EXAMPLES = 100_000  # training samples of streams that make a tokenizer


@dataclass(frozen=True)
class HeldOut:
    """A named set of samples that training never sees: `subset` [n] of `source`."""

    source: KnownSource
    subset: np.ndarray


@dataclass(frozen=True)
class PreparedData:
    """The training samples `train` [N] of `source`, the held-out sets, and the tokenizer of both
    (None where no pair has texts).

    `parts`: (samples, weight) of each data set in `train`, none where there is one. `leaks`: what
    was found and dropped. `length_multiple`: what texts are padded to. `shards`: of each data set,
    where one is a stream. `seed`: of their order. `notes`: sentences for the first screen.
    """

    source: Source
    train: np.ndarray | Rows
    held_out: dict[str, HeldOut]
    tokenizer: PreTrainedTokenizerBase | None
    parts: Parts = ()
    leaks: Mapping[str, int] = field(default_factory=dict)
    length_multiple: int = 1
    shards: tuple[Shards, ...] = ()
    seed: int = 0
    notes: tuple[str, ...] = ()

    def order(
        self, global_batch_size: int, earlier: BatchSizes = (), film_clips: int = 1
    ) -> GlobalOrder:
        """In which the training samples come. `film_clips`: so many clips of a film stand together.
        Errors: ValueError where these are of streams."""
        sizes = (len(self.train), global_batch_size, self.seed, self.parts, earlier)
        if not self.shards:
            together = Together(self._films(), film_clips) if film_clips > 1 else None
            return GlobalOrder(*sizes, together=together)
        if film_clips > 1:
            raise ValueError(
                "argument --film-clips: the samples of a stream come shard by shard, so its films "
                "are not known beforehand; leave it out, or give data that is no stream"
            )
        return StreamOrder(*sizes, shards=self.shards)

    def _films(self) -> np.ndarray:
        """[N]: equal numbers for training samples that are clips of one film."""
        key = self.known.keys("video")[self.train[:]]
        label = np.unique(key, return_inverse=True)[1].reshape(-1)
        return np.where(key == 0, len(key) + np.arange(len(key)), label)

    @property
    def stream_order(self) -> StreamOrder:
        """As `order`, one sample after the other, of streams."""
        order = self.order(1)
        assert isinstance(order, StreamOrder)
        return order

    @property
    def known(self) -> KnownSource:
        """The source, where no data set is a stream."""
        assert not self.shards
        return cast(KnownSource, self.source)

    def examples(self, most: int = EXAMPLES) -> np.ndarray:
        """Training samples to try things on; of streams those that are needed first."""
        return self.train[self.example_numbers(most)]

    def example_numbers(self, most: int = EXAMPLES) -> np.ndarray:
        """Their numbers among the training samples. Of several data sets each has its share of an
        epoch in them."""
        parts = self.parts or ((len(self.train), 1.0),)
        visits = np.array([count * weight for count, weight in parts])
        wanted = apportioned(visits / max(1.0, visits.sum()), min(most, len(self.train)))
        found: list[np.ndarray] = []
        first = 0
        for number, (count, _) in enumerate(parts):
            near = self._first_needed(number, int(wanted[number])) if self.shards else None
            own = np.arange(count) if near is None else near
            found.append(first + own[: wanted[number]])
            first += count
        return np.concatenate(found)

    def _first_needed(self, number: int, least: int) -> np.ndarray:
        """The samples of the shards of a data set that are needed first, `least` or more where it
        has so many."""
        shards, coming = self.shards[number], self.stream_order.coming(number)
        last = int(np.searchsorted(np.cumsum(shards.counts[coming]), least)) + 1
        near = [
            shards.samples.starts[k] + np.arange(shards.counts[k]) for k in coming[:last].tolist()
        ]
        return np.concatenate([np.empty(0, np.int64), *near])

    def first_with(self, *modalities: str) -> int | None:
        """The first training sample that has a value of each of these; None: there is none. Of streams
        the shards that are needed first are looked into, and so are bad values found."""
        if not self.shards:
            train = self.train[:]
            lacking = [self.known.lacking(name)[train] for name in modalities]
            having = np.flatnonzero(~np.logical_or.reduce(lacking))
            return int(train[having[0]]) if len(having) else None
        looked_into = (self.looked_into(number) for number in range(len(self.shards)))
        return next((i for i in chain(*looked_into) if has_all(self.source, i, modalities)), None)

    def looked_into(self, number: int) -> list[int]:
        """Some samples of a data set, where one is a stream: of the shards that are needed first."""
        first = sum(int(each.counts.sum()) for each in self.shards[:number])
        near = first + self._first_needed(number, SAMPLES_LOOKED_INTO)
        return self.train[near[:: 1 + len(near) // SAMPLES_LOOKED_INTO]].tolist()

    @property
    def source_starts(self) -> tuple[int, ...] | None:
        """The first index in `source` of each of several data sets; None: there is one."""
        return self.source.starts if isinstance(self.source, Mixture) else None

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, where a pair has texts; else ValueError."""
        if self.tokenizer is None:
            raise ValueError(f"{self.source.spec}: no pair has texts, so there is no tokenizer")
        return self.tokenizer

    def summary(self) -> dict[str, Any]:
        return {
            "source": self.source.spec,
            "samples": len(self.source),
            "bad_samples": count_bad(self.source),
            **({"unused": self.source.unused()} if self.source.unused() else {}),
            "dropped_leaks": dict(self.leaks),
            "train_samples": len(self.train),
            "held_out_samples": {n: len(h.subset) for n, h in self.held_out.items()},
        }


def has_all(source: Source, i: int, modalities: Sequence[str]) -> bool:
    """Whether a sample has a value of each of these that can be read."""
    try:
        return all(
            source.captions(i) if is_text(name) else source.value(name, i) is not None
            for name in modalities
        )
    except (Absent, BadSample):
        return False
