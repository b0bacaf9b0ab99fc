r"""Train a contrastive model as a forked pipeline: options -> data -> towers -> stages -> loop.

    deepspeed --num_gpus 8 train.py
    deepspeed --num_gpus 8 train.py --deepspeed_config ds_configs/zero1_fp16.json \
        --data jsonl:pairs.jsonl
"""

import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from launch.terminal.quiet import quiet_libraries, quiet_ranks

quiet_libraries()  # before they are imported

from common.output import outlive_output
from common.secrets import redacted
from data.modalities.tokenizer import length_multiple
from data.options import DataOptions
from data.prepare import prepare_data
from engine.build import build_engine
from engine.checkpoint.layout import step_folder
from engine.checkpoint.retention import Keep
from engine.checkpoint.together import CheckpointWriter
from engine.json_messages import from_first_rank
from engine.optimizer.classes import optimizer_class
from engine.planning.planner import plan_run
from engine.processes.agreement import refuse_differences
from engine.processes.determinism import compute_deterministically
from engine.processes.ops import compile_optimizer_op
from engine.processes.start import (
    COLLECTIVE_LIMIT_S,
    first_rank_first,
    start_processes,
    stop_processes,
)
from engine.processes.watchdog import Watchdog
from engine.trace import HostClock
from launch.balancing.batching import Batching
from launch.balancing.choosing import BatchingOptions
from launch.balancing.loss_weights import LossWeightOptions, LossWeights
from launch.costing import run_costs
from launch.evaluating import Evaluator
from launch.feeding import Feeding, LoadingOptions, share_cores
from launch.inference.trained import with_named_towers
from launch.inputs import InputOptions, from_bytes, languages_of
from launch.model import ModelOptions, RunModel
from launch.run.dry_run import dry_run
from launch.run.failures import Run, report_and_exit
from launch.run.folder import RunFolder, choose_folder, training_identity
from launch.run.journal import Journal
from launch.run.resuming import find_checkpoint, resume, state_of
from launch.run.stopping import STOPPED, StopRequest
from launch.settings.blocks import adapting, dealing
from launch.settings.configuration import Abilities, asked_communication, read_configuration
from launch.settings.options import Options, parse_options
from launch.settings.preprocessing import describe_pixels
from launch.settings.recipe import as_begun, settle
from launch.terminal.bar import Progress
from launch.terminal.first_screen import Hardware, first_screen, folder_to_watch
from launch.terminal.last_words import say_last
from launch.tracking.tracker import TrackingOptions, where
from models.towers.layers import library_models_kept


