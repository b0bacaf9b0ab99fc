"""The meeting of the branches: one exact loss over the global batch, shared out among the tails without a root.

With s = logit_scale_exp · U Vᵀ over all B images U and texts V, InfoNCE with one text per image is

    L = 1/2B Σᵢ (rowᵢ − sᵢᵢ) + 1/2B Σⱼ (colⱼ − sⱼⱼ),      rowᵢ = logsumexpⱼ sᵢⱼ,   colⱼ = logsumexpᵢ sᵢⱼ
    ∂L/∂sᵢⱼ = (exp(sᵢⱼ − rowᵢ) + exp(sᵢⱼ − colⱼ) − 2·[i = j]) / 2B

An image tail computes its rows of s and so rowᵢ of its images; a text tail its columns and so colⱼ of its texts. They
exchange these B numbers, and each has the exact gradient of its own embeddings. A tail that has both branches and all
replicas (R = 1) computes each block of s once and uses it for both sides. A loss that judges each pair alone has nothing to
exchange but the embeddings. The formulas are the loss's own (`models/README.md`); here is who computes which rows of them.

Images have the places 0..G−1 of the global batch and texts 0..cG−1: the text at place p belongs to the image at p // c, with c texts per
image. Both halves carry the index of their sample, which must be the same.

A sample of which one half could not be loaded is left out: the loss is that of the samples that remain. Its index i comes as −1 − i, in
either branch; both learn of it in the exchange, so that nobody need ask. Where one of several texts is bad, its image goes with all its texts.

Rows may have weights, whole millionths. A weight travels in the upper half of its row's place, so that it costs no byte and every tail
sees who brought some: all rows of both branches, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.communication import Communicator
from engine.topology import BRANCHES

OTHER = {"image": "text", "text": "image"}


class Side(NamedTuple):
    """All rows of a branch, in global order. Rows with equal labels belong together: the label is the place that the image came with."""

    embeds: Tensor  # [B, D]
    label: Tensor  # [B] int64
    weight: Tensor | None  # [B] int64, millionths


class LossPart(Protocol):
    """What some rows contribute to the loss."""

    shares: Mapping[str, Tensor]  # branch -> [b], of the loss, of each of these rows
    embeds: Mapping[str, Tensor]  # branch -> the whole ∂L/∂ of these rows [b, D]
    parameters: Mapping[str, Tensor]  # ∂L/∂ of the learned scalars from these rows; the rows of either side add up to the whole


class ContrastiveLoss(Protocol):
    """What the exchange asks of a loss; it knows nothing of processes. `mine` [b]: places of own rows among those of the branch."""

    parameters: Mapping[str, float]  # the [1]-shaped learned scalars it uses, with first values; the image head emits them

    def statistics(self, sides: Mapping[str, Side], branch: str, mine: Tensor, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """[b], what the other side needs of these rows; None: nothing, whatever the rows."""

    def part(
        self,
        sides: Mapping[str, Side],
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
    ) -> LossPart:
        """`statistics`: of all rows of both branches. The parts of all rows of both branches add up to the loss."""

    def whole(self, sides: Mapping[str, Side], parameters: Mapping[str, Tensor]) -> LossPart:
        """All rows of both branches."""

    def constrained(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole gradients of the scalars as the optimizer is to see them."""


NOBODY = torch.iinfo(torch.int64).min  # at a place that no row claims
MAX_WEIGHT = 2**31 - 2  # millionths
NO_WEIGHT = -1
_PLACES = 2**32


@dataclass(frozen=True)
class Rows:
    """Embeddings [b, D] float32 with the place of each row in the global batch, the index of its sample in the data set, and its weight.

    All int64 [b]. An index below 0 stands for −1 − index, a sample that could not be loaded. Weights are millionths, at most `MAX_WEIGHT`;
    `NO_WEIGHT` where rows have none.
    """

    embeds: Tensor
    position: Tensor
    index: Tensor
    weight: Tensor

    def tags(self) -> Tensor:
        """[b, 2] int64, as they travel: weight and place, index."""
        return torch.stack([(self.weight - NO_WEIGHT) * _PLACES + self.position, self.index], 1)


@dataclass(frozen=True)
class Meeting:
    """What one tail knows after the exchange: its own rows, and all rows of both branches, in global order.

    Samples that could not be loaded are in neither: B and b count the others, and places are numbered anew.
    """

    own: Mapping[str, Rows]
    everyone: Mapping[str, Side]
    counts: Mapping[str, Sequence[int]]  # branch that ends here -> rows of each replica of this tail; they add up to B
    present: Mapping[str, Tensor]  # branch -> bool, which of the rows that this tail brought are in `own`
    num_misaligned: Tensor  # [] how many places of the global batch hold different samples in the two branches
    num_left_out: int  # samples

    def restored(self, branch: str, values: Tensor) -> Tensor:
        """[b, D] of the own rows -> of all rows that this tail brought, zero where they were left out."""
        if self.num_left_out == 0:
            return values
        present = self.present[branch]
        return values.new_zeros(len(present), *values.shape[1:]).masked_scatter_(present[:, None], values)


