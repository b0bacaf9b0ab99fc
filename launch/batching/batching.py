"""The global batches of a run: the order of their samples, how they are packed into micro-batches,
and what follows measured times and losses.

train.py sees this one object. It has two parts: the batches (`data/batching/batches.py`), which are
the order, (seed, step) -> samples, and the packing, samples -> micro-batches; and what is decided
from measured times and losses (`rebalancing.py`), which changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.batching.batches import Shares
from data.batching.mixture import source_names
from data.batching.order import GlobalOrder
from data.batching.requests import MicroBatchRequest
from data.batching.settings import setting_at
from data.prepared import PreparedData
from engine.config.reading import BranchesBlock
from engine.executor import ForkEngine, StepSpec
from engine.json_messages import from_first_rank, to_first_rank
from engine.planning.planner import RunPlan
from engine.step_metrics import StepMetrics
from launch.batching.measured import Report
from launch.batching.planned import (
    adaptation,
    equal_shares,
    explain_batches,
    num_kept,
    planned_batches,
)
from launch.batching.rebalancing import Rebalancing
from launch.config.blocks import balancing
from launch.config.groups import BatchingOptions
from launch.run.resuming import earlier_sizes
from launch.run.step_line import step_line

LEAST_STEPS = 20  # between the checkpoints and evaluations that come at the end of an epoch


def order_of_run(
    data: PreparedData, options: BatchingOptions, batch_size: int, state: Mapping[str, Any]
) -> tuple[GlobalOrder, int]:
    """In which the training samples come, and the number of steps. `state`: of the checkpoint that
    the run goes on from, whose global batches may have had other sizes."""
    earlier = earlier_sizes(state["batch_sizes"], batch_size)
    order = data.order(batch_size, earlier, options.film_clips or 1)
    return order, options.steps or order.first_step(options.epochs or 0)


class Batching:
    """Of one rank: its micro-batches, and what it measures. `workers`: loader processes of a rank;
    `patch_size`: of a ViT. Where processes share `folder`, one goes first and counts tokens for
    all. Errors: ValueError for bounds that these towers or data do not have.
    """

    def __init__(
        self,
        plan: RunPlan,
        rank: int,
        workers: int,
        *,
        data: PreparedData,
        order: GlobalOrder,
        total_steps: int,
        options: BatchingOptions,
        block: BranchesBlock,
        patch_size: int | None,
        folder: Path,
    ):
        self.plan, self.options, self.total_steps = plan, options, total_steps
        self.sources, self.balance = source_names(options.data), balancing(block)
        adapts = adaptation(self.balance, order.parts, options)
        self.batches, control = planned_batches(
            plan, data, order, options, block, patch_size, folder
        )
        self.equal_shares = equal_shares(plan, self.batches, self.balance)
        self._stage, self._replica = plan.graph.stage_of(rank), plan.graph.replica_of(rank)
        self._branch = next(iter(self._stage.layers))
        self.rebalancing = Rebalancing(
            plan,
            self.batches,
            self.balance,
            control,
            adapts,
            self._stage,
            self._replica,
            # Two micro-batches per worker are made ahead, at worst each of another step, and the
            # step after them is being packed.
            ahead=2 * workers + 2,
        )

    @property
    def order(self) -> GlobalOrder:
        return self.batches.order

    # -- what a step is

    def requests(
        self, start_step: int, stop_step: int, meta_first: bool
    ) -> Iterator[MicroBatchRequest | list[MicroBatchRequest]]:
        """The micro-batches that this rank loads, see `Batches.requests`."""
        return self.batches.requests(
            self._branch,
            self._replica,
            self._stage.replicas,
            start_step,
            stop_step,
            loads=self._stage.loads,
            meta_first=meta_first,
        )

    def step_spec(self, step: int, loss_weights: Mapping[str, float]) -> StepSpec:
        """Numbers of micro-batches and rows of a step."""
        setting = setting_at(self.batches.settings, step)
        shares = Shares({}, {})
        if self.batches.keeps_shares:
            stage = self._stage
            shares = self.batches.shares(self._branch, stage.loads, stage.replicas, step)
        return StepSpec(
            num_micro_batches=setting.num_micro_batches[self._branch],
            num_kept=num_kept(self.plan, self._branch, setting),
            rows_per_sample={each: setting.feed_rates.rows(each) for each in self.plan.batches},
            loss_weights=loss_weights,
            shares=shares.of_replicas,
            num_made=shares.made,
        )

    def line(self, metrics: StepMetrics, step: int, step_s: float) -> dict[str, float]:
        """The step's line of metrics.jsonl, with the feed rates that may change."""
        movable = self.rebalancing.movable(step - 1)
        return step_line(metrics, step, step_s, self.order, movable, self.sources)

    def is_due(self, step: int, every: int | None) -> bool:
        """After `step` steps, is it time for what comes every `every` steps? None: at the end of
        every `epochs_apart` epochs."""
        if every is not None:
            return step % every == 0
        return self.order.ends_epoch(step) and self.order.epoch(step) % self.epochs_apart == 0

    @property
    def epochs_apart(self) -> int:
        """Of checkpoints and evaluations whose number no flag gives. An epoch of few samples is
        over in less time than they take."""
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

    def after_step(self, engine: ForkEngine, metrics: StepMetrics) -> dict[str, Any] | None:
        """All ranks call it together, after each step. At a measurement: the line of
        balance.jsonl."""
        step, own = engine.global_steps, self.rebalancing  # done so far; the next has this number
        spans = engine.recorder.spans
        if not own.note(step, metrics.busy_s, spans, metrics.sources, metrics.rank_own_s):
            return None
        reports = to_first_rank(asdict(own.report()))
        decided = None
        if reports is not None:
            decided = own.decide(step, [Report(**report) for report in reports])
        return own.take_over(from_first_rank(decided))

    # -- the state of a run

    def state_dict(self) -> dict[str, Any]:
        """JSON-like, see `Rebalancing.state_dict`."""
        return self.rebalancing.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """With step `step` the next."""
        self.rebalancing.load_state_dict(state, step)
