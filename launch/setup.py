"""A run up to its first step: how to run, on what, what to train, and which rank runs which layers.

`prepare_run` does this for train.py, on all ranks together (`LiveRanks`), and for `--dry-run`, in
one process and without the hardware (`PlannedRanks`), so a dry run meets the errors of a run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.config import DeepSpeedMonitorConfig

from common.secrets import redacted
from data.modalities.tokenizer import length_multiple
from data.options import DataOptions
from data.prepare import PreparedData, prepare_data
from engine.build import build_engine
from engine.checkpoint.layout import verify
from engine.config.communication import HOST
from engine.config.reading import BranchesBlock
from engine.executor import ForkEngine
from engine.json_messages import from_first_rank
from engine.optimizer.classes import optimizer_class
from engine.planning.costs import CostModel
from engine.planning.devices import find_device
from engine.planning.planner import RunPlan, plan_run
from engine.processes.agreement import refuse_differences
from engine.processes.determinism import compute_deterministically
from engine.processes.ops import compile_optimizer_op
from engine.processes.start import (
    COLLECTIVE_LIMIT_S,
    Processes,
    first_rank_first,
    start_processes,
)
from engine.processes.watchdog import Watchdog
from engine.trace import HostClock
from launch.batching.batching import Batching
from launch.batching.loss_weights import LossWeights
from launch.config.blocks import adapting, balancing
from launch.config.configuration import Abilities, asked_communication, read_configuration
from launch.config.hyperparameters import as_begun, settle
from launch.config.options import Options
from launch.config.pixels import describe_pixels
from launch.costing import NOMINAL, run_costs
from launch.estimates import estimated_costs
from launch.feeding import share_cores
from launch.inference.trained import find_checkpoint as newest_checkpoint
from launch.inference.trained import with_named_towers
from launch.inputs import from_bytes
from launch.model import RunModel
from launch.run.failures import Run
from launch.run.folder import RunFolder, choose_folder, training_identity
from launch.run.resuming import find_checkpoint, resume, state_of
from launch.run.stopping import StopRequest
from launch.terminal.first_screen import (
    describe_device,
    describe_ranks,
    first_screen,
    folder_to_watch,
)
from launch.terminal.last_words import say_last
from launch.terminal.quiet import quiet_ranks
from launch.tracking.tracker import where
from models.towers.layers import library_models_kept

KEPT = ("samples", "tokenizer", "token_counts")  # of a run's folder, which a dry run reads again


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """What was decided before the first step. `options` and `config` have nothing open; `training`:
    the run's identity; `state`: of the checkpoint that it goes on from; `screen`: the first one;
    `further`: notices below it."""

    options: Options
    config_file: Path
    config: Mapping[str, Any]
    block: BranchesBlock
    monitors: DeepSpeedMonitorConfig
    folder: RunFolder
    checkpoint: Path | None
    state: Mapping[str, Any]
    data: PreparedData
    batching: Batching
    model: RunModel
    loss_weights: LossWeights
    plan: RunPlan
    training: Mapping[str, Any]
    screen: Sequence[tuple[str, str]]
    notices: Sequence[str]

    @property
    def step(self) -> int:
        """At which the run begins or goes on."""
        return self.state["step"]

    def build_engine(self, processes: Processes, clock: HostClock) -> ForkEngine:
        """DeepSpeed around this rank's stage."""
        kind = optimizer_class(self.config)
        compile_optimizer_op(kind, print if processes.local_rank == 0 else None)
        with library_models_kept():
            return build_engine(
                self.plan,
                self.config,
                layers=self.model.layers,
                build_layer=self.model.build_layer,
                objective=self.model.objective,
                embed_dim=self.model.embed_dim,
                total_num_steps=self.batching.total_steps,
                seed=self.options.seed,
                timeout=processes.timeout,
                equal_shares=self.batching.equal_shares,
                source_starts=self.data.source_starts,
                clock=clock,
                from_bytes=from_bytes(self.options.preprocessing),
            )


class Ranks(Protocol):
    """The ranks of a run, started or planned for. `described`: in words; `first`: is this one the
    first?"""

    number: int
    abilities: Abilities
    described: str
    first: bool

    @property
    def costs(self) -> Callable[..., CostModel]:
        """What the layers cost here: called as `run_costs` is."""

    def first_first(self) -> AbstractContextManager[None]:
        """In here the first rank is alone before the others, which find what it made."""

    def compare(self, record: Mapping[str, Any]) -> None:
        """Raise ValueError where another rank has another record."""

    def open_folder(self, options: Options) -> RunFolder: ...

    def find_checkpoint(self, resume: str, folder: RunFolder) -> tuple[Path | None, list[str]]: ...

    def working_folder(self, folder: RunFolder) -> Path:
        """Where samples, tokenizer and token counts are kept."""

    def describe_folder(self, folder: RunFolder) -> str: ...


