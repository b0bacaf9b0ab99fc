"""How the global batches of a run are made: their order, their division into micro-batches, and
what follows measured times and losses.

train.py sees this one object. Behind it are the order with its mixing, windows and curriculum
(`data/batching/sampler.py`), texts dealt by cost (`choosing.py`), costs and feed rates that follow
measured times (`balancer.py`), and the weights of samples (`weighting.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.batching.mixture import source_names
from data.prepare import PreparedData
from engine.config.reading import BranchesBlock
from engine.executor import ForkEngine
from engine.planning.costs import CostModel
from engine.planning.planner import RunPlan
from engine.step_metrics import StepMetrics
from launch.balancing.balancer import Balancer
from launch.balancing.choosing import (
    BatchingOptions,
    explain_dealing,
    image_buckets,
    make_balance,
)
from launch.balancing.weighting import loss_weights_of, text_lengths, training_order
from launch.config.blocks import dealing, weighting
from launch.run.resuming import earlier_sizes
from launch.run.step_line import step_line


class Batching:
    """`state`: of the checkpoint that the run goes on from. Where processes share `folder`, one
    goes first and counts tokens for all."""

    def __init__(
        self,
        data: PreparedData,
        options: BatchingOptions,
        block: BranchesBlock,
        batch_size: int,
        state: Mapping[str, Any],
        folder: Path,
    ):
        self.data, self.options, self.block, self.folder = data, options, block, folder
        weights = weighting(block)
        lengths = text_lengths(data, weights, options.max_text_tokens, folder, progress=True)
        earlier = earlier_sizes(state["batch_sizes"], batch_size)
        self.order = training_order(
            data, batch_size, options.seed, block=weights, lengths=lengths, earlier=earlier
        )
        self.total_steps = options.steps or self.order.first_step(options.epochs or 0)
        self.weights_of = loss_weights_of(data, weights, lengths)
        """The samples of a global batch [G] -> what they count in its loss, [G] int64 millionths;
        None: all the same."""
        self.sources = source_names(options.data)

    def divide(self, plan: RunPlan, costs: CostModel, patch_size: int | None) -> None:
        """Decide which samples make which micro-batch of the plan. Errors: ValueError for bounds
        that these towers or data do not have."""
        self.patch_size = patch_size
        self.buckets = image_buckets(self.data, self.options, patch_size)
        self.balance = make_balance(
            dealing(self.block),
            plan,
            costs,
            data=self.data,
            order=self.order,
            buckets=self.buckets,
            patch_size=patch_size,
            options=self.options,
            folder=self.folder,
            progress=True,
        )

    def describe_shapes(self) -> str:
        """The input shapes of --image-buckets; empty: one square."""
        if self.buckets is None:
            return ""
        return f"images of {', '.join(f'{h}×{w}' for h, w in self.buckets.sizes)} pixels (height × width)"

    def follow(self, engine: ForkEngine, workers: int) -> None:
        """From here on with what the stage of this rank measures. `workers`: loader processes of a
        rank."""
        self.engine, self.balancer = (
            engine,
            Balancer(self.balance, engine.replica, engine.place.name, workers),
        )

    @property
    def equal_shares(self) -> bool:
        """Does every replica of a branch get equally many samples?"""
        return self.balance.equal_shares

    def shape(self, step: int) -> dict[str, Any]:
        """What `train_batch` must know of a step: the numbers of micro-batches, and rows per
        sample."""
        return self.balancer.shape(step)

    def line(self, metrics: StepMetrics, step: int, step_s: float) -> dict[str, float]:
        """The step's line of metrics.jsonl."""
        return step_line(
            metrics,
            step,
            step_s,
            balance=self.balance,
            settings=self.balancer.settings,
            sources=self.sources,
        )

    def after_step(self, metrics: StepMetrics) -> dict[str, Any] | None:
        """At a measurement of times, which all ranks make together: the line of
        balance.jsonl."""
        return self.balancer.after_step(self.engine, metrics)

    def is_due(self, step: int, every: int | None) -> bool:
        """After `step` steps, is it time for what comes every `every` steps? None: once an
        epoch."""
        return step % every == 0 if every else self.order.ends_epoch(step)

    def explain(self, step: int) -> str:
        """Tables of how the next --explain-balance global batches are divided; empty: none were
        asked for."""
        steps = range(step, min(step + self.options.explain_balance, self.total_steps))
        return explain_dealing(self.balance, self.balancer.settings, steps) if steps else ""

    def state_dict(self) -> dict[str, Any]:
        """JSON-like."""
        return self.balancer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """With step `step` the next."""
        self.balancer.load_state_dict(state, step)
