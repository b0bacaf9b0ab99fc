"""What the layers of a run cost: what the planner decides by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.cpus import usable_cpus
from data.batching.load_control import FeedRates
from data.batching.requests import MicroBatchRequest
from data.modalities.tokenizer import token_lengths
from data.options import LoadingOptions, derived_of
from data.prepared import PreparedData
from data.progress import progress_bar
from data.stored.kinds import is_text, text_of
from data.streams.several import texts_alone
from engine.config.implied import precision_of, steps_matrices
from engine.config.reading import AUTO, MEASURE, BranchesBlock
from engine.json_messages import from_first_rank
from engine.module import num_muon
from engine.objective import Pair
from engine.planning.costs import (
    CostModel,
    Curve,
    FurtherRows,
    LayerCost,
    Loading,
    StateBytes,
    configured,
    cost_model_from_json,
    cost_model_to_json,
    with_learned,
    with_matrices,
)
from engine.planning.devices import find_device
from engine.planning.measured import device_identity, digest
from engine.planning.planner import RunPlan, plan_run
from engine.planning.profile import Profile, profile_together
from engine.planning.profile_layers import Ranks
from engine.processes.start import Processes
from engine.profile_stage import fit_together
from launch.batching.planned import TRIED_PHRASES, phrase_tokens, shown_annotations_of
from launch.config.blocks import balancing
from launch.config.groups import InputOptions
from launch.feeding import sample_cache
from launch.inputs import as_values, micro_batch_dataset
from launch.modalities import Inputs
from launch.run.folder import BRANCHES_SPLIT, RunFolder
from launch.setup.estimates import estimated_costs
from launch.setup.model import RunModel
from models.towers.building import token_bytes
from models.towers.fusion import pair_inputs, pair_scores
from models.towers.layers import Tower, library_models_kept

# Where the layout is given nothing is measured: stages are cut, and texts packed, by the ratios of
# estimates for such a device. That of a CPU is one core, as torch reaches it.
NOMINAL = {"cuda": "A100", "cpu": "flops=50e9,memory=8e9,bandwidth=10e9"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BUDGET_S = 15.0  # for repeats; each layer is run at least twice
SAMPLES_LOADED, LOADED, LOADING_BUDGET_S = 16, 9, 1.0  # a micro-batch; so many; for all of them
# keys of the JSON file by which a plan that fits is remembered, beside those of `branches`
OF_MEMORY = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps zero_optimization pipeline
""".split()
EXAMPLE_TEXTS = 1024  # training samples among which texts of the mean length are looked for
# samples per micro-batch; straight lines between
MEASURED_SIZES = {"cpu": (4, 16, 64), "cuda": (8, 32, 128)}


def run_costs(
    model: RunModel,
    config: Mapping[str, Any],
    block: BranchesBlock,
    data: PreparedData,
    inputs: InputOptions,
    loading: LoadingOptions,
    processes: Processes,
    folder: RunFolder,
) -> CostModel:
    """The costs of the layers: measured on all ranks together where the layout or `compile` is
    "auto", else estimated. A run that goes on keeps what was measured when it began, as long as it
    computes in the same precision on the same kind of device.

    All ranks call it together and get those of the first: cores and workers of the others may be
    other ones, and ranks that plan by other costs make other groups.
    """
    costs = _kept(model, config, processes, folder)
    if costs is None:
        # where texts are packed by cost, those of about equal lengths come together
        by_cost = balancing(block).strategy != "off" and not block.loss_per_micro_batch
        lengths = _text_lengths(data, inputs) if by_cost and text_of(inputs.branches) else None
        compiling = {tower.branch: block.compiling(tower.branch) for tower in model.towers}
        if AUTO in (block.layout, *compiling.values()):
            sizes = _sizes(config, block, processes.device.type, inputs.branches)
            profile = _measured(model, config, compiling, sizes, data, inputs, lengths, processes)
            costs = CostModel(
                _with_longest(profile.layers, lengths, inputs.max_text_tokens),
                profile.machine,
                embed_dim=model.embed_dim,
                pairs=profile.pairs,
                token_bytes=token_bytes(model.towers, DTYPES[precision_of(config)].itemsize),
                compared=compared(model),
                compiled_share=profile.compiled_share,
                loading=_loading(data, inputs, loading, processes),
                **configured(config),
            )
            if lengths is not None:  # where they are packed by cost, phrases come by themselves
                costs = _with_phrases(costs, data, inputs, lengths)
            folder.write_costs(cost_model_to_json(costs))
        else:
            costs = estimated_costs(
                model.towers,
                config,
                model.embed_dim,
                device=find_device(NOMINAL.get(processes.device.type, "A100")),
                memory_bytes=float("inf"),
                num_tokens=None if lengths is None else round(lengths.mean()),
                compared=compared(model),
            )
            costs = _with_phrases(costs, data, inputs, lengths)
    costs = replace(costs, further=further_rows(model, data, inputs))
    costs = cost_model_from_json(from_first_rank(cost_model_to_json(costs)))
    matrices = num_muon(block.learning(inputs.branches), model.layers, config["optimizer"])
    return with_matrices(with_learned(costs, model.num_learned), matrices)


