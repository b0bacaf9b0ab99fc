"""What the losses share: a batch in two sides, their similarities in blocks of rows, the learned
scale.

M images and N texts of a batch (or rows of any two branches, the first of the pair and the second),
B rows of either side, b of them computed here, D embedding width. All M × N similarities never
exist at once: a block of rows is made, used and overwritten, and made again where a second pass is
needed (Inf-CL, Cheng et al. 2024; a rank's own rows against everyone: DisCo-CLIP, Chen et al.
2023). Everything is computed in the dtype of the embeddings, which is fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LOGIT_SCALE_LIMIT = math.log(100.0)
DUPLICATES = ("masked", "positives", "negatives")
WORK_BYTES = 64 * 2**20  # of a block, at least
WORK_SHARE = 64  # of a GPU's memory: one part in so many
COPIES = (
    4  # of a block that exist at once: the similarities, which are positives, what is made of them
)


class Side(Protocol):
    """All rows of one modality. Rows of the two sides with equal labels are of one sample, and
    every row has one on the other side, but for those with label −1: they are nobody's, such as
    texts that are given as negatives, and are compared with all without asking anything."""

    @property
    def embeds(self) -> Tensor:
        """[B, D]"""

    @property
    def label(self) -> Tensor:
        """[B] int64"""

    @property
    def weight(self) -> Tensor | None:
        """[B], of each row in the means, in any unit; None: equal."""

    @property
    def keys(self) -> Tensor | None:
        """[B, 1 + c] int64: the key of the row's value, then those of the c rows of its sample on
        the other side. Equal keys are equal values; None: no two samples have equal ones."""

    @property
    def sample(self) -> Tensor | None:
        """[B] int64, which sample of the data each is of; None: each is a sample by itself."""


# branch -> its rows; two branches, the first of the pair before the second
Sides = Mapping[str, Side]


def first_of(sides: Sides) -> str:
    """The first branch of the pair."""
    return next(iter(sides))


def other_of(sides: Sides, branch: str) -> str:
    """The branch that `branch` is compared with."""
    (other,) = (name for name in sides if name != branch)
    return other


class Part(NamedTuple):
    """What some rows of a side contribute: the parts of both sides' rows add up to the loss."""

    # branch -> [b], of the loss, of each of these rows; of both branches where one pass served both
    shares: dict[str, Tensor]
    embeds: dict[str, Tensor]  # branch -> the whole ∂L/∂ of these rows [b, D], as above
    # ∂L/∂ of the learned scalars [1] from these rows; the rows of either side together give the
    # whole
    parameters: dict[str, Tensor]


class OverLoss:
    """A loss that is made of another one, and learns what that does."""

    loss: Any

    @property
    def parameters(self) -> Mapping[str, float]:
        return self.loss.parameters

    @property
    def constrained(self) -> Callable[..., dict[str, Tensor]]:
        return self.loss.constrained

    @property
    def reported(self) -> Callable[[str, float], tuple[str, float]]:
        return self.loss.reported


def whole_by_parts(loss: Any, sides: Sides, parameters: Mapping[str, Tensor]) -> Part:
    """The whole loss and all gradients, of a loss that has no shorter way than a part of all rows of
    each side."""
    everyone = {
        name: torch.arange(len(side.label), device=side.label.device)
        for name, side in sides.items()
    }
    made = {n: loss.statistics(sides, n, rows, parameters) for n, rows in everyone.items()}
    statistics = {name: values for name, values in made.items() if values is not None}
    first, *others = (
        loss.part(sides, name, rows, statistics, parameters) for name, rows in everyone.items()
    )
    for part in others:
        first.shares.update(part.shares)
        first.embeds.update(part.embeds)
    return first


