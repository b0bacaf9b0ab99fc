"""The rows of a global batch, gathered among the last stages, and which of them a term compares.

A global batch has G samples. A branch with c rows per sample gives them the places 0..cG−1: the row
at place p belongs to sample p // c. Every row carries the index of its sample in the data, which
must be the same in all branches.

Rows beside those of samples have items of their own, such as the regions of all images of the
batch, numbered 0..G−1 through the global batch; everything here holds for them as for samples, and
an item carries the index of the sample that it is of. Behind the rows of its items a side may have
more, which belong to nobody: they answer, and ask nothing.

A sample that lacks a part of a term, the row of one of its branches, is left out of that term: the
loss is the mean over the samples that have all. A row that could not be loaded comes as a stand-in; a
row of a modality that the sample does not have need not come at all. Every last stage learns of both
in the exchange, by the status of each row. Where one of a sample's several rows is missing, the sample
goes with all of them.

Every row carries a key of its value too: equal images, sounds or captions of different samples have
equal keys, and the loss decides what follows from that.

Rows may have weights, whole millionths: all rows of all branches of a term, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.communication import Communicator
from engine.loss_protocols import Side
from engine.objective import Comparison, Objective, Term

MAX_WEIGHT = 2**31 - 2  # millionths
# the status of a row: 0 at a place for which none came, else the sum of what holds
CAME, LOADED, WEIGHTED = 1, 2, 4
NUM_TAGS = 5


@dataclass(frozen=True)
class Rows:
    """Embeddings [b, D] float32 with the place of each row in the global batch, the index of its
    sample in the data set, its status, its weight, and the key of its value.

    All int64 [b]. Weights are millionths, at most `MAX_WEIGHT`; without `WEIGHTED` they say nothing.
    Rows with equal keys hold equal values.
    """

    embeds: Tensor
    position: Tensor
    index: Tensor
    status: Tensor
    weight: Tensor
    key: Tensor

    @classmethod
    def brought(cls, name: str, output: Mapping[str, Tensor]) -> Rows:
        """Those of a micro-batch. There an index below 0 stands for −1 − index, a sample that could not
        be loaded. Without keys no two samples are equal: the number of a sample is no hash by
        chance."""
        position, index = output[f"{name}_position"], output[f"{name}_index"]
        weight, is_loaded = output.get(f"{name}_weight"), index >= 0
        return cls(
            output[f"{name}_embeds"].detach(),
            position,
            torch.where(is_loaded, index, -1 - index),
            CAME + LOADED * is_loaded + WEIGHTED * (weight is not None),
            torch.zeros_like(position) if weight is None else weight,
            output.get(f"{name}_key", index),
        )

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All of them, in their order."""
        return cls(*(torch.cat(values) for values in zip(*(part._values for part in parts))))

    @property
    def _values(self) -> list[Tensor]:
        return [getattr(self, each.name) for each in fields(self)]

    def has(self, status: int) -> Tensor:
        """[b] bool."""
        return (self.status & status) > 0

    def tags(self) -> Tensor:
        """[b, NUM_TAGS] int64, as they travel."""
        return torch.stack(self._values[1:], 1)

    def chosen(self, rows: Tensor, position: Tensor) -> Rows:
        """Some of the `rows`, with other places."""
        return Rows(*(each[rows] for each in replace(self, position=position)._values))


class Numbers(NamedTuple):
    """Of the rows of one name in a global batch: how many items they are of, samples or others;
    rows of each; rows behind these, which belong to nobody."""

    items: int
    each: int = 1
    more: int = 0

    @property
    def places(self) -> int:
        return self.items * self.each + self.more


def numbers_of(
    objective: Objective,
    came: Mapping[str, int],
    num_samples: int,
    rows_per_sample: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Numbers]:
    """Of all rows in a batch of so many samples. `came`: all rows of the batch, by name, where a
    pair compares others than those of samples: all items of its first side come, and on its second
    those that are more belong to nobody. Raises RuntimeError where there are fewer."""
    numbers = {name: Numbers(num_samples, rows_per_sample.get(name, 1)) for name in objective.names}
    for term in objective.terms:
        for name in term.rows if term.made else ():
            items = came[term.rows[0]]
            numbers[name] = Numbers(items, more=came[name] - items)
            if came[name] < items:
                raise RuntimeError(
                    f"{items} rows of {term.rows[0]} came, and {came[name]} of {name}; each needs one"
                )
    return numbers


