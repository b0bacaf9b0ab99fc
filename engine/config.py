"""The JSON that says how to run: DeepSpeed's own keys plus one strict block, `branches`. Plain Python, no process group.

`read_config` reads a file and refuses what is unknown, misspelt or impossible under a pipeline; what is "auto" in it is
decided by `engine/planner.py`.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.averaging import AverageBlock, average_block
from engine.clipping_rules import DEFAULT_GROUPS, ClippingRule, clipping_rules
from engine.deepspeed_keys import check_blocks
from engine.locking import LockedBlock, locked_block
from engine.parameter_groups import OptimizerGroups, check_groups, optimizer_groups
from engine.schedule import SCHEDULES
from engine.spelling import keys_of, nearest, strict_block
from engine.topology import BRANCHES, LAYOUTS

AUTO = "auto"
# What may be "auto" besides what the planner searches and the length of the run: `engine/auto.py`.
AUTO_PLACES = (
    *(f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")),
    *(f"scheduler.params.{key}" for key in ("warmup_num_steps", "warmup_type")),
    *(f"branches.{key}" for key in ("gradient_clipping", "optimizer_groups")),
)
KNOBS = ("captions_per_image", "kept_patches", "image_size")  # of the `balance` block: feed rates
LOOKS_EVERY = 20  # steps
NEEDS_GPU = ("lamb", "lion", "onebitadam", "onebitlamb", "zerooneadam")  # optimizers, as DeepSpeed compares them
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
    "pipeline",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
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
    "wall_clock_breakdown": "DeepSpeed's timers do not run under this schedule; remove it, metrics.jsonl has step_s",
    "activation_checkpointing": "DeepSpeed's pipeline reads it elsewhere; write "
    '"pipeline": {"activation_checkpoint_interval": 1}, the number of layers between checkpoints',
}


@dataclass(frozen=True)
class BalanceBlock:
    """The `balance` block inside `branches`: how global batches are dealt to micro-batches, and how much of each modality a step takes in.
    Checked when made.

    "deal": by cost, sizes from `min_size` to `max_size` (None: whatever the memory of the planned micro-batches holds); "off": in order;
    "feed": dealt, and feed rates within bounds [least, most], moved when a branch waits more than `dead_band` of a step, by a load of at
    most `max_change` times. Measured times are looked at every `interval` steps (0: never; None: `looks_every`). `window`:
    global batches dealt together.
    """

    strategy: str = "deal"
    min_size: int = 1
    max_size: int | None = None
    window: int = 1
    interval: int | None = None
    captions_per_image: Any = None
    kept_patches: Any = None
    image_size: Any = None
    dead_band: float = 0.1
    max_change: float = 2.0

    def __post_init__(self):
        _choice("balance.strategy", self.strategy, ("off", "deal", "feed"))
        for name, least in (("min_size", 1), ("window", 1)):
            _counts(f"balance.{name}", getattr(self, name), (), least=least)
        if self.interval is not None:
            _counts("balance.interval", self.interval, (), least=0)
        if self.max_size is not None:
            _counts("balance.max_size", self.max_size, ())
            if self.max_size < self.min_size:
                raise ValueError(f"branches.balance: min_size {self.min_size} is above max_size {self.max_size}; exchange them")
        for name, kind, least, most in (("captions_per_image", int, 1, 64), ("image_size", int, 8, 4096), ("kept_patches", float, 0.05, 1)):
            _bounds(f"balance.{name}", getattr(self, name), kind, least, most)
        for name, least, most in (("dead_band", 0.0, 1.0), ("max_change", 1.0, 16.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < most:
                raise ValueError(f"branches.balance.{name}: got {value!r}; it takes a number between {least:g} and {most:g}")
        moved = [name for name in KNOBS if getattr(self, name) is not None]
        if self.strategy == "feed" and (not moved or self.interval == 0):
            raise ValueError(
                f'branches.balance: strategy "feed" needs bounds of one of {", ".join(KNOBS)}, such as "captions_per_image": [1, 4], and '
                "an interval of at least 1"
            )
        if self.strategy != "feed" and moved:
            raise ValueError(f'branches.balance.{moved[0]}: only "strategy": "feed" moves it, this one is "{self.strategy}"')
        if self.strategy == "off" and self.window > 1:
            raise ValueError('branches.balance.window: "strategy": "off" deals nothing; use "deal" or "feed"')

    def looks_every(self, adapts: bool) -> int:
        """Steps between looks at measured times. Where it is not said: only where something is decided by them, feed rates or
        (`adapts`) the mix of the data sets. Without looks the costs stay as planned, and equal runs are equal to the last bit."""
        if self.interval is not None:
            return self.interval
        return LOOKS_EVERY if self.strategy == "feed" or adapts else 0

    @property
    def refits(self) -> bool:
        """Do costs follow measured times? Where nothing else is decided by them only if it was asked for."""
        return self.strategy == "feed" or bool(self.interval)


@dataclass(frozen=True)
class SampleWeightsBlock:
    """The `sample_weights` block inside `branches`: samples weighed by what there is to see and to read in them. Checked when made.

    `use`: "loss", each counts by its weight, or "curriculum", from light to heavy in the first `epochs` epochs. `image`, `text`: how much the
    complexity of the picture and the length of the text count. `length`: in "tokens" or, as runs before it was a choice, in "characters".
    """

    use: str | None = None
    image: float = 0.3
    text: float = 0.7
    epochs: int | None = None
    length: str = "tokens"

    def __post_init__(self):
        _choice("sample_weights.length", self.length, ("tokens", "characters"))
        if self.use is None:
            raise ValueError('branches.sample_weights: no "use"; it takes "loss" or "curriculum"')
        _choice("sample_weights.use", self.use, ("loss", "curriculum"))
        for name in BRANCHES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"branches.sample_weights.{name}: got {value!r}; it takes a number of at least 0")
        if not self.image and not self.text:
            raise ValueError("branches.sample_weights: image and text are both 0, so nothing is weighed; raise one, or remove the block")
        if self.use == "loss" and self.epochs is not None:
            raise ValueError('branches.sample_weights.epochs: only "use": "curriculum" ends; remove the key')
        if self.use == "curriculum" and (isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1):
            raise ValueError(
                f'branches.sample_weights.epochs: got {self.epochs!r}; "use": "curriculum" needs the number of epochs after which the order is the '
                "plain shuffle, a whole number of at least 1"
            )


@dataclass(frozen=True)
class BranchesBlock:
    """The `branches` block as written. Checked when made."""

    layout: str = AUTO
    stages: Any = AUTO
    replicas: Any = AUTO
    micro_batch_size: Any = AUTO
    schedule: str = AUTO
    kept_micro_batches: Any = None
    gradient_clipping: Any = None
    optimizer_groups: Any = None
    locked: Any = None
    ema: Any = None
    max_bad_steps: int = 10
    balance: Any = None
    sample_weights: Any = None

    def __post_init__(self):
        _choice("layout", self.layout, (AUTO, *LAYOUTS))
        _choice("schedule", self.schedule, (AUTO, *SCHEDULES))
        _counts("stages", self.stages, (*BRANCHES, "merged"))
        _counts("replicas", self.replicas, BRANCHES)
        _counts("micro_batch_size", self.micro_batch_size, BRANCHES, auto_inside=True)
        if self.kept_micro_batches is not None:
            _counts("kept_micro_batches", self.kept_micro_batches, BRANCHES, auto_inside=True, least=0)
            if self.schedule not in (AUTO, "replay"):
                raise ValueError(
                    f'branches.kept_micro_batches: {self.kept_micro_batches!r} with schedule "{self.schedule}"; only "replay" leaves a choice '
                    "which activations to keep; remove the key, or use replay"
                )
        if self.dealing().strategy == "feed" and (self.layout == "merged" or self.schedule == "per_micro_batch"):
            raise ValueError(
                'branches.balance: "feed" moves work between branches that run on different GPUs and meet at one loss, which '
                f'"{"merged" if self.layout == "merged" else self.schedule}" does not have; use "deal"'
            )
        self.clipping()
        self.learning()
        self.locking()
        self.averaging()
        self.weighting()
        if isinstance(self.max_bad_steps, bool) or not isinstance(self.max_bad_steps, int) or self.max_bad_steps < 1:
            raise ValueError(f"branches.max_bad_steps: got {self.max_bad_steps!r}; it is a whole number of at least 1")

    def num_kept(self, branch: str) -> int | str:
        """How many micro-batches keep their activations under replay. Where nothing is said: as many as fit, where also the schedule
        is the planner's choice; none where replay is asked for."""
        kept = self.kept_micro_batches
        if isinstance(kept, dict):
            kept = kept.get(branch)
        return kept if kept is not None else AUTO if self.schedule == AUTO else 0

    def dealing(self) -> BalanceBlock:
        """The `balance` block. Raises ValueError for what is wrong in it."""
        return BalanceBlock(**strict_block("balance", {} if self.balance is None else self.balance, BalanceBlock, '{"strategy": "deal"}'))

    def weighting(self) -> SampleWeightsBlock | None:
        """The `sample_weights` block; None: all samples count the same. Raises ValueError for what is wrong in it."""
        if self.sample_weights is None:
            return None
        return SampleWeightsBlock(**strict_block("sample_weights", self.sample_weights, SampleWeightsBlock, '{"use": "loss"}'))

    def clipping(self) -> dict[str, ClippingRule]:
        """group -> rule. Raises ValueError for what is wrong in the `gradient_clipping` block."""
        return clipping_rules({} if self.gradient_clipping == AUTO else self.gradient_clipping)

    def learning(self) -> OptimizerGroups:
        """The `optimizer_groups` block. Raises ValueError for what is wrong in it."""
        return optimizer_groups(None if self.optimizer_groups == AUTO else self.optimizer_groups)

    def locking(self) -> LockedBlock:
        """The `locked` block. Raises ValueError for what is wrong in it."""
        return locked_block(self.locked)

    def averaging(self) -> AverageBlock | None:
        """The `ema` block; None: the weights are not averaged. Raises ValueError for what is wrong in it."""
        return average_block(self.ema)


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
            raise ValueError(f"unknown key {key!r}{nearest(key, [*DEEPSPEED_KEYS, 'branches'])}")
    if not isinstance(block, dict):
        raise ValueError(f"branches: got {block!r}; it is an object with the keys {keys_of(BranchesBlock)}")
    for key in block:
        if key not in keys_of(BranchesBlock):
            raise ValueError(f"unknown key 'branches.{key}'{nearest(key, keys_of(BranchesBlock))}")
    check_blocks(config)
    _check_values(config, block)
    _check_precision_and_zero(config)
    if config.get("gradient_clipping", 0):
        _refuse_global_clipping(config["gradient_clipping"], block.get("gradient_clipping"))
    if not isinstance(config.get("train_batch_size"), int) or config["train_batch_size"] < 2:
        raise ValueError(
            f"train_batch_size: got {config.get('train_batch_size')!r}; the global batch of a contrastive loss is a whole number of at least 2"
        )
    _check_optimizer(config)
    checked = BranchesBlock(**block)
    check_groups(checked.learning(), config)
    return config, checked