def block_bytes(device: torch.device) -> int:
    """What a block of similarities takes at most, with all that is made of it: more on a device
    with more memory. Each block reads the whole other side: of half a million rows 1 GB, for which
    the eight rows that 64 MiB hold are too few."""
    if device.type not in ("cuda", "xpu"):
        return WORK_BYTES
    memory = torch.get_device_module(device).get_device_properties(device).total_memory
    return max(WORK_BYTES, memory // WORK_SHARE)


def similarity_blocks(
    sides: Sides, branch: str, mine: Tensor, scale: Tensor, work_bytes: int | None, share: int = 1
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows `mine` [b] of a side against the whole other one, as many at a time as `work_bytes`
    hold, at least one; None: as the device's memory allows. `share`: one part of these in so many.

    Yields (which of `mine`, their embeddings times `scale` [t, D], scaled similarities [t, B]). The
    similarities are the caller's to change, and gone when the next are asked for.
    """
    own, other = sides[branch].embeds, sides[other_of(sides, branch)].embeds
    room = (work_bytes or block_bytes(own.device)) // share
    at_once = min(len(mine), max(1, room // (COPIES * max(1, len(other)) * other.element_size())))
    memory = own.new_empty(at_once, len(other))
    for start in range(0, len(mine), max(1, at_once)):
        where = mine[start : start + at_once]
        scaled = own[where] * scale
        yield (
            slice(start, start + len(where)),
            scaled,
            torch.mm(scaled, other.T, out=memory[: len(where)]),
        )


def belonging(sides: Sides, branch: str, rows: Tensor) -> Tensor:
    """Which rows of the other side are of the same sample as these rows of `branch`: bool [t, B].
    Of what is nobody's none, not even what is nobody's there."""
    label = sides[branch].label[rows]
    return label.masked_fill(label < 0, -2)[:, None] == sides[other_of(sides, branch)].label


def duplicates(sides: Sides, branch: str, rows: Tensor) -> Tensor | None:
    """Which rows of the other side belong to these rows of `branch` as much as those of their own
    sample, which are among them: bool [t, B]. Either the rows themselves are equal to a row of the
    other's sample, or the other is equal to one of their own. None: no two samples have equal
    values."""
    own, other = sides[branch].keys, sides[other_of(sides, branch)].keys
    if own is None or other is None:
        return None
    own = own[rows]
    found = own.new_zeros(len(own), len(other), dtype=torch.bool)
    # a column at a time: c is small, and [t, B, c] may not be
    for partner in other[:, 1:].unbind(1):
        found |= own[:, :1] == partner
    for partner in own[:, 1:].unbind(1):
        found |= partner[:, None] == other[:, 0]
    return found


@dataclass(frozen=True)
class Targets:
    """Which rows of the other side are positives, and which are no negatives either.

    `duplicates`, of samples that have an equal image, sound or caption: "masked", neither positives
    nor negatives, "positives" (SupCon: Khosla et al. 2020; UniCL: Yang et al. 2022), or
    "negatives", as all other samples.
    """

    duplicates: str = DUPLICATES[0]

    def __post_init__(self) -> None:
        if self.duplicates not in DUPLICATES:
            raise ValueError(f"duplicates {self.duplicates!r}; give one of {', '.join(DUPLICATES)}")

    def positives(self, sides: Sides, branch: str, rows: Tensor) -> Tensor:
        """Of these rows of `branch`: bool [t, B]."""
        found = duplicates(sides, branch, rows) if self.duplicates == "positives" else None
        return belonging(sides, branch, rows) if found is None else found

    def masked(self, sides: Sides, branch: str, rows: Tensor) -> Tensor | None:
        """bool [t, B]; None: there are none."""
        found = duplicates(sides, branch, rows) if self.duplicates == "masked" else None
        return None if found is None else found & ~belonging(sides, branch, rows)

    def num_positives(self, sides: Sides, branch: str) -> Tensor:
        """Of each row of `branch`: [B]."""
        side, other = sides[branch], sides[other_of(sides, branch)]
        if self.duplicates == "positives" and side.keys is not None:
            rows = torch.arange(len(side.label), device=side.label.device)
            parts = rows.split(max(1, WORK_BYTES // max(1, len(other.label))))
            return torch.cat([self.positives(sides, branch, part).sum(1) for part in parts])
        ordered = other.label.sort().values
        return torch.searchsorted(ordered, side.label, right=True) - torch.searchsorted(
            ordered, side.label
        )


def mean_weights(side: Side) -> Tensor:
    """Of each row in a weighted mean over all of its side: [B], the sum is 1; 0 where all are 0."""
    if side.weight is None:
        return side.embeds.new_full((len(side.label),), 1 / max(1, len(side.label)))
    return _shares(side.weight.to(side.embeds.dtype))


def asking_weights(side: Side) -> Tensor:
    """Of each row in a weighted mean over those of its side that are somebody's: [B], the sum is 1;
    0 where nobody asks."""
    weight = side.label.new_ones(len(side.label)) if side.weight is None else side.weight
    return _shares((weight * (side.label >= 0)).to(side.embeds.dtype))


def _shares(weight: Tensor) -> Tensor:
    total = weight.sum()
    return weight / total.masked_fill(total == 0, 1)


def logit_scale_exp(logit_scale: Tensor) -> Tensor:
    """exp(logit_scale), at most 100."""
    return logit_scale.clamp(max=LOGIT_SCALE_LIMIT).exp()


def shown_scale(name: str, value: float) -> tuple[str, float]:
    """A scalar as metrics show it: the scale as the losses use it, others as they are."""
    if name.endswith("logit_scale"):
        return f"{name}_exp", math.exp(min(value, LOGIT_SCALE_LIMIT))
    return name, value


def stop_outward(
    gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The whole gradients of the learned scalars, of all rows, as the optimizer is to see them.

    At the limit of the scale only a gradient that leads back below it passes: the clamp is a
    projection, and the scale cannot get stuck.
    """
    outward = (parameters["logit_scale"] >= LOGIT_SCALE_LIMIT) & (gradients["logit_scale"] < 0)
    return {**gradients, "logit_scale": gradients["logit_scale"].masked_fill(outward, 0.0)}
