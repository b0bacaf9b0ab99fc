"""Train an image tower and a text tower as a forked pipeline: options -> data -> towers -> stages -> loop.

deepspeed --num_gpus 8 train.py
deepspeed --num_gpus 8 train.py --deepspeed_config ds_configs/zero1_fp16.json --data jsonl:pairs.jsonl
"""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is reported once, by us

import torch
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from data.batching.mixture import source_names
from data.loader import resolve_workers
from data.modalities.tokenizer import length_multiple
from data.prepare import prepare_data
from data.processes import start_early
from engine.build import build_engine
from engine.checkpoint.layout import step_folder
from engine.checkpoint.retention import Keep
from engine.checkpoint.together import CheckpointWriter
from engine.config.reading import check_hardware, read_config
from engine.planning.planner import check_world, plan_run
from engine.processes.start import first_rank_first, from_first_rank, has_bf16, start_processes, stop_processes
from engine.processes.watchdog import Watchdog
from engine.trace import HostClock
from launch.balancing.balancer import Balancer
from launch.balancing.choosing import explain_dealing, image_buckets, make_balance
from launch.balancing.loss_weights import LossWeights
from launch.balancing.weighting import loss_weights_of, text_lengths, training_order
from launch.costing import run_costs
from launch.feeding import Feeding
from launch.inference.trained import towers_of, with_named_towers
from launch.run.failures import Run, report_and_exit
from launch.run.folder import RunFolder, choose_folder, training_identity
from launch.run.report import progress_interval, retrieval_report, show
from launch.run.resuming import earlier_sizes, find_checkpoint, resume, state_of
from launch.run.step_line import step_line
from launch.run.stopping import STOPPED, StopRequest
from launch.run.trace_file import TraceFile, is_sampled
from launch.run.tracking import Tracker
from launch.settings.blocks import READERS, dealing, weighting
from launch.settings.objective import objective_of, pairs_of
from launch.settings.options import Options, default_config, parse_options
from launch.settings.preprocessing import describe_pixels
from launch.settings.recipe import as_begun, settle
from models.losses import Matching, build_loss
from models.weights.reading import open_model, open_weights


