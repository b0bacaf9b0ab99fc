"""What is asked of all streams of a run, which may stand beside other data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from data.batching.mixture import Mixture
from data.index.sources import IndexedSource, KnownSource, Source
from data.streams.filters import Kept
from data.streams.source import StreamSource


def streams_of(source: Source) -> dict[int, StreamSource]:
    """Number of a data set -> the stream that it is."""
    sources = source.sources if isinstance(source, Mixture) else (source,)
    return {n: each for n, each in enumerate(sources) if isinstance(each, StreamSource)}


def texts_alone(source: Source) -> Source:
    """The same samples as far as texts go, for which less of streams is fetched."""
    return _seen(source, lambda stream: stream.texts_alone)


def checking_texts(source: Source) -> Source:
    """The same samples, where others read `texts_alone` of them."""
    return _seen(source, lambda stream: stream.checking_texts)


def _seen(source: Source, view: Callable[[StreamSource], StreamSource]) -> Source:
    """With another view of each stream."""
    if isinstance(source, StreamSource):
        return view(source)
    if isinstance(source, Mixture) and streams_of(source):
        return Mixture([_seen(each, view) for each in source.sources])
    return source


def keep_shards(source: Source, shards: Mapping[int, np.ndarray]) -> None:
    """Let go of all other shards. `shards`: by number of the data set."""
    for number, stream in streams_of(source).items():
        stream.keep(shards[number].tolist() if number in shards else ())


def stream_counts(source: Source) -> dict[str, float]:
    """What streams have counted since the last call; empty where there are none."""
    return dict(sum((Counter(s.taken_counts()) for s in streams_of(source).values()), Counter()))


def kept_samples(held_out: KnownSource, kept: Sequence[tuple[Kept | None, int]]) -> np.ndarray:
    """The usable samples of shards that were opened as known data sets, without what their streams
    leave out. `kept`: for each its stream's rows, and its number there."""
    mixture = held_out if isinstance(held_out, Mixture) else Mixture([held_out])
    found = []
    for source, start, (rows, shard) in zip(mixture.known, mixture.starts, kept, strict=True):
        assert isinstance(source, IndexedSource)
        own = source.usable()
        if rows is not None:
            own = np.intersect1d(own, rows.rows_of(shard, source))
        found.append(start + own)
    return np.concatenate(found)
