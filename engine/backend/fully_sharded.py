"""Weights, gradients and the optimizer's state of a stage, shared out over its replicas: ZeRO-3, by
torch's `fully_shard` (FSDP2; Zhao et al. 2023).

    forward    gather layer 1, run it, free it    gather layer 2, run it, free it    …
    backward   …   gather layer 2, run it, free it, average its gradients    gather layer 1, …

A replica holds its share in fp32, and one or two layers whole while they run, in the dtype of the
run. Every backward averages its gradients in fp32 and adds them to the share of the step.

DeepSpeed's own ZeRO-3 runs one backward for each forward: it counts micro-steps in its forward
alone, so that several forwards before their backwards, which an exact loss over the global batch
needs, train otherwise without a word. It also compares its traces over all ranks, and the stages of
a fork run different layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from engine.backend.deepspeed import StageLayers
from engine.backend.protocol import Roots, Shard
from engine.communication import Communicator
from engine.config.implied import precision_of

COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # DeepSpeed's names


class LayerSharding:
    """Leaves of each layer that a stage builds the share of this replica. All ranks make one together.

    `config`: DeepSpeed's. Raises ValueError where the replicas talk to each other in a way that
    torch has no sums of shares for.
    """

    def __init__(self, comm: Communicator, config: Mapping[str, Any]):
        device = comm.device.type
        if (
            comm.stage.replicas > 1
            and device != "cpu"
            and dist.get_backend(comm.stage_group) == "gloo"
        ):
            raise ValueError(
                f"zero_optimization.stage: 3 shares out weights by NCCL, and the ranks of {device} "
                'talk by gloo; use "zero_optimization": {"stage": 2}'
            )
        self.dtype = torch.bfloat16 if precision_of(config) == "bf16" else torch.float32
        group: Any = comm.stage_group
        for stage in comm.graph.stages:
            if stage.replicas == 1:  # whose group has no name, by which torch finds it
                alone = dist.new_group(list(stage.ranks), backend="gloo")
                group = alone if stage is comm.stage else group
        self._mesh = DeviceMesh.from_group(group, device)
        self._precision = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    def shard(self, layer: nn.Module) -> None:
        """Of a whole layer, on the device where it runs. Buffers stay whole, and as they are."""
        if not any(True for _ in layer.parameters()):
            return
        layer.register_forward_hook(_reach_all)
        fully_shard(layer, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._precision)
        _Passing(layer)

    def shard_stage(self, module: nn.Module) -> None:
        """Of the module around them, behind all of them: it knows when a backward is over."""
        fully_shard(module, mesh=self._mesh, mp_policy=self._precision)


class _ReachAll(torch.autograd.Function):
    """A tensor as it is, whose backward reaches the parameters that stand beside it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in parameters]
        return tensor.detach()  # no view, of which torch would lose its hooks

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.parameters
        )
        return gradients[0], *zeros


