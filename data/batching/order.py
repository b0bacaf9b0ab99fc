"""The order of the training samples: a pure function of (seed, step), numpy only.

N: training samples, G: samples of a global batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from data.batching.draws import PARTS

# (number of samples, weight) of each data set: how often a sample of it comes in an epoch
Parts = tuple[tuple[int, float], ...]
# (epoch, the parts that hold from it on), ascending
Mixes = tuple[tuple[int, Parts], ...]
# (number of steps, samples of each), one after the other
BatchSizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Together:
    """Samples that are to stand in a global batch together, such as the clips of a film. `label`
    [N]: equal for such samples; `number` of them stand side by side, which a batch may end
    between."""

    label: np.ndarray
    number: int

    def arranged(self, visits: np.ndarray) -> np.ndarray:
        """The visits [n] of an epoch in another order: with the first of each `number` of one label
        come the next ones."""
        place = np.argsort(self.label[visits], kind="stable")
        label = self.label[visits][place]
        begins = np.flatnonzero(np.append(True, label[1:] != label[:-1]))
        within = np.arange(len(label)) - np.repeat(begins, np.diff(np.append(begins, len(label))))
        first = place[np.arange(len(label)) - within % self.number]
        return visits[place[np.lexsort((place, first))]]


@dataclass(frozen=True)
class GlobalOrder:
    """The order of all training samples, the same for every branch, replica and world size.

    Epoch e visits the permutation of `np.random.default_rng([seed, e])`, G samples a step; a last
    partial global batch is dropped, so a sample comes at most once per epoch. Any step can be asked
    for, in any order; nothing is stored.

    `parts` divide the samples in their order: those of a part with weight w come w times an epoch.
    Of a weight's fraction f every epoch has another share, and 1/f epochs in a row have each sample
    once more. `mixes`: other weights of the parts from an epoch on; an epoch stays as long as it
    was.

    `earlier`: the sizes that global batches had before, each for so many steps; those after them
    have `global_batch_size`. Within an epoch a size goes on with the samples that the one before
    has left, so none comes twice. An epoch ends where those left do not fill a batch, before a
    change or after it.

    `together`: of the permutation the samples of one kind come side by side.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    parts: Parts = ()
    earlier: BatchSizes = ()
    mixes: Mixes = ()
    together: Together | None = None

    def __post_init__(self) -> None:
        counts, weights = zip(*self.parts) if self.parts else ((self.num_samples,), ())
        if sum(counts) != self.num_samples or not all(0 <= weight < math.inf for weight in weights):
            raise ValueError(
                f"parts {self.parts}: (samples, weight) of data sets with {self.num_samples} "
                "samples together and weights >= 0 are needed"
            )
        largest = max(size for _, size in (*self.earlier, (0, self.global_batch_size)))
        if self.epoch_samples < largest:
            raise ValueError(
                f"{self.epoch_samples} training samples do not fill one global batch of "
                f"{largest}; give more data, or set train_batch_size to at most "
                f"{self.epoch_samples}"
            )
        for epoch, parts in self.mixes:
            same_sets = [count for count, _ in parts] == [count for count, _ in self.parts]
            if not same_sets or _length(parts) != self.epoch_samples:
                raise ValueError(
                    f"parts {parts} from epoch {epoch} on: those of {self.parts} with "
                    f"{self.epoch_samples} visits are needed"
                )

    def with_mix(self, epoch: int, parts: Parts) -> GlobalOrder:
        """The same order up to `epoch`; from it on, samples come as often as `parts` say."""
        return replace(self, mixes=(*self.mixes, (epoch, parts)))

    # -- which samples a step has

    def batch(self, step: int) -> np.ndarray:
        """[G] int64: numbers 0..N-1 of the training samples, in the order of their positions in
        the global batch."""
        stretch = self._stretch(step)
        epoch, start = stretch.place(step)
        batch = self._visited(epoch, start, start + stretch.size)
        batch.flags.writeable = False
        return batch

    def _visited(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: the samples of so many visits of an epoch."""
        mixes = self._mixes_until(epoch)
        visits = _visits(self.seed, self.num_samples, mixes, epoch, self.together)
        return visits[start:stop].astype(np.int64)

    def visits(self, step: int) -> tuple[float, ...]:
        """By part: how often each of its samples has come before `step`, on average over shuffles;
        nan for a part without samples."""
        mixes, visits = self._mixes_until(self.epoch(step)), np.zeros(len(self.parts))
        starts = [self.samples_before(self.first_step(epoch)) for epoch, _ in mixes]
        for (_, parts), before, after in zip(
            mixes, starts, [*starts[1:], self.samples_before(step)]
        ):
            # the last few samples of an epoch wait for another one
            epochs = (after - before) / self.epoch_samples
            visits += [
                epochs * round(weight * count) / count if count else math.nan
                for count, weight in parts
            ]
        return tuple(visits.tolist())

    def _mixes_until(self, epoch: int) -> Mixes:
        return ((0, self.parts), *(mix for mix in self.mixes if mix[0] <= epoch))

    # -- where a step is in the data

    @property
    def epoch_samples(self) -> int:
        """How many samples are visited in an epoch, repetitions counted."""
        return _length(self.parts) if self.parts else self.num_samples

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that has `global_batch_size` from its beginning on."""
        return self.epoch_samples // self.global_batch_size

    def epochs_of(self, steps: int) -> int:
        """The fewest whole epochs that have so many steps."""
        return math.ceil(steps / self.steps_per_epoch)

    @property
    def changed_at(self) -> int:
        """The first step that has `global_batch_size`."""
        return self._stretches[-1].first_step

    def batch_sizes(self, step: int) -> BatchSizes:
        """Sizes of the steps before `step`, which is later than `changed_at`: what was `earlier`
        for a run that goes on there."""
        return (*self.earlier, (step - self.changed_at, self.global_batch_size))

    def epoch(self, step: int) -> int:
        return self._stretch(step).place(step)[0]

    def first_step(self, epoch: int) -> int:
        """The first step of any epoch, also of those to come."""
        begun = (
            each for each in reversed(self._stretches) if (each.epoch, each.taken) <= (epoch, 0)
        )
        return next(begun).first_step_of(epoch)

    def ends_epoch(self, step: int) -> bool:
        """Do `step` steps end an epoch?"""
        return step > 0 and self.epoch(step) > self.epoch(step - 1)

    def samples_before(self, step: int) -> int:
        """How many samples `step` steps have visited."""
        stretch = self._stretch(step)
        return stretch.visited + (step - stretch.first_step) * stretch.size

    def epochs_before(self, step: int) -> float:
        """How many epochs `step` steps have ended, and the part visited of the one under way."""
        epoch, start = self._stretch(step).place(step)
        return epoch + start / self.epoch_samples

    def _stretch(self, step: int) -> _Stretch:
        starts = [stretch.first_step for stretch in self._stretches]
        return self._stretches[bisect_right(starts, step) - 1]

    @cached_property
    def _stretches(self) -> tuple[_Stretch, ...]:
        """The steps of each size, in their order."""
        stretches: list[_Stretch] = []
        first_step = visited = epoch = taken = 0
        for number, size in (*self.earlier, (0, self.global_batch_size)):
            stretches.append(_Stretch(size, first_step, visited, epoch, taken, self.epoch_samples))
            first_step, visited = first_step + number, visited + number * size
            epoch, taken = stretches[-1].place(first_step)
        return tuple(stretches)


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

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and how many samples of it come before the step."""
        within, rest = step - self.first_step, (self.epoch_samples - self.taken) // self.size
        if within < rest:
            return self.epoch, self.taken + within * self.size
        epochs, within = divmod(within - rest, self.epoch_samples // self.size)
        return self.epoch + 1 + epochs, within * self.size

    def first_step_of(self, epoch: int) -> int:
        """The first step of an epoch that begins in this stretch, or would if no other followed."""
        first = self.first_step + (self.epoch_samples - self.taken) // self.size
        return first + (epoch - self.epoch - 1) * (self.epoch_samples // self.size)


@lru_cache(maxsize=2)  # this epoch and, while workers load ahead, the next
def _visits(
    seed: int, num_samples: int, mixes: Mixes, epoch: int, together: Together | None
) -> np.ndarray:
    """[n] the samples of an epoch in the order of their visits, 4 bytes each where that does.
    `mixes`: all until this epoch, from the first on."""
    kind = np.int32 if num_samples <= np.iinfo(np.int32).max else np.int64
    if mixes[-1][1]:
        samples = _weighted(seed, mixes, epoch).astype(kind)
    else:
        samples = np.arange(num_samples, dtype=kind)
    np.random.default_rng([seed, epoch]).shuffle(samples)
    return samples if together is None else together.arranged(samples)


def _weighted(seed: int, mixes: Mixes, epoch: int) -> np.ndarray:
    """The samples of an epoch, each as often as the weight of its part says."""
    chosen, start = [], 0
    ends = [*(first for first, _ in mixes[1:]), epoch]
    for number, (count, weight) in enumerate(mixes[-1][1]):
        whole, share = _whole_and_share(count, weight)
        chosen += [np.arange(start, start + count)] * whole
        # Shares are consecutive pieces of one endless row of permutations, so that no sample comes
        # again before all have come.
        first = sum(
            (end - begin) * _whole_and_share(*parts[number])[1]
            for (begin, parts), end in zip(mixes, ends)
        )
        for lap in range(first // count, (first + share - 1) // count + 1) if share else ():
            permutation = np.random.default_rng([seed, lap, number, PARTS]).permutation(count)
            piece = permutation[max(0, first - lap * count) : first + share - lap * count]
            chosen.append(start + piece)
        start += count
    return np.concatenate(chosen)


def _whole_and_share(count: int, weight: float) -> tuple[int, int]:
    """How often all samples of a part come in an epoch, and how many of them once more."""
    return int(weight), round(weight * count) - int(weight) * count


def _length(parts: Parts) -> int:
    return sum(round(weight * count) for count, weight in parts)