@dataclass(frozen=True)
class LossResult:
    """What this tail's own rows add to the loss, and ∂L/∂ of its own embeddings and parameters."""

    shares: Mapping[str, Tensor]  # branch -> [b], of the rows that the meeting left in
    embeds: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]

    @property
    def share(self) -> Tensor:
        """[], those of all tails add up to the loss."""
        return sum(shares.sum() for shares in self.shares.values())


def meet(comm: Communicator, own: Mapping[str, Rows], counts: Mapping[str, Sequence[int]], texts_per_image: int = 1) -> Meeting:
    """Exchange embeddings among the tails. `counts[branch][r]`: rows of replica r of this tail, for each branch that ends in it; they add
    up to the same number on every tail. Errors: RuntimeError on all tails when some rows have weights and others have none, or all have weight 0.
    """
    gathered = {
        branch: (comm.gather_replicas(rows.embeds, counts[branch]), comm.gather_replicas(rows.tags(), counts[branch]))
        for branch, rows in own.items()
    }
    places = {branch: labels[:, 0] % _PLACES for branch, (_, labels) in gathered.items()}  # of the branches that end here, as gathered
    if len(own) == 1:
        gathered = _cross(comm, gathered, texts_per_image)
    embeds, indices, weights = {}, {}, {}
    for branch, (rows, labels) in gathered.items():
        place, weight = labels[:, 0] % _PLACES, labels[:, 0] // _PLACES + NO_WEIGHT
        embeds[branch] = torch.zeros_like(rows).index_copy_(0, place, rows)
        indices[branch] = torch.full_like(place, NOBODY).index_copy_(0, place, labels[:, 1])
        weights[branch] = torch.full_like(place, NO_WEIGHT).index_copy_(0, place, weight)
    texts = indices["text"].view(-1, texts_per_image)  # [G, c]
    images = indices["image"][:, None]  # [G, 1]
    misaligned = ((_sample(images) != _sample(texts)) | (images == NOBODY)).any(1).sum()
    bad = (images < 0)[:, 0] | (texts < 0).any(1)  # [G]
    left_out = {"image": bad, "text": bad.repeat_interleave(texts_per_image)}
    unweighted = torch.cat([weight == NO_WEIGHT for weight in weights.values()])
    weight_left = [(weights[branch] * ~left_out[branch]).sum() for branch in weights]
    # the host waits for the device here, where the tail waits for the others anyway
    num_left_out, num_unweighted, *weight_left = torch.stack([bad.sum(), unweighted.sum(), *weight_left]).tolist()
    if 0 < num_unweighted < len(unweighted):
        raise RuntimeError(
            f"{num_unweighted} of {len(unweighted)} images and texts of this batch came without a weight, the others with one; "
            "give image_weight and text_weight for all samples, or neither for any"
        )
    weighted = num_unweighted < len(unweighted)
    if weighted and num_left_out < len(bad) and not all(weight_left):
        raise RuntimeError(
            "all images, or all texts, of this batch that could be loaded have weight 0, so nothing is asked for; give one of them a weight "
            "above 0 in image_weight and text_weight"
        )
    labels = {branch: torch.arange(len(e), device=e.device) // (texts_per_image if branch == "text" else 1) for branch, e in embeds.items()}
    everyone = {branch: Side(embeds[branch], labels[branch], weights[branch] if weighted else None) for branch in embeds}
    present = {branch: ~left_out[branch][rows.position] for branch, rows in own.items()}
    meeting = Meeting(own, everyone, counts, present, misaligned, num_left_out)
    return _without(meeting, left_out, places) if num_left_out else meeting


def _sample(index: Tensor) -> Tensor:
    return torch.where(index < 0, -1 - index, index)


def _cross(comm: Communicator, mine: Mapping[str, tuple[Tensor, Tensor]], texts_per_image: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Tails of a fork: give what this branch gathered, get what the other did."""
    ((own, (embeds, labels)),) = mine.items()
    rows = len(embeds) * texts_per_image if own == "image" else len(embeds) // texts_per_image  # of the other branch
    theirs = embeds.new_empty(rows, embeds.shape[1]), labels.new_empty(rows, labels.shape[1])
    return {branch: tuple(comm.cross(branch, tensor) for tensor in mine.get(branch, theirs)) for branch in BRANCHES}


def _without(meeting: Meeting, left_out: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> Meeting:
    """The rows that remain, numbered anew. `places`: of the branches that end here, as their replicas brought them."""
    place = {branch: (~out).cumsum(0) - 1 for branch, out in left_out.items()}
    own = {
        branch: Rows(*(values[meeting.present[branch]] for values in (rows.embeds, place[branch][rows.position], rows.index, rows.weight)))
        for branch, rows in meeting.own.items()
    }
    everyone = {
        branch: Side(*(None if values is None else values[~left_out[branch]] for values in side))
        for branch, side in meeting.everyone.items()
    }
    counts = {
        branch: [int((~left_out[branch][p]).sum()) for p in places[branch].split(list(each))] for branch, each in meeting.counts.items()
    }
    return Meeting(own, everyone, counts, meeting.present, meeting.num_misaligned, meeting.num_left_out)


def share_parameters(comm: Communicator, loss: ContrastiveLoss, meeting: Meeting, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss's learned scalars on every tail. `parameters`: where the image head is (the image tail, or a joint tail); elsewhere {}."""
    if len(meeting.own) == 2:
        return dict(parameters)
    embeds = next(iter(meeting.own.values())).embeds
    values = torch.cat([parameters[name] for name in loss.parameters]) if parameters else embeds.new_empty(len(loss.parameters))
    values = comm.cross("image", values)
    return {name: values[i : i + 1] for i, name in enumerate(loss.parameters)}


def exchange_loss(
    comm: Communicator,
    loss: ContrastiveLoss,
    meeting: Meeting,
    parameters: Mapping[str, Tensor],
) -> LossResult:
    """The exact loss over the global batch and its gradients, as far as this tail needs them.

    `parameters` are the loss's learned scalars, see `share_parameters`. Each replica of the image head returns an equal part of their
    gradients: the whole is constrained by the loss first, which the parts could not be.
    """
    sides = meeting.everyone
    if not len(sides["image"].label):
        raise OSError("not one pair of this batch could be loaded; see bad_samples.jsonl in the folder of the run")
    if len(meeting.own) == 2 and comm.stage.replicas == 1:
        part = loss.whole(sides, parameters)
        embeds = {branch: meeting.restored(branch, part.embeds[branch][rows.position]) for branch, rows in meeting.own.items()}
        shares = {branch: part.shares[branch][rows.position] for branch, rows in meeting.own.items()}
        return LossResult(shares, embeds, loss.constrained(part.parameters, parameters))
    statistics = {branch: loss.statistics(sides, branch, rows.position, parameters) for branch, rows in meeting.own.items()}
    if any(values is not None for values in statistics.values()):
        statistics = _share_statistics(comm, meeting, statistics)
    shares, embeds, parameter_gradients = {}, {}, {}
    for branch, rows in meeting.own.items():
        part = loss.part(sides, branch, rows.position, statistics, parameters)
        shares[branch] = part.shares[branch]
        embeds[branch] = meeting.restored(branch, part.embeds[branch])
        if branch == "image":
            whole = {name: comm.sum_over(gradient, comm.stage_group) for name, gradient in part.parameters.items()}
            parameter_gradients = {name: g / comm.stage.replicas for name, g in loss.constrained(whole, parameters).items()}
    return LossResult(shares, embeds, parameter_gradients)


def by_source(meeting: Meeting, result: LossResult, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Of the own rows, by the source that their sample is of, [S] float64 each: shares of the loss; samples, counted by their images.

    `starts` [S] int64: the first index of each source, ascending.
    """
    shares, samples = torch.zeros(2, len(starts), dtype=torch.float64, device=starts.device)
    for branch, rows in meeting.own.items():
        source = torch.bucketize(rows.index, starts, right=True) - 1
        belongs = source[:, None] == torch.arange(len(starts), device=starts.device)  # [b, S]
        shares += torch.where(belongs, result.shares[branch].double()[:, None], 0.0).sum(0)
        if branch == "image":
            samples += belongs.sum(0)
    return shares, samples


def _share_statistics(comm: Communicator, meeting: Meeting, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """branch -> [B] statistics of all its rows, in global order."""
    everyone = {}
    for branch, rows in meeting.own.items():
        values = comm.gather_replicas(own[branch], meeting.counts[branch])
        position = comm.gather_replicas(rows.position, meeting.counts[branch])
        everyone[branch] = torch.zeros_like(values).index_copy_(0, position, values)
    if len(everyone) == 1:
        (given,) = everyone.values()
        blank = {branch: given.new_empty(len(side.label)) for branch, side in meeting.everyone.items()}
        everyone = {branch: comm.cross(branch, everyone.get(branch, blank[branch])) for branch in BRANCHES}
    return everyone
