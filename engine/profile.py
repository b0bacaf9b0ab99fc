"""Costs measured on the present device: each layer for some micro-batch sizes, the optimizer, the loss, the links.

    profile_layers     one tower's layers, one at a time: built, measured, freed. Equal layers are measured once
    profile_machine    what is no layer's: the loss's products, gradients into their buffers, the optimizer's step
    measure_links      between neighbours of a node, and between nodes
    profile_together   all of it on every rank at the same time, and the mean over the ranks: they share memory and, on a CPU, cores

A layer runs as the executor runs it: in training mode, on named tensors, its parameters' gradients adding up. What was measured
is kept in `WYE_CACHE` (default ~/.cache/wye), so the next start with the same layers on the same hardware measures nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.costs import Curve, LayerCost, Machine
from engine.measured import Cache, Measurement, Tensors, device_identity, digest, layer_key, signature


class ProfiledLayer(Protocol):
    """What is asked of a layer's description: its name, and the layer itself without memory (meta device), which is only looked at."""

    name: str
    template: nn.Module


@dataclass(frozen=True)
class Effort:
    """How long to measure. After a pass that is not counted, passes are repeated until there are `most_repeats` or time is over."""

    budget_s: float = 60.0  # for all layers of a call; each measurement gets an equal part of what is left
    least_repeats: int = 2  # even when there is no time
    most_repeats: int = 9

    def repeats(self, share_s: float, pass_s: float) -> int:
        return min(self.most_repeats, max(self.least_repeats, int(share_s / max(pass_s, 1e-9))))


# -- ranks that measure at the same time ---------------------------------------------------------------------------------


class Alone:
    """One process by itself."""

    ranks_on_node = 1

    def all(self, flag: bool) -> bool:
        """Whether it is so on every rank. All ranks call it together, like every method here."""
        return flag

    def least(self, number: int) -> int:
        return number

    def mean(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)


class Together(Alone):
    """All ranks of the default process group. Every answer is the same on all of them."""

    def __init__(self, device: torch.device, ranks_on_node: int):
        self.ranks_on_node = ranks_on_node
        self._wire = torch.device("cpu") if dist.get_backend() == "gloo" else device

    def all(self, flag: bool) -> bool:
        return bool(self.least(int(flag)))

    def least(self, number: int) -> int:
        return int(self._reduce([number], dist.ReduceOp.MIN)[0])

    def mean(self, numbers: Sequence[float]) -> list[float]:
        return [number / dist.get_world_size() for number in self._reduce(numbers, dist.ReduceOp.SUM)]

    def _reduce(self, numbers: Sequence[float], op: dist.ReduceOp) -> list[float]:
        wired = torch.tensor(numbers, dtype=torch.float64, device=self._wire)
        dist.all_reduce(wired, op)
        return wired.tolist()


# -- layers ------------------------------------------------------------------------------------------------------------


def profile_layers(
    specs: Sequence[ProfiledLayer],
    build_layer: Callable[[Any], nn.Module],
    inputs: Callable[[int], Tensors],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[int],
    effort: Effort | None = None,
    ranks: Alone | None = None,
) -> list[LayerCost]:
    """Seconds and bytes of each layer, in order, for the micro-batch sizes in `sizes`; `device` holds one layer at a time.

    `inputs(size)` gives what the first layer reads, as it will come from the data, and tensors that only pass through (they travel
    too). Layers behind it get random numbers of the right shapes. `build_layer` is called for layers that must be measured. Equal
    layers, by `layer_key` and inputs, are measured once, in this call and, through the cache, in others.
    """
    sizes = sorted(set(sizes))
    structures = [layer_key(spec.template) for spec in specs]
    profiler = _Profiler(specs, build_layer, dtype, device, effort or Effort(), ranks or Alone())
    costs = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # the run draws as if nothing had been measured
        tensors = {size: _placed(inputs(size), dtype, device) for size in sizes}
        for position, spec in enumerate(specs):
            left = len(set(structures[position:])) * len(sizes)
            measured = profiler.measure(spec, structures[position], tensors, left)
            tensors = {size: _behind(measured[size], tensors[size], device) for size in sizes}
            costs.append(_layer_cost(spec, measured))
    return costs


