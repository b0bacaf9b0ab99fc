"""Muon: the matrices of a network are stepped along orthogonalised momentum (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon), all other parameters by AdamW.

    m ← m + (1 − momentum) · (g − m)
    u = g + momentum · (m − g)                       Nesterov's; without: u = m
    W ← W − lr · weight_decay · W − lr · 0.2 · √max(rows, columns) · orthogonal(u)

`orthogonal` sets all singular values to about 1. The entries of an orthogonal matrix have a root
mean square of 1/√max(rows, columns), and those of an update of AdamW one of 0.2 to 0.4; with that
factor both are alike, so that AdamW's rate and decay carry over (Liu et al. 2025, "Muon is Scalable
for LLM Training", section 2.2).

torch has a Muon from 2.9 on, for whole matrices alone. Here they may be cut into slices (ZeRO):
momentum and decay are elementwise and stay in the slice, so that the optimizer keeps tensors of the
slice's shape, and `engine/optimizer/whole_matrices.py` puts together what is orthogonalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from engine.backend.protocol import Shard
from engine.communication import Communicator
from engine.optimizer.whole_matrices import WholeMatrices, tell_replicas

# of the quintic a·X + b·(XXᵀ)X + c·(XXᵀ)²X, by Jordan: steep at 0, so that few steps suffice, for
# which singular values end between 0.7 and 1.2 instead of at 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NORM_LEAST = 1e-7  # of a matrix of zeros
RMS = 0.2  # of the entries of an update, as of AdamW's


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """The nearest orthogonal matrix, about: [rows, columns], in the dtype of `computed_in`.

    `steps` of a Newton-Schulz iteration on the matrix divided by its norm.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(computed_in(matrix.device))
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=NORM_LEAST)
    for _ in range(steps):
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def computed_in(device: torch.device) -> torch.dtype:
    """bf16 is exact enough (Jordan), and most CPUs are slower in it."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def update_scale(shape: Sequence[int]) -> float:
    """By which an orthogonal matrix of this shape is multiplied; see above."""
    return RMS * math.sqrt(max(shape))


class Muon(torch.optim.Optimizer):
    """Steps parameter groups with `"muon": True`, of matrices, by Muon, and all others by AdamW.

    `lr` and `weight_decay`, which is decoupled, are of both; `momentum`, `nesterov` and `ns_steps`,
    those of the Newton-Schulz iteration, of Muon; `betas` and `eps` of AdamW. Defaults are those of
    torch's Muon and AdamW. Raises ValueError for a number out of range, and for a parameter of a
    group of matrices that is none.

    Where something else takes the place of the parameters, such as slices of them, `place` says
    which elements of which matrix it holds.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "betas": tuple(betas),
            "eps": eps,
            "muon": False,
            # AdamW's, on a CPU as on a GPU; by this key torch places what a checkpoint has counted
            "fused": True,
        }
        for name, value in (("momentum", momentum), ("beta", betas[0]), ("beta", betas[1])):
            if not 0 <= value < 1:
                raise ValueError(f"Muon: got a {name} of {value}; it is at least 0 and below 1")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if value < 0:
                raise ValueError(f"Muon: got {name} {value}; it is at least 0")
        if ns_steps < 1:
            raise ValueError(f"Muon: got ns_steps {ns_steps}; it is a whole number of at least 1")
        super().__init__(params, defaults)
        for group in self.param_groups:
            shapes = [tuple(parameter.shape) for parameter in group["params"]]
            if group["muon"] and any(len(shape) != 2 for shape in shapes):
                raise ValueError(
                    f"Muon steps matrices, and a group of them has parameters of the shapes {shapes}; "
                    "leave those that are none to AdamW"
                )
        self._place([self._parameters_of(group) for group in self.param_groups])

    @staticmethod
    def _parameters_of(group: Mapping[str, Any]) -> list[Shard]:
        return [
            Shard(str(number), tuple(held.shape), 0, held.numel(), held, 0, everywhere=True)
            for number, held in enumerate(group["params"] if group["muon"] else ())
        ]

    def place(self, shards: Sequence[Shard], comm: Communicator) -> None:
        """Say what of the parameters is stepped here. All replicas of the stage call it together,
        once, behind whatever has put slices in the place of the parameters."""
        groups = []
        for group in self.param_groups:
            held = {id(tensor) for tensor in group["params"]} if group["muon"] else set()
            own: dict[tuple[int, int], Shard] = {}
            for shard in shards:
                if id(shard.held) in held:  # of two names the first
                    own.setdefault((id(shard.held), shard.start), shard)
            groups.append([*own.values()])
        self._place(groups, comm)

    def _place(self, groups: Sequence[Sequence[Shard]], comm: Communicator | None = None) -> None:
        self._number = {
            id(tensor): number
            for number, group in enumerate(self.param_groups)
            for tensor in group["params"]
        }
        self._matrices = WholeMatrices(groups) if comm is None else tell_replicas(groups, comm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of all groups that are there, of which an earlier one may have had others: ZeRO
        steps one at a time. Where all replicas of a stage withhold the gradients of a group, it is
        passed over."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stepped = [tensor for tensor in group["params"] if tensor.grad is not None]
            if stepped:
                (self._step_matrices if group["muon"] else self._step_others)(group, stepped)
        return loss

    def _step_matrices(self, group: Mapping[str, Any], stepped: Sequence[Tensor]) -> None:
        number = self._number.get(id(stepped[0]))
        if number is None:
            raise RuntimeError("what Muon steps was replaced; `place` has to say by what")
        momentum = group["momentum"]
        updates = {}
        for tensor in stepped:
            gradient, buffer = tensor.grad, self._kept(tensor, "momentum_buffer")
            assert gradient is not None, "others are passed over"
            buffer.lerp_(gradient, 1 - momentum)
            updates[id(tensor)] = (
                gradient.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()
            )
        dtype = computed_in(stepped[0].device)
        self._matrices.replace(
            number, updates, lambda matrix: orthogonalised(matrix, group["ns_steps"]), dtype
        )
        for shard in self._matrices.shards(number):
            shard.of(updates[id(shard.held)]).mul_(update_scale(shard.shape))
        for tensor in stepped:
            tensor.mul_(1 - group["lr"] * group["weight_decay"])
            tensor.add_(updates[id(tensor)], alpha=-group["lr"])

    def _step_others(self, group: Mapping[str, Any], stepped: list[Tensor]) -> None:
        for tensor in stepped:
            if "step" not in self.state[tensor]:
                self.state[tensor]["step"] = torch.zeros((), device=tensor.device)
        beta1, beta2 = group["betas"]
        adamw(
            stepped,
            [tensor.grad for tensor in stepped if tensor.grad is not None],
            [self._kept(tensor, "exp_avg") for tensor in stepped],
            [self._kept(tensor, "exp_avg_sq") for tensor in stepped],
            [],
            [self.state[tensor]["step"] for tensor in stepped],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _kept(self, tensor: Tensor, key: str) -> Tensor:
        """What is kept for a tensor, of its shape; zeros at first."""
        state = self.state[tensor]
        if key not in state:
            state[key] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        return state[key]