def main(options: Options, run: Run, clock: HostClock = time.perf_counter) -> int:
    """Train; returns the exit status. `run` holds what a report of a failure needs.

    `clock`: seconds by which steps are measured and, on a CPU, what the stages compute in them.
    """
    if options.dry_run:
        return dry_run(options)

    # One process per rank, a watchdog that ends them all when one is lost, and requests to stop.
    stop = StopRequest(options.max_hours)
    limit_s = max(COLLECTIVE_LIMIT_S, 2 * 60 * options.stall_limit)  # the watchdog speaks before
    processes = start_processes(limit_s, print, asked_communication(options))
    run.watchdog = Watchdog(
        processes.rank, processes.places, processes.secret, tell=say_last
    ).start()
    first = processes.rank == 0
    quiet_ranks(processes.rank)
    if options.deterministic:
        compute_deterministically()
    loading = share_cores(options.section(LoadingOptions), processes)

    # How to run: the JSON file, checked against this hardware and this number of processes, and the
    # same on all of them.
    config_file, config, block, monitors = read_configuration(
        options, processes.world_size, Abilities.here(processes.device)
    )
    refuse_differences(redacted(training_identity(options.record(), config, asdict(block))))

    # The run's folder. If it holds a run, this must be the same one, and it goes on from there.
    place = Path(from_first_rank(str(choose_folder(options.run_dir, options.data))))
    folder = RunFolder(place, first)
    folder.claim()  # before a failure is written there
    run.folder = folder
    journal = Journal(folder, options.trace_every)
    if first:
        stop.watch(folder.stop)
    previous = folder.previous()
    # one rank fetches weights that name a tower, the others find them
    with first_rank_first(processes):
        options = with_named_towers(options, previous)
    config, block = as_begun(config, block, previous, options.branches)
    folder.refuse_other_run(
        training_identity(options.record(), config, asdict(block)), options.resume
    )
    checkpoint, notices = find_checkpoint(options.resume, folder.checkpoints)
    state = state_of(checkpoint)

    # What to train on, and in which order. The first rank prepares what takes long.
    with first_rank_first(processes):
        data = prepare_data(
            options.section(DataOptions),
            options.tokenizer_source(),
            folder.path,
            progress=first,
            length_multiple=length_multiple(processes.device.type),
        )
        batching = Batching(
            data=data,
            options=options.section(BatchingOptions),
            block=block,
            batch_size=config["train_batch_size"],
            state=state,
            folder=folder.path,
        )
    total_steps = batching.total_steps
    options, config, block, recipe = settle(options, config, block, total_steps)

    # What to train: towers as lists of layers, and the losses between their embeddings.
    model = RunModel.of(options.section(ModelOptions), data.tokenizer, adapting(block))
    model.refuse_sizes(options.image_buckets, dealing(block).image_size)
    inputs = options.section(InputOptions)

    # Which rank runs which layers: the fastest plan by what the layers cost, measured or estimated.
    costs = run_costs(
        model,
        config,
        block,
        data=data,
        inputs=inputs,
        loading=loading,
        processes=processes,
        folder=folder,
    )
    plan = plan_run(config, block, processes.world_size, costs)
    run.watchdog.describe = plan.graph.describe_rank
    training = training_identity(options.record(), config, asdict(block), plan)
    # Ranks that plan differently would wait for each other for ever.
    how = {"deepspeed_config": config, "branches": asdict(block), "compiled": plan.compiled}
    planned = {"plan": plan.describe(), "stages": plan.graph.record()}
    refuse_differences(redacted({**training, **how, **planned}))
    folder.refuse_other_run(training, options.resume)
    hardware = Hardware.here(
        processes.world_size,
        processes.places.num_nodes,
        processes.device,
        processes.communication,
        num_gpus=len(set(processes.places.devices)),
    )
    journal.begin(
        first_screen(
            options,
            data,
            model.towers,
            hardware=hardware,
            config=config,
            config_file=config_file,
            plan=plan,
            recipe=recipe,
            total_steps=total_steps,
            further=[
                describe_pixels(options),
                *model.describe_cuts().splitlines(),
                model.describe_patches(),
                *model.describe_adapters().splitlines(),
            ],
            folder=folder_to_watch(folder.path),
        )
    )

    # Which samples of a global batch make which micro-batch.
    with first_rank_first(processes):
        batching.divide(plan, costs, model.patch_size)
    journal.say(batching.describe_shapes())

    # DeepSpeed around this rank's stage.
    compile_optimizer_op(optimizer_class(config), print if processes.local_rank == 0 else None)
    with library_models_kept():
        engine = build_engine(
            plan,
            config,
            layers=model.layers,
            build_layer=model.build_layer,
            objective=model.objective,
            embed_dim=model.embed_dim,
            total_num_steps=total_steps,
            seed=options.seed,
            timeout=processes.timeout,
            equal_shares=batching.equal_shares,
            source_starts=data.source_starts,
            clock=clock,
            from_bytes=from_bytes(inputs.preprocessing),
        )
    batching.follow(engine, loading.num_workers)
    loss_weights = LossWeights.of(
        options.section(LossWeightOptions), model.objective, data.held_out
    )

    # The state of the run that goes on. Lines of steps that come again are dropped.
    step = saved_step = state["step"]
    if checkpoint is not None:
        notices += resume(engine, checkpoint, batching.order, total_steps)
        batching.load_state_dict(state["balance"], step)
        loss_weights.load_state_dict(state["loss_weights"])
    folder.forget_after(step if checkpoint else -1)  # from the start: also the evaluation before it
    typed = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # the launcher's
    decided = {
        "options": options.record(),
        "tokenizer": options.tokenizer_source(),
        "tracking": where(options.wandb_project, monitors.wandb),
        "command": shlex.join(["train.py", *typed]),
    }
    record = folder.write_config(
        training, decided, plan, data=data.summary(), towers=model.towers, total_steps=total_steps
    )
    journal.say(*notices, batching.explain(step))
    shown = {**training, "batches": record["batches"]}
    journal.track(options.section(TrackingOptions), monitors, shown, step, plan)

    # What this rank's stage loads: only the modality that enters there.
    languages = languages_of(model.towers)
    feeding = Feeding(
        data=data,
        engine=engine,
        batching=batching,
        folder=folder,
        inputs=inputs,
        loading=loading,
        languages=languages,
    )
    batches = feeding.training(step, total_steps)
    evaluator = Evaluator(engine, feeding, journal, loss_weights, options.eval_ema)
    keep = Keep(options.keep_checkpoints, options.keep_every)
    checkpoints = CheckpointWriter(folder.checkpoints, record, keep)
    run.watchdog.follow(
        lambda: engine.instructions_done + checkpoints.signs_of_life(),
        60 * options.stall_limit,
        lambda: engine.work().describe(),
    )

    # Evaluate before the first step, and what a run that was ended in its evaluation has left.
    if step in (0, total_steps) or batching.is_due(step, options.eval_every):
        evaluator.complete(step)

    stopping = False
    with Progress(step, total_steps, first) as bar:
        while step < total_steps and not stopping:
            # Forward, exact loss over the global batch, backward, optimizer: the plan's schedule.
            start, shape = clock(), batching.shape(step)
            metrics = engine.train_batch(
                batches, bool(stop), feeding.counts, **shape, loss_weights=loss_weights.weights()
            )
            step, stopping = engine.global_steps, metrics.stop_requested

            # A line per step, in metrics.jsonl and the trackers.
            line = batching.line(metrics, step, clock() - start)
            journal.step(line, metrics, batching.order.samples_before(step))

            # A loss or gradient that is not finite: the step was skipped. Too many in a row end the
            # run.
            if metrics.bad_step is not None:
                journal.bad_step(step, metrics.loss, metrics.bad_step, data.source.identity)
                folder.refuse_more_bad_steps(
                    metrics.bad_steps_in_a_row, block.max_bad_steps, checkpoints.newest
                )

            # What follows from measured times (batches) and from the losses (their weights).
            journal.measurement(step, batching.after_step(metrics))
            reason = loss_weights.after_step(step, metrics.losses)
            journal.loss_weights(step, reason, loss_weights)
            journal.sampled_trace(step, engine)
            bar.step(line)

            # A checkpoint, written in the background while the next steps run.
            if batching.is_due(step, options.save_every) or step == total_steps or stopping:
                state = {
                    "step": step,
                    "batch_sizes": batching.order.batch_sizes(step),
                    "balance": batching.state_dict(),
                    "loss_weights": loss_weights.state_dict(),
                }
                checkpoints.save(engine, state)
                saved_step = step

            # Held-out samples. A run that was asked to stop does not wait for them.
            if step == total_steps or (batching.is_due(step, options.eval_every) and not stopping):
                evaluator.evaluate(step)

    # The end: the last checkpoint is whole, and the table compares the first and last evaluation.
    checkpoints.finish()
    done = step >= total_steps
    if done:
        journal.retrieval(evaluator.num_samples)
    reason = stop.reason or "as another rank was asked to"
    ended = "done" if done else f"stopped ({reason}; the same command with this --run-dir goes on)"
    saved = folder.checkpoints / step_folder(saved_step)
    journal.say(f"{ended} at step {step} of {total_steps}   checkpoint {saved}")
    folder.mark_done(done)
    stop.forget()
    run.watchdog.stop()
    if batches is not None:
        batches.close()
    journal.finish(0 if done else 1)
    journal.report()  # the others wait for it below: the launcher ends all ranks when one has left
    stop_processes()
    return 0 if done else STOPPED


if __name__ == "__main__":
    outlive_output()
    run = Run()
    try:
        status = main(parse_options(), run)
    except Exception as error:
        report_and_exit("train.py", error, run)
    sys.exit(status)
