"""What to change in a run that does not fit the memory: what is not in use yet, and what the
planner predicts of it. Plain Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.reading import AUTO, BranchesBlock
from engine.planning.costs import CostModel
from engine.planning.planner import MAX_STAGES, BranchBatch, RunPlan, plan_run
from engine.processes.shortage import Shortage, size_in_words
from engine.schedule import recomputing_schedules
from engine.topology import Stage

# What a rank may be doing when memory runs out.
TRAINING, EVALUATION = "training", "evaluation"
BUILDING, RESUMING = "building its stage", "reading a checkpoint"
SAVING = "copying its state to host memory for a checkpoint"
AVERAGING = "exchanging the weights and their average"
_AFTER_BACKWARD = ("ReduceGrads", "OptimizerStep")  # the activations are gone
WORTH = 0.95  # what is advised leaves at most so much of the predicted bytes


@dataclass(frozen=True)
class Work:
    """What a rank was doing. `micro_batch` counts from 0, `step` from 1."""

    activity: str
    instruction: str | None = None
    micro_batch: int | None = None
    num_micro_batches: int = 0
    step: int = 0

    def describe(self) -> str:
        """Such as `in ForwardPass of micro-batch 3 (of 8, counted from 0), in step 12`."""
        if self.activity not in (TRAINING, EVALUATION):
            return f"while {self.activity}"
        training = self.activity == TRAINING
        where = f"step {self.step}" if training else "the evaluation of held-out samples"
        if self.instruction is None:
            return f"{'before or after the instructions of' if training else 'comparing embeddings in'} {where}"
        number = f" of micro-batch {self.micro_batch} (of {self.num_micro_batches}, counted from 0)"
        return f"in {self.instruction}{number if self.micro_batch is not None else ''}, in {where}"


@dataclass(frozen=True)
class RankSetup:
    """How a rank runs: the plan, DeepSpeed's part of the JSON file, and the stage of the rank.
    `on_gpu`: it computes on one."""

    plan: RunPlan
    config: Mapping[str, Any]
    stage: Stage
    on_gpu: bool

    @property
    def branch(self) -> str:
        return next(iter(self.stage.layers))

    @property
    def batch(self) -> BranchBatch:
        return self.plan.batches[self.branch]

    def fullest(self, of: str) -> float:
        """The bytes of one kind (`peak_bytes`, `state_bytes`) that the planner predicts, of the
        stage of this branch that has most of them."""
        return max(
            getattr(self.plan.predicted[s.stage_id], of)
            for s in self.plan.graph.stages
            if self.branch in s.layers
        )

    def after(self, remedy: Remedy) -> RankSetup | None:
        """As it would run with that changed and nothing else; the fullest stage of the branch.
        None: the planner refuses it."""
        keys = dict(remedy.keys or {})
        changes, config, costs = (
            keys.pop("branches", {}),
            _merged(self.config, keys),
            self.plan.costs,
        )
        machine = replace(
            costs.machine, memory_bytes=float("inf")
        )  # how much is needed is asked, not whether it fits
        costs = CostModel.of(
            costs.layers,
            machine,
            config,
            embed_dim=costs.embed_dim,
            pairs=costs.pairs,
            token_bytes=costs.token_bytes,
        )
        try:
            block = replace(_as_planned(self.plan), **changes)
            plan = plan_run(config, block, remedy.ranks or self.plan.graph.world_size, costs)
        except (ValueError, RuntimeError):
            return None
        stages = [stage for stage in plan.graph.stages if self.branch in stage.layers]
        return RankSetup(
            plan,
            config,
            max(stages, key=lambda s: plan.predicted[s.stage_id].peak_bytes),
            self.on_gpu,
        )


@dataclass(frozen=True)
class Remedy:
    """`keys`: what to change in the JSON file, if it is there; `words`: the rest of the advice.
    `ranks`: that it needs, if others than now; `predicted`: what comes of it."""

    words: str
    keys: Mapping[str, Any] | None = None
    ranks: int | None = None
    predicted: str = ""

    def describe(self) -> str:
        where = f" on {self.ranks} ranks" if self.ranks is not None else ""
        return (
            f"{json.dumps(self.keys)[1:-1]}{where}: {self.words}" if self.keys else self.words
        ) + self.predicted


def advice(setup: RankSetup, work: Work, shortage: Shortage) -> list[Remedy]:
    """What is not in use yet and needs less memory, each on top of those before it. What costs more
    comes later: time, then ranks.

    The planner says which: it must accept the change and predict clearly fewer bytes, of the whole
    peak of a training step, or, where the activations are not there, of weights, gradients and
    optimizer state. Evaluation is not simulated: there smaller micro-batches always help.
    """
    if shortage.on_gpu != setup.on_gpu:
        return _of_the_host()
    first = [] if not shortage.on_gpu else _of_the_allocator(shortage)
    if work.activity == SAVING and setup.on_gpu:
        return [*first, *_of_the_host()]
    if work.activity == EVALUATION and work.instruction is None:
        held_out = Remedy(
            "fewer held-out samples, whose embeddings are compared: a smaller --val-fraction, or "
            "other --val-data"
        )
        return [*first, held_out, *_of_state(setup)]
    if work.activity == EVALUATION:
        smaller = [
            remedy for remedy in smaller_micro_batches(setup) if setup.after(remedy) is not None
        ]
        return [*first, *smaller, *_of_state(setup)]
    if work.activity != TRAINING or work.instruction is None or work.instruction in _AFTER_BACKWARD:
        return [*first, *_of_state(setup)]
    at_loss = (
        work.instruction == "ComputeLoss" and not setup.plan.schedule_type.loss_per_micro_batch
    )
    keeps_nothing = setup.plan.schedule_type.recomputes and setup.batch.num_kept == 0
    found = _of_state(setup) if at_loss and keeps_nothing else _of_a_pass(setup)
    batch_size = Remedy(
        'a smaller "train_batch_size", whose embeddings the loss holds; it also changes what is trained'
    )
    return [*first, *found, *([batch_size] if at_loss else [])]


def smaller_size(size: int, share: int) -> int | None:
    """Half of a micro-batch size, or the nearest below it that divides the `share` of a replica
    evenly; None: there is none."""
    return max((each for each in range(1, size // 2 + 1) if share % each == 0), default=None)


# -- in the JSON file


def _of_a_pass(setup: RankSetup) -> list[Remedy]:
    makers = (
        recomputing,
        fewer_kept,
        smaller_micro_batches,
        checkpoints,
        shared_out,
        offloaded,
        more_stages,
    )
    return list(_on_top(setup, makers, "peak_bytes", "; predicted {} at most"))


def _of_state(setup: RankSetup) -> list[Remedy]:
    return list(
        _on_top(
            setup, (shared_out, offloaded, more_stages), "state_bytes", "; predicted {} of state"
        )
    )


def _on_top(
    setup: RankSetup, makers: Sequence[Callable[[RankSetup], Iterable[Remedy]]], of: str, words: str
) -> Iterator[Remedy]:
    """Of each maker's remedies the first that saves enough."""
    for maker in makers:
        for remedy in maker(setup):
            changed = setup.after(remedy)
            if changed is not None and changed.fullest(of) <= WORTH * setup.fullest(of):
                yield replace(remedy, predicted=words.format(size_in_words(changed.fullest(of))))
                setup = changed
                break


