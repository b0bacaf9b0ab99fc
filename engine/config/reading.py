"""The JSON that says how to run: DeepSpeed's own keys plus one strict block, `branches`. Plain
Python, no process group.

`read_config` reads a file and refuses what is unknown, misspelt or impossible under a pipeline;
what is "auto" in it is decided by `engine/planning/planner.py`.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator

from common.blocks import Count, block, one_of, read_block, refuse_other_word, refuse_unknown
from engine.checks import AUTO, Counts, Kept, Sizes
from engine.config.deepspeed_keys import check_keys
from engine.config.implied import zero_stage
from engine.optimizer.averaging import AverageBlock, average_block
from engine.optimizer.classes import check_optimizer, check_schedule
from engine.optimizer.clipping_rules import HEAD, ClippingRule, clipping_rules
from engine.optimizer.locking import LockedBlock, locked_block
from engine.optimizer.parameter_groups import OptimizerGroups, check_groups, optimizer_groups
from engine.optimizer.preview import preview
from engine.processes.communication import COMMUNICATION
from engine.schedule import (
    REMOVED_SCHEDULES,
    SCHEDULES,
    exact_schedules,
    recomputing_schedules,
)
from engine.topology import LAYOUTS, REMOVED_LAYOUTS

# What may be "auto" besides what the planner searches and the length of the run:
# `engine/config/auto.py`.
AUTO_PLACES = (
    *(f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")),
    *(f"scheduler.params.{key}" for key in ("warmup_num_steps", "warmup_type")),
    *(f"branches.{key}" for key in ("gradient_clipping", "optimizer_groups")),
)
OF_DEEPSPEEDS_ENGINE = ("memory_breakdown", "comms_logger", "steps_per_print")  # its reports
NEEDS_GPU = ("lamb", "lion")  # optimizers, as DeepSpeed compares them
EXAMPLE = '"optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": true}}'
PREDICT, MEASURE = FITS = ("predict", "measure")  # what `branches.fit` may say
COMPILING = (AUTO, "off", "layers")  # what `branches.compile` may say
NOT_WITH_A_PIPELINE = {
    "flops_profiler": "DeepSpeed's profiler does not run under its pipeline engine; remove it",
    "autotuning": "DeepSpeed's autotuner does not run under its pipeline engine; remove it",
    "elasticity": "DeepSpeed removed this key; remove it",
    "curriculum_learning": "DeepSpeed removed this key; remove it",
    "amp": 'use "fp16" or "bf16"',
    "torch_autocast": 'use "fp16" or "bf16"',
    "wall_clock_breakdown": "DeepSpeed's timers do not run under this schedule; remove it, metrics.jsonl has step_s",
    "activation_checkpointing": "DeepSpeed's pipeline reads it elsewhere; write "
    '"pipeline": {"activation_checkpoint_interval": 1}, the number of layers between checkpoints',
}


def _known_word(
    value: Any, words: Sequence[str], removed: Mapping[str, str], instead: Sequence[str]
) -> Any:
    """The value. Raises ValueError for one that is not among these words, with the reason where it
    once was."""
    if isinstance(value, str) and value in removed.keys() - set(words):
        raise ValueError(
            f'"{value}" is no longer there, because {removed[value]}; use {" or ".join(instead)}'
        )
    return refuse_other_word(value, words)


def _is_schedule(value: Any) -> Any:
    return _known_word(value, (AUTO, *SCHEDULES), REMOVED_SCHEDULES, exact_schedules())


def _is_layout(value: Any) -> Any:
    return _known_word(value, (AUTO, *LAYOUTS), REMOVED_LAYOUTS, LAYOUTS)


def _is_compiling(value: Any) -> Any:
    for choice in value.values() if isinstance(value, dict) else [] if value is None else [value]:
        refuse_other_word(choice, COMPILING)
    return value


@block
class BranchesBlock:
    """The `branches` block as written. Checked when made, but for what the names of branches decide,
    see `check_names`, and for `balance`, `sample_weights` and `train`, which those read that load
    the data and build the towers (`launch/config/blocks.py`)."""

    layout: Annotated[str, BeforeValidator(_is_layout)] = AUTO
    stages: Counts = AUTO
    replicas: Counts = AUTO
    micro_batch_size: Sizes = AUTO
    schedule: Annotated[str, BeforeValidator(_is_schedule)] = AUTO
    kept_micro_batches: Kept = None
    fit: Annotated[str, one_of(*FITS)] = PREDICT
    gradient_clipping: Any = None
    optimizer_groups: Any = None
    locked: Any = None
    train: Any = None
    ema: Any = None
    max_bad_steps: Count = 10
    compile: Annotated[Any, BeforeValidator(_is_compiling)] = None
    communication: Annotated[str, one_of(*COMMUNICATION)] = AUTO
    balance: Any = None
    sample_weights: Any = None

    def __post_init__(self) -> None:
        kept = self.kept_micro_batches
        if kept is not None and self.schedule != AUTO and not SCHEDULES[self.schedule].recomputes:
            raise ValueError(
                f'kept_micro_batches: {kept!r} with schedule "{self.schedule}", which leaves no '
                "choice which activations to keep; remove the key, or use "
                f"{' or '.join(recomputing_schedules())}"
            )
        if self.fit == MEASURE and isinstance(self.micro_batch_size, int):
            raise ValueError(
                f'fit: "measure" looks for the largest micro-batch, and micro_batch_size is '
                f'{self.micro_batch_size}; write "auto" there, or "predict"'
            )
        if self.moves_work and (self.layout == "merged" or self.loss_per_micro_batch):
            raise ValueError(
                'balance: "feed" moves work between branches that run on different GPUs and meet '
                f'at one loss, which "{"merged" if self.layout == "merged" else self.schedule}" '
                'does not have; use "deal"'
            )

    def check_names(self, branches: Sequence[str]) -> None:
        """Raise ValueError for a key that should be one of these branches and is not, and for what is
        wrong in the blocks inside this one."""
        names = ("stages", "replicas", "micro_batch_size", "kept_micro_batches", "compile", "train")
        for name in names:
            value = getattr(self, name)
            if isinstance(value, dict) and "merged" in value and name != "stages":
                raise ValueError(
                    f'branches.{name}: got {json.dumps(value)}, but only "stages" has the key '
                    '"merged"; a merged stage holds a slice of every branch, so write one number: '
                    f'"{name}": {json.dumps(value["merged"])}'
                )
            known = (*branches, "merged") if name == "stages" else branches
            refuse_unknown(value if isinstance(value, dict) else (), known, f"branches.{name}")
        self.averaging()
        self.clipping(branches)
        self.learning(branches)
        locked = locked_block(self.locked, branches)
        for branch in self.train if isinstance(self.train, dict) else ():
            if locked.towers.get(branch):
                raise ValueError(
                    f"branches.locked.{branch}: with branches.train.{branch} the tower keeps its "
                    "weights already, and its adapters learn; remove one of the two"
                )

    def num_kept(self, branch: str) -> int | str:
        """How many micro-batches keep their activations under a schedule that recomputes. Where
        nothing is said: as many as fit, where also the schedule is the planner's choice; none where
        the schedule is given."""
        kept = self.kept_micro_batches
        if isinstance(kept, dict):
            kept = kept.get(branch)
        return kept if kept is not None else AUTO if self.schedule == AUTO else 0

    def compiling(self, branch: str) -> str:
        """Are the layers of this branch compiled: "off", "layers", or "auto": where that is
        measured to be faster."""
        choice = self.compile
        if isinstance(choice, dict):
            choice = choice.get(branch)
        return choice or "off"

    @property
    def loss_per_micro_batch(self) -> bool:
        """Is the loss computed for each micro-batch by itself? "auto" chooses no such schedule."""
        return self.schedule != AUTO and SCHEDULES[self.schedule].loss_per_micro_batch

    @property
    def moves_work(self) -> bool:
        """Does the `balance` block move work between branches? Then they must run on different
        ranks and meet at one loss."""
        return isinstance(self.balance, dict) and self.balance.get("strategy") == "feed"

    def clipping(self, branches: Sequence[str]) -> dict[str, ClippingRule]:
        """group -> rule. Raises ValueError for what is wrong in the `gradient_clipping` block."""
        written = self.gradient_clipping
        return clipping_rules({} if written == AUTO else written, branches)

    def learning(self, branches: Sequence[str]) -> OptimizerGroups:
        """The `optimizer_groups` block. Raises ValueError for what is wrong in it."""
        written = self.optimizer_groups
        return optimizer_groups(None if written == AUTO else written, branches)

    def locking(self) -> LockedBlock:
        """The `locked` block. Raises ValueError for what is wrong in it."""
        return locked_block(self.locked)

    def averaging(self) -> AverageBlock | None:
        """The `ema` block; None: the weights are not averaged. Raises ValueError for what is wrong
        in it."""
        return average_block(self.ema)


def changed(given: BranchesBlock, **values: Any) -> BranchesBlock:
    """A block with other values, checked as those of a file."""
    return read_block(BranchesBlock, {**asdict(given), **values}, "branches")


# key of the `branches` block -> what reads its value; ValueError for what is wrong in it
Readers = Mapping[str, Callable[[Any], Any]]


def read_config(
    path: str | Path,
    branches: Sequence[str],
    readers: Readers = MappingProxyType({}),
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> tuple[dict[str, Any], BranchesBlock]:
    """DeepSpeed's part of a JSON file and the `branches` block. `branches`: the names of the run's;
    `readers`: of the keys that are read elsewhere; `change`: of the file's content, before it is
    checked. Raises ValueError or FileNotFoundError with file and key."""
    path = Path(path)
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.json")]
        near = difflib.get_close_matches(path.name, beside, 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise FileNotFoundError(f"--deepspeed_config {path}: no such file{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{path}: holds a {type(config).__name__}; a configuration is a JSON object"
        )
    try:
        return check_config(change(config) if change else config, branches, readers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_config(
    config: dict[str, Any], branches: Sequence[str], readers: Readers = MappingProxyType({})
) -> tuple[dict[str, Any], BranchesBlock]:
    """Refuse what is unknown, misspelt or impossible under a pipeline; split off the `branches`
    block. `branches`, `readers`: as in `read_config`."""
    config = copy.deepcopy(config)
    written = config.pop("branches", {})
    config.pop("recipe", None)  # of the program that trains, which reads it by itself
    for key in config:
        if key in NOT_WITH_A_PIPELINE:
            raise ValueError(f"key {key!r}: {NOT_WITH_A_PIPELINE[key]}")
    checked = read_block(BranchesBlock, written, "branches", '{"layout": "fork"}')
    check_keys(config)
    if "optimizer" not in config:
        raise ValueError(f'no "optimizer"; for example {EXAMPLE}')
    _check_micro_batches(config, checked.micro_batch_size)
    _check_precision_and_zero(config)
    if zero_stage(config) > 1:
        _check_shared_gradients(config, checked)
    if zero_stage(config) == 3:
        _check_shared_weights(config, checked)
    if config.get("gradient_clipping", 0):
        _refuse_global_clipping(config["gradient_clipping"], checked.gradient_clipping, branches)
    _check_auto(config)
    check_optimizer(config)
    check_schedule(config)
    checked.check_names(branches)
    for key, reader in readers.items():
        reader(getattr(checked, key))
    groups = checked.learning(branches)
    check_groups(groups, config)
    preview(config, groups)  # for what the classes refuse
    return config, checked


def _refuse_global_clipping(limit: Any, written: Any, branches: Sequence[str]) -> NoReturn:
    """`written`: the block's own clipping, whose groups are named in the message."""
    groups: dict[str, Any] = dict.fromkeys((*branches, HEAD), limit)
    for group, rule in written.items() if isinstance(written, dict) else ():
        if group not in groups and "match" in rule:
            groups[group] = {"match": rule["match"], "kind": "norm", "limit": limit}
    raise ValueError(
        f"gradient_clipping: {limit} clips all parameters as one; say it in groups: "
        f'"branches": {{"gradient_clipping": {json.dumps(groups)}}}'
    )


