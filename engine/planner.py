"""From a configuration and a world size to a plan: layout, stages, replicas, micro-batches. Plain Python, no process group.

The arithmetic of a batch, per branch:

    train_batch_size = micro_batch_size × num_micro_batches × replicas
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from engine.config import AUTO, BranchesBlock
from engine.topology import BRANCHES, StageGraph, balanced_cuts, chain, fork, merged


@dataclass(frozen=True)
class BranchBatch:
    """How the global batch is dealt to one branch: every replica runs `num_micro_batches` of `micro_batch_size` samples."""

    replicas: int
    micro_batch_size: int
    num_micro_batches: int

    @property
    def global_batch_size(self) -> int:
        return self.replicas * self.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True)
class RunPlan:
    """What was decided for this world: the stage graph, the deal of the batch, the schedule and the clipping limits."""

    graph: StageGraph
    batches: Mapping[str, BranchBatch]
    schedule: str
    max_grad_norm: Mapping[str, float]


def plan_run(config: Mapping[str, Any], block: BranchesBlock, world_size: int, layer_costs: Mapping[str, Sequence[float]]) -> RunPlan:
    """Decide layout, stages, replicas and micro-batches for `world_size` ranks.

    `layer_costs[branch][i]` is the cost of layer i per sample, in any unit common to both branches (counted FLOPs).
    "auto": one rank is merged, more are a fork of one stage per branch, whose ranks are divided so that the slower branch
    is as fast as possible among the divisions that the global batch allows.
    """
    layout = ("merged" if world_size == 1 else "fork") if block.layout == AUTO else block.layout
    stages = _resolve_stages(block, layout, layer_costs)
    per_sample = {branch: sum(layer_costs[branch]) for branch in BRANCHES}
    if layout == "fork":
        replicas = _fork_replicas(config, block, stages, world_size, per_sample)
        cuts = {branch: balanced_cuts(layer_costs[branch], stages[branch]) for branch in BRANCHES}
        graph = fork(cuts, replicas)
    else:
        line = stages["merged"] if layout == "merged" else stages["image"] + stages["text"]
        count = _line_replicas(block, layout, line, world_size)
        replicas = dict.fromkeys(BRANCHES, count)
        parts = dict.fromkeys(BRANCHES, line) if layout == "merged" else stages
        cuts = {branch: balanced_cuts(layer_costs[branch], parts[branch]) for branch in BRANCHES}
        graph = (merged if layout == "merged" else chain)(cuts, count)
    depth = stages if layout == "fork" else dict.fromkeys(BRANCHES, line)
    batches = {branch: _deal(config, block, branch, replicas[branch], depth[branch]) for branch in BRANCHES}
    if layout != "fork" and batches["image"] != batches["text"]:
        raise ValueError(
            f"branches.micro_batch_size: {block.micro_batch_size} differs between the branches, which only a fork allows; give one number"
        )
    if block.schedule == "per_micro_batch" and batches["image"] != batches["text"]:
        deals = ", ".join(f"{b} {d.micro_batch_size} × {d.num_micro_batches} × {d.replicas}" for b, d in batches.items())
        raise ValueError(
            f'branches.schedule: "per_micro_batch" compares the samples of one micro-batch, so both branches need the same micro-batches, '
            f"but micro × num × replicas are {deals}; give equal replicas and micro_batch_size, or use batch_sync"
        )
    return RunPlan(graph, batches, block.schedule, block.max_grad_norm)


def deepspeed_config(config: Mapping[str, Any], batch: BranchBatch, total_num_steps: int) -> dict[str, Any]:
    """The dictionary DeepSpeed reads on a rank of this branch: the file's keys with the branch's batch filled in."""
    resolved = copy.deepcopy(dict(config))
    resolved["train_batch_size"] = batch.global_batch_size
    resolved["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
    resolved["gradient_accumulation_steps"] = batch.num_micro_batches
    resolved["gradient_clipping"] = 0.0  # DeepSpeed's default is 1.0, over all parameters of a stage; engine/clipping.py clips by group
    resolved.setdefault("steps_per_print", None)
    if "pipeline" in resolved:
        resolved["pipeline"]["use_reentrant"] = False
    scheduler = resolved.get("scheduler", {}).get("params", {})
    for key, value in scheduler.items():
        if value == AUTO:
            if key != "total_num_steps":
                raise ValueError(f'scheduler.params.{key}: "auto" is only known for total_num_steps; give a number')
            scheduler[key] = total_num_steps
    return resolved


def _resolve_stages(block: BranchesBlock, layout: str, layer_costs: Mapping[str, Sequence[float]]) -> dict[str, int]:
    names = ("merged",) if layout == "merged" else BRANCHES
    stages = dict.fromkeys(names, 1) if block.stages == AUTO else dict(block.stages)
    if set(stages) != set(names):
        example = '{"merged": 2}' if layout == "merged" else '{"image": 2, "text": 1}'
        raise ValueError(f"branches.stages: {stages} does not fit layout {layout!r}; write for example {example}")
    for name, count in stages.items():
        for branch in BRANCHES if name == "merged" else (name,):
            if count > len(layer_costs[branch]):
                raise ValueError(
                    f"branches.stages: {count} {name} stages, but the {branch} tower has {len(layer_costs[branch])} layers and every "
                    f"stage needs one; use at most {len(layer_costs[branch])}"
                )
    return stages


def _fork_replicas(
    config: Mapping[str, Any], block: BranchesBlock, stages: Mapping[str, int], world_size: int, per_sample: Mapping[str, float]
) -> dict[str, int]:
    if isinstance(block.replicas, int):
        raise ValueError(f'branches.replicas: {block.replicas} for a fork; give both branches theirs: {{"image": …, "text": …}}')
    if block.replicas != AUTO:
        replicas = dict(block.replicas)
        if set(replicas) != set(BRANCHES):
            raise ValueError(f'branches.replicas: {replicas}; give both branches theirs: {{"image": …, "text": …}}')
        need = sum(stages[b] * replicas[b] for b in BRANCHES)
        if need != world_size:
            terms = " + ".join(f"{b} {stages[b]}×{replicas[b]}" for b in BRANCHES)
            raise ValueError(
                f"stages × replicas ({terms}) fill {need} ranks, but there are {world_size}; start {need} ranks or change branches.replicas"
            )
        return replicas
    fits = [
        {"image": i, "text": (world_size - stages["image"] * i) // stages["text"]}
        for i in range(1, world_size // stages["image"] + 1)
        if world_size > stages["image"] * i and (world_size - stages["image"] * i) % stages["text"] == 0
    ]
    if not fits:
        raise ValueError(
            f"stages image={stages['image']} text={stages['text']} cannot fill {world_size} ranks with whole replicas; use "
            f"{stages['image'] + stages['text']} ranks, or fewer stages"
        )
    possible = [r for r in fits if all(_can_deal(config, block, b, r[b], stages[b]) for b in BRANCHES)]
    if not possible and len(fits) == 1:
        return fits[0]  # the deal will say what does not fit
    if not possible:
        raise ValueError(
            f"train_batch_size {config['train_batch_size']} is divisible by none of the ways to divide {world_size} ranks between image and "
            f"text ({', '.join('{image}+{text}'.format(**r) for r in fits)}) and the micro-batch sizes given; choose a multiple of both, for "
            f"example {lcm(*fits[0].values())}"
        )
    return min(possible, key=lambda r: max(per_sample[b] / (stages[b] * r[b]) for b in BRANCHES))


def _can_deal(config: Mapping[str, Any], block: BranchesBlock, branch: str, replicas: int, depth: int) -> bool:
    try:
        return bool(_deal(config, block, branch, replicas, depth))
    except ValueError:
        return False


def _line_replicas(block: BranchesBlock, layout: str, line: int, world_size: int) -> int:
    if isinstance(block.replicas, dict):
        raise ValueError(f"branches.replicas: {block.replicas}, but all stages of a {layout} have equally many; give one number")
    replicas = world_size // line if block.replicas == AUTO else block.replicas
    if replicas * line != world_size or replicas == 0:
        asked = "" if block.replicas == AUTO else f" and {block.replicas} replicas"
        raise ValueError(
            f"{layout} of {line} stages{asked} does not fill {world_size} ranks; use {max(replicas, 1) * line} ranks or change branches.stages"
        )
    return replicas


def _deal(config: Mapping[str, Any], block: BranchesBlock, branch: str, replicas: int, depth: int) -> BranchBatch:
    """The batch of one branch; `depth` stages lie between its entry and the loss."""
    global_batch_size = config["train_batch_size"]
    share, rest = divmod(global_batch_size, replicas)
    if rest:
        raise ValueError(
            f"train_batch_size {global_batch_size} cannot be dealt to {replicas} {branch} replicas in equal shares; "
            f"use {global_batch_size - rest} or {global_batch_size - rest + replicas}"
        )
    size = block.micro_batch_size
    if isinstance(size, dict):
        size = size.get(branch, AUTO)
    if size == AUTO:
        size = config.get("train_micro_batch_size_per_gpu", AUTO)
    if size == AUTO:
        number = config.get("gradient_accumulation_steps", AUTO)
        if number == AUTO:
            # One micro-batch keeps a single stage busy; a pipeline of S stages is idle (S−1)/(M+S−1) of its time.
            wish = 1 if depth == 1 else 4 * depth
            number = max(n for n in range(1, min(wish, share) + 1) if share % n == 0)
        size, rest = divmod(share, number)
        if rest or size == 0:
            raise ValueError(
                f"gradient_accumulation_steps {number} does not divide the {share} samples of a {branch} replica "
                f"({global_batch_size} over {replicas}); use a divisor of {share}"
            )
    if share % size:
        raise ValueError(
            f"{branch}: micro_batch_size {size} × num_micro_batches × {replicas} replicas cannot give train_batch_size {global_batch_size}: "
            f"{share} samples per replica are not a multiple of {size}; use {_near_divisor(share, size)}"
        )
    return BranchBatch(replicas, size, share // size)


def _near_divisor(share: int, size: int) -> int:
    return min((d for d in range(1, share + 1) if share % d == 0), key=lambda d: (abs(d - size), d))
