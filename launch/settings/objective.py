"""The objective of a run: the branches that its towers make, and the loss of each pair of them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loss.exchange import ContrastiveLoss
from engine.loss.matching import MatchingLoss
from engine.objective import Branch, Objective, Pair
from models.towers.layers import Tower


def objective_of(towers: Sequence[Tower], loss: ContrastiveLoss, matching: MatchingLoss | None = None) -> Objective:
    """Two towers and the loss between them; the first one's head owns what the loss learns. `matching`: see `Pair`."""
    first, second = (tower.branch for tower in towers)
    return Objective(tuple(Branch(tower.branch, tower.inputs) for tower in towers), (Pair(first, second, loss, matching=matching),))
