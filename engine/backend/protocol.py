"""What the engine asks of what holds the parameters of a stage, their gradients and the optimizer's
state.

Where the optimizer's state is sharded, a rank steps slices of the parameters; else all of them, as
every replica of the stage does. Clipping, averages, checkpoints and metrics see both as shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

Roots = Sequence[tuple[Tensor | GradientEdge, Tensor]]
"""Where a backward begins, each with its gradient."""


@dataclass(frozen=True, eq=False)
class Shard:
    """Elements offset..offset+numel of the parameter `name` are elements start..start+numel of the
    flattened `held`, which the optimizer steps: the parameter itself, or a flat slice of many.
    `everywhere`: all replicas of the stage hold it whole."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    held: Tensor
    start: int
    everywhere: bool = False

    def of(self, like_held: Tensor) -> Tensor:
        """This shard's elements of a tensor of the shape of `held`: a view, [numel]."""
        return like_held.detach().view(-1)[self.start : self.start + self.numel]


class Backend(Protocol):
    """Computes with the layers of this rank's stage, and trains their parameters."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that steps what the shards hold, with a parameter group for each of the module's.
        Its step hooks see gradients that are averaged over the replicas and unscaled."""

    @property
    def dtype(self) -> torch.dtype:
        """In which the layers compute."""

    @property
    def is_sharded(self) -> bool:
        """Whether a rank steps slices of the parameters."""

    @property
    def loss_scale(self) -> float:
        """By which the gradients that enter a backward are multiplied: fp16's, else 1."""

    @property
    def rates(self) -> Mapping[int | None, float]:
        """The learning rate of the next step, by length of warm-up (`GroupSchedule`)."""

    @property
    def num_steps(self) -> int:
        """Of the run so far, with those that were skipped."""

    @property
    def num_skipped(self) -> int: ...

    # -- a step

    def forward(self, inputs: dict[str, Tensor], **part: int) -> dict[str, Tensor]:
        """All layers of the stage, or those from `start` to `stop`."""

    def backward(self, roots: Roots, last: bool = False) -> None:
        """Add to the gradients of the step. `last`: nothing but `reduce_gradients` follows."""

    def backward_alone(self, roots: Roots) -> None:
        """The same for a backward that other replicas of the stage do not do at the same time, or
        not as often. It reaches parameters behind the layers only
        (`StageModule.learned_behind_layers`)."""

    def reduce_gradients(self) -> None:
        """Average the gradients of the step over the replicas of the stage."""

    def step(self, is_finite: Callable[[], bool]) -> bool:
        """Step the optimizer and the rates, unless a gradient of any rank is not finite; whether it
        did. `is_finite` is asked where nothing here finds out; all ranks call it together."""

    def forwards_only(self, number: int) -> AbstractContextManager[None]:
        """In here are `number` forwards without a backward, and as many as they like on the other
        replicas of the stage. All of them enter together."""

    # -- parameters

    def shards(self) -> list[Shard]:
        """What this rank's optimizer holds of the parameters of its stage, by all their names;
        parameters that do not learn are held by themselves."""

    def stepped(self, parameter: nn.Parameter) -> Tensor | None:
        """What the optimizer steps of a parameter, flat; None: nothing of it is stepped here."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Inside the optimizer's step: the gradient that it is about to use, of what is stepped
        here; None where there is none, or where it is another group's turn."""

    def reduced_gradient(self, parameter: nn.Parameter) -> tuple[Tensor, float] | None:
        """The same behind `reduce_gradients`, and what it is still multiplied by."""

    def weights_replaced(self) -> None:
        """Compute with what others have put in the place of what is stepped. All ranks call it
        together."""

    # -- what goes on when a run does

    def progress(self) -> dict[str, Any]:
        """Counters, schedule and loss scale, as JSON."""

    def load_progress(self, progress: Mapping[str, Any]) -> None: ...

    # -- facts for metrics

    def searches_loss_scale(self, loss: float) -> bool:
        """Was a step of this `loss` skipped because fp16's dynamic loss scale was too high? Then
        its samples are not to blame, and the scale ends the run by itself when it can fall no
        further."""

    def sent_bytes(self, num_steps: int) -> float:
        """By this rank in so many steps, to average gradients and hand new weights round."""


def stepped_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All that an optimizer steps, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]
