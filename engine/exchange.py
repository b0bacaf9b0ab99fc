"""The meeting of the branches: one exact loss over the global batch, shared out among the tails without a root.

With s = logit_scale_exp · U Vᵀ over all B images U and texts V, InfoNCE is

    L = 1/2B Σᵢ (rowᵢ − sᵢᵢ) + 1/2B Σⱼ (colⱼ − sⱼⱼ),      rowᵢ = logsumexpⱼ sᵢⱼ,   colⱼ = logsumexpᵢ sᵢⱼ
    ∂L/∂sᵢⱼ = (exp(sᵢⱼ − rowᵢ) + exp(sᵢⱼ − colⱼ) − 2·[i = j]) / 2B

An image tail computes its rows of s and so rowᵢ of its images; a text tail its columns and so colⱼ of its texts. They
exchange these B numbers, and each has the exact gradient of its own embeddings. A tail that has both branches and all
replicas (R = 1) computes the one matrix once and uses it for both sides.

A pair of which one half could not be loaded is left out: the loss is that of the pairs that remain. Its index i comes as −1 − i, in
either branch; both learn of it in the exchange, so that nobody need ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.communication import Communicator
from engine.topology import BRANCHES

OTHER = {"image": "text", "text": "image"}


class ContrastiveLoss(Protocol):
    """What the exchange asks of a loss; it knows nothing of processes. b own rows, B rows of the other side."""

    parameters: tuple[str, ...]  # names of the [1]-shaped learned scalars it uses; the image head emits them

    def logits(self, own: Tensor, other: Tensor, parameters: Mapping[str, Tensor]) -> Tensor: ...  # [b, B]

    def statistics(self, logits: Tensor) -> Tensor: ...  # [b], what the other side needs of these rows

    def share(self, logits: Tensor, own_statistics: Tensor, target: Tensor) -> Tensor: ...  # [], this side's part of the loss

    def gradient(self, logits: Tensor, own_statistics: Tensor, other_statistics: Tensor, target: Tensor) -> Tensor: ...  # [b, B]

    def embedding_gradient(self, d_logits: Tensor, other: Tensor, parameters: Mapping[str, Tensor]) -> Tensor: ...  # [b, D]

    def parameter_gradients(self, d_logits: Tensor, logits: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def constrained(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


NOBODY = torch.iinfo(torch.int64).min  # at a place that no row claims


@dataclass(frozen=True)
class Rows:
    """Embeddings [b, D] float32 with the place of each sample in the global batch [b] and its index in the data set [b].

    An index below 0 stands for −1 − index, a sample that could not be loaded.
    """

    embeds: Tensor
    position: Tensor
    index: Tensor


@dataclass(frozen=True)
class Meeting:
    """What one tail knows after the exchange: its own rows, and all rows of each branch it needs, in global order.

    Pairs that could not be loaded are in neither: B and b count the others, and places are numbered anew.
    """

    own: Mapping[str, Rows]
    everyone: Mapping[str, Tensor]  # branch -> [B, D]
    counts: Sequence[int]  # rows of each replica of this tail; they add up to B
    present: Mapping[str, Tensor]  # branch -> bool, which of the rows that this tail brought are in `own`
    num_misaligned: Tensor  # [] how many places of the global batch hold different samples in the two branches
    num_left_out: int

    def restored(self, branch: str, values: Tensor) -> Tensor:
        """[b, D] of the own rows -> of all rows that this tail brought, zero where they were left out."""
        if self.num_left_out == 0:
            return values
        present = self.present[branch]
        return values.new_zeros(len(present), *values.shape[1:]).masked_scatter_(present[:, None], values)


@dataclass(frozen=True)
class LossResult:
    """This tail's share of the loss (the shares of all tails add up to it) and ∂L/∂ of its own embeddings and parameters."""

    share: Tensor
    embeds: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def meet(comm: Communicator, own: Mapping[str, Rows], counts: Sequence[int]) -> Meeting:
    """Exchange embeddings among the tails. `counts[r]`: rows of replica r of this tail; they add up to B on every tail."""
    gathered = {
        branch: (
            comm.gather_replicas(rows.embeds, counts),
            comm.gather_replicas(torch.stack([rows.position, rows.index], 1), counts),
        )
        for branch, rows in own.items()
    }
    if len(own) == 1:
        gathered = _cross(comm, gathered)
    everyone, indices = {}, {}
    for branch, (embeds, labels) in gathered.items():
        everyone[branch] = torch.zeros_like(embeds).index_copy_(0, labels[:, 0], embeds)
        indices[branch] = torch.full_like(labels[:, 1], NOBODY).index_copy_(0, labels[:, 0], labels[:, 1])
    samples = {branch: torch.where(index < 0, -1 - index, index) for branch, index in indices.items()}
    misaligned = ((samples["image"] != samples["text"]) | (indices["image"] == NOBODY)).sum()
    left_out = (indices["image"] < 0) | (indices["text"] < 0)  # [B]
    num_left_out = int(left_out.sum())  # the host waits for the device here, where the tail waits for the others anyway
    present = {branch: ~left_out[rows.position] for branch, rows in own.items()}
    if num_left_out == 0:
        return Meeting(own, everyone, counts, present, misaligned, 0)
    place = (~left_out).cumsum(0) - 1
    own_labels = gathered[next(iter(own))][1]
    return Meeting(
        {b: Rows(r.embeds[present[b]], place[r.position[present[b]]], r.index[present[b]]) for b, r in own.items()},
        {branch: embeds[~left_out] for branch, embeds in everyone.items()},
        [int((~left_out[positions]).sum()) for positions in own_labels[:, 0].split(list(counts))],
        present,
        misaligned,
        num_left_out,
    )


