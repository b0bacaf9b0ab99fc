"""A loss of one's own: any differentiable function of all embeddings of its branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.losses.blocks import Part, Sides, first_of, shown_scale


@dataclass(frozen=True)
class PlainLoss:
    """`function(first, second, scalars)` -> [], of the embeddings [B, D] of both branches of a pair,
    row i of one belonging to row i of the other; of a term over k branches, of those of all k.

    It is the loss of the whole global batch, a mean over its B samples, and autograd differentiates
    it. Every rank that holds embeddings of the term computes all of it, so where it makes a B × B
    matrix each rank makes a whole one: 4·B² bytes, a few times. The built-in losses compute only a
    rank's own rows, in blocks. One row per sample, all of the same weight.

    `parameters`: names and first values of what it learns, each [1]; it finds them in `scalars`.
    """

    function: Callable[..., Tensor]
    parameters: Mapping[str, float] = field(default_factory=dict)

    def statistics(
        self, sides: Sides, branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> None:
        """Nothing: every rank sees all embeddings."""
        return None

    def part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> Part:
        """What the rows `mine` [b] of a side contribute. Every row has an equal share of its side's,
        and all k sides have equal ones of the loss."""
        loss, gradients, scalars = self._differentiated(sides, parameters)
        number = len(sides[branch].label)
        part = len(mine) / number  # the rows of one side give the whole gradient of the scalars
        return Part(
            {branch: (loss / (len(sides) * number)).expand(len(mine))},
            {branch: gradients[branch][mine]},
            {name: gradient * part for name, gradient in scalars.items()},
        )

    def whole(self, sides: Sides, parameters: Mapping[str, Tensor]) -> Part:
        """The whole loss and all gradients."""
        loss, gradients, scalars = self._differentiated(sides, parameters)
        shares = {
            branch: (loss / (len(sides) * len(side.label))).expand(len(side.label))
            for branch, side in sides.items()
        }
        return Part(shares, gradients, scalars)

    def constrained(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """As they are: a limit, such as that of a scale, belongs into the function."""
        return dict(gradients)

    def reported(self, name: str, value: float) -> tuple[str, float]:
        """As they are; a logit_scale as the built-in losses show theirs."""
        return shown_scale(name, value)

    def _differentiated(
        self, sides: Sides, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss [], ∂L/∂ of the embeddings [B, D] of each branch, ∂L/∂ of the scalars."""
        own = sides[first_of(sides)]
        lengths = {len(side.label) for side in sides.values()}
        if len(lengths) > 1 or own.weight is not None:
            raise ValueError(
                "a loss of your own sees one row per sample, all of the same weight; take several "
                "texts per image and sample weights out, or use a built-in loss"
            )
        given = {branch: side.embeds.detach().requires_grad_() for branch, side in sides.items()}
        learned = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        with torch.enable_grad():
            loss = self.function(*given.values(), learned)
            wanted = [*given.values(), *learned.values()]
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        gradients = [
            torch.zeros_like(value) if gradient is None else gradient
            for value, gradient in zip(wanted, found)
        ]
        return (
            loss.detach(),
            dict(zip(given, gradients)),
            dict(zip(learned, gradients[len(given) :])),
        )
