"""Steps that are skipped because the loss or a gradient was not finite, and the samples they had.
Who sees it in which precision: `engine/README.md`, "Skipped steps"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.loss.term_batch import LOADED, Rows

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
    """What a last stage knows of the rows that it gave to the loss. Waits for the device."""
    seen: Seen = {}
    for branch, rows in ((branch, rows) for part in own for branch, rows in part.items()):
        # what could not be loaded is not in the loss
        finite = torch.isfinite(rows.embeds).all(1) | ~rows.has(LOADED)
        seen.setdefault(branch, []).extend(
            zip(rows.position.tolist(), rows.index.tolist(), finite.tolist())
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
