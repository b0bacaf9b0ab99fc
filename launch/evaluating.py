"""Evaluation during training: retrieval and alignment of the held-out sets, through the stages that
train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.batching.sampler import evaluation_requests
from data.progress import Bar, progress_bar
from engine.executor import ForkEngine
from engine.processes.start import from_first_rank
from launch.balancing.loss_weights import HeldOutFigures, LossWeights
from launch.feeding import Feeding
from launch.run.journal import Journal
from launch.run.queries import NUM_ANSWERS, Answers, compared_samples, query_rows
from launch.run.report import recalls
from models.metrics.alignment import alignment_figures, alignment_sums
from models.metrics.retrieval import RECALL_AT, first_answers, recall_hits

AVERAGED = "ema/"  # before the name of a set that the averaged weights were measured on


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
        self._answers: dict[str, Answers] = {}  # of the newest measurement, by held-out set

    def evaluate(self, step: int) -> None:
        """After `step` steps."""
        found = self.measure()
        epoch = self.feeding.batching.order.epochs_before(step)
        self.journal.evaluation(step, epoch, found)
        self.journal.queries(step, self._answers)
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
        found: dict[str, dict[str, float]] = {}
        self._answers = {}
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
            compared = compared_samples(held_out)
            queries = query_rows(len(compared))
            first_rank = self.journal.folder.first_rank
            with progress_bar(
                None, f"evaluating {name}", "micro-batch", len(requests), shown=first_rank
            ) as bar:
                measured = self.engine.evaluate(
                    None if batches is None else _counted(batches, bar),
                    len(requests),
                    len(held_out.subset),
                    partial(_measured, queries=torch.from_numpy(queries)),
                )
            num_answers = len(queries) * NUM_ANSWERS * 2
            values: dict[str, float] = {}
            for pair in self.engine.objective.pairs:
                directions, num_samples = measured[pair.name]
                hits = {
                    direction: sums[: len(RECALL_AT)].tolist()
                    for direction, sums in directions.items()
                }
                sums = [
                    of_direction[len(RECALL_AT) : len(of_direction) - num_answers]
                    for of_direction in directions.values()
                ]
                figures = alignment_figures(*sums, num_samples, pair.branches)
                several = len(measured) > 1
                of_pair = f"/{pair.name}" if several else ""
                values |= recalls(hits, num_samples) if num_samples else {}
                values |= {f"{figure}{of_pair}": value for figure, value in figures.items()}
                values |= {f"num_samples{of_pair}": num_samples} if several else {}
                # rows are numbered anew where a sample could not be read: nobody knows whose they are
                if {*pair.branches} == {"image", "text"} and num_samples == len(compared):
                    found = {
                        direction: of_direction[len(of_direction) - num_answers :]
                        .view(len(queries), NUM_ANSWERS, 2)
                        .cpu()
                        for direction, of_direction in directions.items()
                    }
                    # the first measurement is of the run's own weights, later ones of averages
                    self._answers.setdefault(
                        name, Answers(held_out.source, compared, queries, found)
                    )
            yield name, values


def _counted(batches: Iterator[Any], bar: Bar) -> Iterator[Any]:
    for batch in batches:
        yield batch
        bar.update(not isinstance(batch, list))  # a list: the outlines of those that follow


def _measured(own: Tensor, other: Tensor, target: Tensor, queries: Tensor) -> Tensor:
    answers = first_answers(own, other, target, queries.to(own.device), NUM_ANSWERS)
    return torch.cat(
        [
            recall_hits(own, other, target),
            alignment_sums(own, other, target),
            answers.flatten(),
        ]
    )
