"""The global batches of a run, and the requests for their micro-batches: which samples, on which
replica.

Every rank works them out by itself, without communication: they are a pure function of seed, step
and settings, which are the same everywhere.

G: samples of a global batch, R: replicas of a branch, M: micro-batches of each, b: samples of one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.batching.buckets import Buckets
from data.batching.order import GlobalOrder
from data.batching.packing import Bounds, Packing, pack, padded_lengths
from data.batching.requests import MicroBatchRequest, Size, TextRows, check_replica
from data.batching.rows import Rows
from data.batching.settings import Setting, setting_at
from data.batching.shown import Places, ShownAnnotations
from data.batching.stream_order import StreamOrder
from data.stored.kinds import is_text, text_of

if TYPE_CHECKING:
    from data.modalities.lengths import Counts


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """`visited` [G]: numbers of the training samples; `indices` [G]: the same samples in the
    source; `setting`: what holds in this step."""

    step: int
    epoch: int
    visited: np.ndarray
    indices: np.ndarray
    setting: Setting
    places: Places | None = None  # where a pair has annotations


class Shares(NamedTuple):
    """How many rows come of a step, by their names: of each replica, where what makes them enters;
    and of all, of those that are not those of samples."""

    of_replicas: dict[str, list[int]]
    made: dict[str, int]


@dataclass(frozen=True, eq=False)
class TextPacker:
    """Packs texts by what they cost: those of similar lengths together, so equal work and little
    padding. Costs are those of the setting.

    It packs c · G texts where an image has c captions; those of the image at position p have the
    positions c · p .. c · p + c − 1. Texts alone, also where images share the stages: batch
    normalisation sees the images of a micro-batch, and a caption's length says what is in the
    image. `length_multiple`: to which lengths are rounded up.

    Where a pair has annotations, the phrases of these, and negatives, stand behind the c · G texts,
    each by itself as long as phrases are padded to, `phrase_tokens`; those of a sample have
    `sample_phrase_tokens` together.
    """

    tokens: Counts
    max_text_tokens: int
    seed: int
    bounds: Bounds = Bounds()
    num_stages: int = 1
    length_multiple: int = 1
    phrase_tokens: int = 0
    sample_phrase_tokens: float = 0.0

    def lengths(self, batch: GlobalBatch) -> np.ndarray:
        """[c · G] what the texts of a global batch are padded to alone; behind them phrases."""
        captions = batch.setting.feed_rates.captions_per_image
        counts = self.tokens.of(batch.visited, batch.indices, self.seed, batch.epoch, captions)
        if batch.places is not None:
            phrases = np.full(batch.places.num_phrases, self.phrase_tokens)
            counts = np.concatenate([counts.ravel(), phrases])
        return padded_lengths(counts, self.max_text_tokens, self.length_multiple).ravel()

    def pack(self, batch: GlobalBatch, replicas: int, numbers: Sequence[int]) -> Packing:
        """As many micro-batches, of `numbers`, as take least time. Where the texts do not fit, the
        limit of tokens is exceeded by as little as goes. Replicas with shares of their own get
        texts of all lengths alike, and each packs its own."""
        lengths = self.lengths(batch)
        shares = batch.setting.shares.get("text")
        if shares is None:
            return self._pack(lengths, batch.setting, replicas, numbers)
        # each for itself, so it can be one number only that all have
        (number,) = numbers
        sizes = sizes_of_shares(len(lengths), shares, number * self.bounds.min_size)
        dealt = dealt_alike(lengths, sizes)
        return [
            [own[part] for part in self._pack(lengths[own], batch.setting, 1, numbers)[0]]
            for own in dealt
        ]

    def _pack(
        self, lengths: np.ndarray, setting: Setting, replicas: int, numbers: Sequence[int]
    ) -> Packing:
        bounds, cost = self.bounds, setting.text_cost
        assert cost is not None
        while True:
            try:
                return pack(lengths, cost, replicas, numbers, self.num_stages, bounds)
            except ValueError:
                if bounds.max_tokens > lengths.max() * lengths.size:
                    raise  # not for want of memory
                bounds = replace(bounds, max_tokens=bounds.max_tokens * 9 // 8 + 1)


@dataclass
class Batches:
    """All global batches of a run: the order of the samples, and how they are packed.

    `train` [N]: the source's indices of the training samples. `buckets`: the shapes of their
    images; None: one square. `texts`: what packs texts by cost; None: they come with their samples,
    which are packed in order. `costs`: by branch, of those whose values do not cost alike, the
    source's indices of samples -> what each costs, such as the frames of its clip. `annotations`:
    which are shown, where a pair has them. `weights_of`: a global batch -> what its samples count
    in its loss, [G] int64 millionths; None: all the same. `examples`: numbers of training samples
    that stand for others that are not known yet; None: all are known. `keeps_shares`: whether
    `shares` is asked for every step. `texts_apart`: whether a stage that loads texts asks for
    nothing else of samples.

    `order` and `settings` change in the course of a run, for steps that no loader has begun with.
    """

    order: GlobalOrder
    train: np.ndarray | Rows
    settings: list[Setting]
    buckets: Buckets | None = None
    texts: TextPacker | None = None
    costs: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    annotations: ShownAnnotations | None = None
    weights_of: Callable[[GlobalBatch], np.ndarray] | None = None
    examples: np.ndarray | None = None
    keeps_shares: bool = False
    texts_apart: bool = False
    # of steps that were packed, and not asked for yet
    _shares: dict[int, Shares] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.train) != self.order.num_samples:
            raise ValueError(
                f"{len(self.train)} training samples, and an order of {self.order.num_samples}; "
                "make the order for as many as there are"
            )

    def at(self, step: int, setting: Setting | None = None) -> GlobalBatch:
        """The global batch of a step, under another setting than its own if one is given."""
        visited = self.order.batch(step)
        setting = setting_at(self.settings, step) if setting is None else setting
        indices = np.asarray(self.train[visited])
        return self._batch(step, self.order.epoch(step), visited, indices, setting)

    def _batch(
        self, step: int, epoch: int, visited: np.ndarray, indices: np.ndarray, setting: Setting
    ) -> GlobalBatch:
        places = None if self.annotations is None else self.annotations.places(indices)
        return GlobalBatch(step, epoch, visited, indices, setting, places)

    def like(self, step: int, setting: Setting) -> GlobalBatch:
        """A global batch to plan with: that of the step, or where its samples are not known yet,
        one of `examples`."""
        if self.examples is None:
            return self.at(step, setting)
        size, rng = self.order.global_batch_size, np.random.default_rng([self.order.seed, step])
        visited = rng.choice(self.examples, size)
        return self._batch(step, 0, visited, np.asarray(self.train[visited]), setting)

    def requests(
        self,
        branch: str,
        replica: int,
        replicas: int,
        start_step: int,
        stop_step: int,
        loads: Sequence[str] = (),
        meta_first: bool = False,
    ) -> Iterator[MicroBatchRequest | list[MicroBatchRequest]]:
        """The micro-batches of one replica of the stages on which `branch` enters, for steps
        start_step..stop_step-1, in the order they are run.

        `loads`: all branches that enter there, `branch` alone by default. The step after the one
        that is asked for is packed in a thread of its own, so the settings of a step must be there
        when the micro-batches of the step before are asked for. `meta_first`: before those of each
        step comes the list of them, of which the loader makes meta batches.
        """
        check_replica(replica, replicas)
        requests_of = partial(self._requests_of, branch, loads or (branch,), replica, replicas)
        return _one_ahead(requests_of, range(start_step, stop_step), meta_first)

    def shares(self, branch: str, loads: Sequence[str], replicas: int, step: int) -> Shares:
        """Of a step, whose requests are those of `requests`. To be asked for once a step, in their
        order: what was packed for the requests is not packed again."""
        if step not in self._shares:
            self._requests_of(branch, loads, 0, replicas, step)
        found = self._shares[step]
        for known in list(self._shares):  # another thread packs
            if known <= step:
                self._shares.pop(known)
        return found

    def _requests_of(
        self, branch: str, loads: Sequence[str], replica: int, replicas: int, step: int
    ) -> list[MicroBatchRequest]:
        batch = self.at(step)
        number = batch.setting.num_micro_batches[branch]
        weights = None if self.weights_of is None else self.weights_of(batch)  # [G]
        feed_rates = batch.setting.feed_rates
        live = self.order.live(step) if isinstance(self.order, StreamOrder) else None
        nothing = np.zeros(0, dtype=np.int64)
        samples: list[tuple[np.ndarray, Size | None]]
        samples = [(nothing, None) for _ in range(replicas * number)]
        if self.texts is None or not all(map(is_text, loads)):
            samples = self._samples(branch, batch, replica, replicas, number)
        packed: Packing | None = None
        if self.texts is not None and text_of(loads):
            packed = self.texts.pack(batch, replicas, (number,))
        if self.keeps_shares:
            parts = [part for part, _ in samples]
            self._shares[step] = _shares_of(batch, loads, _joined(parts, replicas), packed)
        own = slice(replica * number, (replica + 1) * number)
        texts: list[TextRows | None] = [None] * number
        if packed is not None:
            texts = [_text_rows(batch, position, weights) for position in packed[replica]]
        return [
            MicroBatchRequest(
                step=step,
                epoch=batch.epoch,
                index=batch.indices[position],
                position=position,
                training=True,
                size=size,
                feed_rates=feed_rates,
                weight=None if weights is None else weights[position],
                packed_texts=rows,
                places=None if batch.places is None else batch.places.of(position),
                shards=live,
            )
            for (position, size), rows in zip(samples[own], texts)
        ]

    def _arranges_own(self, branch: str) -> bool:
        is_stream = isinstance(self.order, StreamOrder)
        return is_stream and (self.texts is not None or branch in self.costs)

    def asks_own(self, branch: str) -> bool:
        """Whether a replica of a branch, but for texts, needs to know its own part alone of each
        global batch of a stream."""
        in_order = self.buckets is None and branch not in self.costs
        alone = self.weights_of is None and self.annotations is None
        return alone and (in_order or self._arranges_own(branch))

    def _samples(
        self, branch: str, batch: GlobalBatch, replica: int, replicas: int, number: int
    ) -> list[tuple[np.ndarray, Size | None]]:
        """Positions of each micro-batch and the size of its images, R · M of them: as equal as the
        global batch and the shares allow, and in the order of their buckets, so that most have one
        alone. The others have neighbouring shapes, and the size of most of their images. Where
        values of the branch do not cost alike: as much to do in each.

        Of a stream each replica arranges its own part alone, whose shards it reads; of the others
        only the samples of each replica are right. Where texts come with their images, micro-batches
        are those of the whole global batch, whatever the replicas of each branch.
        """
        shares = batch.setting.shares.get(branch)
        parts = in_parts(len(batch.visited), replicas, number, shares)
        if not self._arranges_own(branch):
            return self._arranged(branch, batch, np.arange(len(batch.visited)), parts, shares)
        mine = slice(replica * number, (replica + 1) * number)
        own = np.concatenate(parts[mine])
        within = np.split(np.arange(len(own)), np.cumsum([len(part) for part in parts[mine]])[:-1])
        found: list[tuple[np.ndarray, Size | None]] = [(part, None) for part in parts]
        found[mine] = self._arranged(branch, batch, own, within, None)
        return found

    def _arranged(
        self,
        branch: str,
        batch: GlobalBatch,
        positions: np.ndarray,
        parts: Sequence[np.ndarray],
        shares: Sequence[float] | None,
    ) -> list[tuple[np.ndarray, Size | None]]:
        """Of some positions [n] of a global batch as many micro-batches as `parts` of 0..n-1, which
        say how many samples each has where all cost alike. `shares`: of replicas, 1 where None."""
        if cost := self.costs.get(branch):
            replicas = 1 if shares is None else len(shares)
            dealt = dealt_by_cost(
                cost(batch.indices[positions]), replicas, len(parts) // replicas, shares
            )
            return [(positions[part], None) for part in dealt]
        if self.buckets is None:
            return [(positions[part], None) for part in parts]
        bucket = self.buckets.number[batch.visited[positions]]  # [n]
        by_bucket = np.argsort(bucket, kind="stable")
        return [
            (positions[own], self.buckets.sizes[int(np.bincount(bucket[own]).argmax())])
            for own in (by_bucket[part] for part in parts)
        ]


def _joined(parts: Sequence[np.ndarray], replicas: int) -> list[np.ndarray]:
    """Of each micro-batch, replica by replica -> of each replica."""
    number = len(parts) // replicas
    return [np.concatenate(parts[r * number : (r + 1) * number]) for r in range(replicas)]


def _shares_of(
    batch: GlobalBatch,
    loads: Sequence[str],
    samples: Sequence[np.ndarray],
    packed: Packing | None,
) -> Shares:
    """`samples`: positions of each replica's; `packed`: of its texts, where these are by
    themselves."""
    places, captions = batch.places, batch.setting.feed_rates.captions_per_image
    found = {
        name: [len(own) * batch.setting.feed_rates.rows(name) for own in samples] for name in loads
    }
    made = {}
    further = places.numbers() if places is not None else {}
    for (name, branch), numbers in further.items():
        made[name] = int(numbers.sum())
        if branch in loads:
            found[name] = [int(numbers[own].sum()) for own in samples]
    if packed is not None:
        texts, every = captions * len(batch.indices), map(np.concatenate, packed)
        counted = [(int((own < texts).sum()), len(own)) for own in every]
        text = text_of(loads)
        assert text is not None
        found[text] = [number for number, _ in counted]
        for name, branch in further:
            if branch == text:
                found[name] = [both - number for number, both in counted]
    return Shares(found, made)


def in_parts(
    global_batch_size: int,
    replicas: int,
    num_micro_batches: int,
    shares: Sequence[float] | None = None,
) -> list[np.ndarray]:
    """The positions of each micro-batch in order, R · M of them: the micro-batches of a replica
    differ by at most one sample, and so do those of replicas without `shares`. Errors: ValueError
    where one would have none."""
    if global_batch_size // replicas < num_micro_batches:
        raise ValueError(
            f"a global batch of {global_batch_size} samples for {replicas} replicas with "
            f"{num_micro_batches} micro-batches each: every micro-batch needs a sample, give fewer"
        )
    positions = np.arange(global_batch_size, dtype=np.int64)
    if shares is None:
        of_replicas = np.array_split(positions, replicas)
    else:
        sizes = sizes_of_shares(global_batch_size, shares, num_micro_batches)
        of_replicas = np.split(positions, np.cumsum(sizes)[:-1])
    return [part for own in of_replicas for part in np.array_split(own, num_micro_batches)]


def dealt_by_cost(
    costs: np.ndarray,
    replicas: int,
    num_micro_batches: int,
    shares: Sequence[float] | None = None,
) -> list[np.ndarray]:
    """As `in_parts`, with about as much of the `costs` [G] in each micro-batch, or as the replica's
    share says: the dearest first, each to the one that has least so far (LPT, Graham 1969)."""
    pieces = replicas * num_micro_batches
    if len(costs) < pieces:
        in_parts(len(costs), replicas, num_micro_batches)  # which says what is wrong
    share = np.repeat(np.ones(replicas) if shares is None else shares, num_micro_batches)
    lowest = [(0.0, piece) for piece in range(pieces)]
    dealt = np.empty(len(costs), dtype=np.int64)
    for position in np.argsort(-costs, kind="stable").tolist():
        load, piece = lowest[0]
        dealt[position] = piece
        heapq.heapreplace(lowest, (load + int(costs[position]) / share[piece], piece))
    return [np.flatnonzero(dealt == piece) for piece in range(pieces)]


def sizes_of_shares(number: int, shares: Sequence[float], least: int) -> np.ndarray:
    """[R] of `number` samples as many for each replica as its share says, at least `least`. Errors:
    ValueError where there are fewer."""
    if number < least * len(shares):
        raise ValueError(f"{number} samples are not {least} for each of {len(shares)} replicas")
    ends = np.rint(np.cumsum(shares) / np.sum(shares) * number).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    while sizes.min() < least:
        sizes[sizes.argmin()] += 1
        sizes[sizes.argmax()] -= 1
    return sizes


def dealt_alike(lengths: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Positions of `lengths` [G], `sizes` [R] of them for each replica: of all lengths alike."""
    at = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    turns = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(at, kind="stable")]
    order = np.argsort(lengths, kind="stable")
    return [np.sort(order[turns == replica]) for replica in range(len(sizes))]


def _text_rows(batch: GlobalBatch, position: np.ndarray, weights: np.ndarray | None) -> TextRows:
    phrases = None
    captions = batch.setting.feed_rates.captions_per_image
    if batch.places is not None:
        number = captions * len(batch.indices)
        every = batch.places.phrases(batch.indices, weights)  # in the order of their places
        phrases = every.of(position[position >= number] - number)
        position = position[position < number]
    sample = position // captions
    weight = None if weights is None else weights[sample]
    return TextRows(batch.indices[sample], position, weight, phrases)


def _one_ahead(
    requests_of: Callable[[int], list[MicroBatchRequest]], steps: range, meta_first: bool
) -> Iterator[MicroBatchRequest | list[MicroBatchRequest]]:
    with ThreadPoolExecutor(1, thread_name_prefix="pack") as pool:
        coming = None
        for step in steps:
            requests = coming.result() if coming else requests_of(step)
            coming = pool.submit(requests_of, step + 1) if step + 1 in steps else None
            if meta_first:
                yield requests
            yield from requests