def main(options: Options, run: Run, clock: HostClock = time.perf_counter) -> int:
    """Train; returns the exit status. What it has made so far is left in `run` for whoever must report a failure.

    `clock`: seconds by which steps are measured, and, on a CPU, what the stages compute in them.
    """
    stop = StopRequest(options.max_hours)
    processes = start_processes()
    run.watchdog = Watchdog(processes.rank, processes.world_size).start()
    on_gpu, first = processes.device.type != "cpu", processes.rank == 0
    cores = len(os.sched_getaffinity(0))
    if not on_gpu:
        torch.set_num_threads(max(1, cores // processes.ranks_on_node))

    workers = resolve_workers(options.num_workers(), processes.ranks_on_node, cores, on_gpu)
    if workers:
        start_early()

    # How to run: the JSON file, checked against this hardware and this number of processes.
    accelerator = get_accelerator()
    config_file = options.deepspeed_config or default_config(on_gpu, has_bf16(processes.device), processes.world_size)
    config, block = read_config(config_file, options.branches, READERS)
    check_hardware(config, accelerator.is_fp16_supported(), accelerator.is_bf16_supported(), processes.device.type)
    check_world(config, block, processes.world_size, options.branches)
    options.refuse_beside(block)

    # What to train on. The first rank prepares what takes long; the others find it in the run's folder.
    run.folder = folder = RunFolder(from_first_rank(choose_folder(options)), first)
    if first:
        stop.watch(folder.stop)
    previous = folder.previous()
    with first_rank_first():
        options = with_named_towers(options, previous)
    config, block = as_begun(config, block, previous, options.branches)
    folder.refuse_other_run(options, training_identity(options, config, asdict(block)))
    checkpoint, notices = find_checkpoint(options.resume, folder.checkpoints)
    state, batch_size = state_of(checkpoint), config["train_batch_size"]
    with first_rank_first():
        padded_to = length_multiple(processes.device.type)
        data = prepare_data(options.data_options(), options.tokenizer_source(), folder.path, progress=first, length_multiple=padded_to)
        lengths = text_lengths(data, weighting(block), options.max_text_tokens, folder.path, progress=first)
    order = training_order(data, batch_size, options.seed, weighting(block), lengths, earlier_sizes(state["batch_sizes"], batch_size))
    total_steps = options.steps or order.first_step(options.epochs)
    options, config, block, recipe = settle(options, config, block, total_steps)

    # The objective, the towers as lists of layers, and which of them run where.
    loss = build_loss(options.loss, options.label_smoothing)
    towers = towers_of(vars(options), data.tokenizer)
    objective = objective_of(towers, pairs_of(options.pairs, loss, Matching() if options.fusion else None))
    patch_size = next((tower.config.get("patch_size") for tower in towers if tower.branch == "image"), None)
    buckets = image_buckets(data, options, patch_size)
    pretrained = {"image": options.image_weights, "text": options.text_weights}
    weights = {
        tower.branch: open_weights(tower.branch, pretrained[tower.branch], tower) for tower in towers if pretrained.get(tower.branch)
    }
    if options.imported:
        weights = dict.fromkeys(pretrained, open_model(options.imported, *towers[:2]))

    def build_layer(spec):
        return spec.build(options.seed, weights.get(spec.branch))

    costs = run_costs(towers, build_layer, config, block, data, options, processes, folder)
    plan = plan_run(config, block, processes.world_size, costs)
    run.watchdog.describe = plan.graph.describe_rank
    training = training_identity(options, config, asdict(block), plan)
    folder.refuse_other_run(options, training)
    show(plan.reasons, first and bool(plan.reasons))
    show(recipe, first and bool(recipe))
    show(describe_pixels(options), first and bool(options.image_weights or options.imported))
    show(f"{plan.describe()}   {config_file.name}   {folder.path}", first)
    if buckets is not None:
        show(f"pictures of {', '.join(f'{h}×{w}' for h, w in buckets.sizes)} pixels (height × width)", first)

    # Which samples of a global batch make which micro-batch, and DeepSpeed around the stage of this rank.
    with first_rank_first():
        balance = make_balance(dealing(block), plan, costs, data, order, buckets, patch_size, options, folder.path, progress=first)
    engine = build_engine(
        plan,
        config,
        layers={tower.branch: tower.specs for tower in towers},
        build_layer=build_layer,
        objective=objective,
        embed_dim=options.embed_dim,
        total_num_steps=total_steps,
        seed=options.seed,
        timeout=processes.timeout,
        constant_shapes=balance.constant_shapes,
        equal_shares=balance.equal_shares,
        source_starts=data.source_starts,
        clock=clock,
    )

    # Where a run goes on: its state.
    balancer = Balancer(balance, engine.replica, engine.place.name, workers)
    loss_weights = LossWeights.of(options, objective, data.held_out)
    step = saved_step = state["step"]
    if checkpoint is not None:
        notices += resume(engine, checkpoint, order, total_steps)
        balancer.go_on_from(state["balance"], step)
        loss_weights.go_on_from(state["loss_weights"])
    show("\n".join(notices), first and bool(notices))
    folder.forget_after(step if checkpoint else -1)  # from the start: also the evaluation before it
    if first:
        folder.done.unlink(missing_ok=True)
    record = folder.write_config(options, training, plan, data.summary(), towers, total_steps)
    checkpoints = CheckpointWriter(folder.checkpoints, record, Keep(options.keep_checkpoints, options.keep_every))
    trace = TraceFile(folder.path / "trace.json")
    tracker = Tracker(options.wandb, options.wandb_project, folder.path, {**training, "batches": record["batches"]}, first)

    if options.explain_balance:
        steps = range(step, min(step + options.explain_balance, total_steps))
        show(explain_dealing(balance, balancer.settings, steps), first)

    # What this rank feeds its stage with: only the modality that enters there.
    feeding = Feeding(
        data, engine, options, workers, on_gpu, folder, balancer, patch_size, loss_weights_of(data, weighting(block), lengths)
    )
    batches = feeding.training(step, total_steps)
    evaluations = {}

    def tell_loss_weights(reason: str | None) -> None:
        if reason:
            folder.log_loss_weights({"step": step, **loss_weights.weights(), "reason": reason})
            show(f"step {step}: {reason}", first)

    def weigh(found: Mapping[str, Mapping[str, float]]) -> None:
        of_the_run = {name: found[name] for name in data.held_out}  # not of averaged weights
        tell_loss_weights(loss_weights.after_evaluation(step, of_the_run))

    def evaluate() -> None:
        evaluations[step], found = {}, {}
        measured = {"": nullcontext()} | ({"ema/": engine.averaged_weights()} if options.eval_ema else {})
        for prefix, in_place in measured.items():
            with in_place:
                for name, values in feeding.evaluate_held_out():
                    found[prefix + name] = values
                    evaluations[step] |= {f"{prefix}{name}/{key}": value for key, value in values.items()}
                    folder.log({"step": step, "epoch": order.epochs_before(step), "held_out": prefix + name, **values})
        tracker.log({"step": step, **evaluations[step]})
        weigh(found)

    def is_due(every: int | None) -> bool:  # None: once an epoch
        return step % every == 0 if every else order.ends_epoch(step)

    # The loop.
    run.watchdog.follow(lambda: engine.instructions_done + checkpoints.signs_of_life(), 60 * options.stall_limit)
    expected = {prefix + name for name in feeding.held_out_sizes() for prefix in ("", *(["ema/"] if options.eval_ema else []))}
    if step in (0, total_steps) or is_due(options.eval_every):
        if from_first_rank(first and folder.lacks(step, expected)):
            evaluate()  # of the untrained towers; and what the run before, which ended in the middle of it, had still to do
        elif options.loss_weights == "alignment":  # a checkpoint is written before the evaluation of its step
            weigh(from_first_rank(first and folder.evaluated(step)))
    sources, stopping = source_names(options.data), False
    with tqdm(total=total_steps, initial=step, unit="step", disable=not first, dynamic_ncols=True, mininterval=progress_interval()) as bar:
        while step < total_steps and not stopping:
            start = clock()
            metrics = engine.train_batch(batches, bool(stop), feeding.counts, **balancer.shape(step), loss_weights=loss_weights.weights())
            step, step_s, stopping = engine.global_steps, clock() - start, metrics.stop_requested
            line = step_line(metrics, step, step_s, balance, balancer.settings, sources)
            folder.log(line)
            tracker.log(line)
            if metrics.bad_step is not None:
                folder.note_bad_step(step, metrics.loss, metrics.bad_step, data.source.identity)
                folder.refuse_more_bad_steps(metrics.bad_steps_in_a_row, block.max_bad_steps, checkpoints.newest)
            seen = balancer.after_step(engine, metrics)
            if seen:
                folder.log_look(seen)
                for reason in filter(None, (seen["reason"], seen.get("mix", {}).get("reason"))):
                    show(f"step {step}: {reason}", first)
            tell_loss_weights(loss_weights.after_step(step, metrics.losses))
            if is_sampled(step, options.trace_every):
                ranks = engine.gather_trace()
                if first:
                    trace.add(step, engine.recorder.started_at_s, ranks)
            bar.set_postfix(loss=f"{metrics.loss:.3f}", samples_per_s=f"{line['samples_per_s']:.0f}", refresh=False)
            bar.update()
            if is_due(options.save_every) or step == total_steps or stopping:
                decided = {"balance": balancer.state(), "loss_weights": loss_weights.state()}
                checkpoints.save(engine, {"step": step, "batch_sizes": order.batch_sizes(step), **decided})
                saved_step = step
            if step == total_steps or (is_due(options.eval_every) and not stopping):  # whoever asks for an end may not wait for it
                evaluate()

    checkpoints.finish()
    done = step >= total_steps
    if done and evaluations:
        before_and_after = [evaluations[s] for s in sorted({min(evaluations), max(evaluations)})]
        show(retrieval_report("Zero-shot retrieval of held-out samples", before_and_after, feeding.held_out_sizes()), first)
    ended = "done" if done else f"stopped ({stop.reason or 'as another rank was asked to'}; the same command with this --run-dir goes on)"
    show(f"{ended} at step {step} of {total_steps}   checkpoint {folder.checkpoints / step_folder(saved_step)}", first)
    if first and done:
        folder.done.touch()
    stop.forget()
    run.watchdog.stop()
    if batches is not None:
        batches.close()
    tracker.finish(0 if done else 1)
    stop_processes()
    return 0 if done else STOPPED


if __name__ == "__main__":
    run = Run()
    try:
        status = main(parse_options(), run)
    except Exception as error:
        report_and_exit("train.py", error, run)
    sys.exit(status)
