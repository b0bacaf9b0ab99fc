"""The exchange of a pair of branches: one exact loss over the global batch, shared out among the
last stages without a root.

For images U and texts V (or any two branches), with s = logit_scale_exp · U Vᵀ over all B of them,
InfoNCE with one text per image is

    L = 1/2B Σᵢ (rowᵢ − sᵢᵢ) + 1/2B Σⱼ (colⱼ − sⱼⱼ),      rowᵢ = logsumexpⱼ sᵢⱼ,   colⱼ = logsumexpᵢ sᵢⱼ
    ∂L/∂sᵢⱼ = (exp(sᵢⱼ − rowᵢ) + exp(sᵢⱼ − colⱼ) − 2·[i = j]) / 2B

A last stage of images computes its rows of s and so rowᵢ of its images; one of texts its columns
and so colⱼ of its texts. They exchange these B numbers, and each has the exact gradient of its own
embeddings. A last stage that has both branches and all replicas (R = 1) computes each block of s
once and uses it for both sides. A loss that judges each pair alone has nothing to exchange but the
embeddings. The formulas are the loss's own (`models/README.md`); here is who computes which rows of
them.

A global batch has G samples. A branch with c rows per sample gives them the places 0..cG−1: the row
at place p belongs to sample p // c. Every row carries the index of its sample in the data, which
must be the same in all branches.

A sample that has only one half of a pair is left out of that pair: the loss is the mean over the
samples that have both. A row that could not be loaded comes with the index i as −1 − i; a row of a
modality that the sample does not have need not come at all. Every last stage learns of both in the
exchange. Where one of a sample's several rows is missing, the sample goes with all of them.

Every row carries a key of its value too: equal images, sounds or captions of different samples have
equal keys, and the loss decides what follows from that.

Rows may have weights, whole millionths. A weight travels in the upper half of its row's place, so
that it costs no byte and every last stage sees who brought some: all rows of both branches, or
none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.communication import Communicator
from engine.objective import Comparison, Objective, Pair


class Side(NamedTuple):
    """All rows of a branch, in global order. Rows with equal labels belong together: the label is
    the place of the sample in the batch."""

    embeds: Tensor  # [B, D]
    label: Tensor  # [B] int64
    weight: Tensor | None  # [B] int64, millionths
    # [B, 1 + c] int64: of the row's own value, and of the c rows of its sample on the other side.
    # Equal keys are equal values. None: no two samples of the batch have equal ones.
    keys: Tensor | None = None


class LossPart(Protocol):
    """What some rows contribute to the loss."""

    @property
    def shares(self) -> Mapping[str, Tensor]:
        """branch -> [b], of the loss, of each of these rows."""

    @property
    def embeds(self) -> Mapping[str, Tensor]:
        """branch -> the whole ∂L/∂ of these rows [b, D]."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """∂L/∂ of the learned scalars from these rows; the rows of either side add up to the
        whole."""


class ContrastiveLoss(Protocol):
    """What the exchange asks of a loss; it knows nothing of processes. `sides`: of the two
    branches, the first of the pair first; `mine` [b]: places of own rows among those of the
    branch."""

    @property
    def parameters(self) -> Mapping[str, float]:
        """The [1]-shaped learned scalars it uses, with first values; the first branch emits
        them."""

    def statistics(
        self, sides: Mapping[str, Side], branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor | None:
        """[b], what the other side needs of these rows; None: nothing, whatever the rows."""

    def part(
        self,
        sides: Mapping[str, Side],
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> LossPart:
        """`statistics`: of all rows of both branches, where there are any. The parts of all rows
        of both branches add up to the loss."""

    def whole(self, sides: Mapping[str, Side], parameters: Mapping[str, Tensor]) -> LossPart:
        """All rows of both branches."""

    def constrained(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The whole gradients of the scalars as the optimizer is to see them."""


NOBODY = torch.iinfo(torch.int64).min  # at a place that no row claims
MAX_WEIGHT = 2**31 - 2  # millionths
NO_WEIGHT = -1
_PLACES = 2**32


