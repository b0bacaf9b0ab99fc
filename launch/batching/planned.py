"""How the global batches of a run are packed and controlled, from the `balance` block, the plan and
the costs of the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from data.batching.batches import Batches, GlobalBatch, TextPacker
from data.batching.branch_cost import BranchCost
from data.batching.buckets import Buckets, NearestSizes, side_multiple
from data.batching.load_control import (
    BRANCH_OF,
    FeedRates,
    LoadControl,
    patch_ladder,
    size_ladder,
)
from data.batching.mixing import Adaptation
from data.batching.mixture import source_names
from data.batching.order import GlobalOrder, Parts
from data.batching.packing import Bounds, explain, padded_lengths
from data.batching.rows import Rows
from data.batching.settings import Setting
from data.batching.shown import ShownAnnotations
from data.batching.weights import loss_weights
from data.index.sources import Source
from data.modalities.lengths import Counts, token_counts
from data.modalities.tokenizer import token_lengths
from data.options import derived_of, read_terms
from data.prepared import PreparedData
from data.stored.kinds import is_text, text_of
from data.streams.lengths import stream_token_counts
from data.streams.several import texts_alone
from engine.config.reading import BranchesBlock
from engine.planning.planner import RunPlan
from launch.config.blocks import BalanceBlock, SampleWeightsBlock, balancing, weighting
from launch.config.groups import BatchingOptions, InputOptions
from launch.modalities import MODALITIES

MOST_EXAMPLES = 4096  # of a stream, whose samples are not known beforehand
TRIED_PHRASES = 500  # samples of which the lengths of phrases are taken
NEARLY_ALL = 0.95
INSTRUCTIONS = 3  # of a micro-batch on a stage, at least: load or receive, forward, backward
MARGIN = 0.9  # of the memory of a micro-batch: other global batches may have longer texts
SAMPLED_BATCHES = 4  # global batches that decide how many micro-batches there are
# micro-batches of texts that are packed alone: more leave next to no padding to save
MOST_PACKED = 32


def planned_batches(
    plan: RunPlan,
    data: PreparedData,
    order: GlobalOrder,
    options: BatchingOptions,
    block: BranchesBlock,
    patch_size: int | None,
    folder: Path,
) -> tuple[Batches, LoadControl]:
    """The global batches with the setting that the plan begins with, and how the load of the
    branches may move. `patch_size`: of a ViT; `folder`: where token counts are kept. Errors:
    ValueError for bounds that these towers or data do not have."""
    balance = balancing(block)
    refuse_missing_branches(balance, plan)
    buckets = image_buckets(data, options, patch_size)
    weights_of = sample_weights_of(data, weighting(block), options.max_text_tokens, folder)
    annotations = shown_annotations_of(data.source, options)
    apart = weights_of is annotations is None and _texts_enter_alone(plan)
    numbers = {branch: batch.num_micro_batches for branch, batch in plan.batches.items()}
    batches = Batches(
        order,
        data.train,
        [Setting(0, numbers, feed_rates=FeedRates(views_per_image=options.views_per_image))],
        buckets=buckets,
        texts=text_packer(balance, plan, data, options, folder, apart),
        costs=value_costs(balance, plan, data, options, in_sizes=buckets is not None),
        annotations=annotations,
        weights_of=weights_of,
        examples=data.example_numbers(MOST_EXAMPLES) if data.shards else None,
    )
    batches.texts_apart = apart and (buckets is None or batches.texts is not None)
    batches.keeps_shares = _knows_rows_of_others(plan, batches, balance)
    if batches.texts is None:
        refuse_lone_rows(options.terms, batches.settings[0].feed_rates)
        return batches, LoadControl()
    length = mean_length(batches.texts)
    control = load_control(balance, plan, data, options, patch_size, length)
    first = replace(
        batches.settings[0],
        text_cost=text_cost(plan, length),
        feed_rates=replace(control.start(), views_per_image=options.views_per_image),
    )
    refuse_lone_rows(options.terms, first.feed_rates)
    batches.settings = [with_numbers(first, batches, plan, balance, order.changed_at)]
    return batches, control


def refuse_lone_rows(terms: str, feed_rates: FeedRates) -> None:
    """Raise ValueError, in the words of a command line, for a term of --terms that compares the rows
    of a sample with each other where each sample has one."""
    for term in read_terms(terms):
        if len(term.branches) == 1 and feed_rates.rows(branch := term.branches[0]) == 1:
            more = (
                'a "branches.balance" block with "strategy": "feed", "captions_per_image": [2, 2]'
                if is_text(branch)
                else "--views-per-image 2, which images alone have"
            )
            raise ValueError(
                f"argument --terms: {term.name} compares the rows that a sample has in the {branch} "
                f"branch, and each has one; give {more}"
            )


def _texts_enter_alone(plan: RunPlan) -> bool:
    """Whether there is a stage that loads texts and nothing else."""
    return any(stage.loads and all(map(is_text, stage.loads)) for stage in plan.graph.stages)


def equal_shares(plan: RunPlan, batches: Batches, balance: BalanceBlock) -> bool:
    """Does every replica of a branch get equally many samples?"""
    even = all(batch.is_even for batch in plan.batches.values())
    by_cost = batches.texts is not None or bool(batches.costs)
    return even and not by_cost and balance.ranks == "equal"


def _knows_rows_of_others(plan: RunPlan, batches: Batches, balance: BalanceBlock) -> bool:
    """Whether every stage knows how many rows the other replicas bring where they are unequally
    many: it does where it is the first and the last of its line, and so packs all that ends in
    it."""
    uneven = not equal_shares(plan, batches, balance) or batches.annotations is not None
    alone = len(plan.graph.last_stages) == len(plan.graph.stages)
    return uneven and alone and not plan.schedule_type.loss_per_micro_batch


def image_buckets(
    data: PreparedData, options: BatchingOptions, patch_size: int | None
) -> Buckets | None:
    """The input sizes that --image-buckets asks for, chosen from the sizes of the training
    images; None: one square."""
    if options.image_buckets == 1:
        return None
    known = data.examples() if data.shards else data.train[:]
    widths, heights = (data.source.numbers(name, known) for name in ("width", "height"))
    how = (options.image_size, side_multiple(patch_size), options.image_buckets)
    buckets = Buckets.choose(widths, heights, *how)
    if isinstance(data.train, Rows):
        return replace(buckets, number=NearestSizes(data.source, data.train, buckets.sizes))
    return buckets


def adaptation(block: BalanceBlock, parts: Parts, options: BatchingOptions) -> Adaptation | None:
    """What --data-adapt asks for; None: the weights of the data sets stay. Errors: ValueError where
    nothing is ever measured."""
    if not options.data_adapt:
        return None
    if not block.measurement_interval(adapts=True):
        raise ValueError(
            f"--data-adapt {options.data_adapt:g} decides when times are measured, and "
            "branches.balance.interval is 0, never; give an interval of at least 1, or leave "
            "--data-adapt out"
        )
    return Adaptation(source_names(options.data), parts, options.data_adapt, options.data_floors)


# -- what samples weigh in the loss


def sample_weights_of(
    data: PreparedData, block: SampleWeightsBlock | None, max_text_tokens: int, folder: Path
) -> Callable[[GlobalBatch], np.ndarray] | None:
    """A global batch -> what its samples count in its loss, [G] int64 millionths; None: all the
    same."""
    if block is None:
        return None
    if data.tokenizer is None:
        return partial(loss_weights, data.source, None, block.image, block.text, block.audio)
    counts = counted_tokens(data, data.source, max_text_tokens, folder)

    def lengths(batch: GlobalBatch) -> np.ndarray:
        has_text = data.source.numbers("num_captions", batch.indices) > 0
        return np.where(has_text, counts.longest(batch.visited, batch.indices), 0)

    return partial(loss_weights, data.source, lengths, block.image, block.text, block.audio)


# -- annotations


def shown_annotations_of(source: Source, options: InputOptions) -> ShownAnnotations | None:
    """None: no pair has any."""
    kind = derived_of(options.pairs)
    if kind is None:
        return None
    return ShownAnnotations(source, kind, getattr(options, kind.most), options.max_negatives)


def phrase_tokens(
    data: PreparedData, annotations: ShownAnnotations | None, max_text_tokens: int
) -> tuple[int, float]:
    """What a phrase is padded to among others, of the first training samples: as long as nearly all
    are; and all phrases of a sample together, on average."""
    if annotations is None:
        return 0, 0.0
    batch = data.examples(TRIED_PHRASES)
    places = annotations.places(batch)
    phrases = places.phrases(batch, None).texts(data.source, 0, 0, training=True)
    lengths = token_lengths(data.text_tokenizer, phrases or [""], max_text_tokens)
    padded = int(np.ceil(np.quantile(lengths, NEARLY_ALL)))
    return padded, padded * len(phrases) / len(batch)


# -- texts that are packed by cost


def counted_tokens(
    data: PreparedData, source: Source, max_text_tokens: int, folder: Path
) -> Counts:
    """Tokens of all captions, counted by the first process that comes and kept in the run's
    folder. `source`: that of the data, or its texts alone."""
    if isinstance(data.train, Rows):
        return stream_token_counts(
            source,
            data.train,
            data.stream_order,
            data.text_tokenizer,
            max_text_tokens,
            folder / "token_counts",
        )
    return token_counts(
        source,
        data.train[:],
        data.text_tokenizer,
        max_text_tokens=max_text_tokens,
        folder=folder / "token_counts",
        progress=True,
    )


def text_packer(
    block: BalanceBlock,
    plan: RunPlan,
    data: PreparedData,
    options: BatchingOptions,
    folder: Path,
    apart: bool,
) -> TextPacker | None:
    """None: texts are not packed by cost. `apart`: a stage reads texts alone, so all ranks count
    the tokens of these, and count alike whatever else is wrong with a shard."""
    planned = plan.batches.get("text")
    if block.strategy == "off" or plan.schedule_type.loss_per_micro_batch or planned is None:
        return None
    fork = plan.graph.layout == "fork"
    annotations = shown_annotations_of(data.source, options)
    each, of_sample = phrase_tokens(data, annotations, options.max_text_tokens)
    source = texts_alone(data.source) if apart else data.source
    return TextPacker(
        tokens=counted_tokens(data, source, options.max_text_tokens, folder),
        max_text_tokens=options.max_text_tokens,
        seed=options.seed,
        bounds=Bounds(
            min_size=block.min_size,
            max_size=block.max_size or Bounds.max_size,
            max_tokens=planned.micro_batch_size * options.max_text_tokens,
        ),
        num_stages=sum(text_of(stage.layers) is not None for stage in plan.graph.stages if fork)
        or len(plan.graph.stages),
        length_multiple=data.length_multiple,
        phrase_tokens=each,
        sample_phrase_tokens=of_sample,
    )


def value_costs(
    block: BalanceBlock,
    plan: RunPlan,
    data: PreparedData,
    options: BatchingOptions,
    in_sizes: bool,
) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """By branch whose samples are dealt by what their values cost: the source's indices of samples
    -> that. Branches that share stages have their samples together, which are dealt by one alone:
    by the sizes of images (`in_sizes`), else by the first branch whose values do not cost alike."""
    if block.strategy == "off" or plan.schedule_type.loss_per_micro_batch:
        return {}
    differ: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        branch: partial(cost, data.source)
        for branch in plan.batches
        if (cost := MODALITIES[branch].cost(options))
    }
    if plan.graph.layout == "fork":
        return differ
    first = [] if in_sizes else [*differ.values()][:1]
    return {branch: cost for cost in first for branch in plan.batches}


def mean_length(texts: TextPacker) -> float:
    """What a text is padded to alone, on average, with the phrases of its sample."""
    counts = texts.tokens.typical()
    lengths = padded_lengths(counts, texts.max_text_tokens, texts.length_multiple)
    return float(lengths.mean()) + texts.sample_phrase_tokens


def text_cost(plan: RunPlan, typical_length: float) -> BranchCost:
    """The cost of the slowest stage with texts: a line through the seconds of its smallest and
    largest measured micro-batch. A text's seconds are in proportion to the length it is padded
    to."""
    costs, branch, found = plan.costs, text_of(plan.batches), []
    assert branch is not None
    for stage in plan.graph.stages:
        layers = [costs.layers[branch][i] for i in stage.layers.get(branch, ())]
        if not layers:
            continue
        sizes = layers[0].forward_s.sizes
        few, many = (sum(layer.training_s(n) for layer in layers) for n in (sizes[0], sizes[-1]))
        slope = few / sizes[0]
        if len(sizes) > 1 and many > few:
            slope = (many - few) / (sizes[-1] - sizes[0])
        found.append((max(0.0, few - slope * sizes[0]), slope))
    size = plan.batches[branch].micro_batch_size
    fixed_s, per_sample_s = max(found, key=lambda line: line[0] + size * line[1])
    fixed_s += INSTRUCTIONS * costs.machine.instruction_s
    return BranchCost(fixed_s, 0.0, per_sample_s / typical_length)


# -- how many micro-batches


def with_numbers(
    setting: Setting,
    batches: Batches,
    plan: RunPlan,
    block: BalanceBlock,
    step: int | None = None,
) -> Setting:
    """The setting with as many micro-batches as take least time for the global batches from `step`
    on (None: from its own first one), by its costs and feed rates."""
    # On shared stages all branches have as many, and memory and batch normalisation see the
    # images: the planned number stays.
    apart = batches.texts is not None and plan.graph.layout == "fork"
    start = setting.from_step if step is None else step
    numbers = {
        branch: _num_packed(setting, batches, plan, block, branch, start)
        if apart and is_text(branch)
        else _num_in_order(setting, batches.order.global_batch_size, plan, block, branch)
        for branch in plan.batches
    }
    return replace(setting, num_micro_batches=numbers)


def _num_in_order(
    setting: Setting, global_batch_size: int, plan: RunPlan, block: BalanceBlock, branch: str
) -> int:
    planned = plan.batches[branch]
    share = global_batch_size // planned.replicas
    wanted = planned.num_micro_batches * _captions(branch, setting)
    most = max(1, share // block.min_size)
    if not planned.is_even:
        return min(wanted, most)
    if wanted > most:
        return max(m for m in range(1, most + 1) if share % m == 0)
    return next((m for m in range(wanted, share) if share % m == 0), share)


def _num_packed(
    setting: Setting, batches: Batches, plan: RunPlan, block: BalanceBlock, branch: str, step: int
) -> int:
    planned, texts = plan.batches[branch], batches.texts
    assert texts is not None
    captions = _captions(branch, setting)
    positions = batches.order.global_batch_size * captions
    # Texts of several captions are so many more. Shorter texts together need less memory than the
    # planned micro-batches, so there may be more of them.
    most = max(planned.num_micro_batches * captions, MOST_PACKED)
    most = max(1, min(most, positions // (planned.replicas * block.min_size)))
    tokens = max(texts.max_text_tokens, int(MARGIN * texts.bounds.max_tokens))
    setting = replace(setting, shares={})  # they all have as many micro-batches
    careful = replace(texts, bounds=replace(texts.bounds, max_tokens=tokens))
    packed = (
        careful.pack(batches.like(each, setting), planned.replicas, range(1, most + 1))
        for each in range(step, step + SAMPLED_BATCHES)
    )
    return max(len(packing[0]) for packing in packed)


def _captions(branch: str, setting: Setting) -> int:
    """Of each image. More than one are drawn in a fork alone, whose images are apart."""
    return setting.feed_rates.captions_per_image if is_text(branch) else 1


def num_kept(plan: RunPlan, branch: str, setting: Setting) -> int:
    """Micro-batches that keep their activations where the schedule recomputes: those of as many
    samples as planned."""
    planned = plan.batches[branch]
    expected = planned.num_micro_batches * _captions(branch, setting)
    return planned.num_kept * setting.num_micro_batches[branch] // expected


def explain_batches(batches: Batches, plan: RunPlan, steps: range) -> str:
    """Tables of how the texts of these steps are packed by cost; one line of other branches."""
    lines = []
    for branch, own in plan.batches.items():
        texts = batches.texts if is_text(branch) else None
        if texts is None:
            how = "in order" if batches.buckets is None else "by shape"
            most = "" if own.is_even else "at most "
            size = f"{most}{own.micro_batch_size} samples in every micro-batch"
            lines.append(f"{branch}: {how}, {size}")
            continue
        for step in steps:
            batch = batches.at(step)
            numbers = (batch.setting.num_micro_batches[branch],)
            packing, cost = texts.pack(batch, own.replicas, numbers), batch.setting.text_cost
            assert cost is not None
            table = explain(packing, texts.lengths(batch), cost, texts.num_stages)
            lines.append(f"{branch}, step {step + 1}: {table}")
    return "\n".join(lines)


# -- load control


def refuse_missing_branches(block: BalanceBlock, plan: RunPlan) -> None:
    """Raise ValueError for keys of a branch that this run does not have."""
    there = f"this run has the branches {', '.join(plan.batches)}; remove the key"
    for key, branch in BRANCH_OF.items():
        if getattr(block, key) is not None and branch not in plan.batches:
            raise ValueError(
                f"branches.balance.{key}: it moves how much the {branch} branch takes in, and "
                f"{there}"
            )
    if text_of(plan.batches) is None and block.strategy == "feed":
        raise ValueError(f"branches.balance.strategy: 'feed' packs texts, and {there}")


def load_control(
    block: BalanceBlock,
    plan: RunPlan,
    data: PreparedData,
    options: BatchingOptions,
    patch_size: int | None,
    typical_length: float,
) -> LoadControl:
    """How the load is controlled: within what the bounds in the block leave for these towers and
    data. Errors: ValueError for bounds that they do not have."""
    if block.strategy != "feed":
        return LoadControl()
    ladders: dict[str, tuple] = {}
    if block.captions_per_image is not None:
        least, most = block.captions_per_image
        known = data.examples() if data.shards else data.train[:]
        have = int(texts_alone(data.source).numbers("num_captions", known).max())
        if least > have:
            raise ValueError(
                f"branches.balance.captions_per_image: [{least}, {most}], but no image of this "
                f"data has more than {have} captions"
            )
        most = min(most, have)
        if not plan.schedule_type.recomputes:
            # All activations wait for the loss: no more padded tokens than the plan had at their
            # longest.
            most = min(most, max(1, int(MARGIN * options.max_text_tokens / typical_length)))
        ladders["captions_per_image"] = tuple(range(least, max(least, most) + 1))
    if block.kept_patches is not None:
        if patch_size is None:
            raise ValueError(
                f"branches.balance.kept_patches: {options.image_tower} has no patches to leave "
                "out; use a ViT, or remove the key"
            )
        ladders["kept_patches"] = patch_ladder(*map(float, block.kept_patches))
    if block.image_size is not None:
        least, most = block.image_size
        if most > options.image_size:
            raise ValueError(
                f"branches.balance.image_size: [{least}, {most}] goes beyond --image-size "
                f"{options.image_size}"
            )
        ladders["image_size"] = size_ladder(least, most, side_multiple(patch_size))
    return LoadControl(**ladders, dead_band=block.dead_band, max_change=block.max_change)
