"""A run up to its first step: how to run, on what, what to train, and which rank runs which layers.

`prepare_run` does this for train.py, on all ranks together (`LiveRanks`), and for `--dry-run`, in
one process and without the hardware (`PlannedRanks`), so a dry run meets the errors of a run.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed.monitor.config import DeepSpeedMonitorConfig

from data.modalities.tokenizer import length_multiple
from data.options import DataOptions, derived_of
from data.prepare import prepare_data
from data.prepared import PreparedData
from engine.build import build_engine
from engine.config.reading import BranchesBlock
from engine.executor import ForkEngine
from engine.optimizer.classes import optimizer_class
from engine.planning.planner import RunPlan
from engine.processes.ops import compile_optimizer_op
from engine.processes.start import Processes
from engine.trace import HostClock
from launch.batching.batching import Batching, order_of_run
from launch.config.blocks import adapting, balancing, refuse_missing_weights
from launch.config.configuration import read_configuration
from launch.config.groups import InputOptions
from launch.config.hyperparameters import as_begun, settle
from launch.config.options import Options
from launch.inference.trained import with_named_towers
from launch.inputs import from_bytes, refuse_unfit_loaders
from launch.loss_weights import LossWeights
from launch.modalities import refuse_unfit_towers
from launch.run.folder import RunFolder, training_identity
from launch.run.resuming import resume, state_of
from launch.setup.model import RunModel
from launch.setup.ranks import Ranks
from launch.tracking.destination import where
from models.towers.layers import library_models_kept


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """What was decided before the first step. `options` and `config` have nothing open; `training`:
    the run's identity; `state`: of the checkpoint that it goes on from; `preset`: its line, empty
    where no number was left open; `notices`: below the first screen."""

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
    preset: str
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
    # How to run: the same options on all ranks, and the JSON file, checked against this hardware and
    # this number of processes.
    ranks.compare_options(options)
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
    refuse_unfit_towers(options.branches, vars(options))
    config, block = as_begun(config, block, previous, options.branches)
    if previous is None:
        refuse_missing_weights(block, options.branches)
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
            looks=ranks.first,
            length_multiple=length_multiple(ranks.abilities.device_type),
        )
    order, total_steps = order_of_run(data, options, config["train_batch_size"], state)
    options, config, block, preset = settle(options, config, block, total_steps)

    # What to train: towers as lists of layers, and the losses between their embeddings.
    model = RunModel.of(options, data.tokenizer, adapting(block))
    model.refuse_annotations(block, derived_of(options.pairs))
    model.refuse_matching(config)
    model.refuse_changing_buffers()
    inputs = options.part(InputOptions)
    refuse_unfit_loaders(model.towers, data, inputs)
    model.refuse_sizes(options.image_buckets, balancing(block), data, inputs)
    loss_weights = LossWeights.of(options, model.objective, data.held_out)

    # Which rank runs which layers: the fastest plan by what the layers cost, measured or estimated.
    # Ranks that plan differently would wait for each other for ever.
    costs = ranks.costs(model, config, block=block, data=data, inputs=options, folder=folder)
    plan = ranks.plan(model, config, block, costs, data=data, inputs=options)
    training = training_identity(options.record(), config, asdict(block), plan)
    how = {"deepspeed_config": config, "branches": asdict(block), "compiled": plan.compiled}
    planned = {"plan": plan.describe(), "stages": plan.graph.record()}
    ranks.compare({**training, **how, **planned})
    folder.refuse_other_run(training, options.resume)

    # Which samples of a global batch make which micro-batch.
    with ranks.first_first():
        batching = Batching(
            plan,
            ranks.rank,
            ranks.workers,
            data=data,
            order=order,
            total_steps=total_steps,
            options=options,
            block=block,
            patch_size=model.patch_size,
            folder=working_folder,
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
        preset=preset,
        notices=notices,
    )