@dataclass(frozen=True)
class Rows:
    """Embeddings [b, D] float32 with the place of each row in the global batch, the index of its
    sample in the data set, its weight, and the key of its value.

    All int64 [b]. An index below 0 stands for −1 − index, a sample that could not be loaded.
    Weights are millionths, at most `MAX_WEIGHT`; `NO_WEIGHT` where rows have none. Rows with equal
    keys hold equal values.
    """

    embeds: Tensor
    position: Tensor
    index: Tensor
    weight: Tensor
    key: Tensor

    def tags(self) -> Tensor:
        """[b, 3] int64, as they travel: weight and place, index, key."""
        placed = (self.weight - NO_WEIGHT) * _PLACES + self.position
        return torch.stack([placed, self.index, self.key], 1)


@dataclass(frozen=True)
class Gathered:
    """All rows of one branch, in global order: as its replicas brought them, before anything is
    left out of a pair."""

    embeds: Tensor  # [R, D] float32; zero where no row came
    index: Tensor  # [R] int64; `NOBODY` where no row came
    weight: Tensor  # [R] int64; `NO_WEIGHT` where the row has none
    key: Tensor  # [R] int64


@dataclass(frozen=True)
class Arrived:
    """What one last stage knows after the branches have exchanged their rows."""

    own: Mapping[str, Rows]  # of the branches that end here
    everyone: Mapping[str, Gathered]  # of these and of their partners
    places: Mapping[
        str, Tensor
    ]  # of the branches that end here, [R] int64, in the order in which the replicas hold them
    counts: Mapping[str, Sequence[int]]  # of the branches that end here: rows of each replica
    rows_per_sample: Mapping[str, int]
    num_rows: Mapping[
        str, int
    ]  # of each branch: how many places it is to have; the others lack its modality


@dataclass(frozen=True)
class Meeting:
    """What one last stage knows of a pair that it takes part in: its own rows, and all rows of both
    branches, in global order.

    Samples that do not have both halves are in neither: B and b count the others, and places are
    numbered anew.
    """

    own: Mapping[str, Rows]
    everyone: Mapping[str, Side]  # the first branch of the pair, then the second
    # of the branches that end here, as in `Arrived`: of all rows that the replicas brought
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


@dataclass(frozen=True)
class LossResult:
    """What this stage's own rows add to the loss of a pair, and ∂L/∂ of its own embeddings and of
    the loss's scalars."""

    shares: Mapping[str, Tensor]  # branch -> [b], of the rows that the meeting left in
    embeds: Mapping[str, Tensor]
    parameters: Mapping[
        str, Tensor
    ]  # by the loss's names; empty where the first branch does not end here

    @property
    def share(self) -> Tensor:
        """[], those of all last stages add up to the loss."""
        first, *others = (shares.sum() for shares in self.shares.values())
        return sum(others, start=first)


def gather(
    comm: Communicator,
    objective: Objective,
    own: Mapping[str, Rows],
    counts: Mapping[str, Sequence[int]],
    num_samples: int,
    rows_per_sample: Mapping[str, int],
    num_rows: Mapping[str, int],
    links: Sequence[tuple[str, str]] | None = None,
) -> Arrived:
    """Exchange rows among all last stages, which call it together.

    `counts[branch][r]`: rows of replica r of this stage, for each branch that ends in it.
    `num_samples`: of the global batch; `rows_per_sample`: of each branch, 1 where nothing is said;
    `num_rows`: of each branch of which some samples lack the modality. `links`: (from, to) of the
    branches that exchange rows; None: those that a loss compares.
    """
    rows_per_sample = {name: rows_per_sample.get(name, 1) for name in objective.names}
    num_rows = {
        name: num_rows.get(name, num_samples * number) for name, number in rows_per_sample.items()
    }
    gathered = {
        branch: (
            comm.gather_replicas(rows.embeds, counts[branch]),
            comm.gather_replicas(rows.tags(), counts[branch]),
        )
        for branch, rows in own.items()
    }
    places = {branch: tags[:, 0] % _PLACES for branch, (_, tags) in gathered.items()}
    ordered = {
        branch: _in_order(embeds, tags, num_samples * rows_per_sample[branch])
        for branch, (embeds, tags) in gathered.items()
    }
    if len(own) == 1:  # a fork: the partners end elsewhere
        ((branch, mine),) = ordered.items()
        for source, target in objective.links if links is None else links:
            if branch == source:
                comm.cross(source, target, mine.embeds)
                comm.cross(source, target, torch.stack([mine.index, mine.weight, mine.key], 1))
            elif branch == target:
                number = num_samples * rows_per_sample[source]
                embeds = comm.cross(
                    source, target, mine.embeds.new_empty(number, mine.embeds.shape[1])
                )
                labels = comm.cross(source, target, mine.index.new_empty(number, 3))
                ordered[source] = Gathered(embeds, *labels.unbind(1))
    return Arrived(
        own=own,
        everyone=ordered,
        places=places,
        counts=counts,
        rows_per_sample=rows_per_sample,
        num_rows=num_rows,
    )


