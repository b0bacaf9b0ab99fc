"""Compares every two branches over a held-out set, also those that no loss compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine.communication import Communicator
from engine.loss.term_batch import Rows, TermBatch, align, gather, numbers_of
from engine.loss_protocols import Side
from engine.objective import Comparison

Measure = Callable[[Mapping[str, Side], str, Tensor], Tensor]


class PairTotals(NamedTuple):
    """What was measured of one pair. `directions`, such as image_to_text and text_to_image: what
    `measure` returned, summed over all rows; `num_samples`: that have both halves, or other
    items."""

    directions: dict[str, Tensor]
    num_samples: int


def compare_held_out(
    comm: Communicator,
    own: Mapping[str, Rows],
    num_samples: int,
    embed_dim: int,
    measure: Measure,
) -> dict[str, PairTotals]:
    """By the names of `Objective.comparisons`, on every rank; all of them call it together. `own`:
    the rows of this last stage; empty on other stages. `measure`: see `ForkEngine.evaluate`. Raises
    RuntimeError for rows that are missing or are of other samples."""
    objective, gathered = comm.objective, None
    if own:
        came = Counter[str]()
        if objective.has_further_rows:
            here = {name: len(rows.position) for name, rows in own.items()}
            for told in comm.gather_last_stages(here).values():
                came.update(told)
        numbers = numbers_of(objective, came, num_samples)
        counts = {branch: comm.gather_counts(len(rows.position)) for branch, rows in own.items()}
        gathered = gather(
            comm,
            objective.comparisons,
            own,
            counts=counts,
            numbers=numbers,
            num_rows={},
        )
    totals = {}
    for pair in objective.comparisons:
        batch = None
        if gathered is not None and set(pair.rows) & set(gathered.own):
            batch = align(gathered, pair, alone=len(objective.terms) == 1)
        directions = {}
        for branch, other in (pair.rows, pair.rows[::-1]):
            if batch is not None and branch in batch.own:
                sides, mine = batch.everyone, batch.own[branch].position
            else:
                mine = torch.zeros(0, dtype=torch.int64, device=comm.device)
                blank = torch.zeros(0, embed_dim, device=comm.device)
                sides = dict.fromkeys(
                    pair.rows, Side(blank, mine, weight=None, sample=mine if pair.made else None)
                )
            directions[f"{branch}_to_{other}"] = comm.sum_over(measure(sides, branch, mine))
        totals[pair.name] = PairTotals(directions, _compared(comm, pair, batch, num_samples))
    return totals


def _compared(
    comm: Communicator, pair: Comparison, batch: TermBatch | None, num_samples: int
) -> int:
    """How many samples have both halves of the pair. Raises RuntimeError where its branches brought
    other samples."""
    counted = [0.0, 0.0]
    if batch is not None and comm.rank == comm.graph.last_stage(pair.first).ranks[0]:
        counted = [float(batch.num_rows), float(batch.num_misaligned)]
    compared, misaligned = comm.sum_over(torch.tensor(counted, device=comm.device)).tolist()
    if misaligned:
        raise RuntimeError(
            f"the {' and '.join(pair.rows)} branches disagree about {int(misaligned)} of "
            f"{num_samples} held-out samples; each must load a row for every one of them"
        )
    return int(compared)
