"""Several data sets as one: their samples in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np

from data.batching.order import Parts
from data.concat import Concat
from data.identity import fingerprint
from data.index.mapped import UnusedCounts, add_unused
from data.index.sources import KnownSource, Source, open_source


def _of_its_source(name: str) -> Callable[..., Any]:
    """The method `name` of a sample's own source, called with the number that it has there."""

    def call(self: Mixture, i: int, *rest: Any) -> Any:
        _, source, own = self._of(i)
        return getattr(source, name)(own, *rest)

    return call


class Mixture:
    """The samples of `sources` one after the other. How often those of each come in an epoch is the
    order's affair."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.spec = " + ".join(source.spec for source in sources)
        self._samples = Concat(map(len, sources))

    @property
    def known(self) -> tuple[KnownSource, ...]:
        """The sources, where every sample of each was looked at beforehand."""
        return cast(tuple[KnownSource, ...], self.sources)

    def __len__(self) -> int:
        return len(self._samples)

    def identity(self, i: int) -> str:
        number, source, own = self._of(i)
        return f"{number}/{source.identity(own)}"

    captions = _of_its_source("captions")
    language = _of_its_source("language")
    where = _of_its_source("where")

    def value(self, modality: str, i: int) -> Any:
        _, source, own = self._of(i)
        return source.value(modality, own)

    def content_hash(self, modality: str, i: int) -> bytes:
        _, source, own = self._of(i)
        return source.content_hash(modality, own)

    def numbers(self, name: str, index: np.ndarray) -> np.ndarray:
        found = [
            (own, self.sources[n].numbers(name, within))
            for n, own, within in self._samples.split(index)
        ]
        together = np.zeros(len(index), found[0][1].dtype if found else np.int64)
        for own, values in found:
            together[own] = values
        return together

    def bad_counts(self) -> dict[str, int]:
        return dict(sum((Counter(source.bad_counts()) for source in self.sources), Counter()))

    def lacking(self, modality: str) -> np.ndarray:
        return np.concatenate([source.lacking(modality) for source in self.known])

    def column(self, name: str) -> np.ndarray:
        """[N], put together when first asked for: a copy, unlike that of a single source."""
        if name not in self._columns:
            self._columns[name] = np.concatenate([source.column(name) for source in self.known])
        return self._columns[name]

    def keys(self, kind: str) -> np.ndarray:
        """[N] uint64; ids of different sets are equal when their own are."""
        return np.concatenate([source.keys(kind) for source in self.known])

    def texts_fingerprint(self) -> str:
        return fingerprint([source.texts_fingerprint() for source in self.known])

    def usable(self) -> np.ndarray:
        return np.concatenate(
            [start + source.usable() for start, source in zip(self.starts, self.known)]
        )

    def bad_samples(self) -> Iterator[tuple[str, str, str, str]]:
        return self._numbered(source.bad_samples() for source in self.sources)

    def broken_values(self) -> Iterator[tuple[str, str, str, str]]:
        return self._numbered(source.broken_values() for source in self.sources)

    @staticmethod
    def _numbered(
        found: Iterable[Iterator[tuple[str, str, str, str]]],
    ) -> Iterator[tuple[str, str, str, str]]:
        for number, of_source in enumerate(found):
            for identity, where, reason, detail in of_source:
                yield f"{number}/{identity}", where, reason, detail

    def unused(self) -> UnusedCounts:
        total = UnusedCounts()
        for source in self.sources:
            add_unused(total, source.unused())
        return total

    def hints(self) -> list[str]:
        return [hint for source in self.sources for hint in source.hints()]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first index of each source."""
        return tuple(self._samples.starts[:-1].tolist())

    def parts(self, subset: np.ndarray, weights: Sequence[float]) -> Parts:
        """Of an ascending subset [n]: how many samples are of each source, and its weight."""
        ends = np.searchsorted(subset, self._samples.starts)
        return tuple(
            (int(count), float(weight))
            for count, weight in zip(np.diff(ends), weights, strict=True)
        )

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        return {}

    def __reduce__(self):
        return Mixture, (self.sources,)  # without the columns

    def _of(self, i: int) -> tuple[int, Source, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.spec}: there are 0..{len(self) - 1}")
        number, own = self._samples.part(i)
        return number, self.sources[number], own


def specs_of(source: Source) -> list[str]:
    """What `open_sources` opens it from."""
    return [each.spec for each in source.sources] if isinstance(source, Mixture) else [source.spec]


def joined(sources: Sequence[Source]) -> Source:
    """One data set as it is, several as a `Mixture`."""
    return sources[0] if len(sources) == 1 else Mixture(sources)


def open_sources(specs: Sequence[str], **building) -> KnownSource:
    """All of them, `joined`. Errors: ValueError, OSError; see `open_source`."""
    return cast(KnownSource, joined([open_source(spec, **building) for spec in specs]))


def source_names(specs: Sequence[str]) -> tuple[str, ...]:
    """Short and different: the kind of each spec and the last name in it, for example
    jsonl:pairs.jsonl; the second of a name has " 2"."""
    seen: Counter[str] = Counter()
    names = []
    for spec in specs:
        kind, _, where = spec.partition(":")
        last = where.partition("?")[0].rstrip("/").rpartition("/")[2]
        name = f"{kind}:{last}" if last else kind
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return tuple(names)