def _in_order(embeds: Tensor, tags: Tensor, number: int) -> Gathered:
    """Rows [r, D] with their tags [r, 3], as the replicas hold them -> all `number` places of the
    branch."""
    place, weight = tags[:, 0] % _PLACES, tags[:, 0] // _PLACES + NO_WEIGHT
    return Gathered(
        embeds.new_zeros(number, embeds.shape[1]).index_copy_(0, place, embeds),
        place.new_full((number,), NOBODY).index_copy_(0, place, tags[:, 1]),
        place.new_full((number,), NO_WEIGHT).index_copy_(0, place, weight),
        place.new_zeros(number).index_copy_(0, place, tags[:, 2]),
    )


def meet(arrived: Arrived, pair: Comparison, alone: bool = True) -> Meeting:
    """The rows of one pair, without the samples that do not have both halves. Nothing is sent.

    `alone`: the objective has no other pair. Errors: RuntimeError, the same on all last stages of
    the pair, when some rows have weights and others have none, or where it is `alone` and all have
    weight 0.
    """
    rows = {branch: arrived.everyone[branch] for branch in pair.branches}
    first, second = (
        rows[branch].index.view(-1, arrived.rows_per_sample[branch]) for branch in pair.branches
    )  # [G, c] each
    came = (first != NOBODY).all(1) & (second != NOBODY).all(1)  # [G]
    reference = _sample(first[:, :1])
    misaligned = (
        came & ((_sample(first) != reference).any(1) | (_sample(second) != reference).any(1))
    ).sum()
    # A row that claims another one's place leaves its own empty. That is no sample without the
    # modality: those are reported beforehand.
    lost = sum(
        (own.index != NOBODY).sum().sub(arrived.num_rows[branch]).abs()
        for branch, own in rows.items()
    )
    not_loaded = ((first < 0) & (first != NOBODY)).any(1) | ((second < 0) & (second != NOBODY)).any(
        1
    )
    out = not_loaded | (
        ~came & (lost == 0)
    )  # where rows are lost the step ends with an error, which all ranks learn with the metrics
    left_out = {
        branch: out.repeat_interleave(arrived.rows_per_sample[branch]) for branch in pair.branches
    }
    # rows that never came have neither a weight nor none
    unweighted = [(own.weight == NO_WEIGHT) & (own.index != NOBODY) for own in rows.values()]
    came_here = torch.stack([(own.index != NOBODY).sum() for own in rows.values()]).sum()
    weight_left = [(own.weight * ~left_out[branch]).sum() for branch, own in rows.items()]
    mine = {branch: arrived.own[branch] for branch in pair.branches if branch in arrived.own}
    present = {branch: ~left_out[branch][own.position] for branch, own in mine.items()}
    num_present = [each.sum() for each in present.values()]
    repeated = [_repeated(rows[branch].key, left_out[branch], len(out)) for branch in rows]
    duplicates = torch.stack(repeated).any(0).sum()
    counted = [out.sum(), not_loaded.sum(), duplicates, torch.cat(unweighted).sum(), came_here]
    # the host waits for the device here, where the stage waits for the others anyway
    num_left_out, num_not_loaded, num_duplicates, num_unweighted, num_came, *left = torch.stack(
        [*counted, *weight_left, *num_present]
    ).tolist()
    left, num_here = left[: len(rows)], dict(zip(present, left[len(rows) :]))
    what = " and ".join(f"{branch} rows" for branch in pair.branches)
    keys = " and ".join(f"{branch}_weight" for branch in pair.branches)
    if 0 < num_unweighted < num_came:
        raise RuntimeError(
            f"{num_unweighted} of {num_came} {what} of this batch came without a weight, the "
            f"others with one; give {keys} for all samples, or neither for any"
        )
    weighted = num_unweighted < num_came
    if weighted and num_left_out < len(out) and not all(left):
        if alone:
            raise RuntimeError(
                f"all {pair.first} rows, or all {pair.second} rows, of this batch that could be "
                "loaded have weight 0, so there is no loss; give one of them a weight above 0 in "
                f"{keys}"
            )
        # few samples may have both halves of one of several pairs: as if there were none
        num_left_out = len(out)
        left_out = {branch: torch.ones_like(each) for branch, each in left_out.items()}
        present = {branch: torch.zeros_like(each) for branch, each in present.items()}
        num_here = dict.fromkeys(present, 0)
    sample = {
        branch: torch.arange(len(own.index), device=own.index.device)
        // arrived.rows_per_sample[branch]
        for branch, own in rows.items()
    }
    everyone = {
        branch: Side(
            own.embeds,
            sample[branch],
            own.weight if weighted else None,
            _with_partners(own.key, rows[other].key.view(len(out), -1)[sample[branch]])
            if num_duplicates
            else None,
        )
        for (branch, own), other in zip(rows.items(), pair.branches[::-1])
    }
    meeting = Meeting(
        own=mine,
        everyone=everyone,
        counts={branch: arrived.counts[branch] for branch in mine},
        places={branch: arrived.places[branch] for branch in mine},
        present=present,
        num_misaligned=misaligned + lost,
        num_not_loaded=num_not_loaded,
        num_left_out=num_left_out,
        num_duplicates=num_duplicates,
    )
    num_left = {
        branch: (len(out) - num_left_out) * arrived.rows_per_sample[branch] for branch in rows
    }
    return _without(meeting, left_out, num_left, num_here) if num_left_out else meeting


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


