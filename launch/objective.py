"""The objective of a run: the branches that its towers make, and the loss of each pair of them."""

from __future__ import annotations

from collections.abc import Sequence

from data.options import DEFAULT_LOSS, loss_names, read_pairs
from engine.loss_protocols import ContrastiveLoss, MatchingLoss
from engine.objective import Branch, Objective, Pair
from models.losses import DUPLICATES, Prefixed, build_loss, phrase_duplicates
from models.towers.layers import Tower


def losses_of(
    given: str,
    loss: str,
    smoothing: float = 0.0,
    duplicates: str = DUPLICATES[0],
    prefixes: Sequence[int] = (),
) -> list[ContrastiveLoss]:
    """Of each pair of `--pairs` that of `--loss`. `smoothing`: of InfoNCE; `duplicates`: as
    `Targets`; of regions `phrase_duplicates` decides; `prefixes`: as `Prefixed`. Errors:
    ValueError."""
    losses = [
        build_loss(
            name,
            smoothing if name == DEFAULT_LOSS else 0.0,
            phrase_duplicates(name) if pair.made else duplicates,
        )
        for pair, name in zip(read_pairs(given), loss_names(loss, given))
    ]
    return [Prefixed(each, tuple(prefixes)) for each in losses] if prefixes else [*losses]


def pairs_of(
    given: str,
    loss: ContrastiveLoss | Sequence[ContrastiveLoss],
    matching: MatchingLoss | None = None,
) -> tuple[Pair, ...]:
    """The pairs of `--pairs`, each with the loss, or its own, and what that learns: `logit_scale`
    of images and texts, `tone_text_logit_scale` of others."""
    pairs = read_pairs(given)
    losses = loss if isinstance(loss, Sequence) else [loss] * len(pairs)
    return tuple(
        Pair(
            *pair.branches,
            own,
            weight=pair.weight,
            matching=matching,
            prefix="" if pair.name == "image_text" else f"{pair.name}_",
            made=pair.made,
        )
        for pair, own in zip(pairs, losses, strict=True)
    )


def objective_of(towers: Sequence[Tower], pairs: Sequence[Pair]) -> Objective:
    """The branches of the towers, and the pairs of them that losses compare. The first tower of a
    pair owns what its loss learns."""
    return Objective(tuple(Branch(tower.branch, tower.inputs) for tower in towers), tuple(pairs))