def run_plan(
    model: RunModel,
    config: Mapping[str, Any],
    block: BranchesBlock,
    costs: CostModel,
    data: PreparedData,
    inputs: InputOptions,
    processes: Processes,
) -> RunPlan:
    """Which rank runs which layers; with `"fit": "measure"` tried on the devices, with the longest
    texts. All ranks call it together."""
    if block.fit != MEASURE:
        return plan_run(config, block, processes.world_size, costs)

    def plan_within(limit_bytes: float) -> RunPlan:
        limited = replace(costs, machine=replace(costs.machine, memory_bytes=limit_bytes))
        return plan_run(config, block, processes.world_size, limited)

    lengths = _text_lengths(data, inputs) if text_of(inputs.branches) else None
    longest = None if lengths is None else lengths.max()
    memory = {
        branch: [(layer.name, layer.num_parameters, asdict(layer.activation_bytes)) for layer in of]
        for branch, of in costs.layers.items()
    }
    matrices = {branch: [layer.num_muon for layer in of] for branch, of in costs.layers.items()}
    key = {
        "ranks": processes.world_size,
        "costs": digest(memory),
        "longest": str(longest),
        "optimizer": config["optimizer"]["type"],
        **({"matrices": digest(matrices)} if steps_matrices(config["optimizer"]) else {}),
        **{name: config.get(name) for name in OF_MEMORY},
        **{name: getattr(block, name) for name in (*BRANCHES_SPLIT, "locked", "train", "compile")},
    }
    with library_models_kept():
        return fit_together(
            plan_within,
            key,
            config["optimizer"],
            layers=model.layers,
            build_layer=model.build_layer,
            inputs={
                tower.branch: partial(
                    _example, data, inputs, tower.branch, lengths, num_tokens=longest
                )
                for tower in model.towers
            },
            dtype=DTYPES[precision_of(config)],
            device=processes.device,
            ranks=Ranks(processes.device, processes.places),
        )


def compared(model: RunModel) -> tuple[tuple[str, str], ...]:
    """Of branches whose samples are compared, two and two. Terms over one branch, or over more than
    two, are not priced: what they add to the loss is little beside what the towers take."""
    pairs = [term for term in model.objective.terms if isinstance(term, Pair)]
    return tuple(pair.branches for pair in pairs if not pair.made)


def further_rows(
    model: RunModel, data: PreparedData, inputs: InputOptions
) -> tuple[FurtherRows, ...]:
    """Of the pairs that compare others than those of samples, in the first training samples."""
    if derived_of(inputs.pairs) is None:
        return ()
    annotations = shown_annotations_of(data.source, inputs)
    assert annotations is not None
    places = annotations.places(data.examples(TRIED_PHRASES))
    number, more = float(places.number.mean()), float(places.negatives.mean())
    made = [term for term in model.objective.terms if isinstance(term, Pair) and term.made]
    return tuple(FurtherRows(*pair.branches, (number, number + more)) for pair in made)


