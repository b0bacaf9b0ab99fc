"""The JSON that says how to run: DeepSpeed's own keys plus one strict block, `branches`. Plain Python, no process group.

`read_config` checks the file, `plan_run` fills in what is "auto" for a world size and the costs of the layers, and
`deepspeed_config` gives each rank the dictionary DeepSpeed reads. The arithmetic of a batch, per branch:

    train_batch_size = micro_batch_size × num_micro_batches × replicas
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.clipping import GROUPS
from engine.schedule import SCHEDULES
from engine.topology import BRANCHES, LAYOUTS, StageGraph, balanced_cuts, chain, fork, merged

AUTO = "auto"
# DeepSpeed's keys that mean something under this engine; it accepts unknown ones silently, we do not.
DEEPSPEED_KEYS = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "data_types",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "gradient_clipping",
    "steps_per_print",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "wall_clock_breakdown",
    "memory_breakdown",
    "comms_logger",
    "tensorboard",
    "csv_monitor",
]
NOT_WITH_A_PIPELINE = {
    "flops_profiler": "DeepSpeed's profiler does not run under its pipeline engine; remove it",
    "autotuning": "DeepSpeed's autotuner does not run under its pipeline engine; remove it",
    "elasticity": "DeepSpeed removed this key; remove it",
    "curriculum_learning": "DeepSpeed removed this key; remove it",
    "amp": 'use "fp16" or "bf16"',
    "torch_autocast": 'use "fp16" or "bf16"',
    "wandb": "W&B is an option of train.py: --wandb online|offline|disabled",
    "activation_checkpointing": "not available yet; remove it",
    "pipeline": 'the pipeline is described in the "branches" block; remove it',
}


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
class BranchesBlock:
    """The `branches` block as written. Checked when made."""

    layout: str = AUTO
    stages: Any = AUTO
    replicas: Any = AUTO
    micro_batch_size: Any = AUTO
    schedule: str = "batch_sync"
    gradient_clipping: Any = None

    def __post_init__(self):
        _choice("layout", self.layout, (AUTO, *LAYOUTS))
        _choice("schedule", self.schedule, tuple(SCHEDULES))
        _counts("stages", self.stages, (*BRANCHES, "merged"), plain_number=False)
        _counts("replicas", self.replicas, BRANCHES)
        _counts("micro_batch_size", self.micro_batch_size, BRANCHES, auto_inside=True)
        for group, limit in (self.gradient_clipping or {}).items():
            _choice("gradient_clipping: group", group, GROUPS)
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 0:
                raise ValueError(f"branches.gradient_clipping.{group}: got {limit!r}; a limit is a number ≥ 0, and 0 means no clipping")

    @property
    def max_grad_norm(self) -> dict[str, float]:
        limits = dict.fromkeys(GROUPS, 1.0) if self.gradient_clipping is None else self.gradient_clipping
        return {group: float(limits.get(group, 0.0)) for group in GROUPS}


@dataclass(frozen=True)
class RunPlan:
    """What was decided for this world: the stage graph, the deal of the batch, the schedule and the clipping limits."""

    graph: StageGraph
    batches: Mapping[str, BranchBatch]
    schedule: str
    max_grad_norm: Mapping[str, float]


def read_config(path: str | Path) -> tuple[dict[str, Any], BranchesBlock]:
    """DeepSpeed's part of a JSON file and the `branches` block. Raises ValueError or FileNotFoundError with file and key."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.json")], 1) if path.parent.is_dir() else []
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise FileNotFoundError(f"--deepspeed_config {path}: no such file{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}; a configuration is a JSON object")
    try:
        return check_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_config(config: dict[str, Any]) -> tuple[dict[str, Any], BranchesBlock]:
    """Refuse what is unknown, misspelt or impossible under a pipeline; split off the `branches` block."""
    config = copy.deepcopy(config)
    block = config.pop("branches", {})
    for key in config:
        if key in NOT_WITH_A_PIPELINE:
            raise ValueError(f"key {key!r}: {NOT_WITH_A_PIPELINE[key]}")
        if key not in DEEPSPEED_KEYS:
            raise ValueError(f"unknown key {key!r}{_nearest(key, [*DEEPSPEED_KEYS, 'branches'])}")
    if not isinstance(block, dict):
        raise ValueError(f"branches: got {block!r}; it is an object with the keys {_keys(BranchesBlock)}")
    for key in block:
        if key not in _keys(BranchesBlock):
            raise ValueError(f"unknown key 'branches.{key}'{_nearest(key, _keys(BranchesBlock))}")
    _check_precision_and_zero(config)
    if config.get("gradient_clipping", 0):
        limit = config["gradient_clipping"]
        raise ValueError(
            f"gradient_clipping: {limit} clips all parameters as one; say it in groups: "
            f'"branches": {{"gradient_clipping": {{"image": {limit}, "text": {limit}, "head": {limit}}}}}'
        )
    if not isinstance(config.get("train_batch_size"), int) or config["train_batch_size"] < 2:
        raise ValueError(
            f"train_batch_size: got {config.get('train_batch_size')!r}; the global batch of a contrastive loss is a whole number of at least 2"
        )
    if "optimizer" not in config:
        raise ValueError('no "optimizer"; for example "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": true}}')
    return config, BranchesBlock(**block)


