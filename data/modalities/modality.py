"""Modalities: classes that turn samples into the tensors of a branch, one file each in this folder.

b: samples of a micro-batch, n: rows that a modality makes of them (b, or several per sample).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.bad_samples import Absent, BadSample
from data.batching.draws import AUGMENTATION, generator_of
from data.modalities.memory import empty
from data.stored.kinds import stored

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest
    from data.index.sources import Source

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Loaded:
    """The rows of one modality in a micro-batch.

    `tensors`: what enters the branch, each [n, ...]. `position` [n], `index` [n] int64: of each row
    its place in the global batch and its sample in the source. `weight` [n] int64 millionths: what
    each row counts in the loss; None: all the same. `key` [n] int64: equal for rows whose values
    are equal; None: all differ. `bad`: (index, reason, detail) of samples that could not be read,
    and `absent`: samples that do not have this modality; stand-ins have their places in `tensors`.
    `counts`: of `Modality.count_names`. `further`: rows beside those of the samples, by name.
    """

    tensors: dict[str, Tensor]
    position: np.ndarray
    index: np.ndarray
    weight: np.ndarray | None = None
    key: np.ndarray | None = None
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    counts: Mapping[str, float] = field(default_factory=dict)
    further: Mapping[str, Loaded] = field(default_factory=dict)

    @classmethod
    def of(cls, request: MicroBatchRequest, tensors: dict[str, Tensor]) -> Loaded:
        """One row for each sample of the request."""
        return cls(tensors, request.position, request.index, request.weight)


class Modality(ABC):
    """Makes the rows of one modality: a pure function of source, request and seed. Pickled, it
    travels to the loader's processes."""

    name: str
    """The name of the modality and its branch."""
    count_names: tuple[str, ...] = ()
    """The names in `Loaded.counts`, for metrics. Values that cannot be read are counted beside
    them (`MicroBatchDataset`)."""
    decodes = True
    """Whether a value may turn out bad while it is loaded; the others were read whole when the
    index was made."""

    @abstractmethod
    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        """The rows of the request's samples, in their order. Large tensors are best made by
        `data.modalities.memory.empty`."""

    def meta_batch(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        """Like `load`, with tensors of the same shapes and dtypes and of any values. To be
        overridden where these are known without reading the samples."""
        return self.load(source, request, seed)


class ValueModality(Modality):
    """A modality with one value per sample and one row for it: the base of a modality of one's own.

    A subclass says how a value becomes tensors. Samples without the modality, and values that
    `encode` refuses, are left out of the loss.
    """

    @abstractmethod
    def encode(self, value: Any, generator: np.random.Generator | None) -> dict[str, Tensor]:
        """The tensors of one sample, without a batch dimension and with equal shapes for all
        samples.

        `value`: what the data set holds. `generator`: for augmentation, drawn from seed, epoch and
        sample; None: evaluation. Raises BadSample for a value that cannot be used.
        """

    def row(
        self, source: Source, i: int, generator: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """The tensors of sample i. Raises Absent, BadSample."""
        return self.encode(source.value(self.name, i), generator)

    @abstractmethod
    def blank(self) -> dict[str, Tensor]:
        """Tensors shaped as those of `encode`, for a sample without a value in a micro-batch that
        has no other to show."""

    def load(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        def read(i: int, generator: np.random.Generator) -> dict[str, Tensor]:
            return self.row(source, i, generator if request.training else None)

        return with_tensors(*read_values(self.name, source, request, seed, read, self.blank))

    def meta_batch(self, source: Source, request: MicroBatchRequest, seed: int) -> Loaded:
        return shaped_as(self.blank(), request)


def with_tensors(rows: Sequence[Mapping[str, Tensor]], loaded: Loaded) -> Loaded:
    """Rows of a micro-batch that have no tensors yet, with those of each row."""
    for name, first in rows[0].items():
        out = empty((len(rows), *first.shape), first.dtype)
        loaded.tensors[name] = torch.stack([row[name] for row in rows], out=out)
    return loaded


def shaped_as(row: Mapping[str, Tensor], request: MicroBatchRequest) -> Loaded:
    """The rows of a micro-batch, each with tensors shaped as those of `row`, without values."""
    tensors = {
        name: tensor.to("meta").expand(len(request.index), *tensor.shape)
        for name, tensor in row.items()
    }
    return Loaded.of(request, tensors)


def read_values(
    modality: str,
    source: Source,
    request: MicroBatchRequest,
    seed: int,
    read: Callable[[int, np.random.Generator], Value],
    blank: Callable[[], Value],
) -> tuple[list[Value], Loaded]:
    """Call `read` for each sample of the request. Returns what it made, with stand-ins for samples
    for which it raised Absent or BadSample; and a `Loaded` that lists these and says which values
    are equal, still without tensors."""
    values: list[Value | None] = []
    key = stored(modality).equal_rows(source, request.index)
    loaded = replace(Loaded.of(request, {}), key=key)
    for i, view in request.drawn():
        generator = generator_of(seed, request.epoch, i, AUGMENTATION, view)
        try:
            values.append(read(i, generator))
        except Absent:
            values.append(None)
            loaded.absent.append(i)
        except BadSample as error:
            values.append(None)
            if not view:  # all views of it are bad
                loaded.bad.append((i, error.reason, f"{source.where(i, modality)}: {error.detail}"))
    return shown(values, blank), loaded


def shown(values: list[Value | None], blank: Callable[[], Value]) -> list[Value]:
    """Put another value of the list in the place of each None, by turns; `blank` where there is no
    other.

    A stand-in that is a real value leaves the statistics of batch normalisation near what they
    were.
    """
    readable = [value for value in values if value is not None] or [blank()]
    before = np.cumsum([value is not None for value in values])  # readable ones up to here
    return [
        readable[n % len(readable)] if value is None else value for value, n in zip(values, before)
    ]