def _layer_cost(spec: ProfiledLayer, measured: Mapping[int, Measurement]) -> LayerCost:
    def curve(of: str) -> Curve:
        return Curve(tuple(measured), tuple(float(getattr(m, of)) for m in measured.values()))

    num_parameters = sum(parameter.numel() for parameter in spec.template.parameters())
    return LayerCost(spec.name, num_parameters, *map(curve, ("forward_s", "backward_s", "activation_bytes", "output_bytes")))


class _Profiler:
    """Measures layers of one tower, unless an equal one is known."""

    def __init__(
        self,
        specs: Sequence[ProfiledLayer],
        build_layer: Callable[[Any], nn.Module],
        dtype: torch.dtype,
        device: torch.device,
        effort: Effort,
        ranks: Alone,
    ):
        self.build_layer, self.dtype, self.device, self.effort, self.ranks = build_layer, dtype, device, effort, ranks
        self.num_layers = len(specs)
        self.weight_bytes = sum(p.numel() for spec in specs for p in spec.template.parameters()) * dtype.itemsize
        self.deadline = time.monotonic() + effort.budget_s
        self.known: dict[str, Measurement] = {}
        self.cache = Cache()
        self.where = {**device_identity(device), "dtype": str(dtype), "ranks_on_node": ranks.ranks_on_node}

    def measure(self, spec: ProfiledLayer, structure: str, tensors: Mapping[int, Tensors], left: int) -> dict[int, Measurement]:
        """By micro-batch size. `structure`: its `layer_key`; `left`: how many measurements share what is left of the time, at most."""
        measured, layer = {}, None
        for size, given in tensors.items():
            key = {**self.where, "structure": digest(structure), "inputs": signature(given)}
            name = digest(key)
            if name not in self.known:
                found = self.cache.read(name)
                all_know = self.ranks.all(found is not None)  # if one does not, all measure: they slow each other down
                if not all_know:
                    layer = layer if layer is not None else self._built(spec)
                    found = self._measure(layer, given, max(0.0, self.deadline - time.monotonic()) / left)
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
        for parameter in layer.parameters():  # DeepSpeed casts parameters and leaves buffers in fp32
            parameter.data = parameter.data.to(self.dtype)
        return layer

    def _measure(self, layer: nn.Module, given: Tensors, share_s: float) -> Measurement:
        """The first pass counts the bytes, the second warms up, the third tells how many more fit into `share_s`."""
        activation_bytes, outputs = _count_bytes(layer, given)
        gradients = {name: torch.randn_like(t) * 1e-3 for name, t in outputs.items() if t.requires_grad}
        signature = tuple((name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad) for name, t in outputs.items())
        del outputs
        cooler = _Cooler(self.weight_bytes, self.num_layers * activation_bytes, self.device)
        passes = _Passes(layer, given, gradients, self.dtype, self.device, cooler)
        passes.run(1)
        repeats = self.ranks.least(self.effort.repeats(share_s, sum(passes.run(1))))
        return Measurement(*passes.run(repeats), activation_bytes, signature)


