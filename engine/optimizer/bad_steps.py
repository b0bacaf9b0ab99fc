"""Steps that are skipped because the loss or a gradient was not finite, and the samples they had.
Who sees it in which precision: `engine/README.md`, "Skipped steps"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.loss.term_batch import Rows

# branch -> (place in the global batch, index, is the embedding finite) of rows
Seen = dict[str, list[tuple[int, int, bool]]]


@dataclass(frozen=True)
class BadStep:
    """The samples of a skipped step, as indices in the data set.

    `samples`: the global batch, in its order. `not_finite`: by branch, those whose embedding was
    not finite; empty where only a gradient was not. Batch normalisation carries a sample's
    not-a-number into its whole micro-batch.
    """

    samples: tuple[int, ...]
    not_finite: Mapping[str, tuple[int, ...]]


def seen_by(own: Iterable[Mapping[str, Rows]]) -> Seen:
    """What a tail knows of the rows that it gave to the loss. Waits for the device."""
    seen: Seen = {}
    for branch, rows in ((branch, rows) for part in own for branch, rows in part.items()):
        not_loaded = rows.index < 0  # and not in the loss
        finite = torch.isfinite(rows.embeds).all(1) | not_loaded
        index = torch.where(not_loaded, -1 - rows.index, rows.index)
        seen.setdefault(branch, []).extend(
            zip(rows.position.tolist(), index.tolist(), finite.tolist())
        )
    return seen


def bad_step(seen: Sequence[Seen], branches: Sequence[str]) -> BadStep:
    """From what every rank has seen. The first of the branches names the samples, and each other
    one those that the ones before it lack."""
    samples: dict[int, None] = {}
    not_finite = {}
    for branch in branches:
        rows = sorted(row for one in seen for row in one.get(branch, ()))
        samples |= dict.fromkeys(index for _, index, _ in rows)
        not_finite[branch] = tuple(index for _, index, finite in rows if not finite)
    return BadStep(tuple(samples), not_finite)