def _kept(
    model: RunModel, config: Mapping[str, Any], processes: Processes, folder: RunFolder
) -> CostModel | None:
    """What was measured when the run began; None: nothing that holds here."""
    known = folder.read_costs() if processes.rank == 0 else None
    usable = known is not None and are_of(
        cost_model_from_json(known), model.towers, config, processes.device
    )
    known = from_first_rank(known if usable else None)
    if known is None:
        return None
    here = {"compared": compared(model), **configured(config)}
    return replace(cost_model_from_json(known), **here)


def are_of(
    costs: CostModel, towers: Sequence[Tower], config: Mapping[str, Any], device: torch.device
) -> bool:
    """Are these the costs of these towers here? Those of others are left when a first start failed
    before it wrote config.json."""
    here = {t.branch: [(spec.name, spec.num_parameters) for spec in t.specs] for t in towers}
    found = {
        branch: [(layer.name, layer.num_parameters) for layer in layers]
        for branch, layers in costs.layers.items()
    }
    return (
        found == here
        and costs.machine.name == device_identity(device)["device"]
        and costs.state.weight == StateBytes.of(config).weight
    )


# -- what the layers take


def _measured(
    model: RunModel,
    config: Mapping[str, Any],
    compiling: Mapping[str, str],
    sizes: Mapping[str, Sequence[int]],
    data: PreparedData,
    inputs: InputOptions,
    lengths: np.ndarray | None,
    processes: Processes,
) -> Profile:
    # with "auto" each layer of the branch is measured as it is and compiled
    layers = sum(len(t.specs) * (2 if compiling[t.branch] == AUTO else 1) for t in model.towers)
    measuring = progress_bar(
        None,
        "measuring what each layer costs",
        "layer",
        layers + bool(model.fusion),
        shown=processes.rank == 0,
    )
    pairs = None
    if model.fusion:
        pairs = pair_scores(model.fusion), partial(_example_pairs, model.towers), sizes["text"]
    with measuring, library_models_kept():
        return profile_together(
            {tower.branch: tower.specs for tower in model.towers},
            model.build_layer,
            {
                tower.branch: partial(
                    _example,
                    data,
                    inputs,
                    tower.branch,
                    lengths,
                    phrases=lengths is None,
                )
                for tower in model.towers
            },
            dtype=DTYPES[precision_of(config)],
            device=processes.device,
            sizes=sizes,
            batch_size=config["train_batch_size"],
            embed_dim=model.embed_dim,
            places=processes.places,
            budget_s=BUDGET_S,
            pairs=pairs,
            compiling=compiling,
            done=measuring.update,
        )


def _with_longest(
    layers: Mapping[str, Sequence[LayerCost]], lengths: np.ndarray | None, max_text_tokens: int
) -> dict[str, Sequence[LayerCost]]:
    """The layers, those of texts with the memory of the longest ones: their seconds are those of
    texts of the mean length, but the memory must hold a micro-batch of the longest."""
    if lengths is None:
        return dict(layers)
    longer = max_text_tokens / lengths.mean()

    def lengthened(layer: LayerCost) -> LayerCost:
        curve = layer.activation_bytes
        values = tuple(longer * value for value in curve.values)
        return replace(layer, activation_bytes=Curve(curve.sizes, values))

    return {**layers, "text": [lengthened(layer) for layer in layers["text"]]}


def _with_phrases(
    costs: CostModel, data: PreparedData, inputs: InputOptions, lengths: np.ndarray | None
) -> CostModel:
    """Costs of texts alone, where phrases come with each: as if it were so much longer."""
    if derived_of(inputs.pairs) is None:
        return costs
    annotations = shown_annotations_of(data.source, inputs)
    of_sample = phrase_tokens(data, annotations, inputs.max_text_tokens)[1]
    longest = inputs.max_text_tokens if lengths is None else float(lengths.mean())
    factor = 1 + of_sample / longest
    texts = {
        b: [each.longer(factor) for each in of] for b, of in costs.layers.items() if is_text(b)
    }
    return replace(costs, layers={**costs.layers, **texts})