def _check_precision_and_zero(config: Mapping[str, Any]) -> None:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1):
        raise ValueError(
            f"zero_optimization.stage: {stage} shards gradients or parameters, which a pipeline needs whole between its micro-batches; use 0 or 1"
        )
    fp16, bf16 = (bool(config.get(key, {}).get("enabled", False)) for key in ("fp16", "bf16"))
    if fp16 and bf16:
        raise ValueError("fp16 and bf16 are both enabled; enable one of them, or none for fp32")
    if fp16 and stage == 0:
        raise ValueError('fp16 with zero_optimization.stage 0: the loss would not be scaled; use "zero_optimization": {"stage": 1}')
    if bf16 and config.get("data_types", {}).get("grad_accum_dtype") != "fp32":
        raise ValueError('bf16 without "data_types": {"grad_accum_dtype": "fp32"} would add up gradients in bf16; add that block')


def check_hardware(config: Mapping[str, Any], fp16_supported: bool, bf16_supported: bool, device: str) -> None:
    """Refuse a precision the hardware does not have, before anything is built."""
    for key, supported in (("fp16", fp16_supported), ("bf16", bf16_supported)):
        if config.get(key, {}).get("enabled", False) and not supported:
            other = "ds_configs/cpu_fp32.json" if device == "cpu" else "ds_configs/zero1_fp32.json"
            raise ValueError(f"{key} is enabled, but this hardware ({device}) does not compute in {key}; use --deepspeed_config {other}")


def plan_run(config: Mapping[str, Any], block: BranchesBlock, world_size: int, layer_costs: Mapping[str, Sequence[float]]) -> RunPlan:
    """Decide layout, stages, replicas and micro-batches for `world_size` ranks.

    `layer_costs[branch][i]` is the cost of layer i per sample, in any unit common to both branches (counted FLOPs).
    "auto": one rank is merged, more are a fork of one stage per branch, whose ranks are divided so that the slower branch
    is as fast as possible among the divisions that the global batch allows.
    """
    layout = ("merged" if world_size == 1 else "fork") if block.layout == AUTO else block.layout
    stages = _resolve_stages(block, layout, layer_costs)
    per_sample = {branch: sum(layer_costs[branch]) for branch in BRANCHES}
    global_batch_size = config["train_batch_size"]
    if layout == "fork":
        replicas = _fork_replicas(block, stages, world_size, per_sample, global_batch_size)
        cuts = {branch: balanced_cuts(layer_costs[branch], stages[branch]) for branch in BRANCHES}
        graph = fork(cuts, replicas)
    else:
        line = stages["merged"] if layout == "merged" else stages["image"] + stages["text"]
        count = _line_replicas(block, layout, line, world_size)
        replicas = dict.fromkeys(BRANCHES, count)
        parts = dict.fromkeys(BRANCHES, line) if layout == "merged" else stages
        cuts = {branch: balanced_cuts(layer_costs[branch], parts[branch]) for branch in BRANCHES}
        graph = (merged if layout == "merged" else chain)(cuts, count)
    batches = {branch: _deal(config, block, branch, replicas[branch], graph, global_batch_size) for branch in BRANCHES}
    if layout != "fork" and batches["image"] != batches["text"]:
        raise ValueError(
            f"branches.micro_batch_size: {block.micro_batch_size} differs between the branches, which only a fork allows; give one number"
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
    block: BranchesBlock, stages: Mapping[str, int], world_size: int, per_sample: Mapping[str, float], global_batch_size: int
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
        {"image": i, "text": t}
        for i in range(1, world_size)
        for t in range(1, world_size)
        if stages["image"] * i + stages["text"] * t == world_size
    ]
    if not fits:
        raise ValueError(
            f"stages image={stages['image']} text={stages['text']} cannot fill {world_size} ranks with whole replicas; use "
            f"{stages['image'] + stages['text']} ranks, or fewer stages"
        )
    divides = [r for r in fits if all(global_batch_size % r[b] == 0 for b in BRANCHES)]
    if not divides:
        raise ValueError(
            f"train_batch_size {global_batch_size} is divisible by none of the ways to divide {world_size} ranks between image and text "
            f"({', '.join('{image}+{text}'.format(**r) for r in fits)}); choose a multiple of one of them, for example {_lcm(fits[0])}"
        )
    return min(divides, key=lambda r: max(per_sample[b] / (stages[b] * r[b]) for b in BRANCHES))


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


def _deal(
    config: Mapping[str, Any], block: BranchesBlock, branch: str, replicas: int, graph: StageGraph, global_batch_size: int
) -> BranchBatch:
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
            depth = sum(branch in stage.layers or graph.layout != "fork" for stage in graph.stages)
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


def _lcm(replicas: Mapping[str, int]) -> int:
    from math import lcm

    return lcm(*replicas.values())


def _keys(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


def _nearest(key: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, valid, 1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid keys: {', '.join(valid)}"


def _choice(name: str, value: Any, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"branches.{name}: unknown value {value!r}{_nearest(str(value), valid)}")


def _counts(name: str, value: Any, keys: Sequence[str], plain_number: bool = True, auto_inside: bool = False) -> None:
    """`value` is "auto", a positive whole number, or an object of those by branch."""
    if value == AUTO:
        return
    entries = value if isinstance(value, dict) else {"": value}
    if not plain_number and not isinstance(value, dict):
        raise ValueError(f'branches.{name}: got {value!r}; write "auto" or an object like {{"image": 2, "text": 1}}')
    for key, count in entries.items():
        if key:
            _choice(f"{name}: key", key, keys)
        if auto_inside and count == AUTO:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"branches.{name}{'.' + key if key else ''}: got {count!r}; it takes whole numbers of at least 1")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} stands twice")
    return dict(pairs)
