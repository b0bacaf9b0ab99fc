"""Gradient clipping by group: every group has its own norm and its own rule
(`engine/optimizer/clipping_rules.py`).

    ‖g‖ = sqrt(Σ over the group's parameters of Σ g²)       added up over the ranks that hold a part of the group, no others

All groups with the same ranks are added up in one message. An adaptive limit follows the norms that
it has let through, as AdaGC's (Wang et al. 2025) does for single parameters; t counts applied steps
from 1, c is the clip coefficient:

    limit_t = factor · m_(t−1)                                                         for t > warmup_steps; before: `limit` or none
    m_t = m_(t−1) + (1 − decay) / (1 − decay^t) · (c_t · ‖g_t‖ − m_(t−1))              the exponential mean, corrected for its start as in Adam

so that a spike moves the mean by no more than (factor − 1) · (1 − decay) / (1 − decay^t) of itself.
A mean of zero sets no limit.

`clip` runs as a step hook of the optimizer that DeepSpeed wraps: there the gradients are reduced
over the replicas, unscaled and in the optimizer's precision, whatever the wrapper (none, ZeRO-1,
BF16_Optimizer). A step that is skipped does not come here. ZeRO-1 steps its parameter groups one
after the other and unscales each when its turn comes: the first call measures all, each call clips
those whose turn it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from engine.communication import Communicator
from engine.optimizer.clipping_rules import ClippingRule, group_of

EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_
LIMITED_AT_ONCE = 2**24  # elements of a copy behind a limit: 64 MiB


class GroupedClipping:
    """Measures and clips the gradients of this rank's parameters, group by group.

    Of the step at hand, for the groups that this rank holds, [] float64: `norms` before clipping,
    and `coefficients`, the norm behind the clipping in parts of the norm before it; of all applied
    steps, `clipped_share`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rules: Mapping[str, ClippingRule],
        sets_of_groups: Mapping[str, Sequence[tuple[int, ...]]],
        comm: Communicator,
        optimizer: torch.optim.Optimizer | ZeROOptimizer,
    ):
        """`optimizer`: the one that steps the parameters, or DeepSpeed's wrapper of it."""
        self.comm, self.rules = comm, dict(rules)
        self.optimizer: Any = optimizer
        # ZeRO-1 and BF16_Optimizer step one flat slice for each parameter group instead of its
        # parameters.
        self.partitioned = isinstance(optimizer, ZeROOptimizer)
        self._slices = (
            [group["params"][0] for group in optimizer.param_groups] if self.partitioned else []
        )
        self.speakers = {
            group: min(map(min, sets)) for group, sets in sets_of_groups.items()
        }  # who tells a group's numbers
        # Set of ranks -> groups, in an order that all ranks share: no rank waits for one that waits
        # for it.
        own = [
            (ranks, group)
            for group, sets in sets_of_groups.items()
            for ranks in sets
            if comm.rank in ranks
        ]
        self._groups_of_set = {
            ranks: [g for r, g in own if r == ranks]
            for ranks in sorted({ranks for ranks, _ in own})
        }
        self.members = {group: _members(parameters, rules, group) for _, group in own}
        self._steps = 0
        # made once: each would be a copy to the device
        self._zero, self._nan = self._number(0), self._number(math.nan)
        self._clipped_steps = {group: self._number(0) for group in self.members}
        self._mean_norm = {
            group: self._number(0) for group in self.members if self.rules[group].kind == "adaptive"
        }
        self.start_step()

    def start_step(self) -> None:
        """Forget the numbers of the step before."""
        self.norms: dict[str, Tensor] = {}
        self.coefficients: dict[str, Tensor] = {}
        self._within: dict[
            str, Tensor
        ] = {}  # of groups clipped by value: the norm of what the limit leaves

    @property
    def clipped_share(self) -> dict[str, Tensor]:
        """Of each group: clipped steps in parts of all applied steps so far, [] float64; 0 before
        the first."""
        return {
            group: number / max(1, self._steps) for group, number in self._clipped_steps.items()
        }

    @torch.no_grad()
    def measure(self) -> None:
        """Fill `norms`: one collective for each set of ranks that this rank is in, all groups of
        that set in one vector."""
        for ranks, groups in self._groups_of_set.items():
            norms = self.comm.sum_in_order(
                torch.cat([self._squares(group, ranks) for group in groups]), ranks
            ).sqrt()
            for group, (norm, within) in zip(groups, norms.view(-1, 2)):
                self.norms[group], self._within[group] = norm, within

    def _squares(self, group: str, ranks: Sequence[int]) -> Tensor:
        """[2] float64: this rank's part of Σ g², and of the same behind a limit of the elements."""
        rule = self.rules[group]
        squares = torch.zeros(2, dtype=torch.float64, device=self.comm.device)
        by_scale: dict[float, list[Tensor]] = defaultdict(list)
        for gradient, scale in filter(None, map(self._measurable, self.members[group])):
            by_scale[scale].append(gradient)
        for scale, gradients in by_scale.items():
            squares[0] += _square(gradients, squares.device) / scale**2
            for own in _alike(gradients) if rule.kind == "value" else ():
                for some in _in_parts(own):
                    limited = _limited(some, rule.bound * scale)
                    squares[1] += _square(limited, squares.device) / scale**2
        if not self.partitioned:
            squares /= len(
                set(ranks) & set(self.comm.stage.ranks)
            )  # these replicas hold the whole gradient: count it once
        return squares

    @torch.no_grad()
    def clip(self) -> None:
        """Clip in place the gradients whose turn it is, measured before or now; the first call of a
        step counts it."""
        if not self.norms:
            self.measure()
        if not self.coefficients:
            self._count_step()
        for group, coefficient in self.coefficients.items():
            rule = self.rules[group]
            found = map(self.gradient, self.members[group]) if rule.kind != "none" else ()
            for gradients in _alike(g for g in found if g is not None):
                if rule.kind == "value":
                    _limit(gradients, rule.bound)
                else:  # of another dtype or device, torch would multiply one by one
                    torch._foreach_mul_(gradients, coefficient.to(gradients[0]))

    def _count_step(self) -> None:
        self._steps += 1
        for group, norm in self.norms.items():
            rule = self.rules[group]
            self.coefficients[group] = coefficient = self._coefficient(group)
            self._clipped_steps[group] += coefficient < 1
            if rule.kind == "adaptive":
                weight = (1 - rule.decay) / (1 - rule.decay**self._steps)
                self._mean_norm[group] += weight * (coefficient * norm - self._mean_norm[group])

    def _coefficient(self, group: str) -> Tensor:
        rule, norm = self.rules[group], self.norms[group]
        if rule.kind == "value":
            return torch.where(norm > 0, self._within[group] / norm, 1.0)
        if rule.kind == "adaptive" and self._steps > rule.warmup_steps:
            mean = self._mean_norm[group]
            return torch.where(
                mean > 0, (rule.factor * mean / (norm + EPSILON)).clamp(max=1.0), 1.0
            )
        if rule.limit is None:
            return torch.ones_like(norm)
        return (rule.limit / (norm + EPSILON)).clamp(max=1.0)

    def finite_everywhere(self) -> bool:
        """Measure, and learn whether the norm of every group is finite: one sum over the world. All
        ranks call it together."""
        self.measure()
        number = sum(~norm.isfinite() for norm in self.norms.values())
        return bool(
            self.comm.sum_over(
                torch.as_tensor(number, dtype=torch.float32, device=self.comm.device)
            )
            == 0
        )

    def reported(self, step_applied: bool) -> Tensor:
        """Norm, coefficient and clipped share of every group, one after the other, as the metrics
        have them: zero where another rank reports them; norm and coefficient not-a-number in a step
        that was skipped. A group without parameters has norm 0."""
        zero, nan = self._zero, self._nan
        shares, numbers = self.clipped_share, []
        for group in self.rules:
            if self.speakers.get(group, 0) != self.comm.rank:
                numbers += [zero, zero, zero]
            elif not step_applied:
                numbers += [nan, nan, shares.get(group, zero)]
            else:
                numbers += [
                    self.norms.get(group, zero),
                    self.coefficients.get(group, zero + 1),
                    shares.get(group, zero),
                ]
        return torch.stack([number.float().reshape(()) for number in numbers])

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Inside the optimizer's step: the gradient it is about to use, or this rank's slice of it;
        None where it is not this one's turn."""
        if not self.partitioned:
            return parameter.grad
        where = self._place(parameter)
        if where is None:
            return None
        flat = self._slices[where[0]]
        if not any(flat is group["params"][0] for group in self.optimizer.optimizer.param_groups):
            return None
        return flat.grad.narrow(0, *where[1:])

    def _measurable(self, parameter: nn.Parameter) -> tuple[Tensor, float] | None:
        """The same, also before its turn, and what it is still scaled by: there it is, but for an
        offloaded optimizer, in a list of pieces."""
        gradient, where = (
            self.gradient(parameter),
            self._place(parameter) if self.partitioned else None,
        )
        if gradient is not None:
            return gradient, 1.0
        if where is None:
            return None
        (group, start, length), scale = where, float(self.optimizer.loss_scale)
        if self._slices[group].grad is not None:
            return self._slices[group].grad.narrow(0, start, length), scale
        for piece in self.optimizer.averaged_gradients[group]:
            if start == 0:
                return piece, scale
            start -= piece.numel()
        raise RuntimeError(
            f"no piece of parameter group {group} begins where DeepSpeed's mapping says"
        )

    @staticmethod
    def _place(parameter: Any) -> tuple[int, int, int] | None:
        """(parameter group, start, number of elements): where this rank's slice of the parameter
        lies in its flat slices."""
        mapping = parameter._hp_mapping  # which DeepSpeed adds
        if mapping is None:
            return None
        address = mapping.get_hp_fragment_address()
        return mapping.param_group_index, address.start, address.numel

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on, of the groups of this rank; equal on all ranks that hold a
        group."""
        return {
            "steps": self._steps,
            "clipped_steps": {group: int(number) for group, number in self._clipped_steps.items()},
            "mean_norm": {group: float(mean) for group, mean in self._mean_norm.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also from a state with more groups than this rank has. Raises ValueError where one of
        them is missing."""
        for key, own in (("clipped_steps", self._clipped_steps), ("mean_norm", self._mean_norm)):
            if missing := sorted(set(own) - set(state[key])):
                raise ValueError(
                    f"clipping state: {key} of {', '.join(missing)} is not in the checkpoint, "
                    f"which has that of {sorted(state[key])}; go on with the gradient_clipping "
                    "that it was made with"
                )
            own.update({group: self._number(state[key][group]) for group in own})
        self._steps = state["steps"]

    def _number(self, value: float) -> Tensor:
        return torch.tensor(float(value), dtype=torch.float64, device=self.comm.device)


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


