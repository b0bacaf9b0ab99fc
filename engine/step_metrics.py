"""What a step tells, and the line of metrics.jsonl that it makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.objective import Objective, loss_metric
from engine.optimizer.bad_steps import BadStep

MOST_RANKS_LISTED = 64  # in a line of metrics.jsonl


class SourceLoss(NamedTuple):
    """Of the samples of one source in a step: how many counted in the loss, and what they added to
    it per sample, see `mean_losses`."""

    samples: int
    loss: float


def mean_losses(shares: Sequence[float], samples: Sequence[float]) -> tuple[SourceLoss, ...]:
    """By source: B / n of what its n samples add to a loss over B samples of all sources; nan where
    there are none.

    So Σ n / B · loss over the sources is the whole loss. Of samples with weights it is the mean of
    weight · loss, weights in parts of their mean over the batch: heavy samples make the loss of
    their source larger.
    """
    total = sum(samples)
    return tuple(
        SourceLoss(int(n), share * total / n if n else math.nan)
        for share, n in zip(shares, samples)
    )


def losses_of_sources(
    objective: Objective,
    shares: Sequence[float],
    samples: Sequence[float],
    weights: Mapping[str, float],
) -> tuple[SourceLoss, ...]:
    """By source, over all pairs: their losses by `mean_losses`, weighted; the samples of the pair
    that has most of them.

    `shares` and `samples`: of each pair in turn, by source. `weights`: in this step, by loss.
    """
    number = len(shares) // len(objective.terms)
    by_pair = [
        mean_losses(shares[start : start + number], samples[start : start + number])
        for start in range(0, len(shares), number or 1)
    ]
    of_pairs = [weights[objective.loss_name(pair.kind, pair)] for pair in objective.terms]
    return tuple(_over_pairs(of_pairs, of_source) for of_source in zip(*by_pair))


def _over_pairs(weights: Sequence[float], losses: Sequence[SourceLoss]) -> SourceLoss:
    if len(weights) == 1:  # it is of the whole loss
        return losses[0]
    there = [weight * own.loss for weight, own in zip(weights, losses) if own.samples]
    return SourceLoss(max(own.samples for own in losses), sum(there) if there else math.nan)


def losses_of(
    objective: Objective, totals: Sequence[float], weights: Mapping[str, float]
) -> dict[str, float]:
    """Of the losses of a step where there are several, without their weights: by pair, where there
    are several pairs, and the matching losses with the part of the matching pairs that were judged
    rightly; and `weights`, by loss. `totals`: four numbers of each pair, as in `Sums.losses`."""
    found: dict[str, float] = {}
    if len(weights) == 1:
        return found
    for i, pair in enumerate(objective.terms):
        contrastive, matched, num_right, num_pairs = totals[4 * i : 4 * i + 4]
        found[loss_metric(objective.loss_name(pair.kind, pair))] = contrastive
        if pair.matching:
            found[loss_metric(objective.loss_name("matching", pair))] = matched
            accuracy = objective.loss_name("matching_accuracy", pair)
            found[accuracy] = round(num_right / num_pairs, 4) if num_pairs else math.nan
    return found | {f"loss_weight/{name}": weight for name, weight in weights.items()}


class RankNumbers(NamedTuple):
    """What each rank alone tells of a step, by rank."""

    busy_s: Sequence[float]  # computed
    own_s: Sequence[float]  # that no other rank had a part in
    step_s: Sequence[float]  # the whole step
    ready_s: Sequence[float]  # until it could take the optimizer's step
    peak_bytes: Sequence[float]  # the most that it held so far
    data_wait_s: Sequence[float]  # waited for data

    def between_zeros(self, rank: int, world_size: int) -> list[float]:
        """Of one rank only, at its place among all: summed over the ranks these are everyone's."""
        own = [number for (number,) in self]
        before, after = rank, world_size - rank - 1
        return [0.0] * (before * len(own)) + own + [0.0] * (after * len(own))

    @classmethod
    def of_sum(cls, numbers: Sequence[float]) -> RankNumbers:
        width = len(cls._fields)
        return cls(*(numbers[i::width] for i in range(width)))


class Slowest(NamedTuple):
    """Of the replicas of a stage the one that took longest for what is its own (`OWN` of
    engine/trace.py). `ratio`: to the mean of the others."""

    rank: int
    ratio: float

    @classmethod
    def of(cls, ranks: Sequence[int], own_s: Sequence[float]) -> Slowest:
        """`own_s`: of all ranks of the run."""
        rank = max(ranks, key=lambda each: own_s[each])
        others_s = sum(own_s[each] for each in ranks if each != rank) / (len(ranks) - 1)
        return cls(rank, own_s[rank] / max(others_s, 1e-9))


