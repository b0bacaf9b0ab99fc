"""From measured times to the next setting of the balance, and from losses to how data sets are
mixed. The first rank decides, for a step that no loader has begun with; all take it over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from data.batching.adaptation import Adaptation, Trends, after_step
from data.batching.balance import ByCost
from data.batching.branch_cost import BranchCost, fit_branch_cost, smoothed
from data.batching.feed import Observations, adjust, typical
from data.batching.mixture import Parts
from data.batching.settings import Setting, Settings
from engine.executor import ForkEngine
from engine.json_messages import from_first_rank, to_first_rank
from engine.step_metrics import SourceLoss, StepMetrics
from engine.topology import StageGraph
from engine.trace import Span
from launch.balancing.choosing import Balance

OBSERVED = 3  # steps of every interval whose micro-batches are measured one by one, the last ones
DRIFT = 0.05  # costs that predict what was seen as nearly as this stay
SMOOTHING = 0.3  # least weight of a new fit
PASSES = (
    "EmbedPass",
    "ForwardPass",
    "ReplayPass",
    "BackwardPass",
    "BackwardInputs",
    "BackwardWeights",
)

Mix = tuple[int, Parts]  # from an epoch on
Decision = tuple[Setting | None, Observations, Mix | None, dict[str, Any]]
Point = tuple[
    int, int, float
]  # samples or texts of a micro-batch, what they are padded to, seconds


@dataclass(frozen=True)
class Report:
    """What one rank reports at a measurement: seconds of its micro-batches, and how many steps its
    loader may be ahead."""

    stage: str
    points: list[Point]
    ahead: int


class Balancer:
    """Holds the settings of a run, and adds to them every `interval` steps. What the losses did is
    followed by all ranks, and asked of the first."""

    def __init__(self, balance: Balance, replica: int, stage_name: str, workers: int):
        self.balance = balance
        self.settings = Settings([balance.first])
        self._trends: Trends | None = None
        if balance.adaptation is not None:
            self._trends = Trends.start(len(balance.adaptation.parts))
        self._observations, self._replica, self._stage_name = Observations(), replica, stage_name
        self._graph: StageGraph = balance.plan.graph
        self._branch = next(
            iter(next(s for s in self._graph.stages if s.name == stage_name).layers)
        )
        # two micro-batches per worker are made ahead, at worst each of another step, and the step
        # after them is being dealt
        self._ahead = 2 * workers + 2
        self._busy_s: list[dict[str, float]] = []  # by branch, of the steps since a measurement
        self._spans: list[tuple[int, Sequence[Span]]] = []  # of the last steps

    @property
    def measurement_interval(self) -> int:
        """Steps between measurements; 0: there is nothing to learn."""
        adapts = self.balance.adaptation is not None
        return self.balance.block.measurement_interval(adapts) if self._dealt or adapts else 0

    @property
    def _dealt(self) -> bool:
        return any(isinstance(dealer, ByCost) for dealer in self.balance.dealers.values())

    @property
    def _adapting(self) -> tuple[Adaptation, Trends] | None:
        """What makes other weights of the sets, and of what; None: they stay as they are."""
        adaptation, trends = self.balance.adaptation, self._trends
        return None if adaptation is None or trends is None else (adaptation, trends)

    def shape(self, step: int) -> dict[str, Any]:
        """What the engine must know of a step."""
        setting = self.settings.at(step)
        return {
            "num_micro_batches": setting.num_micro_batches[self._branch],
            "num_kept": self.balance.num_kept(self._branch, setting),
            "rows_per_sample": {"text": setting.feed_rates.captions_per_image}
            if "text" in self.balance.dealers
            else {},
        }

    def after_step(self, engine: ForkEngine, metrics: StepMetrics) -> dict[str, Any] | None:
        """All ranks call it together, after each step. At a measurement: what was seen and what
        follows, on every rank."""
        step = engine.global_steps  # done so far; the next one has this number
        if not self.note(step, metrics.busy_s, engine.recorder.spans, metrics.sources):
            return None
        reports = to_first_rank(asdict(self.report()))
        decided = None
        if reports is not None:
            decided = _as_json(self.decide(step, [Report(**report) for report in reports]))
        return self.take_over(_from_json(from_first_rank(decided)))

    def note(
        self,
        step: int,
        busy_s: Mapping[str, float],
        spans: Sequence[Span],
        sources: Sequence[SourceLoss] = (),
    ) -> bool:
        """Keep what a step took and what its loss was, the `step`-th from 1. Is it time for a
        measurement?"""
        if not self.measurement_interval:
            return False
        if self._adapting is not None:
            adaptation, trends = self._adapting
            trends = after_step(
                trends, [each.loss for each in sources], [each.samples for each in sources]
            )
            ends = self.balance.order.ends_epoch(step)
            self._trends = adaptation.after_epoch(trends) if ends else trends
        self._busy_s.append(branch_seconds(self._graph, busy_s))
        self._spans = [*self._spans[1 - OBSERVED :], (step - 1, spans)]
        return step % self.measurement_interval == 0

    def take_over(self, decided: Decision) -> dict[str, Any]:
        setting, self._observations, mix, record = decided
        self._busy_s = []
        if mix is not None:
            self.settings.add_mix(*mix)
        if setting is not None:
            self.settings.add(setting)
        return record

    # -- what the first rank decides

    def decide(self, step: int, reports: Sequence[Report]) -> Decision:
        """After `step` steps, from what all ranks report: the next setting, if any, what is known
        of the feed rates, the next mix, if any, and the line to log."""
        now, order = self.settings.newest, self.balance.order
        first_step = step + max(report.ahead for report in reports)
        mix = self._next_mix(first_step)
        mixes = self.settings.mixes if mix is None else (*self.settings.mixes, mix)
        busy_s = {
            branch: typical([one[branch] for one in self._busy_s]) for branch in self._busy_s[0]
        }
        # where the newest setting does not hold yet, nothing is changed a second time
        holds = now.from_step <= step - len(self._busy_s)
        points = slowest_points(self._graph, reports)
        refits = holds and self.balance.block.refits
        costs = refitted(now.costs, points) if refits else now.costs
        observations, feed_rates, reason = self._observations, now.feed_rates, None
        if self._dealt:
            observations, feed_rates, reason = adjust(
                observations,
                feed_rates,
                self.balance.ladders,
                rules=self.balance.rules,
                busy_s=busy_s,
                first_step=step - len(self._busy_s),
            )
        setting, from_step = None, max(first_step, now.from_step + 1)
        remixed = self._dealt and any(
            order.epoch(now.from_step) < epoch <= order.epoch(from_step) for epoch, _ in mixes
        )
        if feed_rates != now.feed_rates or costs != now.costs or remixed:
            words = [reason] if feed_rates != now.feed_rates else []
            words += (
                ["costs refitted"]
                if any(costs[b].version != now.costs[b].version for b in costs)
                else []
            )
            words += ["other weights of the data sets"] if remixed else []
            setting = replace(
                now,
                from_step=from_step,
                feed_rates=feed_rates,
                costs=costs,
                reason="; ".join(filter(None, words)),
            )
            setting = replace(
                setting, num_micro_batches=self.balance.num_micro_batches(setting, from_step, mixes)
            )
            if feed_rates != now.feed_rates:
                observations = replace(observations, from_step=from_step)
        return (
            setting,
            observations,
            mix,
            self._record(step, busy_s, points, reason=reason, setting=setting, mix=mix),
        )

    def _next_mix(self, first_step: int) -> Mix | None:
        """What the losses of whole epochs have made of the weights, from the first epoch on that
        begins with `first_step` or later."""
        if self._adapting is None:
            return None
        adaptation, trends = self._adapting
        parts = adaptation.mix(trends)
        epoch, newest = self._newest_mix()
        return (
            None
            if parts == newest
            else (max(epoch, self.balance.order.epoch(first_step - 1)) + 1, parts)
        )

    def _newest_mix(self) -> Mix:
        return self.settings.mixes[-1] if self.settings.mixes else (0, self.balance.order.parts)

    def _record(
        self,
        step: int,
        busy_s: Mapping[str, float],
        points: Mapping[str, list[Point]],
        reason: str | None,
        setting: Setting | None,
        mix: Mix | None,
    ) -> dict[str, Any]:
        """The line of balance.jsonl."""
        now = self.settings.at(step - 1)
        measured, predicted = {}, {}
        for branch, seen in points.items():
            measured[branch] = sum(s for _, _, s in seen)
            predicted[branch] = float(sum(now.costs[branch].at(n, length) for n, length, _ in seen))
        return {
            "step": step,
            "busy_s": busy_s,
            "measured_s": measured,
            "predicted_s": predicted,
            "knobs": asdict(now.feed_rates),  # the key of earlier versions, as is `looks` below
            "num_micro_batches": dict(now.num_micro_batches),
            "reason": reason,
            "next": setting and setting.record(),
            **self._mix_record(mix),
        }

    def _mix_record(self, mix: Mix | None) -> dict[str, Any]:
        if mix is None or self._adapting is None:
            return {}
        (epoch, parts), (adaptation, trends) = mix, self._adapting
        record = {
            "from_step": self.balance.order.first_step(epoch),
            "weights": [weight for _, weight in parts],
            "losses": trends.losses,
            "losses_before": trends.before,
            "reason": adaptation.reason(trends, self._newest_mix()[1], parts),
        }
        return {"mix": record}

    # -- what each rank saw

    def report(self) -> Report:
        return Report(self._stage_name, self._points(), self._ahead)

    def _points(self) -> list[Point]:
        dealer = self.balance.dealers[self._branch]
        if not isinstance(dealer, ByCost):  # images cost all the same
            return []
        points = []
        for step, spans in self._spans:
            batch = self.balance.batch(step, self.settings.at(step), self.settings.mixes)
            number = batch.setting.num_micro_batches[self._branch]
            lengths = dealer.work(batch).lengths
            own = dealer.shares(batch, self.balance.plan.batches[self._branch].replicas, number)
            own = own[self._replica * number : (self._replica + 1) * number]
            seconds = seconds_of_micro_batches(spans)
            points += [
                (len(part), int(lengths[part].max()), seconds[m])
                for m, (part, _) in enumerate(own)
                if seconds.get(m, 0) > 0
            ]
        return points

    def state_dict(self) -> dict[str, Any]:
        """JSON-like. Seconds of single micro-batches, of the last steps before a measurement, are
        not part of it."""
        return {
            "split": self._split(),
            "settings": self.settings.records(),
            "mixes": self.settings.mixes,
            "looks": asdict(self._observations),
            "busy_s": self._busy_s,
            "trends": self._trends and asdict(self._trends),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """With step `step`, the next. Split in another way, what was measured no longer holds: as
        planned then, with the feed rates and the mixes of before, which decide what is trained. So
        it is with global batches of another size, which may end an epoch."""
        before = Settings.from_records(state["settings"], state["mixes"])
        if self._adapting is not None and state["trends"]:  # else it begins now
            adaptation = self._adapting[0]
            trends = Trends(**{name: tuple(values) for name, values in state["trends"].items()})
            ends = any(trends.samples) and self.balance.order.ends_epoch(step)
            self._trends = adaptation.after_epoch(trends) if ends else trends
        dealt_alike = (
            before.at(step).costs.keys() == self.balance.first.costs.keys()
        )  # else it was dealt in order, or by shape
        if state["split"] == self._split() and dealt_alike:
            self.settings, self._observations, self._busy_s = (
                before,
                Observations(**state["looks"]),
                list(state["busy_s"]),
            )
            return
        first, feed_rates = self.balance.first, before.at(step).feed_rates
        setting = replace(first, from_step=step, feed_rates=feed_rates, reason="planned anew")
        setting = replace(
            setting, num_micro_batches=self.balance.num_micro_batches(setting, step, before.mixes)
        )
        self.settings = Settings([first, setting], before.mixes)

    def _split(self) -> dict[str, Any]:
        plan = self.balance.plan
        return {
            "stages": plan.graph.describe(),
            "batches": {branch: batch.record() for branch, batch in plan.batches.items()},
        }


def _as_json(decided: Decision) -> list[Any]:
    setting, observations, mix, record = decided
    return [setting and setting.record(), asdict(observations), mix, record]


def _from_json(told: Sequence[Any]) -> Decision:
    setting, observations, mix, record = told
    return (
        setting and Setting.from_record(setting),
        Observations(**observations),
        mix and (mix[0], tuple(map(tuple, mix[1]))),
        record,
    )


def branch_seconds(graph: StageGraph, busy_s: Mapping[str, float]) -> dict[str, float]:
    """Of each branch's slowest stage, from the seconds of the stages."""
    return {
        branch: max(busy_s[s.name] for s in graph.stages if branch in s.layers)
        for branch in graph.branches
    }