def _limit(gradients: list[Tensor], bound: float) -> None:
    torch._foreach_clamp_min_(gradients, -bound)
    torch._foreach_clamp_max_(gradients, bound)


def _limited(gradients: list[Tensor], bound: float) -> list[Tensor]:
    """Copies in fp32, in which the bound is not rounded."""
    copies = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    torch._foreach_copy_(copies, gradients)
    _limit(copies, bound)
    return copies


def _in_parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """All elements of tensors that are alike, at most `LIMITED_AT_ONCE` at a time."""
    part: list[Tensor] = []
    room = LIMITED_AT_ONCE
    for tensor in tensors:
        large = tensor.numel() > LIMITED_AT_ONCE
        for piece in tensor.reshape(-1).split(LIMITED_AT_ONCE) if large else (tensor,):
            if part and piece.numel() > room:
                yield part
                part, room = [], LIMITED_AT_ONCE
            part.append(piece)
            room -= piece.numel()
    if part:
        yield part


def _members(
    parameters: Mapping[str, nn.Parameter], rules: Mapping[str, ClippingRule], group: str
) -> list[nn.Parameter]:
    """The trainable parameters of a group, each once: one with two names belongs to the group of
    the first."""
    first_names = {id(p): name for name, p in reversed(list(parameters.items()))}
    return [
        p
        for name, p in parameters.items()
        if p.requires_grad and first_names[id(p)] == name and group_of(name, rules) == group
    ]
