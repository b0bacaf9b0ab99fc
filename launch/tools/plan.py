r"""Which way to run is fastest on N GPUs of a kind: a table and the reasons, and on request the
timeline of the best as a plot.

Needs no GPU and starts no process.

    python -m launch.tools.plan --gpus 8 --image-tower vit_l_16 \
        --text-tower bert-large-uncased --device H100
    python -m launch.tools.plan --gpus 1024 --layout fork --top 20 --picture plan.png
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
from typing import Any, NoReturn

if __name__ == "__main__":
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # DeepSpeed need not look for a GPU, nor warn that there is none
    # of a program of seconds it is a quarter of the time: each collection walks through all that
    # was imported
    gc.disable()

from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.output import outlive_output, run_program
from data.modules import add_module_flag, import_modules
from data.options import IMAGE_TEXT, branches_of, pairs
from engine.config.reading import AUTO, BranchesBlock, read_config
from engine.objective import scalars_of
from engine.optimizer.locking import lock_costs, trainable_layers
from engine.planning.costs import CostModel, with_learned
from engine.planning.devices import DEVICES, Device, find_device
from engine.planning.planner import GIB, Candidate, Search, describe_batch, search_plans
from engine.schedule import SCHEDULES
from engine.topology import LAYOUTS
from launch.config.blocks import READERS, adapting
from launch.config.groups import named_tower
from launch.config.options import ROOT, default_of
from launch.estimates import estimated_costs
from launch.modalities import Vocabulary, refuse_pairs, tower_of
from launch.objective import pairs_of
from launch.run.report import show
from launch.tools.drawing import FORMATS, save_plan_png, seconds
from models.losses import build_loss
from models.towers.adapters.layers import adapted_tower, num_learned
from models.towers.adapters.lora import LoRA
from models.towers.defaults import image_name, text_name
from models.towers.fusion import FusionSizes

SAMPLES_PER_GPU, MOST_SAMPLES = 1024, 32768  # of the default global batch


@dataclass(frozen=True)
class PlanOptions:
    """Everything the command line decides. Field names are the flags' names."""

    gpus: int
    gpus_per_node: int | None
    device: Device
    memory: float | None
    deepspeed_config: Path | None
    import_module: list[str] | None
    precision: str | None
    train_batch_size: int | None
    micro_batch_size: int | None
    layout: str | None
    schedule: str | None
    activation_checkpoint_interval: int | None
    pairs: str
    image_tower: str
    text_tower: str
    audio_tower: str
    audio_seconds: float | None
    audio_size: int
    tower: list[str] | None
    embed_dim: int
    image_size: int
    max_text_tokens: int
    vocab_size: int | None
    fusion: int
    top: int
    picture: Path | None


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help says the rest."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def at_least(minimum: int, kind: type = int):
    """For argparse: a number not below `minimum`."""

    def number(text: str) -> Any:
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    number.__name__ = "whole number" if kind is int else "number"
    return number