@dataclass(frozen=True)
class GatheredRows:
    """What one last stage knows after the branches have exchanged their rows; all by the names of
    rows."""

    own: Mapping[str, Rows]  # of those that are made here
    # of these and of their partners: one for each place, ascending, zero where no row came
    everyone: Mapping[str, Rows]
    # of those that are made here, [R] int64, in the order in which the replicas hold them
    places: Mapping[str, Tensor]
    counts: Mapping[str, Sequence[int]]  # of those that are made here: rows of each replica
    numbers: Mapping[str, Numbers]
    # how many rows there are to be; the others lack the modality
    num_rows: Mapping[str, int]


@dataclass(frozen=True)
class TermBatch:
    """What one last stage knows of a term that it takes part in: its own rows, and all rows of all
    sides, in global order; by the names of the rows.

    Samples that lack a part are in neither: B and b count the others, and places are
    numbered anew.
    """

    own: Mapping[str, Rows]
    everyone: Mapping[str, Side]  # in the order of the term
    # of the rows that are made here, as in `GatheredRows`: of all rows that the replicas brought
    counts: Mapping[str, Sequence[int]]
    places: Mapping[str, Tensor]  # −1: left out
    present: Mapping[str, Tensor]  # bool, which of the rows brought here are in `own`
    # [] how many places hold different samples in the two branches, or nothing where a row was to
    # come
    num_misaligned: Tensor
    num_not_loaded: int  # samples of which a half could not be loaded
    num_left_out: int  # these, and the samples that lack a part
    num_duplicates: int  # samples left in of which another one has an equal value

    @property
    def num_rows(self) -> int:
        """Of the first side that are left in."""
        return len(next(iter(self.everyone.values())).label)

    def restored(self, branch: str, values: Tensor) -> Tensor:
        """[b, …] of the own rows -> of all rows that this stage brought, zero where they
        were left out."""
        if self.num_left_out == 0:
            return values
        present = self.present[branch]
        all_rows = values.new_zeros(len(present), *values.shape[1:])
        return all_rows.index_copy_(0, rows_of(present, len(values)), values)


def gather(
    comm: Communicator,
    compared: Sequence[Comparison | Term],
    own: Mapping[str, Rows],
    counts: Mapping[str, Sequence[int]],
    numbers: Mapping[str, Numbers],
    num_rows: Mapping[str, int],
) -> GatheredRows:
    """Exchange the rows that are `compared` among all last stages, which call it together.

    `counts[name][r]`: rows of replica r of this stage, of each name that is made in it. `numbers`:
    of all names, in the global batch; `num_rows`: of those of which some samples lack the modality.
    """
    everyone, places = {}, {}
    for name, rows in own.items():
        everyone[name], places[name] = _gathered(comm, rows, counts[name], numbers[name].places)
    for name, source, target in _links(compared):
        if name in own and target not in comm.stage.last_of:
            mine = everyone[name]
            comm.cross(source, target, mine.embeds)
            comm.cross(source, target, mine.tags()[:, 1:])
        elif name not in own and target in comm.stage.last_of:
            like, number = next(iter(own.values())), numbers[name].places
            embeds = comm.cross(source, target, like.embeds.new_empty(number, like.embeds.shape[1]))
            tags = comm.cross(source, target, like.index.new_empty(number, NUM_TAGS - 1))
            position = torch.arange(number, device=tags.device)
            everyone[name] = Rows(embeds, position, *tags.unbind(1))
    num_places = {name: number.places for name, number in numbers.items()}
    return GatheredRows(own, everyone, places, counts, numbers, {**num_places, **num_rows})


def _links(compared: Sequence[Comparison | Term]) -> list[tuple[str, str, str]]:
    """(rows, the branch that makes them, a branch whose rows they are compared with), each once: the
    order in which last stages give them to each other."""
    ends = [permutations(zip(each.rows, each.branches), 2) for each in compared]
    return [*dict.fromkeys((*one, target) for each in ends for one, (_, target) in each)]


def _gathered(
    comm: Communicator, own: Rows, counts: Sequence[int], number: int
) -> tuple[Rows, Tensor]:
    """All `number` places of a branch, and those of all rows that came, as the replicas hold them.

    Of the embeddings there are two copies for a moment: as they come, and in order.
    """
    # where replicas have fewer rows than others, what stands behind them goes to one place more
    room = number + (min(counts) < max(counts))
    embeds = comm.gather_padded(own.embeds, counts)
    tags = comm.gather_padded(own.tags(), counts, fill=number)
    place, *others = tags.unbind(1)
    rows = Rows(
        embeds.new_zeros(room, embeds.shape[1]).index_copy_(0, place, embeds)[:number],
        torch.arange(number, device=place.device),
        *(place.new_zeros(room).index_copy_(0, place, each)[:number] for each in others),
    )
    return rows, comm.without_padding(place, counts)


