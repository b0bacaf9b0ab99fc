"""Gradient clipping by group: every group has its own norm and its own rule
(`engine/optimizer/clipping_rules.py`).

    ‖g‖ = sqrt(Σ over the group's parameters of Σ g²)

The squares of all groups are one vector, added up over all ranks in one message; what n replicas
have alike counts 1/n on each. So all ranks know all norms, and whether they are finite. An adaptive
limit follows the norms that
it has let through, as AdaGC's (Wang et al. 2025) does for single parameters; t counts applied steps
from 1, c is the clip coefficient:

    limit_t = factor · m_(t−1)                                                         for t > warmup_steps; before: `limit` or none
    m_t = m_(t−1) + (1 − decay) / (1 − decay^t) · (c_t · ‖g_t‖ − m_(t−1))              the exponential mean, corrected for its start as in Adam

so that a spike moves the mean by no more than (factor − 1) · (1 − decay) / (1 − decay^t) of itself.
A mean of zero sets no limit.

`clip` runs as a step hook of the optimizer: there the gradients are averaged over the replicas,
unscaled and in the optimizer's precision, sharded or not. A step that is skipped does not come
here. ZeRO-1 steps its parameter groups one after the other and unscales each when its turn comes:
the first call measures all, each call clips those whose turn it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.backend.protocol import Backend
from engine.communication import Communicator
from engine.optimizer.clipping_rules import ClippingRule, group_of

EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class GroupedClipping:
    """Measures all gradients of the run and clips those of this rank, group by group.

    Of the step at hand, by group in the order of `rules`, the same on all ranks, [groups] float64:
    `norms` before clipping, and `coefficients`, the norm after clipping in parts of that; None until
    they are known. `clipped_share`: of all applied steps.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rules: Mapping[str, ClippingRule],
        comm: Communicator,
        backend: Backend,
    ):
        self.comm, self.rules, self._backend = comm, dict(rules), backend
        self.members = _members(parameters, rules)
        self._adaptive = [
            (i, rule) for i, rule in enumerate(self.rules.values()) if rule.kind == "adaptive"
        ]
        self._steps = 0
        # made once: each would be a copy to the device
        self._limits = self._vector([rule.bound for rule in self.rules.values()])
        self._clipped_steps = self._vector([0] * len(rules))
        self._mean_norms = self._vector([0] * len(rules))
        self._nothing = self._vector([])
        self.start_step()

    def start_step(self, beside: Tensor | None = None) -> None:
        """Forget the numbers of the step before. `beside` [n] float64: what else is added up over
        the world in the same message; `self.beside` has the sums once they are known."""
        self.norms: Tensor | None = None
        self.coefficients: Tensor | None = None
        self._own_beside = self._nothing if beside is None else beside
        self.beside: Tensor | None = None

    @property
    def clipped_share(self) -> Tensor:
        """Clipped steps in parts of all applied steps so far; 0 before the first."""
        return self._clipped_steps / max(1, self._steps)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """The norm of each group: one sum over the world. All ranks call it together."""
        squares = torch.zeros(len(self.rules), dtype=torch.float64, device=self.comm.device)
        for group, own in zip(self.rules, squares):
            self._add_square(self.members[group], own)
        if not self._backend.is_sharded:
            squares /= self.comm.stage.replicas  # which have the whole gradient each
        sums = self.comm.sum_over(torch.cat([squares, self._own_beside]))
        squares, self.beside = sums[: len(self.rules)], sums[len(self.rules) :]
        self.norms = squares.sqrt()
        return self.norms

    def _add_square(self, members: Sequence[nn.Parameter], square: Tensor) -> None:
        """`square`, [] float64: this rank's part of Σ g²."""
        by_scale: dict[float, list[Tensor]] = defaultdict(list)
        for gradient, scale in filter(None, map(self._backend.reduced_gradient, members)):
            by_scale[scale].append(gradient)
        for scale, gradients in by_scale.items():
            square += _square(gradients, square.device) / scale**2

    @torch.no_grad()
    def clip(self) -> None:
        """Clip in place the gradients whose turn it is, measured before or now; the first call of a
        step counts it."""
        norms = self.measure() if self.norms is None else self.norms
        if self.coefficients is None:
            self.coefficients = self._count_step(norms)
        for (group, rule), coefficient in zip(self.rules.items(), self.coefficients):
            found = map(self._backend.gradient, self.members[group]) if rule.kind != "none" else ()
            for gradients in _alike(g for g in found if g is not None):
                # of another dtype or device, torch would multiply one by one
                torch._foreach_mul_(gradients, coefficient.to(gradients[0]))

    def _count_step(self, norms: Tensor) -> Tensor:
        """The coefficients of this step, which counts from now on."""
        self._steps += 1
        limits, means = self._limits.clone(), self._mean_norms
        for i, rule in self._adaptive:
            if self._steps > rule.warmup_steps:
                limits[i] = torch.where(means[i] > 0, rule.factor * means[i], math.inf)
        coefficients = (limits / (norms + EPSILON)).clamp(max=1.0)
        self._clipped_steps += coefficients < 1
        for i, rule in self._adaptive:
            weight = (1 - rule.decay) / (1 - rule.decay**self._steps)
            # of a group without a gradient the mean stays, and with it the limit
            change = weight * (coefficients[i] * norms[i] - means[i])
            means[i] += torch.where(norms[i] > 0, change, 0.0)
        return coefficients

    def finite_everywhere(self) -> bool:
        """Measure, and learn whether the norm of every group is finite. All ranks call it
        together."""
        return bool(self.measure().isfinite().all())

    def reported(self, step_applied: bool) -> Tensor:
        """Norm, coefficient and clipped share of every group, one after the other, as the metrics
        have them: zero but on the first rank; norm and coefficient not-a-number in a step that was
        skipped."""
        shares = self.clipped_share
        if self.comm.rank > 0:
            return torch.zeros_like(shares).repeat(3)
        norms, coefficients = self.norms, self.coefficients
        if not step_applied or norms is None or coefficients is None:
            norms = coefficients = torch.full_like(shares, math.nan)
        return torch.stack((norms, coefficients, shares), dim=1).flatten().float()

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on, the same on all ranks."""
        clipped, means = self._clipped_steps.tolist(), self._mean_norms.tolist()
        adaptive = {i for i, _ in self._adaptive}
        return {
            "steps": self._steps,
            "clipped_steps": {group: int(number) for group, number in zip(self.rules, clipped)},
            "mean_norm": {g: means[i] for i, g in enumerate(self.rules) if i in adaptive},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also from a state with more groups, or without those that have no parameters. Raises
        ValueError where one is missing that has some on this rank."""
        adaptive = {i for i, _ in self._adaptive}
        for key, own in (("clipped_steps", self._clipped_steps), ("mean_norm", self._mean_norms)):
            kept = [g for i, g in enumerate(self.rules) if key != "mean_norm" or i in adaptive]
            if missing := [g for g in kept if self.members[g] and g not in state[key]]:
                raise ValueError(
                    f"clipping state: {key} of {', '.join(missing)} is not in the checkpoint, "
                    f"which has that of {sorted(state[key])}; go on with the gradient_clipping "
                    "that it was made with"
                )
            own.copy_(self._vector([state[key].get(group, 0) for group in self.rules]))
        self._steps = state["steps"]

    def _vector(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.comm.device)


# torch's `_foreach_` functions take tensors of one dtype and device in a few kernels, so that the
# number of kernels does not grow with that of the parameters


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """By dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.dtype, tensor.device].append(tensor)
    return found.values()


def _square(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Σ g² over some tensors, [] float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for own in _alike(gradients):
        norms = torch._foreach_norm(own, 2, torch.promote_types(own[0].dtype, torch.float32))
        total += torch.stack(norms).double().square().sum().to(device)
    return total


def _members(
    parameters: Mapping[str, nn.Parameter], rules: Mapping[str, ClippingRule]
) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of each group, each once: one with two names belongs to the group of
    the first."""
    found: dict[str, list[nn.Parameter]] = {group: [] for group in rules}
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in parameters.items():
        first_names.setdefault(parameter, name)
    for parameter, name in first_names.items():
        if parameter.requires_grad:
            found[group_of(name, rules)].append(parameter)
    return found