def device(text: str) -> Device:
    """For argparse: a device by name or by numbers."""
    try:
        return find_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def figure_path(text: str) -> Path | None:
    """For argparse: a plot that can be written there, or `none`."""
    path = Path(text)
    if text == "none":
        return None
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no figure; its name ends in {', '.join(FORMATS)}"
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m launch.tools.plan",
        description="Rank the ways to run a model on N GPUs by simulated step time, and say why. Needs no GPU.",
        epilog="Costs are estimated from counted operations and the device's data sheet; a run of train.py measures them.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
    )
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument(
        "--gpus", type=at_least(1), required=True, metavar="N", help="in all; one rank on each"
    )
    hardware.add_argument(
        "--gpus-per-node", type=at_least(1), metavar="N", help="(default: the device's, 8)"
    )
    hardware.add_argument(
        "--device",
        type=device,
        default="H100",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}, or flops=FLOP/S,memory=BYTES,bandwidth=BYTES/S[,link=,network=,ranks_per_node=] (default: H100)",
    )
    hardware.add_argument(
        "--memory",
        type=at_least(0, float),
        metavar="GIB",
        help="that one rank may use (default: all of the device's)",
    )
    run = parser.add_argument_group("how to run")
    run.add_argument(
        "--deepspeed_config",
        type=Path,
        metavar="FILE",
        help="the JSON file of the run (default: all is searched); flags replace its values",
    )
    add_module_flag(run)
    run.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="without --deepspeed_config, with ZeRO-1 (default: bf16)",
    )
    run.add_argument(
        "--train-batch-size",
        type=at_least(2),
        metavar="N",
        help=f"samples per step on all GPUs (default: the file's, else {SAMPLES_PER_GPU} per GPU, at most {MOST_SAMPLES})",
    )
    run.add_argument(
        "--micro-batch-size",
        type=at_least(1),
        metavar="N",
        help="samples, of all branches (default: searched)",
    )
    run.add_argument(
        "--layout", choices=LAYOUTS, help="only this one (default: the file's, else searched)"
    )
    known = "; ".join(f"{name}: {own.description}" for name, own in SCHEDULES.items())
    searched = " and ".join(name for name, own in SCHEDULES.items() if own.chosen_by_auto)
    run.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"only this one. {known}; or one of --import-module (default: the file's, else {searched})",
    )
    run.add_argument(
        "--activation-checkpoint-interval",
        type=at_least(0),
        metavar="N",
        help="layers; 0: none (default: the file's, else 0)",
    )
    towers = parser.add_argument_group("towers")
    towers.add_argument(
        "--pairs",
        type=pairs,
        default=IMAGE_TEXT,
        metavar="A:B,...",
        help="as in train.py (default: image:text)",
    )
    towers.add_argument(
        "--image-tower",
        default=default_of("image_tower"),
        metavar="NAME",
        help=f"(default: {default_of('image_tower')})",
    )
    towers.add_argument(
        "--text-tower",
        default=default_of("text_tower"),
        metavar="NAME",
        help=f"(default: {default_of('text_tower')})",
    )
    towers.add_argument(
        "--audio-tower",
        default=default_of("audio_tower"),
        metavar="NAME",
        help=f"(default: {default_of('audio_tower')})",
    )
    towers.add_argument(
        "--audio-seconds",
        type=float,
        metavar="S",
        help="as in train.py (default: the tower's own)",
    )
    towers.add_argument(
        "--tower",
        action="append",
        type=named_tower,
        metavar="MODALITY=NAME",
        help="as in train.py (default: the modality's own)",
    )
    for flag, minimum, what in (
        ("embed_dim", 1, "width of the common space"),
        ("image_size", 1, "pixels a side"),
        ("max_text_tokens", 4, "tokens of a text"),
        ("audio_size", 8, "of the spectrogram for an image tower"),
    ):
        name, own = f"--{flag.replace('_', '-')}", default_of(flag)
        towers.add_argument(
            name, type=at_least(minimum), default=own, metavar="N", help=f"{what} (default: {own})"
        )
    towers.add_argument(
        "--vocab-size",
        type=at_least(1),
        metavar="N",
        help="entries of the tokenizer (default: the text tower's own)",
    )
    towers.add_argument(
        "--fusion",
        type=at_least(0),
        default=0,
        metavar="N",
        help="layers that match images and texts, as in train.py (default: 0)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top", type=at_least(1), default=10, metavar="N", help="rows of the table (default: 10)"
    )
    output.add_argument(
        "--picture",
        "--output",
        type=figure_path,
        metavar="FILE",
        help=f"draw the timeline of the best: {', '.join(FORMATS)} (default: not drawn); --output is the older name",
    )
    return parser


def parse_options(arguments: list[str] | None = None) -> PlanOptions:
    parser = make_parser()
    options = PlanOptions(**vars(parser.parse_args(arguments)))
    import_modules(options.import_module)
    if options.schedule not in (None, *SCHEDULES):
        parser.error(
            f"argument --schedule: invalid choice: {options.schedule!r} (choose from "
            f"{', '.join(SCHEDULES)})"
        )
    try:
        refuse_pairs(options.pairs, options.tower or (), bool(options.fusion))
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
    if options.deepspeed_config:
        config, block = read_config(options.deepspeed_config, branches_of(options.pairs), READERS)
    else:
        config, _ = read_config(
            ROOT / "ds_configs" / f"zero1_{options.precision or 'bf16'}.json",
            branches_of(options.pairs),
            READERS,
        )
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
        block = replace(block, micro_batch_size=options.micro_batch_size)
    if options.layout and options.layout != block.layout:
        block = replace(
            block, layout=options.layout, stages=AUTO, replicas=AUTO
        )  # the file's are of its own layout
    return config, replace(block, schedule=options.schedule or block.schedule)