def _reach_all(layer: nn.Module, _: Any, made: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Every parameter of a layer gets a gradient in every backward, also one that this micro-batch
    has not used: the replicas add up what has a gradient, and must agree on what that is."""
    if not torch.is_grad_enabled():
        return None
    learned: list[Tensor] = [p for p in layer.parameters() if p.requires_grad]
    found = dict(made)
    for name, tensor in made.items():
        if tensor.requires_grad:
            found[name], learned = _ReachAll.apply(tensor, *learned), []
    return found


class _Passing:
    """Hooks around those of `fully_shard`, which gathers a layer in the backward as soon as the
    gradient of anything that leaves it has come: tensors that it does not read, such as embeddings
    of another branch, go past it."""

    def __init__(self, layer: nn.Module):
        self._past: dict[str, Tensor] = {}
        if hasattr(layer, "reads"):
            layer.register_forward_pre_hook(self._let_past, prepend=True)
            layer.register_forward_hook(self._join)

    def _let_past(self, layer: Any, given: tuple[dict[str, Tensor]]) -> tuple[dict[str, Tensor]]:
        known = {*layer.reads, *getattr(layer, "reads_if_given", ()), *getattr(layer, "drops", ())}
        self._past = {name: tensor for name, tensor in given[0].items() if name not in known}
        return ({name: tensor for name, tensor in given[0].items() if name in known},)

    def _join(self, _: Any, __: Any, made: dict[str, Tensor]) -> dict[str, Tensor]:
        past, self._past = self._past, {}
        return {**past, **made}


@contextlib.contextmanager
def _gathering() -> Iterator[None]:
    """Memory that weights are gathered in serves training and evaluation, and a tensor that was made
    in inference mode has no part in a backward."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class FullyShardedBackend:
    """See `engine/backend/protocol.py:Backend`.

    The layers of `module` have been sharded by `sharding`. `make_optimizer`: of parameter groups as
    torch's optimizers take them; `parameter_groups`, `make_schedule`: as `DeepSpeedBackend`'s.
    """

    is_sharded, loss_scale = True, 1.0

    def __init__(
        self,
        module: StageLayers,
        comm: Communicator,
        sharding: LayerSharding,
        config: Mapping[str, Any],
        parameter_groups: Sequence[Mapping[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        make_schedule: Callable[[torch.optim.Optimizer], Any],
    ):
        self._module, self._comm, self.dtype = module, comm, sharding.dtype
        self._batch_size = config["train_batch_size"]
        sharding.shard_stage(module)
        self._layers = module.forward_funcs
        _gather_in_order(self._layers[module.num_locked_first :])
        # of each parameter the share of this replica, some of its rows; empty where it has none
        self._shares = {id(p): _local(p) for p in module.parameters()}
        # Muon has messages for a group, also on a replica that has no row of any of its matrices
        by_all = {id(p) for group in parameter_groups if group.get("muon") for p in group["params"]}
        # what is stepped: the same memory
        self._stepped = {
            id(p): nn.Parameter(self._shares[id(p)])
            for p in module.parameters()
            if p.requires_grad and (self._shares[id(p)].numel() or id(p) in by_all)
        }
        self._learned = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(
            [
                {
                    **group,
                    "params": [
                        self._stepped[id(p)] for p in group["params"] if id(p) in self._stepped
                    ],
                }
                for group in parameter_groups
            ]
        )
        self._schedule = make_schedule(self.optimizer)
        self._counters = dict.fromkeys(COUNTERS, 0)
        others = (comm.stage.replicas - 1) / comm.stage.replicas
        # of each layer, that this replica sends to gather it, and to average its gradients
        self._gathered_bytes = [
            others * _numel(each) * self.dtype.itemsize for each in self._layers
        ]
        self._averaged_bytes = others * 4 * sum(p.numel() for p in self._learned)
        self._sent_bytes = 0.0

    @property
    def wrapper(self) -> str:
        return "fully_shard"

    @property
    def rates(self) -> Mapping[int | None, float]:
        return self._schedule.rates

    @property
    def num_steps(self) -> int:
        return self._counters["global_steps"]

    @property
    def num_skipped(self) -> int:
        return self._counters["skipped_steps"]

    # -- a step

    def forward(self, inputs: dict[str, Tensor], **part: int) -> dict[str, Tensor]:
        gathered = self._gathered_bytes[part.get("start", 0) : part.get("stop")]
        self._sent_bytes += sum(gathered)
        with _gathering():
            return self._module(inputs, **part)

    def backward(self, roots: Roots, last: bool = False) -> None:
        again = self._gathered_bytes[self._module.num_locked_first :]
        self._sent_bytes += sum(again) + self._averaged_bytes
        outputs: Any = [root for root, _ in roots]
        torch.autograd.backward(outputs, [gradient for _, gradient in roots])

    def backward_alone(self, roots: Roots) -> None:
        raise RuntimeError("under ZeRO-3 every backward is one of all replicas of a stage")

    def reduce_gradients(self) -> None:
        """Every backward has averaged its own."""
        for parameter in self._learned:
            if (stepped := self._stepped.get(id(parameter))) is not None:
                grad = parameter.grad
                stepped.grad = None if grad is None else _local(grad)

    def step(self, is_finite: Callable[[], bool]) -> bool:
        applied = is_finite()
        if applied:
            self.optimizer.step()
            self._schedule.step()
        for parameter in (*self._learned, *self._stepped.values()):
            parameter.grad = None
        done = {"global_steps": 1, "global_samples": self._batch_size, "skipped_steps": not applied}
        for name, number in done.items():
            self._counters[name] += number
        return applied

    @contextlib.contextmanager
    def forwards_only(self, number: int) -> Iterator[None]:
        """A replica with fewer gathers the layers as often as the one with most."""
        most = max(self._comm.gather_counts(number))
        yield
        for _ in range(number, most):
            for layer in self._layers:
                if isinstance(layer, FSDPModule):
                    with _gathering():
                        layer.unshard()
                        layer.reshard()
            self._sent_bytes += sum(self._gathered_bytes)

    # -- parameters

    def shards(self) -> list[Shard]:
        found = []
        for name, parameter in self._module.canonical_parameters.items():
            share = self._stepped.get(id(parameter), self._shares[id(parameter)])
            if share.numel():
                shape, offset = tuple(parameter.shape), self._offset(parameter)
                found.append(Shard(name, shape, offset, share.numel(), share, 0))
        return found

    def _offset(self, parameter: nn.Parameter) -> int:
        """Where the share of this replica begins in the flattened parameter. Replicas have equally
        many rows, the last of them fewer."""
        rows = math.ceil(parameter.shape[0] / self._comm.stage.replicas)
        return self._comm.replica * rows * math.prod(parameter.shape[1:])

    def stepped(self, parameter: nn.Parameter) -> Tensor | None:
        stepped = self._stepped.get(id(parameter))
        return stepped.detach().view(-1) if stepped is not None and stepped.numel() else None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        stepped = self._stepped.get(id(parameter))
        return stepped.grad if stepped is not None and stepped.numel() else None

    def reduced_gradient(self, parameter: nn.Parameter) -> tuple[Tensor, float] | None:
        gradient = self.gradient(parameter)
        return None if gradient is None else (gradient, 1.0)

    def weights_replaced(self) -> None:
        """The next forward gathers them."""

    # -- what goes on when a run does

    def progress(self) -> dict[str, Any]:
        return {
            "counters": dict(self._counters),
            "lr_scheduler": self._schedule.state_dict(),
            "loss_scaler": {},
        }

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        self._counters |= progress["counters"]
        if progress["lr_scheduler"]:
            self._schedule.load_state_dict(progress["lr_scheduler"])

    # -- facts for metrics

    def searches_loss_scale(self, loss: float) -> bool:
        return False

    def sent_bytes(self, num_steps: int) -> float:
        return self._sent_bytes


def _gather_in_order(layers: Sequence[nn.Module]) -> None:
    """While a backward runs a layer, gather the one before it. By itself torch takes the order of
    all forwards since the last backward, of which replicas may have done unlike numbers."""
    sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for before, layer in zip([*sharded[:1], *sharded], sharded):
        layer.set_modules_to_backward_prefetch([before])  # of the first itself, which is there


def _numel(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _local(tensor: Tensor) -> Tensor:
    """Of a sharded tensor what is on this rank, in the same memory."""
    with torch.no_grad():
        local: Any = tensor
        return local.to_local()