def _refuse_global_clipping(limit: Any, written: Any) -> NoReturn:
    """`written`: the block's own clipping, whose groups are named in the message."""
    own = {group: rule for group, rule in (written if isinstance(written, dict) else {}).items() if group not in DEFAULT_GROUPS}
    groups = dict.fromkeys(DEFAULT_GROUPS, limit)
    groups |= {group: {"match": rule["match"], "kind": "norm", "limit": limit} for group, rule in own.items() if "match" in rule}
    raise ValueError(
        f"gradient_clipping: {limit} clips all parameters as one; say it in groups: "
        f'"branches": {{"gradient_clipping": {json.dumps(groups)}}}'
    )


def _check_optimizer(config: Mapping[str, Any]) -> None:
    example = '"optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": true}}'
    optimizer = config.get("optimizer", {})
    if "optimizer" not in config:
        raise ValueError(f'no "optimizer"; for example {example}')
    if not isinstance(optimizer.get("type"), str):
        raise ValueError(f"optimizer: {json.dumps(optimizer)} names no type; for example {example}")
    if optimizer["type"].lower() == "muon":
        raise ValueError("optimizer.type: Muon needs parameters marked for it, which these towers are not; use AdamW, SGD, Lamb or Lion")
    for name, known in (("optimizer", ()), ("scheduler", ("scheduler.params.total_num_steps",))):
        for key, value in (config.get(name, {}).get("params") or {}).items():
            if value == AUTO and (place := f"{name}.params.{key}") not in (*AUTO_PLACES, *known):
                choices = [p.rsplit(".", 1)[1] for p in (*AUTO_PLACES, *known) if p.startswith(f"{name}.params.")]
                raise ValueError(f'{place}: "auto" is known for {", ".join(choices)} only; give a value')