def recomputing(setup: RankSetup) -> list[Remedy]:
    """A schedule that recomputes, with the same loss. With smaller micro-batches, where these are
    too few to hold less than all of them."""
    own = setup.plan.schedule_type
    if own.recomputes or own.loss_per_micro_batch or not setup.stage.has_backward:
        return []
    number = setup.batch.num_micro_batches
    held = min(number, setup.stage.num_downstream + 1)
    words = f"the activations of {held} micro-batch{'es' * (held > 1)} are held instead of {number}, and each forward is computed twice"
    keys = {"schedule": recomputing_schedules()[0]}
    if held == number:
        smaller = smaller_micro_batches(setup)
        if not smaller:
            return []
        words = f"{smaller[0].words}; not all micro-batches' activations are held then, and each forward is computed twice"
        keys |= (smaller[0].keys or {})["branches"]
    return [Remedy(words, {"branches": keys})]


def fewer_kept(setup: RankSetup) -> list[Remedy]:
    number = setup.batch.num_kept
    if not setup.plan.schedule_type.recomputes or not number:
        return []
    kept = _by_branch(
        setup, {branch: batch.num_kept for branch, batch in setup.plan.batches.items()}, number // 2
    )
    keys = {"schedule": setup.plan.schedule, "kept_micro_batches": kept}
    return [Remedy(f"instead of {number} that keep their activations", {"branches": keys})]


