"""What each layer costs, measured on the present device: one layer at a time, built, measured,
freed. Equal layers are measured once.

A layer runs as the executor runs it: in training mode, on named tensors, its parameters' gradients
adding up. What was measured is kept in `WYE_CACHE` (default ~/.cache/wye), so the next start with
the same layers on the same hardware measures nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from engine.compiling import compile_layer, compiling
from engine.layer_keys import layer_key
from engine.planning.costs import Curve, LayerCost
from engine.planning.measured import (
    Cache,
    Measurement,
    Tensors,
    device_identity,
    digest,
    signature,
)
from engine.processes.out_of_memory import explained, message_of_profile
from engine.processes.places import Places
from engine.streams import runs_behind


class ProfiledLayer(Protocol):
    """What is asked of a layer's description: its name, and the layer itself without memory (meta
    device), which is only inspected."""

    @property
    def name(self) -> str: ...

    @property
    def template(self) -> nn.Module: ...


@dataclass(frozen=True)
class Effort:
    """How long to measure. After a pass that is not counted, passes are repeated until there are
    `most_repeats` or time is over."""

    # for all layers of a call; each measurement gets an equal part of what is left
    budget_s: float = 60.0
    least_repeats: int = 2  # even when there is no time
    most_repeats: int = 9

    def repeats(self, share_s: float, pass_s: float) -> int:
        return min(self.most_repeats, max(self.least_repeats, int(share_s / max(pass_s, 1e-9))))


# -- ranks that measure at the same time


class Ranks:
    """All ranks of the default process group, or, without `places`, this process by itself. All
    ranks call each method together, and every answer is the same on all of them."""

    def __init__(self, device: torch.device | None = None, places: Places | None = None):
        self.rank, self.world_size, self._wire = 0, 1, device
        self.places, self.who = places or Places.together(1), "this process"
        if places is not None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.who = f"rank {self.rank}"
            self._wire = torch.device("cpu") if dist.get_backend() == "gloo" else device

    def all(self, flag: bool) -> bool:
        """Whether it is so on every rank."""
        return bool(self.least(int(flag)))

    def least(self, number: int) -> int:
        return int(self._reduce([number], dist.ReduceOp.MIN)[0])

    def mean(self, numbers: Sequence[float]) -> list[float]:
        return [total / self.world_size for total in self._reduce(numbers, dist.ReduceOp.SUM)]

    def _reduce(self, numbers: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return list(numbers)
        wired = torch.tensor(numbers, dtype=torch.float64, device=self._wire)
        dist.all_reduce(wired, op)
        return wired.tolist()


# -- layers


def profile_layers(
    specs: Sequence[ProfiledLayer],
    build_layer: Callable[[Any], nn.Module],
    inputs: Callable[[int], Tensors],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[int],
    effort: Effort | None = None,
    ranks: Ranks | None = None,
    compiled: bool = False,
    done: Callable[[], object] | None = None,
) -> list[LayerCost]:
    """Seconds and bytes of each layer, in order, for the micro-batch sizes in `sizes`; `device`
    holds one layer at a time.

    `inputs(size)` gives what the first layer reads, as it will come from the data, and tensors that
    only pass through (they travel too). Layers behind it get random numbers of the right shapes.
    `build_layer` is called for layers that must be measured. Equal layers, by `layer_key` and
    inputs, are measured once, in this call and, through the cache, in others. `compiled`: they run
    through torch.compile; compiling is not part of their time. `done` is called after each layer.
    Raises OutOfMemory, with the layer and the size, where one does not fit.
    """
    sizes = sorted(set(sizes))
    structures = [layer_key(spec.template) for spec in specs]
    profiler = _Profiler(
        specs=specs,
        build_layer=build_layer,
        dtype=dtype,
        device=device,
        effort=effort or Effort(),
        ranks=ranks or Ranks(),
        compiled=compiled,
    )
    costs = []
    # the run draws as if nothing had been measured
    devices = [device] if runs_behind(device) else []
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        tensors = {size: placed(inputs(size), dtype, device) for size in sizes}
        for position, spec in enumerate(specs):
            left = len(set(structures[position:])) * len(sizes)
            measured = profiler.measure(spec, structures[position], tensors, left)
            tensors = {size: _behind(measured[size], tensors[size], device) for size in sizes}
            costs.append(_layer_cost(spec, measured))
            if done is not None:
                done()
    return costs


def _layer_cost(spec: ProfiledLayer, measured: Mapping[int, Measurement]) -> LayerCost:
    def curve(of: str) -> Curve:
        return Curve(tuple(measured), tuple(float(getattr(m, of)) for m in measured.values()))

    num_parameters = sum(parameter.numel() for parameter in spec.template.parameters())
    return LayerCost(
        name=spec.name,
        num_parameters=num_parameters,
        forward_s=curve("forward_s"),
        backward_s=curve("backward_s"),
        activation_bytes=curve("activation_bytes"),
        output_bytes=curve("output_bytes"),
    )


@dataclass
class _Profiler:
    """Measures layers of one tower, unless an equal one is known."""

    specs: Sequence[ProfiledLayer]
    build_layer: Callable[[Any], nn.Module]
    dtype: torch.dtype
    device: torch.device
    effort: Effort
    ranks: Ranks
    compiled: bool

    def __post_init__(self) -> None:
        self.weight_bytes = (
            sum(p.numel() for spec in self.specs for p in spec.template.parameters())
            * self.dtype.itemsize
        )
        self.deadline = time.monotonic() + self.effort.budget_s
        self.known: dict[str, Measurement] = {}
        self.cache = Cache()
        self.where = {
            **device_identity(self.device),
            "dtype": str(self.dtype),
            "ranks_on_node": len(self.ranks.places.beside(self.ranks.rank)),
        }
        if self.compiled:
            self.where["compiled"] = True

    def measure(
        self, spec: ProfiledLayer, structure: str, tensors: Mapping[int, Tensors], left: int
    ) -> dict[int, Measurement]:
        """By micro-batch size. `structure`: its `layer_key`; `left`: how many measurements share
        what is left of the time, at most."""
        measured, layer = {}, None
        for size, given in tensors.items():
            key = {**self.where, "structure": digest(structure), "inputs": signature(given)}
            name = digest(key)
            if name not in self.known:
                found = self.cache.read(name)
                # if one does not know it, all measure: they slow each other down
                all_know = self.ranks.all(found is not None)
                if found is None or not all_know:
                    with explained(
                        self.device, partial(message_of_profile, self.ranks.who, spec.name, size)
                    ):
                        layer = layer if layer is not None else self._built(spec)
                        with compiling() if self.compiled else nullcontext():
                            found = self._measure(
                                layer, given, max(0.0, self.deadline - time.monotonic()) / left
                            )
                self.known[name] = self._agreed(found)
                if not all_know:
                    self.cache.write(name, {"layer": spec.name, **key}, self.known[name])
            measured[size] = self.known[name]
            left = max(1, left - 1)
        return measured

    def _agreed(self, found: Measurement) -> Measurement:
        forward_s, backward_s = self.ranks.mean([found.forward_s, found.backward_s])
        return replace(found, forward_s=forward_s, backward_s=backward_s)

    def _built(self, spec: ProfiledLayer) -> nn.Module:
        layer = self.build_layer(spec).to(self.device).train()
        # DeepSpeed casts parameters and leaves buffers in fp32
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(self.dtype)
        if self.compiled:
            compile_layer(layer)
        return layer

    def _measure(self, layer: nn.Module, given: Tensors, share_s: float) -> Measurement:
        """The first pass counts the bytes, the second warms up, the third tells how many more fit
        into `share_s`."""
        activation_bytes, outputs = _count_bytes(layer, given)
        gradients = {
            name: torch.randn_like(t) * 1e-3 for name, t in outputs.items() if t.requires_grad
        }
        signature = tuple(
            (name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad)
            for name, t in outputs.items()
        )
        del outputs
        flusher = CacheFlusher(self.weight_bytes, len(self.specs) * activation_bytes, self.device)
        passes = _Passes(
            layer=layer,
            given=given,
            gradients=gradients,
            dtype=self.dtype,
            device=self.device,
            flusher=flusher,
        )
        passes.run(1)
        repeats = self.ranks.least(self.effort.repeats(share_s, sum(passes.run(1))))
        return Measurement(*passes.run(repeats), activation_bytes, signature)


@dataclass
class _Passes:
    """Forward and backward of one layer, again and again, as the executor runs a micro-batch."""

    layer: nn.Module
    given: Tensors
    gradients: Tensors
    dtype: torch.dtype
    device: torch.device
    flusher: CacheFlusher

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)
        self.draws = bool(getattr(self.layer, "draws", True))
        self.parameters = [p for p in self.layer.parameters() if p.requires_grad]
        # bf16: DeepSpeed's BF16_Optimizer adds every micro-batch's gradients up in fp32
        self.sums = (
            [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
            if self.dtype == torch.bfloat16
            else []
        )

    def run(self, repeats: int) -> tuple[float, float]:
        """Median seconds of a forward and of a backward."""
        marks = [self._pass() for _ in range(repeats)]
        self.clock.wait()
        forward_s, backward_s = (
            statistics.median(self.clock.between(*both[i]) for both in marks) for i in (0, 1)
        )
        return forward_s, backward_s

    def _pass(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(start, end) of the forward and of the backward."""
        given = _fresh(self.given)
        self.flusher.before_forward(given.values())
        # else a GPU would be busy with that while the host gets ahead, and launches would look free
        self.clock.wait()
        start = self.clock.mark()
        if self.draws:
            torch.manual_seed(0)  # the executor does, before each layer that draws
        outputs = self.layer(given)
        forward = start, self.clock.mark()
        self.flusher.before_backward(self.gradients.values())
        self.clock.wait()
        start = self.clock.mark()
        self._clear()
        torch.autograd.backward(
            [outputs[name] for name in self.gradients], list(self.gradients.values())
        )
        self._add_up()
        del outputs
        return forward, (start, self.clock.mark())

    def _clear(self) -> None:
        present = [p.grad for p in self.parameters if p.grad is not None]
        if self.sums and present:
            torch._foreach_zero_(present)

    def _add_up(self) -> None:
        for total, parameter in zip(self.sums, self.parameters):
            if parameter.grad is not None:
                total.add_(parameter.grad.to(torch.float32))