def _check_auto(config: Mapping[str, Any]) -> None:
    places = (*AUTO_PLACES, "scheduler.params.total_num_steps")
    for where in ("optimizer.params", "scheduler.params"):
        known = [place.rsplit(".", 1)[1] for place in places if place.startswith(where)]
        params = config.get(where.split(".")[0], {}).get("params", {})
        for key in (key for key, value in params.items() if value == AUTO and key not in known):
            raise ValueError(
                f'{where}.{key}: "auto" is known for {", ".join(known)} only; give a value'
            )


def _check_micro_batches(config: Mapping[str, Any], of_branches: Any) -> None:
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [key for key in sizes if config.get(key, AUTO) != AUTO]
    given += ["branches.micro_batch_size"] if of_branches != AUTO else []
    if len(given) > 1 and "gradient_accumulation_steps" in given:
        raise ValueError(
            f"{' and '.join(given)}: the number of micro-batches follows from their size and "
            "train_batch_size; give one of them"
        )


def _check_precision_and_zero(config: Mapping[str, Any]) -> None:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage: got {stage}; use 0, 1, 2 or 3")
    _check_offload(config.get("zero_optimization", {}), stage)
    if config.get("zero_optimization", {}).get("round_robin_gradients", False):
        raise ValueError(
            "zero_optimization.round_robin_gradients: DeepSpeed does not say then which part of a "
            "parameter a replica steps, which clipping and checkpoints need; remove the key"
        )
    fp16, bf16 = (config.get(key, {}).get("enabled", False) for key in ("fp16", "bf16"))
    if fp16 and bf16:
        raise ValueError("fp16 and bf16 are both enabled; enable one of them, or none for fp32")
    if fp16 and stage == 0:
        raise ValueError(
            'fp16 with zero_optimization.stage 0: the loss would not be scaled; use "zero_optimization": {"stage": 1}'
        )
    if bf16 and config.get("data_types", {}).get("grad_accum_dtype") != "fp32":
        raise ValueError(
            'bf16 without "data_types": {"grad_accum_dtype": "fp32"} would add up gradients in bf16; add that block'
        )
    if bf16 and stage == 0:
        raise ValueError(
            "bf16 with zero_optimization.stage 0: DeepSpeed adds up gradients in fp32 with ZeRO-1 alone; "
            'use "zero_optimization": {"stage": 1}'
        )
    if config.get("zero_optimization", {}).get("compute_grad_norm", True) is not True:
        raise ValueError(
            "zero_optimization.compute_grad_norm: by the norm DeepSpeed sees that a step must be "
            "skipped, on all ranks alike; remove the key"
        )


