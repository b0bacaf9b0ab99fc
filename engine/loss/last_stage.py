"""What a last stage does when it comes to `ComputeLoss`: its rows into the losses of its terms, the
gradients of what its layers made.

outputs of the waiting micro-batches ── gather ── for each term: align ── exchange_loss ─────┐
                                                                     └── match, if asked ───┴── gradients by micro-batch, added up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.communication import Communicator
from engine.loss.exchange import LossResult, by_source, exchange_loss, share_parameters
from engine.loss.matching import Matched, Scoring, match
from engine.loss.scale import injected_scale
from engine.loss.term_batch import (
    NUM_TAGS,
    GatheredRows,
    Numbers,
    Rows,
    TermBatch,
    align,
    gather,
    numbers_of,
)
from engine.objective import Objective, Term

ROWS = ("_embeds", "_tokens")  # how the names of tensors end that have a row for each sample


@dataclass
class Sums:
    """Of the losses of one step on this rank, all as float64 vectors that ranks add up; zero where
    there is no last stage.

    P pairs, S sources.
    """

    loss: Tensor  # [1], the weighted sum of all losses
    # [P, 4], shares of both losses of a pair without their weights, matching pairs judged rightly,
    # matching pairs
    losses: Tensor
    sources: Tensor  # [2, P, S], shares of the contrastive losses and samples, by term and source
    scalars: Tensor  # what the losses learn, in the order of the pairs, each reported by one rank
    # [1], places with different samples in two branches, reported by one rank of each term
    misaligned: Tensor
    left_out: list[float]  # [P], samples of which a half was a stand-in, reported by one rank each
    duplicates: list[float]  # [P], samples with a value that another one has, likewise
    # [branches], rows to which the losses gave a gradient, by the branch that made them
    learning: Tensor
    # what went into each loss, by the names of rows
    given: list[dict[str, Rows]] = field(default_factory=list)

    @classmethod
    def zero(
        cls,
        num_pairs: int,
        num_sources: int,
        num_scalars: int,
        num_branches: int,
        device: torch.device,
    ) -> Sums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(
            loss=zeros(1),
            losses=zeros(num_pairs, 4),
            sources=zeros(2, num_pairs, num_sources),
            scalars=zeros(num_scalars),
            misaligned=zeros(1),
            left_out=[0.0] * num_pairs,
            duplicates=[0.0] * num_pairs,
            learning=zeros(num_branches),
        )

    def reported(self) -> dict[str, Tensor | list[float]]:
        return {
            "loss": self.loss,
            "misaligned": self.misaligned,
            "scalars": self.scalars,
            "source_shares": self.sources[0],
            "source_samples": self.sources[1],
            "losses": self.losses,
            "left_out": self.left_out,
            "duplicates": self.duplicates,
        }


class _Gradients:
    """Of what the layers made of each micro-batch. A tensor that is in the losses of several pairs
    gets the sum of their gradients."""

    def __init__(self, embeds: Mapping[str, Tensor], sizes: Mapping[str, Sequence[int]]):
        """`embeds` [n, D] and `sizes`, by rows: of all micro-batches, and how many of each."""
        self._sizes = sizes
        self._embeds = {branch: torch.zeros_like(rows) for branch, rows in embeds.items()}
        self._others: dict[str, list[Tensor]] = {}  # name -> of each micro-batch

    def add_embeds(self, gradients: Mapping[str, Tensor]) -> None:
        for branch, gradient in gradients.items():
            self._embeds[branch] += gradient

    def set_scalar(self, name: str, gradient: Tensor, value: Tensor) -> None:
        """The whole gradient goes with the first micro-batch."""
        number = max(map(len, self._sizes.values()))
        self._others[name] = [gradient, *[torch.zeros_like(value)] * (number - 1)]

    def add_tokens(self, gradients: Mapping[str, Sequence[Tensor]]) -> None:
        for name, of_micro_batches in gradients.items():
            known = self._others.get(name)
            self._others[name] = (
                [a + b for a, b in zip(known, of_micro_batches)] if known else [*of_micro_batches]
            )

    def by_micro_batch(self) -> list[dict[str, Tensor]]:
        embeds = {
            f"{branch}_embeds": gradient.split(self._sizes[branch])
            for branch, gradient in self._embeds.items()
        }
        pieces = {**embeds, **self._others}
        return [dict(zip(pieces, values)) for values in zip(*pieces.values(), strict=True)]


class LastStageLoss:
    """The losses of the pairs that this rank's last stage takes part in. `source_starts` [S]: as in
    `by_source`.

    `equal_shares`: each replica of a stage has equally many samples of every global batch; else
    they must be told how many the others have, or tell each other, as where samples have further
    rows.
    """

    def __init__(
        self,
        comm: Communicator,
        embed_dim: int,
        equal_shares: bool,
        source_starts: Sequence[int] | None,
    ):
        self.comm, self.stage, self.device, self.embed_dim = (
            comm,
            comm.stage,
            comm.device,
            embed_dim,
        )
        self.objective: Objective = comm.objective
        # whether the host of a rank needs to know what the others have before it can exchange it
        self._matches = any(term.matching for term in comm.objective.terms)
        self._tells = not equal_shares or comm.objective.has_further_rows or self._matches
        self._made_here = comm.objective.made_by(comm.stage.last_of)
        if self._tells:
            comm.make_last_stages_group()
        # of one source nothing is reported beside the loss
        self._source_starts = torch.tensor(
            source_starts or (), dtype=torch.int64, device=self.device
        )
        self.start_step()

    def start_step(
        self,
        rows_per_sample: Mapping[str, int] | None = None,
        num_rows: Mapping[str, int] | None = None,
        weights: Mapping[str, float] | None = None,
        shares: Mapping[str, Sequence[int]] = MappingProxyType({}),
        num_made: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`rows_per_sample`: of each branch, where it is not 1; `num_rows`: how many rows a branch
        has in this batch, where samples lack its modality; `weights`: by loss, where they are not
        those of the objective; `shares` and `num_made`: as in `StepSpec`. Raises ValueError for a
        loss that is not in the objective."""
        losses = self.objective.losses
        unknown = [name for name in weights or {} if name not in losses]
        if unknown:
            raise ValueError(
                f"loss weights {dict(weights or {})}: {unknown[0]} is no loss of this run; give "
                f"weights of {', '.join(losses)}"
            )
        self.rows_per_sample, self.num_rows = dict(rows_per_sample or {}), dict(num_rows or {})
        self.shares, self.num_made = shares, num_made
        self.weights = {**losses, **(weights or {})}
        num_scalars = sum(len(term.scalars) for term in self.objective.terms)
        self.sums = Sums.zero(
            len(self.objective.terms),
            len(self._source_starts),
            num_scalars,
            len(self.objective.names),
            self.device,
        )

    def gradients(
        self,
        outputs: Sequence[Mapping[str, Tensor]],
        num_samples: int,
        *,
        batch: int | None,
        weight: float,
        loss_scale: float,
        scoring: Scoring,
    ) -> list[dict[str, Tensor]]:
        """Of what the layers made of each micro-batch, by name. `outputs`: of the micro-batches
        that wait here, a batch of `num_samples` samples with those of the other replicas; `batch`:
        which of several in this step, each of the same `weight`; None: the global one.

        `loss_scale`: fp16's, else 1.
        """
        sizes = {
            rows: [len(output[f"{rows}_embeds"]) for output in outputs] for rows in self._made_here
        }
        told = self._told(outputs)
        numbers = numbers_of(self.objective, self._came(told), num_samples, self.rows_per_sample)
        counts = self._counts(told, numbers)
        own = self.own_rows(outputs)
        self.sums.given.append(own)
        if batch is not None:
            own = self._numbered_from_0(own, counts)
        with torch.no_grad():
            gathered = gather(
                self.comm,
                self.objective.terms,
                own,
                counts=counts,
                numbers=numbers,
                num_rows=self.num_rows,
            )
        made = _Gradients({branch: rows.embeds for branch, rows in own.items()}, sizes)
        for number, term in enumerate(self.objective.terms):
            if not set(term.branches) & set(self.stage.last_of):
                continue
            scalars = {
                name: outputs[0][tensor].detach()
                for name, tensor in term.scalars.items()
                if tensor in outputs[0]
            }
            term_batch, shared, result = self._pair_loss(term, gathered, scalars)
            self._note(number, term, term_batch, result=result, scalars=scalars, weight=weight)
            of_term = self.weights[self.objective.loss_name(term.kind, term)]
            factor = injected_scale(self.stage.replicas, loss_scale, weight, of_term)
            # a share that is not finite: not-a-number, so that the step is skipped
            scale = factor + (result.share - result.share)
            made.add_embeds({b: gradient * scale for b, gradient in result.embeds.items()})
            for name, value in scalars.items():
                made.set_scalar(term.scalars[name], result.parameters[name] * scale, value)
            if term.matching:
                of_term = self.weights[self.objective.loss_name("matching", term)]
                replicas = self.comm.graph.last_stage(term.second).replicas
                factor = injected_scale(replicas, loss_scale, weight, of_term)
                scale = torch.full((), factor, device=self.device)
                matched = match(
                    self.comm,
                    term,
                    term_batch,
                    outputs,
                    shared,
                    sizes=[
                        told[rank][term.first]
                        for rank in self.comm.graph.last_stage(term.first).ranks
                    ],
                    scoring=scoring,
                    scale=scale,
                )
                self._note_matching(number, matched, weight, of_term)
                made.add_tokens(matched.gradients)
        pieces = made.by_micro_batch()
        if self.objective.may_lack_rows:
            self._count_learning(pieces)
        return pieces

    def _count_learning(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """`pieces`: the gradients of each micro-batch. What is not finite counts, too."""
        for name, gradient in ((n, g) for piece in pieces for n, g in piece.items()):
            if name.endswith(ROWS):
                branch = self.objective.names.index(self.objective.branch_of(name))
                self.sums.learning[branch] += (gradient != 0).flatten(1).any(1).sum()

    def _numbered_from_0(
        self, own: Mapping[str, Rows], counts: Mapping[str, Sequence[int]]
    ) -> dict[str, Rows]:
        """Rows of a batch of its own, as which a micro-batch of each replica counts: replica by
        replica."""
        return {
            branch: replace(
                rows,
                position=torch.arange(len(rows.position), device=self.device)
                + sum(counts[branch][: self.comm.replica]),
            )
            for branch, rows in own.items()
        }

    @torch.no_grad()
    def _pair_loss(
        self, term: Term, gathered: GatheredRows, scalars: Mapping[str, Tensor]
    ) -> tuple[TermBatch, dict[str, Tensor], LossResult]:
        """The exchange of one term; the learned scalars as all of its last stages know them; the
        loss."""
        term_batch = align(gathered, term, alone=len(self.objective.terms) == 1)
        if len(self.objective.terms) == 1 and not term_batch.num_rows:
            raise OSError(
                "not one pair of this batch could be loaded; see bad_samples.jsonl in the folder "
                "of the run"
            )
        shared = share_parameters(self.comm, term, term_batch, scalars)
        return term_batch, shared, exchange_loss(self.comm, term, term_batch, shared)

    def _note(
        self,
        number: int,
        term: Term,
        term_batch: TermBatch,
        result: LossResult,
        scalars: Mapping[str, Tensor],
        weight: float,
    ) -> None:
        share = result.share * weight
        self.sums.loss += share * self.weights[self.objective.loss_name(term.kind, term)]
        self.sums.losses[number, 0] += share.double()
        if len(self._source_starts):
            shares, samples = by_source(term, term_batch, result, self._source_starts)
            self.sums.sources[:, number] += torch.stack([shares * weight, samples])
        # every last stage of the term sees the same; one counts
        if self.comm.rank == self.comm.graph.last_stage(term.branches[0]).ranks[0]:
            self.sums.misaligned += term_batch.num_misaligned
            self.sums.left_out[number] += term_batch.num_not_loaded
            self.sums.duplicates[number] += term_batch.num_duplicates
        if scalars and self.comm.replica == 0:
            before = sum(len(earlier.scalars) for earlier in self.objective.terms[:number])
            self.sums.scalars[before : before + len(scalars)] = torch.cat(
                [scalars[name] for name in term.scalars]
            ).double()

    def _note_matching(
        self, number: int, matched: Matched, weight: float, of_matching: float
    ) -> None:
        share = matched.share * weight
        self.sums.loss += share * of_matching
        self.sums.losses[number, 1] += share
        self.sums.losses[number, 2] += matched.num_right
        self.sums.losses[number, 3] += matched.num_pairs

    def _told(self, outputs: Sequence[Mapping[str, Tensor]]) -> Mapping[int, Any]:
        """Rank -> branch that ends there -> of each micro-batch its rows, and the tokens of a row
        (0: none). Of all last stages; of this one alone, as if its replicas were all alike or as
        `shares` says, where that is enough."""
        own = {rows: [_size(output, rows) for output in outputs] for rows in self._made_here}
        if self.shares and not self._matches:
            return self._told_beforehand(own)
        return (
            self.comm.gather_last_stages(own)
            if self._tells
            else dict.fromkeys(self.stage.ranks, own)
        )

    def _told_beforehand(self, own: Mapping[str, Sequence[tuple[int, int]]]) -> Mapping[int, Any]:
        """As `_told`, all rows of a replica as one micro-batch. Raises RuntimeError where this one
        brings others, in which the others would wait for ever."""
        for name, sizes in own.items():
            brought, expected = sum(n for n, _ in sizes), self.shares[name][self.comm.replica]
            if brought != expected:
                raise RuntimeError(
                    f"{self.stage.name}: {brought} rows of {name} came on this rank, whose share is "
                    f"{expected}; load what the shares say, or give none"
                )
        return {
            rank: {name: [(self.shares[name][replica], 0)] for name in self._made_here}
            for replica, rank in enumerate(self.stage.ranks)
        }

    def _came(self, told: Mapping[int, Any]) -> Mapping[str, int]:
        """All rows of the batch, by name, where some are not those of samples."""
        if not self.objective.has_further_rows or (self.shares and not self._matches):
            return self.num_made
        came = Counter[str]()
        for of_rank in told.values():
            came.update({name: sum(rows for rows, _ in each) for name, each in of_rank.items()})
        return came

    def _counts(
        self, told: Mapping[int, Any], numbers: Mapping[str, Numbers]
    ) -> dict[str, list[int]]:
        """Rows of each replica of this stage, of each name that is made in it."""
        counts = {
            name: [sum(rows for rows, _ in told[rank][name]) for rank in self.stage.ranks]
            for name in self._made_here
        }
        for name, each in counts.items():
            expected = self.num_rows.get(name, numbers[name].places)
            if sum(each) != expected:
                raise RuntimeError(
                    f"{self.stage.name}: {sum(each)} rows of {name} came for a batch of "
                    f"{numbers[name].items} samples with {numbers[name].each} of them per sample, "
                    f"which needs {expected}; load as many as train_batch was given"
                )
        return counts

    def own_rows(self, outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Rows]:
        """The embeddings of micro-batches of this last stage, in the order they ran."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        blank = Rows(torch.zeros(0, self.embed_dim, device=self.device), *[none] * NUM_TAGS)
        return {
            name: Rows.joined([blank, *(Rows.brought(name, output) for output in outputs)])
            for name in self._made_here
        }


def _size(output: Mapping[str, Tensor], branch: str) -> tuple[int, int]:
    tokens = output.get(f"{branch}_tokens")
    return len(output[f"{branch}_embeds"]), 0 if tokens is None else tokens.shape[1]