def _sizes(
    config: Mapping[str, Any], block: BranchesBlock, device_type: str, branches: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """The micro-batch sizes to measure per branch: the one that is given, or a few that the global
    batch has room for."""
    batch_size, given = config["train_batch_size"], block.micro_batch_size
    few = tuple(n for n in MEASURED_SIZES[device_type] if n <= batch_size) or (batch_size,)
    sizes = {}
    for branch in branches:
        size = given.get(branch, AUTO) if isinstance(given, dict) else given
        size = config.get("train_micro_batch_size_per_gpu", AUTO) if size == AUTO else size
        sizes[branch] = few if size == AUTO else (size,)
    return sizes


def _example(
    data: PreparedData,
    inputs: InputOptions,
    branch: str,
    lengths: np.ndarray | None,
    size: int,
    num_tokens: float | None = None,
    phrases: bool = True,
) -> dict[str, Tensor]:
    """A micro-batch as the run will see them, from the first training samples: texts have their
    true lengths. `lengths`, of the first samples' texts: texts of about equal lengths come
    together, here those of about `num_tokens`, or of the mean length. `phrases`: whether texts have
    those of their samples beside them, where a pair has
    annotations."""
    known = Inputs(inputs, data.tokenizer, data.length_multiple)
    alone = is_text(branch) and not phrases
    source = texts_alone(data.source) if alone else data.source
    dataset = micro_batch_dataset(source, known, {branch})
    number = np.arange(size)
    if is_text(branch) and lengths is not None:
        wanted = lengths.mean() if num_tokens is None else num_tokens
        number = np.resize(np.argsort(np.abs(lengths - wanted), kind="stable"), size)
    examples = data.examples(size)
    index = examples[number % len(examples)]
    annotations = shown_annotations_of(data.source, inputs)
    places = None if annotations is None or alone else annotations.places(index)
    rates = FeedRates(views_per_image=inputs.views_per_image)
    request = MicroBatchRequest(0, 0, index, np.arange(size), True, feed_rates=rates, places=places)
    example = dataset[request]
    return as_values(example, inputs.preprocessing)


def _text_lengths(data: PreparedData, inputs: InputOptions) -> np.ndarray:
    """Tokens of the first training samples' texts, at most those that the tower takes."""
    source = texts_alone(data.source)
    first = [(source.captions(int(i)) or [""])[0] for i in data.examples(EXAMPLE_TEXTS)]
    return np.array(token_lengths(data.text_tokenizer, first, inputs.max_text_tokens))


def _example_pairs(towers: Sequence[Tower], size: int) -> dict[str, Tensor]:
    """The inputs of matching for `size` texts, as long as they can be."""
    image, text = towers
    return {
        name: torch.ones(t.shape, dtype=t.dtype) if name == "text_mask" else torch.randn(t.shape)
        for name, t in pair_inputs(image, text, size).items()
    }


# -- what loading takes


def _loading(
    data: PreparedData, inputs: InputOptions, loading: LoadingOptions, processes: Processes
) -> Loading:
    """What the first rank measures, while the others wait, on every rank."""
    sample_s = None
    if processes.rank == 0:
        sample_s = {b: _sample_s(data, inputs, loading, b) for b in inputs.branches}
    # a launcher may give each rank cores of its own
    cores = usable_cpus() * processes.ranks_on_node // processes.ranks_on_cores
    shared = processes.device.type == "cpu"
    return Loading(from_first_rank(sample_s), loading.num_workers, cores, shared)


def _sample_s(
    data: PreparedData, inputs: InputOptions, loading: LoadingOptions, branch: str
) -> float:
    """Seconds to load a training sample as in all epochs but the first: from the cache, if there is
    one."""
    known = Inputs(inputs, data.tokenizer, data.length_multiple, sample_cache(loading))
    dataset = micro_batch_dataset(data.source, known, {branch})
    examples = data.examples() if data.shards else data.train[:]
    index = np.random.default_rng(inputs.seed).choice(examples, SAMPLES_LOADED)
    place, annotations = np.arange(SAMPLES_LOADED), shown_annotations_of(data.source, inputs)
    places = None if annotations is None else annotations.places(index)
    rates = FeedRates(views_per_image=inputs.views_per_image)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < LOADED and sum(seconds) < LOADING_BUDGET_S):
        start = time.perf_counter()
        dataset[
            MicroBatchRequest(len(seconds), 0, index, place, True, feed_rates=rates, places=places)
        ]
        seconds.append(time.perf_counter() - start)
    return statistics.fmean(seconds[1:]) / SAMPLES_LOADED