def _cross(comm: Communicator, mine: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Tails of a fork: give what this branch gathered, get what the other did."""
    (embeds, labels), both = next(iter(mine.values())), {}
    for branch in BRANCHES:
        give = mine.get(branch) or (torch.empty_like(embeds), torch.empty_like(labels))
        both[branch] = tuple(comm.cross(branch, tensor) for tensor in give)
    return both


def exchange_loss(
    comm: Communicator,
    loss: ContrastiveLoss,
    meeting: Meeting,
    parameters: Mapping[str, Tensor],
) -> LossResult:
    """The exact loss over the global batch and its gradients, as far as this tail needs them.

    `parameters` are the loss's learned scalars where the image head is (the image tail, or a joint tail); elsewhere pass {}
    and they arrive with the exchange. Each replica of the image head returns an equal part of their gradients: the whole is
    constrained by the loss first, which the parts could not be.
    """
    if not len(meeting.everyone["image"]):
        raise RuntimeError("not one pair of this batch could be loaded; see bad_samples.jsonl in the folder of the run")
    parameters = _share_parameters(comm, loss, meeting, parameters)
    if len(meeting.own) == 2 and comm.stage.replicas == 1:
        return _whole_matrix(loss, meeting, parameters)
    logits = {
        branch: loss.logits(rows.embeds, meeting.everyone[OTHER[branch]], parameters) for branch, rows in meeting.own.items()
    }  # [b, B] per side
    own_statistics = {branch: loss.statistics(block) for branch, block in logits.items()}
    statistics = _share_statistics(comm, meeting, own_statistics)
    share, embeds, parameter_gradients = 0.0, {}, {}
    for branch, rows in meeting.own.items():
        share = share + loss.share(logits[branch], own_statistics[branch], rows.position)
        d_logits = loss.gradient(logits[branch], own_statistics[branch], statistics[OTHER[branch]], rows.position)
        embeds[branch] = meeting.restored(branch, loss.embedding_gradient(d_logits, meeting.everyone[OTHER[branch]], parameters))
        if branch == "image":
            parts = loss.parameter_gradients(d_logits, logits[branch], parameters)
            whole = {name: comm.sum_over(part, comm.stage_group) for name, part in parts.items()}
            parameter_gradients = {name: g / comm.stage.replicas for name, g in loss.constrained(whole, parameters).items()}
    return LossResult(share, embeds, parameter_gradients)


def _whole_matrix(loss: ContrastiveLoss, meeting: Meeting, parameters: Mapping[str, Tensor]) -> LossResult:
    """One rank has every image and every text: one matrix serves both sides."""
    image, text = meeting.own["image"], meeting.own["text"]
    logits = loss.logits(meeting.everyone["image"], meeting.everyone["text"], parameters)  # [B, B], both in global order
    rows, columns = loss.statistics(logits), loss.statistics(logits.T)
    target = torch.arange(len(logits), device=logits.device)
    d_logits = loss.gradient(logits, rows, columns, target)
    return LossResult(
        loss.share(logits, rows, target) + loss.share(logits.T, columns, target),
        {
            "image": meeting.restored("image", loss.embedding_gradient(d_logits, meeting.everyone["text"], parameters)[image.position]),
            "text": meeting.restored("text", loss.embedding_gradient(d_logits.T, meeting.everyone["image"], parameters)[text.position]),
        },
        loss.constrained(loss.parameter_gradients(d_logits, logits, parameters), parameters),
    )


def _share_parameters(comm: Communicator, loss: ContrastiveLoss, meeting: Meeting, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if len(meeting.own) == 2:
        return dict(parameters)
    embeds = next(iter(meeting.own.values())).embeds
    values = torch.cat([parameters[name] for name in loss.parameters]) if parameters else embeds.new_empty(len(loss.parameters))
    values = comm.cross("image", values)
    return {name: values[i : i + 1] for i, name in enumerate(loss.parameters)}


def _share_statistics(comm: Communicator, meeting: Meeting, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """branch -> [B] statistics of all its rows, in global order."""
    everyone = {}
    for branch, rows in meeting.own.items():
        values = comm.gather_replicas(own[branch], meeting.counts)
        position = comm.gather_replicas(rows.position, meeting.counts)
        everyone[branch] = torch.zeros_like(values).index_copy_(0, position, values)
    if len(everyone) == 1:
        template = next(iter(everyone.values()))
        everyone = {branch: comm.cross(branch, everyone.get(branch, torch.empty_like(template))) for branch in BRANCHES}
    return everyone
