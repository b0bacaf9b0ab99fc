"""The rows of a global batch, gathered among the last stages, and which of them a pair compares.

A global batch has G samples. A branch with c rows per sample gives them the places 0..cG−1: the row
at place p belongs to sample p // c. Every row carries the index of its sample in the data, which
must be the same in all branches.

A sample that has only one half of a pair is left out of that pair: the loss is the mean over the
samples that have both. A row that could not be loaded comes with the index i as −1 − i; a row of a
modality that the sample does not have need not come at all. Every last stage learns of both in the
exchange. Where one of a sample's several rows is missing, the sample goes with all of them.

Every row carries a key of its value too: equal images, sounds or captions of different samples have
equal keys, and the loss decides what follows from that.

Rows may have weights, whole millionths: all rows of both branches of a pair, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.communication import Communicator
from engine.loss_protocols import Side
from engine.objective import Comparison, Objective

NOBODY = torch.iinfo(torch.int64).min  # at a place that no row claims
MAX_WEIGHT = 2**31 - 2  # millionths
NO_WEIGHT = -1


@dataclass(frozen=True)
class Rows:
    """Embeddings [b, D] float32 with the place of each row in the global batch, the index of its
    sample in the data set, its weight, and the key of its value.

    All int64 [b]. An index below 0 stands for −1 − index, a sample that could not be loaded;
    `NOBODY`: no row came for this place. Weights are millionths, at most `MAX_WEIGHT`; `NO_WEIGHT`
    where rows have none. Rows with equal keys hold equal values.
    """

    embeds: Tensor
    position: Tensor
    index: Tensor
    weight: Tensor
    key: Tensor

    @property
    def came(self) -> Tensor:
        """[b] bool."""
        return self.index != NOBODY

    def tags(self) -> Tensor:
        """[b, 4] int64, as they travel."""
        return torch.stack([self.position, self.index, self.weight, self.key], 1)

    def chosen(self, rows: Tensor, position: Tensor) -> Rows:
        """Some of the `rows`, with other places."""
        values = self.embeds, position, self.index, self.weight, self.key
        embeds, position, index, weight, key = (each[rows] for each in values)
        return Rows(embeds, position, index, weight, key)


@dataclass(frozen=True)
class GatheredRows:
    """What one last stage knows after the branches have exchanged their rows."""

    own: Mapping[str, Rows]  # of the branches that end here
    # of these and of their partners: one for each place, ascending, zero where no row came
    everyone: Mapping[str, Rows]
    # of the branches that end here, [R] int64, in the order in which the replicas hold them
    places: Mapping[str, Tensor]
    counts: Mapping[str, Sequence[int]]  # of the branches that end here: rows of each replica
    rows_per_sample: Mapping[str, int]
    # of each branch: how many places it is to have; the others lack its modality
    num_rows: Mapping[str, int]


@dataclass(frozen=True)
class PairBatch:
    """What one last stage knows of a pair that it takes part in: its own rows, and all rows of both
    branches, in global order.

    Samples that do not have both halves are in neither: B and b count the others, and places are
    numbered anew.
    """

    own: Mapping[str, Rows]
    everyone: Mapping[str, Side]  # the first branch of the pair, then the second
    # of the branches that end here, as in `GatheredRows`: of all rows that the replicas brought
    counts: Mapping[str, Sequence[int]]
    places: Mapping[str, Tensor]  # −1: left out
    present: Mapping[str, Tensor]  # branch -> bool, which of the rows brought here are in `own`
    # [] how many places hold different samples in the two branches, or nothing where a row was to
    # come
    num_misaligned: Tensor
    num_not_loaded: int  # samples of which a half could not be loaded
    num_left_out: int  # these, and the samples that do not have both halves
    num_duplicates: int  # samples left in of which another one has an equal value

    @property
    def num_rows(self) -> int:
        """Of the first branch that are left in."""
        return len(next(iter(self.everyone.values())).label)

    def restored(self, branch: str, values: Tensor) -> Tensor:
        """[b] or [b, D] of the own rows -> of all rows that this stage brought, zero where they
        were left out."""
        if self.num_left_out == 0:
            return values
        present = self.present[branch]
        all_rows = values.new_zeros(len(present), *values.shape[1:])
        return all_rows.index_copy_(0, rows_of(present, len(values)), values)


def gather(
    comm: Communicator,
    objective: Objective,
    own: Mapping[str, Rows],
    counts: Mapping[str, Sequence[int]],
    num_samples: int,
    rows_per_sample: Mapping[str, int],
    num_rows: Mapping[str, int],
    links: Sequence[tuple[str, str]] | None = None,
) -> GatheredRows:
    """Exchange rows among all last stages, which call it together.

    `counts[branch][r]`: rows of replica r of this stage, for each branch that ends in it.
    `num_samples`: of the global batch; `rows_per_sample`: of each branch, 1 where nothing is said;
    `num_rows`: of each branch of which some samples lack the modality. `links`: (from, to) of the
    branches that exchange rows; None: those that a loss compares.
    """
    rows_per_sample = {name: rows_per_sample.get(name, 1) for name in objective.names}
    num_places = {name: num_samples * number for name, number in rows_per_sample.items()}
    everyone, places = {}, {}
    for branch, rows in own.items():
        embeds = comm.gather_replicas(rows.embeds, counts[branch])
        tags = comm.gather_replicas(rows.tags(), counts[branch])
        everyone[branch] = _in_order(embeds, tags, num_places[branch])
        places[branch] = tags[:, 0]
    if len(own) == 1:  # a fork: the partners end elsewhere
        ((branch, mine),) = everyone.items()
        for source, target in objective.links if links is None else links:
            if branch == source:
                comm.cross(source, target, mine.embeds)
                comm.cross(source, target, mine.tags()[:, 1:])
            elif branch == target:
                number, width = num_places[source], mine.embeds.shape[1]
                embeds = comm.cross(source, target, mine.embeds.new_empty(number, width))
                tags = comm.cross(source, target, mine.index.new_empty(number, 3))
                position = torch.arange(number, device=tags.device)
                everyone[source] = Rows(embeds, position, *tags.unbind(1))
    return GatheredRows(own, everyone, places, counts, rows_per_sample, {**num_places, **num_rows})


def _in_order(embeds: Tensor, tags: Tensor, number: int) -> Rows:
    """Rows [r, D] with their tags [r, 4], as the replicas hold them -> all `number` places of the
    branch."""
    place, index, weight, key = tags.unbind(1)
    return Rows(
        embeds.new_zeros(number, embeds.shape[1]).index_copy_(0, place, embeds),
        torch.arange(number, device=place.device),
        place.new_full((number,), NOBODY).index_copy_(0, place, index),
        place.new_full((number,), NO_WEIGHT).index_copy_(0, place, weight),
        place.new_zeros(number).index_copy_(0, place, key),
    )


class _Halves(NamedTuple):
    """Which of the G samples have both halves of a pair; all on the device."""

    left_out: Tensor  # [G] bool
    not_loaded: Tensor  # [G] bool
    num_misaligned: Tensor  # []


class _Counts(NamedTuple):
    """What the host must know of a pair."""

    left_out: int  # samples
    not_loaded: int
    duplicates: int
    came: int  # rows of both branches
    unweighted: int  # of these
    weights: list[int]  # of all rows of each branch that are left in
    here: dict[str, int]  # of the branches that end here, own rows that are left in


def align_pair(gathered: GatheredRows, pair: Comparison, alone: bool = True) -> PairBatch:
    """The rows of one pair, without the samples that do not have both halves. Nothing is sent.

    `alone`: the objective has no other pair. Errors: RuntimeError, the same on all last stages of
    the pair, when some rows have weights and others have none, or where it is `alone` and all have
    weight 0.
    """
    rows = {branch: gathered.everyone[branch] for branch in pair.branches}
    own = {branch: gathered.own[branch] for branch in pair.branches if branch in gathered.own}
    halves = _halves(gathered, rows)
    num_samples = len(halves.left_out)
    left_out = {
        branch: halves.left_out.repeat_interleave(gathered.rows_per_sample[branch])
        for branch in rows
    }
    present = {branch: ~left_out[branch][mine.position] for branch, mine in own.items()}
    counts = _counted(rows, halves, left_out, present)
    weighted = counts.unweighted < counts.came
    if weighted:
        _refuse_weights(pair, counts, num_samples, alone)
        if counts.left_out < num_samples and not all(counts.weights):
            # few samples may have both halves of one of several pairs: as if there were none
            left_out = {branch: torch.ones_like(out) for branch, out in left_out.items()}
            present = {branch: torch.zeros_like(each) for branch, each in present.items()}
            counts = counts._replace(left_out=num_samples, here=dict.fromkeys(present, 0))
    sample = {
        branch: own.position // gathered.rows_per_sample[branch] for branch, own in rows.items()
    }
    keys = dict.fromkeys(rows, None) if not counts.duplicates else _keys(rows, sample, num_samples)
    batch = PairBatch(
        own=own,
        everyone={
            branch: Side(
                each.embeds, sample[branch], each.weight if weighted else None, keys[branch]
            )
            for branch, each in rows.items()
        },
        counts={branch: gathered.counts[branch] for branch in own},
        places={branch: gathered.places[branch] for branch in own},
        present=present,
        num_misaligned=halves.num_misaligned,
        num_not_loaded=counts.not_loaded,
        num_left_out=counts.left_out,
        num_duplicates=counts.duplicates,
    )
    if not counts.left_out:
        return batch
    num_left = {
        branch: (num_samples - counts.left_out) * gathered.rows_per_sample[branch]
        for branch in rows
    }
    return _without(batch, left_out, num_left, counts.here)


def _halves(gathered: GatheredRows, rows: Mapping[str, Rows]) -> _Halves:
    # [G, c] each
    first, second = (
        own.index.view(-1, gathered.rows_per_sample[branch]) for branch, own in rows.items()
    )
    came = (first != NOBODY).all(1) & (second != NOBODY).all(1)
    reference = _sample(first[:, :1])
    others = (_sample(first) != reference).any(1) | (_sample(second) != reference).any(1)
    # A row that claims another one's place leaves its own empty. That is no sample without the
    # modality: those are reported beforehand.
    lost = sum(own.came.sum().sub(gathered.num_rows[branch]).abs() for branch, own in rows.items())
    unread = [((index < 0) & (index != NOBODY)).any(1) for index in (first, second)]
    not_loaded = unread[0] | unread[1]
    # where rows are lost the step ends with an error, which all ranks learn with the metrics
    left_out = not_loaded | (~came & (lost == 0))
    return _Halves(left_out, not_loaded, (came & others).sum() + lost)


def _counted(
    rows: Mapping[str, Rows],
    halves: _Halves,
    left_out: Mapping[str, Tensor],
    present: Mapping[str, Tensor],
) -> _Counts:
    """The host waits for the device here, where the stage waits for the others anyway."""
    repeated = [
        _repeated(own.key, left_out[branch], len(halves.left_out)) for branch, own in rows.items()
    ]
    # rows that never came have neither a weight nor none
    unweighted = [(own.weight == NO_WEIGHT) & own.came for own in rows.values()]
    counted = [
        halves.left_out.sum(),
        halves.not_loaded.sum(),
        torch.stack(repeated).any(0).sum(),
        torch.cat([own.came for own in rows.values()]).sum(),
        torch.cat(unweighted).sum(),
        *((own.weight * ~left_out[branch]).sum() for branch, own in rows.items()),
        *(each.sum() for each in present.values()),
    ]
    out, not_loaded, duplicates, came, without, *others = torch.stack(counted).tolist()
    weights, here = others[: len(rows)], dict(zip(present, others[len(rows) :]))
    return _Counts(out, not_loaded, duplicates, came, without, weights, here)


def _refuse_weights(pair: Comparison, counts: _Counts, num_samples: int, alone: bool) -> None:
    """Raise RuntimeError for weights of some rows only, and for rows that all have weight 0."""
    keys = " and ".join(f"{branch}_weight" for branch in pair.branches)
    if counts.unweighted:
        what = " and ".join(f"{branch} rows" for branch in pair.branches)
        raise RuntimeError(
            f"{counts.unweighted} of {counts.came} {what} of this batch came without a weight, the "
            f"others with one; give {keys} for all samples, or neither for any"
        )
    if alone and counts.left_out < num_samples and not all(counts.weights):
        raise RuntimeError(
            f"all {pair.first} rows, or all {pair.second} rows, of this batch that could be "
            "loaded have weight 0, so there is no loss; give one of them a weight above 0 in "
            f"{keys}"
        )


def _repeated(key: Tensor, left_out: Tensor, num_samples: int) -> Tensor:
    """[G] bool: samples with a row [R] whose key a row of another sample has. Rows that are left
    out have none."""
    row = torch.arange(len(key), device=key.device)
    sample = row // (len(key) // num_samples)
    ordered, order = torch.where(left_out, NOBODY + row, key).sort(stable=True)
    whose = sample[order]
    equal = (ordered[1:] == ordered[:-1]) & (whose[1:] != whose[:-1])
    either = torch.cat([equal, equal.new_zeros(1)]) | torch.cat([equal.new_zeros(1), equal])
    return torch.zeros_like(either).index_copy_(0, order, either).view(num_samples, -1).any(1)


def _keys(
    rows: Mapping[str, Rows], sample: Mapping[str, Tensor], num_samples: int
) -> dict[str, Tensor]:
    """branch -> [R, 1 + c]: of each row, and of the c rows of its sample on the other side."""
    (first, mine), (second, partners) = rows.items()
    return {
        branch: torch.cat([own.key[:, None], other.key.view(num_samples, -1)[sample[branch]]], 1)
        for branch, own, other in ((first, mine, partners), (second, partners, mine))
    }


def _sample(index: Tensor) -> Tensor:
    return torch.where(index < 0, -1 - index, index)


def rows_of(wanted: Tensor, number: int) -> Tensor:
    """The rows that are `wanted` [b] bool, ascending: [number] int64. Whoever knows the number
    need not wait for the device, as with `nonzero`."""
    return wanted.logical_not().to(torch.int8).argsort(stable=True)[:number]


def _without(
    batch: PairBatch,
    left_out: Mapping[str, Tensor],
    num_left: Mapping[str, int],
    num_here: Mapping[str, int],
) -> PairBatch:
    """The rows that remain, numbered anew: `num_left` in all, `num_here` of those brought here."""
    place = {branch: torch.where(out, -1, (~out).cumsum(0) - 1) for branch, out in left_out.items()}
    own = {
        branch: rows.chosen(
            rows_of(batch.present[branch], num_here[branch]), place[branch][rows.position]
        )
        for branch, rows in batch.own.items()
    }
    everyone = {}
    for branch, side in batch.everyone.items():
        kept = rows_of(~left_out[branch], num_left[branch])
        weight, keys = (None if each is None else each[kept] for each in (side.weight, side.keys))
        everyone[branch] = Side(side.embeds[kept], side.label[kept], weight, keys)
    places = {branch: place[branch][each] for branch, each in batch.places.items()}
    return replace(batch, own=own, everyone=everyone, places=places)