def _check_values(config: Mapping[str, Any], block: Mapping[str, Any]) -> None:
    for key in ("optimizer", "scheduler", "fp16", "bf16", "data_types", "zero_optimization", "pipeline"):
        if not isinstance(config.get(key, {}), dict):
            raise ValueError(f"{key}: got {config[key]!r}; it is an object, as in DeepSpeed's documentation")
    for key, value in config.get("pipeline", {}).items():
        if key != "activation_checkpoint_interval":
            raise ValueError(
                f'unknown key \'pipeline.{key}\'; stages are described in "branches", here stands "activation_checkpoint_interval"'
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"pipeline.{key}: got {value!r}; it is a number of layers, and 0 means no activation checkpoints")
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key in sizes:
        value = config.get(key, AUTO)
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f'{key}: got {value!r}; it is "auto" or a whole number of at least 1')
    given = [key for key in sizes if config.get(key, AUTO) != AUTO]
    given += ["branches.micro_batch_size"] if block.get("micro_batch_size", AUTO) != AUTO else []
    if len(given) > 1 and "gradient_accumulation_steps" in given:
        raise ValueError(
            f"{' and '.join(given)}: the number of micro-batches follows from their size and train_batch_size; give one of them"
        )


def _check_precision_and_zero(config: Mapping[str, Any]) -> None:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1):
        raise ValueError(
            f"zero_optimization.stage: {stage} shards gradients or parameters, which a pipeline needs whole between its micro-batches; use 0 or 1"
        )
    _check_offload(config.get("zero_optimization", {}), stage)
    for key in ("fp16", "bf16"):
        if not isinstance(config.get(key, {}).get("enabled", False), bool):
            raise ValueError(f"{key}.enabled: got {config[key]['enabled']!r}; it is true or false")
    fp16, bf16 = (config.get(key, {}).get("enabled", False) for key in ("fp16", "bf16"))
    if fp16 and bf16:
        raise ValueError("fp16 and bf16 are both enabled; enable one of them, or none for fp32")
    if fp16 and stage == 0:
        raise ValueError('fp16 with zero_optimization.stage 0: the loss would not be scaled; use "zero_optimization": {"stage": 1}')
    if bf16 and config.get("data_types", {}).get("grad_accum_dtype") != "fp32":
        raise ValueError('bf16 without "data_types": {"grad_accum_dtype": "fp32"} would add up gradients in bf16; add that block')
    if config.get("zero_optimization", {}).get("compute_grad_norm", True) is not True:
        raise ValueError(
            "zero_optimization.compute_grad_norm: by the norm DeepSpeed sees that a step must be skipped, on all ranks alike; remove the key"
        )


