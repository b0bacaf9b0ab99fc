"""The optimizers and learning-rate schedules that the JSON may name: their classes, and what
DeepSpeed and torch would put in the place of a given value.

A schedule's highest rate is the optimizer's `lr` unless the file gives another. Step k of a run,
counted from 1, is step k of the schedule, so a linear warm-up of N steps has k / N of the rate
(`engine/optimizer/parameter_groups.py`); with 0 or 1 steps the first step has the whole rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch.optim import Optimizer

from common.spelling import nearest
from engine.backend.deepspeed import ZERO_SUPPORTED_OPTIMIZERS, lr_schedules
from engine.config.implied import offloads, steps_matrices
from engine.optimizer.muon import Muon
from engine.optimizer.parameter_groups import MUON_RATES

# By DeepSpeed's name: on the accelerator, and with the state offloaded to the CPU.
_DEEPSPEED_OPTIMIZERS: dict[str, tuple[type[Optimizer], type[Optimizer]]] = {
    "adam": (FusedAdam, DeepSpeedCPUAdam),
    "adamw": (FusedAdam, DeepSpeedCPUAdam),
    "lamb": (FusedLamb, FusedLamb),
    "lion": (FusedLion, DeepSpeedCPULion),
}
OPTIMIZERS = ("AdamW", "Adam", "Muon", "Lion", "Lamb", "SGD")
# DeepSpeed's own params of Adam beside the arguments of the class.
ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
# The bounds of the momentum that OneCycle cycles, unless `cycle_momentum` is false.
MOMENTA = ("cycle_min_mom", "cycle_max_mom")
# The parameter of a schedule that is its highest rate (of a range test: the first).
RATES = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
}
# What takes the place of a schedule of torch.
INSTEAD = {
    "CosineAnnealingLR": "use WarmupCosineLR",
    "LinearLR": "use WarmupDecayLR",
    "ConstantLR": 'for a constant rate leave "scheduler" out',
}

SHORT_DECAY = 100  # steps


def optimizer_class(config: Mapping[str, Any]) -> type[Optimizer]:
    """The class of the `optimizer` block. Errors: ValueError for a type that
    is none of `OPTIMIZERS`."""
    kind, params = config["optimizer"]["type"], config["optimizer"].get("params", {})
    zero = config.get("zero_optimization", {})
    offloaded = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    if kind.lower() in ("adam", "adamw") and params.get("torch_adam"):
        decoupled = kind.lower() == "adamw" or params.get("adam_w_mode", True)
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if kind.lower() in _DEEPSPEED_OPTIMIZERS:
        return _DEEPSPEED_OPTIMIZERS[kind.lower()][offloaded]
    if steps_matrices(config["optimizer"]):
        return Muon
    if kind == "SGD":
        return torch.optim.SGD
    if kind.lower() in {name.lower() for name in vars(torch.optim)} - {"sgd"}:
        raise ValueError(
            f"optimizer.type: got {kind!r}; only {_listed(OPTIMIZERS)} are taken, so use AdamW"
        )
    raise ValueError(f"optimizer.type: unknown value {kind!r}{nearest(kind, OPTIMIZERS)}")


def make_optimizer(config: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """The optimizer of these parameter groups that the `optimizer` block asks for, as DeepSpeed makes
    it."""
    cls, written = optimizer_class(config), config["optimizer"].get("params") or {}
    params = class_params(written)
    if cls is FusedAdam:
        is_adam = config["optimizer"]["type"].lower() == "adam"
        params["adam_w_mode"] = written.get("adam_w_mode", True) if is_adam else True
    return cls([dict(group) for group in groups], **params)


def optimizer_maker(config: Mapping[str, Any]) -> Callable[[Any], Optimizer] | None:
    """What makes the optimizer of its parameter groups; None: DeepSpeed does, by itself."""
    cls = optimizer_class(config) if "optimizer" in config else None
    return partial(make_optimizer, config) if cls is Muon else None


def class_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Of the optimizer's params those that its class takes: not what DeepSpeed reads of Adam's, and
    not the rates of groups."""
    others = (*ADAM_SWITCHES, *MUON_RATES)
    return {key: value for key, value in params.items() if key not in others}


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


class _WarmsUp:
    """DeepSpeed refuses a warm-up of 0 steps and makes 2 of 1, so that step 1 has half the rate
    (DeepSpeed#771)."""

    def __init__(self, optimizer: Optimizer, **params: Any):
        short = {"warmup_num_steps": 1} if params.get("warmup_num_steps", 2) < 2 else {}
        # -1, the default, would be a rate before the first step, and a warning of it
        params |= {**short, "last_batch_iteration": 0}
        super().__init__(optimizer, **params)  # type: ignore[call-arg]
        self.warmup_num_steps: int = short.get("warmup_num_steps", self.warmup_num_steps)


class WarmupLR(_WarmsUp, lr_schedules.WarmupLR):
    pass


class WarmupDecayLR(_WarmsUp, lr_schedules.WarmupDecayLR):
    pass