def smaller_micro_batches(setup: RankSetup) -> list[Remedy]:
    batch = setup.batch
    smaller = smaller_size(batch.micro_batch_size, batch.micro_batch_size * batch.num_micro_batches)
    if smaller is None:
        return []
    words = f"instead of {batch.micro_batch_size}"
    if setup.plan.schedule_type.loss_per_micro_batch:
        words += ", which also leaves each sample fewer negatives"
    if setup.config.get("gradient_accumulation_steps", AUTO) != AUTO:
        words += ', in the place of "gradient_accumulation_steps"'
    sizes = {branch: own.micro_batch_size for branch, own in setup.plan.batches.items()}
    return [Remedy(words, {"branches": {"micro_batch_size": _by_branch(setup, sizes, smaller)}})]


def checkpoints(setup: RankSetup) -> list[Remedy]:
    if (
        setup.config.get("pipeline", {}).get("activation_checkpoint_interval", 0)
        or not setup.stage.has_backward
    ):
        return []
    return [
        Remedy(
            "each layer keeps its input only, and runs again in the backward",
            {"pipeline": {"activation_checkpoint_interval": 1}},
        )
    ]


def shared_out(setup: RankSetup) -> list[Remedy]:
    """ZeRO-1, for the optimizer's state."""
    if setup.config.get("zero_optimization", {}).get("stage", 0) or setup.stage.replicas == 1:
        return []
    words = f"the {setup.stage.replicas} replicas of {setup.stage.name} share out the state of the optimizer"
    return [Remedy(words, {"zero_optimization": {"stage": 1}})]


def offloaded(setup: RankSetup) -> list[Remedy]:
    zero = setup.config.get("zero_optimization", {})
    if (
        not setup.on_gpu
        or zero.get("stage", 0) != 1
        or (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    ):
        return []
    return [
        Remedy(
            "the optimizer's state and its step move to the CPU",
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        )
    ]


def more_stages(setup: RankSetup) -> Iterator[Remedy]:
    """For this stage's branch, with the replicas that it has; from one more on, since the fullest
    of one more may hold as many layers."""
    stages, world_size = _stages(setup.plan), setup.plan.graph.world_size
    name = "merged" if setup.plan.graph.layout == "merged" else setup.branch
    most = min(MAX_STAGES, *(len(setup.plan.trainable[branch]) for branch in setup.stage.layers))
    for number in range(stages[name] + 1, most + 1):
        ranks = world_size + (number - stages[name]) * setup.stage.replicas
        words = f"instead of {world_size}, of which each holds fewer layers"
        yield Remedy(words, {"branches": {"stages": {**stages, name: number}}}, ranks)


def _by_branch(setup: RankSetup, values: Mapping[str, int], changed: int) -> Any:
    """As the `branches` block takes it: one number, or in a fork one for each branch."""
    if setup.plan.graph.layout != "fork" or setup.plan.schedule_type.loss_per_micro_batch:
        return changed
    return {**values, setup.branch: changed}


def _as_planned(plan: RunPlan) -> BranchesBlock:
    """The block, with every choice that it left open made as the plan has it."""
    fork = plan.graph.layout == "fork"

    def written(values: Mapping[str, int]) -> Any:
        return dict(values) if fork else next(iter(values.values()))

    kept = {branch: batch.num_kept for branch, batch in plan.batches.items()}
    return replace(
        plan.block,
        layout=plan.graph.layout,
        stages=_stages(plan),
        replicas=written({branch: plan.graph.tail(branch).replicas for branch in plan.batches}),
        micro_batch_size=written(
            {branch: batch.micro_batch_size for branch, batch in plan.batches.items()}
        ),
        schedule=plan.schedule,
        kept_micro_batches=written(kept) if plan.schedule_type.recomputes else None,
    )


def _stages(plan: RunPlan) -> dict[str, int]:
    if plan.graph.layout == "merged":
        return {"merged": len(plan.graph.stages)}
    return {
        branch: sum(branch in stage.layers for stage in plan.graph.stages)
        for branch in plan.batches
    }


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged


# -- elsewhere


def _of_the_allocator(shortage: Shortage) -> list[Remedy]:
    found = []
    if shortage.others and shortage.would_fit_alone:
        found.append(
            Remedy(f"end the other processes on {shortage.device}: without them it would fit")
        )
    asked, cached = shortage.asked, shortage.cached
    if shortage.can_expand and asked is not None and cached is not None and cached >= asked:
        words = "torch had reserved enough, in pieces that were too small"
        found.append(
            Remedy(f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: {words}")
        )
    return found


def _of_the_host() -> list[Remedy]:
    return [
        Remedy(
            "the machine's memory ran out, not the GPU's: give fewer --workers, fewer ranks on "
            "this machine, or more memory to it"
        )
    ]
