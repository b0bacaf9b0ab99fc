"""What follows from measured times and losses: costs, numbers of micro-batches, feed rates, shares
of replicas and the mix of data sets.

It is decided by the first rank, for a step that no loader has begun with, and all ranks take it
over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from data.batching.batches import Batches
from data.batching.load_control import LoadControl, Observations, typical
from data.batching.mixing import Adaptation, Trends
from data.batching.order import Parts
from data.batching.settings import Setting, setting_at
from data.stored.kinds import is_text
from engine.planning.planner import RunPlan
from engine.step_metrics import SourceLoss
from engine.topology import Stage
from engine.trace import Span
from launch.batching.measured import (
    Point,
    Report,
    branch_seconds,
    points_of,
    refitted,
    shares_by_speed,
    slowest_points,
)
from launch.batching.planned import with_numbers
from launch.config.blocks import BalanceBlock

OBSERVED = 3  # steps of every interval whose micro-batches are measured one by one, the last ones

Decision = Mapping[str, Any]  # JSON-like: "setting", "observations", "mix", "record"


class Rebalancing:
    """Of the rank that has this stage and replica; its loader may be `ahead` steps ahead. It
    appends to the settings of `batches`, which begin with the planned one, and replaces their
    order. `adaptation`: of the weights of the data sets; None: they stay.
    """

    def __init__(
        self,
        plan: RunPlan,
        batches: Batches,
        balance: BalanceBlock,
        control: LoadControl,
        adaptation: Adaptation | None,
        stage: Stage,
        replica: int,
        ahead: int,
    ):
        self.plan, self.batches = plan, batches
        self.balance, self.control, self.adaptation = balance, control, adaptation
        self.stage, self.replica, self.ahead = stage, replica, ahead
        (self.planned,) = batches.settings
        self._trends = Trends.start(len(batches.order.parts))
        self._observations = Observations()
        self._busy_s: list[dict[str, float]] = []  # by branch, of the steps since a measurement
        self._rank_own_s: list[Sequence[float]] = []  # likewise, by rank
        self._spans: list[tuple[int, Sequence[Span]]] = []  # of the last steps

    def movable(self, step: int) -> dict[str, float]:
        """The feed rates of a step that may change."""
        return self.control.movable(setting_at(self.batches.settings, step).feed_rates)

    @property
    def interval(self) -> int:
        """Steps between measurements; 0: there is nothing to learn."""
        by_ranks = self.balance.ranks == "measured"
        if self.batches.texts is None and self.adaptation is None and not by_ranks:
            return 0
        return self.balance.measurement_interval(adapts=self.adaptation is not None)

    def note(
        self,
        step: int,
        busy_s: Mapping[str, float],
        spans: Sequence[Span],
        sources: Sequence[SourceLoss] = (),
        rank_own_s: Sequence[float] = (),
    ) -> bool:
        """Keep what a step took, by stage and by rank, and what its loss was, the `step`-th from 1.
        Is it time for a measurement?"""
        if not self.interval:
            return False
        if self.adaptation is not None:
            losses, samples = [each.loss for each in sources], [each.samples for each in sources]
            self._trends = self._trends.after_step(losses, samples)
            if self.batches.order.ends_epoch(step):
                self._trends = self.adaptation.after_epoch(self._trends)
        if self.balance.ranks == "measured":
            self._rank_own_s.append(rank_own_s)
        self._busy_s.append(branch_seconds(self.plan.graph, busy_s))
        self._spans = [*self._spans[1 - OBSERVED :], (step - 1, spans)]
        return step % self.interval == 0

    def report(self) -> Report:
        """What this rank measured."""
        points: list[Point] = []
        texts = self.batches.texts
        if is_text(next(iter(self.stage.layers))) and texts is not None:  # others cost all the same
            for step, spans in self._spans:
                batch, replicas = self.batches.at(step), self.stage.replicas
                points += points_of(texts, batch, spans, self.replica, replicas)
        return Report(self.stage.name, points, self.ahead)

    def decide(self, step: int, reports: Sequence[Report]) -> Decision:
        """The first rank's decision after `step` steps, from what all ranks report: the next
        setting, if any, what is known of the load, the next mix, if any, and the line to log."""
        newest = self.batches.settings[-1]
        first_step = step + max(report.ahead for report in reports)
        mix = self._next_mix(first_step)
        busy_s = {b: typical([one[b] for one in self._busy_s]) for b in self._busy_s[0]}
        points = slowest_points(reports)
        seen_from = step - len(self._busy_s)
        wanted, observations, reason = newest, self._observations, None
        if newest.text_cost is not None:
            observations, feed_rates, reason = self.control.after(
                observations, newest.feed_rates, busy_s, seen_from
            )
            wanted = replace(newest, feed_rates=feed_rates)
            # where the newest setting does not hold yet, nothing is changed a second time
            if points and self.balance.refits and newest.from_step <= seen_from:
                wanted = replace(wanted, text_cost=refitted(newest.text_cost, points))
        if self.balance.ranks == "measured" and newest.from_step <= seen_from:
            wanted = replace(wanted, shares=self._shares(newest))
            if wanted.shares != newest.shares:
                words = (f"{b} {' '.join(map(str, own))}" for b, own in wanted.shares.items())
                told = f"shares of the replicas by their speed: {', '.join(words)}"
                reason = f"{reason}; {told}" if reason else told
        from_step = max(first_step, newest.from_step + 1)
        setting = self._next_setting(wanted, from_step, reason, mix)
        if setting is not None and setting.feed_rates != newest.feed_rates:
            observations = replace(observations, from_step=setting.from_step)
        return {
            "setting": setting and setting.record(),
            "observations": asdict(observations),
            "mix": mix,
            "record": self._record(step, busy_s, points, reason, setting, mix),
        }

    def _shares(self, setting: Setting) -> dict[str, tuple[float, ...]]:
        """By branch, from what the ranks of the slowest stage of each computed."""
        ranks = [typical(of_rank) for of_rank in zip(*self._rank_own_s)]
        found = {}
        for branch in self.plan.batches:
            stages = [stage for stage in self.plan.graph.stages if branch in stage.layers]
            seconds = [max(ranks[r] for r in chain) for chain in zip(*(s.ranks for s in stages))]
            now = setting.shares.get(branch)
            shares = shares_by_speed(now, seconds, self.balance.dead_band)
            if shares is not None:
                found[branch] = shares
        return found

    def _next_setting(
        self, wanted: Setting, from_step: int, reason: str | None, mix: tuple[int, Parts] | None
    ) -> Setting | None:
        """The setting from `from_step` on with the cost and feed rates that are wanted; None: the
        newest stays. `reason`: of the feed rates."""
        now = self.batches.settings[-1]
        order = self.batches.order if mix is None else self.batches.order.with_mix(*mix)
        epochs = range(order.epoch(now.from_step) + 1, order.epoch(from_step) + 1)
        remixed = self.batches.texts is not None and any(e in epochs for e, _ in order.mixes)
        reasons = {
            reason: wanted.feed_rates != now.feed_rates,
            "shares of the replicas": wanted.shares != now.shares,
            "costs refitted": wanted.text_cost != now.text_cost,
            "other weights of the data sets": remixed,
        }
        if not any(reasons.values()):
            return None
        words = "; ".join(word for word, holds in reasons.items() if word and holds)
        mixed = replace(self.batches, order=order)
        return with_numbers(
            replace(wanted, from_step=from_step, reason=words), mixed, self.plan, self.balance
        )

    def _next_mix(self, first_step: int) -> tuple[int, Parts] | None:
        """(epoch, parts): what the losses of whole epochs have made of the weights, from the first
        epoch on that begins with `first_step` or later; None: they stay."""
        if self.adaptation is None:
            return None
        parts = self.adaptation.mix(self._trends)
        epoch, newest = self._newest_mix()
        if parts == newest:
            return None
        return max(epoch, self.batches.order.epoch(first_step - 1)) + 1, parts

    def _newest_mix(self) -> tuple[int, Parts]:
        return (
            self.batches.order.mixes[-1]
            if self.batches.order.mixes
            else (0, self.batches.order.parts)
        )

    def _record(
        self,
        step: int,
        busy_s: Mapping[str, float],
        points: Sequence[Point],
        reason: str | None,
        setting: Setting | None,
        mix: tuple[int, Parts] | None,
    ) -> dict[str, Any]:
        """The line of balance.jsonl."""
        now = setting_at(self.batches.settings, step - 1)
        measured_s, predicted_s = {}, {}
        if points and now.text_cost is not None:
            texts, lengths, seconds = map(np.array, zip(*points))
            measured_s["text"] = float(seconds.sum())
            predicted_s["text"] = float(now.text_cost.at(texts, lengths).sum())
        record = {
            "step": step,
            "busy_s": busy_s,
            "measured_s": measured_s,
            "predicted_s": predicted_s,
            "knobs": asdict(now.feed_rates),
            "num_micro_batches": dict(now.num_micro_batches),
            "reason": reason,
            "next": setting and setting.record(),
        }
        if mix is not None and self.adaptation is not None:
            epoch, parts = mix
            record["mix"] = {
                "from_step": self.batches.order.first_step(epoch),
                "weights": [weight for _, weight in parts],
                "losses": self._trends.losses,
                "losses_before": self._trends.before,
                "reason": self.adaptation.reason(self._trends, self._newest_mix()[1], parts),
            }
        return record

    def take_over(self, decided: Decision) -> dict[str, Any]:
        """Hold from here on what the first rank decided; the line of balance.jsonl."""
        self._rank_own_s = []
        self._busy_s, self._observations = [], Observations(**decided["observations"])
        if decided["mix"] is not None:
            self._add_mix(*decided["mix"])
        if decided["setting"] is not None:
            self.batches.settings.append(Setting.from_record(decided["setting"]))
        return decided["record"]

    def _add_mix(self, epoch: int, parts: Sequence[Sequence[Any]]) -> None:
        """`parts` as they are, or as JSON gives them back."""
        self.batches.order = self.batches.order.with_mix(epoch, tuple((n, w) for n, w in parts))

    def state_dict(self) -> dict[str, Any]:
        """JSON-like. Seconds of single micro-batches, of the last steps before a measurement, are
        not part of it."""
        return {
            "split": self._split(),
            "settings": [setting.record() for setting in self.batches.settings],
            "mixes": self.batches.order.mixes,
            "looks": asdict(self._observations),
            "busy_s": self._busy_s,
            "rank_own_s": self._rank_own_s,
            "trends": asdict(self._trends),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """With step `step` the next. Split in another way, what was measured no longer holds: as
        planned then, with the feed rates and the mixes of before, which decide what is trained. So
        it is with global batches of another size, which may end an epoch."""
        before = list(map(Setting.from_record, state["settings"]))
        for mix in state["mixes"]:
            self._add_mix(*mix)
        if self.adaptation is not None:
            trends = Trends(**{name: tuple(values) for name, values in state["trends"].items()})
            ends = any(trends.samples) and self.batches.order.ends_epoch(step)
            self._trends = self.adaptation.after_epoch(trends) if ends else trends
        now = setting_at(before, step)
        packed_alike = (now.text_cost is None) == (self.planned.text_cost is None)
        if state["split"] == self._split() and packed_alike:
            self.batches.settings = before
            self._observations = Observations(**state["looks"])
            self._busy_s = list(state["busy_s"])
            self._rank_own_s = list(state.get("rank_own_s", ()))  # not in states of 0.1.0
            return
        anew = replace(
            self.planned, from_step=step, feed_rates=now.feed_rates, reason="planned anew"
        )
        anew = with_numbers(anew, self.batches, self.plan, self.balance)
        self.batches.settings = [self.planned, anew]

    def _split(self) -> dict[str, Any]:
        return {
            "stages": self.plan.graph.describe(),
            "batches": {branch: batch.record() for branch, batch in self.plan.batches.items()},
        }
