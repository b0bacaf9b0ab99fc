"""Evaluation during training: retrieval and alignment of the held-out sets, through the stages that
train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.batching.requests import evaluation_requests
from data.prepared import HeldOut
from data.progress import Bar, progress_bar
from engine.evaluation import PairTotals
from engine.executor import ForkEngine
from engine.json_messages import from_first_rank
from launch.feeding import Feeding
from launch.journal import Journal
from launch.loss_weights import HeldOutFigures, LossWeights
from launch.records import AVERAGED
from launch.run.queries import (
    NUM_ANSWERS,
    NUM_QUERIES,
    Answers,
    query_rows,
)
from models.losses.blocks import Side, Sides, first_of, other_of
from models.metrics.alignment import alignment_figures, alignment_sums
from models.metrics.annotations import choice_sums, equal
from models.metrics.retrieval import (
    NUM_SUMS,
    Relevance,
    first_answers,
    query_figures,
    query_sums,
    relevant_ranks,
)

NUM_FOUND = NUM_QUERIES * (1 + NUM_ANSWERS * 3)  # queries, and what `first_answers` returns


class Evaluator:
    """Measures the held-out sets with the weights of the run and, if `averaged`, with their moving
    average; writes the figures to the journal, and passes them on to the weights of the losses.
    All ranks call it together."""

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

    def evaluate(self, step: int) -> None:
        """Measure after `step` steps: recalls and figures of alignment by held-out set, equal on
        all ranks. Those of the averaged weights have the prefix `AVERAGED`."""
        found: dict[str, dict[str, float]] = {}
        answers: dict[str, list[Answers]] = {}
        for prefix in self.prefixes:
            with self.engine.averaged_weights() if prefix else nullcontext():
                for name, held_out in self.feeding.data.held_out.items():
                    figures, of_set = self._measure(name, held_out)
                    found[prefix + name] = figures
                    # the first ones are of the run's own weights
                    answers.setdefault(name, of_set)
        epoch = self.feeding.batching.order.epochs_before(step)
        self.journal.evaluation(step, epoch, found, answers)
        self._weigh(step, found)

    def complete(self, step: int) -> None:
        """The evaluation of the step at which this process begins, unless the run's folder has it.
        A checkpoint is written before its evaluation, so what follows from that follows now."""
        folder = self.journal.folder
        names = {prefix + name for prefix in self.prefixes for name in self.num_samples}
        if from_first_rank(folder.first_rank and folder.lacks(step, names)):
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

    def _measure(self, name: str, held_out: HeldOut) -> tuple[dict[str, float], list[Answers]]:
        """Where there are several pairs, the figures of one end in its name:
        `alignment/image_text`. Two branches without a loss are compared too."""
        share, first_rank = self.feeding.batch, self.journal.folder.first_rank
        shown = self.feeding.batching.batches.annotations
        shown = None if shown is None else replace(shown, source=held_out.source)
        requests = evaluation_requests(
            held_out.subset,
            self.engine.comm.replica,
            share.replicas,
            share.micro_batch_size,
            shown,
        )
        batches = self.feeding.held_out(held_out.source, requests)
        with progress_bar(
            None, f"evaluating {name}", "micro-batch", len(requests), shown=first_rank
        ) as bar:
            measured = self.engine.evaluate(
                None if batches is None else _counted(batches, bar),
                len(requests),
                len(held_out.subset),
                _measured,
            )
        values: dict[str, float] = {}
        answers: list[Answers] = []
        for comparison in self.engine.objective.comparisons:
            totals = measured[comparison.name]
            of_pair = f"/{comparison.name}" if len(measured) > 1 else ""
            asked = shown if comparison.made else None
            in_sample = asked.kind.phrase_to_extent if asked else ""
            values |= _figures(totals, comparison.rows, of_pair, in_sample)
            rows: tuple[np.ndarray, np.ndarray | None] = (held_out.subset, None)
            if asked is not None:
                rows = asked.places(held_out.subset, training=False).samples(held_out.subset)
                values[asked.kind.num_unseen] = len(rows[0]) - totals.num_samples
                every = asked.in_all(held_out.subset)
                values[asked.kind.num_beyond] = float(every - len(rows[0]))
            found = {
                direction: (
                    sums[-NUM_FOUND:-NUM_QUERIES].view(NUM_QUERIES, -1, 3).cpu(),
                    sums[-NUM_QUERIES:].cpu(),
                )
                for direction, sums in totals.directions.items()
            }
            answers.append(Answers(held_out.source, *rows, found, asked.kind if asked else None))
        return values, answers


def _figures(
    totals: PairTotals, branches: tuple[str, str], of_pair: str, in_sample: str
) -> dict[str, float]:
    """Recalls and alignment of two branches, from the sums of `_measured`. `of_pair`: the end of
    the names, where there are several pairs; `in_sample`: what the recalls of phrases among the
    annotations of their samples are called."""
    directions, num_samples = totals
    values: dict[str, float] = {}
    for direction, sums in directions.items():
        within, of_all = sums[: 2 * NUM_SUMS].view(2, NUM_SUMS).tolist()
        values |= query_figures(direction, of_all) | query_figures(in_sample, within)
    one_way, other_way = (sums[2 * NUM_SUMS : -NUM_FOUND] for sums in directions.values())
    figures = alignment_figures(one_way, other_way, num_samples, branches)
    values |= {f"{figure}{of_pair}": value for figure, value in figures.items()}
    return values | ({f"num_samples{of_pair}": num_samples} if of_pair else {})


def _counted(batches: Iterator[Any], bar: Bar) -> Iterator[Any]:
    for batch in batches:
        yield batch
        bar.update(not isinstance(batch, list))  # a list: the outlines of those that follow


def _measured(sides: Sides, branch: str, mine: Tensor) -> Tensor:
    own, other = sides[branch], sides[other_of(sides, branch)]
    rows = torch.arange(len(own.label), device=mine.device)
    # without keys no two samples have equal values
    own_key, other_key = (rows if side.keys is None else side.keys[:, 0] for side in (own, other))
    relevance = Relevance.of(own_key, other_key, rows, rows)
    here = relevance.asked_by(mine)
    # the same length on all ranks, also where there are no rows; no row has the number -1
    asked = mine.new_full((NUM_QUERIES,), -1)
    chosen = query_rows(len(rows))
    asked[: len(chosen)] = torch.from_numpy(chosen).to(mine.device)
    answers = first_answers(own.embeds, other.embeds, relevance, mine, asked, NUM_ANSWERS)
    # places in the set instead of rows, of which some may be missing
    answers[..., 0] = _places(other, answers[..., 0].long())
    queries = _places(own, torch.where(torch.isin(asked, mine), asked + 1, 0))
    within = torch.zeros(NUM_SUMS, dtype=torch.float64, device=mine.device)
    if own.sample is not None and other.sample is not None and branch != first_of(sides):
        phrase = rows if own.keys is None else own.keys[:, 0]
        annotation = rows if other.keys is None else other.keys[:, 1]
        within = choice_sums(
            own.embeds[mine],
            other.embeds,
            own.sample[mine],
            other.sample,
            equal(annotation, phrase[mine]),
        )
    return torch.cat(
        [
            within,
            query_sums(relevant_ranks(own.embeds, other.embeds, here), here),
            alignment_sums(own.embeds[mine], other.embeds, mine),
            answers.flatten(),
            queries.double(),
        ]
    )


def _places(side: Side, number: Tensor) -> Tensor:
    """The place + 1 in the set of each row that has a number 1..B; 0 of 0."""
    return F.pad(side.label + 1, (1, 0))[number]