class WarmupCosineLR(_WarmsUp, lr_schedules.WarmupCosineLR):
    """DeepSpeed's cosine is a step ahead: the last step of the warm-up is below the whole rate, and
    the last step of the run is at the least one, 1e-4 of it by default. A decay of few steps is
    moved back by one. In longer ones that is less than 2 % of the rate, so they stay as runs of
    earlier versions have them."""

    def get_lr_ratio(self) -> float:
        step, warmup = self.last_batch_iteration, self.warmup_num_steps
        decay = self.total_num_steps - warmup
        if step < warmup or (decay > SHORT_DECAY and not step == 1 == warmup):
            return super().get_lr_ratio()
        progress = min(1.0, (step - warmup) / max(1, decay))
        return (
            self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )


class OneCycle(lr_schedules.OneCycle):
    """Cycles the first beta and leaves the second, which DeepSpeed sets to 0.99."""

    def _initialize_momentum(self, optimizer: Optimizer, *bounds: Any) -> None:
        second = [group["betas"][1] for group in optimizer.param_groups if "betas" in group]
        super()._initialize_momentum(optimizer, *bounds)
        if not self.cycle_momentum:
            raise ValueError(
                f"{type(optimizer).__name__} has no betas; set cycle_momentum to false"
            )
        for bound in (self.min_moms, self.max_moms):  # (first beta, 0.99) of each group
            bound[:] = [(first, own) for (first, _), own in zip(bound, second)]
        for group, betas in zip(optimizer.param_groups, self.min_moms):
            group["betas"] = betas


SCHEDULES: dict[str, type] = {
    cls.__name__: cls
    for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, lr_schedules.LRRangeTest)
}


def schedule_class(kind: str) -> type:
    """Errors: ValueError for a type that is none of `SCHEDULES`."""
    if kind in SCHEDULES:
        return SCHEDULES[kind]
    if kind in vars(torch.optim.lr_scheduler):
        raise ValueError(
            f"scheduler.type: got {kind!r}; only {_listed(list(SCHEDULES))} are taken, so "
            f"{INSTEAD.get(kind, 'use one of them')}"
        )
    raise ValueError(f"scheduler.type: unknown value {kind!r}{nearest(kind, list(SCHEDULES))}")


def make_schedule(
    optimizer: Optimizer,
    kind: str | None,
    params: Mapping[str, Any] | None,
    warmup_steps: int | None = None,
) -> Any:
    """The schedule of the JSON's type and params on `optimizer`, with this many `warmup_num_steps`
    (None: as written). A type of None is a constant rate: None."""
    if kind is None:
        return None
    own = {} if warmup_steps is None else {"warmup_num_steps": warmup_steps}
    rate = {RATES[kind]: optimizer.param_groups[0]["lr"]} if kind in RATES else {}
    return schedule_class(kind)(optimizer, **{**rate, **(params or {}), **own})


def with_length(params: Mapping[str, Any], total_num_steps: int) -> dict[str, Any]:
    """The params of a schedule with the length of the run where `total_num_steps` is "auto"."""
    if params.get("total_num_steps") != "auto":
        return dict(params)
    # one more, which a run does not reach: a decay to 0 would waste its last step
    return {**params, "total_num_steps": total_num_steps + 1}


def check_schedule(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a schedule that would replace the optimizer's lr or momentum by values
    of its own."""
    if "scheduler" not in config:
        return
    params = config["optimizer"].get("params", {})
    kind, own = config["scheduler"]["type"], config["scheduler"].get("params", {})
    rate = RATES.get(kind, "")
    if rate in own and "lr" in params and own[rate] != params["lr"]:
        raise ValueError(
            f"scheduler.params.{rate}: got {own[rate]!r}, and optimizer.params.lr is "
            f"{params['lr']!r}; {kind} takes the place of that rate, so give one of the two"
        )
    momentum = next((key for key in ("betas", "momentum") if key in params), None)
    cycles = kind == "OneCycle" and own.get("cycle_momentum", True)
    if cycles and momentum and not {"cycle_momentum", *MOMENTA} <= own.keys():
        raise ValueError(
            f"scheduler.params.cycle_momentum: {kind} would replace optimizer.params.{momentum} by "
            f'values of its own; write "cycle_momentum": false, or true with '
            f"{' and '.join(MOMENTA)}"
        )


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an optimizer that ZeRO, which steps slices, would change, and for one that
    DeepSpeed asks about."""
    zero, kind = config.get("zero_optimization", {}), config["optimizer"]["type"]
    cls, stage = optimizer_class(config), zero.get("stage", 0)
    if cls is Muon and offloads(config):
        raise ValueError(
            "zero_optimization.offload_optimizer: the CPU would orthogonalise the matrices that Muon "
            'steps, which takes longer than the rest of a step; remove the key, or use "type": "AdamW"'
        )
    if stage and cls is FusedLamb:
        raise ValueError(
            f"optimizer.type: {kind} uses the norm of whole tensors, and ZeRO-{stage} steps slices of "
            'them, which trains otherwise; use "zero_optimization": {"stage": 0} in fp32, or an '
            "optimizer such as AdamW"
        )
    untested = stage in (1, 2) and cls not in (*ZERO_SUPPORTED_OPTIMIZERS, Muon)
    if untested and not config.get("zero_allow_untested_optimizer"):
        raise ValueError(
            f"zero_allow_untested_optimizer: DeepSpeed asks for it with ZeRO-{stage} and {kind}; add "
            '"zero_allow_untested_optimizer": true'
        )
