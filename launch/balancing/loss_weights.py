"""How much each of two losses counts: fixed, or following what they do. Plain numbers, the same on every rank.

Weights are what was asked for times a factor per loss, and together as much as was asked for, so that the size of a step stays what it was. A
look comes every `interval` steps; losses are smoothed between looks, factors stay from 1 / MOST to MOST (that of matching, under `measured`, from
1 / MOST² on), and every change has a reason.

    uncertainty   log f = -s, and s follows the gradient of exp(-s) L + s, a loss with a learned uncertainty (Kendall, Gal & Cipolla 2018):
                  s <- s - RATE * (1 - exp(-s) L)
    measured      a loss that falls more slowly than the other gets more (after Liu, Johns & Davison 2019), with L' at the look before:
                  log f <- KEPT * log f + RATE * (log L/L' - the mean of both). And matching waits for the embeddings, for negatives are
                  hard only where similarities mean something: f of matching is times max(1/MOST, 1 - L/L1), L the contrastive loss, L1
                  that of the first look
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.settings.options import Options

MODES = ("fixed", "uncertainty", "measured")
SMOOTHING = 0.1  # weight of a step in the smoothed loss
RATE, KEPT, MOST = 0.2, 0.9, 4.0


@dataclass(frozen=True)
class Followed:
    """What is known of the losses, by name: JSON-like, for a checkpoint."""

    logarithms: Mapping[str, float] = field(default_factory=dict)  # of the factors
    smoothed: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)  # at the last look
    first: Mapping[str, float] = field(default_factory=dict)  # at the first look


class LossWeights:
    """The weights of a run. `asked`: by loss, "contrastive" and, if pairs are matched, "matching"; `interval`: steps from look to look."""

    def __init__(self, mode: str, asked: Mapping[str, float], interval: int):
        if mode not in MODES:
            raise ValueError(f"loss weights {mode!r} are not known; give one of {', '.join(MODES)}")
        if interval < 1 or any(not 0 < weight < math.inf for weight in asked.values()):
            raise ValueError(f"loss weights {dict(asked)}, a look every {interval} steps: weights must be above 0, and steps at least 1")
        self.mode, self.asked, self.interval, self._followed = mode, dict(asked), interval, Followed()

    @classmethod
    def of(cls, options: Options) -> LossWeights:
        matching = {"matching": options.matching_weight} if options.fusion else {}
        return cls(options.loss_weights, {"contrastive": 1.0, **matching}, options.loss_weights_every)

    def weights(self) -> dict[str, float]:
        """What each loss counts in the next step."""
        factors = {name: math.exp(self._followed.logarithms.get(name, 0.0)) for name in self.asked}
        if self.mode == "measured" and "matching" in factors:
            factors["matching"] *= max(1 / MOST, aligned(self._followed))
        total = sum(self.asked.values()) / sum(self.asked[name] * factor for name, factor in factors.items())
        return {name: weight * factors[name] * total for name, weight in self.asked.items()}

    def after_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """After the `step`-th step, from 1, with `contrastive_loss` and `matching_loss`: why weights are others now, at a look. Losses that
        are not finite do not count."""
        losses = {name: metrics.get(f"{name}_loss", math.nan) for name in self.asked}
        if self.mode == "fixed" or not all(math.isfinite(loss) for loss in losses.values()):
            return None
        old = self._followed.smoothed or losses
        smoothed = {name: old[name] + SMOOTHING * (losses[name] - old[name]) for name in losses}
        self._followed = replace(self._followed, smoothed=smoothed)
        if step % self.interval:
            return None
        before = self.weights()
        logarithms = {name: min(max(value, -math.log(MOST)), math.log(MOST)) for name, value in self._moved().items()}
        self._followed = replace(self._followed, logarithms=logarithms, before=smoothed, first=self._followed.first or smoothed)
        after = self.weights()
        if after == before:
            return None
        changes = (f"{name} {before[name]:.3g} -> {after[name]:.3g} (loss {smoothed[name]:.3g})" for name in losses)
        return f"loss weights, {self.mode}: {', '.join(changes)}"

    def _moved(self) -> dict[str, float]:
        """The logarithms of the factors, by the formulas above."""
        now, known = self._followed.smoothed, {name: self._followed.logarithms.get(name, 0.0) for name in self.asked}
        if self.mode == "uncertainty":
            return {name: log + RATE * (1 - math.exp(log) * now[name]) for name, log in known.items()}
        last = self._followed.before or now
        fall = {name: math.log(now[name] / last[name]) if now[name] > 0 and last[name] > 0 else 0.0 for name in known}
        mean = sum(fall.values()) / len(fall)
        return {name: KEPT * log + RATE * (fall[name] - mean) for name, log in known.items()}

    def state(self) -> dict[str, Any]:
        """JSON-like."""
        return asdict(self._followed)

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        self._followed = Followed(**state)


def aligned(followed: Followed) -> float:
    """How far the contrastive loss had come at the last look from where it was at the first, from 0 to 1."""
    if not followed.first or followed.first["contrastive"] <= 0:
        return 0.0
    return max(0.0, 1 - followed.before["contrastive"] / followed.first["contrastive"])
