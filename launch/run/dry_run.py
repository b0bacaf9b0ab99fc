"""`train.py --dry-run`: everything up to the first step, in one process and without the hardware.

It takes the same steps as train.py with the same parts, so it meets the same errors: options, the
JSON file, the data with its index, tokenizer and held-out samples, the towers on the meta device,
the headers of pretrained weights, the plan and the memory. Layers are counted, not measured, and
nothing is built. What a run writes goes to a temporary folder; the index stays in the cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from data.modalities.tokenizer import length_multiple
from data.options import DataOptions
from data.prepare import prepare_data
from engine.checkpoint.layout import verify
from engine.planning.devices import find_device
from engine.planning.planner import plan_run
from launch.balancing.batching import Batching
from launch.balancing.choosing import BatchingOptions
from launch.balancing.loss_weights import LossWeightOptions, LossWeights
from launch.costing import NOMINAL
from launch.estimates import estimated_costs
from launch.inference.trained import find_checkpoint, with_named_towers
from launch.model import ModelOptions, RunModel
from launch.run.folder import RunFolder, choose_folder, training_identity
from launch.run.resuming import state_of
from launch.settings.blocks import adapting, dealing
from launch.settings.configuration import Abilities, read_configuration
from launch.settings.options import Options
from launch.settings.preprocessing import describe_pixels
from launch.settings.recipe import as_begun, settle
from launch.terminal.first_screen import Hardware, first_screen, print_screen

KEPT = ("samples", "tokenizer", "token_counts")  # of a run's folder, which are read again


@dataclass(frozen=True)
class Planned:
    """What is planned for. `costed`: the device of the costs; `memory_bytes`: None: its own."""

    num_ranks: int
    hardware: Hardware
    abilities: Abilities
    costed: str
    memory_bytes: float | None

    @classmethod
    def of(cls, options: Options) -> Planned:
        """--ranks and --device, and for what they leave open what is here: its kind of device, and
        its memory where it is a GPU."""
        accelerator = get_accelerator()
        kind = accelerator.device_name()
        on_gpu = kind != "cpu"
        launched = int(os.environ.get("WORLD_SIZE", accelerator.device_count() if on_gpu else 1))
        num_ranks = options.ranks or max(1, launched)
        if options.device is not None:
            device = find_device(options.device)
            hardware = Hardware(num_ranks, -(-num_ranks // device.ranks_per_node), device.name)
            return cls(num_ranks, hardware, Abilities("cuda"), options.device, None)
        here = torch.device(kind)
        memory = torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else None
        on_node = max(1, accelerator.device_count()) if on_gpu else num_ranks
        return cls(
            num_ranks,
            Hardware.here(num_ranks, -(-num_ranks // on_node), here),
            Abilities.here(here),
            NOMINAL.get(kind, "A100"),
            # a CPU's memory is shared by its ranks, of which some may be elsewhere: not checked
            memory if on_gpu else float("inf"),
        )


def dry_run(options: Options) -> int:
    """Print the first screen; returns the exit status. Of the processes of a launcher the first
    does it. Errors: those of a run."""
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    with tempfile.TemporaryDirectory(prefix="wye-dry-run-") as temporary:
        print_screen(_prepare(options, Planned.of(options), Path(temporary)))
    print("dry run: nothing was trained, and no folder was written")
    return 0


def _prepare(options: Options, planned: Planned, temporary: Path) -> list[tuple[str, str]]:
    """The first screen. The order of the steps is that of train.py."""
    config_file, config, block, _ = read_configuration(
        options, planned.num_ranks, planned.abilities
    )

    folder = RunFolder(choose_folder(options.run_dir, options.data), first_rank=False)
    previous = folder.previous()
    options = with_named_towers(options, previous)
    config, block = as_begun(config, block, previous, options.branches)
    identity = training_identity(options.record(), config, asdict(block))
    folder.refuse_other_run(identity, options.resume)
    state = state_of(_checkpoint(options.resume, folder.checkpoints))

    for name in KEPT:
        if (folder.path / name).is_dir():
            shutil.copytree(folder.path / name, temporary / name)
    data = prepare_data(
        options.section(DataOptions),
        options.tokenizer_source(),
        temporary,
        progress=True,
        length_multiple=length_multiple(planned.abilities.device_type),
    )
    asked = options.section(BatchingOptions)
    batching = Batching(
        data=data,
        options=asked,
        block=block,
        batch_size=config["train_batch_size"],
        state=state,
        folder=temporary,
    )
    total_steps = batching.total_steps
    options, config, block, recipe = settle(options, config, block, total_steps)

    model = RunModel.of(options.section(ModelOptions), data.tokenizer, adapting(block))
    model.refuse_sizes(options.image_buckets, dealing(block).image_size)
    LossWeights.of(options.section(LossWeightOptions), model.objective, data.held_out)

    costs = _costs(model, config, planned)
    plan = plan_run(config, block, planned.num_ranks, costs)
    training = training_identity(options.record(), config, asdict(block), plan)
    folder.refuse_other_run(training, options.resume)
    batching.divide(plan, costs, model.patch_size)
    further = [
        describe_pixels(options),
        *model.describe_cuts().splitlines(),
        model.describe_patches(),
        *model.describe_adapters().splitlines(),
        batching.describe_shapes(),
    ]
    return first_screen(
        options,
        data,
        model.towers,
        hardware=planned.hardware,
        config=config,
        config_file=config_file,
        plan=plan,
        recipe=recipe,
        total_steps=total_steps,
        further=further,
        folder=f"{folder.path} (of the run; not written)",
    )


def _checkpoint(asked: str, checkpoints: Path) -> Path | None:
    """Where the run would go on."""
    if asked == "never" or (asked == "auto" and not checkpoints.is_dir()):
        return None
    if asked == "auto":
        return find_checkpoint(checkpoints, None)
    if not Path(asked).is_dir():
        raise FileNotFoundError(
            f"--resume {asked}: no such folder; give auto, never, or a folder such as "
            "RUN_DIR/checkpoints/step-00000100"
        )
    verify(Path(asked))
    return Path(asked)


def _costs(model: RunModel, config: dict[str, Any], planned: Planned):
    compared = [pair.branches for pair in model.objective.pairs]
    return estimated_costs(
        model.towers,
        config,
        model.embed_dim,
        find_device(planned.costed),
        planned.memory_bytes,
        compared=compared,
    )