@dataclass(frozen=True)
class StepMetrics:
    """What one step reports, equal on all ranks. `loss` is over the global batch.

    `lr`: of the schedule; `group_lr`: of the groups of `optimizer_groups` that have one of their
    own, at their head. By clipping group: `grad_norm` before clipping, `clip_coefficient` the norm
    behind the clipping in parts of that (both not-a-number where the step was skipped),
    `clipped_share` of all applied steps so far. `skipped_steps` so far; `bad_step`: what a step was
    made of that was skipped for its loss or gradients; `bad_steps_in_a_row`: with this one. `idle`:
    by stage, the part of the step in which its ranks did not compute; `busy_s`: the seconds in
    which they did, mean of the replicas; `slowest`: by stage of several replicas;
    `data_wait_s`: by stage that loads, the seconds waited for
    micro-batches, mean of the replicas. `left_out`: by pair, samples of which a half was a
    stand-in: they lack it, or it could not be loaded; `duplicates`: samples with a value that
    another sample of the batch has too. `sent_bytes`: by all ranks together,
    collectives counted as rings. `peak_memory_bytes`: of the rank that held most so far; on a CPU
    the whole process. `sources`: of each of several sources; of one there is nothing to tell.
    `losses`: where there are several, see `losses_of`; `loss` is then their weighted sum, and
    `sources` are those of the contrastive ones, weighted. By rank: `rank_memory_bytes`, the most
    that it held so far, `rank_busy_s`, the seconds in which it computed, `rank_own_s`, those
    that no other rank had a part in, of `slowest_step_s`, the seconds of the step on the rank that
    took longest; the latter three are in no line.
    """

    loss: float
    # what the loss learns, before the step; the scale as its exponential
    scalars: Mapping[str, float]
    grad_norm: Mapping[str, float]
    clip_coefficient: Mapping[str, float]
    clipped_share: Mapping[str, float]
    lr: float
    group_lr: Mapping[str, float]
    step_applied: bool
    skipped_steps: int
    bad_step: BadStep | None
    bad_steps_in_a_row: int
    loss_scale: float
    stop_requested: bool  # by any rank
    idle: Mapping[str, float]
    busy_s: Mapping[str, float]
    data_wait_s: Mapping[str, float]
    sent_bytes: int
    peak_memory_bytes: int
    left_out: Mapping[str, int]
    duplicates: Mapping[str, int]
    counts: Mapping[str, float]  # what the caller of `train_batch` counted, over all ranks
    sources: tuple[SourceLoss, ...] = ()
    losses: Mapping[str, float] = field(default_factory=dict)
    slowest: Mapping[str, Slowest] = field(default_factory=dict)
    rank_memory_bytes: Sequence[int] = ()
    rank_busy_s: Sequence[float] = ()
    rank_own_s: Sequence[float] = ()
    slowest_step_s: float = 0.0

    def record(
        self, step: int, epoch: float, samples_per_s: float, step_s: float
    ) -> dict[str, float]:
        """The line of metrics.jsonl."""
        return {
            "step": step,
            "epoch": round(epoch, 4),
            "loss": self.loss,
            **self.losses,
            "lr": self.lr,
            **_named("lr", self.group_lr),
            **self.scalars,
            **_named("grad_norm", self.grad_norm),
            **_named("clip_coefficient", self.clip_coefficient),
            **_named("clipped_share", self.clipped_share, 6),
            "skipped_steps": self.skipped_steps,
            "samples_per_s": round(samples_per_s, 2),
            "step_s": round(step_s, 5),
            **_named("idle", self.idle, 4),
            **_named("busy_s", self.busy_s, 5),
            **_named("slowest_rank", {stage: own.rank for stage, own in self.slowest.items()}),
            **_named("slowest_ratio", {s: own.ratio for s, own in self.slowest.items()}, 3),
            **_named("data_wait_s", self.data_wait_s, 5),
            "sent_bytes": self.sent_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            **_named("peak_memory_bytes", self._memory_by_rank()),
            **{name: round(value, 5) for name, value in self.counts.items()},
            **_by_pair("left_out_samples", self.left_out),
            **_by_pair("duplicate_samples", self.duplicates),
            **({} if self.loss_scale == 1.0 else {"loss_scale": self.loss_scale}),
            **({} if self.step_applied else {"step_applied": False}),
        }

    def _memory_by_rank(self) -> dict[str, int]:
        """Of a world so small that its lines stay short."""
        if not 1 < len(self.rank_memory_bytes) <= MOST_RANKS_LISTED:
            return {}
        return {f"rank {rank}": number for rank, number in enumerate(self.rank_memory_bytes)}


def _named(metric: str, values: Mapping[str, float], digits: int | None = None) -> dict[str, float]:
    return {
        f"{metric}/{name}": value if digits is None else round(value, digits)
        for name, value in values.items()
    }


def _by_pair(name: str, numbers: Mapping[str, int]) -> dict[str, int]:
    """Those that are not 0, named after their pair where there are several."""
    several = len(numbers) > 1
    return {f"{name}/{pair}" if several else name: n for pair, n in numbers.items() if n}