class LiveRanks:
    """The processes of this run, started here, with a watchdog that ends them all when one is lost.
    `run`: gets the watchdog and the folder, for the report of a failure."""

    def __init__(self, options: Options, run: Run, stop: StopRequest):
        limit_s = max(
            COLLECTIVE_LIMIT_S, 2 * 60 * options.stall_limit
        )  # the watchdog speaks before
        self.processes = start_processes(limit_s, print, asked_communication(options))
        self.run, self.stop = run, stop
        self.watchdog = run.watchdog = Watchdog(
            self.processes.rank, self.processes.places, self.processes.secret, tell=say_last
        ).start()
        quiet_ranks(self.processes.rank)
        if options.deterministic:
            compute_deterministically()
        self.loading = share_cores(options, self.processes)
        self.costs = partial(run_costs, loading=self.loading, processes=self.processes)
        places, device = self.processes.places, self.processes.device
        self.number, self.first = self.processes.world_size, self.processes.rank == 0
        self.abilities = Abilities.here(device)
        through_host = device.type != "cpu" and self.processes.communication == HOST
        self.described = describe_ranks(
            self.number,
            places.num_nodes,
            describe_device(device),
            len(set(places.devices)) if through_host else 0,
        )

    def first_first(self) -> AbstractContextManager[None]:
        return first_rank_first(self.processes)

    def compare(self, record: Mapping[str, Any]) -> None:
        refuse_differences(redacted(record))

    def open_folder(self, options: Options) -> RunFolder:
        where = Path(from_first_rank(str(choose_folder(options.run_dir, options.data))))
        folder = RunFolder(where, self.first)
        folder.claim()  # before a failure is written there
        self.run.folder = folder
        if self.first:
            self.stop.watch(folder.stop)
        return folder

    def find_checkpoint(self, resume: str, folder: RunFolder) -> tuple[Path | None, list[str]]:
        return find_checkpoint(resume, folder.checkpoints)

    def working_folder(self, folder: RunFolder) -> Path:
        return folder.path

    def describe_folder(self, folder: RunFolder) -> str:
        return folder_to_watch(folder.path)