class _Parts(NamedTuple):
    """Which of the G items have all parts of a term; all on the device."""

    left_out: Tensor  # [G] bool
    not_loaded: Tensor  # [G] bool
    num_misaligned: Tensor  # []


class _Counts(NamedTuple):
    """What the host must know of a term."""

    left_out: int  # samples
    not_loaded: int
    duplicates: int
    came: int  # rows of both branches
    unweighted: int  # of these
    weights: list[int]  # of all rows of each branch that are left in
    here: dict[str, int]  # of the branches that end here, own rows that are left in


def align(gathered: GatheredRows, term: Comparison | Term, alone: bool = True) -> TermBatch:
    """The rows of one term, without the samples that do not have all parts. Nothing is sent.

    `alone`: the objective has no other term. Errors: RuntimeError, the same on all last stages of
    the term, when some rows have weights and others have none, or where it is `alone` and all have
    weight 0.
    """
    rows = {name: gathered.everyone[name] for name in term.rows}
    own = {name: gathered.own[name] for name in term.rows if name in gathered.own}
    numbers = {name: gathered.numbers[name] for name in term.rows}
    parts = _parts(gathered, rows)
    num_samples = len(parts.left_out)
    left_out = {
        name: F.pad(parts.left_out.repeat_interleave(number.each), (0, number.more))
        for name, number in numbers.items()
    }
    present = {branch: ~left_out[branch][mine.position] for branch, mine in own.items()}
    counts = _counted(rows, parts, left_out, present, numbers)
    weighted = counts.unweighted < counts.came
    if weighted:
        _refuse_weights(term, counts, num_samples, alone)
        if counts.left_out < num_samples and not all(counts.weights):
            # few samples may have both parts of one of several pairs: as if there were none
            left_out = {branch: torch.ones_like(out) for branch, out in left_out.items()}
            present = {branch: torch.zeros_like(each) for branch, each in present.items()}
            counts = counts._replace(left_out=num_samples, here=dict.fromkeys(present, 0))
    label = {name: _label(number, rows[name].position) for name, number in numbers.items()}
    keys = dict.fromkeys(rows, None) if not counts.duplicates else _keys(rows, label, numbers)
    batch = TermBatch(
        own=own,
        everyone={
            branch: Side(
                each.embeds,
                label[branch],
                each.weight if weighted else None,
                keys[branch],
                each.index if term.made else None,
            )
            for branch, each in rows.items()
        },
        counts={branch: gathered.counts[branch] for branch in own},
        places={branch: gathered.places[branch] for branch in own},
        present=present,
        num_misaligned=parts.num_misaligned,
        num_not_loaded=counts.not_loaded,
        num_left_out=counts.left_out,
        num_duplicates=counts.duplicates,
    )
    if not counts.left_out:
        return batch
    num_left = {
        name: number._replace(items=num_samples - counts.left_out).places
        for name, number in numbers.items()
    }
    return _without(batch, left_out, num_left, counts.here)


def _parts(gathered: GatheredRows, rows: Mapping[str, Rows]) -> _Parts:
    # [G, c] each
    numbers = gathered.numbers
    indices = [_by_item(own.index, numbers[name]) for name, own in rows.items()]
    parts = [_by_item(own.has(CAME), numbers[name]).all(1) for name, own in rows.items()]
    came, reference = torch.stack(parts).all(0), indices[0][:, :1]
    others = torch.stack([(index != reference).any(1) for index in indices]).any(0)
    # A row that claims another one's place leaves its own empty. That is no sample without the
    # modality: those are reported beforehand.
    lost = sum(
        own.has(CAME).sum().sub(gathered.num_rows[branch]).abs() for branch, own in rows.items()
    )
    unread = [own.has(CAME) & ~own.has(LOADED) for own in rows.values()]
    not_loaded = torch.stack([_by_item(u, numbers[n]).any(1) for n, u in zip(rows, unread)]).any(0)
    # where rows are lost the step ends with an error, which all ranks learn with the metrics
    left_out = not_loaded | (~came & (lost == 0))
    return _Parts(left_out, not_loaded, (came & others).sum() + lost)


