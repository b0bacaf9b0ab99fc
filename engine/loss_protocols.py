"""What the engine asks of losses, which know nothing of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class Side(NamedTuple):
    """All rows of a branch, in global order. Rows with equal labels belong together: the label is
    the place of the sample in the batch."""

    embeds: Tensor  # [B, D]
    label: Tensor  # [B] int64
    weight: Tensor | None  # [B] int64, millionths
    # [B, 1 + c] int64: of the row's own value, and of the c rows of its sample on the other sides.
    # Equal keys are equal values. None: no two samples of the batch have equal ones.
    keys: Tensor | None = None
    # [B] int64, the sample in the data that the row is of; None: a row is its sample
    sample: Tensor | None = None


class LossPart(Protocol):
    """What some rows contribute to the loss."""

    @property
    def shares(self) -> Mapping[str, Tensor]:
        """branch -> [b], of the loss, of each of these rows."""

    @property
    def embeds(self) -> Mapping[str, Tensor]:
        """branch -> the whole ∂L/∂ of these rows [b, D]."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """∂L/∂ of the learned scalars from these rows; the rows of either side add up to the
        whole."""


class ContrastiveLoss(Protocol):
    """A loss over all rows of a term. `sides`: of its branches, in their order; `mine` [b]: places of
    own rows among those of the branch."""

    @property
    def parameters(self) -> Mapping[str, float]:
        """The [1]-shaped learned scalars it uses, with first values; the first branch emits
        them."""

    def statistics(
        self, sides: Mapping[str, Side], branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor | None:
        """[b, …], what other rows need of these, the same of every branch but for the first
        dimension; None: nothing, whatever the rows."""

    def part(
        self,
        sides: Mapping[str, Side],
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> LossPart:
        """`statistics`: of all rows of all branches, where there are any. The parts of all rows of
        all branches add up to the loss; those of the first give the whole gradient of the
        scalars."""

    def whole(self, sides: Mapping[str, Side], parameters: Mapping[str, Tensor]) -> LossPart:
        """All rows of all branches."""

    def constrained(
        self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The whole gradients of the scalars as the optimizer is to see them."""

    def reported(self, name: str, value: float) -> tuple[str, float]:
        """The name and the value by which metrics show one of the scalars."""


class MatchingLoss(Protocol):
    """A loss of single pairs."""

    def negatives(
        self,
        sides: Mapping[str, Side],
        branch: str,
        mine: Tensor,
        parameters: Mapping[str, Tensor],
        seed: int,
    ) -> Tensor:
        """[b] int64: for each of the rows `mine` [b] one of the other side that does not belong to
        it; −1: there is none."""

    def weights(self, sides: Mapping[str, Side]) -> Mapping[str, Tensor]:
        """branch -> [B], what a pair counts that was made for this row."""

    def losses(self, scores: Tensor, belong: Tensor) -> Tensor:
        """[P] of P pairs."""
