r"""Which way to run is fastest on N GPUs of a kind: a table and the reasons, and on request the
timeline of the best as a plot.

Needs no GPU and starts no process.

    python -m launch.tools.plan --gpus 8 --image-tower vit_l_16 \
        --text-tower bert-large-uncased --device H100
    python -m launch.tools.plan --gpus 1024 --layout fork --top 20 --picture plan.html
    python -m launch.tools.plan --gpus 8 --deepspeed_config ds_configs/zero1_bf16.json
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

if __name__ == "__main__":
    # DeepSpeed need not look for a GPU, nor warn that there is none
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # of a program of seconds it is a quarter of the time: each collection walks through all that
    # was imported
    gc.disable()

from common.command_line import CommandParser
from common.options import OptionGroup, add_flags, at_least, number_where, option
from common.output import outlive_output, run_program
from common.sizes import GIB
from data.modules import import_modules
from data.options import branches_of, derived_of
from data.stored.derived import Derived
from engine.config.reading import AUTO, BranchesBlock, changed, read_config
from engine.module import num_muon
from engine.objective import scalars_of
from engine.optimizer.parameter_groups import OptimizerGroups, optimizer_groups
from engine.planning.costs import CostModel, FurtherRows, with_learned, with_matrices
from engine.planning.devices import DEVICES, find_device
from engine.planning.planner import Candidate, Search, search_plans
from engine.schedule import SCHEDULES
from launch.config.blocks import READERS, adapting
from launch.config.groups import device
from launch.config.options import FLAGS, ROOT, default_of
from launch.modalities import MODALITIES, Vocabulary, refuse_pairs, tower_of
from launch.objective import pairs_of
from launch.setup.estimates import estimated_costs
from launch.terminal.tables import Table, duration, show
from launch.tools.command import page_path
from models.losses import build_loss
from models.towers.adapters.layers import adapted_tower, num_learned
from models.towers.adapters.lora import LoRA
from models.towers.fusion import FusionSizes

WORDS = ("", "layout", "stages", "replicas", "micro-batches", "schedule")
NUMBERS = ("step", "samples/s", "idle", "peak\nGiB", "sent\nGiB")
SAMPLES_PER_GPU, MOST_SAMPLES = 1024, 32768  # of the default global batch
not_negative = number_where(lambda value: value >= 0, "below 0")


N: dict[str, Any] = {"metavar": "N", "parse": at_least(1)}


def _as_in_train(name: str, shown: str | None = None) -> Any:
    """The option of train.py of that name; `shown`: its default in words."""
    flag = FLAGS[name]
    how: dict[str, Any] = {"choices": flag.choices, "action": flag.action, "shown": shown}
    return option(default_of(name), flag.help, flag.metavar, flag.parse, **how)


@dataclass(frozen=True, kw_only=True)
class HardwareOptions(OptionGroup):
    title = "hardware"
    gpus: int = option(0, "in all; one rank on each", shown="none, it must be given", **N)
    gpus_per_node: int | None = option(None, "ranks of a node", shown="the device's, 8", **N)
    device: str = option(
        "H100",
        f"{', '.join(DEVICES)}, or flops=FLOP/S,memory=BYTES,bandwidth=BYTES/S"
        "[,link=,network=,ranks_per_node=]",
        "NAME",
        device,
    )
    memory: float | None = option(
        None, "that one rank may use", "GIB", not_negative, shown="all of the device's"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionGroup):
    title = "how to run"
    deepspeed_config: Path | None = option(
        None,
        "the JSON file of the run; flags replace its values",
        "FILE",
        Path,
        name="deepspeed_config",
        shown="all is searched",
    )
    import_module: tuple[str, ...] | None = _as_in_train("import_module", shown="none")
    precision: str | None = option(
        None,
        "without --deepspeed_config, with ZeRO-1",
        choices=("bf16", "fp16", "fp32"),
        shown="bf16",
    )
    train_batch_size: int | None = option(
        None,
        "samples per step on all GPUs",
        "N",
        at_least(2),
        shown=f"the file's, else {SAMPLES_PER_GPU} per GPU, at most {MOST_SAMPLES}",
    )
    micro_batch_size: int | None = option(None, "samples, of all branches", shown="searched", **N)
    layout: str | None = option(
        None, "only this one, fork or merged", shown="the file's, else searched"
    )
    schedule: str | None = option(
        None,
        f"only this one. {'; '.join(f'{name}: {s.description}' for name, s in SCHEDULES.items())}; "
        "or one of --import-module",
        "NAME",
        shown="the file's, else "
        f"{' and '.join(name for name, s in SCHEDULES.items() if s.chosen_by_auto)}",
    )
    activation_checkpoint_interval: int | None = option(
        None, "layers; 0: none", "N", at_least(0), shown="the file's, else 0"
    )


@dataclass(frozen=True, kw_only=True)
class TowerOptions(OptionGroup):
    title = "towers"
    pairs: str = _as_in_train("pairs")
    image_tower: str = _as_in_train("image_tower")
    text_tower: str = _as_in_train("text_tower")
    audio_tower: str = _as_in_train("audio_tower")
    audio_seconds: float | None = _as_in_train("audio_seconds", shown="the tower's own")
    video_tower: str = _as_in_train("video_tower")
    video_frames: int = _as_in_train("video_frames")
    tower: tuple[str, ...] = _as_in_train("tower", shown="the modality's own")
    embed_dim: int = _as_in_train("embed_dim")
    image_size: int = _as_in_train("image_size")
    max_text_tokens: int = _as_in_train("max_text_tokens")
    audio_size: int = _as_in_train("audio_size")
    max_regions: int = _as_in_train("max_regions")
    max_moments: int = _as_in_train("max_moments")
    fusion: int = _as_in_train("fusion")
    vocab_size: int | None = option(
        None, "entries of the tokenizer", shown="the text tower's own", **N
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OptionGroup):
    title = "output"
    top: int = option(10, "rows of the table", **N)
    picture: Path | None = option(
        None,
        "draw the timeline of the best way into a page, .html",
        "FILE",
        page_path,
        shown="not drawn",
    )


GROUPS = (HardwareOptions, RunOptions, TowerOptions, OutputOptions)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(OutputOptions, TowerOptions, RunOptions, HardwareOptions):
    """Everything the command line decides."""


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m launch.tools.plan",
        description="Rank the ways to run a model on N GPUs by simulated step time, and say why. "
        "Needs no GPU.",
        epilog="Costs are estimated from counted operations and the device's data sheet; a run of "
        "train.py measures them.",
    )
    add_flags(parser, GROUPS)
    return parser


def parse_options(arguments: list[str] | None = None) -> PlanOptions:
    parser = make_parser()
    options = PlanOptions(**vars(parser.parse_args(arguments)))
    if not options.gpus:
        parser.error("the following arguments are required: --gpus")
    import_modules(options.import_module)
    if options.schedule not in (None, *SCHEDULES):
        parser.error(
            f"argument --schedule: invalid choice: {options.schedule!r} (choose from "
            f"{', '.join(SCHEDULES)})"
        )
    try:
        refuse_pairs(options.pairs, options.tower, bool(options.fusion))
    except ValueError as error:
        parser.error(str(error))
    if options.precision and options.deepspeed_config:
        parser.error(
            f"argument --precision: {options.deepspeed_config} says it; give one of the two"
        )
    return options


def configuration(options: PlanOptions) -> tuple[dict[str, Any], BranchesBlock]:
    """What train.py would be given: the file, or ZeRO-1 in the precision asked for with everything
    left to search; flags replace values."""
    branches = branches_of(options.pairs)
    if options.deepspeed_config:
        config, block = read_config(options.deepspeed_config, branches, READERS)
    else:
        file = ROOT / "ds_configs" / f"zero1_{options.precision or 'bf16'}.json"
        config, _ = read_config(file, branches, READERS)
        config["train_batch_size"] = min(SAMPLES_PER_GPU * options.gpus, MOST_SAMPLES)
        block = BranchesBlock()
    if options.train_batch_size:
        config["train_batch_size"] = options.train_batch_size
    if options.activation_checkpoint_interval is not None:
        config["pipeline"] = {
            "activation_checkpoint_interval": options.activation_checkpoint_interval
        }
    if options.micro_batch_size:
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            config.pop(key, None)
        block = changed(block, micro_batch_size=options.micro_batch_size)
    if options.layout and options.layout != block.layout:
        # the file's stages and replicas are of its own layout
        block = changed(block, layout=options.layout, stages=AUTO, replicas=AUTO)
    return config, changed(block, schedule=options.schedule or block.schedule)


def cost_model(
    options: PlanOptions,
    config: Mapping[str, Any],
    adapters: Mapping[str, LoRA] = MappingProxyType({}),
    groups: OptimizerGroups | None = None,
) -> CostModel:
    """Estimated: counted operations of both towers against the device's data sheet. `adapters`: by
    branch, of the towers that learn in them alone; `groups`: None: no block says which parameters
    learn how."""
    pairs = pairs_of(options.pairs, build_loss("infonce"))
    named = dict(vars(options))
    for branch in branches_of(options.pairs):
        entry = MODALITIES[branch]
        if entry.flags:
            named[entry.flags.tower] = entry.named(named[entry.flags.tower], None)
    fusion = FusionSizes(options.fusion) if options.fusion else None
    towers = []
    for branch in branches_of(options.pairs):
        scalars = scalars_of(pairs, branch)
        tower = tower_of(branch, named, Vocabulary(options.vocab_size), scalars, fusion)
        towers.append(adapted_tower(tower, adapters[branch]) if branch in adapters else tower)
    costs = estimated_costs(
        towers,
        config,
        options.embed_dim,
        find_device(options.device),
        None if options.memory is None else options.memory * GIB,
        compared=[pair.branches for pair in pairs if not pair.made],
        # how many samples have is for the data to say
        further=[
            _further(kind, getattr(options, kind.most))
            for kind in [derived_of(options.pairs)]
            if kind
        ],
    )
    costs = with_learned(costs, {tower.branch: num_learned(tower.specs) for tower in towers})
    layers = {tower.branch: tower.specs for tower in towers}
    groups = groups or optimizer_groups(None, tuple(layers))
    costs = with_matrices(costs, num_muon(groups, layers, config.get("optimizer", {})))
    ranks_per_node = options.gpus_per_node or costs.machine.ranks_per_node
    return replace(costs, machine=replace(costs.machine, ranks_per_node=ranks_per_node))


def _further(kind: Derived, most: int) -> FurtherRows:
    return FurtherRows(*kind.of, (most, most))


# -- what a person sees


def plan_table(search: Search, batch_size: int, top: int) -> Table:
    """The fastest candidates, `search.best` marked; where that is not among them it comes last."""
    best = search.best.graph
    rows = [
        [f"{place} →" if candidate is search.best else str(place), *cells(candidate, batch_size)]
        for place, candidate in enumerate(search.ranked, start=1)
        if place <= top or candidate is search.best
    ]
    return Table(
        f"{best.world_size} GPUs, {batch_size} samples a step: predicted, fastest first. "
        "→ is the choice",
        [*WORDS, *NUMBERS],
        rows,
        "stages, replicas, micro-batches (samples × number): "
        f"{' + '.join(best.branches)}, or the same for all; keeps: micro-batches that need no "
        "second forward; idle: part of all rank-time; GiB: of the rank with most",
    )


def cells(candidate: Candidate, batch_size: int) -> list[str]:
    """The row of a candidate: what it is, and what the simulator says of it."""
    graph, simulation = candidate.graph, candidate.simulation
    lines = [[s for s in graph.stages if branch in s.layers] for branch in graph.branches]
    if graph.layout == "merged":  # its stages are of all branches
        lines = lines[:1]
    replicas = [str(line[0].replicas) for line in lines]
    kept = [str(batch.num_kept) for batch in candidate.batches.values()]
    return [
        graph.layout,
        " + ".join(str(len(line)) for line in lines),
        " + ".join(replicas) if graph.layout == "fork" else _once(replicas),
        _once([batch.describe() for batch in candidate.batches.values()]),
        candidate.schedule + (f", keeps {_once(kept)}" if any(map(int, kept)) else ""),
        duration(simulation.step_s),
        f"{batch_size / simulation.step_s:,.0f}",
        f"{simulation.bubble_fraction:.0%}",
        f"{candidate.peak_bytes / GIB:.1f}",
        f"{max(stage.sent_bytes for stage in simulation.stages) / GIB:.2f}",
    ]


def _once(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else " + ".join(values)


def main(options: PlanOptions) -> None:
    config, block = configuration(options)
    groups = block.learning(branches_of(options.pairs))
    costs = cost_model(options, config, adapting(block), groups)
    search = search_plans(config, block, options.gpus, costs)
    show(plan_table(search, config["train_batch_size"], options.top).for_terminal())
    print(search.why())
    if options.picture is None:
        print("--picture FILE draws the choice as a timeline")
        return
    # imports plotly
    from launch.reporting.timelines import predicted_step, save_timelines

    best = search.best
    timeline = predicted_step(best.graph, best.batches, best.schedule, search.costs)
    save_timelines(options.picture, [timeline])
    print(options.picture)


def run(arguments: list[str] | None = None) -> int:
    """The exit status; what cannot be planned, and why, is one line on stderr."""
    return run_program("python -m launch.tools.plan", lambda: main(parse_options(arguments)))


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
