"""Branches that no loss gave a gradient in a step, and whose towers therefore do not move in it.

With several pairs a global batch may hold no row of a branch that any of them compares: no sample
has the modality, none could be loaded, or the pair weighs 0. The branch's gradient is 0 then, yet a
step would move its weights by momentum, decay and rounding. So it is none: weights, optimizer
state, averages, limits of clipping and running statistics stay as they were, bit for bit, and the
learning-rate schedule goes on.

Every last stage counts its rows with a gradient, and the counts travel with the squares of the
norms (`GroupedClipping.measure`), so all stages of a branch decide alike. What is withheld are
whole parameter groups: with several pairs each group holds the parameters of one branch
(`Setting.branch`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine.optimizer.clipping import GroupedClipping
from engine.optimizer.parameter_groups import Setting


class StandingStill:
    """Withholds the gradients of such branches from the optimizer that steps the parameters.

    `settings[i]`: of its i-th parameter group. Its hooks come behind those of `clipping`.
    """

    def __init__(
        self,
        clipping: GroupedClipping,
        optimizer: torch.optim.Optimizer,
        settings: Sequence[Setting],
        branches: Sequence[str],
    ):
        self._clipping, self._branches = clipping, tuple(branches)
        # whatever DeepSpeed's wrapper puts into the groups, their order is that of the settings
        self._branch_of = {
            id(tensor): setting.branch
            for setting, group in zip(settings, optimizer.param_groups, strict=True)
            for tensor in group["params"]
        }
        self._optimizer = optimizer
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self.branches: Collection[str] | None = None
        if self._branches:
            optimizer.register_step_pre_hook(lambda *_: self._withhold())
            optimizer.register_step_post_hook(lambda *_: self._give_back())

    def start_step(self, rows: Tensor) -> None:
        """`rows` [branches] float64, of this rank, which may still be filled: rows of each branch
        that the losses gave a gradient."""
        self.branches = None
        self._clipping.start_step(rows if self._branches else None)

    def moved(self, tensor: Tensor) -> bool:
        """Has the step moved what the optimizer steps?"""
        return self._branch_of[id(tensor)] not in (self.branches or ())

    def _withhold(self) -> None:
        if self.branches is None:  # ZeRO-1 steps its groups one after the other
            rows = self._clipping.beside
            assert rows is not None, "clipping measures first"
            self.branches = {b for b, number in zip(self._branches, rows.tolist()) if number == 0}
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None and not self.moved(tensor):
                    self._withheld.append((tensor, tensor.grad))
                    tensor.grad = None  # which optimizers pass over

    def _give_back(self) -> None:
        # an offloaded optimizer has its buffers in there
        for tensor, gradient in self._withheld:
            tensor.grad = gradient
        self._withheld.clear()