def _check_shared_gradients(config: Mapping[str, Any], block: BranchesBlock) -> None:
    """What ZeRO-2 and ZeRO-3 do not go with."""
    stage, what = zero_stage(config), "gradients"
    if stage == 3:
        what = "weights and gradients"
    stages = block.stages.values() if isinstance(block.stages, dict) else [block.stages]
    if any(number != 1 for number in stages if number != AUTO):
        raise ValueError(
            f"zero_optimization.stage: {stage} shares out {what} between the micro-batches, which a "
            f'pipeline of several stages needs whole, but "branches" has "stages": '
            f'{json.dumps(block.stages)}; use "zero_optimization": {{"stage": 1}}, or one stage'
        )
    predivided = config.get("gradient_predivide_factor", 1.0) != 1.0
    if predivided or config.get("prescale_gradients", False):
        key = "gradient_predivide_factor" if predivided else "prescale_gradients"
        raise ValueError(
            f"{key}: there is none under ZeRO-{stage}; remove the key, or use "
            '"zero_optimization": {"stage": 1}'
        )
    if config.get("bf16", {}).get("check_grad_overflow", True) is not True:
        raise ValueError(
            f"bf16.check_grad_overflow: by this check ZeRO-{stage} sees that a step must be skipped, "
            "on all ranks alike; remove the key"
        )


