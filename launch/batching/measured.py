"""What the ranks measure of micro-batches, and costs that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data.batching.batches import GlobalBatch, TextPacker
from data.batching.branch_cost import BranchCost, fit_branch_cost, smoothed
from engine.topology import StageGraph
from engine.trace import PASSES, Span

DRIFT = 0.05  # costs that predict what was seen as nearly as this stay
LEAST_SHARE, MOST_SHARE = 0.5, 1.25  # of what a replica gets where all get equally much
SMOOTHING = 0.3  # least weight of a new fit

# texts of a micro-batch, tokens that they are padded to, seconds
Point = tuple[int, int, float]


@dataclass(frozen=True)
class Report:
    """What one rank reports at a measurement: seconds of its micro-batches, and how many steps its
    loader may be ahead."""

    stage: str
    points: list[Point]
    ahead: int


def branch_seconds(graph: StageGraph, busy_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each branch's slowest stage, from those of all stages."""
    return {
        branch: max(busy_s[stage.name] for stage in graph.stages if branch in stage.layers)
        for branch in graph.branches
    }


def seconds_of_micro_batches(spans: Sequence[Span]) -> dict[int, float]:
    """By number: forward and backward, and the second forward of a replay."""
    seconds: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.name in PASSES and span.micro_batch is not None:
            seconds[span.micro_batch] += span.seconds
    return dict(seconds)


def points_of(
    texts: TextPacker, batch: GlobalBatch, spans: Sequence[Span], replica: int, replicas: int
) -> list[Point]:
    """The points of one replica's micro-batches of texts in a step, as far as they were traced."""
    lengths, seconds = texts.lengths(batch), seconds_of_micro_batches(spans)
    numbers = (batch.setting.num_micro_batches["text"],)
    packed = texts.pack(batch, replicas, numbers)[replica]
    return [
        (len(part), int(lengths[part].max()), seconds[m])
        for m, part in enumerate(packed)
        if seconds.get(m, 0) > 0
    ]


def slowest_points(reports: Sequence[Report]) -> list[Point]:
    """The points of all replicas of the slowest stage with texts. A merged stage has no times of
    texts alone, so it reports none."""
    by_stage: dict[str, list[Point]] = defaultdict(list)
    for report in reports:
        by_stage[report.stage] += report.points
    return max(by_stage.values(), key=lambda points: sum(seconds for _, _, seconds in points))


def shares_by_speed(
    now: Sequence[float] | None, seconds: Sequence[float], dead_band: float
) -> tuple[float, ...] | None:
    """The shares of a branch's replicas, by the seconds that each computed with those of `now`
    (None: equal): half of the way to equal times, each from LEAST_SHARE to MOST_SHARE of an equal
    one, for the memory is planned for that. As they are where times differ by no more than the
    dead band."""
    if min(seconds) <= 0 or max(seconds) <= (1 + dead_band) * min(seconds):
        return None if now is None else tuple(now)
    number = len(seconds)
    before = np.full(number, 1 / number) if now is None else np.array(now)
    speeds = before / np.array(seconds)
    wanted = (before + speeds / speeds.sum()) / 2 * number
    for _ in range(number):  # what one may not have, the others take
        wanted = np.clip(wanted, LEAST_SHARE, MOST_SHARE)
        free = (wanted > LEAST_SHARE) & (wanted < MOST_SHARE)
        if not free.any():
            break
        wanted[free] += (number - wanted.sum()) / free.sum()
    return tuple(round(float(share), 4) for share in wanted / wanted.sum())


def refitted(cost: BranchCost, points: Sequence[Point]) -> BranchCost:
    """The cost moved towards one that fits the points, where it predicts them badly; else as it
    is."""
    texts, length, seconds = map(np.array, zip(*points))
    found = fit_branch_cost(texts, length, seconds)
    if np.abs(found.at(texts, length) / cost.at(texts, length) - 1).max() <= DRIFT:
        return cost
    # the mean of all fits, later of the last few; the profile was a guess
    return smoothed(cost, found, max(SMOOTHING, 1 / (1 + cost.version)))