class _Passes:
    """Forward and backward of one layer, again and again, as the executor runs a micro-batch."""

    def __init__(self, layer: nn.Module, given: Tensors, gradients: Tensors, dtype: torch.dtype, device: torch.device, cooler: _Cooler):
        self.layer, self.given, self.gradients, self.cooler, self.clock = layer, given, gradients, cooler, _Clock(device)
        self.draws = bool(getattr(layer, "draws", True))
        self.parameters = [p for p in layer.parameters() if p.requires_grad]
        # bf16: DeepSpeed's BF16_Optimizer adds every micro-batch's gradients up in fp32
        self.sums = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters] if dtype == torch.bfloat16 else []

    def run(self, repeats: int) -> tuple[float, float]:
        """Median seconds of a forward and of a backward."""
        marks = [self._pass() for _ in range(repeats)]
        self.clock.wait()
        return tuple(statistics.median(self.clock.between(*both[i]) for both in marks) for i in (0, 1))

    def _pass(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(start, end) of the forward and of the backward."""
        given = _fresh(self.given)
        self.cooler.before_forward(given.values())
        self.clock.wait()  # else a GPU would be busy with that while the host gets ahead, and launches would look free
        start = self.clock.mark()
        if self.draws:
            torch.manual_seed(0)  # the executor does, before each layer that draws
        outputs = self.layer(given)
        forward = start, self.clock.mark()
        self.cooler.before_backward(self.gradients.values())
        self.clock.wait()
        start = self.clock.mark()
        self._clear()
        torch.autograd.backward([outputs[name] for name in self.gradients], list(self.gradients.values()))
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


class _Cooler:
    """Leaves the caches as they are when a layer's turn comes: full of the other layers, but with what its neighbour just made.

    Repeated without it, a layer would find its weights in the cache; in training it does only where the whole tower fits. Between two
    forwards the tower touches its weights and a micro-batch's activations, between two backwards its gradients as well.
    """

    def __init__(self, weight_bytes: float, activation_bytes: float, device: torch.device):
        most = LARGEST_CACHE_BYTES.get(device.type, LARGEST_CACHE_BYTES["cpu"])
        self._forward, self._backward = (
            torch.zeros(int(min(most, n * weight_bytes + activation_bytes)), dtype=torch.uint8, device=device) for n in (1, 2)
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


class _Clock:
    """Device events on a GPU, so that what is measured is the device's time; the host's clock on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        """Seconds. On a GPU after `wait`."""
        return end - start if self._device is None else start.elapsed_time(end) / 1000


def _count_bytes(layer: nn.Module, given: Tensors) -> tuple[int, Tensors]:
    """What one micro-batch keeps from forward to backward because of this layer, and its outputs.

    Counted are storages, each once: those that the graph saves, and the outputs, which the next layer saves or the executor holds.
    Not counted: parameters and buffers, and inputs that another layer made, for they are counted there as outputs.
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
    return {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}


def _placed(tensors: Tensors, dtype: torch.dtype, device: torch.device) -> Tensors:
    """As the executor loads a micro-batch: floats in the layers' precision, none of them wants a gradient, nothing else in their storage."""
    return {name: t.detach().to(device, dtype if t.is_floating_point() else t.dtype, copy=True) for name, t in tensors.items()}


def _behind(measured: Measurement, given: Tensors, device: torch.device) -> Tensors:
    """What the next layer is given: random floats, and zeros, which are an index into anything; what passed through, as it was."""
    tensors = {}
    for name, kind, shape, wants_gradient in measured.outputs:
        kind = getattr(torch, kind)
        passed = given.get(name)
        if passed is not None and not wants_gradient and passed.dtype == kind and passed.shape == shape:
            tensors[name] = passed
        else:
            made = torch.randn(shape, device=device).to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind, device=device)
            tensors[name] = made.requires_grad_(wants_gradient)
    return tensors


# -- what is no layer's ------------------------------------------------------------------------------------------------

ELEMENTWISE_FLOPS = 10  # per logit: what the simulator adds to the loss's products for its exponentials and sums
NUM_PARAMETERS = 1 << 23  # that are measured: more than a cache holds, as after a backward; few enough for any device
MOST_TENSORS = 1024
INSTRUCTION_OPERATIONS = (
    100  # a forward or backward of one micro-batch was 0.2 to 0.3 ms longer than its layers, where an operation took 2.5 µs
)
MOST_ROWS = 2048
NOMINAL_LINK = {"cpu": (1e9, 1e-4), "cuda": (50e9, 2e-5)}  # bytes/s, s: only where there is one rank, which sends nothing