def _check_shared_weights(config: Mapping[str, Any], block: BranchesBlock) -> None:
    """What else ZeRO-3 does not go with: it is torch's `fully_shard`, behind DeepSpeed's keys."""
    if block.fit == MEASURE:
        raise ValueError(
            'branches.fit: "measure" tries plans with whole weights, which zero_optimization.stage 3 '
            f'shares out; use "{PREDICT}"'
        )
    if config.get("fp16", {}).get("enabled", False):
        raise ValueError(
            'fp16 with zero_optimization.stage 3: the loss is not scaled there; use "bf16", or '
            '"zero_optimization": {"stage": 2}'
        )
    if config.get("communication_data_type") not in (None, "fp32"):
        raise ValueError(
            f"communication_data_type: got {config['communication_data_type']!r}; under ZeRO-3 "
            "gradients travel in fp32; remove the key"
        )
    zero = config["zero_optimization"]
    if further := sorted(
        key for key, value in zero.items() if key != "stage" and value is not None
    ):
        raise ValueError(
            f"zero_optimization.{further[0]}: with stage 3 the weights of one layer after the other "
            f"are gathered, which {further[0]} does not change; remove the key"
        )
    of_deepspeed = [key for key in OF_DEEPSPEEDS_ENGINE if config.get(key)]
    if of_deepspeed:
        raise ValueError(
            f"{of_deepspeed[0]}: DeepSpeed's own engine writes that, which does not run under "
            'ZeRO-3; remove the key, or use "zero_optimization": {"stage": 2}'
        )


