"""Rows of one branch with each other: several views of an image, several captions of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.losses.blocks import OverLoss, Part, Sides, Targets, whole_by_parts
from models.losses.infonce import InfoNCE
from models.losses.sigmoid import Sigmoid


@dataclass(frozen=True)
class OtherRows(Targets):
    """As `Targets`, where both sides are the same rows: no row is compared with itself."""

    def positives(self, sides: Sides, branch: str, rows: Tensor) -> Tensor:
        return super().positives(sides, branch, rows) & ~_itself(sides, branch, rows)

    def masked(self, sides: Sides, branch: str, rows: Tensor) -> Tensor:
        itself, masked = _itself(sides, branch, rows), super().masked(sides, branch, rows)
        return itself if masked is None else itself | masked

    def num_positives(self, sides: Sides, branch: str) -> Tensor:
        found = Targets(self.duplicates).num_positives(sides, branch) - 1
        return found.clamp(min=1)  # rows that are nobody's have none


@dataclass(frozen=True)
class Views(OverLoss):
    """`loss` between all rows of one branch, of which each sample has two or more: those of a sample
    are each other's positives, all others negatives (NT-Xent where `loss` is InfoNCE: SimCLR, Chen
    et al. 2020, equation 1; beside the loss between images and texts: SLIP, Mu et al. 2022).

    With n rows in all, L = weighted mean over the rows of what `loss` says of a row against the other
    n − 1. What it learns is its own, and not shared with other terms. Raises ValueError for a loss
    whose targets reach beyond the positives.
    """

    loss: Any  # InfoNCE or Sigmoid

    def __post_init__(self) -> None:
        if type(self.loss) not in (InfoNCE, Sigmoid):
            raise ValueError(
                f"views of one branch are compared by infonce or sigmoid, not by {type(self.loss).__name__}"
            )
        if isinstance(self.loss, InfoNCE) and self.loss.label_smoothing:
            raise ValueError("views of one branch: label smoothing would make a row its own target")
        others = OtherRows(self.loss.targets.duplicates)
        object.__setattr__(self, "loss", replace(self.loss, targets=others))

    def statistics(
        self, sides: Sides, branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Those of `loss`, of the rows `mine` [b]."""
        return self.loss.statistics(_both(sides), branch, mine, parameters)

    def part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> Part:
        """What the rows `mine` [b] contribute: what they ask, and what they answer. To a loss
        between two sides that is half of it, and the other side has the other."""
        both = {name: each for each in statistics.values() for name in _both(sides)}
        part = self.loss.part(_both(sides), branch, mine, both, parameters)
        return Part(
            {branch: 2 * part.shares[branch]}, {branch: 2 * part.embeds[branch]}, part.parameters
        )

    def whole(self, sides: Sides, parameters: Mapping[str, Tensor]) -> Part:
        """The whole loss and all gradients."""
        return whole_by_parts(self, sides, parameters)


def _both(sides: Sides) -> Sides:
    """The one side as two."""
    ((branch, side),) = sides.items()
    return {branch: side, f"{branch}, again": side}


def _itself(sides: Sides, branch: str, rows: Tensor) -> Tensor:
    """Which of all rows each of `rows` is: [t, B] bool."""
    return rows[:, None] == torch.arange(len(sides[branch].label), device=rows.device)