class PlannedRanks:
    """What --ranks and --device say, and for what they leave open what is here: its kind of device,
    and its memory where it is a GPU. Layers are counted, not measured. `temporary`: a folder for
    what a run writes into its own."""

    first = True

    def __init__(self, options: Options, temporary: Path):
        self.temporary = temporary
        accelerator = get_accelerator()
        kind = accelerator.device_name()
        on_gpu = kind != "cpu"
        launched = int(os.environ.get("WORLD_SIZE", accelerator.device_count() if on_gpu else 1))
        self.number = options.ranks or max(1, launched)
        self.memory_bytes: float | None = None
        if options.device is not None:
            self.costed = options.device
            device = find_device(options.device)
            num_nodes = -(-self.number // device.ranks_per_node)
            self.described = describe_ranks(self.number, num_nodes, device.name)
            self.abilities = Abilities("cuda")
            return
        here = torch.device(kind)
        if kind == "cuda":
            self.memory_bytes = torch.cuda.get_device_properties(0).total_memory
        elif not on_gpu:
            # a CPU's memory is shared by its ranks, of which some may be elsewhere: not checked
            self.memory_bytes = float("inf")
        on_node = max(1, accelerator.device_count()) if on_gpu else self.number
        num_nodes = -(-self.number // on_node)
        self.described = describe_ranks(self.number, num_nodes, describe_device(here))
        self.abilities = Abilities.here(here)
        self.costed = NOMINAL.get(kind, "A100")

    def first_first(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compare(self, record: Mapping[str, Any]) -> None:
        return

    def open_folder(self, options: Options) -> RunFolder:
        return RunFolder(choose_folder(options.run_dir, options.data), first_rank=False)

    def find_checkpoint(self, resume: str, folder: RunFolder) -> tuple[Path | None, list[str]]:
        if resume == "never" or (resume == "auto" and not folder.checkpoints.is_dir()):
            return None, []
        if resume == "auto":
            return newest_checkpoint(folder.checkpoints, None), []
        if not Path(resume).is_dir():
            raise FileNotFoundError(
                f"--resume {resume}: no such folder; give auto, never, or a folder such as "
                "RUN_DIR/checkpoints/step-00000100"
            )
        verify(Path(resume))
        return Path(resume), []

    def working_folder(self, folder: RunFolder) -> Path:
        for name in KEPT:
            if (folder.path / name).is_dir():
                shutil.copytree(folder.path / name, self.temporary / name, dirs_exist_ok=True)
        return self.temporary

    def describe_folder(self, folder: RunFolder) -> str:
        return f"{folder.path} (of the run; not written)"

    def costs(self, model: RunModel, config: Mapping[str, Any], **measured: Any) -> CostModel:
        """Counted, so what a run measures them with is not needed."""
        return estimated_costs(
            model.towers,
            config,
            model.embed_dim,
            find_device(self.costed),
            self.memory_bytes,
            compared=[pair.branches for pair in model.objective.pairs],
        )


def resume_run(run: PreparedRun, engine: ForkEngine) -> list[str]:
    """Put the engine, the batches and the loss weights where the checkpoint left them; returns
    notices. Lines of steps that come again are dropped from the run's files."""
    notices = [*run.notices]
    if run.checkpoint is not None:
        batching = run.batching
        notices += resume(engine, run.checkpoint, batching.order, batching.total_steps)
        batching.load_state_dict(run.state["balance"], run.step)
        run.loss_weights.load_state_dict(run.state["loss_weights"])
    # from the start: also the evaluation before it
    run.folder.forget_after(run.step if run.checkpoint else -1)
    return notices


def write_record(run: PreparedRun) -> dict[str, Any]:
    """Write what was decided to config.json of the run's folder; returns it."""
    typed = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # the launcher's
    decided = {
        "options": run.options.record(),
        "tokenizer": run.options.tokenizer_source(),
        "tracking": where(run.options.wandb_project, run.monitors.wandb),
        "command": shlex.join(["train.py", *typed]),
    }
    return run.folder.write_config(
        run.training,
        decided,
        run.plan,
        data=run.data.summary(),
        towers=run.model.towers,
        total_steps=run.batching.total_steps,
    )


def prepare_run(options: Options, ranks: Ranks) -> PreparedRun:
    """Decide everything. All ranks call it together. Errors: ValueError, OSError."""
    # How to run: the JSON file, checked against this hardware and this number of processes, and the
    # same on all of them.
    config_file, config, block, monitors = read_configuration(
        options, ranks.number, ranks.abilities
    )
    ranks.compare(training_identity(options.record(), config, asdict(block)))

    # The run's folder. If it holds a run, this must be the same one, and it goes on from there.
    folder = ranks.open_folder(options)
    previous = folder.previous()
    # One rank fetches weights that name a tower, the others find them.
    with ranks.first_first():
        options = with_named_towers(options, previous)
    config, block = as_begun(config, block, previous, options.branches)
    identity = training_identity(options.record(), config, asdict(block))
    folder.refuse_other_run(identity, options.resume)
    checkpoint, notices = ranks.find_checkpoint(options.resume, folder)
    state = state_of(checkpoint)

    # What to train on, and in which order. The first rank prepares what takes long.
    with ranks.first_first():
        working_folder = ranks.working_folder(folder)
        data = prepare_data(
            options.part(DataOptions),
            options.tokenizer_source(),
            working_folder,
            progress=ranks.first,
            length_multiple=length_multiple(ranks.abilities.device_type),
        )
        batching = Batching(
            data=data,
            options=options,
            block=block,
            batch_size=config["train_batch_size"],
            state=state,
            folder=working_folder,
        )
    options, config, block, preset = settle(options, config, block, batching.total_steps)

    # What to train: towers as lists of layers, and the losses between their embeddings.
    model = RunModel.of(options, data.tokenizer, adapting(block))
    model.refuse_sizes(options.image_buckets, balancing(block).image_size)
    loss_weights = LossWeights.of(options, model.objective, data.held_out)

    # Which rank runs which layers: the fastest plan by what the layers cost, measured or estimated.
    # Ranks that plan differently would wait for each other for ever.
    costs = ranks.costs(model, config, block=block, data=data, inputs=options, folder=folder)
    plan = plan_run(config, block, ranks.number, costs)
    training = training_identity(options.record(), config, asdict(block), plan)
    how = {"deepspeed_config": config, "branches": asdict(block), "compiled": plan.compiled}
    planned = {"plan": plan.describe(), "stages": plan.graph.record()}
    ranks.compare({**training, **how, **planned})
    folder.refuse_other_run(training, options.resume)

    # Which samples of a global batch make which micro-batch.
    with ranks.first_first():
        batching.divide(plan, costs, model.patch_size)
    screen = first_screen(
        options,
        data,
        model.towers,
        ranks=ranks.described,
        config=config,
        config_file=config_file,
        plan=plan,
        preset=preset,
        total_steps=batching.total_steps,
        further=[
            describe_pixels(options),
            *model.describe_cuts().splitlines(),
            model.describe_patches(),
            *model.describe_adapters().splitlines(),
            batching.describe_shapes(),
        ],
        folder=ranks.describe_folder(folder),
    )
    return PreparedRun(
        options=options,
        config_file=config_file,
        config=config,
        block=block,
        monitors=monitors,
        folder=folder,
        checkpoint=checkpoint,
        state=state,
        data=data,
        batching=batching,
        model=model,
        loss_weights=loss_weights,
        plan=plan,
        training=training,
        screen=screen,
        notices=notices,
    )
