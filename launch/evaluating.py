"""Evaluation during training: retrieval and alignment of the held-out sets, through the stages that
train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from data.batching.sampler import evaluation_requests
from engine.executor import ForkEngine
from engine.processes.start import from_first_rank
from launch.balancing.loss_weights import HeldOutFigures, LossWeights
from launch.feeding import Feeding
from launch.run.journal import Journal
from launch.run.report import recalls
from launch.tracking.queries import Answers
from models.metrics.alignment import alignment_figures, alignment_sums
from models.metrics.retrieval import RECALL_AT, answers_of, recall_hits

AVERAGED = "ema/"  # before the name of a set that the averaged weights were measured on
QUERIES, ANSWERS = 8, 5  # that a tracker shows of each direction


class Evaluator:
    """Measures the held-out sets with the weights of the run and, if `averaged`, with their moving
    average; writes the figures to the journal, and tells them to the weights of the losses. All
    ranks call it together."""

    def __init__(
        self,
        engine: ForkEngine,
        feeding: Feeding,
        journal: Journal,
        loss_weights: LossWeights,
        averaged: bool,
    ):
        self.engine, self.feeding, self.journal = engine, feeding, journal
        self.loss_weights = loss_weights
        self.prefixes = ("", AVERAGED) if averaged else ("",)
        # the tracker is on the first rank, and all ranks have to find the answers together
        self.shows_queries = from_first_rank(journal.shows_queries)
        self.answers: dict[str, dict[str, Answers]] = {}
        """Of the last evaluation with the run's own weights: by held-out set and direction."""

    def evaluate(self, step: int) -> None:
        """After `step` steps."""
        found = self.measure()
        epoch = self.feeding.batching.order.epochs_before(step)
        self.journal.evaluation(step, epoch, found)
        self.journal.queries(step, self.feeding.data.held_out, self.answers)
        self._weigh(step, found)

    def complete(self, step: int) -> None:
        """The evaluation of the step at which this process begins, unless the run's folder has it.
        A checkpoint is written before its evaluation, so what follows from that follows now."""
        folder = self.journal.folder
        if from_first_rank(folder.first_rank and folder.lacks(step, self.names)):
            self.evaluate(step)
        elif self.loss_weights.mode == "alignment":
            self._weigh(step, from_first_rank(folder.first_rank and folder.evaluated(step)))

    def _weigh(self, step: int, found: HeldOutFigures) -> None:
        # with the run's own weights, not with their average
        own = {name: found[name] for name in self.feeding.data.held_out}
        reason = self.loss_weights.after_evaluation(step, own)
        self.journal.loss_weights(step, reason, self.loss_weights)

    @property
    def num_samples(self) -> Mapping[str, int]:
        """Of each held-out set."""
        return {name: len(held_out.subset) for name, held_out in self.feeding.data.held_out.items()}

    @property
    def names(self) -> set[str]:
        """Of what `measure` returns."""
        return {prefix + name for prefix in self.prefixes for name in self.num_samples}

    def measure(self) -> dict[str, dict[str, float]]:
        """By held-out set its recalls and figures of alignment, equal on all ranks. Those of the
        average have the prefix `ema/`."""
        found = {}
        for prefix in self.prefixes:
            with self.engine.averaged_weights() if prefix else nullcontext():
                found |= {prefix + name: values for name, values in self._held_out()}
        return found

    def _held_out(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Where there are several pairs, the figures of one end in its name:
        `alignment/image_text`."""
        for name, held_out in self.feeding.data.held_out.items():
            share = self.feeding.batch
            requests = evaluation_requests(
                held_out.subset, self.engine.replica, share.replicas, share.micro_batch_size
            )
            batches = self.feeding.held_out(held_out.source, requests)
            shown = queries_of(len(held_out.subset)) if self.shows_queries else np.zeros(0, int)
            measure = _measure(torch.from_numpy(shown))
            measured = self.engine.evaluate(batches, len(requests), len(held_out.subset), measure)
            values: dict[str, float] = {}
            self.answers[name] = {}
            for pair in self.engine.objective.pairs:
                directions, num_samples = measured[pair.name]
                hits = {
                    direction: sums[: len(RECALL_AT)].tolist()
                    for direction, sums in directions.items()
                }
                end = len(RECALL_AT)
                sums = [of[end : len(of) - shown.size * 2 * ANSWERS] for of in directions.values()]
                # where a sample lacks a half of the pair, places are others than in the subset
                if shown.size and num_samples == len(held_out.subset):
                    self.answers[name] |= {
                        direction: _answers(shown, of[len(of) - shown.size * 2 * ANSWERS :])
                        for direction, of in directions.items()
                    }
                figures = alignment_figures(*sums, num_samples, pair.branches)
                several = len(measured) > 1
                of_pair = f"/{pair.name}" if several else ""
                values |= recalls(hits, num_samples) if num_samples else {}
                values |= {f"{figure}{of_pair}": value for figure, value in figures.items()}
                values |= {f"num_samples{of_pair}": num_samples} if several else {}
            yield name, values


def queries_of(num_samples: int) -> np.ndarray:
    """Places in a held-out set that are shown at every evaluation, spread over all of it: int64,
    `QUERIES` or as many as there are."""
    return np.unique(np.linspace(0, num_samples - 1, min(QUERIES, num_samples)).astype(np.int64))


def _measure(asked: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What the ranks measure of their own rows, as one vector that adds up over them."""

    def measured(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
        sums = [recall_hits(own, other, target), alignment_sums(own, other, target)]
        if len(asked):
            sums.append(answers_of(own, other, target, asked, ANSWERS).flatten())
        return torch.cat(sums)

    return measured


def _answers(queries: np.ndarray, sums: Tensor) -> Answers:
    found, similarity = sums.cpu().numpy().reshape(2, len(queries), ANSWERS)
    return Answers(queries, np.rint(found).astype(np.int64) - 1, similarity)
