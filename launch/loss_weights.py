"""How much each loss counts: fixed, or following the losses or the embeddings.

Plain numbers, the same on every rank.

Losses have their names from `Objective.losses`: `contrastive` and, with fusion, `matching`; with
several pairs of branches `contrastive/image_text` and so on.

Weights are what was asked for times a factor per loss, and together as much as was asked for, so
that the size of a step stays what it was. Weights are updated every `interval` steps; losses are
smoothed between updates, factors stay from 1 / MOST to MOST (that of matching, under `measured`,
from 1 / MOST² on), and every change has a reason.

    uncertainty   log f = -s, and s follows the gradient of exp(-s) L + s, a loss with a learned
                  uncertainty (Kendall, Gal & Cipolla 2018):
                  s <- s - RATE * (1 - exp(-s) L)
    measured      a loss that falls more slowly than the others gets more (after Liu, Johns &
                  Davison 2019), with L' at the update before:
                  log f <- KEPT * log f + RATE * (log L/L' - the mean over all losses)
                  And matching waits for the embeddings, for negatives are hard only where
                  similarities mean something: f of matching is times max(1/MOST, 1 - L/L1), L the
                  contrastive loss of its pair, L1 that of the first update
    alignment     a pair whose held-out embeddings improve less than those of other pairs gets more.
                  Weights are updated after each evaluation instead. The score S of a pair is its
                  alignment plus the mean uniformity of its two branches
                  (`models/metrics/alignment.py`), the sum that Wang & Isola (2020) minimise, lower
                  where embeddings are better; mean over the held-out sets. With S1 at the first
                  evaluation:
                  log f <- KEPT * log f + RATE * (S - S1 - the mean of S - S1 over all pairs)
                  Matching has no alignment, and keeps the weight that was asked for
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.objective import Objective, loss_metric

if TYPE_CHECKING:  # which imports this module
    from launch.config.groups import ModelOptions

MODES = ("fixed", "uncertainty", "measured", "alignment")
SMOOTHING = 0.1  # weight of a step in the smoothed loss
RATE, KEPT, MOST = 0.2, 0.9, 4.0

HeldOutFigures = Mapping[str, Mapping[str, float]]  # by held-out set and name


@dataclass(frozen=True)
class Followed:
    """What is known of the losses, by name: JSON-like, for a checkpoint. Under `alignment` of their
    scores."""

    logarithms: Mapping[str, float]  # of the factors
    smoothed: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)  # at the last update
    first: Mapping[str, float] = field(default_factory=dict)  # at the first update
    evaluated: int = -1  # the step after which the last evaluation was that counted


class LossWeights:
    """The weights of a run. `mode`: one of `MODES`; `asked`: by loss, above 0, see above;
    `interval`: steps from update to update, at least 1.

    Raises ValueError where `alignment` has no two pairs.
    """

    def __init__(self, mode: str, asked: Mapping[str, float], interval: int):
        check_mode(mode, asked)
        self.mode, self.asked, self.interval = mode, dict(asked), interval
        self._followed = Followed(dict.fromkeys(asked, 0.0))

    @classmethod
    def of(
        cls, options: ModelOptions, objective: Objective, held_out: Collection[str]
    ) -> LossWeights:
        """`held_out`: the names of the held-out sets. Raises ValueError where `alignment` has
        none."""
        if options.loss_weights == "alignment" and not held_out:
            raise ValueError(
                "--loss-weights alignment goes by held-out samples, and none are held out; give "
                "--val-fraction F above 0 or --val-data SPEC, or other --loss-weights"
            )
        asked = dict(objective.losses)
        for name in filter(_is_matching, asked):
            asked[name] *= options.matching_weight
        return cls(options.loss_weights, asked, options.loss_weights_every)

    def weights(self) -> dict[str, float]:
        """What each loss counts in the next step."""
        factors = {name: math.exp(log) for name, log in self._followed.logarithms.items()}
        if self.mode == "measured":
            for name in filter(_is_matching, factors):
                factors[name] *= max(1 / MOST, self._aligned(name))
        asked = {name: self.asked[name] for name in self._followers}
        total = sum(asked.values()) / sum(weight * factors[name] for name, weight in asked.items())
        return self.asked | {name: weight * factors[name] * total for name, weight in asked.items()}

    @property
    def _followers(self) -> list[str]:
        """The losses whose weights move."""
        return [name for name in self.asked if self.mode != "alignment" or not _is_matching(name)]

    def after_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """After the `step`-th step, from 1, with the metrics of the losses (`contrastive_loss`,
        `matching_loss`, …): why weights are others now, at an update. Losses that are not finite do
        not count."""
        losses = {name: metrics.get(loss_metric(name), math.nan) for name in self.asked}
        if self.mode in ("fixed", "alignment") or not all(map(math.isfinite, losses.values())):
            return None
        old = self._followed.smoothed or losses
        smoothed = {name: old[name] + SMOOTHING * (losses[name] - old[name]) for name in losses}
        self._followed = replace(self._followed, smoothed=smoothed)
        return None if step % self.interval else self._update(self._moved(), smoothed, "loss")

    def after_evaluation(self, step: int, held_out: HeldOutFigures) -> str | None:
        """Under `alignment`, after the evaluation that follows the `step`-th step: why weights are
        others now.

        `held_out`: by name of the set, the figures of `Feeding.evaluate_held_out`, such as
        `alignment/image_text` and `uniformity/text/image_text`. An evaluation that is repeated
        changes nothing, and one with figures that are not finite does not count. Raises ValueError
        for a pair of which no set has figures.
        """
        if self.mode != "alignment" or step <= self._followed.evaluated:
            return None
        scores = {name: score(name.partition("/")[2], held_out) for name in self._followers}
        if not all(map(math.isfinite, scores.values())):
            return None
        first = self._followed.first or scores
        risen = {name: scores[name] - first[name] for name in scores}
        reason = self._update(self._towards(risen), scores, "alignment + uniformity")
        self._followed = replace(self._followed, evaluated=step)
        return reason

    def _update(self, moved: Mapping[str, float], seen: Mapping[str, float], of: str) -> str | None:
        """Take these logarithms, within bounds; why weights are others then. `seen`: what they
        follow from."""
        before, limit = self.weights(), math.log(MOST)
        bounded = {name: min(max(value, -limit), limit) for name, value in moved.items()}
        logarithms = {**self._followed.logarithms, **bounded}
        first = self._followed.first or seen
        self._followed = replace(self._followed, logarithms=logarithms, before=seen, first=first)
        after = self.weights()
        if after == before:
            return None
        changes = (
            f"{name} {before[name]:.3g} -> {after[name]:.3g} ({of} {seen[name]:.3g})"
            for name in seen
        )
        return f"loss weights, {self.mode}: {', '.join(changes)}"

    def _moved(self) -> dict[str, float]:
        """The logarithms of the factors, by the formulas above."""
        now, known = self._followed.smoothed, self._followed.logarithms
        if self.mode == "uncertainty":
            return {n: log + RATE * (1 - math.exp(log) * now[n]) for n, log in known.items()}
        last = self._followed.before or now
        falls = {n: now[n] / last[n] if now[n] > 0 and last[n] > 0 else 1.0 for n in known}
        return self._towards({name: math.log(fall) for name, fall in falls.items()})

    def _towards(self, lag: Mapping[str, float]) -> dict[str, float]:
        """The logarithms of the factors after a step towards what lags behind the mean of all."""
        known, mean = self._followed.logarithms, sum(lag.values()) / len(lag)
        return {name: KEPT * known[name] + RATE * (own - mean) for name, own in lag.items()}

    def _aligned(self, matching: str) -> float:
        """How far the contrastive loss of a pair that is matched had come at the last update from
        the first, from 0 to 1."""
        contrastive = matching.replace("matching", "contrastive", 1)
        first = self._followed.first.get(contrastive, 0.0)
        return max(0.0, 1 - self._followed.before[contrastive] / first) if first > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """JSON-like."""
        return asdict(self._followed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._followed = Followed(**state)


def check_mode(mode: str, losses: Collection[str]) -> None:
    """Raises ValueError where these losses leave `mode` nothing to weigh."""
    pairs = [name for name in losses if not _is_matching(name)]
    if mode == "alignment" and len(pairs) < 2:
        matched = len(pairs) < len(losses)
        raise ValueError(
            "loss weights 'alignment' move weight between the contrastive losses of pairs of "
            "branches, so they need two pairs, and this run has "
            f"one{', beside matching, of which no alignment is measured' if matched else ''}; give "
            f"{'fixed, uncertainty or measured' if matched else 'fixed'}, or train another pair"
        )


def score(pair: str, held_out: HeldOutFigures) -> float:
    """Alignment plus the mean uniformity of both branches of a pair, mean over the held-out sets;
    lower is better. Sets in which fewer than two samples have both halves of the pair have no
    figures and do not count; ValueError where that is all of them."""
    scores = []
    for figures in held_out.values():
        uniformity = [
            figure
            for name, figure in figures.items()
            if name.startswith("uniformity/") and name.endswith(f"/{pair}")
        ]
        if uniformity:
            scores.append(figures[f"alignment/{pair}"] + sum(uniformity) / len(uniformity))
    if not scores:
        raise ValueError(
            f"loss weights 'alignment': nothing was measured of the pair {pair}, which takes a "
            "held-out set in which two samples have both halves, and "
            f"{', '.join(held_out) or 'no set'} was evaluated; hold out samples of every pair, or "
            "give other --loss-weights"
        )
    return sum(scores) / len(scores)


def _is_matching(loss: str) -> bool:
    return loss.partition("/")[0] == "matching"
