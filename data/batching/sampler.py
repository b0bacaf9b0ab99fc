"""Which samples make which micro-batch, on which replica: pure functions of (seed, step), numpy
only.

G: global_batch_size, N: samples of the training subset, b: samples of one micro-batch.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from data.batching.balance import Dealer, GlobalBatch, InOrder
from data.batching.dealing import deal_window
from data.batching.draws import PARTS
from data.batching.feed import FeedRates
from data.batching.mixture import Parts
from data.batching.settings import Mixes, Settings
from data.batching.weights import Curriculum

BatchSizes = tuple[tuple[int, int], ...]  # (number of steps, samples of each), one after the other


@dataclass(frozen=True)
class _Stretch:
    """The steps of one size. They go on with `epoch`, of which steps of other sizes have taken
    `taken` samples, or with the next one where none of them fits."""

    size: int
    first_step: int
    visited: int  # samples of all steps before the first
    epoch: int
    taken: int
    epoch_samples: int

    def place(self, step: int) -> tuple[int, int, int]:
        """Of a step: its epoch, how many samples of it other sizes have taken, how many steps of
        this size come before it there."""
        within, first = step - self.first_step, (self.epoch_samples - self.taken) // self.size
        if within < first:
            return self.epoch, self.taken, within
        epochs, within = divmod(within - first, self.epoch_samples // self.size)
        return self.epoch + 1 + epochs, 0, within

    def first_of(self, epoch: int) -> int:
        """The first step of an epoch that begins in this stretch, or would if no other followed."""
        first = (self.epoch_samples - self.taken) // self.size
        return (
            self.first_step + first + (epoch - self.epoch - 1) * (self.epoch_samples // self.size)
        )


@dataclass(frozen=True)
class GlobalOrder:
    """The order of all training samples, the same for every branch, replica and world size.

    Epoch e visits the permutation of `np.random.default_rng([seed, e])`, G samples a step; a last
    partial global batch is dropped, so a sample comes at most once per epoch. Any step can be asked
    for, in any order; nothing is stored.

    `parts`, (number of samples, weight) each, divide the samples in their order: those of a part
    with weight w come w times an epoch. Of a weight's fraction f every epoch has another share, and
    1/f epochs in a row have each sample once more. Where a method is given `mixes`, the parts have
    other weights from those epochs on; an epoch stays as long as it was.

    `window` > 1: the samples of so many global batches in a row are sorted into batches of similar
    lengths, `lengths_of(visited [n], epoch)` -> [n]; a sample comes at most window − 1 steps
    earlier or later than it would. The last window of an epoch may be shorter.

    `curriculum`: its epochs visit the same samples as they would without it, in another order, from
    easy to hard.

    `earlier`: the sizes that global batches had before, each for so many steps; those after them
    have `global_batch_size`. Within an epoch a size goes on with the samples that the one before
    has left, in their order, so none comes twice, and windows begin anew. An epoch ends where those
    left do not fill a batch, before a change or after it.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    parts: Parts = ()
    window: int = 1
    lengths_of: Callable[[np.ndarray, int], np.ndarray] | None = None
    curriculum: Curriculum | None = None
    earlier: BatchSizes = ()

    def __post_init__(self) -> None:
        if self.global_batch_size < 1 or self.seed < 0:
            raise ValueError(
                f"global_batch_size {self.global_batch_size}, seed {self.seed}: >= 1 and >= 0 are "
                "needed"
            )
        if self.parts and (
            sum(count for count, _ in self.parts) != self.num_samples
            or any(weight < 0 for _, weight in self.parts)
        ):
            raise ValueError(
                f"parts {self.parts} of {self.num_samples} samples: they must add up, and weights "
                "must be >= 0"
            )
        if self.curriculum is not None and len(self.curriculum.difficulty) != self.num_samples:
            raise ValueError(
                f"a curriculum of {len(self.curriculum.difficulty)} samples for an order of "
                f"{self.num_samples}; they must be equal"
            )
        if self.epoch_samples < self.global_batch_size:
            raise ValueError(
                f"{self.epoch_samples} training samples do not fill one global batch of "
                f"{self.global_batch_size}; give more data, or set train_batch_size to at most "
                f"{self.epoch_samples}"
            )
        sizes = [*(size for _, size in self.earlier), self.global_batch_size]
        if min((number for number, _ in self.earlier), default=1) < 1 or any(
            one == other for one, other in zip(sizes, sizes[1:])
        ):
            raise ValueError(
                f"earlier {self.earlier}, then {self.global_batch_size}: >= 1 steps each are "
                "needed, and another size every time"
            )
        if not 1 <= min(sizes) <= max(sizes) <= self.epoch_samples:
            raise ValueError(
                f"earlier {self.earlier}: global batches of 1 to {self.epoch_samples} samples, an "
                "epoch, are needed; keep the data"
            )

    @property
    def epoch_samples(self) -> int:
        """How many are visited in an epoch, repetitions counted."""
        return _length(self.parts) if self.parts else self.num_samples

    def visits(self, step: int, mixes: Mixes = ()) -> tuple[float, ...]:
        """By part: how often each of its samples has come before `step`, on average. Within an
        epoch as shuffles do on average, which is what a curriculum comes to by the epoch's end; nan
        for a part without samples."""
        held, visits = self._mixes(mixes, self.epoch(step)), np.zeros(len(self.parts))
        visited = [
            self.samples_before(first)
            for first in (*(self.first_step(epoch) for epoch, _ in held), step)
        ]
        for (_, parts), before, after in zip(held, visited, visited[1:]):
            epochs = (
                after - before
            ) / self.epoch_samples  # the last few samples of an epoch wait for another one
            visits += [
                epochs * round(weight * count) / count if count else math.nan
                for count, weight in parts
            ]
        return tuple(visits.tolist())

    # -- where a step is in the data

    @property
    def steps_per_epoch(self) -> int:
        """Of an epoch that has `global_batch_size` from its beginning on."""
        return self.epoch_samples // self.global_batch_size

    @property
    def changed_at(self) -> int:
        """The first step that has `global_batch_size`."""
        return self._stretches[-1].first_step

    def batch_sizes(self, step: int) -> BatchSizes:
        """Those of the steps before `step`, which is later than `changed_at`: what was `earlier`
        for one that goes on there."""
        return (*self.earlier, (step - self.changed_at, self.global_batch_size))

    def epoch(self, step: int) -> int:
        return self._stretches[self._number(step)].place(step)[0]

    def first_step(self, epoch: int) -> int:
        """Of any epoch, also of those to come."""
        return next(
            each for each in reversed(self._stretches) if (each.epoch, each.taken) <= (epoch, 0)
        ).first_of(epoch)

    def ends_epoch(self, step: int) -> bool:
        """Do `step` steps end an epoch?"""
        return step > 0 and self.epoch(step) > self.epoch(step - 1)

    def samples_before(self, step: int) -> int:
        """How many `step` steps have visited."""
        stretch = self._stretches[self._number(step)]
        return stretch.visited + (step - stretch.first_step) * stretch.size

    def epochs_before(self, step: int) -> float:
        """As many have `step` steps ended, and of the one under way this part of its samples has
        been visited."""
        stretch = self._stretches[self._number(step)]
        epoch, taken, within = stretch.place(step)
        return epoch + (taken + within * stretch.size) / self.epoch_samples

    def _number(self, step: int) -> int:
        """That of the step's stretch."""
        return bisect_right(self._stretches, step, key=lambda stretch: stretch.first_step) - 1

    @cached_property
    def _stretches(self) -> tuple[_Stretch, ...]:
        stretches, first_step, visited, epoch, taken = [], 0, 0, 0, 0
        for number, size in (*self.earlier, (0, self.global_batch_size)):
            stretches.append(
                _Stretch(
                    size=size,
                    first_step=first_step,
                    visited=visited,
                    epoch=epoch,
                    taken=taken,
                    epoch_samples=self.epoch_samples,
                )
            )
            first_step, visited = first_step + number, visited + number * size
            epoch, taken, within = stretches[-1].place(first_step)
            taken += within * size
        return tuple(stretches)

    # -- which samples it has

    def _mixes(self, later: Mixes, epoch: int) -> Mixes:
        """All up to an epoch, from the first on. Errors: ValueError for one of other parts, or with
        which an epoch were not as long."""
        for start, parts in later:
            if [count for count, _ in parts] != [count for count, _ in self.parts] or _length(
                parts
            ) != self.epoch_samples:
                raise ValueError(
                    f"parts {parts} from epoch {start} on: those of {self.parts} with "
                    f"{self.epoch_samples} visits are needed"
                )
        return ((0, self.parts), *(mix for mix in later if mix[0] <= epoch))

    def batch(self, step: int, mixes: Mixes = ()) -> np.ndarray:
        """[G] int64: numbers 0..N-1 into the training subset, in the order of their positions in
        the global batch."""
        if step < 0:
            raise ValueError(f"step {step}: steps count from 0")
        number = self._number(step)
        epoch, _, within = self._stretches[number].place(step)
        row = _row(self, self._mixes(mixes, epoch), epoch, number)
        visited = row[self._places(row, epoch, number, within)[0]].astype(np.int64)
        visited.flags.writeable = False
        return visited

    def _places(self, row: np.ndarray, epoch: int, number: int, within: int) -> np.ndarray:
        """Places in the `row` that an epoch has for the `number`-th stretch: [batches left of a
        window, G], from the batch `within` on."""
        size, first = self._stretches[number].size, within - within % self.window
        last = min(first + self.window, len(row) // size)
        places = np.arange(first * size, last * size).reshape(last - first, size)
        if self.window > 1 and self.lengths_of is not None:
            lengths = self.lengths_of(row[places.ravel()].astype(np.int64), epoch).reshape(
                places.shape
            )
            places = places.ravel()[deal_window(lengths, (self.seed, epoch, first))]
        return places[within - first :]


@dataclass(frozen=True, eq=False)
class TextRows:
    """Texts [t], all int64: their samples in the source, their positions 0..c·G-1, their weights in
    millionths (None: all the same)."""

    index: np.ndarray
    position: np.ndarray
    weight: np.ndarray | None


@dataclass(frozen=True, eq=False)
class MicroBatchRequest:
    """What one micro-batch is to hold; small, so that it travels to the workers instead of the
    samples."""

    step: int  # evaluation: number of the micro-batch within its replica
    epoch: int  # evaluation: 0
    index: np.ndarray  # [b] int64, samples of the source
    position: (
        np.ndarray
    )  # [b] int64, where they stand in the global batch; evaluation: in the subset
    training: bool
    size: tuple[int, int] | None = (
        None  # H, W of its images, pixels, before the feed rates; None: that of the transform
    )
    feed_rates: FeedRates = field(default_factory=FeedRates)
    weight: np.ndarray | None = (
        None  # [b] int64, millionths: what each counts in the loss; None: all the same
    )
    dealt_texts: TextRows | None = (
        None  # texts that were dealt by themselves; None: all of its samples
    )

    def texts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of its texts [t]: the sample, the position 0..c·G-1, the number 0..c-1 among the c
        captions that the sample shows."""
        c = self.feed_rates.captions_per_image
        if self.dealt_texts is not None:
            return self.dealt_texts.index, self.dealt_texts.position, self.dealt_texts.position % c
        position = (self.position[:, None] * c + np.arange(c)).ravel()
        return np.repeat(self.index, c), position, position % c

    def text_weight(self) -> np.ndarray | None:
        """Of its texts [t]: the weight of the sample."""
        if self.dealt_texts is not None:
            return self.dealt_texts.weight
        return (
            None
            if self.weight is None
            else np.repeat(self.weight, self.feed_rates.captions_per_image)
        )


def _check_shares(global_batch_size: int, replicas: int, num_micro_batches: int) -> None:
    """Raises ValueError where a micro-batch would have no sample."""
    if min(replicas, num_micro_batches) < 1 or global_batch_size // replicas < num_micro_batches:
        raise ValueError(
            f"global_batch_size {global_batch_size} cannot be dealt to {replicas} replicas x "
            f"{num_micro_batches} micro-batches; each needs a sample"
        )


def training_requests(
    order: GlobalOrder,
    subset: np.ndarray,
    replica: int,
    replicas: int,
    branch: str,
    settings: Settings,
    start_step: int,
    stop_step: int,
    dealers: Sequence[Dealer] = (),
    weights_of: Callable[[np.ndarray], np.ndarray] | None = None,
    outlined: bool = False,
) -> Iterator[MicroBatchRequest | list[MicroBatchRequest]]:
    """The micro-batches of one replica of the line on which `branch` enters, for steps
    start_step..stop_step-1, in the order they are run.

    `subset` [N]: the source's indices of the training samples. `settings`: how many micro-batches,
    and the feed rates. `dealers`: which positions of a global batch come together, of the branches
    that enter there, one that deals samples and one that deals texts at most; none: in order.
    `weights_of`: the samples of a global batch [G] -> what they count in its loss [G] int64. The
    step after the one that is asked for is dealt in a thread of its own, so the settings of a step
    must be there when the micro-batches of the step before are asked for. `outlined`: before those
    of each step comes the list of them. Errors: ValueError.
    """
    _check_replica(replica, replicas)
    if len(subset) != order.num_samples:
        raise ValueError(
            f"the training subset has {len(subset)} samples, the order is made for "
            f"{order.num_samples}; they must be equal"
        )
    dealers = tuple(dict.fromkeys(dealers or (InOrder(),)))
    if any(dealer.equal_shares for dealer in dealers):
        _check_shares(
            order.global_batch_size, replicas, settings.at(start_step).num_micro_batches[branch]
        )

    def requests_of(step: int) -> list[MicroBatchRequest]:
        batch = global_batch(order, subset, settings, step)
        number = batch.setting.num_micro_batches[branch]
        weights = None if weights_of is None else weights_of(batch.indices)  # [G]
        nothing = np.zeros(0, dtype=np.int64)
        samples: list[tuple[np.ndarray, tuple[int, int] | None]] = [(nothing, None)] * number
        texts: list[TextRows | None] = [None] * number
        for dealer in dealers:
            own = dealer.shares(batch, replicas, number)[replica * number : (replica + 1) * number]
            if dealer.deals_texts:
                texts = [_text_rows(batch, position, weights) for position, _ in own]
            else:
                samples = own
        return [
            MicroBatchRequest(
                step=step,
                epoch=batch.epoch,
                index=batch.indices[position],
                position=position,
                training=True,
                size=size,
                feed_rates=batch.setting.feed_rates,
                weight=None if weights is None else weights[position],
                dealt_texts=rows,
            )
            for (position, size), rows in zip(samples, texts)
        ]

    return _one_ahead(requests_of, range(start_step, stop_step), outlined)


def _text_rows(batch: GlobalBatch, position: np.ndarray, weights: np.ndarray | None) -> TextRows:
    sample = position // batch.setting.feed_rates.captions_per_image
    return TextRows(batch.indices[sample], position, None if weights is None else weights[sample])


def global_batch(
    order: GlobalOrder, subset: np.ndarray, settings: Settings, step: int
) -> GlobalBatch:
    visited = order.batch(step, settings.mixes)  # [G]
    return GlobalBatch(
        step, order.epoch(step), visited, np.asarray(subset[visited]), settings.at(step)
    )


def _one_ahead(
    requests_of: Callable[[int], list[MicroBatchRequest]], steps: range, outlined: bool
) -> Iterator[MicroBatchRequest | list[MicroBatchRequest]]:
    with ThreadPoolExecutor(1, thread_name_prefix="deal") as pool:
        coming = None
        for step in steps:
            requests = coming.result() if coming else requests_of(step)
            coming = pool.submit(requests_of, step + 1) if step + 1 in steps else None
            if outlined:
                yield requests
            yield from requests


def evaluation_requests(
    subset: np.ndarray, replica: int, replicas: int, micro_batch_size: int
) -> list[MicroBatchRequest]:
    """One replica's share of the whole held-out subset [n], in order; shares are contiguous and
    differ by at most one.

    The last micro-batch may be smaller; a replica without a share gets none. Positions are 0..n-1
    over the subset.
    """
    _check_replica(replica, replicas)
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size {micro_batch_size}: a whole number >= 1 is needed")
    share = np.array_split(np.arange(len(subset), dtype=np.int64), replicas)[replica]
    parts = [
        share[start : start + micro_batch_size] for start in range(0, len(share), micro_batch_size)
    ]
    return [
        MicroBatchRequest(number, 0, subset[part], part, training=False)
        for number, part in enumerate(parts)
    ]


def _check_replica(replica: int, replicas: int) -> None:
    if not 0 <= replica < replicas:
        raise ValueError(
            f"replica {replica} of {replicas}: replicas count from 0, so 0..{replicas - 1} is "
            "needed"
        )


@lru_cache(maxsize=2)  # this epoch and, while workers load ahead, the next
def _row(order: GlobalOrder, mixes: Mixes, epoch: int, number: int) -> np.ndarray:
    """[n], the samples that an epoch has for its steps in the `number`-th stretch, in the order of
    their visits; 4 bytes each where that does. In one under way when the stretch began, those that
    the stretch before has left."""
    stretch = order._stretches[number]
    if epoch > stretch.epoch or not stretch.taken:
        visits, used = (
            _visits(order, mixes, epoch),
            order.epoch_samples // stretch.size * stretch.size,
        )
        return (
            visits
            if order.curriculum is None
            else np.concatenate([order.curriculum.arranged(visits[:used], epoch), visits[used:]])
        )
    row, before = _row(order, mixes, epoch, number - 1), order._stretches[number - 1]
    _, _, within = before.place(stretch.first_step)
    start = within - within % order.window
    if start == within:
        return row[within * before.size :]
    left = order._places(row, epoch, number - 1, within)
    return np.concatenate([row[np.sort(left, axis=None)], row[within * before.size + left.size :]])


def _visits(order: GlobalOrder, mixes: Mixes, epoch: int) -> np.ndarray:
    """[n], in the plain shuffle."""
    kind = np.int32 if order.num_samples <= np.iinfo(np.int32).max else np.int64
    samples = (
        _weighted(order.seed, mixes, epoch).astype(kind)
        if order.parts
        else np.arange(order.num_samples, dtype=kind)
    )
    np.random.default_rng([order.seed, epoch]).shuffle(samples)
    return samples


def _weighted(seed: int, mixes: Mixes, epoch: int) -> np.ndarray:
    chosen, start = [], 0
    for number, (count, weight) in enumerate(mixes[-1][1]):
        whole, share = _whole_and_share(count, weight)
        chosen += [np.arange(start, start + count)] * whole
        # shares are consecutive pieces of one endless row of permutations, so that none comes again
        # before all have come
        first = sum(
            epochs * _whole_and_share(*parts[number])[1] for epochs, parts in _held(mixes, epoch)
        )
        for lap in range(first // count, (first + share - 1) // count + 1) if share else ():
            permutation = np.random.default_rng([seed, lap, number, PARTS]).permutation(count)
            chosen.append(
                start + permutation[max(0, first - lap * count) : first + share - lap * count]
            )
        start += count
    return np.concatenate(chosen)


def _whole_and_share(count: int, weight: float) -> tuple[int, int]:
    """How often all samples of a part come in an epoch, and how many of them once more: of the
    weight's fraction."""
    return int(weight), round(weight * count) - int(weight) * count


def _held(mixes: Mixes, epochs: int) -> list[tuple[int, Parts]]:
    """For how many of the first `epochs` epochs there are which parts, in their order."""
    ends = [*(start for start, _ in mixes[1:]), math.inf]
    return [
        (int(min(end, epochs)) - start, parts)
        for (start, parts), end in zip(mixes, ends)
        if start < epochs
    ]


def _length(parts: Parts) -> int:
    return sum(round(weight * count) for count, weight in parts)