def _with_partners(key: Tensor, partners: Tensor) -> Tensor:
    """[R], [R, c] -> [R, 1 + c]."""
    return torch.cat([key[:, None], partners], 1)


def _sample(index: Tensor) -> Tensor:
    return torch.where(index < 0, -1 - index, index)


def rows_of(wanted: Tensor, number: int) -> Tensor:
    """The rows that are `wanted` [b] bool, ascending: [number] int64. Whoever knows the number
    need not wait for the device, as with `nonzero`."""
    return wanted.logical_not().to(torch.int8).argsort(stable=True)[:number]


def _without(
    meeting: Meeting,
    left_out: Mapping[str, Tensor],
    num_left: Mapping[str, int],
    num_here: Mapping[str, int],
) -> Meeting:
    """The rows that remain, numbered anew: `num_left` in all, `num_here` of those brought here."""
    place = {branch: torch.where(out, -1, (~out).cumsum(0) - 1) for branch, out in left_out.items()}
    own = {
        branch: Rows(
            *(
                values[kept]
                for values in (
                    rows.embeds,
                    place[branch][rows.position],
                    rows.index,
                    rows.weight,
                    rows.key,
                )
            )
        )
        for branch, rows in meeting.own.items()
        for kept in [rows_of(meeting.present[branch], num_here[branch])]
    }
    everyone = {
        branch: Side(
            side.embeds[kept],
            side.label[kept],
            None if side.weight is None else side.weight[kept],
            None if side.keys is None else side.keys[kept],
        )
        for branch, side in meeting.everyone.items()
        for kept in [rows_of(~left_out[branch], num_left[branch])]
    }
    places = {branch: place[branch][each] for branch, each in meeting.places.items()}
    return replace(meeting, own=own, everyone=everyone, places=places)