def profile_machine(
    device: torch.device,
    dtype: torch.dtype,
    parameter_sizes: Sequence[int],
    batch_size: int,
    embed_dim: int,
    ranks: Alone | None = None,
) -> Machine:
    """This rank's hardware, without links: those of one rank by itself are nominal.

    `parameter_sizes`: elements of every parameter of the model; kernels have a price of their own, so they matter beside the sum.
    `batch_size` is the global one. Times are those of DeepSpeed's ZeRO-1, or for bf16 of its BF16_Optimizer with fp32 sums, with
    torch's AdamW, and of `engine/clipping.py`, imitated pass by pass; a replica's messages are not in them.
    """
    ranks = ranks or Alone()
    sample = _sample(parameter_sizes)
    imitation = (_BF16Step if dtype == torch.bfloat16 else _ZeroStep)(sample, dtype, device)
    rows = min(batch_size, MOST_ROWS)
    cool = _Cooler(float("inf"), 0.0, device).before_forward  # the towers' backwards come before a step
    loss_s, reduce_s, step_s, host_s = ranks.mean(
        [
            _seconds(_loss_like(rows, embed_dim, device), device),
            _seconds(imitation.reduce, device, after=cool),
            _seconds(imitation.step, device, after=cool),
            _host_s(),
        ]
    )
    bandwidth, latency = NOMINAL_LINK.get(device.type, NOMINAL_LINK["cpu"])
    return Machine(
        name=device_identity(device)["device"],
        memory_bytes=float(ranks.least(_memory_bytes(device, ranks.ranks_on_node))),
        link_bytes_per_s=bandwidth,
        link_latency_s=latency,
        flops_per_s=(4 * embed_dim + ELEMENTWISE_FLOPS) * rows * rows / loss_s,
        optimizer_s_per_parameter=step_s / sum(sample),
        gradient_s_per_parameter=reduce_s / sum(sample),
        instruction_s=host_s,
    )