def _check_offload(zero: Mapping[str, Any], stage: int) -> None:
    if zero.get("offload_param") is not None:
        raise ValueError(
            "zero_optimization.offload_param: a pipeline needs its parameters in place; remove the key, or use offload_optimizer"
        )
    offload = zero.get("offload_optimizer")
    if not isinstance(offload, Mapping):
        return
    if offload.get("device") not in ("cpu", "none"):
        raise ValueError(
            f'zero_optimization.offload_optimizer.device: got {offload.get("device")!r}; ZeRO-1 offloads to "cpu"; "none": not'
        )
    if offload["device"] == "cpu" and stage != 1:
        raise ValueError(f'zero_optimization.offload_optimizer with stage {stage}: only ZeRO-1 offloads; use "stage": 1, or remove the key')


def check_hardware(config: Mapping[str, Any], fp16_supported: bool, bf16_supported: bool, device: str) -> None:
    """Refuse a precision or an optimizer that the hardware does not have, before anything is built."""
    for key, supported in (("fp16", fp16_supported), ("bf16", bf16_supported)):
        if config.get(key, {}).get("enabled", False) and not supported:
            other = "ds_configs/cpu_fp32.json" if device == "cpu" else "ds_configs/zero1_fp32.json"
            raise ValueError(f"{key} is enabled, but this hardware ({device}) does not compute in {key}; use --deepspeed_config {other}")
    optimizer = config.get("optimizer", {}).get("type", "")
    if device == "cpu" and optimizer.lower() in NEEDS_GPU:
        raise ValueError(f'optimizer.type {optimizer!r}: DeepSpeed has it for GPUs only; on a CPU give "AdamW", "Adam", "SGD" or "Adagrad"')


def _choice(name: str, value: Any, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"branches.{name}: unknown value {value!r}{nearest(str(value), valid)}")


def _counts(name: str, value: Any, keys: Sequence[str], auto_inside: bool = False, least: int = 1) -> None:
    """`value` is "auto", a whole number of at least `least`, or an object of those by branch."""
    if value == AUTO:
        return
    entries = value if isinstance(value, dict) else {"": value}
    for key, count in entries.items():
        if key == "merged" and key not in keys:
            raise ValueError(
                f'branches.{name}: got {json.dumps(value)}, but only "stages" has the key "merged"; a merged stage holds a slice of both branches, '
                f'so write one number: "{name}": {json.dumps(count)}'
            )
        if key:
            _choice(f"{name}: key", key, keys)
        if auto_inside and count == AUTO:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"branches.{name}{'.' + key if key else ''}: got {count!r}; it takes whole numbers of at least {least}")


def _bounds(name: str, value: Any, kind: type, least: float, most: float) -> None:
    """`value` is None or [low, high] with least <= low <= high <= most; `kind` int: whole numbers."""
    if value is None:
        return
    kinds = (int,) if kind is int else (int, float)
    pair = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(v, kinds) and not isinstance(v, bool) for v in value)
    if not pair or not least <= value[0] <= value[1] <= most:
        words = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"branches.{name}: got {value!r}; it takes [least, most], two {words} from {least:g} to {most:g}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} stands twice")
    return dict(pairs)
