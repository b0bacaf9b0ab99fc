"""Several data sets as one: their samples in a row, and how often those of each set come in an
epoch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from data.index.mapped import UnusedCounts, add_unused
from data.index.sources import Source, open_source

Parts = tuple[
    tuple[int, float], ...
]  # (number of samples, weight) of each set: how often a sample of it comes in an epoch


class Mixture:
    """The samples of `sources` one after the other. How often those of each come in an epoch is the
    order's affair."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.spec = " + ".join(source.spec for source in sources)
        self._starts = np.cumsum([0, *map(len, sources)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def identity(self, i: int) -> str:
        number, source, own = self._of(i)
        return f"{number}/{source.identity(own)}"

    def captions(self, i: int) -> list[str]:
        _, source, own = self._of(i)
        return source.captions(own)

    def language(self, i: int) -> str | int | None:
        _, source, own = self._of(i)
        return source.language(own)

    def image_bytes(self, i: int) -> bytes:
        _, source, own = self._of(i)
        return source.image_bytes(own)

    def value(self, modality: str, i: int) -> Any:
        _, source, own = self._of(i)
        return source.value(modality, own)

    def lacking(self, modality: str) -> np.ndarray:
        return np.concatenate([source.lacking(modality) for source in self.sources])

    def content_hash(self, i: int) -> bytes:
        _, source, own = self._of(i)
        return source.content_hash(own)

    def audio_hash(self, i: int) -> bytes:
        _, source, own = self._of(i)
        return source.audio_hash(own)

    def where(self, i: int, modality: str | None = None) -> str:
        _, source, own = self._of(i)
        return source.where(own, modality)

    def column(self, name: str) -> np.ndarray:
        """[N], put together when first asked for: a copy, unlike that of a single source."""
        if name not in self._columns:
            self._columns[name] = np.concatenate([source.column(name) for source in self.sources])
        return self._columns[name]

    def keys(self, kind: str) -> np.ndarray:
        """[N] uint64; ids of different sets are equal when their own are."""
        return np.concatenate([source.keys(kind) for source in self.sources])

    def usable(self) -> np.ndarray:
        return np.concatenate(
            [start + source.usable() for start, source in zip(self._starts, self.sources)]
        )

    def bad_samples(self) -> Iterator[tuple[str, str, str, str]]:
        for number, source in enumerate(self.sources):
            for identity, where, reason, detail in source.bad_samples():
                yield f"{number}/{identity}", where, reason, detail

    def broken_values(self) -> Iterator[tuple[str, str, str, str]]:
        for number, source in enumerate(self.sources):
            for identity, where, reason, detail in source.broken_values():
                yield f"{number}/{identity}", where, reason, detail

    def unused(self) -> UnusedCounts:
        total = UnusedCounts()
        for source in self.sources:
            add_unused(total, source.unused())
        return total

    @property
    def starts(self) -> tuple[int, ...]:
        """The first index of each source."""
        return tuple(self._starts[:-1].tolist())

    def parts(self, subset: np.ndarray, weights: Sequence[float]) -> Parts:
        """Of an ascending subset [n]: how many samples are of each source, and its weight."""
        ends = np.searchsorted(subset, self._starts)
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
        number = int(np.searchsorted(self._starts, i, side="right")) - 1
        return number, self.sources[number], int(i - self._starts[number])


def specs_of(source: Source) -> list[str]:
    """What `open_sources` opens it from."""
    return [each.spec for each in source.sources] if isinstance(source, Mixture) else [source.spec]


def open_sources(specs: Sequence[str], **building) -> Source:
    """One data set as it is, several as a `Mixture`. Errors: ValueError, OSError; see
    `open_source`."""
    sources = [open_source(spec, **building) for spec in specs]
    return sources[0] if len(sources) == 1 else Mixture(sources)


# -- how often


def mixed(parts: Parts, temperature: float = 1.0, floors: Sequence[float] | None = None) -> Parts:
    """The same sets with the weights by which `temperature` and `floors` hold; an epoch stays as
    long as it was.

    With s = number · weight, the share of a set in an epoch is s^(1/T) / Σ s^(1/T). T = 1 is as the
    weights say, T -> ∞ the same for all; what multilingual BERT (Devlin 2018, exponent 1/T = 0.7)
    and XLM-R (Conneau et al. 2020, section 3.1, 0.3) do with languages. Then no share is below the
    floor of its set, see `raised_to_floors`. Shares become whole visits by largest remainders: a
    floor holds to within one sample.

    Errors: ValueError for a temperature not above 0, for floors that no shares can keep, for a set
    that its weight leaves without a visit.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature}: a number above 0 is needed")
    least = np.zeros(len(parts)) if floors is None else np.asarray(floors, np.float64)
    sizes = np.array([count * weight for count, weight in parts])
    for number, ((count, weight), floor) in enumerate(zip(parts, least, strict=True), 1):
        if floor > 0 and not count * weight:
            why = "no training samples" if not count else "weight 0"
            raise ValueError(
                f"data set {number} has {why}, and a floor of {floor:g}; give it the floor 0, or "
                "take it out of --data"
            )
    if not sizes.any():
        return parts
    shares = raised_to_floors(_shares(sizes, temperature), least)
    if not np.array_equal(shares, sizes / sizes.sum()):
        parts = _visited(parts, _whole(shares, sum(round(size) for size in sizes)))
    for number, ((count, weight), size) in enumerate(zip(parts, sizes), 1):
        if size > 0 and round(count * weight) == 0:
            raise ValueError(
                f"data set {number} has {count} training samples with a share of an epoch that is "
                "less than one of them; give it more in --data-weights, a floor in --data-floors, "
                "or take it out of --data"
            )
    return parts


def pulled(parts: Parts, factors: Sequence[float], floors: Sequence[float] | None = None) -> Parts:
    """The same sets with their weights times `factors` > 0; an epoch stays as long as it was. No
    share falls below its floor, and none below one visit, unless it is there already: that is where
    it stays."""
    visits = np.array([round(count * weight) for count, weight in parts])
    least = np.maximum(0.0 if floors is None else np.asarray(floors), 1 / visits.sum())
    shares = raised_to_floors(
        _shares(visits * np.asarray(factors), 1.0), np.minimum(least, visits / visits.sum())
    )
    found = _whole(shares, int(visits.sum()))
    return parts if np.array_equal(found, visits) else _visited(parts, found)


def _visited(parts: Parts, visits: np.ndarray) -> Parts:
    return tuple(
        (count, visit / count if count else 0.0)
        for (count, _), visit in zip(parts, visits.tolist())
    )


def _shares(sizes: np.ndarray, temperature: float) -> np.ndarray:
    if temperature == 1:
        return sizes / sizes.sum()
    scaled = (sizes / sizes.max()) ** (1 / temperature)
    return scaled / scaled.sum()


def raised_to_floors(shares: np.ndarray, floors: np.ndarray) -> np.ndarray:
    """Shares of 1 with none below its floor: those that are get it, the others give up in
    proportion to what they have, and so on while that brings another one below its own. Errors:
    ValueError when the floors are more than 1 together."""
    if (floors < 0).any() or math.fsum(floors) > 1 + 1e-9:
        raise ValueError(
            f"floors {floors.tolist()}: numbers of at least 0 are needed, together at most 1"
        )
    low = np.zeros(len(shares), bool)
    while True:
        others = shares[~low].sum()
        scale = max(0.0, 1 - floors[low].sum()) / others if others > 0 else 0.0
        raised = np.where(low, floors, shares * scale if low.any() else shares)
        below = ~low & (raised < floors)
        if not below.any():
            return raised
        low |= below


def _whole(shares: np.ndarray, total: int) -> np.ndarray:
    """[sets] int64 that add up to `total`, each the nearest below or above its share of it: largest
    remainders first (Hamilton's method)."""
    exact = shares * total
    visits = np.floor(exact).astype(np.int64)
    visits[np.argsort(visits - exact, kind="stable")[: total - visits.sum()]] += 1
    return visits


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