def share_parameters(
    comm: Communicator, pair: Pair, meeting: Meeting, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The loss's learned scalars, by its own names, on every last stage of the pair. `parameters`:
    the same where the first branch ends; elsewhere {}."""
    if len(meeting.own) == 2 or not pair.loss.parameters:
        return dict(parameters)
    embeds = next(iter(meeting.own.values())).embeds
    names = list(pair.loss.parameters)
    values = (
        torch.cat([parameters[name] for name in names])
        if parameters
        else embeds.new_empty(len(names))
    )
    values = comm.cross(pair.first, pair.second, values)
    return {name: values[i : i + 1] for i, name in enumerate(names)}


def exchange_loss(
    comm: Communicator, pair: Pair, meeting: Meeting, parameters: Mapping[str, Tensor]
) -> LossResult:
    """The exact loss of a pair over the global batch and its gradients, as far as this stage needs
    them.

    `parameters` are the loss's learned scalars, see `share_parameters`. Each replica of the first
    branch returns an equal part of their gradients: the whole is constrained by the loss first,
    which the parts could not be. Where no sample has both halves the loss and all gradients are 0.
    """
    sides, loss = meeting.everyone, pair.loss
    if not meeting.num_rows:
        return _nothing(pair, meeting, parameters)
    if len(meeting.own) == 2 and comm.stage.replicas == 1:
        part = loss.whole(sides, parameters)
        embeds = {
            branch: meeting.restored(branch, part.embeds[branch][rows.position])
            for branch, rows in meeting.own.items()
        }
        shares = {
            branch: part.shares[branch][rows.position] for branch, rows in meeting.own.items()
        }
        return LossResult(shares, embeds, loss.constrained(part.parameters, parameters))
    own = {
        branch: loss.statistics(sides, branch, rows.position, parameters)
        for branch, rows in meeting.own.items()
    }
    statistics = {branch: values for branch, values in own.items() if values is not None}
    if statistics:
        statistics = _share_statistics(comm, pair, meeting, statistics)
    shares, embeds, parameter_gradients = {}, {}, {}
    for branch, rows in meeting.own.items():
        part = loss.part(sides, branch, rows.position, statistics, parameters)
        shares[branch] = part.shares[branch]
        embeds[branch] = meeting.restored(branch, part.embeds[branch])
        if branch == pair.first:
            whole = {
                name: comm.sum_over(gradient, comm.stage_group)
                for name, gradient in part.parameters.items()
            }
            parameter_gradients = {
                name: g / comm.stage.replicas
                for name, g in loss.constrained(whole, parameters).items()
            }
    return LossResult(shares, embeds, parameter_gradients)


def _nothing(pair: Pair, meeting: Meeting, parameters: Mapping[str, Tensor]) -> LossResult:
    """Of a batch in which no sample has both halves. All last stages of the pair see that, so
    nothing is exchanged."""
    shares = {branch: rows.embeds.new_zeros(0) for branch, rows in meeting.own.items()}
    embeds = {
        branch: meeting.restored(branch, torch.zeros_like(rows.embeds))
        for branch, rows in meeting.own.items()
    }
    return LossResult(
        shares,
        embeds,
        {name: torch.zeros_like(p) for name, p in parameters.items()}
        if pair.first in meeting.own
        else {},
    )


def by_source(
    pair: Pair, meeting: Meeting, result: LossResult, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the own rows, by the source that their sample is of, [S] float64 each: shares of the loss;
    samples, counted by the first branch.

    `starts` [S] int64: the first index of each source, ascending.
    """
    shares, samples = torch.zeros(2, len(starts), dtype=torch.float64, device=starts.device)
    for branch, rows in meeting.own.items():
        source = torch.bucketize(rows.index, starts, right=True) - 1
        belongs = source[:, None] == torch.arange(len(starts), device=starts.device)  # [b, S]
        shares += torch.where(belongs, result.shares[branch].double()[:, None], 0.0).sum(0)
        if branch == pair.first:
            samples += belongs.sum(0)
    return shares, samples


def _share_statistics(
    comm: Communicator, pair: Pair, meeting: Meeting, statistics: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """branch -> [B] statistics of all its rows, in global order."""
    everyone = {}
    for branch, own in statistics.items():
        values = comm.gather_replicas(meeting.restored(branch, own), meeting.counts[branch])
        number = len(meeting.everyone[branch].label)
        # one place more, for those that were left out
        everyone[branch] = values.new_zeros(number + 1).index_copy_(
            0, meeting.places[branch] % (number + 1), values
        )[:number]
    if len(everyone) == 1:
        (given,) = everyone.values()
        blank = {
            branch: given.new_empty(len(side.label)) for branch, side in meeting.everyone.items()
        }
        everyone = {
            source: comm.cross(source, target, everyone.get(source, blank[source]))
            for source, target in (pair.branches, pair.branches[::-1])
        }
    return everyone