LARGEST_CACHE_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}


class CacheFlusher:
    """Leaves the caches as they are when a layer's turn comes: full of the other layers, but with
    what its neighbour just made.

    Repeated without it, a layer would find its weights in the cache; in training it does only where
    the whole tower fits. Between two forwards the tower touches its weights and a micro-batch's
    activations, between two backwards its gradients as well.
    """

    def __init__(self, weight_bytes: float, activation_bytes: float, device: torch.device):
        most = LARGEST_CACHE_BYTES.get(device.type, LARGEST_CACHE_BYTES["cpu"])
        self._forward, self._backward = (
            torch.zeros(
                int(min(most, n * weight_bytes + activation_bytes)),
                dtype=torch.uint8,
                device=device,
            )
            for n in (1, 2)
        )

    def before_forward(self, warm: Iterable[Tensor] = ()) -> None:
        self._touch(self._forward, warm)

    def before_backward(self, warm: Iterable[Tensor]) -> None:
        self._touch(self._backward, warm)

    @torch.no_grad()
    def _touch(self, others: Tensor, warm: Iterable[Tensor]) -> None:
        others.add_(1)
        for tensor in warm:
            tensor.sum()


class Clock:
    """Device events on a GPU, so that what is measured is the device's time; the host's clock on a
    CPU."""

    def __init__(self, device: torch.device):
        self._on_device = runs_behind(device)

    def mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self._on_device:
            get_accelerator().synchronize()

    def between(self, start: Any, end: Any) -> float:
        """Seconds. On a GPU after `wait`."""
        return start.elapsed_time(end) / 1000 if self._on_device else end - start


