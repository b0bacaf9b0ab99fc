"""Token counts of the captions of a stream, counted when a shard is read.

n: samples of a shard, T: their captions, G: samples of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.files import replacing
from data.batching.mixture import Mixture
from data.batching.rows import Rows
from data.batching.stream_order import StreamOrder
from data.concat import Concat
from data.identity import kept_name
from data.index.sources import Source
from data.modalities.lengths import (
    TOKENS_VERSION,
    Counts,
    TokenCounts,
    counts_of_captions,
    token_counts,
    tokenizer_digest,
)
from data.streams.source import OpenShard, StreamSource

SHARDS_KEPT = 256  # token counts of a shard of 10,000 texts take 100 KB


def stream_token_counts(
    source: Source,
    train: Rows,
    order: StreamOrder,
    tokenizer: PreTrainedTokenizerBase,
    max_text_tokens: int,
    folder: Path,
) -> Counts:
    """Token counts of the training samples of data sets of which some are streams; `folder`: for
    those of the others."""
    found: list[Counts] = []
    sources = source.sources if isinstance(source, Mixture) else (source,)
    for number, (each, (_, rows)) in enumerate(zip(sources, train.pieces)):
        if isinstance(each, StreamSource):
            first = int(order.coming(number)[0])
            found.append(StreamTokenCounts(each, tokenizer, max_text_tokens, first))
        else:
            assert not isinstance(rows, int)
            own = folder / str(number)
            found.append(token_counts(each, rows, tokenizer, max_text_tokens, own, True))
    return found[0] if len(found) == 1 else SeveralTokenCounts(found, train.sets)


class _InPieces:
    """Token counts that are those of several pieces in a row."""

    def _pieces(self, visited: np.ndarray) -> Iterator[tuple[np.ndarray, Counts, np.ndarray]]:
        """(positions in `visited`, token counts, numbers there) of the samples of each piece."""
        raise NotImplementedError

    def of(
        self, visited: np.ndarray, indices: np.ndarray, seed: int, epoch: int, captions: int = 1
    ) -> np.ndarray:
        found = np.zeros((len(visited), captions), np.int64)
        for own, counts, numbers in self._pieces(visited):
            found[own] = counts.of(numbers, indices[own], seed, epoch, captions)
        return found

    def longest(self, visited: np.ndarray, indices: np.ndarray) -> np.ndarray:
        found = np.zeros(len(visited), np.int64)
        for own, counts, numbers in self._pieces(visited):
            found[own] = counts.longest(numbers, indices[own])
        return found


class StreamTokenCounts(_InPieces):
    """As `TokenCounts`, where every sample of a stream is a training sample. Counts are kept beside
    their shard. `first_shard`: one that is at hand when a run begins."""

    def __init__(
        self,
        source: StreamSource,
        tokenizer: PreTrainedTokenizerBase,
        max_text_tokens: int,
        first_shard: int,
    ) -> None:
        self.source, self.tokenizer, self.max_text_tokens = source, tokenizer, max_text_tokens
        self.first_shard = first_shard

    @cached_property
    def _of_shard(self) -> Callable[[int], TokenCounts]:
        return lru_cache(SHARDS_KEPT)(self._counted)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_of_shard"}

    def typical(self) -> np.ndarray:
        return self._of_shard(self.first_shard).typical()

    def _pieces(self, visited: np.ndarray) -> Iterator[tuple[np.ndarray, Counts, np.ndarray]]:
        for shard, own, rows in self.source.samples.split(visited):
            yield own, self._of_shard(shard), rows

    @cached_property
    def _tokenizer(self) -> str:
        return tokenizer_digest(self.tokenizer)

    def _name(self, shard: int, opened: OpenShard) -> str:
        """Of the tokenizer, the index of the shard, which its columns and its content decide, and
        the rows that are samples."""
        kept = self.source.table.kept
        rows = int(self.source.table.marks[shard]) if kept else -1
        index = opened.source.index.folder.parent.name
        made_of = (self._tokenizer, self.max_text_tokens, index, rows, len(opened.rows))
        return f"{kept_name('tokens', TOKENS_VERSION, *made_of)}.npz"

    def count(self, shard: int, opened: OpenShard) -> Path:
        """Count those of a shard, unless that was done; the file that has them."""
        file = opened.folder / self._name(shard, opened)
        if not file.is_file():
            captions = map(opened.source.captions, opened.rows.tolist())
            counts, starts = counts_of_captions(captions, self.tokenizer, self.max_text_tokens)
            with replacing(file) as beside, beside.open("wb") as written:
                np.savez(written, counts=counts, starts=starts)
        return file

    def _counted(self, shard: int) -> TokenCounts:
        counts, starts = np.empty(0, np.uint16), np.zeros(1, np.int64)
        if not self.source.table.lost[shard]:
            with self.source.opened(shard) as opened:
                count = partial(self.count, shard, opened)
                with np.load(self.source.cache.write_beside(opened.held, count)) as found:
                    counts, starts = found["counts"], found["starts"]
        # samples that are announced and not there show an empty text
        missing = int(self.source.table.counts[shard]) - (len(starts) - 1)
        if missing > 0:
            (empty, _) = counts_of_captions([[]], self.tokenizer, self.max_text_tokens)
            counts = np.concatenate([counts, np.repeat(empty, missing)])
            starts = np.concatenate([starts, starts[-1] + np.arange(1, missing + 1)])
        return TokenCounts(counts, starts)


class SeveralTokenCounts(_InPieces):
    """Those of several data sets. `sets`: their training samples in a row."""

    def __init__(self, counts: Sequence[Counts], sets: Concat) -> None:
        self.counts, self.sets = tuple(counts), sets

    def typical(self) -> np.ndarray:
        """Of each data set in proportion to its training samples, as many as all are known of."""
        each, sizes = [counts.typical() for counts in self.counts], np.diff(self.sets.starts)
        known = [len(own) / size for own, size in zip(each, sizes) if size]
        numbers = np.ceil(min(known, default=0.0) * sizes).astype(int)
        return np.concatenate(
            [
                own[np.linspace(0, len(own) - 1, number).astype(int)]
                for own, number in zip(each, numbers)
                if number
            ]
        )

    def _pieces(self, visited: np.ndarray) -> Iterator[tuple[np.ndarray, Counts, np.ndarray]]:
        for number, own, rows in self.sets.split(visited):
            yield own, self.counts[number], rows


def of_streams(counts: Counts) -> dict[int, StreamTokenCounts]:
    """Those of the data sets that are streams, by their number."""
    every = counts.counts if isinstance(counts, SeveralTokenCounts) else (counts,)
    return {n: each for n, each in enumerate(every) if isinstance(each, StreamTokenCounts)}
