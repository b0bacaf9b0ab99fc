"""The exchange of a term: one exact loss over the global batch, shared out among the last stages of
its branches without a root.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from engine.communication import Communicator
from engine.loss.term_batch import TermBatch
from engine.objective import Term


@dataclass(frozen=True)
class LossResult:
    """What this stage's own rows add to the loss of a term, and ∂L/∂ of its own embeddings and of
    the loss's scalars."""

    shares: Mapping[str, Tensor]  # branch -> [b], of the rows that are left in
    embeds: Mapping[str, Tensor]
    # by the loss's names; empty where the first branch does not end here
    parameters: Mapping[str, Tensor]

    @property
    def share(self) -> Tensor:
        """[], those of all last stages add up to the loss."""
        first, *others = (shares.sum() for shares in self.shares.values())
        return sum(others, start=first)


def share_parameters(
    comm: Communicator, term: Term, batch: TermBatch, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The loss's learned scalars, by its own names, on every last stage of the term. `parameters`:
    the same where the first branch ends; elsewhere {}."""
    if len(batch.own) == len(term.rows) or not term.loss.parameters:
        return dict(parameters)
    embeds = next(iter(batch.own.values())).embeds
    names = list(term.loss.parameters)
    values = (
        torch.cat([parameters[name] for name in names])
        if parameters
        else embeds.new_empty(len(names))
    )
    first, *others = term.branches
    for other in others:
        if first in comm.stage.last_of or other in comm.stage.last_of:
            values = comm.cross(first, other, values)
    return {name: values[i : i + 1] for i, name in enumerate(names)}


def exchange_loss(
    comm: Communicator, term: Term, batch: TermBatch, parameters: Mapping[str, Tensor]
) -> LossResult:
    """The exact loss of a term over the global batch and its gradients, as far as this stage needs
    them.

    `parameters` are the loss's learned scalars, see `share_parameters`. Each replica of the first
    branch returns an equal part of their gradients: the whole is constrained by the loss first,
    which the parts could not be. Where no sample has both halves the loss and all gradients are 0.
    """
    sides, loss = batch.everyone, term.loss
    if not batch.num_rows:
        return _nothing(term, batch, parameters)
    if len(batch.own) == len(term.rows) and comm.stage.replicas == 1:
        part = loss.whole(sides, parameters)
        embeds = {
            branch: batch.restored(branch, part.embeds[branch][rows.position])
            for branch, rows in batch.own.items()
        }
        shares = {branch: part.shares[branch][rows.position] for branch, rows in batch.own.items()}
        return LossResult(shares, embeds, loss.constrained(part.parameters, parameters))
    own = {
        branch: loss.statistics(sides, branch, rows.position, parameters)
        for branch, rows in batch.own.items()
    }
    statistics = {branch: values for branch, values in own.items() if values is not None}
    if statistics:
        statistics = _share_statistics(comm, term, batch, statistics)
    shares, embeds, parameter_gradients = {}, {}, {}
    for branch, rows in batch.own.items():
        part = loss.part(sides, branch, rows.position, statistics, parameters)
        shares[branch] = part.shares[branch]
        embeds[branch] = batch.restored(branch, part.embeds[branch])
        if branch == term.rows[0]:
            whole = _summed(comm, part.parameters)
            parameter_gradients = {
                name: g / comm.stage.replicas
                for name, g in loss.constrained(whole, parameters).items()
            }
    return LossResult(shares, embeds, parameter_gradients)


def _summed(comm: Communicator, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the learned scalars, [1] each, over the replicas of this stage: one message for all."""
    if not gradients:
        return {}
    sums = comm.sum_over(torch.cat(list(gradients.values())), comm.stage_group)
    return dict(zip(gradients, sums.split(1)))


def _nothing(term: Term, batch: TermBatch, parameters: Mapping[str, Tensor]) -> LossResult:
    """Of a batch in which no sample has all its parts. All last stages of the term see that, so
    nothing is exchanged."""
    shares = {branch: rows.embeds.new_zeros(0) for branch, rows in batch.own.items()}
    embeds = {
        branch: batch.restored(branch, torch.zeros_like(rows.embeds))
        for branch, rows in batch.own.items()
    }
    return LossResult(
        shares,
        embeds,
        {name: torch.zeros_like(p) for name, p in parameters.items()}
        if term.rows[0] in batch.own
        else {},
    )


def by_source(
    term: Term, batch: TermBatch, result: LossResult, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the own rows, by the source that their sample is of, [S] float64 each: shares of the loss;
    samples, counted by the first branch.

    `starts` [S] int64: the first index of each source, ascending.
    """
    shares, samples = torch.zeros(2, len(starts), dtype=torch.float64, device=starts.device)
    for branch, rows in batch.own.items():
        source = torch.bucketize(rows.index, starts, right=True) - 1
        belongs = source[:, None] == torch.arange(len(starts), device=starts.device)  # [b, S]
        shares += torch.where(belongs, result.shares[branch].double()[:, None], 0.0).sum(0)
        if branch == term.rows[0]:
            samples += belongs.sum(0)
    return shares, samples


def _share_statistics(
    comm: Communicator, term: Term, batch: TermBatch, statistics: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """branch -> [B, …] statistics of all its rows, in global order."""
    everyone = {}
    for branch, own in statistics.items():
        values = comm.gather_replicas(batch.restored(branch, own), batch.counts[branch])
        number = len(batch.everyone[branch].label)
        # one place more, for those that were left out
        everyone[branch] = values.new_zeros(number + 1, *values.shape[1:]).index_copy_(
            0, batch.places[branch] % (number + 1), values
        )[:number]
    given = next(iter(everyone.values()))
    for (source, of_source), (_, of_target) in permutations(zip(term.rows, term.branches), 2):
        here, wanted = source in batch.own, of_target in comm.stage.last_of
        if here and not wanted:
            comm.cross(of_source, of_target, everyone[source])
        elif wanted and not here:
            blank = given.new_empty(len(batch.everyone[source].label), *given.shape[1:])
            everyone[source] = comm.cross(of_source, of_target, blank)
    return everyone
