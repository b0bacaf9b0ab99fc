"""What a tail does when it comes to `ComputeLoss`: its rows into the loss, the gradients of what its layers made, and numbers to tell.

outputs of the waiting micro-batches ── meet ── exchange_loss ─────┐
                                           └─── match, if asked ───┴── gradients by micro-batch, times the scale of the stage
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.communication import Communicator
from engine.exchange import NO_WEIGHT, ContrastiveLoss, LossResult, Meeting, Rows, by_source, exchange_loss, meet, share_parameters
from engine.matching import MatchingLoss, match

LOSSES = ("contrastive", "matching")


@dataclass
class Sums:
    """Of the losses of one step on this rank, all as float64 vectors that ranks add up; zero where there is no tail."""

    loss: Tensor  # [1]
    losses: Tensor  # [4], shares of both losses without their weights, pairs judged rightly, pairs
    sources: Tensor  # [2, S], shares of the loss and samples, by source
    scalars: Tensor  # what the loss learns, told by one rank
    misaligned: Tensor  # [1], places with different samples in the two branches, told by one rank
    num_left_out: int = 0  # samples, told by one rank
    given: list[dict[str, Rows]] = field(default_factory=list)  # what went into each loss, by branch

    @classmethod
    def zero(cls, num_sources: int, num_scalars: int, device: torch.device) -> Sums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(zeros(1), zeros(4), zeros(2, num_sources), zeros(num_scalars), zeros(1))

    def told(self) -> dict[str, Tensor]:
        return {
            "loss": self.loss,
            "misaligned": self.misaligned,
            "scalars": self.scalars,
            "source_shares": self.sources[0],
            "source_samples": self.sources[1],
            "losses": self.losses,
        }


class TailLoss:
    """The losses of this rank's tail. `matching`: the loss of pairs, None without; `source_starts` [S]: as in `by_source`.

    `equal_shares`: each replica of a stage has equally many samples of every global batch; else they tell each other.
    """

    def __init__(
        self,
        comm: Communicator,
        loss: ContrastiveLoss,
        matching: MatchingLoss | None,
        embed_dim: int,
        equal_shares: bool,
        source_starts: Sequence[int] | None,
    ):
        self.comm, self.place, self.device, self.embed_dim = comm, comm.stage, comm.device, embed_dim
        self.loss, self.matching, self._equal_shares = loss, matching, equal_shares
        # of one source nothing is told beside the loss
        self._source_starts = torch.tensor(source_starts or (), dtype=torch.int64, device=self.device)
        self.start_step()

    def start_step(self, texts_per_image: int = 1, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of the losses, where they are not 1."""
        self.texts_per_image, self.weights = texts_per_image, {**dict.fromkeys(LOSSES, 1.0), **(weights or {})}
        self.sums = Sums.zero(len(self._source_starts), len(self.loss.parameters), self.device)

    def gradients(
        self,
        outputs: Sequence[Mapping[str, Tensor]],
        num_samples: int,
        batch: int | None,
        weight: float,
        loss_scale: float,
        seed: int,
        fusion: nn.Module | None,
        most_pairs: int,
        inject: Callable[[list[tuple[Tensor, Tensor]]], None],
    ) -> list[dict[str, Tensor]]:
        """Of what the layers made of each micro-batch, by name. `outputs`: of the micro-batches that wait here, a batch of `num_samples` samples
        with those of the other replicas; `batch`: which of several in this step, each of the same `weight`; None: the global one.

        `loss_scale`: fp16's, else 1. `seed`, `fusion`, `most_pairs`, `inject`: see `match`.
        """
        sizes = {branch: [len(output[f"{branch}_embeds"]) for output in outputs] for branch in self.place.tail_of}
        counts = self._counts(sizes, num_samples)
        own = self.own_rows(outputs)
        self.sums.given.append(own)
        if batch is not None:  # a batch of its own: its rows are numbered from 0, replica by replica
            own = {
                b: replace(rows, position=torch.arange(len(rows.position), device=self.device) + sum(counts[b][: self.comm.replica]))
                for b, rows in own.items()
            }
        parameters = {name: outputs[0][name].detach() for name in self.loss.parameters if name in outputs[0]}
        with torch.no_grad():
            meeting = meet(self.comm, own, counts, self.texts_per_image)
            shared = share_parameters(self.comm, self.loss, meeting, parameters)
            result = exchange_loss(self.comm, self.loss, meeting, shared)
        self._note(meeting, result, parameters, weight)
        # ∂L/∂ of the own rows, L over the batch. The reduction over replicas averages what each accumulated: times the
        # number of replicas makes that the sum. fp16: times the loss scale, which the optimizer takes out again.
        scale = self.place.replicas * loss_scale * weight * self.weights["contrastive"]
        scale = scale + (result.share - result.share)  # a share that is not finite: not-a-number, so that the step is skipped
        pieces = {f"{branch}_embeds": (grad * scale).split(sizes[branch]) for branch, grad in result.embeds.items()}
        for name in parameters:  # the whole gradient goes with the first micro-batch
            pieces[name] = [result.parameters[name] * scale, *[torch.zeros_like(parameters[name])] * (len(outputs) - 1)]
        if self.matching:
            replicas = self.comm.graph.tail("text").replicas
            scale = torch.tensor(replicas * loss_scale * weight * self.weights["matching"], device=self.device)
            matched = match(self.comm, self.matching, fusion, meeting, outputs, shared, seed, most_pairs, scale, inject)
            self.sums.loss += matched.share * weight * self.weights["matching"]
            self.sums.losses += _vector(0.0, matched.share * weight, matched.num_right, matched.num_pairs, device=self.device)
            pieces |= matched.gradients
        return [{name: of_micro_batches[i] for name, of_micro_batches in pieces.items()} for i in range(len(outputs))]

    def _note(self, meeting: Meeting, result: LossResult, parameters: Mapping[str, Tensor], weight: float) -> None:
        self.sums.loss += result.share * weight * self.weights["contrastive"]
        self.sums.losses += _vector(result.share * weight, 0.0, 0.0, 0.0, device=self.device)
        if len(self._source_starts):
            shares, samples = by_source(meeting, result, self._source_starts)
            self.sums.sources += torch.stack([shares * weight, samples])
        if self.comm.rank == self.comm.graph.tail("image").ranks[0]:  # every tail sees the same; one counts
            self.sums.misaligned += meeting.num_misaligned
            self.sums.num_left_out += meeting.num_left_out
        if parameters and self.comm.replica == 0:
            self.sums.scalars = torch.cat([parameters[name] for name in self.loss.parameters]).double()

    def _counts(self, sizes: Mapping[str, list[int]], num_samples: int) -> dict[str, list[int]]:
        """Rows of each replica of this tail, for each branch that ends in it. `sizes`: rows of each of its own micro-batches."""
        counts = {branch: [sum(each)] * self.place.replicas for branch, each in sizes.items()}
        if not self._equal_shares:
            counts = {branch: self.comm.gather_counts(sum(each)) for branch, each in sizes.items()}
        for branch, each in counts.items():
            expected = num_samples * (self.texts_per_image if branch == "text" else 1)
            if sum(each) != expected:
                raise RuntimeError(
                    f"{self.place.name}: {sum(each)} rows of {branch} came for a batch of {num_samples} samples with "
                    f"{self.texts_per_image} texts per image, which needs {expected}; load as many as train_batch was told"
                )
        return counts

    def own_rows(self, outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Rows]:
        """The embeddings of micro-batches of this tail, in the order they ran."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        blank = torch.zeros(0, self.embed_dim, device=self.device)
        rows = {}
        for branch in self.place.tail_of:
            embeds, position, index = (
                [output[f"{branch}_{part}"].detach() for output in outputs] for part in ("embeds", "position", "index")
            )
            weight = [o.get(f"{branch}_weight", torch.full_like(p, NO_WEIGHT)) for o, p in zip(outputs, position)]
            rows[branch] = Rows(torch.cat([blank, *embeds]), *(torch.cat([none, *part]) for part in (position, index, weight)))
        return rows


def _vector(*numbers: Any, device: torch.device) -> Tensor:
    return torch.stack([torch.as_tensor(number, device=device).double() for number in numbers])
