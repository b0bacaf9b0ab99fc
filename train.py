r"""Train a contrastive model as a forked pipeline: options -> data -> towers -> stages -> loop.

    deepspeed --num_gpus 8 train.py
    deepspeed --num_gpus 8 train.py --deepspeed_config ds_configs/zero1_fp16.json \
        --data jsonl:pairs.jsonl
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

from common.output import outlive_output
from launch.config.options import Options, parse_options
from launch.terminal.quiet import quiet_libraries

# Before torch and DeepSpeed are imported, which takes seconds: --help and mistakes do not wait.
if __name__ == "__main__":
    outlive_output()
    OPTIONS = parse_options(environment=os.environ)
quiet_libraries()

# The processes that load data import this file, too, under another name, and need nothing of it.
if __name__ != "__mp_main__":
    from engine.checkpoint.layout import step_folder
    from engine.checkpoint.retention import Keep
    from engine.checkpoint.together import CheckpointWriter
    from engine.processes.start import stop_processes
    from engine.trace import HostClock
    from launch.evaluating import Evaluator
    from launch.feeding import Feeding
    from launch.inputs import languages_of
    from launch.journal import Journal
    from launch.run.failures import Run, report_and_exit
    from launch.run.stopping import STOPPED, StopRequest
    from launch.setup.dry_run import dry_run
    from launch.setup.first_screen import first_screen
    from launch.setup.prepare import prepare_run, resume_run, write_record
    from launch.setup.ranks import LiveRanks
    from launch.terminal.bar import Progress
    from launch.tracking.alerts import Alarms
    from launch.tracking.tracker import Tracker


def main(options: Options, run: Run, clock: HostClock = time.perf_counter) -> int:
    """Train; returns the exit status. `run` holds what a report of a failure needs.

    `clock`: seconds by which steps are measured and, on a CPU, what the stages compute in them.
    """
    if options.dry_run or options.show_options:
        return dry_run(options)

    # One process per rank, and requests to stop. Then all that is decided before the first step:
    # how to run, on what data, which towers, and which rank runs which layers.
    stop = StopRequest(options.max_hours)
    ranks = LiveRanks(options, run, stop)
    prepared = prepare_run(options, ranks)
    ranks.watchdog.describe = partial(ranks.describe, prepared.plan.graph)
    options, folder, batching = prepared.options, prepared.folder, prepared.batching
    loss_weights, total_steps = prepared.loss_weights, batching.total_steps
    journal = Journal(folder, options.trace_every, Alarms(ranks.watchdog.describe))
    journal.begin(first_screen(prepared, ranks))

    # DeepSpeed around this rank's stage, with the state of the run that goes on.
    with ranks.connecting():
        engine = prepared.build_engine(ranks.processes, clock)
    notices = resume_run(prepared, engine)
    record = write_record(prepared)
    step = saved_step = prepared.step
    journal.say(*notices, batching.explain(step))
    shown = {**prepared.training, "batches": record["batches"]}
    journal.track(
        lambda: Tracker(options, prepared.monitors, folder.path, shown, step, prepared.plan)
    )

    # What this rank's stage loads: only the modality that enters there.
    feeding = Feeding(
        data=prepared.data,
        engine=engine,
        batching=batching,
        folder=folder,
        inputs=options,
        loading=ranks.loading,
        patch_size=prepared.model.patch_size,
        languages=languages_of(prepared.model.towers),
    )
    batches = feeding.training(step, total_steps)
    evaluator = Evaluator(engine, feeding, journal, loss_weights, options.eval_ema)
    keep = Keep(options.keep_checkpoints, options.keep_every)
    checkpoints = CheckpointWriter(folder.checkpoints, record, keep)
    ranks.watchdog.follow(
        lambda: engine.instructions_done + checkpoints.signs_of_life(),
        60 * options.stall_limit,
        lambda: engine.work().describe(),
    )

    # Evaluate before the first step, and what a run that was ended in its evaluation has left.
    if step in (0, total_steps) or batching.is_due(step, options.eval_every):
        evaluator.complete(step)

    stopping = False
    with Progress(step, total_steps, ranks.first) as bar:
        while step < total_steps and not stopping:
            # Forward, exact loss over the global batch, backward, optimizer: the plan's schedule.
            start, spec = clock(), batching.step_spec(step, loss_weights.weights())
            metrics = engine.train_batch(batches, spec, bool(stop), feeding.counts)
            step, stopping = engine.global_steps, metrics.stop_requested

            # A line per step, in metrics.jsonl and the trackers.
            line = batching.line(metrics, step, clock() - start)
            journal.step(line, metrics, batching.order.samples_before(step))

            # A loss or gradient that is not finite: the step was skipped. Too many in a row end the
            # run.
            if metrics.bad_step is not None:
                journal.bad_step(
                    step, metrics.loss, metrics.bad_step, prepared.data.source.identity
                )
                folder.refuse_more_bad_steps(
                    metrics.bad_steps_in_a_row, prepared.block.max_bad_steps, checkpoints.newest
                )

            # What follows from measured times (batches) and from the losses (their weights).
            journal.measurement(step, batching.after_step(engine, metrics))
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
    ranks.watchdog.stop()
    if batches is not None:
        batches.close()
    journal.finish(0 if done else 1)
    journal.report()  # the others wait for it below: the launcher ends all ranks when one has left
    stop_processes()
    return 0 if done else STOPPED


if __name__ == "__main__":
    run = Run()
    try:
        status = main(OPTIONS, run)
    except Exception as error:
        report_and_exit("train.py", error, run)
    sys.exit(status)
