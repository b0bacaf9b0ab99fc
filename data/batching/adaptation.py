"""Weights of several data sets that follow how their losses fall: slowly, within bounds, and from
epoch to epoch only.

A set whose loss falls more slowly than those of the others gets more of an epoch; one that falls
faster, as a set does that is repeated until it is known by heart, gives way (after the training
rates of GradNorm, Chen et al. 2018, section 3.2). With the mean loss per sample lᵢ of set i in an
epoch, l'ᵢ in the one before, and its share pᵢ, the factor fᵢ of its weight becomes

    log fᵢ  <-  KEPT · log fᵢ + rate · (log lᵢ/l'ᵢ − Σⱼ pⱼ log lⱼ/l'ⱼ),      1 / MOST <= fᵢ <= MOST

All is a function of the losses that the steps tell and of a state that a checkpoint keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.batching.mixture import Parts, pulled

KEPT = 0.9  # of a factor's logarithm, each epoch: without a trend it goes back to 1
MOST = 2.0  # so one set gains on another at most fourfold


@dataclass(frozen=True)
class Trends:
    """What is known of the losses, by set: JSON-like, for a checkpoint. A loss of 0 is not known:
    no sample came, or it has no logarithm."""

    factors: tuple[float, ...]  # of the weights
    before: tuple[float, ...]  # mean loss per sample in the last whole epoch but one
    losses: tuple[float, ...]  # and in the last
    sums: tuple[float, ...]  # of the epoch that is under way: losses of all samples so far
    samples: tuple[int, ...]  # and how many they are

    @classmethod
    def start(cls, number: int) -> Trends:
        nothing = (0.0,) * number
        return cls((1.0,) * number, nothing, nothing, nothing, (0,) * number)


@dataclass(frozen=True)
class Adaptation:
    """How the weights of data sets follow their losses: of `parts`, as they were asked for, with
    what `rate`. `floors`: of their shares."""

    names: tuple[str, ...]
    parts: Parts
    rate: float
    floors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate {self.rate}: a number above 0 and at most 1 is needed")

    def after_epoch(self, trends: Trends) -> Trends:
        """The epoch under way has ended."""
        losses = tuple(
            max(0.0, total / number) if number else 0.0
            for total, number in zip(trends.sums, trends.samples)
        )
        factors = moved(trends.factors, self.parts, trends.losses, losses, self.rate)
        return replace(
            Trends.start(len(self.parts)), factors=factors, before=trends.losses, losses=losses
        )

    def mix(self, trends: Trends) -> Parts:
        return pulled(self.parts, trends.factors, self.floors)

    def reason(self, trends: Trends, mixed: Parts, now: Parts) -> str:
        """Why sets that were `mixed` like that are mixed like this now."""
        words = [
            f"{name} {old:.3g} -> {new:.3g} (loss {loss:.3g}, "
            f"{'trend not known' if math.isnan(fall) else f'{math.expm1(fall):+.1%}'})"
            for name, (_, old), (_, new), loss, fall in zip(
                self.names, mixed, now, trends.losses, falls(trends.before, trends.losses)
            )
        ]
        return f"weights {', '.join(words)}"


def after_step(trends: Trends, losses: Sequence[float], samples: Sequence[int]) -> Trends:
    """A step has had so many samples of each set, with such a loss per sample; one that is not
    finite does not count."""
    added = [
        (loss * number, number) if math.isfinite(loss) else (0.0, 0)
        for loss, number in zip(losses, samples, strict=True)
    ]
    return replace(
        trends,
        sums=tuple(total + more for total, (more, _) in zip(trends.sums, added)),
        samples=tuple(number + more for number, (_, more) in zip(trends.samples, added)),
    )


def falls(before: Sequence[float], now: Sequence[float]) -> np.ndarray:
    """Of losses, the logarithm of what they are now in parts of what they were; nan where one of
    them is not known."""
    return np.array([math.log(n / b) if b and n else math.nan for b, n in zip(before, now)])


def moved(
    factors: Sequence[float],
    parts: Parts,
    before: Sequence[float],
    now: Sequence[float],
    rate: float,
) -> tuple[float, ...]:
    """The factors after an epoch with the losses `now`, by the formula above. Sets of which nothing
    is known have no say, and go back towards 1."""
    fall = falls(before, now)
    shares = np.array([count * weight * factor for (count, weight), factor in zip(parts, factors)])
    known = (shares > 0) & ~np.isnan(fall)
    logarithms = KEPT * np.log(factors)
    if known.any():
        logarithms[known] += rate * (
            fall[known] - shares[known] @ fall[known] / shares[known].sum()
        )
    return tuple(np.exp(np.clip(logarithms, -np.log(MOST), np.log(MOST))).tolist())