def _check_offload(zero: Mapping[str, Any], stage: int) -> None:
    if zero.get("offload_param") is not None:
        raise ValueError(
            "zero_optimization.offload_param: a pipeline needs its parameters in place; remove the "
            "key, or use offload_optimizer"
        )
    offload = zero.get("offload_optimizer")
    if not isinstance(offload, Mapping):
        return
    if offload.get("device") not in ("cpu", "none"):
        raise ValueError(
            f'zero_optimization.offload_optimizer.device: got {offload.get("device")!r}; ZeRO offloads to "cpu"; "none": not'
        )
    if offload["device"] == "cpu" and stage not in (1, 2):
        raise ValueError(
            f"zero_optimization.offload_optimizer with stage {stage}: ZeRO-1 and ZeRO-2 offload; use "
            '"stage": 1, or remove the key'
        )


def check_hardware(
    config: Mapping[str, Any], fp16_supported: bool, bf16_supported: bool, device: str
) -> None:
    """Refuse a precision or an optimizer that the hardware does not have, before anything is
    built."""
    for key, supported in (("fp16", fp16_supported), ("bf16", bf16_supported)):
        if config.get(key, {}).get("enabled", False) and not supported:
            other = "ds_configs/cpu_fp32.json" if device == "cpu" else "ds_configs/zero1_fp32.json"
            raise ValueError(
                f"{key} is enabled, but this hardware ({device}) does not compute in {key}; use "
                f"--deepspeed_config {other}"
            )
    optimizer = config.get("optimizer", {}).get("type", "")
    if device == "cpu" and optimizer.lower() in NEEDS_GPU:
        raise ValueError(
            f'optimizer.type {optimizer!r}: DeepSpeed has it for GPUs only; on a CPU give "AdamW", "Adam", "Muon" or "SGD"'
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} stands twice")
    return dict(pairs)