def _count_bytes(layer: nn.Module, given: Tensors) -> tuple[int, Tensors]:
    """What one micro-batch keeps from forward to backward because of this layer, and its outputs.

    Counted are storages, each once: those that the graph saves, and the outputs, which the next
    layer saves or the executor holds. Not counted: parameters and buffers, and inputs that another
    layer made, for they are counted there as outputs.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # keeping it keeps its identity from being used again
        return tensor.detach()

    fresh = _fresh(given)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = layer(fresh)
    for tensor in outputs.values():
        note(tensor)
    made_elsewhere = [t for t in fresh.values() if t.requires_grad]
    for tensor in (*layer.parameters(), *layer.buffers(), *(made_elsewhere and fresh.values())):
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values()), outputs


def _fresh(tensors: Tensors) -> Tensors:
    """The same values as leaves of a new graph."""
    return {
        name: tensor.detach().requires_grad_(tensor.requires_grad)
        for name, tensor in tensors.items()
    }


def placed(tensors: Tensors, dtype: torch.dtype, device: torch.device) -> Tensors:
    """As the executor loads a micro-batch: floats in the layers' precision, none of them wants a
    gradient, nothing else in their storage."""
    return {
        name: t.detach().to(device, dtype if t.is_floating_point() else t.dtype, copy=True)
        for name, t in tensors.items()
    }


def _behind(measured: Measurement, given: Tensors, device: torch.device) -> Tensors:
    """What the next layer is given: random floats, and zeros, which are an index into anything;
    what passed through, as it was."""
    tensors = {}
    for name, kind, shape, wants_gradient in measured.outputs:
        kind = getattr(torch, kind)
        passed = given.get(name)
        if (
            passed is not None
            and not wants_gradient
            and passed.dtype == kind
            and passed.shape == shape
        ):
            tensors[name] = passed
            continue
        made = torch.zeros(shape, dtype=kind, device=device)
        if kind.is_floating_point:
            made = torch.randn(shape, device=device).to(kind)
        tensors[name] = made.requires_grad_(wants_gradient)
    return tensors