def _sample(sizes: Sequence[int]) -> list[int]:
    """As many sizes as have about `NUM_PARAMETERS` elements, in the proportions of all: every n-th, or all of them n times."""
    total = sum(sizes)
    if not total:
        return [NUM_PARAMETERS]
    every, times = -(-total // NUM_PARAMETERS), -(-min(NUM_PARAMETERS, MOST_TENSORS * total // len(sizes)) // total)
    return [min(size, NUM_PARAMETERS) for size in sorted(sizes)[::-1][::every]] * times


def _seconds(
    work: Callable[[], object],
    device: torch.device,
    after: Callable[[], object] = lambda: None,
    typical: Callable[[Iterable[float]], float] = statistics.median,
    repeats: int = 5,
) -> float:
    """Of one call, each after one of `after`, which is not counted, and after two calls that are not either."""
    clock, marks = _Clock(device), []
    for _ in range(repeats + 2):
        after()
        clock.wait()
        start = clock.mark()
        work()
        marks.append((start, clock.mark()))
    clock.wait()
    return typical(clock.between(*pair) for pair in marks[2:])


def _loss_like(rows: int, width: int, device: torch.device) -> Callable[[], Tensor]:
    """One side's logits [rows, rows], their softmax in both directions, and the gradient of its embeddings [rows, width]."""
    own, other = torch.randn(2, rows, width, device=device).unbind()

    def work() -> Tensor:
        logits = own @ other.T
        statistics_ = logits.logsumexp(1)
        d_logits = (logits - statistics_[:, None]).exp_().add_((logits - statistics_[None, :]).exp_()).div_(2 * rows)
        return d_logits @ other

    return torch.no_grad()(work)


class _Imitation:
    """Gradients of these sizes, and an AdamW over one flat fp32 copy of the weights, as DeepSpeed keeps them."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.sizes, self.total, self.dtype, self.device = list(sizes), sum(sizes), dtype, device
        self.weights = torch.zeros(self.total, dtype=dtype, device=device)
        self.master = nn.Parameter(torch.zeros(self.total, device=device))
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-6)

    def _clip_and_step(self) -> None:
        """`engine/clipping.py`, then the optimizer, then the weights back into their own precision."""
        pieces, offset = [], 0
        for size in self.sizes:
            pieces.append(self.master.grad.narrow(0, offset, size))
            offset += size
        square = torch.zeros(1, device=self.device)
        for piece in pieces:
            square += piece.float().square().sum().to(self.device)
        coefficient = (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for piece in pieces:
            piece.mul_(coefficient.to(piece.device))
        self.optimizer.step()
        self.weights.data.copy_(self.master.data)


class _ZeroStep(_Imitation):
    """`zero/stage_1_and_2.py` of DeepSpeed 0.19: `reduce_gradients`, then `step`; one replica, so without its messages."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device):
        super().__init__(sizes, dtype, device)
        self.gradients = [torch.full((size,), 1e-3, dtype=dtype, device=device) for size in sizes]

    @torch.no_grad()
    def reduce(self) -> None:
        """Gradients into a bucket (reduce_independent_p_g_buckets_and_remove_grads); divided (average_tensor); copied onto itself where
        the message would be (allreduce_and_copy_with_multiple_ranks); out of the bucket to their owner (copy_grads_in_partition)."""
        bucket = torch.empty(self.total, dtype=self.dtype, device=self.device)
        self._move_into(bucket)
        bucket.div_(1.0)
        bucket.copy_(bucket.view(-1))
        self._move_into(torch.empty(self.total, dtype=self.dtype, device=self.device))

    def _move_into(self, flat: Tensor) -> None:
        offset = 0
        for gradient in self.gradients:
            place = flat.view(-1).narrow(0, offset, gradient.numel())
            place.copy_(gradient.view(-1))
            gradient.data = place.data.view_as(gradient)
            offset += gradient.numel()

    @torch.no_grad()
    def step(self) -> None:
        """A look for overflow (fp16: has_overflow); the norm in double precision (get_grad_norm_direct); one flat gradient in fp32; fp16:
        the scale taken out; clip, step, weights back."""
        scaled = self.dtype == torch.float16
        if scaled:
            sum(torch.isfinite(g.amax()).logical_and(torch.isfinite(g.amin())).logical_not() for g in self.gradients)
        norms = [torch.linalg.vector_norm(g.data.to(torch.double).detach()).to(self.device) for g in self.gradients]
        torch.stack(norms).pow(2).sum()
        self.master.grad = torch.cat([gradient.view(-1) for gradient in self.gradients]).to(torch.float32)
        if scaled:
            self.master.grad.mul_(1.0)
        self._clip_and_step()
        self.master.grad = None


class _BF16Step(_Imitation):
    """`bf16_optimizer.py` of DeepSpeed 0.19 with fp32 sums: the gradients are views of one flat tensor, and stay."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device):
        super().__init__(sizes, dtype, device)
        self.master.grad = torch.full((self.total,), 1e-3, device=device)
        self.gradients = self.master.grad.split(self.sizes)

    @torch.no_grad()
    def reduce(self) -> None:
        """Flat, divided, copied back (buffered_allreduce_fallback)."""
        flat = torch.cat([gradient.view(-1) for gradient in self.gradients])
        flat.mul_(1.0)
        for gradient, reduced in zip(self.gradients, flat.split(self.sizes)):
            gradient.copy_(reduced)

    @torch.no_grad()
    def step(self) -> None:
        """The norm (get_global_norm_of_tensors); clip, step, weights back; sums set to zero in `step` and again in `zero_grad`."""
        torch.stack([gradient.detach().float().norm(2.0).to(self.device) for gradient in self.gradients]).pow(2).sum()
        self._clip_and_step()
        self.master.grad.zero_()
        self.master.grad.zero_()


def _host_s() -> float:
    """Host time of one instruction in the engine and DeepSpeed's part of it: that of `INSTRUCTION_OPERATIONS` operations on almost nothing."""
    tiny = torch.zeros(1)

    def work() -> None:
        for _ in range(INSTRUCTION_OPERATIONS):
            tiny.add(1.0)

    return _seconds(work, tiny.device)


def _memory_bytes(device: torch.device, ranks_on_node: int) -> int:
    """What one rank may use: all of its GPU; on a CPU its part of what is free, or of what the container may have."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free // ranks_on_node


# -- links -------------------------------------------------------------------------------------------------------------

BUCKET_BYTES = 2**24  # 4 M gradients in fp32, as in ds_configs/cpu_fp32.json
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 22


@dataclass(frozen=True)
class Links:
    """Bytes/s and seconds of a message between two ranks of a node, and of different nodes, while all ranks send at once."""

    link_bytes_per_s: float
    link_latency_s: float
    node_bytes_per_s: float = float("inf")
    node_latency_s: float = 0.0
    collective_s_per_byte: float = 0.0  # as in `Machine`


def measure_links(device: torch.device, ranks: Together) -> Links:
    """Every rank of the default group sends to its neighbour and hears from the other one: within its node, then across. All call together.

    With gloo tensors are in host memory, as in `engine/communication.py`.
    """
    world, rank, size = dist.get_world_size(), dist.get_rank(), ranks.ranks_on_node
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    first, found = rank - rank % size, {}
    members = min(size, world - first)
    if size > 1:
        found["link"] = _link((rank + 1 - first) % members + first, (rank - 1 - first) % members + first, wire, ranks)
    if world > size:
        found["node"] = _link((rank + size) % world, (rank - size) % world, wire, ranks)
    within, across = found.get("link", found.get("node")), found.get("node", (float("inf"), 0.0))
    messages_s = (world - 1) * (within[1] + BUCKET_BYTES / world / min(within[0], across[0]))
    passes_s = ranks.mean([_step_of_replicas_s(wire, world)])[0] / 3  # there and back, and there once more
    return Links(*within, *across, collective_s_per_byte=max(0.0, passes_s - messages_s) / BUCKET_BYTES)


def _step_of_replicas_s(wire: torch.device, world: int) -> float:
    """An all-reduce of a bucket of gradients, then an all-gather of as many weights, as ZeRO-1 does."""
    bucket = torch.zeros(BUCKET_BYTES // 4 // world * world, device=wire)
    parts = list(bucket.chunk(world))

    def step() -> None:
        dist.all_reduce(bucket)
        dist.all_gather(parts, parts[dist.get_rank()])

    return _seconds(step, wire)


def _link(to: int, source: int, wire: torch.device, ranks: Together) -> tuple[float, float]:
    """Bytes/s and seconds, the mean over the ranks of the quickest exchange: what else the machine does only adds to it."""
    small_s, large_s = ranks.mean([_message_s(to, source, num_bytes, wire) for num_bytes in (SMALL_BYTES, LARGE_BYTES)])
    return LARGE_BYTES / max(large_s - small_s, large_s / 4), small_s


def _message_s(to: int, source: int, num_bytes: int, wire: torch.device) -> float:
    given, taken = (torch.zeros(num_bytes, dtype=torch.uint8, device=wire) for _ in range(2))

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, to), dist.P2POp(dist.irecv, taken, source)]):
            work.wait()

    return _seconds(exchange, wire, typical=min, repeats=9)


# -- all of it, on all ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """What was measured: costs by branch, all layers in order, and the machine."""

    layers: Mapping[str, list[LayerCost]] = field(repr=False)
    machine: Machine
    pairs: LayerCost | None = None


def profile_together(
    layers: Mapping[str, Sequence[ProfiledLayer]],
    build_layer: Callable[[Any], nn.Module],
    inputs: Mapping[str, Callable[[int], Tensors]],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Mapping[str, Sequence[int]],
    batch_size: int,
    embed_dim: int,
    ranks_on_node: int,
    budget_s: float = 60.0,
    pairs: tuple[ProfiledLayer, Callable[[int], Tensors]] | None = None,
) -> Profile:
    """Measure on every rank of the default process group at the same time. All ranks call it together and get the same numbers.

    Branches share `budget_s` equally; it bounds the repeats, not the first two passes of each layer. `pairs`: a layer that scores the pairs
    of so many texts, and what it is given. For the rest see `profile_layers` and `profile_machine`.
    """
    ranks = Together(device, ranks_on_node)
    measured = {
        branch: profile_layers(
            specs, build_layer, inputs[branch], dtype, device, sizes[branch], Effort(budget_s=budget_s / len(layers)), ranks
        )
        for branch, specs in layers.items()
    }
    of_pairs = None
    if pairs is not None:
        spec, given = pairs
        (of_pairs,) = profile_layers([spec], build_layer, given, dtype, device, sizes["text"], Effort(budget_s=budget_s / 4), ranks)
    parameter_sizes = [p.numel() for specs in layers.values() for spec in specs for p in spec.template.parameters()]
    machine = profile_machine(device, dtype, parameter_sizes, batch_size, embed_dim, ranks)
    if dist.get_world_size() > 1:
        machine = replace(machine, ranks_per_node=ranks_on_node, **asdict(measure_links(device, ranks)))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Profile(measured, machine, of_pairs)
