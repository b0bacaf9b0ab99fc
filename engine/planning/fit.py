"""`"fit": "measure"`: which plan fits the memory, found by trying. Plain Python.

The fastest plan is tried first, also one that is predicted to need a little more than there is.
Where memory runs out, the next one is the fastest of those that are predicted to need less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.planning.planner import RunPlan

MORE = 1.5  # of the memory: what is predicted to need as much is tried
LESS = 0.95  # of what a plan that did not fit was predicted to need: the next one at most


@dataclass(frozen=True)
class Fit:
    """What was found: a limit with which the planner makes a plan that fits, and what this plan
    held ÷ what it was predicted to hold, at most on any rank."""

    limit_bytes: float
    ratio: float


def find_fit(
    plan_within: Callable[[float], RunPlan],
    held_share: Callable[[RunPlan], float | None],
    memory_bytes: float,
) -> Fit:
    """`plan_within`: the plan for a limit in bytes; `held_share`: see `Fit.ratio`; None: the memory
    ran out. Raises ValueError where nothing fits."""
    limit_bytes = MORE * memory_bytes
    plan = plan_within(limit_bytes)
    while (ratio := held_share(plan)) is None:
        limit_bytes = LESS * max(stage.peak_bytes for stage in plan.predicted)
        try:
            smaller = plan_within(limit_bytes)
        except ValueError as error:
            raise ValueError(
                f'branches.fit: "measure" found memory too small for {plan.describe()}, and {error}'
            ) from error
        plan = smaller
    return Fit(limit_bytes, ratio)


def corrected(plan: RunPlan, ratio: float) -> RunPlan:
    """The plan with predictions of memory as it was seen. State is known, so activations differ."""
    more = ratio - 1
    predicted = tuple(
        replace(
            stage,
            peak_bytes=ratio * stage.peak_bytes,
            activation_bytes=max(0.0, stage.activation_bytes + more * stage.peak_bytes),
        )
        for stage in plan.predicted
    )
    said = "fit: tried on the device"
    if ratio != 1:  # seen
        said += f", {ratio:.2f} of the predicted memory"
    return replace(plan, predicted=predicted, reasons="\n".join(filter(None, (plan.reasons, said))))