def cost_model(
    options: PlanOptions,
    config: Mapping[str, Any],
    adapters: Mapping[str, LoRA] = MappingProxyType({}),
) -> CostModel:
    """Estimated: counted operations of both towers against the device's data sheet. `adapters`: by
    branch, of the towers that learn in them alone."""
    pairs = pairs_of(options.pairs, build_loss("infonce"))
    names = {
        "image_tower": image_name(options.image_tower, None),
        "text_tower": text_name(options.text_tower, None),
    }
    fusion = FusionSizes(options.fusion) if options.fusion else None
    towers = [
        tower_of(
            branch,
            {**vars(options), **names},
            Vocabulary(options.vocab_size),
            scalars_of(pairs, branch),
            fusion,
        )
        for branch in branches_of(options.pairs)
    ]
    towers = [
        adapted_tower(tower, adapters[tower.branch]) if tower.branch in adapters else tower
        for tower in towers
    ]
    memory_bytes = None if options.memory is None else options.memory * GIB
    costs = estimated_costs(
        towers,
        config,
        options.embed_dim,
        options.device,
        memory_bytes,
        compared=[pair.branches for pair in pairs],
    )
    costs = with_learned(costs, {tower.branch: num_learned(tower.specs) for tower in towers})
    return replace(
        costs,
        machine=replace(
            costs.machine, ranks_per_node=options.gpus_per_node or costs.machine.ranks_per_node
        ),
    )


# -- what a person sees


def plan_table(search: Search, batch_size: int, top: int) -> Table:
    """The fastest candidates, `search.best` marked; where that is not among them it comes last."""
    table = Table(
        title=f"{search.best.graph.world_size} GPUs, {batch_size} samples a step: predicted, fastest first. → is the choice",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        caption="stages, replicas, micro-batches (samples × number): "
        f"{' + '.join(search.best.graph.branches)}, or the same for all; keeps: micro-batches that need no second forward; idle: part of all rank-time; GiB: of the rank with most",
        caption_justify="left",
    )
    for name in ("", "layout", "stages", "replicas", "micro-batches", "schedule"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "samples/s", "idle", "peak\nGiB", "sent\nGiB"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = list(enumerate(search.ranked, start=1))
    for place, candidate in rows:
        chosen = candidate is search.best
        if place <= top or chosen:
            table.add_row(
                f"{place}{' →' if chosen else ''}",
                *cells(candidate, batch_size),
                style="bold" if chosen else "",
            )
    return table


def cells(candidate: Candidate, batch_size: int) -> list[str]:
    graph, simulation = candidate.graph, candidate.simulation
    lines = [
        [stage for stage in graph.stages if branch in stage.layers] for branch in graph.branches
    ]
    deals = [describe_batch(batch) for batch in candidate.batches.values()]
    kept = [str(batch.num_kept) for batch in candidate.batches.values()]
    return [
        graph.layout,
        str(len(graph.stages))
        if graph.layout == "merged"
        else " + ".join(str(len(line)) for line in lines),
        _once([str(line[0].replicas) for line in lines])
        if graph.layout != "fork"
        else " + ".join(str(line[0].replicas) for line in lines),
        _once(deals),
        candidate.schedule + (f", keeps {_once(kept)}" if any(map(int, kept)) else ""),
        seconds(simulation.step_s),
        f"{batch_size / simulation.step_s:,.0f}",
        f"{simulation.bubble_fraction:.0%}",
        f"{candidate.peak_bytes / GIB:.1f}",
        f"{max(stage.sent_bytes for stage in simulation.stages) / GIB:.2f}",
    ]


def _once(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else " + ".join(values)


def main(options: PlanOptions) -> None:
    config, block = configuration(options)
    costs = cost_model(options, config, adapting(block))
    search = search_plans(config, block, options.gpus, costs)
    show(plan_table(search, config["train_batch_size"], options.top))
    print(search.why())
    if options.picture is None:
        print("--picture FILE draws the choice as a timeline")
        return
    save_plan_png(
        options.picture, search.best, lock_costs(costs, trainable_layers(block.locking(), costs))
    )
    print(options.picture)


def run(arguments: list[str] | None = None) -> int:
    """The exit status; what cannot be planned, and why, is one line on stderr."""
    return run_program("python -m launch.tools.plan", lambda: main(parse_options(arguments)))


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
