"""A loss over prefixes of the embeddings, too, so that a search may keep the first few numbers of
each and compare by these (Matryoshka: Kusupati et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses.blocks import OverLoss, Part, Side, Sides


class _Prefix(NamedTuple):
    """A side of which the embeddings are cut."""

    embeds: Tensor
    label: Tensor
    weight: Tensor | None
    keys: Tensor | None
    sample: Tensor | None


@dataclass(frozen=True)
class Prefixed(OverLoss):
    """The mean of `loss` over the first d numbers of the embeddings, brought to length 1, for each
    d of `dims`, and over all D of them as they are.

    All of them share what the loss learns. A rank has all embeddings once, whatever the number of
    prefixes. `dims` rise, each below D; ValueError where one is not.
    """

    loss: Any
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.dims or list(self.dims) != sorted({*self.dims}) or self.dims[0] < 1:
            raise ValueError(f"prefixes {self.dims}: give numbers from 1 on that rise")

    @property
    def number(self) -> int:
        """Of the losses that are averaged."""
        return len(self.dims) + 1

    def statistics(
        self, sides: Sides, branch: str, mine: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor | None:
        """[b, number], those of each prefix; None where the loss has none."""
        found = [
            self.loss.statistics(cut, branch, mine, parameters) for cut in self._all_cut(sides)
        ]
        return None if found[0] is None else torch.stack(found, 1)

    def part(
        self,
        sides: Sides,
        branch: str,
        mine: Tensor,
        statistics: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> Part:
        """What the rows `mine` [b] of a side contribute."""
        parts = [
            self.loss.part(
                cut,
                branch,
                mine,
                {name: values[:, i] for name, values in statistics.items()},
                parameters,
            )
            for i, cut in enumerate(self._all_cut(sides))
        ]
        return self._mean(parts, {branch: sides[branch].embeds[mine]})

    def whole(self, sides: Sides, parameters: Mapping[str, Tensor]) -> Part:
        """The whole loss and all gradients."""
        parts = [self.loss.whole(cut, parameters) for cut in self._all_cut(sides)]
        return self._mean(parts, {name: side.embeds for name, side in sides.items()})

    def _all_cut(self, sides: Sides) -> list[Sides]:
        """The sides cut to each of `dims`, then as they are."""
        width = next(iter(sides.values())).embeds.shape[1]
        if self.dims[-1] >= width:
            raise ValueError(
                f"prefixes {', '.join(map(str, self.dims))} of embeddings of {width}: each must be "
                f"below {width}"
            )
        cut = [{name: _cut(side, d) for name, side in sides.items()} for d in self.dims]
        return [*cut, sides]

    def _mean(self, parts: Sequence[Part], rows: Mapping[str, Tensor]) -> Part:
        """`rows`: of each branch those whose gradients the parts have."""
        shares = {
            name: torch.stack([part.shares[name] for part in parts]).sum(0) / self.number
            for name in parts[0].shares
        }
        parameters = {
            name: torch.stack([part.parameters[name] for part in parts]).sum(0) / self.number
            for name in parts[0].parameters
        }
        embeds = {}
        for name, embedded in rows.items():
            gradient = parts[-1].embeds[name].clone()  # which may be a view of many
            for d, part in zip(self.dims, parts):
                gradient[:, :d] += _through_length(embedded[:, :d], part.embeds[name])
            embeds[name] = gradient / self.number
        return Part(shares, embeds, parameters)


def _cut(side: Side, dim: int) -> Side:
    embeds = F.normalize(side.embeds[:, :dim])
    return _Prefix(embeds, side.label, side.weight, side.keys, side.sample)


def _through_length(rows: Tensor, gradient: Tensor) -> Tensor:
    """∂L/∂ of `rows` [b, d] from that of x / |x| of each: (g − x̂ (x̂ · g)) / |x|."""
    length = rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
    unit = rows / length
    return (gradient - unit * (unit * gradient).sum(1, keepdim=True)) / length
