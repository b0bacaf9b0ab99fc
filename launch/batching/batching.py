"""The global batches of a run: the order of their samples, how they are packed into micro-batches,
and what follows measured times and losses.

train.py sees this one object. It has two parts, which `data/batching/batches.py` holds: the order,
(seed, step) -> samples, and the packing, samples -> micro-batches. What is decided from measured
times and losses, costs, numbers of micro-batches, feed rates and the mix of data sets, is decided
by the first rank for a step that no loader has begun with, and all ranks take it over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.batching.batches import Batches, Shares
from data.batching.load_control import LoadControl, Observations, typical
from data.batching.mixing import Trends
from data.batching.mixture import source_names
from data.batching.order import GlobalOrder, Parts
from data.batching.requests import MicroBatchRequest
from data.batching.settings import Setting, setting_at
from data.prepare import PreparedData
from data.stored.kinds import is_text
from engine.config.reading import BranchesBlock
from engine.executor import ForkEngine, StepSpec
from engine.json_messages import from_first_rank, to_first_rank
from engine.planning.planner import RunPlan
from engine.step_metrics import SourceLoss, StepMetrics
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
from launch.batching.planned import (
    adaptation,
    explain_batches,
    image_buckets,
    load_control,
    mean_length,
    num_kept,
    refuse_missing_branches,
    sample_weights_of,
    shown_regions_of,
    text_cost,
    text_packer,
    value_costs,
    with_numbers,
)
from launch.config.blocks import balancing, weighting
from launch.config.groups import BatchingOptions
from launch.run.resuming import earlier_sizes
from launch.run.step_line import step_line

MOST_EXAMPLES = 4096
LEAST_STEPS = 20  # between the checkpoints and evaluations that come at the end of an epoch
OBSERVED = 3  # steps of every interval whose micro-batches are measured one by one, the last ones

Decision = Mapping[str, Any]  # JSON-like: "setting", "observations", "mix", "record"


class Batching:
    """`state`: of the checkpoint that the run goes on from. Where processes share `folder`, one
    goes first and counts tokens for all.

    After `__init__` the order is known, after `divide` the packing, and `follow` says which stage
    this rank has.
    """

    def __init__(
        self,
        data: PreparedData,
        options: BatchingOptions,
        block: BranchesBlock,
        batch_size: int,
        state: Mapping[str, Any],
        folder: Path,
    ):
        self.data, self.options, self.folder = data, options, folder
        self.balance = balancing(block)
        self.sources = source_names(options.data)
        earlier = earlier_sizes(state["batch_sizes"], batch_size)
        order = data.order(batch_size, earlier, options.film_clips or 1)
        weights_of = sample_weights_of(data, weighting(block), options.max_text_tokens, folder)
        examples = data.example_numbers(MOST_EXAMPLES) if data.shards else None
        self.batches = Batches(
            order,
            data.train,
            [Setting(0, {})],
            regions=shown_regions_of(data.source, options),
            weights_of=weights_of,
            examples=examples,
        )
        self.total_steps = options.steps or order.first_step(options.epochs or 0)

    @property
    def order(self) -> GlobalOrder:
        return self.batches.order

    # -- from the plan to the packing

    def divide(self, plan: RunPlan, patch_size: int | None) -> None:
        """Decide which samples make which micro-batch of the plan. `patch_size` of a ViT. Errors:
        ValueError for bounds that these towers or data do not have."""
        self.plan, self.patch_size = plan, patch_size
        self.adaptation = adaptation(self.balance, self.order.parts, self.options)
        refuse_missing_branches(self.balance, plan)
        self.batches.buckets = image_buckets(self.data, self.options, patch_size)
        in_sizes = self.batches.buckets is not None
        self.batches.costs = value_costs(self.balance, plan, self.data, self.options, in_sizes)
        self.batches.texts = text_packer(self.balance, plan, self.data, self.options, self.folder)
        self.control = LoadControl()
        self.first = Setting(0, {b: batch.num_micro_batches for b, batch in plan.batches.items()})
        if self.batches.texts is not None:
            length = mean_length(self.batches.texts)
            self.control = load_control(
                self.balance, plan, self.data, self.options, patch_size, length
            )
            first = replace(
                self.first,
                text_cost=text_cost(plan, length),
                feed_rates=self.control.start(),
            )
            self.first = with_numbers(
                first, self.batches, plan, self.balance, self.order.changed_at
            )
        self.batches.settings = [self.first]
        self._trends = Trends.start(len(self.order.parts))
        self._observations = Observations()
        self._busy_s: list[dict[str, float]] = []  # by branch, of the steps since a measurement
        self._rank_own_s: list[Sequence[float]] = []  # likewise, by rank
        self._spans: list[tuple[int, Sequence[Span]]] = []  # of the last steps

    @property
    def equal_shares(self) -> bool:
        """Does every replica of a branch get equally many samples?"""
        even = all(batch.is_even for batch in self.plan.batches.values())
        packed = self.batches.texts is not None or bool(self.batches.costs)
        return even and not packed and self.balance.ranks == "equal"

    # -- what a step is

    def follow(self, stage: Stage, replica: int, workers: int) -> None:
        """From here on with what this stage measures. `workers`: loader processes of a rank."""
        self._stage, self._replica, self._branch = stage, replica, next(iter(stage.layers))
        # Two micro-batches per worker are made ahead, at worst each of another step, and the step
        # after them is being packed.
        self._ahead = 2 * workers + 2
        # Where every stage is the first and the last of its line it packs all that ends in it, and
        # so knows how many rows the other replicas bring.
        graph, uneven = self.plan.graph, not self.equal_shares or self.batches.regions is not None
        self.batches.keeps_shares = (
            uneven
            and len(graph.tails) == len(graph.stages)
            and not self.plan.schedule_type.loss_per_micro_batch
        )

    def requests(
        self, start_step: int, stop_step: int, meta_first: bool
    ) -> Iterator[MicroBatchRequest | list[MicroBatchRequest]]:
        """The micro-batches that this rank loads, see `Batches.requests`."""
        replicas = self.plan.batches[self._branch].replicas
        return self.batches.requests(
            self._branch,
            self._replica,
            replicas,
            start_step,
            stop_step,
            loads=self._stage.loads,
            meta_first=meta_first,
        )

    def step_spec(self, step: int, loss_weights: Mapping[str, float]) -> StepSpec:
        """Numbers of micro-batches and rows of a step."""
        setting = setting_at(self.batches.settings, step)
        captions = setting.feed_rates.captions_per_image
        shares = Shares({}, {})
        if self.batches.keeps_shares:
            replicas = self.plan.batches[self._branch].replicas
            shares = self.batches.shares(self._branch, self._stage.loads, replicas, step)
        return StepSpec(
            num_micro_batches=setting.num_micro_batches[self._branch],
            num_kept=num_kept(self.plan, self._branch, setting),
            rows_per_sample=dict.fromkeys(filter(is_text, self.plan.batches), captions),
            loss_weights=loss_weights,
            shares=shares.of_replicas,
            num_made=shares.made,
        )

    def line(self, metrics: StepMetrics, step: int, step_s: float) -> dict[str, float]:
        """The step's line of metrics.jsonl, with the feed rates that may change."""
        movable = self.control.movable(setting_at(self.batches.settings, step - 1).feed_rates)
        return step_line(metrics, step, step_s, self.order, movable, self.sources)

    def is_due(self, step: int, every: int | None) -> bool:
        """After `step` steps, is it time for what comes every `every` steps? None: at the end of
        every `epochs_apart` epochs."""
        if every is not None:
            return step % every == 0
        return self.order.ends_epoch(step) and self.order.epoch(step) % self.epochs_apart == 0

    @property
    def epochs_apart(self) -> int:
        """Of checkpoints and evaluations whose number no flag gives. An epoch of few samples is over
        in less time than they take."""
        return self.order.epochs_of(LEAST_STEPS)

    def describe_shapes(self) -> str:
        """The input shapes of --image-buckets; empty: one square."""
        if self.batches.buckets is None:
            return ""
        sizes = ", ".join(f"{h}×{w}" for h, w in self.batches.buckets.sizes)
        return f"images of {sizes} pixels (height × width)"

    def explain(self, step: int) -> str:
        """Tables of how the next --explain-balance global batches are packed; empty: none were
        asked for."""
        steps = range(step, min(step + self.options.explain_balance, self.total_steps))
        return explain_batches(self.batches, self.plan, steps) if steps else ""

    # -- what follows measured times and losses

    @property
    def measurement_interval(self) -> int:
        """Steps between measurements; 0: there is nothing to learn."""
        by_ranks = self.balance.ranks == "measured"
        if self.batches.texts is None and self.adaptation is None and not by_ranks:
            return 0
        return self.balance.measurement_interval(adapts=self.adaptation is not None)

    def after_step(self, engine: ForkEngine, metrics: StepMetrics) -> dict[str, Any] | None:
        """All ranks call it together, after each step. At a measurement: the line of
        balance.jsonl."""
        step = engine.global_steps  # done so far; the next one has this number
        if self.balance.ranks == "measured":
            self._rank_own_s.append(metrics.rank_own_s)
        if not self.note(step, metrics.busy_s, engine.recorder.spans, metrics.sources):
            return None
        reports = to_first_rank(asdict(self.report()))
        decided = None
        if reports is not None:
            decided = self.decide(step, [Report(**report) for report in reports])
        return self.take_over(from_first_rank(decided))

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
        if self.adaptation is not None:
            losses, samples = [each.loss for each in sources], [each.samples for each in sources]
            self._trends = self._trends.after_step(losses, samples)
            if self.order.ends_epoch(step):
                self._trends = self.adaptation.after_epoch(self._trends)
        self._busy_s.append(branch_seconds(self.plan.graph, busy_s))
        self._spans = [*self._spans[1 - OBSERVED :], (step - 1, spans)]
        return step % self.measurement_interval == 0

    def report(self) -> Report:
        """What this rank measured."""
        points: list[Point] = []
        texts = self.batches.texts
        if is_text(self._branch) and texts is not None:  # others cost all the same
            replicas = self.plan.batches[self._branch].replicas
            for step, spans in self._spans:
                points += points_of(texts, self.batches.at(step), spans, self._replica, replicas)
        return Report(self._stage.name, points, self._ahead)

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
        order = self.order if mix is None else self.order.with_mix(*mix)
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
        return max(epoch, self.order.epoch(first_step - 1)) + 1, parts

    def _newest_mix(self) -> tuple[int, Parts]:
        return self.order.mixes[-1] if self.order.mixes else (0, self.order.parts)

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
                "from_step": self.order.first_step(epoch),
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
        self.batches.order = self.order.with_mix(epoch, tuple((n, w) for n, w in parts))

    # -- the state of a run

    def state_dict(self) -> dict[str, Any]:
        """JSON-like. Seconds of single micro-batches, of the last steps before a measurement, are
        not part of it."""
        return {
            "split": self._split(),
            "settings": [setting.record() for setting in self.batches.settings],
            "mixes": self.order.mixes,
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
            ends = any(trends.samples) and self.order.ends_epoch(step)
            self._trends = self.adaptation.after_epoch(trends) if ends else trends
        now = setting_at(before, step)
        packed_alike = (now.text_cost is None) == (self.first.text_cost is None)
        if state["split"] == self._split() and packed_alike:
            self.batches.settings = before
            self._observations = Observations(**state["looks"])
            self._busy_s = list(state["busy_s"])
            self._rank_own_s = list(state.get("rank_own_s", ()))  # not in states of 0.1.0
            return
        anew = replace(self.first, from_step=step, feed_rates=now.feed_rates, reason="planned anew")
        anew = with_numbers(anew, self.batches, self.plan, self.balance)
        self.batches.settings = [self.first, anew]

    def _split(self) -> dict[str, Any]:
        return {
            "stages": self.plan.graph.describe(),
            "batches": {branch: batch.record() for branch, batch in self.plan.batches.items()},
        }
