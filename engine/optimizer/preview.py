"""What the optimizer and the schedule of the JSON will do, read from the same objects built over one
number. Building them also shows what their classes refuse.

DeepSpeed's compiled optimizers are not built: torch's base class holds their settings instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from engine.checks import AUTO
from engine.optimizer.classes import class_params, make_schedule, optimizer_class, with_length
from engine.optimizer.parameter_groups import MUON_RATES, GroupSchedule, OptimizerGroups, Setting

LONG, FEW = 10**9, 1  # steps
CLOSE = 5_000  # steps, of which each is looked at


def preview(
    config: Mapping[str, Any], groups: OptimizerGroups, total_num_steps: int | None = None
) -> str:
    """One line: the optimizer's settings, and the rates of a run of that many steps; None: of the
    first steps of a long one. Where the JSON says "auto", the classes' defaults stand. Errors:
    ValueError for what the classes refuse."""
    kind = config.get("scheduler", {}).get("type")
    params = with_length(config.get("scheduler", {}).get("params", {}), total_num_steps or LONG)
    base = _without_auto(config["optimizer"].get("params", {})).get("lr")
    rates: dict[int, float] = {}  # by step
    momenta: list[float] = []
    peaks: dict[str, float] = {}
    with _refusals("optimizer", config["optimizer"]["type"]):
        optimizer = _stand_in(config)
    with _refusals("scheduler", kind):
        schedule = GroupSchedule(
            optimizer,
            partial(make_schedule, optimizer, kind, _without_auto(params)),
            [Setting(1.0, None, None)],
            [rule.warmup_steps for rule in groups.rules.values()],
        )
        for step in _walk(schedule, total_num_steps or FEW):
            rates[step] = schedule.rates[None]
            momenta.append(_momentum(optimizer.param_groups[0]))
            for group, rate in groups.rates(schedule.rates, base).items():
                peaks[group] = max(rate, peaks.get(group, rate))
    params = _without_auto(config["optimizer"].get("params", {}))
    for key, of in zip(MUON_RATES, ("matrices", "all others")):
        if key in params and "lr" in params:
            peaks[of] = max(rates.values()) * params[key] / params["lr"]
    own = "".join(f", {group} at most {peak:.4g}" for group, peak in peaks.items())
    name = optimizer_class(config).__name__
    return f"{_settings(name, optimizer, momenta)}; {_rates(kind, rates)}{own}"


def unreached(config: Mapping[str, Any], groups: OptimizerGroups, total_num_steps: int) -> str:
    """Which warm-ups are not over before the last step of a run of that many; empty: all are."""
    params = config.get("scheduler", {}).get("params", {})
    warmups = {"scheduler.params.warmup_num_steps": params.get("warmup_num_steps")} | {
        f"branches.optimizer_groups.{group}.warmup_steps": rule.warmup_steps
        for group, rule in groups.rules.items()
    }
    least = max(2, total_num_steps)  # a warm-up of one step is none
    longer = {key: n for key, n in warmups.items() if isinstance(n, int) and n >= least}
    return "; ".join(
        f"{key} is {steps:,}, and the run has {total_num_steps:,} steps: the whole rate is reached "
        f"{'at the last of them' if steps == total_num_steps else 'at none of them'}, so give fewer"
        for key, steps in longer.items()
    )


def _walk(schedule: GroupSchedule, total_num_steps: int) -> Iterator[int]:
    """The steps of a run, with the schedule at each: all of the first `CLOSE`, about a thousand of
    the others."""
    step, stride = 1, max(1, (total_num_steps - CLOSE) // 1000)
    yield step
    while step < total_num_steps:
        ahead = 1 if step < CLOSE else min(stride, total_num_steps - step)
        _advance(schedule, ahead)
        step += ahead
        yield step


def _advance(schedule: GroupSchedule, steps: int) -> None:
    state = schedule.state_dict()
    for own in state["schedules"].values():  # DeepSpeed's go on from any step
        own["last_batch_iteration"] += steps
    schedule.load_state_dict(state)


def _stand_in(config: Mapping[str, Any]) -> Optimizer:
    cls, parameter = optimizer_class(config), torch.zeros(1, requires_grad=True)
    params = _without_auto(config["optimizer"].get("params", {}))
    if cls.__module__.startswith(("torch.", "engine.")):
        return cls([parameter], **class_params(params))  # type: ignore[call-arg]
    signature = inspect.signature(cls).parameters.values()
    defaults = {p.name: p.default for p in signature if p.default is not p.empty}
    return Optimizer([parameter], {**defaults, **params})


def _without_auto(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if value != AUTO}


def _momentum(group: Mapping[str, Any]) -> float:
    """Its first beta, or its momentum: what a schedule may change."""
    return group["betas"][0] if "betas" in group else group.get("momentum", 0.0)


def _settings(name: str, optimizer: Optimizer, momenta: list[float]) -> str:
    group, least, most = optimizer.param_groups[0], min(momenta), max(momenta)
    first = f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
    words = [f"betas {first} and {group['betas'][1]:.4g}"] if "betas" in group else []
    if "momentum" in group:  # beside betas no schedule changes it
        words.insert(0, f"momentum {group['momentum']:.4g}" if words else f"momentum {first}")
    numbers = {key: group[key] for key in ("eps", "weight_decay") if key in group}
    words += [f"{key.replace('_', ' ')} {value}" for key, value in numbers.items()]
    return ", ".join([name, *words])


def _rates(kind: str | None, rates: Mapping[int, float]) -> str:
    """At the first step, the highest and at the last."""
    if kind is None:
        return f"lr {rates[1]:.4g}, constant"
    steps = sorted({1, max(rates, key=lambda step: rates[step]), max(rates)})
    return f"{kind}: lr " + ", ".join(f"{rates[step]:.4g} at step {step:,}" for step in steps)


@contextmanager
def _refusals(block: str, kind: str | None) -> Iterator[None]:
    """Whatever a class raises as one line."""
    try:
        yield
    except Exception as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{block}: {kind} refuses these params: {what}") from error
