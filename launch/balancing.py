"""Who deals the global batches of a run: from the `balance` block, the plan and the costs to a dealer per branch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from data.balance import ByCost, ByShape, Dealer, GlobalBatch, InOrder
from data.branch_cost import BranchCost
from data.buckets import BucketedSamples
from data.dealing import DealBounds, explain, padded_lengths
from data.lengths import token_counts
from data.prepare import PreparedData
from data.sampler import GlobalOrder
from engine.config import BalanceBlock
from engine.costs import CostModel
from engine.planner import RunPlan
from engine.topology import BRANCHES
from launch.options import Options


def make_dealers(
    balance: BalanceBlock,
    plan: RunPlan,
    costs: CostModel,
    data: PreparedData,
    buckets: BucketedSamples | None,
    options: Options,
    folder: Path,
    progress: bool = False,
) -> dict[str, Dealer]:
    """A dealer for each branch; branches that share a line share theirs. The first rank that comes counts tokens and keeps them in `folder`."""
    by_shape = InOrder() if buckets is None else ByShape(buckets)
    if balance.strategy == "off" or plan.schedule == "per_micro_batch":
        return dict.fromkeys(BRANCHES, by_shape)
    tokens = token_counts(data.source, data.train, data.tokenizer, options.max_text_tokens, folder / "token_counts", progress)
    typical = float(padded_lengths(tokens.counts[: 1 << 16], options.max_text_tokens).mean())
    shared = plan.graph.layout != "fork"
    by_cost = ByCost(
        tokens,
        options.max_text_tokens,
        options.seed,
        {branch: branch_cost(costs, plan, branch, typical) for branch in (BRANCHES if shared else ("text",))},
        DealBounds(balance.min_size, balance.max_size or 1 << 30),
        plan.batches["text"].micro_batch_size * options.max_text_tokens,
        sum("text" in stage.layers for stage in plan.graph.stages) if not shared else len(plan.graph.stages),
        plan.graph.layout == "merged",
    )
    if shared:  # a micro-batch can be of one shape or of one length, not both
        return dict.fromkeys(BRANCHES, by_cost if buckets is None else by_shape)
    return {"image": by_shape, "text": by_cost}


def branch_cost(costs: CostModel, plan: RunPlan, branch: str, typical_length: float) -> BranchCost:
    """Of the branch's slowest stage: a line through the seconds of its smallest and largest measured micro-batch. A text's seconds are
    in proportion to the length it is padded to, an image's to nothing."""
    found = []
    for stage in plan.graph.stages:
        layers = [costs.layers[branch][i] for i in stage.layers.get(branch, ())]
        if layers:
            sizes = layers[0].forward_s.sizes
            few, many = (sum(layer.forward_s.at(size) + layer.backward_s.at(size) for layer in layers) for size in (sizes[0], sizes[-1]))
            slope = (many - few) / (sizes[-1] - sizes[0]) if len(sizes) > 1 and many > few else few / sizes[0]
            found.append((max(0.0, few - slope * sizes[0]), slope))
    fixed_s, per_sample_s = max(found, key=lambda line: line[0] + plan.batches[branch].micro_batch_size * line[1])
    return BranchCost(fixed_s, per_sample_s) if branch == "image" else BranchCost(fixed_s, 0.0, per_sample_s / typical_length)


def explain_dealing(dealers: Mapping[str, Dealer], order: GlobalOrder, train: np.ndarray, plan: RunPlan, steps: range) -> str:
    """Tables of what those who deal by cost make of these steps; for the others one line."""
    lines = []
    for branch, dealer in dealers.items():
        if not isinstance(dealer, ByCost):
            words = "by shape" if isinstance(dealer, ByShape) else "in order"
            lines.append(f"{branch}: {words}, {plan.batches[branch].micro_batch_size} samples in every micro-batch")
        elif dealer is not dealers["image"] or branch == "image":  # a shared deal once
            replicas, number = plan.batches[branch].replicas, plan.batches[branch].num_micro_batches
            for step in steps:
                visited = order.batch(step)
                batch = GlobalBatch(step, order.epoch(step), visited, np.asarray(train[visited]))
                deal, works = dealer.deal(batch, replicas, number), dealer.works(batch)
                who = branch if plan.graph.layout == "fork" else plan.graph.layout
                lines.append(f"{who}, step {step + 1}: {explain(deal, works, dealer.num_stages, dealer.same_stages)}")
    return "\n".join(lines)


def equal_shares(dealers: Mapping[str, Dealer]) -> bool:
    """Does every replica of a branch get equally many samples?"""
    return not any(isinstance(dealer, ByCost) for dealer in dealers.values())


def constant_shapes(dealers: Mapping[str, Dealer]) -> dict[str, bool]:
    """By branch: do all micro-batches have equal shapes?"""
    return {"image": isinstance(dealers["image"], InOrder), "text": False}
