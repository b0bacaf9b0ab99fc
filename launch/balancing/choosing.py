"""How the global batches of a run are dealt, and fed: from the `balance` block, a plan and costs to
dealers and their first setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.batching.adaptation import Adaptation
from data.batching.balance import ByCost, ByShape, Dealer, GlobalBatch, InOrder
from data.batching.branch_cost import BranchCost
from data.batching.buckets import BucketedSamples
from data.batching.dealing import DealBounds, explain, padded_lengths
from data.batching.feed import BRANCH_OF, FeedRules, Ladders, patch_ladder, size_ladder
from data.batching.mixture import source_names
from data.batching.sampler import GlobalOrder, global_batch
from data.batching.settings import Mixes, Setting, Settings
from data.modalities.lengths import token_counts
from data.prepare import PreparedData
from engine.optimizer.locking import lock_costs
from engine.planning.costs import CostModel
from engine.planning.planner import RunPlan
from launch.config.blocks import BalanceBlock
from launch.config.groups import BatchingOptions

SAMPLED_BATCHES = 4  # global batches that decide how many micro-batches there are
MOST_DEALT = (
    32  # micro-batches of a branch that is dealt alone: more leave next to no padding to save
)
INSTRUCTIONS = 3  # of a micro-batch on a stage, at least: load or receive, forward, backward
CONV_STRIDE = 32  # of ResNets and ConvNeXts, in pixels
MARGIN = 0.9  # of the memory of a micro-batch: other global batches may have longer texts
TYPICAL_TEXTS = 1 << 16


@dataclass(frozen=True, eq=False)
class Balance:
    """What a run is dealt and fed by. `dealers` by branch: `ladders`: where feed rates may go.
    `adaptation`: how data sets are mixed by their losses; None: as asked for."""

    block: BalanceBlock
    plan: RunPlan
    dealers: Mapping[str, Dealer]
    order: GlobalOrder
    train: np.ndarray  # [N], indices of the training samples
    ladders: Ladders
    rules: FeedRules
    first: Setting
    adaptation: Adaptation | None = None

    @property
    def equal_shares(self) -> bool:
        """Does every replica of a branch get equally many samples?"""
        return all(
            dealer.equal_shares and self.plan.batches[branch].is_even
            for branch, dealer in self.dealers.items()
        )

    def num_kept(self, branch: str, setting: Setting) -> int:
        """Micro-batches that keep their activations where the schedule recomputes: those of as many
        samples as planned."""
        planned, number = self.plan.batches[branch], setting.num_micro_batches[branch]
        expected = planned.num_micro_batches * self._captions(branch, setting)
        return planned.num_kept * number // expected

    def batch(self, step: int, setting: Setting, mixes: Mixes = ()) -> GlobalBatch:
        return global_batch(
            self.order, self.train, Settings([replace(setting, from_step=0)], mixes), step
        )

    def num_micro_batches(self, setting: Setting, step: int, mixes: Mixes = ()) -> dict[str, int]:
        """As many as take least time for the global batches from `step` on, by the costs and with
        the feed rates of `setting`."""
        return {
            branch: self._num_micro_batches(branch, setting, step, mixes) for branch in self.dealers
        }

    def _num_micro_batches(self, branch: str, setting: Setting, step: int, mixes: Mixes) -> int:
        dealer, planned = self.dealers[branch], self.plan.batches[branch]
        # texts of several captions are so many more; with one each, the memory of the plan is
        # enough for as many micro-batches as it has
        captions = self._captions(branch, setting)
        # On a shared line all branches have as many, and memory and batch normalisation see the
        # images: the planned number stays.
        if not isinstance(dealer, ByCost) or self.plan.graph.layout != "fork":
            share, wanted = (
                self.order.global_batch_size // planned.replicas,
                planned.num_micro_batches * captions,
            )
            most = max(1, share // self.block.min_size)
            if not planned.is_even:
                return min(wanted, most)
            if wanted > most:
                return max(m for m in range(1, most + 1) if share % m == 0)
            return next((m for m in range(wanted, share) if share % m == 0), share)
        positions = self.order.global_batch_size * captions
        most = max(
            1,
            min(
                planned.num_micro_batches * captions,
                positions // (planned.replicas * self.block.min_size),
            ),
        )
        # Shorter texts together need less memory than the planned micro-batches, so there may be
        # more of them.
        most = max(most, min(MOST_DEALT, positions // (planned.replicas * self.block.min_size)))
        careful = replace(
            dealer,
            largest=dealer.largest and max(dealer.max_text_tokens, int(MARGIN * dealer.largest)),
        )
        return max(
            len(careful.deal(self.batch(s, setting, mixes), planned.replicas, 1, most)[0])
            for s in self._sampled_steps(step)
        )

    def _captions(self, branch: str, setting: Setting) -> int:
        """Of each image, in the line that holds `branch`."""
        return (
            setting.feed_rates.captions_per_image
            if branch == "text" or self.plan.graph.layout != "fork"
            else 1
        )

    def _sampled_steps(self, step: int) -> list[int]:
        """Steps whose global batches decide: those from `step` on, and under a curriculum the
        hardest, which end the epoch."""
        steps = range(step, step + SAMPLED_BATCHES)
        if self.order.curriculum is None:
            return [*steps]
        end = self.order.first_step(self.order.epoch(step) + 1)
        return sorted({*steps, *range(max(step, end - SAMPLED_BATCHES), end)})


def make_balance(
    block: BalanceBlock,
    plan: RunPlan,
    costs: CostModel,
    data: PreparedData,
    order: GlobalOrder,
    buckets: BucketedSamples | None,
    patch_size: int | None,
    options: BatchingOptions,
    folder: Path,
    progress: bool = False,
) -> Balance:
    """The first rank that comes counts tokens and keeps them in `folder`. `patch_size` of a ViT.
    Errors: ValueError for bounds that these towers or data do not have."""
    adaptation = _adaptation(block, order, options)
    _refuse_idle(block, plan)
    # Branches that share a line share the deal of their samples, so all have that of the images.
    dealers: dict[str, Dealer] = dict.fromkeys(
        plan.batches, InOrder() if buckets is None else ByShape(buckets)
    )
    planned = {branch: batch.num_micro_batches for branch, batch in plan.batches.items()}
    if block.strategy == "off" or plan.schedule_type.loss_per_micro_batch or "text" not in dealers:
        return Balance(
            block=block,
            plan=plan,
            dealers=dealers,
            order=order,
            train=data.train,
            ladders=Ladders(),
            rules=FeedRules(),
            first=Setting(0, planned),
            adaptation=adaptation,
        )
    tokens = token_counts(
        data.source,
        data.train,
        data.text_tokenizer,
        max_text_tokens=options.max_text_tokens,
        folder=folder / "token_counts",
        progress=progress,
    )
    typical = float(
        padded_lengths(
            tokens.counts[:TYPICAL_TEXTS], options.max_text_tokens, data.length_multiple
        ).mean()
    )
    by_cost = ByCost(
        tokens=tokens,
        max_text_tokens=options.max_text_tokens,
        seed=options.seed,
        bounds=DealBounds(block.min_size, block.max_size or 1 << 30),
        largest=plan.batches["text"].micro_batch_size * options.max_text_tokens,
        num_stages=sum("text" in stage.layers for stage in plan.graph.stages)
        if plan.graph.layout == "fork"
        else len(plan.graph.stages),
        length_multiple=data.length_multiple,
    )
    dealers["text"] = by_cost
    if block.window > 1:

        def lengths_of(visited: np.ndarray, epoch: int) -> np.ndarray:
            return tokens.of(visited, np.asarray(data.train[visited]), options.seed, epoch)[:, 0]

        order = replace(order, window=block.window, lengths_of=lengths_of)
    ladders, rules = Ladders(), FeedRules()
    if block.strategy == "feed":
        ladders = _ladders(
            block, plan, data, options=options, patch_size=patch_size, typical=typical
        )
        rules = FeedRules(block.dead_band, block.max_change)
    first = Setting(0, planned, {"text": text_cost(costs, plan, typical)}, ladders.start())
    balance = Balance(
        block=block,
        plan=plan,
        dealers=dealers,
        order=order,
        train=data.train,
        ladders=ladders,
        rules=rules,
        first=first,
        adaptation=adaptation,
    )
    return replace(
        balance,
        first=replace(first, num_micro_batches=balance.num_micro_batches(first, order.changed_at)),
    )


def _refuse_idle(block: BalanceBlock, plan: RunPlan) -> None:
    """Raise ValueError for keys of a branch that this run does not have."""
    there = f"this run has the branches {', '.join(plan.batches)}; remove the key"
    for key, branch in BRANCH_OF.items():
        if getattr(block, key) is not None and branch not in plan.batches:
            raise ValueError(
                f"branches.balance.{key}: it moves how much the {branch} branch takes in, and {there}"
            )
    if "text" not in plan.batches and (block.strategy == "feed" or block.window > 1):
        key = "window" if block.window > 1 else "strategy"
        raise ValueError(
            f"branches.balance.{key}: {getattr(block, key)!r} goes by the lengths of texts, and {there}"
        )


def _adaptation(
    block: BalanceBlock, order: GlobalOrder, options: BatchingOptions
) -> Adaptation | None:
    """What --data-adapt asks for."""
    if not options.data_adapt:
        return None
    if not block.measurement_interval(adapts=True):
        raise ValueError(
            f"--data-adapt {options.data_adapt:g} decides when times are measured, and "
            "branches.balance.interval is 0, never; give an interval of at least 1, or leave "
            "--data-adapt out"
        )
    return Adaptation(
        source_names(options.data), order.parts, options.data_adapt, options.data_floors
    )


def image_buckets(
    data: PreparedData, options: BatchingOptions, patch_size: int | None
) -> BucketedSamples | None:
    """The input sizes that --image-buckets asks for, chosen from the sizes of the training
    images; None: one square."""
    if options.image_buckets == 1:
        return None
    widths, heights = (data.source.column(name)[data.train] for name in ("width", "height"))
    return BucketedSamples.choose(
        widths, heights, options.image_size, side_multiple(patch_size), options.image_buckets
    )


def side_multiple(patch_size: int | None) -> int:
    """Pixels that the sides of an image are multiples of. `patch_size` of a ViT; None:
    convolutions."""
    return patch_size or CONV_STRIDE


def _ladders(
    block: BalanceBlock,
    plan: RunPlan,
    data: PreparedData,
    options: BatchingOptions,
    patch_size: int | None,
    typical: float,
) -> Ladders:
    """The values that the bounds leave for these towers and data."""
    captions: tuple[int, ...] = (1,)
    patches: tuple[float, ...] = (1.0,)
    sizes: tuple[int, ...] = (0,)
    if block.captions_per_image is not None:
        least, most = block.captions_per_image
        have = int(data.source.column("num_captions")[data.train].max())
        if least > have:
            raise ValueError(
                f"branches.balance.captions_per_image: [{least}, {most}], but no image of this "
                f"data has more than {have} captions"
            )
        # where all activations wait for the loss: no more padded tokens than the plan had at their
        # longest
        room = (
            most
            if plan.schedule_type.recomputes
            else max(1, int(MARGIN * options.max_text_tokens / typical))
        )
        captions = tuple(range(least, max(least, min(most, have, room)) + 1))
    if block.kept_patches is not None:
        if patch_size is None:
            raise ValueError(
                f"branches.balance.kept_patches: {options.image_tower} has no patches to leave "
                "out; use a ViT, or remove the key"
            )
        patches = patch_ladder(*map(float, block.kept_patches))
    if block.image_size is not None:
        least, most = block.image_size
        if most > options.image_size:
            raise ValueError(
                f"branches.balance.image_size: [{least}, {most}] goes beyond --image-size "
                f"{options.image_size}"
            )
        sizes = size_ladder(least, most, side_multiple(patch_size))
    return Ladders(captions, patches, sizes)


def text_cost(costs: CostModel, plan: RunPlan, typical_length: float) -> BranchCost:
    """Of the slowest stage with texts: a line through the seconds of its smallest and largest
    measured micro-batch. A text's seconds are in proportion to the length it is padded to."""
    costs = lock_costs(costs, plan.trainable)
    found = []
    for stage in plan.graph.stages:
        layers = [costs.layers["text"][i] for i in stage.layers.get("text", ())]
        if layers:
            sizes = layers[0].forward_s.sizes
            few, many = (
                sum(layer.training_s(size) for layer in layers) for size in (sizes[0], sizes[-1])
            )
            slope = (
                (many - few) / (sizes[-1] - sizes[0])
                if len(sizes) > 1 and many > few
                else few / sizes[0]
            )
            found.append((max(0.0, few - slope * sizes[0]), slope))
    fixed_s, per_sample_s = max(
        found, key=lambda line: line[0] + plan.batches["text"].micro_batch_size * line[1]
    )
    fixed_s += INSTRUCTIONS * costs.machine.instruction_s
    return BranchCost(fixed_s, 0.0, per_sample_s / typical_length)


def explain_dealing(balance: Balance, settings: Settings, steps: range) -> str:
    """Tables of what those who deal by cost make of these steps; for the others one line."""
    lines, plan = [], balance.plan
    for branch, dealer in balance.dealers.items():
        if not isinstance(dealer, ByCost):
            words, own = (
                "by shape" if isinstance(dealer, ByShape) else "in order",
                plan.batches[branch],
            )
            lines.append(
                f"{branch}: {words}, {'' if own.is_even else 'at most '}{own.micro_batch_size} samples "
                "in every micro-batch"
            )
        else:
            for step in steps:
                batch = balance.batch(step, settings.at(step), settings.mixes)
                number = batch.setting.num_micro_batches[branch]
                deal = dealer.deal(batch, plan.batches[branch].replicas, number, number)
                lines.append(
                    f"{branch}, step {step + 1}: "
                    f"{explain(deal, dealer.work(batch), dealer.num_stages)}"
                )
    return "\n".join(lines)
