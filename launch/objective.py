"""The objective of a run: the branches that its towers make, and the loss of each pair of them."""

from __future__ import annotations

from collections.abc import Sequence

from data.options import read_pairs
from engine.loss_protocols import ContrastiveLoss, MatchingLoss
from engine.objective import Branch, Objective, Pair
from models.towers.layers import Tower


def pairs_of(
    given: str, loss: ContrastiveLoss, matching: MatchingLoss | None = None
) -> tuple[Pair, ...]:
    """The pairs of `--pairs`, each with the loss and what it learns: `logit_scale` of images and
    texts, `tone_text_logit_scale` of others."""
    return tuple(
        Pair(
            pair.first,
            pair.second,
            loss,
            weight=pair.weight,
            matching=matching,
            prefix="" if pair.modalities == ("image", "text") else f"{pair.first}_{pair.second}_",
        )
        for pair in read_pairs(given)
    )


def objective_of(towers: Sequence[Tower], pairs: Sequence[Pair]) -> Objective:
    """The branches of the towers, and the pairs of them that losses compare. The first tower of a
    pair owns what its loss learns."""
    return Objective(tuple(Branch(tower.branch, tower.inputs) for tower in towers), tuple(pairs))