def _counted(
    rows: Mapping[str, Rows],
    parts: _Parts,
    left_out: Mapping[str, Tensor],
    present: Mapping[str, Tensor],
    numbers: Mapping[str, Numbers],
) -> _Counts:
    """The host waits for the device here, where the stage waits for the others anyway."""
    repeated = [_repeated(own.key, left_out[name], numbers[name]) for name, own in rows.items()]
    # rows that never came have neither a weight nor none
    unweighted = [own.has(CAME) & ~own.has(WEIGHTED) for own in rows.values()]
    counted = [
        parts.left_out.sum(),
        parts.not_loaded.sum(),
        torch.stack(repeated).any(0).sum(),
        torch.cat([own.has(CAME) for own in rows.values()]).sum(),
        torch.cat(unweighted).sum(),
        *((own.weight * ~left_out[branch]).sum() for branch, own in rows.items()),
        *(each.sum() for each in present.values()),
    ]
    out, not_loaded, duplicates, came, without, *others = torch.stack(counted).tolist()
    weights, here = others[: len(rows)], dict(zip(present, others[len(rows) :]))
    return _Counts(out, not_loaded, duplicates, came, without, weights, here)


def _refuse_weights(
    term: Comparison | Term, counts: _Counts, num_samples: int, alone: bool
) -> None:
    """Raise RuntimeError for weights of some rows only, and for rows that all have weight 0."""
    keys = " and ".join(f"{branch}_weight" for branch in term.rows)
    if counts.unweighted:
        what = " and ".join(f"{branch} rows" for branch in term.rows)
        raise RuntimeError(
            f"{counts.unweighted} of {counts.came} {what} of this batch came without a weight, the "
            f"others with one; give {keys} for all samples, or neither for any"
        )
    if alone and counts.left_out < num_samples and not all(counts.weights):
        raise RuntimeError(
            f"{', or '.join(f'all {branch} rows' for branch in term.rows)}, of this batch that could be "
            "loaded have weight 0, so there is no loss; give one of them a weight above 0 in "
            f"{keys}"
        )


def _by_item(values: Tensor, number: Numbers) -> Tensor:
    """[R] of all rows -> [G, c] of those that belong to items."""
    return values[: number.items * number.each].view(number.items, number.each)


def _label(number: Numbers, position: Tensor) -> Tensor:
    """[R]: the item of each row; −1: nobody's."""
    label = position // number.each
    return label.masked_fill(position >= number.items * number.each, -1) if number.more else label


def _repeated(key: Tensor, left_out: Tensor, number: Numbers) -> Tensor:
    """[G] bool: items with a row [R] whose key a row of another one has. Rows that are left out
    have none."""
    row = torch.arange(len(key), device=key.device)
    sample = row // number.each  # of rows that are nobody's one by itself, or a few
    alone = torch.iinfo(torch.int64).min + row  # each another, and no hash by chance
    ordered, order = torch.where(left_out, alone, key).sort(stable=True)
    whose = sample[order]
    equal = (ordered[1:] == ordered[:-1]) & (whose[1:] != whose[:-1])
    either = (F.pad(equal, (0, 1)) | F.pad(equal, (1, 0)))[: len(key)]  # there may be no row
    return _by_item(torch.zeros_like(either).index_copy_(0, order, either), number).any(1)


def _keys(
    rows: Mapping[str, Rows], label: Mapping[str, Tensor], numbers: Mapping[str, Numbers]
) -> dict[str, Tensor]:
    """[R, 1 + c] of each side: the key of each row, and those of the c rows of its item on the
    others (on its own, where there is no other); its own instead where it is nobody's."""
    keys = {}
    for name in rows:
        own, item = rows[name].key[:, None], label[name][:, None]
        partners = [
            _by_item(rows[other].key, numbers[other])[item[:, 0].clamp(min=0)]
            for other in [each for each in rows if each != name] or [name]
        ]
        keys[name] = torch.cat([own, *(torch.where(item < 0, own, each) for each in partners)], 1)
    return keys


def rows_of(wanted: Tensor, number: int) -> Tensor:
    """The rows that are `wanted` [b] bool, ascending: [number] int64. Whoever knows the number
    need not wait for the device, as with `nonzero`."""
    return wanted.logical_not().to(torch.int8).argsort(stable=True)[:number]


def _without(
    batch: TermBatch,
    left_out: Mapping[str, Tensor],
    num_left: Mapping[str, int],
    num_here: Mapping[str, int],
) -> TermBatch:
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
        weight, keys, sample = (
            None if each is None else each[kept] for each in (side.weight, side.keys, side.sample)
        )
        everyone[branch] = Side(side.embeds[kept], side.label[kept], weight, keys, sample)
    places = {branch: place[branch][each] for branch, each in batch.places.items()}
    return replace(batch, own=own, everyone=everyone, places=places)