def seconds_of_micro_batches(spans: Sequence[Span]) -> dict[int, float]:
    """By number: forward and backward, and the second forward of a replay."""
    seconds: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.name in PASSES and span.micro_batch is not None:
            seconds[span.micro_batch] += span.seconds
    return dict(seconds)


def slowest_points(graph: StageGraph, reports: Sequence[Report]) -> dict[str, list[Point]]:
    """Those of all replicas of each branch's slowest stage. A merged stage has no times of one
    branch alone, so it reports none."""
    by_stage: dict[str, list[Point]] = defaultdict(list)
    for report in reports:
        by_stage[report.stage] += report.points
    found: dict[str, list[Point]] = {}
    for stage in graph.stages:
        branch, points = next(iter(stage.layers)), by_stage[stage.name]
        if points and sum(s for _, _, s in points) > sum(s for _, _, s in found.get(branch, ())):
            found[branch] = points
    return found


def refitted(
    costs: Mapping[str, BranchCost], points: Mapping[str, Sequence[Point]]
) -> dict[str, BranchCost]:
    """Costs moved towards those that the points speak for, where they predict them badly; else as
    they are."""
    new = dict(costs)
    for branch, seen in points.items():
        if branch not in costs:
            continue
        n, length, seconds = map(np.array, zip(*seen))
        found, old = fit_branch_cost(n, length, seconds), costs[branch]
        if np.abs(found.at(n, length) / old.at(n, length) - 1).max() > DRIFT:
            # the mean of all fits, later of the last few; the profile was a guess
            new[branch] = smoothed(old, found, max(SMOOTHING, 1 / (1 + old.version)))
    return new
