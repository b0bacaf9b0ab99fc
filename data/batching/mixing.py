"""How often the samples of each data set come in an epoch: as weights, temperature and floors say,
and as the losses of the sets fall.

Weights follow the losses slowly, within bounds, and from epoch to epoch only. A set whose loss
falls more slowly than those of the others gets more of an epoch; one that falls faster, as a set
does that is repeated until it is known by heart, gives way (after the training rates of GradNorm,
Chen et al. 2018, section 3.2). With the mean loss per sample lᵢ of set i in an epoch, l'ᵢ in the
one before, and its share pᵢ, the factor fᵢ of its weight becomes

    log fᵢ  <-  KEPT · log fᵢ + rate · (log lᵢ/l'ᵢ − Σⱼ pⱼ log lⱼ/l'ⱼ),      1 / MOST <= fᵢ <= MOST

All is a function of the losses of the steps and of a state that a checkpoint keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.batching.order import Parts

KEPT = 0.9  # of a factor's logarithm, each epoch: without a trend it goes back to 1
MOST = 2.0  # so one set gains on another at most fourfold


def mixed(parts: Parts, temperature: float = 1.0, floors: Sequence[float] | None = None) -> Parts:
    """The same sets with the weights by which `temperature` and `floors` hold; an epoch stays as
    long as it was.

    With s = number · weight, the share of a set in an epoch is s^(1/T) / Σ s^(1/T). T = 1 is as the
    weights say, T -> ∞ the same for all; what multilingual BERT (Devlin 2018, exponent 1/T = 0.7)
    and XLM-R (Conneau et al. 2020, section 3.1, 0.3) do with languages. Then no share is below the
    floor of its set, see `raised_to_floors`. Shares become whole visits by largest remainders: a
    floor holds to within one sample.

    Errors: ValueError for floors of more than 1 together, for a floor of a set without samples, for
    a set that its weight leaves without a visit.
    """
    least = np.zeros(len(parts)) if floors is None else np.asarray(floors, np.float64)
    if math.fsum(least) > 1 + 1e-9:
        raise ValueError(f"floors {least.tolist()}: give shares of an epoch, at most 1 together")
    sizes = np.array([count * weight for count, weight in parts])
    for number, ((count, weight), floor) in enumerate(zip(parts, least, strict=True), 1):
        if floor > 0 and not count * weight:
            why = "no training samples" if not count else "weight 0"
            raise ValueError(
                f"data set {number} has {why}, and a floor of {floor:g}; give it the floor 0, or "
                "take it out of --data"
            )
    if not sizes.any():
        return parts
    natural = sizes / sizes.sum()
    scaled = (sizes / sizes.max()) ** (1 / temperature)
    shares = raised_to_floors(natural if temperature == 1 else scaled / scaled.sum(), least)
    if not np.array_equal(shares, natural):
        parts = _visited(parts, apportioned(shares, _visits(parts).sum()))
    for number, ((count, _), size, visits) in enumerate(zip(parts, sizes, _visits(parts)), 1):
        if size > 0 and visits == 0:
            raise ValueError(
                f"data set {number} has {count} training samples with a share of an epoch that is "
                "less than one of them; give it more in --data-weights, a floor in --data-floors, "
                "or take it out of --data"
            )
    return parts


def pulled(parts: Parts, factors: Sequence[float], floors: Sequence[float] | None = None) -> Parts:
    """The same sets with their weights times `factors` > 0; an epoch stays as long as it was. No
    share falls below its floor, and none below one visit, unless it is there already: that is where
    it stays."""
    visits = _visits(parts)
    least = np.maximum(0.0 if floors is None else np.asarray(floors), 1 / visits.sum())
    wanted = visits * np.asarray(factors)
    least = np.minimum(least, visits / visits.sum())
    found = apportioned(raised_to_floors(wanted / wanted.sum(), least), visits.sum())
    return parts if np.array_equal(found, visits) else _visited(parts, found)


def _visits(parts: Parts) -> np.ndarray:
    """[sets] samples of each that an epoch visits, repetitions counted."""
    return np.array([round(count * weight) for count, weight in parts])


def _visited(parts: Parts, visits: np.ndarray) -> Parts:
    pairs = zip(parts, visits.tolist())
    return tuple((count, visit / count if count else 0.0) for (count, _), visit in pairs)


def raised_to_floors(shares: np.ndarray, floors: np.ndarray) -> np.ndarray:
    """Shares of 1 with none below its floor: those that are get it, the others give up in
    proportion to what they have, and so on while that brings another one below its own. The floors
    are at most 1 together."""
    low = np.zeros(len(shares), bool)
    while True:
        others = shares[~low].sum()
        scale = max(0.0, 1 - floors[low].sum()) / others if others > 0 else 0.0
        raised = np.where(low, floors, shares * scale if low.any() else shares)
        below = ~low & (raised < floors)
        if not below.any():
            return raised
        low |= below


def apportioned(shares: np.ndarray, total: int) -> np.ndarray:
    """[sets] int64 that add up to `total`, each the nearest below or above its share of it: largest
    remainders first (Hamilton's method)."""
    exact = shares * total
    visits = np.floor(exact).astype(np.int64)
    visits[np.argsort(visits - exact, kind="stable")[: total - visits.sum()]] += 1
    return visits


# -- weights that follow the losses


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

    def after_step(self, losses: Sequence[float], samples: Sequence[int]) -> Trends:
        """After a step with so many samples of each set, and such a loss per sample; one that is
        not finite does not count."""
        sums, numbers = list(self.sums), list(self.samples)
        for i, (loss, number) in enumerate(zip(losses, samples, strict=True)):
            if math.isfinite(loss):
                sums[i] += loss * number
                numbers[i] += number
        return replace(self, sums=tuple(sums), samples=tuple(numbers))

    def falls(self) -> np.ndarray:
        """[sets] logarithm of the last loss in parts of the one before; nan where one of them is
        not known."""
        pairs = zip(self.before, self.losses)
        return np.array([math.log(now / old) if old and now else math.nan for old, now in pairs])


@dataclass(frozen=True)
class Adaptation:
    """How the weights of data sets follow their losses: of `parts`, as they were asked for, with
    what `rate`. `floors`: of their shares."""

    names: tuple[str, ...]
    parts: Parts
    rate: float
    floors: tuple[float, ...] | None = None

    def after_epoch(self, trends: Trends) -> Trends:
        """The epoch under way has ended: the factors move by the formula above. Sets of which
        nothing is known have no say, and go back towards 1."""
        pairs = zip(trends.sums, trends.samples)
        losses = tuple(max(0.0, total / number) if number else 0.0 for total, number in pairs)
        ended = replace(
            Trends.start(len(self.parts)),
            factors=trends.factors,
            before=trends.losses,
            losses=losses,
        )
        fall, factors = ended.falls(), np.array(trends.factors)
        shares = np.array([count * weight for count, weight in self.parts]) * factors
        known = (shares > 0) & ~np.isnan(fall)
        logarithms = KEPT * np.log(factors)
        if known.any():
            mean = shares[known] @ fall[known] / shares[known].sum()
            logarithms[known] += self.rate * (fall[known] - mean)
        bounded = np.exp(np.clip(logarithms, -np.log(MOST), np.log(MOST)))
        return replace(ended, factors=tuple(bounded.tolist()))

    def mix(self, trends: Trends) -> Parts:
        return pulled(self.parts, trends.factors, self.floors)

    def reason(self, trends: Trends, mixed: Parts, now: Parts) -> str:
        """Why sets that were `mixed` like that are mixed like this now."""
        words = [
            f"{name} {old:.3g} -> {new:.3g} (loss {loss:.3g}, "
            f"{'trend not known' if math.isnan(fall) else f'{math.expm1(fall):+.1%}'})"
            for name, (_, old), (_, new), loss, fall in zip(
                self.names, mixed, now, trends.losses, trends.falls()
            )
        ]
        return f"weights {', '.join(words)}"
